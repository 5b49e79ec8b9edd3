"""Step time of a pipeline over the ideal time of its schedule.

    python -m benchmarks pipeline_efficiency

Two stages on two simulated devices of one process, with a budget of one core each: the process
keeps to two cores, and what is measured on one device beside it runs with all threads of the
process on one of them. The ideal has S stages that divide the work of a microbatch evenly and wait
for nothing but their neighbours: (M + S - 1) / S times the forward and backward pass of one
microbatch on one device, measured beside it, and a bubble of (S - 1) / (M + S - 1). The update is
that of plain descent, and counted. `overhead` is measured over ideal time; `work` is seconds of
processors over those of the ideal, all stages busy in every tick: computing that the ideal does not
have, whatever else the machine does; `bubble` is the measured share of time in which a stage does
not do useful work, 1 - M t / (S T), which has the overhead in it. The fit through the numbers of
microbatches, T = tick (M + S - 1) + rest, tells what a tick costs from what a step costs once.
Stages run in lockstep, and as programs of their own.

Four and more stages cannot be measured so on a machine with two cores. Linux alone: threads are
given their cores by `os.sched_setaffinity` and `/proc`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from benchmarks.environment import alternate, card, command_line, show, simulate_devices, write

STAGES = 2
simulate_devices(STAGES)
CORES = sorted(os.sched_getaffinity(0))[:STAGES]
os.sched_setaffinity(0, CORES)

import jax
import numpy as np
import optax

from benchmarks.stepping import stepper
from shardlib.models.config import TransformerConfig

ROWS, SEQ = 4, 128
MICROBATCHES = (2, 4, 8, 16)
SCHEDULES = ("1f1b", "gpipe", "zero-bubble")


def config(width: int) -> TransformerConfig:
    """Eight layers, with ends that are small beside them."""
    return replace(card("eight-layers"), embed=width, head_dim=width // 4, mlp=4 * width)


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """All threads of the process on some cores."""

    def keep(cores: Sequence[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)

    keep(cores)
    try:
        yield
    finally:
        keep(CORES)


def on_one_core(step: Callable[[], float]) -> Callable[[], float]:
    """A step that has one core."""

    def run() -> float:
        with on_cores(CORES[:1]):
            return step()

    return run


def measure(schedule: str, form: str, width: int, remat: str, repeats: int) -> dict[str, Any]:
    """One schedule with every number of microbatches."""
    optimizer, model = optax.sgd(1e-3), config(width)
    steps = {
        "microbatch": on_one_core(
            stepper(
                model,
                optimizer,
                ROWS,
                SEQ,
                1,
                {"mesh": {"data": 1}, "microbatches": 1, "remat": remat},
            )
        )
    }
    for count in MICROBATCHES:
        steps[str(count)] = stepper(
            model,
            optimizer,
            ROWS * count,
            SEQ,
            STAGES,
            {
                "mesh": {"stage": STAGES},
                "microbatches": count,
                "schedule": schedule,
                "remat": remat,
                "pipeline": form,
            },
        )
    found = {name: calls.summary() for name, calls in alternate(steps, repeats).items()}
    one = found["microbatch"]["median_s"]
    rows = {}
    for count in MICROBATCHES:
        row, ticks = found[str(count)], count + STAGES - 1
        work = ticks * found["microbatch"]["processor_s"]
        rows[str(count)] = {
            **row,
            "work": row["processor_s"] / work,
            "ideal_s": ticks * one / STAGES,
            "overhead": row["median_s"] / (ticks * one / STAGES),
            "bubble": 1 - count * one / (STAGES * row["median_s"]),
            "ideal_bubble": (STAGES - 1) / ticks,
        }
    tick, rest = np.polyfit(
        [count + STAGES - 1 for count in MICROBATCHES],
        [found[str(count)]["median_s"] for count in MICROBATCHES],
        1,
    )
    return {
        "remat": remat,
        "microbatch": found["microbatch"],
        "microbatches": rows,
        "tick_s": float(tick),
        "rest_s": float(rest),
        "tick_overhead": float(tick) * STAGES / one,
    }


def main() -> None:
    parser = command_line(__doc__, "pipeline_efficiency.json")
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        action="append",
        help="a schedule; all of them when left out",
    )
    parser.add_argument(
        "--form",
        choices=("lockstep", "programs"),
        action="append",
        help="how stages run; both when left out",
    )
    parser.add_argument("--width", type=int, default=256, help="width of the model")
    parser.add_argument("--remat", default="none", choices=("none", "dots", "full"))
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each program")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for schedule, form in itertools.product(
        args.schedule or SCHEDULES, args.form or ("lockstep", "programs")
    ):
        row = rows[f"{schedule} {form}"] = measure(
            schedule, form, args.width, args.remat, args.repeats
        )
        show(f"{schedule} {form}", row)
        jax.clear_caches()
        write(
            args.out,
            {
                "benchmark": "pipeline_efficiency",
                "stages": STAGES,
                "rows": ROWS,
                "seq": SEQ,
                "width": args.width,
                "repeats": args.repeats,
                "schedules": rows,
            },
            quiet=True,
        )
