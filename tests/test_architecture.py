"""Who may import whom, and what nobody may use."""

from __future__ import annotations

import ast
import functools
import importlib
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.house import VALUES, loaded, nodes, parsed
from shardlib import _moved
from tests.processes import python

PACKAGE = Path(__file__).parents[1] / "shardlib"
BANNED_MODULES = {
    "jax._src",
    "jax.experimental.pjit",
    "jax.experimental.shard_map",
    "jax.experimental.maps",
    "jax.interpreters",
}
BANNED_NAMES = {
    "pjit",
    "pmap",
    "xmap",
    "GSPMDSharding",
    "PositionalSharding",
    "device_put_replicated",
    "device_put_sharded",
    "abstract_with_sharding",
}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(["shardlib", *path.relative_to(PACKAGE).with_suffix("").parts])


def imports(statements: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names that some statement of a file imports, wherever in the file it stands."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(statements: Sequence[ast.AST]) -> list[str]:
    """What a file uses that is private or deprecated."""
    failures = [
        f"imports {name}, which is private or deprecated"
        for name in imports(statements)
        if any(name == banned or name.startswith(f"{banned}.") for banned in BANNED_MODULES)
    ]
    return failures + [
        f"line {node.lineno}: uses .{node.attr}"
        for node in statements
        if isinstance(node, ast.Attribute) and (node.attr in BANNED_NAMES or node.attr == "_src")
    ]


@functools.cache
def edges() -> dict[str, set[str]]:
    """Modules, and the modules that each imports: at the top, in functions and under TYPE_CHECKING
    alike; of `VALUES`, those that are imported with them.
    """
    modules = {module_of(path).removesuffix(".__init__"): path for path in FILES}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {
            name if name in modules else name.rpartition(".")[0]
            for name in imports(loaded(path) if module in VALUES else nodes(path))
        }
        found[module] = {name for name in names if name in modules and name != module}
    return found


def rooms(found: dict[str, set[str]], room: str) -> dict[str, set[str]]:
    """The files and rooms right inside a room, and which of them each imports."""
    depth = room.count(".") + 2

    def inner(module: str) -> str:
        return ".".join(module.split(".")[:depth])

    inside = {module: names for module, names in found.items() if module.startswith(f"{room}.")}
    merged: dict[str, set[str]] = {}
    for module, names in inside.items():
        merged.setdefault(inner(module), set()).update(
            inner(name) for name in names if name in inside and inner(name) != inner(module)
        )
    return merged


def circle(found: dict[str, set[str]]) -> list[str]:
    """What imports itself in the end; nothing where there is no circle."""
    left = dict(found)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_modules_import_each_other():
    assert circle(edges()) == []


def test_no_packages_within_a_package_import_each_other():
    every = sorted({module_of(path).rpartition(".")[0] for path in FILES} - {"shardlib", ""})
    assert {room: found for room in every if (found := circle(rooms(edges(), room)))} == {}


def test_circles_are_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert rooms(
        {"s.x.a": {"s.y"}, "s.x.b": {"s.x.a", "s.y"}, "s.y": {"s.x.b"}, "t": {"s.y"}}, "s"
    ) == {"s.x": {"s.y"}, "s.y": {"s.x"}}


def test_packages_say_what_they_hold():
    assert [
        folder
        for folder in {path.parent for path in FILES}
        if not ast.get_docstring(parsed(folder / "__init__.py"))
    ] == [], "one paragraph"


def test_files_use_nothing_private_or_deprecated():
    assert {path: found for path in FILES if (found := faults(nodes(path)))} == {}


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("from jax._src import core", "imports jax._src.core, which is private or deprecated"),
        ("x = jax._src.core", "line 1: uses ._src"),
        ("jax.pmap(f)", "line 1: uses .pmap"),
    ],
)
def test_faults_are_found(source: str, fault: str):
    assert faults(tuple(ast.walk(ast.parse(source)))) == [fault]


