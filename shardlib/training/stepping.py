"""The steps of a run: batches, losses and metrics, checkpoints, open resources, and the loop."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from shardlib.annotation.trees import Tree, path_text
from shardlib.checkpointing.folder import Owner
from shardlib.checkpointing.store import Checkpoints, Restored
from shardlib.checkpointing.tree import OtherOptimizerError
from shardlib.data.batches import Loader, Rows
from shardlib.errors import (
    CheckpointError,
    InfeasibleError,
    LayoutError,
    ModelError,
    PinError,
    RunError,
    ShardlibError,
    TrainingError,
    raise_all,
)
from shardlib.findings import Finding
from shardlib.lowering.runtime import TrainState
from shardlib.lowering.step import limited
from shardlib.lowering.training_program import CompositeState, TrainingProgram
from shardlib.planner.plan import Plan
from shardlib.processes.code import user_code, versions
from shardlib.processes.place import StopRequest, Watchdog, stop_requests
from shardlib.processes.timing import Busy
from shardlib.processes.values import (
    agree,
    all_say,
    anywhere,
    idle_processes,
    of_first,
    processes_text,
)
from shardlib.report.elements import seconds_text
from shardlib.training.callbacks import Asks, Moment, Remembers
from shardlib.training.display import Display
from shardlib.training.identity import OwnedFolder
from shardlib.training.loggers import LoggedRun, Logger
from shardlib.training.measures import (
    VALIDATION,
    JsonLines,
    Judge,
    Sink,
    by_step,
    number,
    read_lines,
    scalars,
)
from shardlib.training.run import RunFolder
from shardlib.training.settings import Settings
from shardlib.training.validation import is_metric, named_numbers, validator
from shardlib.untrusted.data import Json, JsonMapping, JsonObject
from shardlib.wings import host_findings

# --------------------------------------------------------------------------------------------------
# Streams of batches, prefetched.
#
# The loop opens a stream that begins at a step. A dataset has `shardlib.data.batches.Loader`, with
# which every process reads its own part; a function of the step, for data that are generated or fit
# into memory, is called ahead in a thread.


class Stream(Protocol):
    """Batches in the order of steps.

    Attributes:
        waited_seconds: total time that `next` has waited.
    """

    waited_seconds: float

    def __iter__(self) -> Iterator[tuple[int, Tree]]: ...

    def __next__(self) -> tuple[int, Tree]: ...

    def close(self) -> None:
        """Stops prefetching."""
        ...


#: step, from 0 -> the whole global batch, host arrays.
BatchOf = Callable[[int], Tree]


#: Number of batches made ahead.
AHEAD = 2


class _Ahead:
    def __init__(self, batch_of: BatchOf, start: int) -> None:
        self.waited_seconds = 0.0
        self._batch_of, self._next = batch_of, start
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="shardlib-batches")
        self._made: deque[tuple[int, Future[Any]]] = deque()

    def __iter__(self) -> Iterator[tuple[int, Tree]]:
        return self

    def __next__(self) -> tuple[int, Tree]:
        while len(self._made) <= AHEAD:
            self._made.append((self._next, self._worker.submit(self._batch_of, self._next)))
            self._next += 1
        step, future = self._made.popleft()
        begin = time.perf_counter()
        batch = future.result()
        self.waited_seconds += time.perf_counter() - begin
        return step, batch

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)


# --------------------------------------------------------------------------------------------------
# Idle hosts of a job, and a plan that uses all of them.


def is_idle(program: object) -> bool:
    """True if this process owns no device of a program's mesh."""
    mesh = None if jax.process_count() == 1 else getattr(program, "mesh", None)
    return isinstance(mesh, Mesh) and jax.process_index() in idle_processes(mesh.devices.flat)


def idle_text(program: TrainingProgram) -> str:
    """The processes that own no device of a program's mesh, their hosts, and the fastest plan that
    leaves none idle; "" if all own one. Must be called by all processes.
    """
    plan, mesh = program.plan, program.mesh
    idle = idle_processes(mesh.devices.flat) if isinstance(mesh, Mesh) else ()
    if not idle:
        return ""
    hosts = all_say("host", socket.gethostname())
    on: defaultdict[str, list[int]] = defaultdict(list)
    for process in idle:
        on[hosts[process]].append(process)
    places = ", ".join(f"{processes_text(numbers)} on {host}" for host, numbers in on.items())
    return (
        f"{len(idle)} of {len(hosts)} processes own none of the {plan.mesh.devices} devices of the"
        f" plan {plan.mesh} and only wait with the others ({places}); "
        + of_first(f"plan for all devices, {plan.digest}", lambda: _on_all(plan))
    )


def _on_all(plan: Plan) -> str:
    """The fastest plan without idle devices, as an alternative to a plan with some."""
    if plan.source is None:
        return "the plan was given, so that none for all devices is known"
    devices = plan.source.topology.devices
    try:
        plan_on_all = plan.source.on_all_devices()
    except (InfeasibleError, PinError) as error:
        return f"there is no plan for all {devices} devices ({str(error).partition(chr(10))[0]})"
    return (
        f"the fastest plan for all {devices} devices, {plan_on_all.mesh}, is predicted to take"
        f" {seconds_text(plan_on_all.estimate.step_seconds)} per step in place of"
        f" {seconds_text(plan.estimate.step_seconds)}"
    )


