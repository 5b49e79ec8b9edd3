"""A step of the user's own in the training loop, and what a user adds to a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import shardlib
from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import ModelError, RunError, TrainingError
from shardlib.frontend.steps import StepProgram
from shardlib.training.callbacks import BestCheckpoint, EarlyStop, LearningRate, Moment, Samples
from shardlib.training.fit import Fitted, fit
from shardlib.training.measures import Policy, by_step, read_records
from shardlib.training.run import RunFolder
from shardlib.training.settings import Settings
from shardlib.training.validation import Validation

WIDE, ROWS = 16, 8
RATE = optax.cosine_decay_schedule(0.1, 20)
OPTIMIZER = optax.inject_hyperparams(optax.adam)(learning_rate=RATE)


def init(key: jax.Array) -> dict[str, Any]:
    params = {"w": jax.random.normal(key, (WIDE, WIDE)), "b": jnp.zeros(WIDE)}
    return {"params": params, "opt_state": OPTIMIZER.init(params), "key": key}


def error(state: Any, batch: Any) -> jax.Array:
    params = state["params"]
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2)


def step(state: Any, batch: Any) -> Any:
    key, noise = jax.random.split(state["key"])
    noisy = {**batch, "x": batch["x"] + 0.01 * jax.random.normal(noise, batch["x"].shape)}
    value, gradients = jax.value_and_grad(lambda params: error({"params": params}, noisy))(
        state["params"]
    )
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "key": key}, {"error": {"mean": value}}


def batch_of(number: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    x = np.random.default_rng((3, number)).normal(size=(rows, WIDE)).astype(np.float32)
    return {"x": x, "y": np.roll(x, 1, 1)}


def compiled(mesh: dict[str, int], zero: int) -> StepProgram:
    topology = f"cpu:{np.prod([*mesh.values()])}"
    pin = {"mesh": mesh, "zero": zero}
    return shardlib.compile_step(init, step, batch_of(0), topology=topology, pin=pin)


@pytest.fixture(scope="module")
def program() -> StepProgram:
    return compiled({"fsdp": 4}, 3)


def run(program: StepProgram, folder: Path | None, steps: int = 12, **settings: Any) -> Fitted:
    shown = settings.pop("shown", None)
    kept = {"save_every": 5, "loggers": (), "policy": Policy(metric="error.mean"), **settings}
    console = Console(file=shown, width=200) if shown is not None else None
    return fit(
        program, batch_of, steps=steps, settings=Settings(run=folder, **kept), console=console
    )


def raw(state: Any) -> list[np.ndarray]:
    data = {**state, "key": jax.random.key_data(state["key"])}
    return [np.asarray(leaf) for leaf in jax.tree.leaves(data)]


@pytest.mark.long
def test_a_step_of_ones_own_trains_as_plain_jax_and_goes_on_where_it_was(
    program: StepProgram, tmp_path: Path
):
    whole = run(program, None)
    state, plain = init(jax.random.key(0)), jax.jit(step)
    losses = []
    for number in range(12):
        state, metrics = plain(state, batch_of(number))
        losses.append(float(metrics["error"]["mean"]))
    assert np.allclose(whole.losses, losses, rtol=1e-5)
    for one, other in zip(raw(whole.state), raw(state), strict=True):
        assert np.allclose(one, other, atol=1e-5)

    def interrupted(moment: Moment) -> None:
        if moment.event == "step" and moment.step == 7:
            moment.stop("for now")

    first = run(program, tmp_path, callbacks=(interrupted,))
    assert (first.steps, first.stopped) == (7, "for now")
    again = run(program, tmp_path)
    assert again.resumed == 7 and again.losses == whole.losses
    assert all((a == b).all() for a, b in zip(raw(again.state), raw(whole.state), strict=True))
    other = compiled({"data": 2, "tensor": 2}, 0)
    restored = Checkpoints(tmp_path / "checkpoints", read_only=True).restore(other)
    assert all((a == b).all() for a, b in zip(raw(restored.state), raw(whole.state), strict=True))
    with pytest.raises(RunError, match="lr"):
        changed = shardlib.compile_step(
            init, lambda s, b: step(s, {**b, "x": b["x"] * 2.0}), batch_of(0), topology="cpu:1"
        )
        run(changed, tmp_path)


def test_a_step_says_what_stands_for_its_loss(program: StepProgram):
    with pytest.raises(ModelError, match=r"returns no metric 'loss'; it returns error\.mean"):
        fit(program, batch_of, steps=1)


def test_early_stop_ends_a_run_and_it_stays_ended(program: StepProgram, tmp_path: Path):
    held = Validation(data=batch_of(99, 11), every=2, loss=lambda s, b: jnp.mean(b["x"] + s["opt_state"].count))  # fmt: skip

    def callbacks(patience: int) -> tuple[Any, ...]:
        return (EarlyStop(patience=patience), BestCheckpoint())

    shown = io.StringIO()
    first = run(program, tmp_path, validation=held, callbacks=callbacks(2), shown=shown)
    assert first.steps == 6 and "has not improved" in first.stopped
    assert "the run ends after step 6 of 12" in shown.getvalue()
    assert RunFolder(tmp_path).saved() == (2, 5, 6)  # 2 is the best one
    again = run(program, tmp_path, validation=held, callbacks=callbacks(2))
    assert (again.resumed, again.steps) == (6, 6)
    longer = run(program, tmp_path, validation=held, callbacks=callbacks(3))
    assert (longer.resumed, longer.steps) == (6, 8)
    assert [*longer.validations] == [2, 4, 6, 8]
    assert 2 in RunFolder(tmp_path).saved()


def test_validations_of_a_step_are_those_of_the_whole_set(program: StepProgram, tmp_path: Path):
    held = batch_of(99, 11)
    found = run(
        program,
        tmp_path,
        4,
        validation=Validation(data=held, every=3, loss=error),
        callbacks=(
            LearningRate(),
            Samples(lambda _, state: f"bias {float(state['params']['b'].sum()):.4f}", every=4),
        ),
    )
    state = {"params": jax.device_get(found.state["params"])}
    assert found.validations[4]["validation/loss"] == pytest.approx(float(error(state, held)), rel=1e-5)  # fmt: skip
    records = read_records(RunFolder(tmp_path).metrics)
    rates = [record["learning_rate"] for record in by_step(records).values()]
    assert np.allclose(rates, [RATE(number) for number in range(4)])
    (sample,) = [record for record in records if record.get("event") == "sample"]
    assert sample["text"] == f"bias {state['params']['b'].sum():.4f}"


def test_a_callback_that_fails_loses_nothing(program: StepProgram, tmp_path: Path):
    def broken(moment: Moment) -> None:
        if moment.step == 3:
            raise KeyError("oops")

    with pytest.raises(TrainingError, match="the callback broken failed after step 3: KeyError"):
        run(program, tmp_path, callbacks=(broken,))
    assert RunFolder(tmp_path).saved() == (3,)
    assert run(program, tmp_path, 4).resumed == 3


def test_settings_of_callbacks_are_checked(tmp_path: Path):
    with pytest.raises(ModelError, match="best checkpoint needs a folder"):
        Settings(callbacks=(BestCheckpoint(),))
    with pytest.raises(ModelError, match="not a tuple of loggers"):
        Settings(loggers=[])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="patience is 0"):
        EarlyStop(patience=0)
    with pytest.raises(ModelError, match="one of min, max"):
        BestCheckpoint("accuracy", mode="most")
    with pytest.raises(ModelError, match="does not say what a validation computes"):
        run(compiled({"data": 1}, 0), None, validation=Validation(data=batch_of(0)))
