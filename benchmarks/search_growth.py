"""Time of a search by devices, layers and logical axes.

    python -m benchmarks search_growth [--many]

Every model is traced once; then the search over six axes is timed in processor seconds of one core,
so that other work on the machine does not count.
The gap of every search is in the table. Of machines that cannot hold the model, the table has how
long the search takes to prove it. With `--many` it has machines of about a million devices, on
which a small batch cannot use them all, or whose numbers of devices are prime, in place of these.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import optax

from benchmarks.environment import RESULTS, command_line, show, table, write
from shardlib import models
from shardlib.errors import InfeasibleError
from shardlib.frontend.model import problem
from shardlib.models.config import TransformerConfig
from shardlib.planner.search import search
from shardlib.planner.workload import Workload, prepare

_TABLE = table("search_growth")
#: (model, topology, batch, tokens): growth with devices, and the two largest.
DEVICES = _TABLE["devices"]
#: Machines that are too small.
TOO_SMALL = _TABLE["too small"]
#: Machines of about a million devices.
MANY = _TABLE["many"]
#: Layers of a Llama 3 70B on 1,024 GPUs.
LAYERS = (8, 20, 80, 320, 512)


def traced(config: TransformerConfig, batch: int, seq: int) -> tuple[Workload, dict[str, float]]:
    """A model prepared for the search, with the seconds of tracing and of preparing."""
    init, loss = models.build(config)
    start = time.process_time()
    found = problem(init, loss, optax.adamw(1e-4), models.example_batch(config, batch, seq))
    middle = time.process_time()
    load = prepare(found, "nvidia")
    return load, {"trace_seconds": middle - start, "prepare_seconds": time.process_time() - middle}


def timed(load: Workload, topology: str) -> dict[str, Any]:
    """The search on one topology."""
    row: dict[str, Any] = {"topology": topology, "colours": len(load.colouring.colours)}
    start = time.process_time()
    try:
        plan = search(load.problem, topology, load=load)
    except InfeasibleError as error:
        return {**row, "infeasible": time.process_time() - start, "answer": str(error)}
    row["joint"] = {
        "seconds": time.process_time() - start,
        "gap": plan.search.gap,
        "evaluations": plan.search.evaluations,
        "mesh": dict(plan.mesh),
        "step_seconds": plan.estimate.step_seconds,
        "mfu": plan.estimate.mfu,
    }
    return row


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--many", action="store_true", help="about a million devices")
    args = parser.parse_args()
    name = "search_growth_many" if args.many else "search_growth"
    rows: list[dict[str, Any]] = []
    loads: dict[tuple[str, int, int], tuple[Workload, dict[str, float]]] = {}

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        show(row["model"], row)

    for model, topology, batch, seq in MANY if args.many else DEVICES + TOO_SMALL:
        config = models.load(model)
        assert isinstance(config, TransformerConfig)
        if (model, batch, seq) not in loads:
            loads[model, batch, seq] = traced(config, batch, seq)
        load, seconds = loads[model, batch, seq]
        note(
            {
                "model": model,
                "layers": config.layers,
                "batch": batch,
                "seq": seq,
                **seconds,
                **timed(load, topology),
            }
        )
    base = models.load("llama3-70b")
    assert isinstance(base, TransformerConfig)
    for layers in () if args.many else LAYERS:
        load, seconds = traced(replace(base, name=f"{layers} layers", layers=layers), 1024, 8192)
        note(
            {
                "model": base.name,
                "layers": layers,
                "batch": 1024,
                "seq": 8192,
                **seconds,
                **timed(load, "128*h100:8"),
            }
        )
    write(
        RESULTS / f"{name}.json",
        {
            "benchmark": name,
            "command": f"python -m benchmarks search_growth{' --many' * args.many}",
            "rows": rows,
        },
    )
