"""Factors that correct predictions for a chip, learned from what its compiler makes.

    python -m benchmarks learn_corrections results.json [more.json ...] [--out FOLDER]

Reads results of `benchmarks/compiled_programs.py --out results.json`. For each chip and compiler
version, two corrections are looked for: one on the time of kernels and one on a part of the memory
(saved activations, other temporaries or gathered parameters; the one that helps most). The factor
is the one with the least median of |predicted - compiled| / compiled, which a few odd programs do
not move.

To see whether it would help a model that it was not learned from, every family of models is left
out once, and judged with the factor that the others give. A correction whose error then is not
below the uncorrected one is not written. The files go to `shardlib/cost/learned`, one for each chip
and version; as a table for a topology file they are printed, too.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import ROOT, command_line, stored
from shardlib.cost.roofline import Correction, Evidence
from shardlib.machines.topology import topology

#: Parts of the memory that a factor may correct.
MEMORY = ("activations", "temporaries", "communication")
#: Programs and families that a correction needs.
LEAST_CASES, LEAST_FAMILIES = 8, 2


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One compiled program, seen by one correction: the prediction is `fixed + factor x part`.

    Attributes:
        case, family: see `shardlib.cost.roofline.Evidence`.
        fixed: what the factor leaves alone.
        part: what it multiplies, without any correction.
        compiled: the truth.
    """

    case: str
    family: str
    fixed: float
    part: float
    compiled: float


Key = tuple[str, tuple[tuple[str, str], ...]]


