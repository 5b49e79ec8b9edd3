"""The training loop: from a program and a stream of batches to a trained state, through whatever
happens on the way.

    program = shardlib.compile(init, loss, optimizer, batch)
    settings = shardlib.Settings(run="runs/first")
    fitted = shardlib.fit(program, batch_of, steps=1000, settings=settings)

With a folder, a run is what the folder holds: a process that was killed, preempted or hung is
started again with the same words, on the same machine or another one, and goes on at the newest
good checkpoint. What follows depends on the state and the step alone, so the losses are those of a
run that was never interrupted.

The steps themselves are in `shardlib.training.stepping`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rich.console import Console

from shardlib.data.batches.loader import Rows
from shardlib.frontend.steps.step_program import StepProgram
from shardlib.lowering.islands.program import IslandsProgram
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.training.display import Display
from shardlib.training.settings import Settings
from shardlib.training.stepping.batches import BatchOf
from shardlib.training.stepping.records import in_order
from shardlib.training.stepping.steps import Loop
from shardlib.training.stepping.task import Task
from shardlib.untrusted.arguments import Kind, read_seed, require_kinds
from shardlib.untrusted.json_types import JsonMapping


def _count(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and value >= 0


#: What the arguments of `fit` must be.
_KINDS: Mapping[str, Kind] = {
    "program": (
        lambda value: isinstance(value, Program | IslandsProgram | StepProgram),
        "program",
        "program=shardlib.compile(init, loss, optimizer, batch), or shardlib.compile_step(...)",
    ),
    "data": (
        lambda value: callable(value) or hasattr(value, "rows"),
        "dataset or function of the step",
        "data=lambda step: batch",
    ),
    "steps": (_count, "number of steps, from 0 on", "steps=1000"),
    "settings": (
        lambda value: isinstance(value, Settings),
        "settings",
        'settings=shardlib.Settings(run="runs/first")',
    ),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """A run, as far as it went.

    Attributes:
        state: after the last step.
        steps: steps done, by this process and those before it.
        losses: of every step, where it is known: with a folder of all steps, otherwise of this
            process.
        seconds: of every step, where they are known, like `losses`.
        waited_seconds: of those of this process, spent waiting for batches.
        saved_seconds: beside them, spent on saving by this process.
        resumed: the step that this process began after; 0 at the very beginning.
        stopped: why it ended before the last step: "SIGTERM", or what a callback said; empty where
            it did not.
        validations: metrics of every validation by name, by step, where they are known, like
            `losses`.
        busy: share of the processors that other programs used meanwhile; None where it is not
            known.
    """

    state: TrainState
    steps: int
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    waited_seconds: float
    saved_seconds: float
    resumed: int = 0
    stopped: str = ""
    validations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    busy: float | None = None


def fit(
    program: Program | StepProgram,
    data: Rows | BatchOf,
    *,
    steps: int,
    seed: int = 0,
    settings: Settings | None = None,
    console: Console | None = None,
    identity: JsonMapping | None = None,
    tokens: int = 0,
    advice: str = "a smaller learning rate, or another seed",
    later: Sequence[tuple[int, Program]] = (),
) -> Fitted:
    """Trains for a number of steps in all, from the newest checkpoint of the run where there is
    one.

    Args:
        program: what to run: of `shardlib.compile`, or of `shardlib.compile_step`, whose metrics
            have a "loss", or another one that `Policy(metric=...)` names.
        data: a dataset (`shardlib.data.open.read`), of which every process reads the rows that its
            devices hold; or a function from the step, counted from 0, to the whole global batch on
            the host, which must give the same batch whenever it is asked for a step; with a folder,
            it is asked for the first one whenever the run goes on.
        steps: in all, those of earlier processes of the run included; a run that has done them is
            given back as it is.
        seed: of `program.init`, where nothing is restored.
        settings: folder, checkpoints, what follows a bad loss, validation, callbacks, loggers; by
            default those of `Settings()`, which keep nothing.
        console: where to show progress; nowhere by default.
        identity: what is trained, as plain data, for `run.json`: whoever resumes must say the same.
        tokens: of a batch, for the tokens a second that `console` shows; 0 where they are not
            known.
        advice: what to try when the loss is no longer finite.
        later: (steps before it, program) of programs that take over, in that order: for batches
            that grow (`shardlib.training.measures.rates.Ramp`). States must be laid out alike, as
            they are where `mesh`, `rules` and `zero` are pinned to those of the first plan. A
            function of the step gives batches of the size of its step.

    Returns:
        The last state, with the loss and the seconds of every step; also where the run was stopped
        before its end (`Fitted.stopped`).

    Raises:
        ArgumentError: arguments of another kind than is asked for, all of them listed; or a seed
            that is no integer from 0 to 2**31 - 1.
        LayoutError: a program that takes over lays states out otherwise.
        TrainingError: the loss is bad, and the policy, or the lack of a checkpoint, leaves nothing
            else.
        RunError: the folder holds another run: another loss, optimizer, seed, model, or other data,
            all of it listed.
        OwnedError: another process writes to the folder, or has taken it over from this one.
        CheckpointError: none of its checkpoints can be restored, or the last state could not be
            saved.
        LaunchError: processes that train together do not mean the same program, data, code or
            packages, or are missing.
        KeyboardInterrupt: Ctrl-C where nothing can be saved, or twice.
    """
    require_kinds(
        "fit",
        _KINDS,
        {"program": program, "data": data, "steps": steps, "settings": settings},
        needed=("program", "data", "steps"),
    )
    task = Task(
        programs=cast("tuple[tuple[int, Program], ...]", ((0, program), *later)),
        data=data,
        steps=steps,
        seed=read_seed(seed),
        settings=settings or Settings(),
        identity=identity or {},
        advice=advice,
    )
    with contextlib.ExitStack() as stack:
        loop = Loop(task, Display(console or Console(quiet=True), steps, tokens), stack)
        loop.run()
        return Fitted(
            state=loop.state,
            steps=loop.step,
            losses=in_order(loop.records.losses),
            seconds=in_order(loop.records.seconds),
            waited_seconds=loop.waited,
            saved_seconds=loop.saving.seconds if loop.saving is not None else 0.0,
            resumed=loop.resumed,
            stopped=(loop.stop.reason or loop.watching.reason) if loop.step < steps else "",
            validations=loop.records.validations,
            busy=loop.busy.share(),
        )
