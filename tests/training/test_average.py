"""A moving average of parameters, beside plain optax and NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib import models, serve
from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import ModelError, StateError
from shardlib.lowering.program import Program
from shardlib.models.config import TransformerConfig
from shardlib.training.fit import fit
from shardlib.training.settings import Settings
from shardlib.training.states import averaged, warmed_up_decay, with_average
from shardlib.training.validation import Validation
from tests.training.small import WIDTH, batch_of

STEPS = 4
TINY = TransformerConfig(
    name="tiny",
    vocab_size=64,
    layers=2,
    embed=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp=32,
    max_seq=32,
    compute_dtype="float32",
)


def unsharded() -> Any:
    """(graph, parameters) of the model on one device."""
    with nnx.use_eager_sharding(False):
        return nnx.split(Model(nnx.Rngs(0)), nnx.Param)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(
            WIDTH, 32, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs
        )
        self.down = nnx.Linear(
            32, WIDTH, kernel_metadata={"out_sharding": ("mlp", "embed")}, rngs=rngs
        )


def loss(model: Model, batch: Any) -> jax.Array:
    return ((model.down(nnx.gelu(model.up(batch["x"]))) - batch["y"]) ** 2).mean()


def compiled(mesh: dict[str, int], zero: int, decay: Any = 0.9) -> Program:
    return shardlib.compile(
        Model,
        loss,
        with_average(optax.adam(1e-2), decay),
        batch_of(0),
        topology=f"cpu:{np.prod([*mesh.values()])}",
        pin={"mesh": mesh, "zero": zero},
    )


def plain(decay: float) -> tuple[Any, Any]:
    """(parameters, their average) after some steps of plain optax, the average in NumPy."""
    graph, params = unsharded()
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        gradients = jax.grad(lambda p: loss(nnx.merge(graph, p), batch))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    average = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]
    for number in range(STEPS):
        params, state = step(params, state, batch_of(number))
        leaves = jax.tree.leaves(params)
        average = [
            decay * old + (1 - decay) * np.asarray(new)
            for old, new in zip(average, leaves, strict=True)
        ]
    return jax.tree.leaves(params), average


def close(tree: Any, wanted: Any) -> bool:
    return all(
        np.allclose(np.asarray(one), other, atol=1e-5)
        for one, other in zip(jax.tree.leaves(tree), wanted, strict=True)
    )


@pytest.mark.long
def test_an_average_is_that_of_plain_optax_on_any_mesh_and_is_restored_on_another(tmp_path: Path):
    params, average = plain(0.9)
    program = compiled({"fsdp": 4}, 3)
    held = batch_of(50, 5)

    def averaged_loss(model: Model, batch: Any) -> jax.Array:
        return loss(model, batch)

    settings = Settings(
        run=tmp_path,
        loggers=(),
        validation=Validation(data=held, every=STEPS, loss=averaged_loss, average=True),
    )
    fitted = fit(program, batch_of, steps=STEPS, settings=settings)
    assert close(fitted.state.params, params)
    state = averaged(program, fitted.state)
    assert close(state.params, average)
    arrays = fitted.state.opt_state.average
    assert any("fsdp" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(arrays))
    graph, like = unsharded()
    whole = jax.tree.unflatten(jax.tree.structure(like), [np.float32(one) for one in average])
    wanted = float(loss(nnx.merge(graph, whole), held))
    assert fitted.validations[STEPS]["validation/loss"] == pytest.approx(wanted, rel=1e-5)
    other = compiled({"data": 2, "tensor": 2}, 0)
    restored = Checkpoints(tmp_path / "checkpoints", read_only=True).restore(other).state
    assert close(averaged(other, restored).params, average)
    assert float(other.evaluate(averaged(other, restored), held)["loss"]) == pytest.approx(
        wanted, rel=1e-5
    )
    with pytest.raises(StateError, match="no average"):
        averaged(other, fitted.state.__class__(step=0, params={}, model_state={}, opt_state=()))


def test_a_decay_that_warms_up_and_one_that_is_none():
    assert float(warmed_up_decay(0.999)(np.int32(0))) == pytest.approx(0.1)
    assert float(warmed_up_decay(0.5)(np.int32(100))) == 0.5
    with pytest.raises(ModelError, match="decay is 1"):
        with_average(optax.sgd(1.0), 1.0)


@pytest.mark.long
def test_an_average_is_served(tmp_path: Path):
    """What is asked of an engine is answered by the average, and not by the parameters."""
    init, language_loss = models.build(TINY)
    rows = [models.example_batch(TINY, 4, 8) for _ in range(STEPS)]
    rows = [
        {
            name: np.random.default_rng((number, at)).integers(0, 64, one.shape).astype(np.int32)
            for at, (name, one) in enumerate(batch.items())
        }
        for number, batch in enumerate(rows)
    ]
    program = shardlib.compile(
        init,
        language_loss,
        with_average(optax.adam(3e-2), 0.5),
        rows[0],
        topology="cpu:2",
        pin={"mesh": {"fsdp": 2}, "zero": 3},
    )
    state = program.init(seed=0)
    average = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.params)
    for batch in rows:
        state, _ = program.step(state, batch)
        average = jax.tree.map(lambda old, new: (old + np.asarray(new)) / 2, average, state.params)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(STEPS, state, plan=program.plan, wait=True)
        restored = checkpoints.restore(program).state
    prompt = [5, 2, 7, 11, 60, 3]
    answers = {
        name: _answer(init, params, prompt)
        for name, params in {
            "average": averaged(program, restored).params,
            "trained": restored.params,
            "by hand": jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), average),
        }.items()
    }
    assert answers["average"] == answers["by hand"] != answers["trained"]


def _answer(init: Any, params: Any, prompt: list[int]) -> list[int]:
    engine = serve.Engine(
        init,
        lambda model, tokens: model(tokens),
        weights=jax.device_get(params),
        capacity=serve.Capacity(longest=32, slots=1),
    )
    return engine.generate([prompt], most=12)[0]
