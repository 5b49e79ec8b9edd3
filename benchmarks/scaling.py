"""Processor seconds of the questions about a plan, on one core.

    python -m benchmarks scaling

Times in one process: the strong and weak scaling sweeps of a model from 8 to 16,384 GPUs (all 12
machines, tracing included), and for its plan on one of them the replan after the loss of a host,
the alternatives, the constraints and the sensitivity. Each has a promise in seconds, which is
written beside the figure; the exit code is 1 if one is broken.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from benchmarks.environment import command_line, show, simulate_devices, write

#: Seconds that each may take.
PROMISES = {
    "strong_sweep": 60.0,
    "weak_sweep": 120.0,
    "replan": 1.0,
    "alternatives": 5.0,
    "constraints": 5.0,
    "sensitivity": 30.0,
}


def timed(function: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median processor seconds of a call, so that other work on the machine does not count, and its
    last result.
    """
    seconds: list[float] = []
    result: Any = None
    for _ in range(repeats):
        start = time.process_time()
        result = function()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), result


def main() -> int:
    parser = command_line(__doc__, "scaling_llama3_70b.json")
    parser.add_argument("--model", default="llama3-70b")
    parser.add_argument(
        "--topology", default="16*h100:8", help="family of machines, and the one that loses a host"
    )
    parser.add_argument("--after", default="15*h100:8", help="what is left of it")
    parser.add_argument("--devices", default="8..16384")
    parser.add_argument("--batch", type=int, default=1024, help="sequences in a batch")
    parser.add_argument(
        "--weak-batch",
        type=int,
        default=8,
        help="sequences in the batch of the smallest machine, for weak scaling",
    )
    parser.add_argument("--seq", type=int, default=8192, help="tokens in a sequence")
    parser.add_argument("--repeats", type=int, default=3, help="of everything but the sweeps")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core
    simulate_devices(1)

    import optax

    import shardlib
    from shardlib import models
    from shardlib.cli.inputs import sizes

    config, devices = models.load(args.model), sizes(args.devices)
    init, loss = models.build(config)
    given = {"init": init, "loss": loss, "optimizer": optax.adamw(1e-4), "name": config.name}

    def sweep(batch: Any) -> Any:
        return shardlib.scale(**given, batch=batch, topology=args.topology, devices=devices)

    def batch(sequences: int) -> Any:
        return models.example_batch(config, sequences, args.seq)

    strong_seconds, strong = timed(lambda: sweep(batch(args.batch)), 1)
    weak_seconds, weak = timed(
        lambda: sweep(lambda count: batch(args.weak_batch * count // devices[0])), 1
    )
    plan = shardlib.plan(**given, batch=batch(args.batch), topology=args.topology)
    replan_seconds, replan = timed(lambda: plan.replan(args.after), args.repeats)
    seconds = {
        "strong_sweep": strong_seconds,
        "weak_sweep": weak_seconds,
        "replan": replan_seconds,
        "alternatives": timed(plan.alternatives, args.repeats)[0],
        "constraints": timed(plan.constraints, args.repeats)[0],
        "sensitivity": timed(plan.sensitivity, args.repeats)[0],
    }
    broken = [name for name, promise in PROMISES.items() if seconds[name] > promise]
    write(
        args.out,
        {
            "benchmark": "scaling",
            "model": args.model,
            "topology": args.topology,
            "after": args.after,
            "batch": args.batch,
            "weak_batch": args.weak_batch,
            "seq": args.seq,
            "cores": 1,
            "seconds": seconds,
            "promises": PROMISES,
            "broken": broken,
            "strong": strong.to_json(),
            "weak": weak.to_json(),
            "replan": {
                key: value
                for key, value in replan.to_json().items()
                if key
                in (
                    "slowdown",
                    "moved_bytes",
                    "lost_bytes",
                    "moving_seconds",
                    "changed",
                    "notes",
                )
            },
        },
    )
    print(f"{strong}\n{weak}")
    show("seconds", seconds)
    return 1 if broken else 0
