"""The floors of the house: who may import whom, and what nobody may use."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.house import VALUES, loaded, nodes, parsed

PACKAGE = Path(__file__).parents[1] / "shardlib"
FLOORS = {
    0: ["errors", "compact", "untrusted"],
    1: ["axes", "layout", "rules", "collective", "report", "hardware", "schedules", "exchanges"],
    2: ["graph", "decisions"],
    3: ["propagation", "cost"],
    4: ["planning"],
    5: ["_jax_compat", "jax_types", "processes", "annotation", "functions", "tracing"],
    6: ["calibration", "lowering"],
    7: ["verification", "explanation"],
    8: ["compiler", "frontend"],
    9: [
        "models",
        "booking",
        "data",
        "checkpointing",
        "doctor",
        "training",
        "launching",
        "servers",
        "federated",
        "serving",
    ],
    10: ["cli", "__init__", "__main__"],
}
#: Rooms within rooms, from the lowest to the highest; what is not listed may stand anywhere, as
#: long as there is no circle.
ORDER = {
    "cost": [
        "terms",
        "step",
        "profiles",
        "machine",
        "items",
        "tables",
        "estimate",
        "pricing",
        "serving",
    ],
    "planning": [
        "units",
        "decisions",
        "plan",
        "space",
        "bounds",
        "answers",
        "text",
        "pictures",
        "emission",
        "assembly",
        "islands",
        "offers",
        "search",
        "questions",
        "planner",
        "edge",
        "serving",
    ],
    "lowering": [
        "mesh",
        "reading",
        "runtime",
        "weights",
        "context",
        "experts",
        "collective_matmul",
        "loss",
        "accumulation",
        "host_memory",
        "pipeline",
        "program",
        "islands",
        "steps",
    ],
    "lowering.pipeline": ["shared", "lockstep", "per_stage"],
    "tracing": ["program", "rules", "rewriting", "jaxpr_to_graph", "rows", "trace", "steps"],
    "data": ["reading", "tokens", "batches", "open"],
    "training": [
        "measures",
        "states",
        "loggers",
        "validation",
        "callbacks",
        "settings",
        "run",
        "stepping",
        "fit",
        "loop",
    ],
    "launching": ["job", "engines"],
    "launching.engines": ["shared", "table"],
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
NO_JAX_BELOW = 5
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
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


def room_of(module: str) -> str:
    """The room of a dotted module name under `shardlib`; the package itself is "__init__"."""
    return module.split(".")[1] if "." in module else "__init__"


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


def faults(path: Path, statements: Sequence[ast.AST]) -> list[str]:
    """What is wrong with one file."""
    module = module_of(path)
    floor = FLOOR.get(room_of(module))
    if floor is None:
        return [f"the room {room_of(module)!r} is on no floor"]
    found: list[str] = []
    for name in imports(statements):
        if any(name == banned or name.startswith(f"{banned}.") for banned in BANNED_MODULES):
            found.append(f"imports {name}, which is private or deprecated")
        if name.split(".")[0] in JAX and floor < NO_JAX_BELOW:
            found.append(
                f"floor {floor} imports {name}; there is no JAX below floor {NO_JAX_BELOW}"
            )
        if name.startswith("shardlib."):
            other = FLOOR.get(room_of(name))
            if other is not None and other > floor:
                found.append(f"floor {floor} imports {name} from floor {other}")
    for node in statements:
        if isinstance(node, ast.Attribute) and (node.attr in BANNED_NAMES or node.attr == "_src"):
            found.append(f"line {node.lineno}: uses .{node.attr}")
    return found


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


def test_no_rooms_import_each_other():
    every = sorted({module_of(path).rpartition(".")[0] for path in FILES})
    assert {room: found for room in every if (found := circle(rooms(edges(), room)))} == {}


@pytest.mark.parametrize("room", ORDER)
def test_rooms_within_a_room_keep_their_order(room: str):
    place = {f"shardlib.{room}.{name}": number for number, name in enumerate(ORDER[room])}
    found = rooms(edges(), f"shardlib.{room}")
    assert place.keys() <= found.keys(), "an ordered room is gone"
    assert [
        (name, other)
        for name, others in found.items()
        for other in others
        if place.get(other, -1) > place.get(name, len(place))
    ] == []


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


def test_files_keep_the_rules():
    assert {path: found for path in FILES if (found := faults(path, nodes(path)))} == {}


@pytest.mark.parametrize(
    ("where", "source", "fault"),
    [
        (
            "cost/estimate.py",
            "import jax.numpy",
            "floor 3 imports jax.numpy; there is no JAX below floor 5",
        ),
        (
            "cost/estimate.py",
            "def f():\n from shardlib.planner.plan import Plan",
            "floor 3 imports shardlib.planner.plan.Plan from floor 4",
        ),
        (
            "lowering/program/step.py",
            "from jax._src import core",
            "imports jax._src.core, which is private or deprecated",
        ),
        ("lowering/program/step.py", "x = jax._src.core", "line 1: uses ._src"),
        ("lowering/program/step.py", "jax.pmap(f)", "line 1: uses .pmap"),
        ("attic/old.py", "", "the room 'attic' is on no floor"),
    ],
)
def test_faults_are_found(where: str, source: str, fault: str):
    assert faults(PACKAGE / where, tuple(ast.walk(ast.parse(source)))) == [fault]


@pytest.mark.processes
def test_planning_rooms_load_without_jax():
    import subprocess
    import sys

    code = (
        "import sys, pkgutil, importlib, shardlib\nfor room in"
        f" {[room for floor in range(NO_JAX_BELOW) for room in FLOORS[floor]]!r}:\n    module ="
        " importlib.import_module(f'shardlib.{room}')\n    for info in"
        " pkgutil.walk_packages(getattr(module, '__path__', []), f'shardlib.{room}.'):\n       "
        " importlib.import_module(info.name)\nprint(sorted({'jax', 'flax'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert done.stdout.strip() == "[]"


def test_public_names_exist_where_the_package_says():
    import shardlib

    assert sorted(shardlib.__all__) == sorted({*shardlib._HOME, "__version__"})
    for name in shardlib.__all__:
        assert getattr(shardlib, name) is not None, name
    assert len(shardlib.__all__) <= 74  # with `value_and_grad`, which a step marks its loss with


@pytest.mark.processes
def test_importing_the_package_is_light():
    import subprocess
    import sys

    code = (
        "import sys, shardlib; print(sorted({'jax', 'flax', 'numpy', 'rich', 'typer'} &"
        " set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.processes
def test_planning_loads_nothing_that_lowers_or_verifies():
    import subprocess
    import sys

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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert done.stdout.strip() == "[]"
