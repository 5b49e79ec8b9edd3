"""Every layer class of `flax.nnx` and `flax.linen` with names on what its initialisers make, planned,
compiled on data 2 x fsdp 2 x tensor 2, and five steps of SGD beside plain JAX.

    python benchmarks/every_layer.py [CASE ...] [--out FILE]

Prints the largest relative difference of a loss. Cases that are named are added to those of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))


def measured(case: str) -> dict[str, object]:
    """The largest relative difference of five losses, by which dims have names; or the error."""
    from tests.zoo.flax_layers import has_params, plain_losses, planned_losses

    try:
        if not has_params(case):
            return {"params": False}
        plain, found = plain_losses(case), dict[str, object]()
        for names in ("all", "leading"):
            losses, program = planned_losses(case, names)
            found[names] = max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))
            if "diagnostic-failed" in {one.code for one in program.findings}:
                found["error"] = "a diagnostic failed"
        return {**found, "first": plain[0], "last": plain[-1]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> int:
    versions = {name: version(name) for name in ("jax", "flax")}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results" / f"every_layer_jax-{versions['jax']}.json",
    )
    arguments = parser.parse_args()
    from tests.zoo.flax_layers import CASES

    results, summary = dict[str, dict[str, object]](), dict[str, float]()
    if arguments.cases and arguments.out.exists():
        results = json.loads(arguments.out.read_text())["layers"]
    for case in arguments.cases or CASES:
        results[case] = measured(case)
        print(case, results[case], flush=True)
        summary = summary_of(results)
        written = {
            "versions": versions,
            "summary": summary,
            "layers": dict(sorted(results.items())),
        }
        arguments.out.write_text(json.dumps(written, indent=1) + "\n")
    print(summary)
    return int(bool(summary["errors"]) or summary["largest relative difference of a loss"] > 1e-5)


def summary_of(results: dict[str, dict[str, object]]) -> dict[str, float]:
    """How many layers were measured, and the worst of them."""
    differences = [
        float(str(one[names]))
        for one in results.values()
        for names in ("all", "leading")
        if names in one
    ]
    return {
        "layers with parameters": sum("all" in one or "error" in one for one in results.values()),
        "largest relative difference of a loss": max(differences, default=0.0),
        "errors": sum("error" in one for one in results.values()),
    }


if __name__ == "__main__":
    sys.exit(main())
