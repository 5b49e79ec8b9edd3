"""The training loop: from a program and a stream of batches to a trained state, through whatever
happens on the way.

    program = shardlib.compile(init, loss, optimizer, batch)
    fitted = shardlib.fit(program, batch_of, steps=1000, settings=shardlib.Settings(run="runs/first"))

With a folder, a run is what the folder holds: a process that was killed, preempted or hung is
started again with the same words, on the same machine or another one, and goes on at the newest
good checkpoint. What follows depends on the state and the step alone, so the losses are those of a
run that was never interrupted.

One step of the loop: take the next batch (made ahead), hand the step to the devices, read the
metrics of the step before while this one runs, judge its loss, write it down, save if it is time. A
state is saved only once all losses up to it have been judged.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.checkpointing.keep import Keep
from shardlib.checkpointing.store import Checkpoints, Restored
from shardlib.checkpointing.tree import OtherOptimizerError
from shardlib.data.batches.loader import Rows
from shardlib.doctor.examine import examine
from shardlib.errors import (
    CheckpointError,
    LayoutError,
    ModelError,
    RunError,
    TrainingError,
    raise_all,
)
from shardlib.lowering.program.checks.arguments import read_seed
from shardlib.lowering.program.guards import limited
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.processes.agreement import agree
from shardlib.processes.code import user_code, versions
from shardlib.processes.ranks import anywhere, rank
from shardlib.processes.signals import StopRequest, stop_requests
from shardlib.processes.watchdog import Watchdog
from shardlib.training.batches import BatchOf, Stream, opened
from shardlib.training.display import Display
from shardlib.training.measures.busy import Busy
from shardlib.training.measures.judge import Judge, Policy
from shardlib.training.measures.metrics import (
    JsonLines,
    Sink,
    TensorBoard,
    by_step,
    number,
    read_lines,
)
from shardlib.training.measures.profiler import Profiler
from shardlib.training.run.folder import RunFolder
from shardlib.training.run.held import Held


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is kept, watched and judged; none of it changes what is computed, except after a
    bad loss.

    Attributes:
        run: folder of the run; None keeps nothing.
        save_every: steps between checkpoints.
        save_seconds: seconds between checkpoints, beside that; None for no such rule.
        keep: which checkpoints stay.
        policy: what follows a bad loss.
        hang_seconds: how long a step may take before the process is ended as hung; None for any
            time.
        tensorboard: whether to write event files.
        profile: (first step, number of steps) to record a trace of; None for none.
        allow_changes: what may be another than the run in the folder was begun with: "loss",
            "optimizer", "lr" (the numbers of the optimizer), "data", "seed", "model", "batch", or a
            word of `identity`. A difference that is not named is an error; one that is, is said and
            written down in the folder. An optimizer whose state has other arrays starts anew.
            "identity" goes on from checkpoints in a folder whose `run.json` is gone.
        doctor_seconds: that several processes may take to look at their hosts before the first step
            (`shardlib.doctor`); what is wrong is an error that names the host. None looks at
            nothing.

    Raises:
        ModelError: numbers out of range, all of them listed.
    """

    run: str | Path | None = None
    save_every: int = 50
    save_seconds: float | None = None
    keep: Keep = field(default_factory=Keep)
    policy: Policy = field(default_factory=Policy)
    hang_seconds: float | None = None
    tensorboard: bool = True
    profile: tuple[int, int] | None = None
    allow_changes: tuple[str, ...] = ()
    doctor_seconds: float | None = 60.0

    def __post_init__(self) -> None:
        failures = (
            [f"save_every is {self.save_every}; it must be at least 1"]
            if self.save_every < 1
            else []
        )
        failures += [
            f"{name} is {value}; it must be positive"
            for name, value in (
                ("save_seconds", self.save_seconds),
                ("hang_seconds", self.hang_seconds),
                ("doctor_seconds", self.doctor_seconds),
            )
            if value is not None and not value > 0
        ]
        if self.profile is not None and min(self.profile) < 1:
            failures.append(
                f"profile is {self.profile}; the first step and the number of steps are at least 1"
            )
        if isinstance(self.allow_changes, str):
            failures.append(f"allow_changes is {self.allow_changes!r}; it must be a tuple of names")
        if failures:
            raise_all(ModelError, "the settings of the run are not usable", failures)


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
        stopped: why it ended before the last step, "SIGTERM"; empty where it did not.
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
    busy: float | None = None


