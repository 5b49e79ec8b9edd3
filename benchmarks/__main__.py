"""`python -m benchmarks NAME [OPTION ...]` runs a benchmark, `python -m benchmarks` lists them.

`--help` of a benchmark says what it measures; its result is JSON in `benchmarks/results`.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path


def benchmarks() -> dict[str, str]:
    """The first line of each benchmark's description, by name."""
    trees = {path.stem: ast.parse(path.read_text()) for path in Path(__file__).parent.glob("*.py")}
    return {
        name: (ast.get_docstring(tree) or "").partition("\n")[0]
        for name, tree in sorted(trees.items())
        if name != "__main__" and any(getattr(node, "name", "") == "main" for node in tree.body)
    }


def main() -> None:
    """Runs the benchmark that the command line names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in (known := benchmarks()):
        print(*(f"{one:22} {line}" for one, line in known.items()), sep="\n")
        sys.exit(f"there is no benchmark {name!r}" if name else 0)
    sys.argv[:2] = [f"benchmarks {name}"]
    sys.exit(importlib.import_module(f"benchmarks.{name}").main())


if __name__ == "__main__":
    main()
