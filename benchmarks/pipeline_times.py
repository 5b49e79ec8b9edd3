"""Step time of a pipeline over that of the same model on one device.

    python -m benchmarks pipeline_times

Four layers of width 128 with 4 heads and a feed-forward of 512 (GELU), a vocabulary of 1024, 32
sequences of 128 tokens, float32, AdamW; two stages with 4 microbatches and four with 8, alone and
with fsdp on eight simulated devices. One device has all cores, as its matmuls are cut into threads,
and works through as many microbatches; a ratio below 1 says that the pipeline makes better use of
the same cores. Its step of the whole batch at once is measured beside it ("single, at once"). On simulated devices the
stages share the cores of the machine, so that a bubble in which a stage still computes is time lost
for the others. Steps alternate in one process; printed are the ratios of median, of least and of
processor time. Programs are equal in loss to 1e-5. Every schedule runs in lockstep and, in rows
that say so, with stages that are programs of their own (`pipeline="programs"`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.environment import alternate, card, command_line, show, simulate_devices, write

simulate_devices(8)

import jax
import optax

from benchmarks.stepping import stepper

CONFIG = card("four-layers")
ROWS, SEQ = 32, 128
MESHES: dict[str, tuple[dict[str, int], int]] = {
    "stage2": ({"stage": 2}, 4),
    "stage4": ({"stage": 4}, 8),
    "stage2-fsdp4": ({"stage": 2, "fsdp": 4}, 4),
    "stage4-fsdp2": ({"stage": 4, "fsdp": 2}, 8),
}
#: Ratios to the single device, by what they are of.
RATIOS = {"ratio": "median_s", "least_ratio": "least_s", "processor_ratio": "processor_s"}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


FORMS = ("lockstep", "programs")


def compare(
    mesh: dict[str, int], microbatches: int, repeats: int, forms: Sequence[str] = FORMS
) -> dict[str, Any]:
    """All schedules on one mesh, in some forms of a pipeline, and the single device."""
    optimizer, devices = optax.adamw(1e-3), 1
    steps = {
        name: stepper(
            CONFIG,
            optimizer,
            ROWS,
            SEQ,
            1,
            {"mesh": {"data": 1}, "microbatches": count, "remat": "none"},
        )
        for name, count in (("single", microbatches), ("single, at once", 1))
    }
    for size in mesh.values():
        devices *= size
    for form, schedule in itertools.product(forms, SCHEDULES):
        virtual = 2 if schedule == "interleaved" else 1
        if virtual * mesh["stage"] <= CONFIG.layers:
            pin = {
                "mesh": mesh,
                "microbatches": microbatches,
                "schedule": schedule,
                "virtual_stages": virtual,
                "remat": "none",
                "pipeline": form,
            }
            steps[schedule if form == "lockstep" else f"{schedule} {form}"] = stepper(
                CONFIG, optimizer, ROWS, SEQ, devices, pin
            )
    losses = {name: step() for name, step in steps.items()}
    assert all(
        abs(loss - losses["single"]) <= 1e-5 * abs(losses["single"]) for loss in losses.values()
    ), f"the programs differ: {losses}"
    found = {name: calls.summary() for name, calls in alternate(steps, repeats).items()}
    return {
        "mesh": mesh,
        "microbatches": microbatches,
        "steps": found,
        **{
            key: {
                name: row[of] / found["single"][of]
                for name, row in found.items()
                if name != "single"
            }
            for key, of in RATIOS.items()
        },
    }


def main() -> None:
    parser = command_line(__doc__, "pipeline_times.json")
    parser.add_argument(
        "--mesh", choices=MESHES, action="append", help="a mesh; all of them when left out"
    )
    parser.add_argument(
        "--form", choices=FORMS, action="append", help="how stages run; all of them when left out"
    )
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each program")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in args.mesh or MESHES:
        row = rows[name] = compare(*MESHES[name], args.repeats, args.form or FORMS)
        show(name, row, *RATIOS)
        jax.clear_caches()
        write(
            args.out,
            {
                "benchmark": "pipeline_times",
                "rows": ROWS,
                "seq": SEQ,
                "repeats": args.repeats,
                "meshes": rows,
            },
            quiet=True,
        )
