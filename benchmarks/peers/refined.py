"""The job for TPU v5e, with the TPU's own compiler choosing among the best plans.

    python benchmarks/peers/refined.py [--out FILE]

`shardlib.plan(..., refine=3)` compiles the fastest plan of each remat policy; the result has what
the compiler made of each, and wire bytes of the plan that it chose.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from benchmarks.environment import command_line, simulate_devices, write

simulate_devices(8)

from model import JOBS, OPTIMIZER, Decoder, loss, rows

import shardlib
from shardlib.machines.topology import topology
from shardlib.verification.isolation import target

TPU = "v5e:2x4"


def main() -> None:
    parser = command_line(__doc__, "peers_refined.json")
    options = parser.parse_args()
    job = JOBS["tpu"]
    what = (lambda rngs: Decoder(job, rngs), loss, OPTIMIZER, rows(job))
    plan = shardlib.plan(*what, topology=TPU, refine=3)
    assert plan.refined is not None
    said = shardlib.verify(*what, topology=TPU, plan=plan)
    assert said.compiled is not None, str(said)
    where = target(topology(TPU), said.plan.mesh, said.plan.axis_order)
    data = {
        "benchmark": "peers_refined",
        "topology": TPU,
        "trials": [trial.to_json() for trial in plan.refined.trials],
        "chosen": {"mesh": dict(plan.mesh), "remat": str(plan.remat), "zero": plan.zero},
        "wire_bytes": said.compiled.wire_bytes,
        "peak_bytes": said.compiled.device_bytes["peak"],
        "cycles": round(said.compiled.compute_seconds * where.cycles_per_s),
    }
    write(options.out, data)
    print(plan.explain())


if __name__ == "__main__":
    main()
