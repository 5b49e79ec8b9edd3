"""Memory that a plan must leave free on a chip, learned from what its compiler makes.

    python -m benchmarks learn_margins results.json [more.json ...] [--out FOLDER]

Reads results of `benchmarks/compiled_programs.py --out results.json`, of predictions with the
corrections that are in force (`learn_corrections.py` comes first, and this again after it). For
each chip and compiler version, the margin is the least factor with which every program would fit
wherever it is predicted to. What a program needs beyond the prediction counts as a share of the
device, and, where the program takes `LARGE` of a device or more, as a share of the prediction, as
plans that fill a device are of that kind.

Its held-out error is by how much a program needs more, at worst, than the margin of the other
families of models would allow. Pipelines are left out: too few of them have been compiled.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks.environment import stored
from benchmarks.learn_corrections import LEAST_CASES, LEAST_FAMILIES, Key, asked, file_name
from shardlib.cost.roofline import Correction, Evidence
from shardlib.machines.catalog import CATALOG
from shardlib.machines.topology import topology

#: Share of a device from which on what a program needs beyond the prediction is taken to grow with
#: it.
LARGE = 0.5
#: In names of packages: compilers that programs of a vendor are not made by.
OTHERS = {"google": "cuda", "nvidia": "libtpu"}
#: Margins are rounded up to multiples of one over this.
STEPS = 200


def read(rows: Iterable[Mapping[str, Any]]) -> dict[Key, list[Evidence]]:
    """Programs by (chip, versions), without pipelines and rows that failed."""
    found: dict[Key, list[Evidence]] = defaultdict(list)
    for row in rows:
        if "failed" in row or row["plan"]["mesh"].get("stage", 1) > 1:
            continue
        case, sizes = row["case"], row["device_bytes"]
        chip = topology(case["topology"]).chip
        versions = {
            name: version
            for name, version in row["versions"].items()
            if OTHERS[chip.vendor] not in name
        }
        pins = json.dumps(case.get("pin") or {}, sort_keys=True)
        found[chip.name, tuple(sorted(versions.items()))].append(
            Evidence(
                case=f"{case['model']} {case['topology']} {pins}",
                family=str(case["model"]),
                predicted=sizes["predicted"]["peak"],
                compiled=sizes["compiled"]["peak"],
            )
        )
    return found


def needed(one: Evidence, usable: float) -> float:
    """The margin with which a program fits wherever it is predicted to, on a device of so many
    usable bytes: at least 1.
    """
    excess = max(0.0, one.compiled - one.predicted)
    return (
        one.compiled / (one.compiled - excess)
        if one.compiled >= LARGE * usable
        else usable / (usable - excess)
    )


def learn(key: Key, programs: list[Evidence]) -> Correction | str:
    """The margin of a chip and version, or why there is none."""
    families = sorted({one.family for one in programs})
    if len(programs) < LEAST_CASES or len(families) < LEAST_FAMILIES:
        return (
            f"{len(programs)} programs of {len(families)} families; it takes {LEAST_CASES} of"
            f" {LEAST_FAMILIES}"
        )
    usable = CATALOG[key[0]].chip.usable_bytes
    by_family = {
        family: max(needed(one, usable) for one in programs if one.family == family)
        for family in families
    }
    most = max(by_family.values())
    others = (
        by_family[family] / max(value for name, value in by_family.items() if name != family)
        for family in families
    )
    error = float(np.median([abs(one.predicted - one.compiled) / one.compiled for one in programs]))
    return Correction(
        chip=key[0],
        versions=key[1],
        quantity="margin",
        factor=math.ceil(round(most * STEPS, 6)) / STEPS,
        n=len(programs),
        median_error_before=error,
        median_error_after=error,
        held_out_error=max(0.0, max(others) - 1),
        evidence=tuple(programs),
    )


def main() -> None:
    rows, out = asked(__doc__)
    for key, programs in sorted(read(rows).items()):
        found = learn(key, programs)
        print(f"# {key[0]}, {' '.join(' '.join(pair) for pair in key[1])}")
        if isinstance(found, str):
            print(f"# no margin: {found}")
            continue
        print(
            f"margin = {found.factor:.4g}  # {found.n} programs, median error"
            f" {found.median_error_before:.1%}; other families {found.held_out_error:.1%} more"
        )
        path = out / file_name(key)
        kept = stored(path, "", [])
        kept = [entry for entry in kept if entry["quantity"] != "margin"]
        path.write_text(json.dumps([*kept, found.to_json()], indent=1) + "\n")
