from __future__ import annotations

import errno
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

import shardlib
from shardlib.checkpointing.store import Checkpoints, Keep
from shardlib.errors import (
    ArgumentError,
    CheckpointError,
    LayoutError,
    ModelError,
    RunError,
    TrainingError,
)
from shardlib.lowering.program import Program
from shardlib.training.fit import Fitted, fit
from shardlib.training.measures import JsonLines, Policy, by_step, read_records
from shardlib.training.rates import Ramp
from shardlib.training.run import RunFolder, status
from shardlib.training.settings import Settings, TrainConfig
from shardlib.training.validation import Validation
from tests.checkpointing.states import numbers
from tests.training.small import BATCH, Model, batch_of, compiled, loss


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled({"fsdp": 4})


@pytest.fixture(scope="module")
def whole(program: Program) -> Fitted:
    """Thirty steps without an interruption, and without a folder."""
    return fit(program, batch_of, steps=30)


def run(
    program: Program,
    folder: Path,
    steps: int = 30,
    batches: Any = batch_of,
    shown: io.StringIO | None = None,
    **settings: Any,
) -> Fitted:
    console = Console(file=shown, width=200) if shown is not None else None
    return fit(
        program,
        batches,
        steps=steps,
        settings=Settings(run=folder, **{"save_every": 7, "loggers": (), **settings}),
        console=console,
    )


def equal(one: Any, other: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, numbers(one), numbers(other)))


def stopping_at(step: int) -> Any:
    """Batches, the making of one of which is when SIGTERM comes."""

    def batches(number: int) -> dict[str, np.ndarray]:
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch_of(number)

    return batches


