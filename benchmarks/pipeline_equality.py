"""Loss and gradients of pipelines beside those of the unsharded model, under every schedule.

    python -m benchmarks pipeline_equality [--only transformer --only 1f1b ...]

The product of three models (stacked layers under a scan; a decoder written out in a Python loop,
every layer of which reads an encoder's output; Linen's `nn.scan` with recomputation of its own),
the four schedules, {2, 4, 8} stages, {S, 2S, 4S} microbatches and a second axis of two devices:
fsdp (ZeRO 3), tensor or data. Recomputation is "none", "dots" and "full" with S, 2S and 4S
microbatches. Models have eight layers, sixteen where eight stages hold two chunks each. Loss and
gradients of one step on simulated devices are compared with those of the model alone on one device;
the allowed error is 1e-5 of the largest element of each array (`tests/zoo/parity.py`). What is in
the results already is not done again, as long as the code is the same; every row says with a digest
of the code with which it was run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.environment import (
    command_line,
    missing,
    show,
    simulate_devices,
    source_digest,
    stored,
    write,
)

simulate_devices(16)
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0"  # hundreds of compilations, each of which runs once
)

import jax
import numpy as np

from shardlib.errors import ShardlibError
from tests.lowering import models
from tests.zoo import Case, encoder_decoder, linen_transformer
from tests.zoo.case import nnx_case
from tests.zoo.parity import FLOOR, TOLERANCE, errors, run_sharded

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
STAGES, TIMES, AXES = (2, 4, 8), (1, 2, 4), ("fsdp", "tensor", "data")
REMAT = {1: "none", 2: "dots", 4: "full"}
#: Rows of the batch: two for every microbatch of the longest pipeline, one on each device of the
#: second axis.
ROWS = 2 * max(STAGES) * max(TIMES)


def transformer(layers: int) -> Case:
    """The decoder of the lowering tests."""
    return nnx_case(
        "transformer",
        lambda rngs: models.Transformer(rngs, layers),
        lambda model, batch: model(batch["inputs"]),
        lambda logits, batch: models.cross_entropy(logits, batch["targets"]),
        models.transformer_batch(ROWS),
        annotated=True,
        batch_axes={"inputs": ("batch", "seq"), "targets": ("batch", "seq")},
    )


MODELS: dict[str, Callable[[int], Case]] = {
    "transformer": transformer,
    "encoder-decoder": lambda layers: encoder_decoder.case(annotated=True, layers=layers),
    "linen-decoder": lambda layers: linen_transformer.case(annotated=True, layers=layers),
}


@functools.cache
def model(name: str, layers: int) -> Case:
    """A model with a batch of `ROWS` rows."""
    case = MODELS[name](layers)
    random = np.random.default_rng(7)
    return dataclasses.replace(
        case,
        batch={
            key: random.integers(0, value.max(), (ROWS, *value.shape[1:]), dtype=value.dtype)
            for key, value in case.batch.items()
        },
    )


def grid() -> Iterator[tuple[str, dict[str, Any], int]]:
    """(model, pins, layers) of every case; the first third has all models, schedules, stages and
    microbatches, with one second axis each.
    """
    for turn, (number, (name, stages, times, schedule)) in itertools.product(
        range(len(AXES)), enumerate(itertools.product(MODELS, STAGES, TIMES, SCHEDULES))
    ):
        axis = AXES[(number + number // len(SCHEDULES) + turn) % len(AXES)]
        virtual = 2 if schedule == "interleaved" else 1
        pin = {
            "mesh": {"stage": stages, axis: 2},
            "microbatches": times * stages,
            "schedule": schedule,
            "remat": REMAT[times],
            "virtual_stages": virtual,
        }
        yield (
            name,
            pin | ({"zero": 3, "gather": "use"} if axis == "fsdp" else {}),
            16 if virtual * stages > 8 else 8,
        )


def label(name: str, pin: dict[str, Any]) -> str:
    """A case in a few words."""
    return (
        f"{name} {pin['schedule']}"
        f" {' '.join(f'{axis}{size}' for axis, size in pin['mesh'].items())} m{pin['microbatches']}"
        f" {pin['remat']}"
    )


def measure(name: str, pin: dict[str, Any], layers: int) -> dict[str, Any]:
    """The worst error of one case as a multiple of what is allowed."""
    case, start = model(name, layers), time.perf_counter()
    try:
        sharded = run_sharded(case, pin, devices=2 * pin["mesh"]["stage"], place=True)
    except ShardlibError as error:
        return {"failed": f"{type(error).__name__}: {error}"[:1000]}
    plan = sharded.plan
    assert (
        plan.mesh["stage"] == pin["mesh"]["stage"]
        and plan.schedule == pin["schedule"]
        and plan.microbatches == pin["microbatches"]
    ), plan.decisions
    found = errors(sharded.loss, sharded.gradients, case.reference(0))
    where = max(found, key=lambda path: found[path])
    return {
        "error": found[where],
        "relative_error": found[where] * TOLERANCE,
        "where": where,
        "loss_error": found["loss"] * TOLERANCE,
        "layers": layers,
        "seconds": time.perf_counter() - start,
    }


def main() -> int:
    """Runs what is missing of the grid and writes the table; 1 when some number is wrong."""
    parser = command_line(__doc__, "pipeline_equality.json")
    parser.add_argument("--only", action="append", default=[], help="a word that labels have")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case later")
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = stored(args.out, "cases")
    source = source_digest("lowering", "tracing", "annotation", "schedules", "propagation")
    cases = ((label(name, pin), (name, pin, layers)) for name, pin, layers in grid())
    chosen = (case for case in cases if set(args.only) <= set(case[0].split()))
    for key, case in missing(chosen, rows, source, redo=args.again, seconds=args.seconds):
        row = measure(*case)
        rows[key] = {**row, "source": source if "error" in row else "failed"}
        show(key, rows[key])
        write(args.out, report(rows), quiet=True)
        if len(rows) % len(SCHEDULES) == 0:
            jax.clear_caches()
    return int(report(rows)["wrong"] > 0)


def report(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What there is so far, with the number of wrong or failed cases."""
    errors: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    for key, row in rows.items():
        errors[key.split()[1]] += [row["relative_error"]] if "error" in row else []
    return {
        "benchmark": "pipeline_equality",
        "tolerance": TOLERANCE,
        "floor": FLOOR,
        "runs": len(rows),
        "wrong": sum(row.get("error", 2) > 1 for row in rows.values()),
        "worst_relative_error": {name: max(some, default=None) for name, some in errors.items()},
        "cases": rows,
    }
