"""Assertions for other people's tests, and programs of shardlib's, whose collectives are planned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib
from shardlib.testing import assert_collectives, assert_no_unplanned
from tests.diagnosis import lookup_model as model
from tests.diagnosis.causes import layout

pytestmark = pytest.mark.long


def dense(x, w):
    return x @ w


SHAPES = model.array((64, 128), "data", "model"), model.array((128, 64), "model")


def test_counts_of_collectives() -> None:
    assert_collectives(dense, *SHAPES, {"all-reduce": 1}, topology="cpu:8")
    assert_collectives(dense, *SHAPES, {"all-reduce over model": 1}, topology="cpu:8")
    with pytest.raises(AssertionError, match=r"(?s)all-reduce: 1, expected 2.*test_testing.py:\d+"):
        assert_collectives(dense, *SHAPES, {"all-reduce": 2}, topology="cpu:8")
    with pytest.raises(AssertionError, match="all-gather: 0, expected 1; all-reduce: 1, expected"):
        assert_collectives(dense, *SHAPES, {"all-gather": 1}, topology="cpu:8")


@pytest.mark.parametrize(
    "expected", [{"gather": 1}, 3, None, {"all-reduce": -1}, {"all-reduce": "1"}]
)
def test_counts_have_kinds(expected: object) -> None:
    with pytest.raises(shardlib.ArgumentError, match="counts of collectives"):
        assert_collectives(dense, *SHAPES, expected, topology="cpu:8")


def test_axes_of_counts_are_those_of_the_mesh() -> None:
    with pytest.raises(shardlib.ArgumentError, match="modle is no axis of the mesh"):
        assert_collectives(dense, *SHAPES, {"all-reduce over modle": 0}, topology="cpu:8")


def test_what_is_not_inherent_fails() -> None:
    assert_no_unplanned(dense, *SHAPES, topology="cpu:8")
    with pytest.raises(AssertionError, match="neither inherent nor planned"):
        assert_no_unplanned(model.step, *model.arguments(), topology="cpu:8")


def cross_entropy(params, tokens, axis):
    x = layout(params["embedding"][tokens], "data")
    logits = layout(x @ params["head"], "data", None, "model")
    logits = layout(logits, "data", None, axis)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def step_of_chosen(params, tokens):
    """Rows of the probabilities are chosen by index, and the next tokens from the last of them."""

    def loss(params):
        probabilities = jax.nn.softmax(params["embedding"][tokens] @ params["head"])
        chosen = jnp.take_along_axis(probabilities, tokens[..., None], -1)
        return -jnp.mean(jnp.log(chosen)), jnp.argmax(probabilities[:, -1], -1)

    return jax.grad(loss, has_aux=True)(params)


def test_sums_over_a_sharded_vocabulary_are_inherent_and_a_gather_of_the_logits_is_not() -> None:
    params = {
        "embedding": model.array((model.VOCABULARY, model.EMBED)),
        "head": model.array((model.EMBED, model.VOCABULARY), None, "model"),
    }
    tokens = model.array((model.BATCH, model.LENGTH), "data", dtype=jnp.int32)
    assert_no_unplanned(cross_entropy, params, tokens, "model", topology="cpu:8")
    assert_no_unplanned(step_of_chosen, params, tokens, topology="cpu:8")
    diagnosis = shardlib.why(cross_entropy, params, tokens, None, topology="cpu:8", cures=0)
    (gathered,) = diagnosis.unexplained
    local = model.BATCH * model.LENGTH * model.VOCABULARY * 4 / model.MESH.size
    assert (gathered.kind, gathered.bytes) == ("all-gather", local)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(64, 256, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs)
        self.down = nnx.Linear(
            256, 64, kernel_metadata={"out_sharding": ("mlp", "embed")}, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def test_collectives_of_a_program_are_planned_and_have_the_lines_of_the_loss() -> None:
    batch = {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in "xy"}
    program = shardlib.compile(
        Model,
        loss,
        optax.adamw(1e-3),
        batch,
        topology="cpu:8",
        pin={"mesh.fsdp": 4, "mesh.tensor": 2},
    )
    assert_no_unplanned(program)
    diagnosis = shardlib.why(program, cures=0)
    assert "planned" in {row.cause for row in diagnosis.rows}
    lines = {row.source.user.file for row in diagnosis.rows if row.source.user}
    assert lines == {__file__}
    tensor = next(row for row in diagnosis.rows if row.axes == ("tensor",))
    assert tensor.source.user is not None and "self.down(" in str(diagnosis)