def read(rows: Iterable[Mapping[str, Any]]) -> dict[Key, dict[str, list[Sample]]]:
    """Samples by (chip, versions) and quantity; rows that failed are left out."""
    found: dict[Key, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "failed" in row:
            continue
        case = row["case"]
        key = topology(case["topology"]).chip.name, tuple(sorted(row["versions"].items()))
        words = {
            "case": (
                f"{case['model']} {case['topology']}"
                f" {json.dumps(case.get('pin') or {}, sort_keys=True)}"
            ),
            "family": str(case["model"]),
        }
        applied = {one["quantity"]: one["factor"] for one in row.get("corrections", ())}
        parts = {
            name: size / applied.get(name, 1.0)
            for name, size in row["device_bytes"]["predicted"].items()
            if name != "peak"
        }
        for name in MEMORY:
            found[key][name].append(
                Sample(
                    **words,
                    fixed=sum(parts.values()) - parts[name],
                    part=parts[name],
                    compiled=row["device_bytes"]["compiled"]["peak"],
                )
            )
        if row["compute"]["compiled"]:
            kernels = row["seconds"]
            found[key]["compute"].append(
                Sample(
                    **words,
                    fixed=kernels["optimizer"],
                    part=kernels["compute"] / applied.get("compute", 1.0),
                    compiled=row["compute"]["compiled"],
                )
            )
    return {key: dict(samples) for key, samples in found.items()}


def errors(samples: list[Sample], factor: float) -> np.ndarray:
    """|predicted - compiled| / compiled of every sample."""
    return np.array([abs(s.fixed + factor * s.part - s.compiled) / s.compiled for s in samples])


def fit(samples: list[Sample]) -> float:
    """The factor with the least median error; of several, the one nearest to 1.

    The error of a sample is |a + b x| with a = fixed / compiled - 1 and b = part / compiled. The
    median of such functions is linear between the points where one of them is 0 or two are equal,
    so that its minimum is at one of those.
    """
    a = np.array([s.fixed / s.compiled - 1 for s in samples])
    b = np.array([s.part / s.compiled for s in samples])
    with np.errstate(divide="ignore", invalid="ignore"):
        zeros = -a / b
        alike = (a[:, None] - a[None, :]) / (b[None, :] - b[:, None])
        mirrored = -(a[:, None] + a[None, :]) / (b[:, None] + b[None, :])
    points = np.concatenate([[1.0], zeros, alike.ravel(), mirrored.ravel()])
    points = np.unique(points[np.isfinite(points) & (points > 0)])
    medians = np.median(np.abs(a + b * points[:, None]), axis=1)
    best = points[medians <= medians.min() * (1 + 1e-12)]
    return float(best[np.argmin(np.abs(np.log(best)))])


def held_out_error(samples: list[Sample]) -> float:
    """Median error when every family is judged with the factor that the others give."""
    families = sorted({s.family for s in samples})
    parts = [
        errors(
            [s for s in samples if s.family == family],
            fit([s for s in samples if s.family != family]),
        )
        for family in families
    ]
    return float(np.median(np.concatenate(parts)))


def learn(key: Key, quantity: str, samples: list[Sample]) -> Correction | str:
    """The correction of one quantity, or why there is none."""
    families = {s.family for s in samples}
    if len(samples) < LEAST_CASES or len(families) < LEAST_FAMILIES:
        return (
            f"{len(samples)} programs of {len(families)} families; it takes {LEAST_CASES} of"
            f" {LEAST_FAMILIES}"
        )
    factor, before, held = (
        fit(samples),
        float(np.median(errors(samples, 1.0))),
        held_out_error(samples),
    )
    if held >= before:
        return (
            f"a factor of {factor:.3g} does not help other families: {before:.1%} without,"
            f" {held:.1%} with what the others give"
        )
    evidence = tuple(
        Evidence(case=s.case, family=s.family, predicted=s.fixed + s.part, compiled=s.compiled)
        for s in samples
    )
    return Correction(
        chip=key[0],
        versions=key[1],
        quantity=quantity,
        factor=factor,
        n=len(samples),
        median_error_before=before,
        median_error_after=float(np.median(errors(samples, factor))),
        held_out_error=held,
        evidence=evidence,
    )


def corrections(
    key: Key, by_quantity: Mapping[str, list[Sample]]
) -> tuple[list[Correction], dict[str, str]]:
    """At most one correction of time and one of memory for a chip and version; and why others are
    left out.
    """
    found = {quantity: learn(key, quantity, samples) for quantity, samples in by_quantity.items()}
    left_out = {quantity: one for quantity, one in found.items() if isinstance(one, str)}
    good = [one for one in found.values() if isinstance(one, Correction)]
    memory = sorted(
        (one for one in good if one.quantity in MEMORY),
        key=lambda one: (one.held_out_error, one.quantity),
    )
    left_out |= {
        one.quantity: (
            f"{memory[0].quantity} helps more: {memory[0].held_out_error:.1%} against"
            f" {one.held_out_error:.1%}"
        )
        for one in memory[1:]
    }
    return [*(one for one in good if one.quantity not in MEMORY), *memory[:1]], left_out


def file_name(key: Key) -> str:
    """Chip and the version of its compiler: libtpu or the plugin where there is one, else
    jaxlib.
    """
    versions = dict(key[1])
    compiler = next((name for name in sorted(versions) if name not in ("jax", "jaxlib")), "jaxlib")
    return f"{key[0]}-{compiler}-{versions.get(compiler, 'unknown')}.json"


def asked(doc: str | None) -> tuple[list[dict[str, Any]], Path]:
    """The rows of the results that a command line names, and the folder for what is learned."""
    parser = command_line(doc)
    results = "results of benchmarks/compiled_programs.py"
    learned = ROOT / "shardlib" / "cost" / "learned"
    parser.add_argument("results", type=Path, nargs="+", help=results)
    parser.add_argument("--out", type=Path, default=learned, help="folder for the files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return [row for path in args.results for row in stored(path, "rows")], args.out


def main() -> None:
    rows, out = asked(__doc__)
    for key, by_quantity in sorted(read(rows).items()):
        found, left_out = corrections(key, by_quantity)
        print(f"# {key[0]}, {' '.join(' '.join(pair) for pair in key[1])}")
        for quantity, why in left_out.items():
            print(f"# no correction of {quantity}: {why}")
        if found:
            print("[corrections]")
            text = json.dumps([one.to_json() for one in found], indent=1)
            (out / file_name(key)).write_text(text + "\n")
        for one in found:
            print(
                f"{one.quantity} = {one.factor:.4g}  # {one.n} programs: median error"
                f" {one.median_error_before:.1%} -> {one.median_error_after:.1%}, other families"
                f" {one.held_out_error:.1%}"
            )
