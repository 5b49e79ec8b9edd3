"""Models of other packages, trained under shardlib and under plain optax.

    python -m benchmarks brought_models [NAME ...] [--merge RESULT ...] [--page]

Each model is planned for eight simulated devices, compiled and trained five steps in float32: on
the mesh that is planned, and on one that shards all that can be sharded. Losses and parameters are
compared with those of optax on one device; two deep nets of rectifiers in float64. The packages
have to be installed; a model whose package is not is an error in the table.
"""

from __future__ import annotations

import json
import os
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, command_line, show, simulate_devices, stored, write

#: Results by the version of JAX; rows of the page are those of the first.
PATHS = {
    version: RESULTS / f"brought_models_jax-{version}.json" for version in ("0.10.2", "0.12.0.1")
}


def names() -> list[str]:
    """All models, in the order of the table."""
    from benchmarks.brought import linen_models, nnx_models, tree_models

    return [
        f"{module.__name__.rpartition('.')[2]}.{model.__name__}"
        for module in (nnx_models, linen_models, tree_models)
        for model in module.MODELS
    ]


def one(name: str) -> dict[str, Any]:
    """The row of one model, computed here."""
    import importlib

    from benchmarks.brought.comparison import compared

    room, _, model = name.partition(".")
    case = getattr(importlib.import_module(f"benchmarks.brought.{room}"), model)()
    return {"name": name, "version": metadata.version(case.package), **compared(case)}


def tried(name: str) -> dict[str, Any]:
    """The row of one model, or why there is none."""
    import jax

    try:
        return one(name)
    except Exception as error:
        traceback.print_exc()
        return {"name": name, "error": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        jax.clear_caches()


def differences(row: dict[str, Any] | None) -> str:
    """Two cells of the page's table: the difference on each mesh."""
    if row is None or "meshes" not in row:
        return "not run | not run"
    return " | ".join(
        f"{m['difference']:.1e}" if "difference" in m else m["error"].splitlines()[0]
        for m in row["meshes"].values()
    )


def line(row: dict[str, Any], other: dict[str, Any] | None) -> str:
    """One row of the page's table: a model, here and under the other version of JAX."""
    model = row["model"] + " (float64)" * (row.get("dtype") == "float64")
    return (
        f"| {row['package']} {row['version']} | {model} | {row['framework']} |"
        f" {row['parameters']:,} | {row['wrapper']} | {row['lines_of_loss']} |"
        f" {row['meshes']['planned'].get('mesh', '')} | {differences(row)} | {differences(other)} |"
        f" {row['moved_by_rounding']:.1e} |"
    )


def page() -> str:
    """What the table of docs/brought_models.md says, of both versions of JAX."""
    first, second = (stored(path, "models") for path in PATHS.values())
    sharded = "data=2 x fsdp=2 x tensor=2"
    return "\n".join(
        [
            "| package | model | made of | parameters | told by | lines of the loss | mesh planned |"
            f" difference there | on {sharded} | JAX 0.12: planned | {sharded} | rounding alone |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(line(row, second.get(name)) for name, row in first.items() if "meshes" in row),
        ]
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--scratch", type=Path, help="write there instead")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="results to take over")
    parser.add_argument("--page", action="store_true", help="print the table of the results")
    arguments = parser.parse_args()
    simulate_devices(8)
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # most of the time is compiling
    unknown = [name for name in arguments.names if name not in names()]
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(names())}")
    path = arguments.scratch or PATHS[metadata.version("jax")]
    known = stored(path, "models")
    for other in arguments.merge:
        known |= json.loads(other.read_text())["models"]
    if arguments.merge:
        known = {name: known[name] for name in names() if name in known}
        write(path, {"models": known})
    if arguments.page:
        print(page())
    if arguments.merge or arguments.page:
        return
    for name in [n for n in names() if not arguments.names or n in arguments.names]:
        known[name] = tried(name)
        show(name, known[name], "error", "meshes", "moved_by_rounding")
        write(path, {"models": known}, quiet=True)
