"""Figures of the source: import circles, lines, names, words, and public parameters without a
description; the public names are imported.

    python -m benchmarks house [--before OTHER_CLONE] [--out benchmarks/results/house.json]

With the clone of an earlier commit, its figures of size and shape are stored beside those of today.

Imports count wherever they stand: at the top, in functions, under TYPE_CHECKING; of `VALUES` alone
those that run when they are imported. Modules whose imports of each other form a circle are listed
together.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from benchmarks.environment import ROOT, command_line, table

WINGS = ("launch", "serve", "islands", "frameworks", "diagnosis")
_TABLE = table("house")
#: Names that say nothing of what they name.
FILLERS = frozenset(_TABLE["fillers"])
#: Of the script that is watched: the files of the package that are entered, and calls.
WATCHED = """
import json, os, sys
import jax, jax.numpy as jnp, optax, shardlib
from flax import nnx

entered = {}

def watch(name, call):
    files = set()
    def profile(frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(os.getcwd() + "/shardlib/"):
            files.add(path)
    sys.setprofile(profile)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    entered[name] = len(files)
    return result

class Model(nnx.Module):
    def __init__(self, rngs):
        up, down = ("embed", "mlp"), ("mlp", "embed")
        self.up = nnx.Linear(64, 256, kernel_metadata={"out_sharding": up}, rngs=rngs)
        self.down = nnx.Linear(256, 64, kernel_metadata={"out_sharding": down}, rngs=rngs)

def loss(model, batch):
    return jnp.mean((model.down(nnx.gelu(model.up(batch["x"]))) - batch["y"]) ** 2)

batch = {name: jnp.ones((64, 64)) for name in "xy"}
problem = (Model, loss, optax.adamw(1e-3), batch)
pin = {"mesh.fsdp": 8}
watch("plan", lambda: shardlib.plan(*problem, topology="cpu:8"))
watch("plan of a pinned mesh", lambda: shardlib.plan(*problem, topology="cpu:8", pin=pin))
program = shardlib.compile(*problem, topology="cpu:8", pin=pin)
state = program.init(seed=0)
state, metrics = program.step(state, batch)
watch("second step", lambda: program.step(state, batch))
print(json.dumps(entered))
"""
PACKAGE = ROOT / "shardlib"
LINE = 100
#: Values whose methods import the functions of them when they are called.
VALUES = {
    "shardlib.launch.booking",
    "shardlib.planner.plan",
    "shardlib.serve.plan",
    "shardlib.report.timelines",
}
#: Words that the field has others for.
OLD = tuple(_TABLE["old words"])


def sources() -> dict[str, Path]:
    """Modules of the package, by name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a module, read once."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module's syntax tree, walked once."""
    return tuple(ast.walk(parsed(path)))


def loaded(path: Path) -> Iterator[ast.AST]:
    """Nodes of what runs when a module is imported."""
    queue: list[ast.AST] = [parsed(path)]
    while queue:
        node = queue.pop()
        yield node
        skipped = isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        queue += [] if skipped else ast.iter_child_nodes(node)


def imported(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of the package that a module imports anywhere, or `VALUES` when they are imported."""
    found: set[str] = set()
    for node in loaded(path) if name in VALUES else nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                inner if (inner := f"{node.module}.{alias.name}") in modules else node.module
                for alias in node.names
            }
    return {one for one in found if one in modules and one != name}


def cut_classes(paths: Iterable[Path]) -> list[str]:
    """Base classes with one subclass, in another file, that are never built or raised themselves:
    one class that was cut in two.
    """
    defined: dict[str, set[Path]] = {}
    subclasses: dict[str, list[Path]] = {}
    called: set[str] = set()
    for path in paths:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                bases = {leaf for base in node.bases if (leaf := _leaf(base))}
                for base in bases:
                    subclasses.setdefault(base, []).append(path)
                if not bases & {"Protocol", "ABC"}:
                    defined.setdefault(node.name, set()).add(path)
            elif isinstance(node, ast.Call):
                called |= {leaf for inner in ast.walk(node.func) if (leaf := _leaf(inner))}
    return sorted(
        name
        for name, where in defined.items()
        if name not in called
        and len(subs := subclasses.get(name, [])) == 1
        and len(where) == 1
        and subs[0] not in where
    )


def _leaf(node: ast.AST) -> str:
    """The last name of a dotted one, without its parameters."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected modules, the largest groups first."""
    names = sorted(edges)
    number = {name: at for at, name in enumerate(names)}
    pairs = [(number[name], number[other]) for name in names for other in edges[name]]
    rows, columns = np.array(pairs).reshape(-1, 2).T
    graph = coo_array((np.ones(len(pairs)), (rows, columns)), shape=(len(names), len(names)))
    _, labels = connected_components(graph, connection="strong")
    groups = [[names[at] for at in np.flatnonzero(labels == label)] for label in set(labels)]
    return sorted((group for group in groups if len(group) > 1), key=lambda g: (-len(g), g))


def old_words(text: str) -> dict[str, int]:
    """How often each word is there that the field has others for, broken lines put together."""
    joined = re.sub(r"\n\s*(#:?\s)?\s*", " ", text)
    found = {
        word: len(re.findall(rf"\b{word}\b(?!\.\w)", joined)) for word in OLD if word in joined
    }
    return {word: count for word, count in found.items() if count}


def told(doc: str | None, *sections: str) -> set[str]:
    """Names that sections of a Google-style docstring describe.

    >>> sorted(told("A sum.\\n\\nArgs:\\n    a, b: numbers,\\n        any: too.\\n    *c: more.", "Args"))
    ['a', 'b', 'c']
    """
    names: set[str] = set()
    section = ""
    for line in inspect.cleandoc(doc or "").splitlines():
        if head := re.fullmatch(r"(\w+):", line):
            section = head[1]
        elif section in sections and (entry := re.match(r" {4}([*\w][\w, *]*):", line)):
            names |= {name.strip(" *") for name in entry[1].split(",")}
    return names


def untold(of: Any, name: str) -> list[str]:
    """Parameters of a public function, class or method that no docstring of it describes.

    Those of a class may be described by any class that it inherits from, or by the table of
    decisions.
    """
    try:
        signature = inspect.signature(of)
    except ValueError:
        return []
    if isinstance(of, type):
        if issubclass(of, BaseException) and "__init__" not in vars(of):
            return []
        names = {one for kind in of.__mro__ for one in told(kind.__doc__, "Args", "Attributes")}
        if dataclasses.is_dataclass(of):
            names |= {one.name for one in dataclasses.fields(of) if "decision" in one.metadata}
    else:
        names = told(of.__doc__, "Args")
    return [f"{name}({one})" for one in signature.parameters if one not in names | {"self", "cls"}]


def front() -> dict[str, Any]:
    """What users call: everything in `shardlib.__all__`, and public methods of its classes."""
    import shardlib

    found = {
        name: getattr(importlib.import_module(shardlib._HOME[name]), name)
        for name in shardlib.__all__
        if name in shardlib._HOME
    }
    return found | {
        f"{name}.{word}": getattr(kind, word)
        for name, kind in found.items()
        if isinstance(kind, type)
        for word, of in vars(kind).items()
        if not word.startswith("_") and isinstance(of, classmethod | staticmethod | Callable)
    }


def code_lines(path: Path) -> int:
    """Lines of a file that are neither blank, nor of comments or docstrings."""
    docstrings: set[int] = set()
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    code: set[int] = set()
    with path.open() as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP) or (
                token.type > tokenize.COMMENT and token.string.strip()
            ):
                code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def part_of(path: Path, package: Path) -> str:
    """ "core", or the wing that a file belongs to."""
    first = path.relative_to(package).parts[0]
    return first if first in WINGS else "core"


def sizes(package: Path) -> dict[str, dict[str, int]]:
    """Files, lines and lines of code of the core and of each wing."""
    totals: dict[str, dict[str, int]] = {}
    for path in sorted(package.rglob("*.py")):
        part = totals.setdefault(part_of(path, package), {"files": 0, "lines": 0, "code": 0})
        part["files"] += 1
        part["lines"] += len(path.read_text().splitlines())
        part["code"] += code_lines(path)
    return totals


def fillers(paths: Iterable[Path]) -> float:
    """Of 1,000 names that are bound, those that say nothing."""
    names = [
        node.id if isinstance(node, ast.Name) else node.arg
        for path in paths
        for node in nodes(path)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]
    return 1000 * sum(name in FILLERS for name in names) / len(names)


def imports_of(package: Path) -> dict[Path, dict[str, tuple[Path, str]]]:
    """By file, the names that it imports of the package, and where each is from: the file, and
    the name there, "" for the file itself.
    """
    modules = {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in package.rglob("*.py")
    }
    imported: dict[Path, dict[str, tuple[Path, str]]] = {}
    for path in modules.values():
        names = imported.setdefault(path, {})
        for node in nodes(path):
            if not isinstance(node, ast.ImportFrom) or node.module not in modules:
                continue
            for alias in node.names:
                inner = modules.get(f"{node.module}.{alias.name}")
                source = (inner, "") if inner else (modules[node.module], alias.name)
                names[alias.asname or alias.name] = source
    return imported


def shape(package: Path) -> dict[str, Any]:
    """How the modules of the package hang together."""
    imported = imports_of(package)
    importers: dict[Path, set[Path]] = {}
    for path, names in imported.items():
        for source, _ in names.values():
            if source != path:
                importers.setdefault(source, set()).add(path)
    modules = [path for path in imported if path.name != "__init__.py"]
    functions = {
        (path, node.name): 0
        for path in imported
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    outside: dict[tuple[Path, str], int] = {}
    for path, names in imported.items():
        for node in nodes(path):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used = names.get(node.id, (path, node.id))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                source, name = names.get(node.value.id, (path, "?"))
                used = (source, node.attr if name == "" else "?")
            else:
                continue
            if used in functions:
                functions[used] += 1
                outside[used] = outside.get(used, 0) + (used[0] != path)
    text = "\n".join(path.read_text() for path in imported)
    return {
        "modules with one importer, %": round(
            100 * sum(len(importers.get(path, ())) == 1 for path in modules) / len(modules), 1
        ),
        "functions called once, from another file, %": round(
            100
            * sum(count == 1 and outside.get(key) == 1 for key, count in functions.items())
            / len(functions),
            1,
        ),
        "isinstance on kinds of programs": len(
            re.findall(
                r"isinstance\([^()]*\b(?:IslandsProgram|StepProgram|AnyProgram|Program)\b", text
            )
        ),
        "imports of wings in the core": sum(
            part_of(path, package) == "core" and part_of(source, package) != "core"
            for path, names in imported.items()
            for source, _ in names.values()
        ),
        "fillers in 1,000 names": round(fillers(imported), 1),
    }


def entered(root: Path) -> dict[str, int]:
    """Files of the package that are entered, by what is done with two linear layers."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED],
        cwd=root,
        env={
            **os.environ,
            "PYTHONPATH": str(root),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def form(root: Path) -> dict[str, Any]:
    """Size and shape of the package in a clone."""
    return {
        "sizes": sizes(root / "shardlib"),
        **shape(root / "shardlib"),
        "files entered": entered(root),
    }


def house() -> dict[str, Any]:
    """All figures."""
    modules = sources()
    paths = list(modules.values())
    lines = {str(path.relative_to(ROOT)): path.read_text().splitlines() for path in paths}
    texts = "\n".join("\n".join(one) for one in lines.values()) + "\n".join(
        path.read_text() for path in (ROOT / "docs").rglob("*.md")
    )
    return {
        "files": len(paths),
        "lines": sum(map(len, lines.values())),
        "circles": circles({name: imported(name, path, modules) for name, path in modules.items()}),
        "classes cut over two files": cut_classes(modules.values()),
        f"lines over {LINE} columns": sum(
            len(line) > LINE for one in lines.values() for line in one
        ),
        "old words": old_words(texts),
        "parameters of public names that are not described": [
            parameter for name, of in front().items() for parameter in untold(of, name)
        ],
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, help="store the figures")
    parser.add_argument("--before", type=Path, help="a clone of an earlier commit")
    options = parser.parse_args()
    found = house() | form(ROOT)
    if options.before is not None:
        found["before"] = form(options.before.resolve())
    for name, value in found.items():
        print(f"{name}: {len(value) if isinstance(value, list | dict) else value}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
