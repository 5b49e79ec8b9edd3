"""Bytes that islands move at an outer step by the real compilers, beside the plan.

    python -m benchmarks island_meetings [--only TEXT]

Two layers of width 512 on islands of TPU slices, GPU nodes and simulated devices; the step of one
island and the meeting of all are compiled ahead of time (`shardlib.verify`). Bytes are those that a
device holds of the results of collectives; "copied" are those of what crosses beside steps, in no
program. Stored for each version of JAX.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax

import shardlib
from benchmarks.environment import RESULTS, card, command_line, table, write
from shardlib import models
from shardlib.islands.exchanges import DiLoCo

#: (machine, exchange, pins beside it).
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = [
    tuple(case) for case in table("island_meetings")
]


def over_islands(collectives: Any) -> int:
    """Bytes of all executions over the island axis."""
    return sum(one.total_bytes for one in collectives if "island" in one.axes)


def row(topology: str, exchange: str, pin: dict[str, Any]) -> dict[str, Any]:
    """One case, planned and compiled."""
    init, loss = models.build(card("islands"))
    batch = {key: jax.ShapeDtypeStruct((64, 512), np.int32) for key in ("inputs", "targets")}
    found = shardlib.verify(
        init,
        loss,
        optax.adamw(1e-3),
        batch,
        topology=topology,
        pin={"exchange": exchange, **pin},
    )
    assert found.compiled is not None and found.compiled.meeting is not None, str(found)
    planned = over_islands(found.plan.estimate.collectives)
    copied = planned if isinstance(found.plan.exchange, DiLoCo) and found.plan.exchange.delay else 0
    return {
        "topology": topology,
        "exchange": exchange,
        "mesh": dict(found.plan.mesh),
        "zero": found.plan.zero,
        "step_over_islands": over_islands(found.compiled.collectives),
        "copied": copied,
        "meeting_planned": planned - copied,
        "meeting_compiled": over_islands(found.compiled.meeting.collectives),
        "meeting_seconds": found.plan.estimate.seconds.exchange * found.plan.exchange.period,
        "errors": [one.code for one in found.findings if one.severity == "error"],
        "versions": dict(found.versions),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help="exchanges with this text; other rows stay")
    args = parser.parse_args()
    out = RESULTS / f"island_meetings_jax-{jax.__version__}.json"
    stored = json.loads(out.read_text())["rows"] if args.only else []
    rows = {(one["topology"], one["exchange"]): one for one in stored}
    for case in CASES:
        if args.only in case[1]:
            found = rows[case[:2]] = row(*case)
            print(json.dumps(found), flush=True)
    write(out, {"benchmark": "island_meetings", "rows": [*rows.values()]})