def test_a_seed_that_is_none_is_refused_before_there_is_a_folder(program: Program, tmp_path: Path):
    with pytest.raises(ArgumentError, match="seed 2147483648 is out of range"):
        fit(program, batch_of, steps=1, seed=2**31, settings=Settings(run=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_run_begins_where_it_is_told_to_and_goes_on_where_it_was(
    program: Program, whole: Fitted, tmp_path: Path
):
    begun: list[str] = []

    def start(own: Program):
        begun.append("now")
        state = own.init(seed=0)
        return own.step(own.step(state, batch_of(0))[0], batch_of(1))[0]

    settings = Settings(run=tmp_path, save_every=1)
    shifted = [
        fit(program, lambda step: batch_of(step + 2), steps=steps, start=start, settings=settings)
        for steps in (1, 3)
    ]
    assert begun == ["now"]
    assert shifted[-1].losses == whole.losses[2:5]


def test_a_run_that_ended_before_its_first_checkpoint_says_that_it_begins_anew(
    program: Program, tmp_path: Path
):
    def ending(number: int) -> dict[str, np.ndarray]:
        if number == 3:
            raise RuntimeError("the power is gone")
        return batch_of(number)

    said = (
        f"an earlier start of the run in {tmp_path} ended before its first whole checkpoint: it"
        " begins anew. Saving more often (save_every, --save-every) loses less"
    )
    first, second, third = io.StringIO(), io.StringIO(), io.StringIO()
    with pytest.raises(RuntimeError, match="the power is gone"):
        run(program, tmp_path, steps=5, batches=ending, shown=first)
    assert RunFolder(tmp_path).saved() == ()
    run(program, tmp_path, steps=4, shown=second)
    run(program, tmp_path, steps=5, shown=third)
    told = [" ".join(shown.getvalue().split()) for shown in (first, second, third)]
    assert [said in text for text in told] == [False, True, False]


@pytest.mark.long
def test_sigterm_saves_and_the_next_process_goes_on(
    program: Program, whole: Fitted, tmp_path: Path
):
    shown = io.StringIO()
    first = run(program, tmp_path, batches=stopping_at(12), shown=shown)
    assert first.stopped == "SIGTERM"
    assert 8 <= first.steps <= 12
    assert RunFolder(tmp_path).saved()[-1] == first.steps
    assert f"stopped by SIGTERM after {first.steps} of 30 steps, loss " in shown.getvalue()
    assert "and the same command goes on there" in shown.getvalue()
    assert status(tmp_path).state == "stopped" and status(tmp_path).processes == ()
    shown = io.StringIO()
    second = run(program, tmp_path, shown=shown)
    assert f"going on after step {first.steps} of 30" in shown.getvalue()
    assert second.losses == whole.losses
    assert second.resumed == first.steps
    assert equal(second.state, whole.state)
    third = run(program, tmp_path)
    assert len(third.seconds) == 30
    assert third.waited_seconds == 0
    assert third.losses == whole.losses
    assert equal(third.state, whole.state)


def test_status_of_a_run_that_goes_on(program: Program, tmp_path: Path):
    seen: list[str] = []

    def looking(step: int) -> dict[str, np.ndarray]:
        if step == 3:
            seen.append(status(tmp_path).state)
        return batch_of(step)

    with pytest.raises(TrainingError):
        run(
            program,
            tmp_path,
            batches=lambda step: {
                name: value * (np.nan if step == 5 else 1) for name, value in looking(step).items()
            },
            policy=Policy(action="stop"),
        )
    assert seen == ["training"] and status(tmp_path).state == "failed"


@pytest.mark.long
def test_a_process_that_dies_leaves_what_was_saved(program: Program, whole: Fitted, tmp_path: Path):
    def failing(step: int) -> dict[str, np.ndarray]:
        if step == 25:
            raise OSError("the disk with the data is gone")
        return batch_of(step)

    with pytest.raises(OSError, match="the disk with the data is gone"):
        run(program, tmp_path, batches=failing)
    assert RunFolder(tmp_path).saved() == (7, 14, 21)
    found = run(program, tmp_path)
    assert found.resumed == 21 and found.losses == whole.losses and equal(found.state, whole.state)
    records = by_step(read_records(tmp_path / "metrics.jsonl"))
    assert [*records] == [*range(1, 31)] and tuple(
        record["loss"] for record in records.values()
    ) == whole.losses
    for record in records.values():  # without a sequence these are examples
        assert record["tokens_per_second"] == pytest.approx(BATCH / record["seconds"])


def test_a_spike_sends_the_run_back_and_past_its_batches(program: Program, tmp_path: Path):
    def spiky(step: int) -> dict[str, np.ndarray]:
        batch = batch_of(step)
        return {"x": batch["x"], "y": batch["y"] * 1000} if step == 18 else batch

    shown = io.StringIO()
    found = run(program, tmp_path, batches=spiky, shown=shown, policy=Policy(window=8))
    assert "back to step 14, and past 5 batches" in shown.getvalue()
    # what a run computes that never had the five batches
    straight = fit(program, lambda step: batch_of(step if step < 14 else step + 5), steps=30)
    assert found.losses == straight.losses
    assert equal(found.state, straight.state)
    assert max(found.losses) < 5
    (event,) = (
        record
        for record in read_records(tmp_path / "metrics.jsonl")
        if record.get("event") == "rolled-back"
    )
    assert event["step"] == 14 and event["bad_step"] == 19 and event["batches_left_out"] == 5


@pytest.mark.long
def test_a_spike_is_left_out_by_a_guard(tmp_path: Path):
    def spiky(step: int) -> dict[str, np.ndarray]:
        batch = batch_of(step)
        return {
            "x": batch["x"],
            "y": batch["y"] * (np.nan if step == 12 else 1000 if step in (18, 19) else 1),
        }

    guarded = shardlib.compile(
        Model,
        loss,
        optax.adam(1e-2),
        batch_of(0),
        topology="cpu:2",
        pin={"mesh": {"data": 2}},
        guards=shardlib.Guards(spike=True, clip=1.0),
    )
    shown = io.StringIO()
    found = run(
        guarded, tmp_path, batches=spiky, shown=shown, policy=Policy(window=8, action="skip")
    )
    assert [step for step in (13, 19, 20) if f"step {step} was left out" in shown.getvalue()] == [
        13,
        19,
        20,
    ] and shown.getvalue().count("was left out") == 3
    assert [
        record["step"]
        for record in read_records(tmp_path / "metrics.jsonl")
        if record.get("event") == "skipped"
    ] == [13, 19, 20]
    kept = [value for number, value in enumerate(found.losses, 1) if number not in (13, 19, 20)]
    assert max(kept) < 5 and kept[-1] < 0.7 * kept[0]
    with pytest.raises(TrainingError, match="the loss of step 10 of 30 is nan"):
        fit(
            guarded,
            lambda step: {
                name: value * (np.nan if step >= 4 else 1) for name, value in batch_of(step).items()
            },
            steps=30,
            settings=Settings(policy=Policy(skips=5)),
        )


def test_losses_that_stay_bad_end_the_run(program: Program, tmp_path: Path):
    def poisoned(step: int) -> dict[str, np.ndarray]:
        return {
            name: value * (np.nan if step >= 10 else 1) for name, value in batch_of(step).items()
        }

    with pytest.raises(TrainingError) as caught:
        run(program, tmp_path, batches=poisoned, policy=Policy(attempts=2))
    assert (
        str(caught.value)
        == "the loss of step 8 of 30 is nan: its batch has numbers that are not finite (128 of x, 128"
        " of y), after the run went back 2 times to step 7 and past other batches\nTry: batches"
        " without them; data(12)"
    )
    with pytest.raises(TrainingError) as caught:
        fit(program, poisoned, steps=30)
    assert str(caught.value) == (
        "the loss of step 11 of 30 is nan: its batch has numbers that are not finite (128 of x, 128"
        " of y)\nTry: batches without them; data(10)"
    )
    assert RunFolder(tmp_path).saved() == (7,)


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # reads that Orbax gave up come back to a loop that it has closed
def test_a_damaged_checkpoint_is_passed_over(program: Program, whole: Fitted, tmp_path: Path):
    run(program, tmp_path, batches=stopping_at(26))
    newest = RunFolder(tmp_path).saved()[-1]
    path = tmp_path / "checkpoints" / str(newest) / "about" / "metadata"
    data = bytearray(path.read_bytes())
    data[data.index(b'"offset": 0') + 10] ^= 1
    path.write_bytes(bytes(data))
    shown = io.StringIO()
    found = run(program, tmp_path, shown=shown)
    assert found.resumed == 21
    assert f"The checkpoint of step {newest} is damaged" in shown.getvalue().replace("\n", " ")
    assert found.losses == whole.losses
    assert (tmp_path / "checkpoints" / f"{newest}.damaged").is_dir()


def test_a_save_that_fails_is_said_and_training_goes_on(
    program: Program, whole: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real, calls = Checkpoints.save, [0]

    def failing(self: Checkpoints, *arguments: Any, **words: Any) -> None:
        calls[0] += 1
        if calls[0] <= 2:
            raise CheckpointError("the disk is full")
        real(self, *arguments, **words)

    monkeypatch.setattr(Checkpoints, "save", failing)
    shown = io.StringIO()
    found = run(program, tmp_path, shown=shown)
    assert shown.getvalue().count("the disk is full") == 2
    assert found.losses == whole.losses
    assert RunFolder(tmp_path).saved() == (21, 28, 30)
    monkeypatch.setattr(Checkpoints, "save", lambda *arguments, **words: failing_always())
    with pytest.raises(CheckpointError, match="no room at all"):
        run(program, tmp_path / "other", steps=4)


def test_metrics_without_room_are_said_once(
    program: Program, whole: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(self: JsonLines, record: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JsonLines, "write", full)
    shown = io.StringIO()
    assert run(program, tmp_path, shown=shown).losses == whole.losses
    assert (
        shown.getvalue().count(
            "metrics cannot be written: No space left on device; training goes on"
        )
        == 1
    )
    (tmp_path / "plan.json").unlink()
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(RunError, match="cannot be written: "):
        run(program, tmp_path)


def failing_always() -> None:
    raise CheckpointError("no room at all")


@pytest.mark.long
def test_batches_that_grow(tmp_path: Path):
    ramp = Ramp(first=8, last=24, increment=8, examples=96)
    sizes = [ramp.at(step)[0] for step in range(14)]
    programs = {size: compiled({"fsdp": 4}, size) for size in sorted(set(sizes))}
    first, *later = [(step, programs[size]) for size, step, _ in ramp.stages()]
    state, losses = programs[8].init(0), []
    for step, size in enumerate(sizes):
        state, metrics = programs[size].step(state, batch_of(step, size))
        losses.append(float(metrics["loss"]))

    def batches(step: int) -> dict[str, np.ndarray]:
        if step == 9 and not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return batch_of(step, sizes[step] if step < len(sizes) else 24)

    for _ in range(2):
        found = fit(
            first[1],
            batches,
            steps=14,
            later=later,
            settings=Settings(run=tmp_path / "run", loggers=()),
        )
    assert 0 < found.resumed < 14 and found.losses == tuple(losses) and equal(found.state, state)
    with pytest.raises(LayoutError) as caught:
        fit(first[1], batches, steps=14, later=[(3, compiled({"tensor": 4}))])
    assert str(caught.value).startswith(
        "programs cannot take over from one another: the one after step 3 lays out params."
    )


def test_status_from_outside(program: Program, tmp_path: Path):
    run(program, tmp_path, steps=10, keep=Keep(newest=1))
    found = status(tmp_path)
    assert (found.step, found.checkpoints, found.steps) == (10, (10,), 0)
    assert found.loss is not None
    assert found.pace.step_seconds > 0
    assert 0 <= found.pace.data_share < 1
    assert found.pace.predicted_seconds == program.plan.estimate.step_seconds
    assert str(found).splitlines()[0].startswith(f"{tmp_path}: ")
    assert "checkpoints: 10" in str(found)
    assert found.state == "finished"


def test_a_trace_on_demand(program: Program, tmp_path: Path):
    run(program, tmp_path, steps=6, profile=(3, 2))
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["step-3"]
    assert any(path.suffix == ".gz" for path in (tmp_path / "profiles").rglob("*"))


def test_bad_requests(program: Program, tmp_path: Path):
    with pytest.raises(ModelError) as caught:
        Settings(save_every=0, hang_seconds=0, profile=(0, 1))
    assert isinstance(caught.value, ArgumentError)
    assert str(caught.value) == (
        "shardlib.Settings cannot use its arguments:\n"
        "  - save_every is 0, not an integer of at least 1\n"
        "  - hang_seconds is 0, not a finite number of seconds above 0\n"
        "  - profile is (0, 1), not the first step and the number of steps, integers of at least 1\n"
        "Try: save_every=50; hang_seconds=600.0, or None; profile=(10, 3), or None"
    )
    with pytest.raises(ModelError, match="the program has no guard that could\nTry: "):
        fit(program, batch_of, steps=1, settings=Settings(policy=Policy(action="skip")))
    fit(
        program,
        batch_of,
        steps=1,
        settings=Settings(run=tmp_path, loggers=()),
        identity={"data": "a"},
    )
    with pytest.raises(RunError, match='data is "b", the run has "a"'):
        fit(program, batch_of, steps=1, settings=Settings(run=tmp_path), identity={"data": "b"})


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (lambda: batch_of(0), "the function <lambda>"),
        ((batch_of(step) for step in range(3)), "a generator"),
        (type("Rows", (), {"__init__": lambda self: None}), "the class Rows"),
        (5, "5"),
    ],
)
def test_data_that_give_no_batch_of_a_step_are_refused(program: Program, data: Any, kind: str):
    with pytest.raises(ArgumentError) as caught:
        fit(program, data, steps=1)
    assert str(caught.value) == (
        f"shardlib.fit cannot use its arguments: data is {kind}, not a dataset or a function of the"
        " step\nTry: data=lambda step: batch"
    )


def test_settings_of_another_kind_name_the_field():
    with pytest.raises(ModelError) as caught:
        Policy(spike="20", window=True)  # pyright: ignore
    assert isinstance(caught.value, ArgumentError)
    assert str(caught.value) == (
        "shardlib.training.measures.Policy cannot use its arguments:\n  - window is True, not an"
        " integer\n  - spike is '20', not a number\nTry: window=64; spike=20.0"
    )
    with pytest.raises(CheckpointError) as caught:
        Keep(newest="3", best=1)  # pyright: ignore
    assert str(caught.value) == (
        "shardlib.checkpointing.store.Keep cannot use its arguments:\n  - newest is '3', not an"
        " integer or None\n  - best is 1, not a string or None\nTry: newest=3; best=None"
    )
    with pytest.raises(ModelError) as caught:
        Validation(data=batch_of(0), every=None, loss="mean")  # pyright: ignore
    assert str(caught.value) == (
        "shardlib.training.validation.Validation cannot use its arguments:\n  - every is None, not"
        " an integer\n  - loss is 'mean', not a function or None\nTry: every=100; loss=None"
    )
    with pytest.raises(ModelError) as caught:
        TrainConfig(steps="10", profile=(1, 2.5), pin=["tensor"])  # pyright: ignore
    assert str(caught.value) == (
        "shardlib.training.settings.TrainConfig cannot use its arguments:\n  - steps is '10', not an"
        " integer\n  - pin is a list, not a mapping or None\n  - profile is (1, 2.5), not two"
        " integers or None\nTry: steps=400; pin=None; profile=None"
    )
    assert Policy(window=np.int64(8), spike=np.float32(3)).window == 8


@pytest.mark.long
def test_another_mesh_goes_on(program: Program, whole: Fitted, tmp_path: Path):
    run(program, tmp_path, batches=stopping_at(14))
    found = run(compiled({"data": 2, "fsdp": 2, "tensor": 2}), tmp_path)
    assert 0 < found.resumed < 20
    np.testing.assert_allclose(found.losses, whole.losses, rtol=1e-6)
    stored = json.loads((tmp_path / "plan.json").read_text())
    assert stored["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