# --------------------------------------------------------------------------------------------------
# The recorded numbers of a step.


@dataclass(kw_only=True)
class Pending:
    """A step whose metrics have not been read.

    Attributes:
        step: its number, from 1.
        metrics: on the devices.
        times: seconds by name.
    """

    step: int
    metrics: Tree
    times: dict[str, float]


def numbers_of(metrics: Tree, judged: str = "loss") -> dict[str, float]:
    """The scalars among the metrics of a step, by name; of several islands the means, and the loss
    of each. Waits for the step.
    """
    scalars = {
        name: number
        for outer, value in named_metrics(metrics).items()
        for name, number in named_numbers(outer, value).items()
    }
    if judged in scalars:
        scalars.setdefault("loss", scalars[judged])
    for index, metrics_of_island in enumerate(getattr(metrics, "islands", ()), 1):
        scalars[f"loss_of_island_{index}"] = float(metrics_of_island["loss"])
    return scalars


def named_metrics(metrics: Tree) -> dict[str, Tree]:
    """The metrics of a step by name."""
    if isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics):
        return {
            f"{name}.{inner}".removesuffix("."): metric
            for name, value in metrics.items()
            for inner, metric in (
                named_metrics(value).items() if isinstance(value, Mapping) else [("", value)]
            )
        }
    return {
        path_text(path) or "loss": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(metrics, is_leaf=is_metric)
    }


def meetings(plan: Plan, step: int) -> dict[str, int]:
    """Number of completed synchronisations of islands, by name; {} for a single island."""
    return {"meetings": plan.exchange.met(step)} if plan.exchange.islands > 1 else {}


# --------------------------------------------------------------------------------------------------
# The records of a run: its losses, its metrics, one line per step, and its events.
#
#     records.event("spike", step=12, loss=9.1)
#     records.losses[12]
#
# Metrics go to `metrics.jsonl` of the folder and to loggers, in the first process; losses and
# seconds are known to all.


def validations(records: Iterable[JsonMapping]) -> dict[int, dict[str, float]]:
    """The numbers of the last validation at every step."""
    by_step: dict[int, dict[str, float]] = {}
    for record in records:
        if record.get("event") in ("resumed", "rolled-back"):
            by_step = {step: numbers for step, numbers in by_step.items() if step <= record["step"]}
        elif record.get("event") == VALIDATION:
            numbers = scalars(record)
            numbers.pop("seconds", None)
            by_step[record["step"]] = numbers
    return dict(sorted(by_step.items()))


class Records:
    """Losses, seconds, metrics and events, written to the open sinks.

    Args:
        say: shows that something cannot be read or written.
        owner: the right to write to the folder, if this process has it.
    """

    def __init__(self, say: Callable[[str], None], owner: Owner | None) -> None:
        self.say, self.owner = say, owner
        self.losses: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self.validations: dict[int, dict[str, float]] = {}
        self._sinks: list[Sink] = []
        self._told = False

    def open(
        self,
        folder: RunFolder | None,
        step: int,
        stack: contextlib.ExitStack,
        loggers: Sequence[Logger],
        words: JsonMapping,
    ) -> None:
        """Reads the records of earlier steps from the folder, and opens sinks.

        Args:
            folder: of the run; None if nothing is stored.
        """
        if folder is not None:
            self._read(folder, step)
        if jax.process_index():
            return
        run = LoggedRun(folder=None if folder is None else folder.path, step=step, words=words)
        try:
            if folder is not None:
                lines = JsonLines(folder.metrics, own=True)
                self._sinks.append(stack.enter_context(contextlib.closing(lines)))
            for logger in loggers:
                sink = logger.open(run)
                if sink is not None:
                    self._sinks.append(stack.enter_context(contextlib.closing(sink)))
        except OSError as error:
            raise RunError(
                f"the metrics of the run cannot be written to {run.place('')}: {error}\nTry:"
                " another folder, or free some space; nothing was changed"
            ) from error

    def _read(self, folder: RunFolder, step: int) -> None:
        """Reads the records of earlier steps."""
        lines = read_lines(folder.metrics)
        records = {done: record for done, record in by_step(lines.records).items() if done <= step}
        self.losses = {done: record["loss"] for done, record in records.items()}
        self.seconds = {done: number(record, "seconds") for done, record in records.items()}
        self.validations = {
            done: numbers for done, numbers in validations(lines.records).items() if done <= step
        }
        if lines.unread:
            self.say(
                f"{lines.unread} of the lines of {folder.metrics} cannot be read and are passed"
                " over; they stay there"
            )

    def last(self) -> float:
        """The loss of the newest step; NaN if there is none."""
        return self.losses[max(self.losses)] if self.losses else math.nan

    def forget_after(self, step: int) -> None:
        """Removes the losses of later steps."""
        self.losses = {done: value for done, value in self.losses.items() if done <= step}
        self.validations = {
            done: numbers for done, numbers in self.validations.items() if done <= step
        }

    def event(self, event: str, step: int, **more: Json) -> None:
        """Records an event."""
        self.write({"event": event, "step": step, "time": time.time(), **more})

    def skipped(self, step: int, share: float) -> None:
        """Records, and shows, that a step was skipped."""
        self.event("skipped", step)
        islands = " on some islands" if share < 1 else ""
        self.say(
            f"step {step} was left out{islands}: its gradients were not finite, or its loss was a"
            " spike"
        )

    def write(self, record: JsonMapping) -> None:
        """Writes a record; a write failure is shown once, and training continues. Only the owner of
        the folder writes.
        """
        if self._sinks and self.owner is not None:
            self.owner.require()
        for sink in self._sinks:
            try:
                sink.write(record)
            except Exception as error:  # any error of a logger
                if not self._told:
                    why = error.strerror if isinstance(error, OSError) else None
                    self.say(f"metrics cannot be written: {why or error}; training goes on")
                self._told = True


