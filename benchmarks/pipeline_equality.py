"""Does a pipeline compute the numbers of the unsharded model, under every schedule?

    python benchmarks/pipeline_equality.py [--only transformer --only 1f1b ...]

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
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.environment import RESULTS, command_line, simulate_devices, source_digest, write

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
        causal="inputs",
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
    parser = command_line(__doc__)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="a word of a case's label; cases that have all of them",
    )
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument(
        "--missing",
        action="store_true",
        help="run only what is not there at all, whatever code the rest was run with",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no case after so long; another run goes on from there",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "pipeline_equality.json")
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = (
        json.loads(args.out.read_text())["cases"] if args.out.exists() else {}
    )
    source = source_digest("lowering", "tracing", "annotation", "schedules", "propagation")
    start = time.perf_counter()
    for name, pin, layers in grid():
        key = label(name, pin)
        if time.perf_counter() - start > args.seconds:
            print("out of time", flush=True)
            break
        if not set(args.only) <= set(key.split()) or (
            not args.again
            and "error" in rows.get(key, {})
            and (args.missing or rows[key]["source"] == source)
        ):
            continue
        rows[key] = {**measure(name, pin, layers), "source": source}
        print(
            f"{key:60s} {rows[key].get('relative_error', 'FAILED')}"
            f" {rows[key].get('seconds', 0):.1f} s",
            flush=True,
        )
        if rows[key].get("error", 2) > 1:
            print(f"WRONG {key}: {rows[key]}", flush=True)
        save(args.out, rows)
        if len(rows) % len(SCHEDULES) == 0:
            jax.clear_caches()
    return int(save(args.out, rows) > 0)


def save(path: Path, rows: dict[str, dict[str, Any]]) -> int:
    """Writes what there is so far; returns the number of wrong or failed cases."""
    wrong = sum(row.get("error", 2) > 1 for row in rows.values())
    worst = {
        schedule: max(
            (
                row["relative_error"]
                for key, row in rows.items()
                if key.split()[1] == schedule and "error" in row
            ),
            default=None,
        )
        for schedule in SCHEDULES
    }
    write(
        path,
        {
            "benchmark": "pipeline_equality",
            "tolerance": TOLERANCE,
            "floor": FLOOR,
            "runs": len(rows),
            "wrong": wrong,
            "worst_relative_error": worst,
            "cases": rows,
        },
        quiet=True,
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
