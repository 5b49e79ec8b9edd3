"""Do predictions agree with what the real TPU and GPU compilers make?

    python benchmarks/compiled_programs.py CASES.json [--json] [--out results.json]

`CASES.json` is a list of objects with `model` (preset, file or package.module:function),
`topology`, `batch`, `seq` and, if wanted, `pin`. Each is planned and compiled ahead of time, with
none of the hardware there. A case whose compiler is not installed, or whose plan or compilation
fails, is listed with the reason and counts as `failed`. The summary:

- `memory_*_error`: |predicted - compiled| / compiled of the peak bytes of a device;
- `collective_bytes_matched`: over all cases, the bytes that prediction and program have in common
  by kind and mesh axes, of all bytes that either has;
- `collective_median_error`: |predicted - compiled| / compiled of a step's result bytes;
- `compute_median_error`: the same for the seconds of compute against the TPU compiler's cycles, TPU
  cases only.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import optax

import shardlib
from benchmarks.environment import command_line, environment, source_digest
from shardlib import models
from shardlib.annotation import tree
from shardlib.collective import Collective
from shardlib.frontend import verified
from shardlib.frontend.model import read_and_trace
from shardlib.verification.isolation import Limits
from shardlib.verification.report import Key, key_text, totals


def inputs(case: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `shardlib.verify` for a case."""
    found = models.load(case["model"])
    if isinstance(found, models.UserModel):
        return {
            "init": found.init,
            "loss": found.loss,
            "optimizer": found.optimizer or optax.adamw(3e-4),
            "batch": found.batch,
            "batch_axes": found.batch_axes,
            "name": found.name,
        }
    init, loss = models.build(found)
    return {
        "init": init,
        "loss": loss,
        "optimizer": optax.adamw(3e-4),
        "batch": models.example_batch(found, case["batch"], case["seq"]),
        "name": found.name,
    }


def compiled_source() -> str:
    """Digest of the code that decides what is compiled."""
    return source_digest("lowering", "tracing", "models", "annotation")


def run(case: dict[str, Any], limits: Limits, known: list[dict[str, Any]]) -> dict[str, Any]:
    """One case: predicted beside compiled, and what they have in common."""
    start = time.monotonic()
    try:
        given = inputs(case)
        plan = shardlib.plan(**given, topology=case["topology"], pin=case.get("pin"))
        key = {"case": case, "digest": plan.digest, "source": compiled_source()}
        earlier = next(
            (
                row
                for row in known
                if {name: row.get(name) for name in key} == key and "failed" not in row
            ),
            None,
        )
        made = earlier or compiled(
            shardlib.verify(**given, topology=case["topology"], plan=plan, limits=limits)
        )
    except (shardlib.ShardlibError, KeyError) as error:
        return {"case": case, "failed": f"{type(error).__name__}: {error}"}
    if "failed" in made:
        return {"case": case, "failed": made["failed"]}
    return {
        **key,
        **{name: made[name] for name in ("compiled", "compile_seconds", "versions", "findings")},
        **compared(priced_as_compiled(given, plan), made["compiled"]),
        "wall_seconds": earlier["wall_seconds"] if earlier else time.monotonic() - start,
    }


def priced_as_compiled(given: dict[str, Any], plan: shardlib.Plan) -> shardlib.Plan:
    """The plan with the estimate of what is compiled, as `shardlib.verify` compares it: without a
    GPU, attention in blocks in the place of the kernel of cuDNN.
    """
    if plan.attention != "cudnn":
        return plan
    with tree.no_mesh():
        model = read_and_trace(
            given["init"],
            given["loss"],
            given["optimizer"],
            given["batch"],
            given.get("batch_axes"),
            given["name"],
        )
    return verified.priced_as_compiled(model, plan, shardlib.topology(plan.topology))


def compiled(found: shardlib.Verification) -> dict[str, Any]:
    """What the compiler made, as plain data."""
    if found.compiled is None:
        return {"failed": str(found.findings[0])}
    return {
        "compiled": found.compiled.to_json(),
        "compile_seconds": found.compile_seconds,
        "versions": dict(found.versions),
        "findings": [finding.to_json() for finding in found.findings],
    }


