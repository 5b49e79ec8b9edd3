"""The training loop: from a program and a stream of batches to a trained state, with recovery from
failures.

    program = shardlib.compile(init, loss, optimizer, batch)
    settings = shardlib.Settings(run="runs/first")
    fitted = shardlib.fit(program, batch_of, steps=1000, settings=settings)

With a folder, a run resumes: after a kill, a preemption or a hang the same command, on the same
machine or another one, continues from the newest good checkpoint. All further steps depend on the
state and the step number alone, so the losses are those of an uninterrupted run.

The steps themselves are in `shardlib.training.stepping`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape

from shardlib import _jax_compat, api, models
from shardlib.checkpointing.folder import refuse_where_owned
from shardlib.data.batches import Rows, TokenDataset
from shardlib.data.open import read
from shardlib.errors import ModelError, ShardlibError, StoppedError, TopologyError, TrainingError
from shardlib.lowering.program import Program
from shardlib.lowering.runtime import TrainState
from shardlib.lowering.step import Guards
from shardlib.lowering.training_program import TrainingProgram, is_program
from shardlib.machines.topology import of_size
from shardlib.machines.topology import topology as parse_topology
from shardlib.models.config import EncoderDecoderConfig, TransformerConfig
from shardlib.processes.machine import HOST_DEVICES, simulate_cpu_devices
from shardlib.processes.progress import Progress
from shardlib.processes.values import is_alone, is_first, whole
from shardlib.training import display
from shardlib.training.display import Display, generate
from shardlib.training.identity import traced
from shardlib.training.run import OtherRunError, RunFolder
from shardlib.training.settings import Figures, Settings, TrainConfig, TrainResult, optimizer
from shardlib.training.stepping import BatchOf, Loop, Task, in_order
from shardlib.untrusted.data import JsonMapping, JsonObject, Kind, read_seed, require_kinds


def _count(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and value >= 0


def _takes_step(value: Any) -> bool:
    try:
        inspect.signature(value).bind(0)
    except TypeError:
        return False
    except ValueError:  # callables of C have no signature
        return callable(value)
    return True


#: Expected kinds of the arguments of `fit`.
_KINDS: Mapping[str, Kind] = {
    "program": (
        is_program,
        "a program",
        "program=shardlib.compile(init, loss, optimizer, batch), or shardlib.compile_step(...)",
    ),
    "data": (
        lambda value: hasattr(value, "rows") or _takes_step(value),
        "a dataset or a function of the step",
        "data=lambda step: batch",
    ),
    "steps": (_count, "a number of steps, from 0 on", "steps=1000"),
    "start": (
        callable,
        "a function from the program to its state",
        "start=lambda program: huggingface.load(folder, program).state",
    ),
    "settings": (
        lambda value: isinstance(value, Settings),
        "settings",
        'settings=shardlib.Settings(run="runs/first")',
    ),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """A run, up to the last step done.

    Attributes:
        state: the state after the last step.
        steps: steps done, including those of earlier processes.
        losses: loss of every known step: with a folder all steps, otherwise those of this process.
        seconds: seconds of every known step, like `losses`.
        waited_seconds: part of the seconds of this process spent waiting for batches.
        saved_seconds: additional seconds that this process spent on saving.
        resumed: the step from which this process started; 0 for a new run.
        stopped: why it ended before the last step: "SIGTERM", or the reason given by a callback; ""
            if it did not.
        validations: metrics of every known validation by name, by step.
        busy: fraction of processor time used by other programs during the run; None if unknown.
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
    program: TrainingProgram,
    data: Rows | BatchOf,
    *,
    steps: int,
    seed: int = 0,
    settings: Settings | None = None,
    console: Console | None = None,
    identity: JsonMapping | None = None,
    tokens: int | None = None,
    advice: str = "a smaller learning rate, or another seed",
    later: Sequence[tuple[int, TrainingProgram]] = (),
    start: Callable[[TrainingProgram], TrainState] | None = None,
) -> Fitted:
    """Trains up to a total number of steps, from the newest checkpoint of the run if there is one.

    Args:
        program: result of `shardlib.compile`, or of `shardlib.compile_step` with a metric "loss" or
            the one that `Policy(metric=...)` names.
        data: a dataset (`shardlib.data.open.read`), of which every process reads the rows of its
            devices; or a function from the step, counted from 0, to the whole global batch on the
            host, which must return the same batch each time it is called for a step; with a folder,
            it is called for the first step whenever the run resumes.
        steps: total number of steps, those of earlier processes included; a finished run is
            returned unchanged.
        seed: for `program.init`, if nothing is restored.
        settings: folder, checkpoints, handling of bad losses, validation, callbacks, loggers; by
            default `Settings()`, which stores nothing.
        console: where to show progress; by default nowhere.
        identity: description of the training task as plain data, stored in `run.json`; it must be
            the same when the run is resumed.
        tokens: tokens per batch, for the tokens per second; by default those of the plan.
        advice: suggestion in the error when the loss is no longer finite.
        later: (number of steps before it, program) of programs that take over, in order: for
            growing batches (`shardlib.training.rates.Ramp`). States must have the same layout, as
            they do if `mesh`, `rules` and `zero` are pinned to those of the first plan. A function
            of the step returns batches of the size of its step.
        start: makes the state before the first step where nothing is restored, from weights that
            are read or by surgery (`lambda program: huggingface.load(folder, program).state`); by
            default `program.init(seed)`.

    Returns:
        The last state, with the loss and the seconds of every step; also if the run was stopped
        before its end (`Fitted.stopped`).

    Raises:
        ArgumentError: arguments of the wrong kind, all of them listed; or a seed that is not an
            integer from 0 to 2**31 - 1.
        LayoutError: a program that takes over has another layout of the state.
        TrainingError: the loss is bad, and the policy, or the lack of a checkpoint, leaves no
            alternative.
        RunError: the folder contains another run: another loss, optimizer, seed, model, or other
            data, all of it listed.
        OwnedError: another process writes to the folder, or has taken it over from this one.
        CheckpointError: none of its checkpoints can be restored, or the last state could not be
            saved.
        LaunchError: processes that train together differ in program, data, code or packages, or are
            missing.
        KeyboardInterrupt: Ctrl-C when nothing can be saved, or twice.
    """
    require_kinds(
        "fit",
        _KINDS,
        {"program": program, "data": data, "steps": steps, "settings": settings, "start": start},
        needed=("program", "data", "steps"),
    )
    task = Task(
        programs=((0, program), *later),
        data=data,
        steps=steps,
        seed=read_seed(seed),
        start=start or (lambda program: program.init(seed)),
        settings=settings or Settings(),
        identity=identity or {},
        advice=advice,
    )
    counted = program.plan.estimate.tokens if tokens is None else tokens
    with contextlib.ExitStack() as stack:
        loop = Loop(task, Display(console or Console(quiet=True), steps, counted), stack)
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