def in_order(by_step: Mapping[int, float]) -> tuple[float, ...]:
    """Values by step, the first step first."""
    return tuple(by_step[step] for step in sorted(by_step))


# --------------------------------------------------------------------------------------------------
# The task of a run, and the parts of it on which all processes must agree.
#
# A run may have several programs, one after the other, for batches that grow:
#
#     task.at(0)      # the program of the first step
#     task.at(900)    # the one that takes over before step 900


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The task of a run.

    Attributes:
        programs: (number of steps before it, program), each of any kind, the first with 0; all have
            the same layout of states.
        data: a dataset, or a function of the step.
        steps: total number of steps.
        seed: of the initial state.
        start: makes the state before the first step.
        settings: settings of the run.
        identity: the user's description of the training task.
        advice: suggestion in the error when the loss is no longer finite.

    Raises:
        LayoutError: a program that takes over has another layout of states.
    """

    programs: tuple[tuple[int, TrainingProgram], ...]
    data: Rows | BatchOf
    steps: int
    seed: int
    start: Callable[[TrainingProgram], TrainState]
    settings: Settings
    identity: JsonMapping
    advice: str

    def __post_init__(self) -> None:
        _check_alike(self.programs)

    @property
    def program(self) -> TrainingProgram:
        """The first program."""
        return self.programs[0][1]

    def at(self, step: int) -> TrainingProgram:
        """The program of the step after `step` steps."""
        return [program for before, program in self.programs if before <= max(step, 0)][-1]

    @property
    def words(self) -> JsonMapping:
        """The training task and its plan, as plain data."""
        plan = self.program.plan
        return {
            **self.identity,
            "model": plan.model,
            "mesh": str(plan.mesh),
            "topology": plan.topology,
            "plan": plan.digest,
            "steps": self.steps,
            "seed": self.seed,
        }

    def meant(self, trace: JsonMapping | None) -> dict[str, str]:
        """The parts of the task that must be the same in all processes, by name.

        Args:
            trace: digests of the traced programs (`shardlib.training.identity.traced`); None if the
                run has no folder.
        """
        arrays = jax.tree_util.tree_leaves_with_path(
            tuple(program.rows for _, program in self.programs)
        )
        return {
            "plan": " ".join(program.plan.digest for _, program in self.programs),
            "steps": str(self.steps),
            "seed": str(self.seed),
            "data": str(getattr(self.data, "digest", "of a function")),
            **{name: str(value.get("digest", value)) for name, value in (trace or {}).items()},
            "batch": ", ".join(
                f"{path_text(path[1:]) or 'batch'} {leaf.dtype}{list(leaf.shape)}"
                for path, leaf in arrays
            ),
            "saving": self._saving(),
            "policy": str(self.settings.policy),
        }

    def _saving(self) -> str:
        """The checkpoint interval, in words."""
        settings = self.settings
        if settings.run is None:
            return "nothing"
        late = f" or {settings.save_seconds:g} s" if settings.save_seconds is not None else ""
        return f"every {settings.save_every} steps{late}"


def _check_alike(programs: Sequence[tuple[int, TrainingProgram]]) -> None:
    """Raises an error if consecutive programs have different layouts of states."""
    expected = jax.tree_util.tree_leaves_with_path(programs[0][1].state)
    failures = (
        []
        if [before for before, _ in programs] == sorted({before for before, _ in programs})
        else ["their first steps do not rise"]
    )
    for before, program in programs[1:]:
        leaves = jax.tree.leaves(program.state)
        if len(leaves) != len(expected):
            failures.append(f"the one after step {before} has another state")
            continue
        different = [
            path_text(path)
            for (path, leaf), actual in zip(expected, leaves, strict=True)
            if (leaf.shape, leaf.dtype) != (actual.shape, actual.dtype)
            or not leaf.sharding.is_equivalent_to(actual.sharding, leaf.ndim)
        ]
        if different:
            more = f" and {len(different) - 4} more" if len(different) > 4 else ""
            failures.append(
                f"the one after step {before} lays out {', '.join(different[:4])}{more} otherwise"
            )
    if failures:
        raise_all(
            LayoutError,
            "programs cannot take over from one another",
            failures,
            hint="pin mesh, rules and zero of the later plans to those of the first",
        )


class Feed:
    """Returns the batch of each step; a stream is opened at the first request."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._stream: Stream | None = None

    def next(self, step: int, offset: int) -> Tree:
        """The batch of a step."""
        if self._stream is None:
            self._stream = self._opened(step + offset, offset)
        number, batch = next(self._stream)
        assert number == step + offset, (
            f"the stream gave the batch of step {number} for that of step {step + offset}"
        )
        return batch

    def _opened(self, start: int, offset: int) -> Stream:
        task = self._task
        if callable(task.data):
            return _Ahead(task.data, start)
        rows = (
            task.program.rows
            if len(task.programs) == 1
            else lambda number: task.at(number - offset).rows
        )
        return Loader(task.data, rows, start=start, ahead=AHEAD)

    def close(self) -> None:
        """Closes the stream; the next batch opens another one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


# --------------------------------------------------------------------------------------------------
# The metric that a policy judges, and the loss limit above which a step is skipped, for one island
# or several.


def require_judged(task: Task) -> None:
    """Raises an error if a program lacks what its policy needs."""
    policy, program = task.settings.policy, task.program
    if policy.action == "skip" and not has_limit(program):
        raise ModelError(
            "the policy leaves out steps whose loss is a spike, and the program has no guard that"
            " could\nTry: shardlib.compile(..., guards=shardlib.Guards(spike=True))"
        )
    if program.loss_program is not None:
        return
    names = [
        name
        for name, metric in named_metrics(program.metrics).items()
        if is_metric(metric) or not getattr(metric, "shape", ())
    ]
    if policy.metric not in names:
        raise ModelError(
            f"the step returns no metric {policy.metric!r}; it returns"
            f" {', '.join(names) or 'no scalars'}\nTry: Settings(policy=Policy(metric=...)) with"
            " the one that falls while the run is well; Policy is in"
            " shardlib.training.measures.judge"
        )


def has_limit(program: TrainingProgram) -> bool:
    """True if a program has a guard that skips spikes."""
    loss_program = program.loss_program
    guard = None if loss_program is None else loss_program.state.guard
    return guard is not None and guard.limit is not None


def limited_to(state: Any, limit: float) -> Any:
    """The state with a loss limit for the next step, the same on all islands."""
    if isinstance(state, CompositeState):
        return state.mapped(lambda island: limited(island, limit))
    return limited(state, limit)


# --------------------------------------------------------------------------------------------------
# Checkpoints of a run: when one is due, saving, and restoring the newest good one.
#
# A failed save is shown and recorded, and training continues; only the last one must succeed.


class Saving:
    """The checkpoints of a run, as the loop uses them.

    Args:
        checkpoints: of the folder.
        folder: of the run.
        task: task of the run.
        watchdog: notified while a save takes place.
        records: for failures.

    Attributes:
        saved: step of the newest checkpoint of this process; 0 if there is none.
        saved_at: time of that save (`time.perf_counter`).
        seconds: total time spent on saving.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        folder: RunFolder,
        task: Task,
        watchdog: Watchdog,
        records: Records,
    ) -> None:
        self.checkpoints, self.folder, self.task = checkpoints, folder, task
        self.watchdog, self.records = watchdog, records
        self.saved, self.saved_at, self.seconds = 0, 0.0, 0.0

    def prepare(self) -> None:
        """Compiles the device programs that saving needs."""
        self.checkpoints.prepare(self.task.program)

    def found(self) -> bool:
        """True if there is a checkpoint."""
        return bool(self.checkpoints.steps())

    def kept(self) -> bool:
        """True if there is a checkpoint, after a save in progress has finished."""
        self.checkpoints.wait()
        return self.found()

    def restore(self) -> Restored:
        """The newest good checkpoint; if another optimizer with other arrays is an accepted change,
        with its initial state.
        """
        try:
            return self.checkpoints.restore(self.task.program)
        except OtherOptimizerError:
            if "optimizer" not in self.folder.changed():
                raise
            return self.checkpoints.restore(self.task.program, parameters_only=True)

    def due(self, step: int) -> bool:
        """True if a save is due after a step; all processes agree."""
        if step == self.saved:
            return False
        settings = self.task.settings
        late = (
            settings.save_seconds is not None
            and time.perf_counter() - self.saved_at >= settings.save_seconds
        )
        return step % settings.save_every == 0 or anywhere(
            late, needed=settings.save_seconds is not None
        )

    def save(self, step: int, state: TrainState, extra: JsonMapping, *, wait: bool = False) -> bool:
        """Saves a state; returns whether the save was started."""
        begin, begun = time.perf_counter(), False
        with self.watchdog.phase("save", patience=10):
            try:
                self._written(step)
                self.checkpoints.save(
                    step,
                    state,
                    plan=self.task.program.plan,
                    extra=extra,
                    metrics={
                        "loss": self.records.last(),
                        **self.records.validations.get(step, {}),
                    },
                    wait=wait,
                )
                self.saved, begun = step, True
            except CheckpointError as error:
                self._not_saved(step, error)
                if wait:
                    raise
        self.saved_at = time.perf_counter()
        self.seconds += self.saved_at - begin
        return begun

    def wait(self) -> None:
        """Waits for the save in progress."""
        with self.watchdog.phase("save", patience=10):
            self.checkpoints.wait()

    def _written(self, step: int) -> None:
        """Waits for the previous save; its failure is shown, and training continues."""
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            self._not_saved(step, error)

    def _not_saved(self, step: int, error: CheckpointError) -> None:
        self.saved = max(self.folder.saved(), default=0)
        self.records.event("not-saved", step, message=str(error))
        self.records.say(str(error))


