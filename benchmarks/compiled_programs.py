"""Predictions beside what the real TPU and GPU compilers make.

    python -m benchmarks compiled_programs CASES.json ... [--out results.json]
    python -m benchmarks compiled_programs CASES.json ... --price-again --reuse results.json ...

`CASES.json` is a list of objects with `model` (preset, file or package.module:function),
`topology`, `batch`, `seq` and, if wanted, `pin`. Each is planned and compiled ahead of time, with
none of the hardware there. A case whose compiler is not installed, or whose plan or compilation
fails, is listed with the reason and counts as `failed`. With `--price-again` nothing is compiled: the
present predictions stand beside the programs of stored results, whatever code has lowered them
(`source`, its digest); cases whose present plan is in none of them are left out. The summary:

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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"


import shardlib
from benchmarks.compiling import compiled, decisions
from benchmarks.environment import command_line, show, source_digest, write
from shardlib.annotation.model import no_mesh
from shardlib.cli.inputs import inputs_of
from shardlib.frontend import verified
from shardlib.frontend.model import read_and_trace
from shardlib.layout import Collective
from shardlib.verification.report import Key, key_text, totals


def inputs(case: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `shardlib.verify` for a case."""
    given = inputs_of(case["model"], case.get("batch"), case.get("seq"))
    return {name: value for name, value in given.items() if value is not None}


def compiled_source() -> str:
    """Digest of the code that decides what is compiled."""
    return source_digest("lowering", "tracing", "models", "annotation")


#: What a row has of its compiled program: the digest of the code that lowered it, and what came out.
MADE = ("source", "compiled", "compile_seconds", "versions", "findings")


def run(
    case: dict[str, Any], limits: Mapping[str, float] | None, known: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """One case: predicted beside compiled, and what they have in common.

    Args:
        limits: `seconds` and `gibibytes` of the compiler. With None nothing is compiled: the row is
            None where no known one is of the plan.
        known: rows whose compiled programs are taken where case, plan and source are the same, or
            case and plan where nothing is compiled.
    """
    start = time.monotonic()
    try:
        given = inputs(case)
        plan = shardlib.plan(**given, topology=case["topology"], pin=case.get("pin"))
    except (shardlib.ShardlibError, KeyError) as error:
        return {"case": case, "failed": f"{type(error).__name__}: {error}"}
    key = {"case": case, "digest": plan.digest}
    source = {"source": compiled_source()}
    wanted = {**key, **source} if limits else key
    same = (row for row in known if wanted.items() <= row.items() and "failed" not in row)
    if (made := next(same, None)) is None:
        if limits is None:
            return None
        found = compiled(given, case["topology"], plan=plan, **limits)
        if isinstance(found, str):
            return {"case": case, "failed": found}
        made = {
            **source,
            "compiled": found.compiled.to_json(),
            "compile_seconds": found.compile_seconds,
            "versions": dict(found.versions),
            "findings": [finding.to_json() for finding in found.findings],
        }
    return {
        **key,
        **{name: made[name] for name in MADE},
        **compared(priced_as_compiled(given, plan), made["compiled"]),
        "wall_seconds": made.get("wall_seconds", time.monotonic() - start),
    }


def priced_as_compiled(given: dict[str, Any], plan: shardlib.Plan) -> shardlib.Plan:
    """The plan with the estimate of what is compiled, as `shardlib.verify` compares it: without a
    GPU, attention in blocks in the place of the kernel of cuDNN.
    """
    if plan.attention != "cudnn":
        return plan
    with no_mesh():
        names = ("init", "loss", "optimizer", "batch", "batch_axes", "name")
        model = read_and_trace(*map(given.get, names))
    return verified.priced_as_compiled(model, plan, shardlib.topology(plan.topology))


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
        "plan": decisions(plan),
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


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("cases", type=Path, nargs="+", help="JSON lists of cases")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    parser.add_argument(
        "--reuse",
        type=Path,
        action="append",
        default=[],
        metavar="RESULTS",
        help="take what was compiled from these results where case, plan and code are the same",
    )
    parser.add_argument(
        "--price-again", action="store_true", help="compile nothing: take all from these results"
    )
    parser.add_argument("--seconds", type=float, default=900.0, help="for a case")
    parser.add_argument("--gibibytes", type=float, default=48.0, help="of memory, for a case")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    known = [row for path in args.reuse for row in json.loads(path.read_text())["rows"]]
    limits = {"seconds": args.seconds, "gibibytes": args.gibibytes}
    for case in [case for path in args.cases for case in json.loads(path.read_text())]:
        row = run(case, None if args.price_again else limits, known)
        if row is None:
            continue
        rows.append(row)
        show(json.dumps(case), rows[-1], "failed", "memory", "collectives", "compute")
        result = {"benchmark": "compiled_programs", "rows": rows, "summary": summary(rows)}
        if args.out is not None:
            write(args.out, result, quiet=True)
    show("summary", result["summary"])
