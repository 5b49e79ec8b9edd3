"""Training a byte-level transformer on real text, from the plan to a sample of what it learned.

result = train(TrainConfig(steps=100))
print(result.validation_loss, "against", result.bigram_loss)
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape

from shardlib.checkpointing.owner import refuse_where_owned
from shardlib.data.batches.dataset import TokenDataset
from shardlib.data.open import read
from shardlib.errors import (
    ShardlibError,
    StoppedError,
    TrainingError,
)
from shardlib.lowering.islands.learned import first_of, learned
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.models import TransformerConfig
from shardlib.processes.ranks import is_alone, is_first
from shardlib.processes.values import whole
from shardlib.training import display
from shardlib.training.byte_program import byte_model, compiled, planned
from shardlib.training.config import TrainConfig
from shardlib.training.fit import Fitted, fit
from shardlib.training.measures import bigram
from shardlib.training.result import Figures, TrainResult
from shardlib.training.run.folder import RunFolder
from shardlib.training.run.identity import traced
from shardlib.training.run.manifest import OtherRunError
from shardlib.training.sampling import generate
from shardlib.untrusted.json_types import JsonObject

#: What the sample begins with.
PROMPT = "def "
#: Steps that are not timed: the first ones of a process are slower.
WARM_UP_STEPS = 3
#: Bytes that the bigram model learns from, at most.
BIGRAM_BYTES = 20_000_000
#: Batches of held-out text that the validation loss is measured on.
VALIDATION_BATCHES = 32


def train(config: TrainConfig, console: Console | None = None) -> TrainResult:
    """Reads the text, plans, compiles, trains, validates and writes a sample.

    Args:
        console: where to show it; by default standard output, or standard error with `config.json`.
            Of several processes the first shows it.
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
        f"[bold]{escape(data.name)}[/]: {data.examples_per_epoch:,} examples of {config.seq} bytes,"
        f" {held.examples_per_epoch:,} more held out; a byte bigram model has {baseline:.3f} nats a"
        " byte",
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
    with console.status("validating and writing a sample"):
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
    """Says that the folder holds another run, with all that is different: words can be compared at
    once, and what is traced and read only after planning, quietly.
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
        identity=_identity(config, byte_model(config)),
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


def _identity(config: TrainConfig, model: TransformerConfig) -> JsonObject:
    """What is trained, in words, with what a model card says in place of its path."""
    fields = {name: value for name, value in asdict(model).items() if name != "name"}
    return {"model": json.loads(json.dumps(fields, default=str)), **config.identity}


def _typical(seconds: Sequence[float]) -> float:
    """Median seconds of a step, the first ones left out where there are others."""
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


def _sample(program: Program, state: TrainState, config: TrainConfig) -> str:
    if not config.sample_bytes:
        return ""
    state = learned(program, state)
    params, model_state = jax.tree.map(whole, (state.params, state.model_state))
    model = first_of(program).model.rebuild(params, model_state)
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
