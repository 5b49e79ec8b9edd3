"""Training a byte-level transformer on real text, from the plan to a sample of what it learned.

result = train(TrainConfig(steps=100))
print(result.validation_loss, "against", result.bigram_loss)
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import optax
from rich.console import Console
from rich.markup import escape

from shardlib import compiler, models
from shardlib.checkpointing.keep import Keep
from shardlib.checkpointing.owner import refuse_where_owned
from shardlib.data.batches.dataset import TokenDataset
from shardlib.data.open import read
from shardlib.errors import (
    ModelError,
    ShardlibError,
    StoppedError,
    TopologyError,
    TrainingError,
    raise_all,
)
from shardlib.hardware.family import of_size
from shardlib.hardware.topology import topology as parse_topology
from shardlib.lowering.program.checks.arguments import SEEDS
from shardlib.lowering.program.guards import Guards
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.models import EncoderDecoderConfig, TransformerConfig
from shardlib.processes.devices import keep_compiled, simulate_cpu_devices
from shardlib.processes.ranks import is_alone, is_first, whole
from shardlib.training import display
from shardlib.training.fit import Fitted, Settings, fit
from shardlib.training.measures import bigram
from shardlib.training.measures.judge import Policy
from shardlib.training.result import Figures, TrainResult
from shardlib.training.run.folder import OtherRunError, RunFolder
from shardlib.training.run.identity import traced
from shardlib.training.sampling import generate

#: What the sample begins with.
PROMPT = "def "
#: Steps that are not timed: the first ones of a process are slower.
WARM_UP_STEPS = 3
#: Bytes that the bigram model learns from, at most.
BIGRAM_BYTES = 20_000_000
#: Steps that are not finite are left out, and gradients are clipped to a norm of 1.
GUARDS = Guards(clip=1.0)
#: Steps in a row that may be left out.
SKIPS = 4
#: Batches of held-out text that the validation loss is measured on.
VALIDATION_BATCHES = 32


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What an operator may change about a run.

    Attributes:
        data: file or folder of text; None for the Python standard library.
        model: preset, configuration file or model card; its vocabulary has at least 256 tokens, one
            for each byte.
        steps: optimizer steps.
        batch: sequences of the global batch.
        seq: bytes of a sequence.
        lr: peak learning rate; warms up over the first steps and falls to a twentieth along a
            cosine.
        seed: of parameters, batches and the sample.
        topology: what to plan for; "cpu:8" simulates eight devices on this machine.
        pin: decisions fixed by hand.
        sample_bytes: bytes of text to write at the end; 0 for none.
        run: folder of the run, which keeps checkpoints and metrics and goes on where it was; None
            keeps nothing.
        save_every: steps between checkpoints.
        keep: newest checkpoints that stay.
        hang_seconds: how long a step may take before the process ends as hung; None for any time.
        spike: standard deviations above the last losses that make a spike, after which the run goes
            back to its newest checkpoint; 0 looks for none.
        profile: (first step, number of steps) to record a trace of.
        allow_changes: what may be another than the run was begun with, see `Settings`.
        elastic: where fewer devices are there than `topology` has, plan for those that are.
        json: print one JSON object as the last line of standard output; everything else goes to
            standard error.
        quiet: show nothing but the result.

    Raises:
        ModelError: numbers out of range, all of them listed.
    """

    data: str | Path | None = None
    model: str = "demo"
    steps: int = 400
    batch: int = 16
    seq: int = 128
    lr: float = 4e-3
    seed: int = 0
    topology: str = "cpu:8"
    pin: Mapping[str, Any] | None = None
    sample_bytes: int = 300
    run: str | Path | None = None
    save_every: int = 50
    keep: int = 3
    hang_seconds: float | None = None
    spike: float = 20.0
    profile: tuple[int, int] | None = None
    allow_changes: tuple[str, ...] = ()
    elastic: bool = False
    json: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {getattr(self, name)!r}; it must be at least 1"
            for name in ("steps", "batch", "seq")
            if getattr(self, name) < 1
        ]
        if not (math.isfinite(self.lr) and self.lr > 0):
            failures.append(f"lr is {self.lr!r}; it must be positive")
        failures += [
            f"{name} is {getattr(self, name)!r}; it must not be negative"
            for name in ("seed", "sample_bytes")
            if getattr(self, name) < 0
        ]
        failures += (
            [f"seed is {self.seed!r}; it must be below {SEEDS}"] if self.seed >= SEEDS else []
        )
        if self.run is None and self.profile is not None:
            failures.append("profile needs a folder to write to: run")
        if failures:
            raise_all(ModelError, "the training run is not usable", failures)

    @property
    def settings(self) -> Settings:
        """How the run is kept, watched and judged.

        Raises:
            ModelError: numbers out of range.
        """
        return Settings(
            run=self.run,
            save_every=self.save_every,
            keep=Keep(newest=self.keep),
            policy=Policy(spike=self.spike, skips=SKIPS),
            hang_seconds=self.hang_seconds,
            profile=self.profile,
            allow_changes=self.allow_changes,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What is trained, in words: what processes of one run have in common. The model and the
        data count by what is in them (`_identity`, `TokenDataset.digest`), not by where they are.
        """
        return {
            "steps": self.steps,
            "batch": self.batch,
            "seq": self.seq,
            "lr": self.lr,
            "seed": self.seed,
        }


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with a short warm-up and a cosine; gradients are clipped before (`GUARDS`)."""
    warm_up = min(max(config.steps // 10, 1), 50)
    rate = optax.warmup_cosine_decay_schedule(
        config.lr / 20, config.lr, warm_up, max(config.steps, warm_up + 1), config.lr / 20
    )
    return optax.adamw(rate, b2=0.95, weight_decay=0.05)


def train(config: TrainConfig, console: Console | None = None) -> TrainResult:
    """Reads the text, plans, compiles, trains, validates and writes a sample.

    Args:
        config: what to do.
        console: where to show it; by default standard output, or standard error with `config.json`.
            Of several processes the first shows it.

    Raises:
        ShardlibError: of the kind that says what is wrong: data, model, topology, pin, or nothing
            fits.
        TrainingError: the loss is no longer finite.
        RunError: the folder holds another run.
        OwnedError: another process writes to the folder.
        CheckpointError: its checkpoints cannot be used, or the last state could not be saved.
        LaunchError: processes that train together do not fit each other.
        StoppedError: a signal asked for an end, and the run has saved what it did.
        KeyboardInterrupt: Ctrl-C where nothing is kept, after saying where the run stopped.
    """
    first = is_first()
    shown = (console or Console(stderr=config.json)) if first else Console(quiet=True)
    console = Console(quiet=True) if config.quiet else shown
    begin = time.perf_counter()
    model = _byte_model(config)
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
    with console.status("reading text"):
        data, held = (
            read(config.data, seq=config.seq, seed=config.seed, split=split)
            for split in ("training", "validation")
        )
        held_out = [
            held.batch(number * config.batch, config.batch) for number in range(VALIDATION_BATCHES)
        ]
        baseline = bigram.cross_entropy(bigram.fit(_sampled(data)), held_out)
    console.print(_kept(config), highlight=False, markup=False)
    console.print(
        f"[bold]{escape(data.name)}[/]: {data.examples_per_epoch:,} pieces of {config.seq} bytes,"
        f" {held.examples_per_epoch:,} more held out; a byte bigram model has {baseline:.3f} nats a"
        " byte",
        highlight=False,
    )
    for finding in data.findings:
        console.print(finding.message, highlight=False, markup=False)
    program = _compile(config, model, console)
    fitted = _fitted(program, config, data, console)
    if fitted.stopped:
        raise StoppedError(
            f"{fitted.stopped} ended the run after step {fitted.steps} of {config.steps}; it is"
            f" saved in {config.run}"
        )
    state, losses, seconds = fitted.state, fitted.losses, fitted.seconds
    with console.status("validating and writing a sample"):
        validation = statistics.fmean(
            float(program.evaluate(state, batch)["cross_entropy"]) for batch in held_out
        )
        if not math.isfinite(validation):
            raise TrainingError(
                f"the validation loss after {len(losses)} steps is {validation}\nTry: a learning"
                f" rate below {config.lr:g}, or another seed"
            )
        sample = _sample(program, state, config)
    result = _result(
        program,
        config,
        model,
        busy=fitted.busy,
        losses=losses,
        step_seconds=seconds,
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
    """Says that the folder holds another run, with all that is different: words can be compared at
    once, and what is traced and read only after planning, quietly.

    Raises:
        RunError: with all differences; where they cannot all be had, with those in words.
    """
    quiet = Console(quiet=True)
    try:
        data = read(config.data, seq=config.seq, seed=config.seed, split="training")
        folder.check(
            _identity(config, model),
            traced([(0, _planned(config, model, quiet))], data, config.seed),
            config.allow_changes,
        )
    except OtherRunError as complete:
        raise complete from None
    except ShardlibError:
        pass
    raise error


def _byte_model(config: TrainConfig) -> TransformerConfig:
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


def _machine(config: TrainConfig, console: Console) -> str:
    """What to plan for: the topology, or as much of it as is there."""
    wanted = parse_topology(config.topology)
    if wanted.name.startswith("cpu:"):
        try:
            simulate_cpu_devices(wanted.devices)
        except TopologyError:
            if not config.elastic:
                raise
    found = jax.device_count()
    if not config.elastic or found >= wanted.devices:
        return config.topology
    left = of_size(wanted, found)
    console.print(
        f"{found} of {wanted.devices} devices are there: planning for {left.name}", highlight=False
    )
    return left.name


def _planned(config: TrainConfig, model: TransformerConfig, console: Console) -> Program:
    """Plans; on "cpu:N", simulates N devices first."""
    topology = _machine(config, console)
    init, loss = models.build(model)
    batch = models.example_batch(model, config.batch, config.seq)
    with console.status(f"planning {model.name} for {topology}"):
        return compiler.compile(
            init,
            loss,
            optimizer(config),
            batch,
            topology=topology,
            pin=config.pin,
            name=model.name,
            guards=GUARDS,
        )


def _compile(config: TrainConfig, model: TransformerConfig, console: Console) -> Program:
    """Plans and compiles."""
    if config.run is not None:
        keep_compiled(RunFolder(Path(config.run)).compiled)
    program = _planned(config, model, console)
    plan = program.plan
    if jax.default_backend() == "cpu" and parse_topology(config.topology).chip.vendor != "cpu":
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
    with console.status("compiling"):
        program.prepare()
    return program


def _sampled(data: TokenDataset) -> Iterator[dict[str, np.ndarray]]:
    """Text that the bigram model learns from: an epoch, or as much of it as makes no difference to
    65,536 counts.
    """
    total, chunk = min(data.examples_per_epoch, BIGRAM_BYTES // data.seq + 1), 4096
    return (data.batch(start, min(chunk, total - start)) for start in range(0, total, chunk))


def _fitted(program: Program, config: TrainConfig, data: TokenDataset, console: Console) -> Fitted:
    """The run, as far as it went."""
    return fit(
        program,
        data,
        steps=config.steps,
        seed=config.seed,
        settings=config.settings,
        console=console,
        identity=_identity(config, _byte_model(config)),
        tokens=config.batch * config.seq,
        advice=f"a learning rate below {config.lr:g}, or another seed",
    )


def _kept(config: TrainConfig) -> str:
    """Where the run is kept, and how."""
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


def _identity(config: TrainConfig, model: TransformerConfig) -> dict[str, Any]:
    """What is trained, in words, with what a model card says in place of its path."""
    fields = {name: value for name, value in asdict(model).items() if name != "name"}
    return {"model": json.loads(json.dumps(fields, default=str)), **config.identity}


def _typical(seconds: Sequence[float]) -> float:
    """Median seconds of a step, the first ones left out where there are others."""
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


def _sample(program: Program, state: TrainState, config: TrainConfig) -> str:
    if not config.sample_bytes:
        return ""
    params, model_state = jax.tree.map(whole, (state.params, state.model_state))
    model = program.model.rebuild(params, model_state)
    return generate(
        model, PROMPT.encode(), config.sample_bytes, window=config.seq, seed=config.seed
    ).decode("utf-8", "replace")


def _result(
    program: Program,
    config: TrainConfig,
    model: TransformerConfig,
    *,
    losses: Sequence[float],
    step_seconds: Sequence[float],
    validation: float,
    baseline: float,
    sample: str,
    seconds: float,
    busy: float | None,
) -> TrainResult:
    estimate, measured = program.plan.estimate, _typical(step_seconds)
    return TrainResult(
        validation_loss=validation,
        bigram_loss=baseline,
        plan=program.plan,
        steps=len(losses),
        parameters=model.parameter_count(),
        losses=tuple(losses),
        sample=sample,
        seconds=seconds,
        busy=busy,
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