# --------------------------------------------------------------------------------------------------
# Open resources of a run: folder, records, checkpoints, watchdog, profiler, stop requests.


#: Number of steps in a trace requested during a run.
_TRACED_STEPS = 3


class Profiler:
    """Records traces of a few steps at a time."""

    def __init__(
        self,
        folder: Path | None,
        wanted: tuple[int, int] | None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Args: folder: of the traces; None for no traces. wanted: first step and number of steps.
        say: shows why a trace was not written.
        """
        self._folder, self._say = folder, say
        self._first, self._last = (wanted[0], wanted[0] + wanted[1] - 1) if wanted else (0, 0)
        self._running = False

    def before(self, step: int) -> None:
        """Starts a trace if this step is requested."""
        if self._folder is None or self._running:
            return
        asked = self._folder / "profile"
        if asked.exists():
            asked.unlink(missing_ok=True)
            self._first, self._last = step, step + _TRACED_STEPS - 1
        if self._first <= step <= self._last:
            place = self._folder / f"step-{step}"
            if jax.process_count() > 1:
                place /= f"process-{jax.process_index()}"
            jax.profiler.start_trace(place, create_perfetto_trace=True)
            self._running = True

    def after(self, step: int) -> None:
        """Ends the trace after its last step."""
        if self._running and step >= self._last:
            self.close()

    def close(self) -> None:
        """Writes the trace."""
        if self._running:
            self._running = False
            try:
                jax.profiler.stop_trace()
            except Exception as error:  # any error of the profiler and its files
                self._say(f"the trace of the profiler was not written: {error}; training goes on")


@dataclass(frozen=True, kw_only=True, eq=False)
class Equipment:
    """Open resources of a run.

    Attributes:
        folder: of the run; None if nothing is stored.
        held: the folder as claimed by this job; None if nothing is stored.
        records: losses, metrics and events.
        saving: checkpoints; None if nothing is stored.
        stop: requests to stop the run.
        watchdog: ends a hanging process.
        profiler: records traces on demand.
    """

    folder: RunFolder | None
    held: OwnedFolder | None
    records: Records
    saving: Saving | None
    stop: StopRequest
    watchdog: Watchdog
    profiler: Profiler

    def agree_and_examine(self, task: Task, say: Callable[[str], None]) -> None:
        """Checks that all processes have the same task, and in runs of several processes, that
        their hosts are healthy.
        """
        with self.watchdog.phase("agree", patience=10):
            meant = task.meant(self.held.trace if self.held is not None else None)
            agree("program", {**versions(), **user_code(), **meant})
            if jax.process_count() > 1 and (text := idle_text(task.program)):
                say(text)
        seconds = task.settings.doctor_seconds
        if seconds is None or jax.process_count() == 1:
            return
        run = str(self.folder.path) if self.folder is not None else None
        for finding in host_findings(run=run, seconds=seconds):
            say(str(finding))

    def open_records(self, task: Task, step: int, stack: contextlib.ExitStack) -> None:
        """Opens the records of the folder and loggers, and shows accepted changes."""
        self.records.open(self.folder, step, stack, task.settings.loggers, task.words)
        if self.held is None:
            return
        for text in self.held.texts:
            self.records.say(text)
        if self.held.changes:
            self.records.event(
                "changed",
                step,
                names=list(dict.fromkeys(change.name for change in self.held.changes)),
                differences=[change.text for change in self.held.changes],
            )


def equipped(task: Task, stack: contextlib.ExitStack, say: Callable[[str], None]) -> Equipment:
    """Opens all resources until the end of `stack`."""
    settings = task.settings
    folder = RunFolder(Path(settings.run)) if settings.run is not None else None
    hold = None
    if folder is not None:
        hold = OwnedFolder.of(
            folder,
            task.programs,
            task.data,
            task.seed,
            task.identity,
            settings.allow_changes,
            stack,
            say,
        )
    records = Records(say, hold.owner if hold is not None else None)
    checkpoints = None
    if folder is not None and hold is not None:
        checkpoints = stack.enter_context(
            contextlib.closing(
                Checkpoints(folder.checkpoints, keep=settings.kept, owner=hold.owner)
            )
        )
    stop = stack.enter_context(stop_requests())
    beats = folder.heartbeat(jax.process_index()) if folder is not None else None
    watchdog = stack.enter_context(
        contextlib.closing(Watchdog(beats, rank=jax.process_index(), seconds=settings.hang_seconds))
    )
    profiles = folder.profiles if folder is not None and not is_idle(task.program) else None
    profiler = stack.enter_context(
        contextlib.closing(Profiler(profiles, settings.profile, records.say))
    )
    return Equipment(
        folder=folder,
        held=hold,
        records=records,
        saving=(
            Saving(checkpoints, folder, task, watchdog, records)
            if folder is not None and checkpoints is not None
            else None
        ),
        stop=stop,
        watchdog=watchdog,
        profiler=profiler,
    )


class Watching:
    """The callbacks and the validation of a run.

    Args:
        task: task of the run.
        records: receives numbers and events.
        display: display of the run.

    Raises:
        ModelError: the validation has no loss.

    Attributes:
        reason: the reason for which a callback ends the run; "" if none does.
        wants_save: whether a callback has requested a save.
        failed: whether a callback or a validation has raised an error.
    """

    def __init__(self, task: Task, records: Records, display: Display) -> None:
        self.task, self.records, self.display = task, records, display
        self.reason, self.wants_save, self.failed = "", False, False
        validation = task.settings.validation
        self._validators = (
            {}
            if validation is None
            else {before: validator(validation, program) for before, program in task.programs}
        )

    def begin(self, step: int, state: Tree) -> None:
        """Called before the first step of a process."""
        self._call("begin", step, {}, state)

    def step(self, step: int, numbers: Mapping[str, float], state: Tree) -> dict[str, float]:
        """Called after a step; returns the numbers that callbacks add."""
        return self._call("step", step, numbers, state)

    def due(self, step: int) -> bool:
        """True if a validation is due after a step."""
        validation = self.task.settings.validation
        return validation is not None and (step % validation.every == 0 or step == self.task.steps)

    def validate(self, step: int, state: Tree) -> None:
        """Validates a state and records the numbers."""
        begin = time.perf_counter()
        before = max(start for start in self._validators if start <= max(step - 1, 0))
        with self._failing():
            numbers = self._validators[before].validate(state)
        seconds = time.perf_counter() - begin
        self.records.validations[step] = numbers
        added = self._call("validation", step, numbers, state)
        self.records.event(VALIDATION, step, **numbers, **added, seconds=seconds)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        self.display.say(f"step {step}: {shown}")

    def end(self, step: int, state: Tree) -> None:
        """Called after the last step of a process."""
        self._call("end", step, {}, state)

    def ended(self, step: int) -> None:
        """Shows why callbacks have ended the run."""
        self.records.event("ended", step, reason=self.reason)
        self.display.say(f"the run ends after step {step} of {self.task.steps}: {self.reason}")

    def memory(self) -> JsonObject:
        """The state of callbacks, as plain data."""
        return {name: dict(callback.memory()) for name, callback in self._remembering().items()}

    def remember(self, memory: JsonMapping) -> None:
        """Restores the state of callbacks."""
        self.reason, self.wants_save = "", False
        for name, callback in self._remembering().items():
            stored = memory.get(name)
            callback.remember(stored if isinstance(stored, Mapping) else {})

    def _remembering(self) -> dict[str, Remembers]:
        callbacks: dict[str, Remembers] = {}
        for callback in self.task.settings.callbacks:
            if isinstance(callback, Remembers):
                kind = type(callback).__name__
                count = sum(name.startswith(f"{kind} ") for name in callbacks)
                callbacks[f"{kind} {count + 1}"] = callback
        return callbacks

    def _call(
        self, event: str, step: int, numbers: Mapping[str, float], state: Tree
    ) -> dict[str, float]:
        added: dict[str, float] = {}
        if not self.task.settings.callbacks or self.failed:
            return added
        moment = Moment(
            event=event,
            step=step,
            steps=self.task.steps,
            numbers=numbers,
            program=self.task.at(step - 1),
            state=state,
            asks=Asks(
                stop=self._stop,
                save=self._save,
                log=added.update,
                say=self.display.say,
                note=lambda name, more: self.records.event(name, step, **more),
            ),
        )
        for callback in self.task.settings.callbacks:
            with self._failing(f"the callback {_name(callback)}", step):
                callback(moment)
        return {name: float(value) for name, value in added.items()}

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason or "a callback"

    def _save(self) -> None:
        self.wants_save = True

    @contextlib.contextmanager
    def _failing(self, what: str = "", step: int = 0) -> Iterator[None]:
        """Records a failure of the enclosed code."""
        try:
            yield
        except ShardlibError:
            self.failed = True
            raise
        except Exception as error:
            self.failed = True
            if not what:
                raise
            raise TrainingError(
                f"{what} failed after step {step}: {type(error).__name__}: {error}\nTry: without"
                " it; the same run goes on where it was saved"
            ) from error


def _name(callback: object) -> str:
    return getattr(callback, "__name__", type(callback).__name__)


# --------------------------------------------------------------------------------------------------
# The loop over the steps of a run.
#
# One step: take the next (prefetched) batch, dispatch the step, read the metrics of the previous
# step while this one runs, judge its loss, record it, save if due. A state is saved only once all
# losses up to it have been judged.


class Loop:
    """The mutable state of a run.

    Args:
        task: task of the run.
        display: display of the run.
        stack: closes the resources that the loop opens.

    Raises:
        ModelError: the policy needs a guard that the program lacks.
        RunError: the folder contains another run.
        OwnedError: another process writes to the folder.
    """

    def __init__(self, task: Task, display: Display, stack: contextlib.ExitStack) -> None:
        require_judged(task)
        self.task, self.display, self.stack = task, display, stack
        self.open = equipped(task, stack, display.say)
        self.records, self.saving = self.open.records, self.open.saving
        self.stop, self.watchdog = self.open.stop, self.open.watchdog
        self.watching = Watching(task, self.records, display)
        self.judge, self.offset, self.rollbacks = Judge(task.settings.policy), 0, 0
        self.limits = task.settings.policy.action == "skip"
        self.step = self.resumed = 0
        # Several executions in flight starve the threads in which CPU devices meet in collectives;
        # elsewhere one step runs while the metrics of the previous one are read.
        self.ahead = 0 if jax.default_backend() == "cpu" else 1
        self.pending: deque[Pending] = deque()
        self.waited = 0.0
        self.feed = Feed(task)
        self.noticed: tuple[Finding, ...] = ()

    def run(self) -> None:
        """Runs all steps, or until a stop request."""
        self._begin()
        with self.display.progress:
            self.clock = time.perf_counter()
            if self.saving is not None:
                self.saving.saved_at = self.clock
            self.busy = Busy(alone=jax.process_count() == 1)
            try:
                while self.step < self.task.steps and not self._stopping():
                    self._one()
                    self._validate()
                    if self.saving is not None and self._save_due(self.saving):
                        self._save(self.saving)
                self._settle(0)
                self.watching.end(self.step, self.state)
            except KeyboardInterrupt:
                self._say_stopped("SIGINT")
                raise
            except Exception:
                if self.watching.failed and self.saving is not None:
                    self._save_last(self.saving)
                raise
            self._end()
        self.feed.close()

    def _begin(self) -> None:
        """Initialises the state, or restores the newest good checkpoint."""
        self.open.agree_and_examine(self.task, self.display.say)
        with self.watchdog.phase("compile", patience=10):
            for _, program in self.task.programs:
                program.prepare()
        if self.saving is not None:
            self.saving.prepare()
        resumes = self.saving is not None and self.saving.found()
        with self.watchdog.phase("restore" if resumes else "init", patience=10):
            if self.saving is not None and resumes:
                self._restore(self.saving)
                self.resumed = self.saving.saved = self.step
            else:
                self.state = self.task.start(self.task.program)
        with self.watchdog.phase("agree", patience=10):
            agree(
                "position",
                {
                    "step": str(self.step),
                    "batches left out": str(self.offset),
                    "checkpoint": str(resumes),
                },
            )
        self.open.open_records(self.task, self.step, self.stack)
        if resumes:
            self.records.event("resumed", self.step)
            self._note()
            self.display.resumed(self.step, self.task.steps)
        else:
            self.watching.remember({})
        self.watching.begin(self.step, self.state)

    def _one(self) -> None:
        """Dispatches one step, and settles those more than `ahead` behind."""
        begin = time.perf_counter()
        with self.watchdog.phase("data", self.step):
            batch = self.feed.next(self.step, self.offset)
        got = time.perf_counter()
        self.open.profiler.before(self.step + 1)
        if self.limits:
            self.state = limited_to(self.state, self.judge.limit())
        with self.watchdog.phase("step", self.step):
            self.state, metrics = self.task.at(self.step).step(self.state, batch)
            self.step += 1
            times = {"data_seconds": got - begin, "dispatch_seconds": time.perf_counter() - got}
            self.pending.append(Pending(step=self.step, metrics=metrics, times=times))
            self.waited += got - begin
            self._settle(self.ahead)

    def _settle(self, ahead: int) -> None:
        """Reads, judges and records all pending steps but the last `ahead`."""
        while len(self.pending) > ahead:
            pending = self.pending.popleft()
            numbers = numbers_of(pending.metrics, self.judge.policy.metric)
            now = time.perf_counter()
            seconds, self.clock = now - self.clock, now
            judged = numbers[self.judge.policy.metric]
            if not self._judged(pending.step, judged, bool(numbers.get("skipped"))):
                return
            self._write_down(pending, numbers, seconds)

    def _write_down(self, pending: Pending, numbers: Mapping[str, float], seconds: float) -> None:
        """Records a step judged good."""
        records, loss = self.records, numbers["loss"]
        records.losses[pending.step], records.seconds[pending.step] = loss, seconds
        added = self.watching.step(pending.step, numbers, self.state)
        self.open.profiler.after(pending.step)
        busy = self.busy.recent()
        records.write(
            {
                "step": pending.step,
                **numbers,
                **added,
                "seconds": seconds,
                **pending.times,
                **meetings(self.task.program.plan, pending.step),
                "tokens_per_second": self.display.tokens / seconds,
                **({"others_busy": busy} if busy is not None else {}),
            }
        )
        self.display.step(pending.step, loss, seconds)
        if numbers.get("skipped"):
            records.skipped(pending.step, numbers["skipped"])

    def _judged(self, step: int, loss: float, skipped: bool) -> bool:
        """True if the loop continues; False if it has rolled back."""
        verdict = self.judge.skip() if skipped else self.judge.see(loss)
        if verdict in ("go", "warn"):
            if verdict == "warn":
                self.records.event("spike", step, loss=loss)
                self.display.say(f"the loss of step {step} is {loss:.3f}, far above those before")
            return True
        what, advice = f"the loss of step {step} of {self.task.steps} is {loss:g}", self.task.advice
        if bad := self._not_finite(step):
            what, advice = f"{what}: {bad}", f"batches without them; data({step - 1 + self.offset})"
        if verdict == "stop" or self.saving is None or not self.saving.kept():
            raise TrainingError(f"{what}\nTry: {advice}")
        if self.rollbacks >= self.task.settings.policy.attempts:
            raise TrainingError(
                f"{what}, after the run went back {self.rollbacks} times to step"
                f" {self.saving.saved} and past other batches\nTry: {advice}"
            )
        self._roll_back(self.saving, step, loss)
        return False

    def _not_finite(self, step: int) -> str:
        """The numbers of a step's batch that are not finite; "" where there are none, or where it
        cannot be made again.
        """
        if not callable(self.task.data):
            return ""
        with contextlib.suppress(Exception):  # whatever the user's function raises the second time
            batch = self.task.data(step - 1 + self.offset)
            counts = {
                path_text(path): np.sum(~np.isfinite(np.asarray(leaf, np.float64)))
                for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
                if jax.dtypes.issubdtype(np.asarray(leaf).dtype, np.inexact)
            }
            leaves = [f"{count} of {path}" for path, count in counts.items() if count]
            return f"its batch has numbers that are not finite ({', '.join(leaves)})" * bool(leaves)
        return ""

    def _roll_back(self, saving: Saving, step: int, loss: float) -> None:
        """Rolls back to the newest checkpoint, and skips all batches since."""
        self.pending.clear()
        ahead = step + self.offset
        with self.watchdog.phase("restore", patience=10):
            self._restore(saving)
        self.rollbacks += 1
        self.offset = ahead - self.step
        self.records.forget_after(self.step)
        self._note()
        self.feed.close()
        left_out = step - self.step
        self.records.event(
            "rolled-back", self.step, loss=loss, bad_step=step, batches_left_out=left_out
        )
        self.display.say(
            f"the loss of step {step} is {loss:g}: back to step {self.step}, and past"
            f" {left_out} batches"
        )

    def _restore(self, saving: Saving) -> None:
        restored = saving.restore()
        self.state, self.step = restored.state, restored.step
        self.offset = int(restored.extra["offset"])
        self.watching.remember(restored.extra.get("callbacks", {}))
        self.judge = Judge(self.task.settings.policy, map(float, restored.extra["seen"]))
        self.noticed = restored.findings
        for finding in restored.findings:
            self.display.say(finding.message)

    def _note(self) -> None:
        """Records findings of a restore."""
        for finding in self.noticed:
            self.records.event("noticed", self.step, code=finding.code, message=finding.message)

    def _validate(self) -> None:
        """Validates the state if due, once all losses up to it have been judged."""
        before = self.step
        if not self.watching.due(before):
            return
        self._settle(0)
        if self.step != before:
            return
        begin = time.perf_counter()
        with self.watchdog.phase("validate", self.step, patience=10):
            self.watching.validate(self.step, self.state)
        self.clock += time.perf_counter() - begin

    def _save_due(self, saving: Saving) -> bool:
        wanted_by_callback, self.watching.wants_save = self.watching.wants_save, False
        return (wanted_by_callback and self.step != saving.saved) or saving.due(self.step)

    def _save_last(self, saving: Saving) -> None:
        """Saves the state after a failure; an error while saving does not hide the failure."""
        with contextlib.suppress(ShardlibError):
            if self.step != saving.saved:
                self._save(saving, wait=True)
            saving.wait()

    def _save(self, saving: Saving, *, wait: bool = False) -> None:
        """Saves the state, once all losses up to it have been judged."""
        before = self.step
        self._settle(0)
        if self.step != before:
            return  # a pending loss was bad, and the loop has rolled back
        spent = saving.seconds
        extra = {
            "offset": self.offset,
            "seen": [*self.judge.seen],
            "seed": self.task.seed,
            "callbacks": self.watching.memory(),
        }
        if saving.save(self.step, self.state, extra, wait=wait):
            self.rollbacks = 0
        self.clock += saving.seconds - spent

    def _end(self) -> None:
        """The last checkpoint, and final messages."""
        if self.saving is not None:
            if self.step != self.saving.saved:
                self._save(self.saving, wait=True)
            self.saving.wait()
        if self.step < self.task.steps and self.watching.reason and not self.stop:
            self.watching.ended(self.step)
        elif self.step < self.task.steps:
            self.records.event("stopped", self.step, reason=self.stop.reason)
            self._say_stopped(self.stop.reason)
            if self.saving is None and self.stop.reason == "SIGINT":
                raise KeyboardInterrupt
        elif self.open.folder is not None:
            self.records.event("finished", self.step)

    def _say_stopped(self, reason: str) -> None:
        saved_step = self.saving.saved if self.saving is not None else None
        self.display.stopped(reason, self.step, self.records.last(), kept=saved_step)

    def _stopping(self) -> bool:
        if self.watching.reason:
            return True
        stopping = anywhere(bool(self.stop), needed=True, step=self.step)
        if stopping:
            self.stop.ask("another process")
        return stopping