def compared(plan: shardlib.Plan, made: dict[str, Any]) -> dict[str, Any]:
    """A plan beside what was made of it."""
    collectives = tuple(
        Collective(kind=c["kind"], axes=tuple(c["axes"]), bytes=c["bytes"], count=c["count"])
        for c in made["collectives"]
    )
    promised, real, estimate = (
        totals(plan.estimate.collectives),
        totals(collectives),
        plan.estimate.to_json(),
    )
    return {
        "plan": {
            "mesh": dict(plan.mesh),
            **{key: plan.decisions[key] for key in ("zero", "remat", "microbatches")},
        },
        "memory": pair(plan.estimate.device_bytes.peak, made["device_bytes"]["peak"]),
        "device_bytes": {"predicted": estimate["device_bytes"], "compiled": made["device_bytes"]},
        "collectives": pair(sum(promised.values()), sum(real.values())),
        "wire_bytes": made["wire_bytes"],
        "by_axis": {
            key_text(key): {"predicted": promised.get(key, 0), "compiled": real.get(key, 0)}
            for key in sorted({*promised, *real})
        },
        "common_bytes": common(promised, real, min),
        "all_bytes": common(promised, real, max),
        "seconds": estimate["seconds"],
        "corrections": estimate["corrections"],
        "compute": pair(
            plan.estimate.seconds.compute + plan.estimate.seconds.optimizer, made["compute_seconds"]
        ),
    }


def pair(predicted: float, compiled: float) -> dict[str, float | None]:
    """Both, and the relative error; None where the compiler says nothing."""
    return {
        "predicted": predicted,
        "compiled": compiled,
        "error": abs(predicted - compiled) / compiled if compiled else None,
    }


def common(promised: dict[Key, int], real: dict[Key, int], which: Any) -> int:
    """Bytes by kind and axes that both have (`min`) or that either has (`max`)."""
    return sum(which(promised.get(key, 0), real.get(key, 0)) for key in {*promised, *real})


def summary(rows: list[dict[str, Any]]) -> dict[str, float | int | None]:
    """The figures over all cases that compiled."""
    done = [row for row in rows if "failed" not in row]

    def errors(name: str) -> list[float]:
        return [row[name]["error"] for row in done if row[name]["error"] is not None]

    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    everything = sum(row["all_bytes"] for row in done)
    return {
        "cases": len(rows),
        "failed": len(rows) - len(done),
        "memory_median_error": median(errors("memory")),
        "memory_worst_error": max(errors("memory"), default=None),
        "collective_bytes_matched": (
            sum(row["common_bytes"] for row in done) / everything if everything else None
        ),
        "collective_median_error": median(errors("collectives")),
        "compute_median_error": median(errors("compute")),
    }


def line(row: dict[str, Any]) -> str:
    """A case in one line for people."""
    case = row["case"]
    name = f"{case.get('model')} {case.get('topology')} {json.dumps(case.get('pin', {}))}"
    if "failed" in row:
        return f"{name}: failed: {row['failed'].splitlines()[0]}"
    figures = {
        "memory": row["memory"]["error"],
        "collectives": row["collectives"]["error"],
        "compute": row["compute"]["error"],
    }
    return f"{name}: " + ", ".join(
        f"{key} {'-' if value is None else f'{value:.1%}'}" for key, value in figures.items()
    )


def main() -> None:
    """Runs the cases of a file."""
    parser = command_line(__doc__)
    parser.add_argument("cases", type=Path, help="a JSON list of cases")
    parser.add_argument(
        "--json", action="store_true", help="JSON on stdout, and nothing else there"
    )
    parser.add_argument("--out", type=Path, help="write the JSON here, too")
    parser.add_argument(
        "--reuse",
        type=Path,
        action="append",
        default=[],
        metavar="RESULTS",
        help=(
            "take what was compiled from these results where case, plan and code are the same; may"
            " be given several times"
        ),
    )
    parser.add_argument(
        "--seconds", type=float, default=900.0, help="time that the compiler may take for a case"
    )
    parser.add_argument(
        "--gibibytes",
        type=float,
        default=48.0,
        help="memory of this machine that the compiler may take",
    )
    args = parser.parse_args()
    limits = Limits(seconds=args.seconds, memory_bytes=int(args.gibibytes * 2**30))
    rows: list[dict[str, Any]] = []
    known = [row for path in args.reuse for row in json.loads(path.read_text())["rows"]]
    for case in json.loads(args.cases.read_text()):
        rows.append(run(case, limits, known))
        if args.out is not None:
            args.out.write_text(json.dumps({"rows": rows}) + "\n")
        print(line(rows[-1]), file=sys.stderr if args.json else sys.stdout, flush=True)
    result = {
        **environment(),
        "benchmark": "compiled_programs",
        "rows": rows,
        "summary": summary(rows),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if args.json else json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