def fit(
    program: Program,
    data: Rows | BatchOf,
    *,
    steps: int,
    seed: int = 0,
    settings: Settings | None = None,
    console: Console | None = None,
    identity: Mapping[str, Any] | None = None,
    tokens: int = 0,
    advice: str = "a smaller learning rate, or another seed",
    later: Sequence[tuple[int, Program]] = (),
) -> Fitted:
    """Trains for a number of steps in all, from the newest checkpoint of the run where there is
    one.

    Args:
        program: what to run.
        data: a dataset (`shardlib.data.open.read`), of which every process reads the rows that its
            devices hold; or a function from the step, counted from 0, to the whole global batch on
            the host, which must give the same batch whenever it is asked for a step; with a folder,
            it is asked for the first one whenever the run goes on.
        steps: in all; a run that has done them is given back as it is.
        seed: of `program.init`, where nothing is restored.
        settings: see there.
        console: where to show progress; nowhere by default.
        identity: what is trained, as plain data, for `run.json`: whoever resumes must say the same.
        tokens: of a batch, for tokens a second.
        advice: what to try when the loss is no longer finite.
        later: (steps before it, program) of programs that take over, in that order: for batches
            that grow (`shardlib.training.measures.rates.Ramp`). States must be laid out alike, as
            they are where `mesh`, `rules` and `zero` are pinned to those of the first plan. A
            function of the step gives batches of the size of its step.

    Raises:
        ArgumentError: the seed is no integer from 0 to 2**31 - 1.
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
    seed = read_seed(seed)
    with contextlib.ExitStack() as stack:
        return _Loop(
            program,
            data,
            steps,
            seed,
            settings or Settings(),
            Display(console or Console(quiet=True), steps, tokens),
            identity or {},
            advice,
            stack,
            later,
        ).run()


@dataclass(kw_only=True)
class _Pending:
    """A step whose metrics have not been read."""

    step: int
    metrics: Mapping[str, Any]
    times: dict[str, float]


class _Loop:
    """The state of the loop; everything in it changes from step to step."""

    def __init__(
        self,
        program: Program,
        data: Rows | BatchOf,
        steps: int,
        seed: int,
        settings: Settings,
        display: Display,
        identity: Mapping[str, Any],
        advice: str,
        stack: contextlib.ExitStack,
        later: Sequence[tuple[int, Program]],
    ) -> None:
        (
            self.program,
            self.data,
            self.steps,
            self.seed,
            self.settings,
            self.display,
            self.advice,
            self.stack,
        ) = (program, opened(data), steps, seed, settings, display, advice, stack)
        self.data_digest = str(getattr(data, "digest", "of a function"))
        self.programs, self.identity = ((0, program), *later), identity
        _check_alike(self.programs)
        self.folder = RunFolder(Path(settings.run)) if settings.run is not None else None
        self.held, self.checkpoints = (
            (
                Held.of(
                    self.folder,
                    self.programs,
                    data,
                    seed,
                    identity,
                    settings.allow_changes,
                    stack,
                    display.say,
                )
                if self.folder is not None
                else None
            ),
            None,
        )
        if self.folder is not None and self.held is not None:
            self.checkpoints = stack.enter_context(
                contextlib.closing(
                    Checkpoints(self.folder.checkpoints, keep=settings.keep, owner=self.held.owner)
                )
            )
        self.stop: StopRequest = stack.enter_context(stop_requests())
        self.watchdog = stack.enter_context(
            contextlib.closing(
                Watchdog(
                    self.folder.heartbeat(rank()) if self.folder is not None else None,
                    rank=rank(),
                    seconds=settings.hang_seconds,
                )
            )
        )
        self.profiler = stack.enter_context(
            contextlib.closing(
                Profiler(
                    self.folder.profiles if self.folder is not None else None, settings.profile
                )
            )
        )
        self.judge, self.offset, self.rollbacks = Judge(settings.policy), 0, 0
        self.limits = settings.policy.action == "skip"
        if self.limits and (program.state.guard is None or program.state.guard.limit is None):
            raise ModelError(
                "the policy leaves out steps whose loss is a spike, and the program has no guard"
                " that could\nTry: shardlib.compile(..., guards=shardlib.Guards(spike=True))"
            )
        self.step = self.resumed = self.saved = 0
        # Several executions in flight starve the threads with which CPU devices meet; elsewhere one
        # step runs while the metrics of the one before are read.
        self.ahead = 0 if jax.default_backend() == "cpu" else 1
        self.pending: deque[_Pending] = deque()
        self.losses: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self.waited = self.saving = 0.0
        self.sinks: list[Sink] = []
        self.told = False
        self.stream: Stream | None = None

    def run(self) -> Fitted:
        """All steps, or as many as there are until somebody wants the run to stop."""
        self._begin()
        with self.display:
            self.clock = self.saved_at = time.perf_counter()
            self.busy = Busy(alone=jax.process_count() == 1)
            try:
                while self.step < self.steps and not self._stopping():
                    self._one()
                    if self._due():
                        self._save()
                self._settle(0)
            except KeyboardInterrupt:
                self.display.stopped(
                    "SIGINT",
                    self.step,
                    self._last(),
                    kept=self.saved if self.checkpoints is not None else None,
                )
                raise
            self._end()
        self._close_stream()
        return Fitted(
            state=self.state,
            steps=self.step,
            losses=_in_order(self.losses),
            seconds=_in_order(self.seconds),
            waited_seconds=self.waited,
            saved_seconds=self.saving,
            resumed=self.resumed,
            stopped=self.stop.reason if self.step < self.steps else "",
            busy=self.busy.share(),
        )

    def _begin(self) -> None:
        """The first state: a new one, or that of the newest good checkpoint."""
        with self.watchdog.phase("agree", patience=10):
            agree("program", {**versions(), **user_code(), **self._meant()})
        if self.settings.doctor_seconds is not None and jax.process_count() > 1:
            found = examine(
                run=str(self.folder.path) if self.folder is not None else None,
                seconds=self.settings.doctor_seconds,
                measure=False,
            ).require()
            for finding in found.findings:
                self.display.say(str(finding))
        with self.watchdog.phase("compile", patience=10):
            for _, program in self.programs:
                program.prepare()
        if self.checkpoints is not None:
            self.checkpoints.prepare(self.program)
        found = self.checkpoints is not None and bool(self.checkpoints.steps())
        with self.watchdog.phase("restore" if found else "init", patience=10):
            if found:
                self._restore()
                self.resumed = self.saved = self.step
            else:
                self.state = self.program.init(self.seed)
        with self.watchdog.phase("agree", patience=10):
            agree(
                "position",
                {
                    "step": str(self.step),
                    "batches left out": str(self.offset),
                    "checkpoint": str(found),
                },
            )
        if self.folder is not None:
            self._open_sinks(self.folder)
        for text in self.held.texts if self.held is not None else ():
            self.display.say(text)
        if self.held is not None and self.held.changes:
            self._event(
                "changed",
                names=list(dict.fromkeys(one.name for one in self.held.changes)),
                differences=[one.text for one in self.held.changes],
            )
        if found:
            self._event("resumed")
            self.display.resumed(self.step, self.steps)

    def _meant(self) -> dict[str, str]:
        """What this process is about to do, as far as all processes must do the same."""
        meant = {
            "plan": " ".join(program.plan.digest for _, program in self.programs),
            "steps": str(self.steps),
            "seed": str(self.seed),
            "data": self.data_digest,
        }
        meant |= (
            {name: str(value.get("digest", value)) for name, value in self.held.trace.items()}
            if self.held is not None
            else {}
        )
        arrays = jax.tree_util.tree_leaves_with_path(
            tuple(program.batch for _, program in self.programs)
        )
        meant["batch"] = ", ".join(
            f"{path_text(path[1:]) or 'batch'} {leaf.dtype}{list(leaf.shape)}"
            for path, leaf in arrays
        )
        settings = self.settings
        return meant | {
            "saving": (
                f"every {settings.save_every} steps"
                + (f" or {settings.save_seconds:g} s" if settings.save_seconds is not None else "")
                if self.folder is not None
                else "nothing"
            ),
            "policy": str(settings.policy),
        }

    def _open_sinks(self, folder: RunFolder) -> None:
        lines = read_lines(folder.metrics)
        known = by_step(lines.records)
        self.losses = {step: record["loss"] for step, record in known.items() if step <= self.step}
        self.seconds = {
            step: number(record, "seconds") for step, record in known.items() if step <= self.step
        }
        if lines.unread:
            self.display.say(
                f"{lines.unread} of the lines of {folder.metrics} cannot be read and are passed"
                " over; they stay there"
            )
        if rank():
            return
        try:
            opened: list[Sink] = [
                JsonLines(folder.metrics),
                *(
                    [TensorBoard(folder.tensorboard, after=self.step)]
                    if self.settings.tensorboard
                    else []
                ),
            ]
        except OSError as error:
            raise RunError(
                f"the metrics of the run cannot be written to {folder.path}: {error}\nTry: another"
                " folder, or free some space; nothing was changed"
            ) from error
        self.sinks = [self.stack.enter_context(contextlib.closing(sink)) for sink in opened]

    def _one(self) -> None:
        """Hands one step to the devices, and settles those that are more than `ahead` behind."""
        begin = time.perf_counter()
        with self.watchdog.phase("data", self.step):
            batch = self._batch()
        got = time.perf_counter()
        self.profiler.before(self.step + 1)
        if self.limits:
            self.state = limited(self.state, self.judge.limit())
        with self.watchdog.phase("step", self.step):
            self.state, metrics = self._at(self.step).step(self.state, batch)
            self.step += 1
            self.pending.append(
                _Pending(
                    step=self.step,
                    metrics=metrics,
                    times={
                        "data_seconds": got - begin,
                        "dispatch_seconds": time.perf_counter() - got,
                    },
                )
            )
            self.waited += got - begin
            self._settle(self.ahead)

    def _at(self, step: int) -> Program:
        """The program that does the step after so many."""
        return [program for before, program in self.programs if before <= max(step, 0)][-1]

    def _batch(self) -> Tree:
        if self.stream is None:
            offset = self.offset
            self.stream = self.data(
                (
                    self.program.batch
                    if len(self.programs) == 1
                    else lambda number: self._at(number - offset).batch
                ),
                self.step + offset,
            )
        number, batch = next(self.stream)
        assert number == self.step + self.offset, (
            f"the stream gave the batch of step {number} for that of step {self.step + self.offset}"
        )
        return batch

    def _settle(self, ahead: int) -> None:
        """Reads, judges and writes down all pending steps but the last `ahead`."""
        while len(self.pending) > ahead:
            one = self.pending.popleft()
            numbers = {
                name: float(value)
                for name, value in one.metrics.items()
                if getattr(value, "ndim", 0) == 0
            }
            now = time.perf_counter()
            seconds, self.clock = now - self.clock, now
            skipped = bool(numbers.get("skipped"))
            if not self._judged(one.step, numbers["loss"], skipped):
                return
            self.losses[one.step], self.seconds[one.step] = numbers["loss"], seconds
            self.profiler.after(one.step)
            busy = self.busy.recent()
            self._write(
                {
                    "step": one.step,
                    **numbers,
                    "seconds": seconds,
                    **one.times,
                    "tokens_per_second": self.display.tokens / seconds,
                    **({"others_busy": busy} if busy is not None else {}),
                }
            )
            self.display.step(one.step, numbers["loss"], seconds)
            if skipped:
                self._event("skipped", one.step)
                self.display.say(
                    f"step {one.step} was left out: its gradients were not finite, or its loss was"
                    " a spike"
                )

    def _judged(self, step: int, loss: float, skipped: bool) -> bool:
        """Whether the loop goes on from here; if not, it has gone back."""
        verdict = self.judge.skip() if skipped else self.judge.see(loss)
        if verdict in ("go", "warn"):
            if verdict == "warn":
                self._event("spike", step, loss=loss)
                self.display.say(f"the loss of step {step} is {loss:.3f}, far above those before")
            return True
        what = f"the loss of step {step} of {self.steps} is {loss:g}"
        if verdict == "stop" or self.checkpoints is None or not self._kept():
            raise TrainingError(f"{what}\nTry: {self.advice}")
        if self.rollbacks >= self.settings.policy.attempts:
            raise TrainingError(
                f"{what}, after the run went back {self.rollbacks} times to step {self.saved} and"
                f" past other batches\nTry: {self.advice}"
            )
        self._roll_back(step, loss)
        return False

    def _roll_back(self, step: int, loss: float) -> None:
        """Back to the newest checkpoint, and past all batches since."""
        self.pending.clear()
        ahead = step + self.offset
        with self.watchdog.phase("restore", patience=10):
            self._restore()
        self.rollbacks += 1
        self.offset = ahead - self.step
        self.losses = {kept: value for kept, value in self.losses.items() if kept <= self.step}
        self._close_stream()
        self._event("rolled-back", loss=loss, bad_step=step, batches_left_out=step - self.step)
        self.display.say(
            f"the loss of step {step} is {loss:g}: back to step {self.step}, and past"
            f" {step - self.step} batches"
        )

    def _restore(self) -> None:
        assert self.checkpoints is not None
        restored = self._restored(self.checkpoints)
        self.state, self.step = restored.state, restored.step
        self.offset = int(restored.extra["offset"])
        self.judge = Judge(self.settings.policy, map(float, restored.extra["seen"]))
        for finding in restored.findings:
            self.display.say(finding.message)

    def _restored(self, checkpoints: Checkpoints) -> Restored:
        """The newest good checkpoint; where the optimizer was changed on purpose, and has other
        arrays, with that as before its first step.
        """
        try:
            return checkpoints.restore(self.program)
        except OtherOptimizerError:
            if self.folder is None or "optimizer" not in self.folder.changed():
                raise
            return checkpoints.restore(self.program, parameters_only=True)

    def _kept(self) -> bool:
        assert self.checkpoints is not None
        self.checkpoints.wait()
        return bool(self.checkpoints.steps())

    def _due(self) -> bool:
        if self.checkpoints is None or self.step == self.saved:
            return False
        late = (
            self.settings.save_seconds is not None
            and time.perf_counter() - self.saved_at >= self.settings.save_seconds
        )
        return self.step % self.settings.save_every == 0 or anywhere(
            late, needed=self.settings.save_seconds is not None
        )

    def _save(self, *, wait: bool = False) -> None:
        """Saves the state, once all losses up to it have been judged."""
        before = self.step
        self._settle(0)
        if self.checkpoints is None or self.step != before:
            return  # a pending loss was bad, and the loop has gone back
        begin = time.perf_counter()
        with self.watchdog.phase("save", patience=10):
            try:
                self._written()
                self.checkpoints.save(
                    self.step,
                    self.state,
                    plan=self.program.plan,
                    extra={"offset": self.offset, "seen": [*self.judge.seen], "seed": self.seed},
                    metrics={"loss": self._last()},
                    wait=wait,
                )
                self.saved, self.rollbacks = self.step, 0
            except CheckpointError as error:
                self._not_saved(error)
                if wait:
                    raise
        self.saved_at = time.perf_counter()
        self.saving += self.saved_at - begin
        self.clock += self.saved_at - begin

    def _written(self) -> None:
        """Waits for the save before this one; that it failed is said, and training goes on."""
        assert self.checkpoints is not None
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            self._not_saved(error)

    def _not_saved(self, error: CheckpointError) -> None:
        self.saved = max(self.folder.saved(), default=0) if self.folder is not None else 0
        self._event("not-saved", message=str(error))
        self.display.say(str(error))

    def _end(self) -> None:
        """The last checkpoint, and what there is to say."""
        if self.checkpoints is not None and self.step != self.saved:
            self._save(wait=True)
        if self.checkpoints is not None:
            with self.watchdog.phase("save", patience=10):
                self.checkpoints.wait()
        if self.step < self.steps:
            self._event("stopped", reason=self.stop.reason)
            self.display.stopped(
                self.stop.reason,
                self.step,
                self._last(),
                kept=self.saved if self.checkpoints is not None else None,
            )
            if self.checkpoints is None and self.stop.reason == "SIGINT":
                raise KeyboardInterrupt
        elif self.folder is not None:
            self._event("finished")

    def _stopping(self) -> bool:
        stopping = anywhere(bool(self.stop), needed=True, step=self.step)
        if stopping:
            self.stop.ask("another process")
        return stopping

    def _last(self) -> float:
        return self.losses[max(self.losses)] if self.losses else math.nan

    def _event(self, event: str, step: int | None = None, **more: Any) -> None:
        self._write(
            {
                "event": event,
                "step": self.step if step is None else step,
                "time": time.time(),
                **more,
            }
        )

    def _write(self, record: Mapping[str, Any]) -> None:
        """Writes a record down; that there is no room for it is said once, and training goes on.
        Only whoever owns the folder writes.
        """
        if self.sinks and self.held is not None and self.held.owner is not None:
            self.held.owner.require()
        for sink in self.sinks:
            try:
                sink.write(record)
            except OSError as error:
                if not self.told:
                    self.display.say(
                        f"metrics cannot be written: {error.strerror or error}; training goes on"
                    )
                self.told = True

    def _close_stream(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None


def _check_alike(programs: Sequence[tuple[int, Program]]) -> None:
    """Raises where programs that follow one another cannot hand over a state.

    Raises:
        LayoutError: all differences, by program.
    """
    wanted = jax.tree_util.tree_leaves_with_path(programs[0][1].state)
    failures = (
        []
        if [before for before, _ in programs] == sorted({before for before, _ in programs})
        else ["their first steps do not rise"]
    )
    for before, program in programs[1:]:
        found = jax.tree.leaves(program.state)
        if len(found) != len(wanted):
            failures.append(f"the one after step {before} has another state")
            continue
        different = [
            path_text(path)
            for (path, one), other in zip(wanted, found, strict=True)
            if (one.shape, one.dtype) != (other.shape, other.dtype)
            or not one.sharding.is_equivalent_to(other.sharding, one.ndim)
        ]
        if different:
            failures.append(
                f"the one after step {before} lays out"
                f" {', '.join(different[:4])}{f' and {len(different) - 4} more' if len(different) > 4 else ''}"
                " otherwise"
            )
    if failures:
        raise_all(
            LayoutError,
            "programs cannot take over from one another",
            failures,
            hint="pin mesh, rules and zero of the later plans to those of the first",
        )


def _in_order(by_step: Mapping[int, float]) -> tuple[float, ...]:
    return tuple(by_step[step] for step in sorted(by_step))
