"""How does the house stand? Import circles, sizes of files and folders, lines, fields, parameters
and words, read from the source.

    python benchmarks/house.py [--out benchmarks/results/house.json]

Imports count wherever they stand: at the top, in functions, under TYPE_CHECKING. Modules whose
imports of each other form a circle are listed together.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "shardlib"
LINE, FILE, FOLDER, FIELDS, PARAMETERS = 100, 300, 12, 12, 8
#: Words that the field has others for.
OLD = (
    "rests whole",
    "rest whole",
    "in pieces",
    "cut over",
    "at rest",
    "summed up",
    "computed again",
    "homewards",
    "hosted",
    "stowed",
    "marked function",
    "on the wire",
    "class of layers",
    "classes of layers",
)


def sources() -> dict[str, Path]:
    """Modules of the package, by name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imported(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of the package that a module imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                inner if (inner := f"{node.module}.{alias.name}") in modules else node.module
                for alias in node.names
            }
    return {one for one in found if one in modules and one != name}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected modules (Tarjan, 1972), the largest first."""
    index, low, stack, found = {}, {}, [], []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return sorted(found, key=lambda group: (-len(group), group))


def definitions(paths: list[Path]) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Classes and functions, with where they stand."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def parameters(node: ast.FunctionDef) -> int:
    """How many parameters a function has, self apart."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(one.arg not in ("self", "cls") for one in given)


def fields(node: ast.ClassDef) -> int:
    """How many annotated fields a class has."""
    return sum(isinstance(one, ast.AnnAssign) for one in node.body)


def old_words(text: str) -> dict[str, int]:
    """How often each word is there that the field has others for, broken lines put together."""
    joined = re.sub(r"\n\s*(#:?\s)?\s*", " ", text)
    found = {word: len(re.findall(rf"\b{word}\b(?!\.\w)", joined)) for word in OLD}
    return {word: count for word, count in found.items() if count}


def house() -> dict[str, Any]:
    """All figures."""
    modules = sources()
    paths = list(modules.values())
    lines = {str(path.relative_to(ROOT)): path.read_text().splitlines() for path in paths}
    folders = Counter(
        str(path.parent.relative_to(ROOT)) for path in paths if path.name != "__init__.py"
    )
    named = list(definitions(paths))
    texts = "\n".join("\n".join(one) for one in lines.values()) + "\n".join(
        path.read_text() for path in (ROOT / "docs").rglob("*.md")
    )
    return {
        "files": len(paths),
        "lines": sum(map(len, lines.values())),
        "circles": circles({name: imported(name, path, modules) for name, path in modules.items()}),
        f"lines over {LINE} columns": sum(
            len(line) > LINE for one in lines.values() for line in one
        ),
        f"files over {FILE} lines": {
            name: len(one) for name, one in lines.items() if len(one) > FILE
        },
        f"folders over {FOLDER} files": {
            name: count for name, count in folders.items() if count > FOLDER
        },
        f"classes over {FIELDS} fields": {
            where: count
            for where, node in named
            if isinstance(node, ast.ClassDef) and (count := fields(node)) > FIELDS
        },
        f"functions over {PARAMETERS} parameters": {
            where: count
            for where, node in named
            if isinstance(node, ast.FunctionDef) and (count := parameters(node)) > PARAMETERS
        },
        "old words": old_words(texts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="store the figures")
    options = parser.parse_args()
    found = house()
    for name, value in found.items():
        print(f"{name}: {len(value) if isinstance(value, list | dict) else value}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