def linted(path: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the package in a folder, by the contracts of pyproject.toml."""
    return python(
        "-c",
        "from importlinter.cli import lint_imports_command as lint; lint()",
        cwd=path,
        variables={"PYTHONPATH": str(path)},
        check=False,
    )


@pytest.mark.processes
def test_imports_keep_the_contracts():
    done = linted(PACKAGE.parent)
    assert done.returncode == 0, done.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("where", "source", "contract"),
    [
        ("cost/pricing.py", "import jax.numpy", "There is no JAX between the doors"),
        (
            "cost/pricing.py",
            "def f():\n    from shardlib.planner.plan import Plan",
            "Imports go down the layers",
        ),
        ("training/fit.py", "import shardlib.serve.engine", "The core knows no wing"),
        ("attic.py", "", "Imports go down the layers"),
    ],
)
def test_broken_contracts_are_found(tmp_path: Path, where: str, source: str, contract: str):
    shutil.copytree(PACKAGE, tmp_path / "shardlib", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    path = tmp_path / "shardlib" / where
    path.write_text((path.read_text() if path.exists() else "") + "\n" + source + "\n")
    done = linted(tmp_path)
    assert done.returncode != 0
    assert f"{contract} BROKEN" in done.stdout or "attic" in done.stdout + done.stderr


@pytest.mark.processes
def test_planning_rooms_load_without_jax():
    contracts = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]
    packages = contracts["importlinter"]["contracts"][1]["source_modules"]
    code = (
        f"import sys, pkgutil, importlib\nfor package in {packages!r}:\n    module ="
        " importlib.import_module(package)\n    for info in"
        " pkgutil.walk_packages(getattr(module, '__path__', []), f'{package}.'):\n       "
        " importlib.import_module(info.name)\nprint(sorted({'jax', 'flax'} & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "[]"


def test_earlier_names_of_modules_are_the_modules_of_today():
    for earlier, name in _moved.MOVED.items():
        module = importlib.import_module(earlier)
        assert module is importlib.import_module(name), earlier
        assert module.__spec__ is not None and module.__spec__.name == name, earlier


@pytest.mark.processes
def test_earlier_names_of_modules_replace_no_function():
    code = (
        "import shardlib.training.run.status, shardlib.lowering.experts.routed\n"
        "from shardlib.training.run.status import status as earlier\n"
        "from shardlib.training.run import status\n"
        "from shardlib.lowering.experts import routed\n"
        "print(callable(status), callable(routed), earlier is status)"
    )
    assert python("-c", code).stdout.split() == ["True"] * 3
    for earlier in _moved.MOVED:
        parent, _, child = earlier.rpartition(".")
        here = vars(importlib.import_module(parent)).get(child)
        assert here is None or isinstance(here, ModuleType), f"{earlier} would replace {here}"


def test_public_names_exist_where_the_package_says():
    import shardlib

    assert sorted(shardlib.__all__) == sorted({*shardlib._HOME, "__version__"})
    for name in shardlib.__all__:
        assert getattr(shardlib, name) is not None, name
    assert len(shardlib.__all__) <= 64  # with `value_and_grad`, which a step marks its loss with


def test_exchanges_have_a_package_and_keep_their_earlier_names():
    import shardlib

    earlier = _moved.ISLANDS.split()
    assert earlier == shardlib.islands.__all__
    for name in earlier:
        assert getattr(shardlib, name) is getattr(shardlib.islands, name)
        assert name not in dir(shardlib)


@pytest.mark.processes
def test_importing_the_package_is_light():
    code = (
        "import sys, shardlib; print(sorted({'jax', 'flax', 'numpy', 'rich', 'typer'} &"
        " set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "[]"


@pytest.mark.processes
def test_planning_loads_nothing_that_lowers_or_verifies():
    code = (
        "import sys, jax, optax, shardlib\nfrom flax import nnx\n"
        "def loss(model, batch):\n    return (model(batch) ** 2).mean()\n"
        "batch = jax.ShapeDtypeStruct((8, 16), 'float32')\n"
        "for refine, framework in ((None, None), (0, 'megatron-core')):\n"
        "    shardlib.plan(lambda rngs: nnx.Linear(16, 16, rngs=rngs), loss, optax.sgd(0.1), batch,"
        " topology='h100:8', refine=refine, framework=framework)\n"
        "loaded = ('shardlib.lowering', 'shardlib.verify', 'shardlib.calibration')\n"
        "print(sorted(name for name in sys.modules if name.startswith(loaded)))"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "[]"
