"""Steps that people write, on every mesh of up to eight devices, beside one device.

    python -m benchmarks steps_on_every_mesh [--marked] [--seconds 500] [--redo]

The nine steps of `tests/frontend/examples.py` on each of the 38 ordered factorisations of 1 to 8
devices over data, fsdp and tensor axes - ZeRO 1, 2 and 3 in turn where there is an fsdp axis, and 0
where there is none, as other combinations are refused - beside plain JAX on one device: three steps
on simulated devices in float32, states and metrics, at most 1e-5 of the largest element of each
array or of one. The batch has 16 rows; where a mesh does not divide them, the refusal is noted, and
the case is run with four rows for each shard of the batch. `--marked` runs the steps of
`tests/frontend/marked.py`, whose losses are marked, with two microbatches.

Results are kept as they come, one file for each version of JAX; what is there is not done again as
long as the code of the package is the same.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.environment import (
    RESULTS,
    command_line,
    missing,
    show,
    simulate_devices,
    source_digest,
    stored,
    write,
)

simulate_devices(8)
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # they compile, and hardly compute

import jax
import numpy as np

from shardlib.errors import ShardlibError
from tests.frontend import examples
from tests.frontend.equality import compiled, plain, reference
from tests.frontend.examples import EXAMPLES
from tests.frontend.marked import MARKED

AXES = ("data", "fsdp", "tensor")
ROWS, TOLERANCE = 16, 1e-5
Arrays = list[np.ndarray]


def meshes() -> Iterator[dict[str, int]]:
    """Every way to write 1 to 8 as a product of the sizes of three axes."""
    for devices in range(1, 9):
        for data in range(1, devices + 1):
            for fsdp in range(1, devices // data + 1):
                tensor = devices // (data * fsdp)
                if data * fsdp * tensor == devices:
                    yield {"data": data, "fsdp": fsdp, "tensor": tensor}


def cases(marked: bool) -> Iterator[dict[str, Any]]:
    """Every step on every mesh, with the stages of ZeRO in turn."""
    for number, name in enumerate(EXAMPLES):
        for at, mesh in enumerate(meshes()):
            zero = 1 + (number + at) % 3 if mesh["fsdp"] > 1 else 0
            pin: dict[str, Any] = {"mesh": mesh, "zero": zero}
            yield {"step": name, "pin": pin | ({"microbatches": 2} if marked else {})}


def worst(mine: Arrays, wanted: Arrays) -> float:
    """The largest difference, of the largest element of the array or of one."""
    return max(
        float(np.abs(one - other).max(initial=0) / max(1.0, np.abs(other).max(initial=0)))
        for one, other in zip(mine, wanted, strict=True)
    )


def compared(case: dict[str, Any], rows: int, marked: bool) -> dict[str, Any]:
    """One case with so many rows: the difference, or the refusal."""
    examples.ROWS = rows
    example = (MARKED if marked else EXAMPLES)[case["step"]]()
    start = time.monotonic()
    try:
        program = compiled(example, case["pin"], math.prod(case["pin"]["mesh"].values()))
    except ShardlibError as error:
        return {"rows": rows, "refused": f"{type(error).__name__}: {error}"}
    state, found = program.init(seed=3), 0.0
    for wanted in reference(EXAMPLES[case["step"]], rows):
        state, metrics = program.step(state, example.batch)
        found = max(found, worst(plain((state, metrics)), wanted))
    return {"rows": rows, "error": found, "seconds": round(time.monotonic() - start, 1)}


def tried(case: dict[str, Any], marked: bool) -> list[dict[str, Any]]:
    """A case with 16 rows; where these are refused, with as many as the mesh divides, too."""
    first = compared(case, ROWS, marked)
    if "error" in first:
        return [first]
    mesh = case["pin"]["mesh"]
    return [first, compared(case, 4 * mesh["data"] * mesh["fsdp"], marked)]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the cases come to."""
    tries = [one for row in rows for one in row["tries"]]
    run = [one for one in tries if "error" in one]
    return {
        "cases": len(rows),
        "equal": sum(row["tries"][-1].get("error", 1.0) <= TOLERANCE for row in rows),
        "wrong": sum(one["error"] > TOLERANCE for one in run),
        "largest_difference": max((one["error"] for one in run), default=None),
        "refused_with_16_rows": sum("refused" in row["tries"][0] for row in rows),
        "refused_with_rows_that_divide": sum("refused" in row["tries"][-1] for row in rows),
        "refusals": sorted({one["refused"] for one in tries if "refused" in one}),
    }


def main() -> int:
    """Runs the cases that are missing; 1 where one differs."""
    parser = command_line(__doc__)
    parser.add_argument("--marked", action="store_true", help="the steps with marked losses")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case later")
    parser.add_argument("--redo", action="store_true", help="run what is stored too")
    given = parser.parse_args()
    kind = "marked_steps" if given.marked else "steps"
    path = RESULTS / f"{kind}_on_every_mesh_jax-{jax.__version__}.json"
    digest = source_digest("lowering", "tracing", "propagation", "functions")

    def key(case: dict[str, Any]) -> str:
        return json.dumps([case["step"], case["pin"]])

    rows = {key(row): row for row in stored(path, "rows", [])}
    named = ((key(case), case) for case in cases(given.marked))
    todo = missing(named, rows, digest, redo=given.redo, seconds=given.seconds)
    for number, (name, case) in enumerate(todo):
        rows[name] = {**case, "tries": tried(case, given.marked), "source": digest}
        show(name, rows[name]["tries"][-1])
        table = [*rows.values()]
        write(path, {"tolerance": TOLERANCE, "summary": summary(table), "rows": table}, quiet=True)
        if number % 10 == 9:
            jax.clear_caches()
    result = summary([*rows.values()])
    print(json.dumps(result, indent=1))
    return int(result["wrong"] > 0)