# --------------------------------------------------------------------------------------------------
# Training of a byte-level transformer on real text, from the plan to a generated sample.
#
#     result = train(TrainConfig(steps=100))
#     print(result.validation_loss, "against", result.bigram_loss)

#: Non-finite steps are skipped, and gradients are clipped to a norm of 1.
GUARDS = Guards(clip=1.0)


def byte_model(config: TrainConfig) -> TransformerConfig:
    model = models.load(config.model)
    if not isinstance(model, TransformerConfig):
        what = "an encoder-decoder" if isinstance(model, EncoderDecoderConfig) else "your own code"
        raise ModelError(
            f"{config.model} is {what}; `train` trains byte-level reference transformers\nTry:"
            " shardlib.compile(init, loss, optimizer, batch), which gives a program with `init`"
            " and `step`"
        )
    model.check_seq(config.seq)
    if model.vocab_size < 256:
        raise ModelError(
            f"the model {model.name!r} has a vocabulary of {model.vocab_size}; bytes need 256"
        )
    return model


#: CPU devices that are simulated by default.
CPU_DEVICES = 8


def cpu_devices_of_job() -> int:
    """CPU devices to simulate where nobody says how many: those that the processes of the job were
    given, or else `CPU_DEVICES`, as far as processes can share them evenly.
    """
    joined = _jax_compat.coordination()
    processes = 1 if joined is None else joined[2]
    each = os.environ.get(HOST_DEVICES)
    return processes * (max(1, CPU_DEVICES // processes) if each is None else int(each))


def keep_compiled(folder: Path) -> None:
    """Makes XLA keep what it compiles in a folder, so that a process that starts again need not
    compile; a folder that is set already stays.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _machine(config: TrainConfig, console: Console) -> str:
    """The topology to plan for, or the available part of it."""
    name = config.topology or f"cpu:{cpu_devices_of_job()}"
    topology = parse_topology(name)
    if topology.name.startswith("cpu:"):
        try:
            simulate_cpu_devices(topology.devices)
        except TopologyError:
            if not config.elastic:
                raise
    available = jax.device_count()
    if not config.elastic or available >= topology.devices:
        return name
    left = of_size(topology, available)
    console.print(
        f"{available} of {topology.devices} devices are there: planning for {left.name}",
        highlight=False,
    )
    return left.name


def planned(config: TrainConfig, model: TransformerConfig, console: Console) -> Program:
    """Plans a program; on "cpu:N", simulates N devices first."""
    topology = _machine(config, console)
    init, loss = models.build(model)
    batch = models.example_batch(model, config.batch, config.seq)
    with Progress(f"planning {model.name} for {topology}", console=console):
        return api.compile(
            init,
            loss,
            optimizer(config),
            batch,
            topology=topology,
            pin=config.pin,
            name=model.name,
            guards=GUARDS,
        )


def compiled(config: TrainConfig, model: TransformerConfig, console: Console) -> Program:
    """Plans and compiles a program."""
    if config.run is not None:
        keep_compiled(RunFolder(Path(config.run)).compiled)
    program = planned(config, model, console)
    plan = program.plan
    if jax.default_backend() == "cpu" and parse_topology(plan.topology).chip.vendor != "cpu":
        console.print(
            f"there is no {plan.topology} here: the plan for it is carried out on simulated devices"
            " of the CPU, and its predicted times are not theirs",
            highlight=False,
            markup=False,
        )
    console.print(
        f"[bold]{escape(model.name)}[/]: {model.parameter_count():,} parameters; plan for"
        f" {plan.topology}: [bold]{plan.mesh}[/], found in {plan.search.seconds:.2f} s",
        highlight=False,
    )
    with Progress("compiling", console=console):
        program.prepare()
    return program


#: Prompt of the sample.
PROMPT = "def "
#: The first steps of a process, which are slower and not timed.
WARM_UP_STEPS = 3
#: Maximum number of bytes for the bigram model.
BIGRAM_BYTES = 20_000_000
#: Number of batches of held-out text for the validation loss.
VALIDATION_BATCHES = 32


def train(config: TrainConfig, console: Console | None = None) -> TrainResult:
    """Reads the text, plans, compiles, trains, validates and generates a sample.

    Args:
        console: where to show it; by default standard output, or standard error with `config.json`.
            Of several processes only the first shows it.
    """
    first = is_first()
    shown = (console or Console(stderr=config.json)) if first else Console(quiet=True)
    console = Console(quiet=True) if config.quiet else shown
    begin = time.perf_counter()
    model = byte_model(config)
    if config.run is not None:
        folder = RunFolder(Path(config.run))
        try:
            folder.check(_identity(config, model), allow=config.allow_changes)
        except OtherRunError as error:
            _refuse(error, folder, config, model)
        if is_alone():
            refuse_where_owned(folder.checkpoints, str(folder.path))
        if first:
            folder.probe()
    with Progress("reading text", console=console):
        data, held_data = (
            read(config.data, seq=config.seq, seed=config.seed, split=split)
            for split in ("training", "validation")
        )
        held_out = [
            held_data.batch(number * config.batch, config.batch)
            for number in range(VALIDATION_BATCHES)
        ]
        baseline = bigram_loss(_sampled(data), held_out)
    console.print(_kept(config), highlight=False, markup=False)
    console.print(
        f"[bold]{escape(data.name)}[/]: {data.examples_per_epoch:,} examples of {config.seq} bytes,"
        f" {held_data.examples_per_epoch:,} more held out; a byte bigram model has"
        f" {baseline:.3f} nats a byte",
        highlight=False,
    )
    for finding in data.findings:
        console.print(finding.message, highlight=False, markup=False)
    program = compiled(config, model, console)
    fitted = _fitted(program, config, data, console)
    if fitted.stopped:
        raise StoppedError(
            f"{fitted.stopped} ended the run after step {fitted.steps} of {config.steps}; it is"
            f" saved in {config.run}"
        )
    state = fitted.state
    with Progress("validating and writing a sample", console=console):
        validation = statistics.fmean(
            float(program.evaluate(state, batch)["cross_entropy"]) for batch in held_out
        )
        if not math.isfinite(validation):
            raise TrainingError(
                f"the validation loss after {len(fitted.losses)} steps is {validation}\nTry: a"
                f" learning rate below {config.lr:g}, or another seed"
            )
        sample = _sample(program, state, config)
    result = _result(
        program,
        config,
        model,
        fitted,
        validation=validation,
        baseline=baseline,
        sample=sample,
        seconds=time.perf_counter() - begin,
    )
    display.show_result(shown, result, PROMPT)
    if config.json and first:
        print(json.dumps(result.to_json()), flush=True)
    return result


def _refuse(
    error: OtherRunError, folder: RunFolder, config: TrainConfig, model: TransformerConfig
) -> NoReturn:
    """Raises an error that lists all differences between the run in the folder and this one; the
    ones that need planning and tracing are computed quietly.
    """
    quiet = Console(quiet=True)
    try:
        data = read(config.data, seq=config.seq, seed=config.seed, split="training")
        folder.check(
            _identity(config, model),
            traced([(0, planned(config, model, quiet))], data, config.seed),
            config.allow_changes,
        )
    except OtherRunError as complete:
        raise complete from None
    except ShardlibError:
        pass
    raise error


def bigram_loss(
    training: Iterable[Mapping[str, np.ndarray]], held_out: Iterable[Mapping[str, np.ndarray]]
) -> float:
    """Mean cross entropy on held-out batches of equal size, nats per byte, of a model of byte pairs
    whose counts are those of the training batches and one: a baseline for a trained model.

    >>> text = np.frombuffer(b"ab" * 5000, np.uint8)
    >>> batch = {"inputs": text[None, :-1], "targets": text[None, 1:]}
    >>> round(bigram_loss([batch], [batch]), 2)
    0.05
    """
    counts = np.ones(256 * 256)
    for batch in training:
        pairs = batch["inputs"].astype(np.int64) * 256 + batch["targets"]
        counts += np.bincount(pairs.ravel(), minlength=256 * 256)
    table = counts.reshape(256, 256)
    logs = np.log(table / table.sum(1, keepdims=True))
    return float(np.mean([-logs[batch["inputs"], batch["targets"]].mean() for batch in held_out]))


def _sampled(data: TokenDataset) -> Iterator[dict[str, np.ndarray]]:
    """Text for the bigram model: an epoch, or as much as suffices for 65,536 counts."""
    total, chunk = min(data.examples_per_epoch, BIGRAM_BYTES // data.seq + 1), 4096
    return (data.batch(start, min(chunk, total - start)) for start in range(0, total, chunk))


def _fitted(program: Program, config: TrainConfig, data: TokenDataset, console: Console) -> Fitted:
    """The trained run."""
    return fit(
        program,
        data,
        steps=config.steps,
        seed=config.seed,
        settings=config.settings,
        console=console,
        identity=_identity(config, byte_model(config)),
        tokens=config.batch * config.seq,
        advice=f"a learning rate below {config.lr:g}, or another seed",
    )


def _kept(config: TrainConfig) -> str:
    """The folder and the checkpoint rules of the run, in words."""
    if config.run is None:
        return (
            "nothing of this run is kept; with --run FOLDER, a checkpoint every"
            f" {config.save_every} steps is, with metrics and the plan, and the same command goes"
            " on where it was"
        )
    return (
        f"kept in {config.run}: a checkpoint every {config.save_every} steps, of which the newest"
        f" {config.keep} stay; the same command goes on there"
    )


def _identity(config: TrainConfig, model: TransformerConfig) -> JsonObject:
    """The training task as plain data, with the content of a model card in place of its path."""
    fields = {name: value for name, value in asdict(model).items() if name != "name"}
    return {"model": json.loads(json.dumps(fields, default=str)), **config.identity}


def _typical(seconds: Sequence[float]) -> float:
    """Median seconds per step, without the first ones if there are others."""
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


def _sample(program: Program, state: TrainState, config: TrainConfig) -> str:
    if not config.sample_bytes:
        return ""
    state = program.learned(state)
    params, model_state = jax.tree.map(whole, (state.params, state.model_state))
    model = program.loss_program.model.rebuild(params, model_state)
    return generate(
        model, PROMPT.encode(), config.sample_bytes, window=config.seq, seed=config.seed
    ).decode("utf-8", "replace")


def _result(
    program: Program,
    config: TrainConfig,
    model: TransformerConfig,
    fitted: Fitted,
    *,
    validation: float,
    baseline: float,
    sample: str,
    seconds: float,
) -> TrainResult:
    estimate, measured = program.plan.estimate, _typical(fitted.seconds)
    return TrainResult(
        validation_loss=validation,
        bigram_loss=baseline,
        plan=program.plan,
        steps=len(fitted.losses),
        parameters=model.parameter_count(),
        losses=tuple(fitted.losses),
        sample=sample,
        seconds=seconds,
        busy=fitted.busy,
        predicted=Figures(
            step_seconds=estimate.step_seconds,
            tokens_per_second=estimate.tokens_per_second,
            device_bytes=estimate.device_bytes.peak,
        ),
        measured=Figures(
            step_seconds=measured,
            tokens_per_second=config.batch * config.seq / measured,
            device_bytes=program.memory()["peak"],
        ),
    )
