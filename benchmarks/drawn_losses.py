"""Drawn losses under drawn plans beside plain JAX.

    python -m benchmarks drawn_losses --count 200 [--random]

Losses are drawn (`tests/zoo/losses.py`), and for each a plan: a mesh of up to eight simulated
devices, a ZeRO stage, microbatches, and stages in both forms. Loss and gradients of one step are
compared with those of plain JAX on one device. Of coupled losses a plan with microbatches must be
refused, and the plan that shardlib finds by itself must be right. With `--random` the losses draw
random numbers (`tests/zoo/random_losses.py`): those of the whole batch, or several microbatches are
refused. The number that matters: wrong results.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Without the second flag a fusion keeps more bits of bfloat16 than another program of the same draws.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_allow_excess_precision=false"
)

import flax
import jax
import numpy as np

import shardlib
from benchmarks.environment import RESULTS, command_line, show, stored, table
from tests.zoo import losses, random_losses
from tests.zoo.parity import capture

BOUND = 1e-5
MESHES = table("drawn_losses")


def drawn_pin(rng: random.Random) -> dict[str, Any]:
    """A plan, pinned."""
    mesh = rng.choice(MESHES)
    ways = mesh.get("data", 1) * mesh.get("fsdp", 1)
    pin: dict[str, Any] = {
        "mesh": mesh,
        "microbatches": rng.choice([n for n in (2, 4, 8) if losses.ROWS % (ways * n) == 0]),
    }
    if "fsdp" in mesh:
        pin["zero"] = rng.choice([1, 2, 3])
    if "stage" in mesh:
        pin.update(
            schedule=rng.choice(["gpipe", "1f1b"]), pipeline=rng.choice(["lockstep", "programs"])
        )
    elif rng.random() < 0.3:
        pin["remat"] = "full"
    return pin


def apart(found: Any, wanted: Any) -> float:
    """The largest difference of two trees, relative to the largest element of each array; 0 where
    both are not numbers.
    """
    worst = 0.0
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, two = np.asarray(one, np.float64), np.asarray(two, np.float64)
        if np.array_equal(np.isnan(one), np.isnan(two)):
            worst = max(
                worst,
                float(
                    np.nanmax(np.abs(one - two), initial=0.0)
                    / max(1e-3, float(np.nanmax(np.abs(two), initial=0.0)))
                ),
            )
        else:
            return float("inf")
    return worst


def difference(program: shardlib.Program, loss: Any, batch: Any) -> float:
    """How far loss and gradients of a step are from those of plain JAX."""
    state = program.init(0)
    params = jax.tree.map(np.asarray, state.params)
    state, metrics = program.step(state, batch)
    return apart(
        (metrics["loss"], state.opt_state), jax.jit(jax.value_and_grad(loss))(params, batch)
    )


def case(seed: int) -> dict[str, Any]:
    """One loss under one plan."""
    rng = random.Random(seed)
    drawn, pin, batch = losses.draw(rng), drawn_pin(rng), losses.batch(seed)
    row: dict[str, Any] = {"seed": seed, "loss": drawn.name, "coupled": drawn.coupled, "pin": pin}

    def compiled(pin: dict[str, Any] | None) -> shardlib.Program:
        return shardlib.compile(
            shardlib.tree(losses.params, losses.AXES),
            drawn.loss,
            capture(),
            batch,
            topology="cpu:8",
            pin=pin,
        )

    if drawn.coupled:
        try:
            compiled(pin)
            return {
                **row,
                "outcome": "wrong",
                "why": "microbatches of a coupled loss were not refused",
            }
        except shardlib.PinError as error:
            row["refused"] = str(error).splitlines()[0]
        parts = ("microbatches", "schedule", "pipeline")
        pin = {name: value for name, value in pin.items() if name not in parts}
    program = compiled(pin)
    error = difference(program, drawn.loss, batch)
    return {
        **row,
        "microbatches": program.plan.microbatches,
        "error": error,
        "outcome": (
            "right"
            if error <= BOUND and (not drawn.coupled or program.plan.microbatches == 1)
            else "wrong"
        ),
    }


def random_case(seed: int) -> dict[str, Any]:
    """One loss that draws random numbers, under one plan."""
    rng = random.Random(seed)
    drawn, pin = random_losses.draw(rng), drawn_pin(rng)
    while not drawn.layers and ("stage" in pin["mesh"] or "remat" in pin):
        pin = drawn_pin(rng)
    row: dict[str, Any] = {"seed": seed, "loss": drawn.name, "pin": pin}

    try:
        program = random_losses.program(drawn, pin)
    except shardlib.PinError as error:
        if drawn.exact:
            raise
        row["refused"] = str(error)[:400]
        mesh = {axis: size for axis, size in pin["mesh"].items() if axis != "stage"}
        program = random_losses.program(drawn, {"mesh": mesh or {"data": 2}})
    error = difference(program, drawn.loss, drawn.batch)
    return {
        **row,
        "microbatches": program.plan.microbatches,
        "error": error,
        "outcome": "right" if error <= BOUND else "wrong",
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many losses")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--random", action="store_true", help="losses that draw random numbers")
    parser.add_argument("--out", type=Path, help="default: a file in benchmarks/results")
    options = parser.parse_args()
    name = "random_losses" if options.random else "drawn_losses"
    options.out = options.out or RESULTS / f"{name}.json"
    key = f"jax {jax.__version__}, flax {flax.__version__}"
    results = stored(options.out)
    rows = {row["seed"]: row for row in results.get(key, {}).get("rows", [])}
    for seed in range(options.first, options.first + options.count):
        if seed in rows:
            continue
        try:
            rows[seed] = random_case(seed) if options.random else case(seed)
        except Exception as error:
            rows[seed] = {
                "seed": seed,
                "outcome": "failed",
                "why": f"{type(error).__name__}: {error}"[:400],
            }
        show(str(seed), rows[seed])
        listed = [rows[at] for at in sorted(rows)]
        outcomes = {
            name: sum(row["outcome"] == name for row in listed)
            for name in ("right", "wrong", "failed")
        }
        worst = max(
            (row.get("error", 0.0) for row in listed if row["outcome"] == "right"), default=0.0
        )
        results[key] = {
            "command": f"python -m benchmarks drawn_losses --count {len(listed)}"
            + " --random" * options.random,
            "outcomes": outcomes,
            "worst_error_of_right_ones": worst,
            "bound": BOUND,
            "rows": listed,
        }
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        jax.clear_caches()
    print({name: value for name, value in results[key].items() if name != "rows"})
