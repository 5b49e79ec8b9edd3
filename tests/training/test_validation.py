"""Validation of whole sets, against the loss of all rows on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.errors import BatchError, ModelError
from shardlib.lowering.program import Program
from shardlib.training.fit import fit
from shardlib.training.settings import Settings
from shardlib.training.validation import Validation, validator

WIDE, CLASSES, ROWS = 12, 5, 37


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (WIDE, CLASSES)), "b": jnp.zeros(CLASSES)}


def logits(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> jax.Array:
    return batch["x"] @ params["w"] + params["b"]


def each(params: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch), batch["y"])


@flax.struct.dataclass
class Hits:
    """A metric with the interface of `clu.metrics`."""

    hit: jax.Array
    seen: jax.Array

    def merge(self, other: Hits) -> Hits:
        return Hits(hit=self.hit + other.hit, seen=self.seen + other.seen)

    def compute(self) -> jax.Array:
        return self.hit / self.seen


def loss(params: Any, batch: Any) -> Any:
    """A masked mean, with a mean, a sum and an object beside it."""
    losses, mask = each(params, batch), batch["mask"]
    hits = jnp.where(logits(params, batch).argmax(-1) == batch["y"], 1.0, 0.0)
    return shardlib.WeightedMean(total=jnp.sum(losses * mask), weight=mask.sum()), {
        "mean": losses.mean(),
        "sum": losses.sum(),
        "masked": mask.mean(),
        "norm": jnp.sum(params["w"] ** 2),
        "accuracy": Hits(hit=hits.sum(), seen=jnp.asarray(hits.shape[0], jnp.float32)),
    }


def rows_of(seed: int, rows: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(seed)
    return {
        "x": drawn.normal(size=(rows, WIDE)).astype(np.float32),
        "y": drawn.integers(0, CLASSES, rows).astype(np.int32),
        "mask": (drawn.random(rows) < np.linspace(0.05, 1, rows)).astype(np.float32),
    }


def program(mesh: Mapping[str, int], **pin: Any) -> Program:
    axes = {"w": ("embed", "classes"), "b": ("classes",)}
    return shardlib.compile(
        shardlib.tree(init, axes),
        loss,
        optax.sgd(1e-1),
        rows_of(0, 16),
        topology=f"cpu:{np.prod([*mesh.values()])}",
        pin={"mesh": dict(mesh), **pin},
    )


@pytest.fixture(scope="module")
def trained() -> Program:
    return program({"data": 2, "fsdp": 2}, zero=3, microbatches=2)


def reference(params: Any, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """All rows at once, in NumPy and float64."""
    w, b = (np.asarray(jax.device_get(params[name]), np.float64) for name in "wb")
    z = rows["x"].astype(np.float64) @ w + b
    z -= z.max(-1, keepdims=True)
    losses = np.log(np.exp(z).sum(-1)) - z[np.arange(len(z)), rows["y"]]
    return {
        "validation/loss": float((losses * rows["mask"]).sum() / rows["mask"].sum()),
        "validation/mean": float(losses.mean()),
        "validation/sum": float(losses.sum()),
        "validation/masked": float(rows["mask"].mean()),
        "validation/norm": float((w**2).sum()),
        "validation/accuracy": float((z.argmax(-1) == rows["y"]).mean()),
    }


def close(found: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return found.keys() == wanted.keys() and all(
        abs(found[name] - value) <= 2e-6 * max(abs(value), 1) for name, value in wanted.items()
    )


@pytest.mark.long
@pytest.mark.parametrize("rows", [0, 10, None])
def test_rows_that_do_not_divide_are_validated_exactly(trained: Program, rows: int | None):
    held, state = rows_of(9, ROWS), trained.init(3)
    found = validator(Validation(data=held, rows=rows), trained).validate(state)
    assert close(found, reference(state.params, held))


@pytest.mark.long
def test_a_function_gives_batches_of_any_size(trained: Program):
    held, state = rows_of(9, ROWS), trained.init(3)

    def batches() -> Any:
        for start, stop in ((0, 1), (1, 20), (20, ROWS)):
            yield {name: one[start:stop] for name, one in held.items()}

    asked = Validation(data=batches, name="held-out")
    found = validator(asked, trained).validate(state)
    wanted = reference(state.params, held)
    assert close(
        found, {name.replace("validation", "held-out"): one for name, one in wanted.items()}
    )


@pytest.mark.long
def test_fit_validates_every_so_often_and_at_the_end(trained: Program):
    held, asked = rows_of(9, ROWS), {}

    def batch_of(step: int) -> dict[str, np.ndarray]:
        return rows_of(step, 16)

    asked = Settings(validation=Validation(data=held, every=2))
    fitted = fit(trained, batch_of, steps=5, settings=asked)
    assert [*fitted.validations] == [2, 4, 5]
    assert close(fitted.validations[5], reference(fitted.state.params, held))
    plain = fit(trained, batch_of, steps=5)
    assert fitted.losses == plain.losses


def test_what_rows_of_different_batches_meet_in_is_refused(trained: Program):
    def contrastive(params: Any, batch: Any) -> Any:
        z = logits(params, batch)
        scores = z @ z.T
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))

    def ratio(params: Any, batch: Any) -> Any:
        return jnp.sum(each(params, batch) * batch["mask"]) / batch["mask"].sum()

    held, state = rows_of(9, ROWS), trained.init(3)
    with pytest.raises(BatchError, match="cannot be put together from batches"):
        validator(Validation(data=held, loss=ratio), trained).validate(state)
    with pytest.raises(BatchError, match="cannot be put together from batches") as error:
        validator(Validation(data=held, loss=contrastive), trained).validate(state)
    assert "loss: " in str(error.value) and "rows=None" in str(error.value)
    found = validator(Validation(data=held, loss=contrastive, rows=None), trained).validate(state)
    wanted = contrastive(jax.device_get(state.params), held)
    assert found["validation/loss"] == pytest.approx(float(wanted), rel=1e-5)


def test_what_is_asked_for_is_checked(trained: Program):
    with pytest.raises(ModelError, match=r"every is 0.*\n.*rows is -1"):
        Validation(data={}, every=0, rows=-1)
    with pytest.raises(BatchError, match="no rows"):
        empty = {name: one[:0] for name, one in rows_of(9, 2).items()}
        validator(Validation(data=empty), trained).validate(trained.init(0))
