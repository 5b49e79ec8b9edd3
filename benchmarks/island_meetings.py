"""Is what islands move at a meeting, by the real compilers, what was planned?

    python benchmarks/island_meetings.py [--only TEXT]

Two layers of width 512 on islands of TPU slices, GPU nodes and simulated devices; the step of one
island and the meeting of all are compiled ahead of time (`shardlib.verify`). Bytes are those that a
device holds of the results of collectives; "copied" are those of what crosses beside steps, in no
program. Stored for each version of JAX.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax

import shardlib
from benchmarks.environment import RESULTS, command_line, write
from shardlib import models
from shardlib.islands.exchanges import DiLoCo
from shardlib.models.config import TransformerConfig

#: (machine, exchange, pins beside it).
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("cpu:8", "diloco:2:32", {"mesh.fsdp": 4, "zero": 3}),
    ("2*h100:8", "diloco:2:32", {"zero": 1}),
    ("2*v5e:4x4", "diloco:2:32", {"zero": 3}),
    ("4*v5e:2x2", "diloco:4:32", {"zero": 1}),
    ("2*h100:8", "diloco:2:32:fragments=2", {"zero": 1}),
    ("2*v5e:4x4", "diloco:2:32:fragments=2", {"zero": 3}),
    *(
        (where, f"diloco:2:32:wire={wire}", {"zero": 3})
        for where in ("2*h100:8", "2*v5e:4x4")
        for wire in ("bfloat16", "int8", "int4")
    ),
    ("2*h100:8", "diloco:2:32:delay=8", {"zero": 1}),
    ("2*v5e:4x4", "diloco:2:32:fragments=2:delay=8:wire=int8", {"zero": 3}),
    ("4*v5e:2x2", "gossip:4:exponential", {"zero": 1}),
    ("4*v5e:2x2", "gossip:4:ring", {"zero": 3}),
    ("4*h100:4", "gossip:4:exponential", {"zero": 3}),
    *(
        (where, f"compressed:2:{by}", {"zero": 3})
        for where in ("2*h100:8", "2*v5e:4x4")
        for by in ("powersgd:rank=4", "topk:density=0.001", "quantised", "sign")
    ),
)


def over_islands(collectives: Any) -> int:
    """Bytes of all executions over the island axis."""
    return sum(one.total_bytes for one in collectives if "island" in one.axes)


def row(topology: str, exchange: str, pin: dict[str, Any]) -> dict[str, Any]:
    """One case, planned and compiled."""
    config = TransformerConfig(
        name="job",
        vocab_size=4096,
        max_seq=512,
        compute_dtype="bfloat16",
        activation="silu",
        gated=True,
        layers=2,
        embed=512,
        heads=8,
        kv_heads=8,
        head_dim=64,
        mlp=2048,
    )
    init, loss = models.build(config)
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
    """Compiles the cases and stores them."""
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


if __name__ == "__main__":
    main()
