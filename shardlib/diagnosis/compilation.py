"""Compilation of a traced function for a topology, in a process of its own."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardlib.diagnosis.program import TracedFunction
from shardlib.machines.topology import Topology
from shardlib.processes.kin import Guard
from shardlib.untrusted.data import JsonObject
from shardlib.verification.isolation import (
    Compiled,
    Failure,
    Limits,
    Target,
    require_compiler,
    run_child,
    target,
)

Options = Mapping[str, str | bool | int]


def target_of(function: TracedFunction, topology: Topology) -> Target:
    """The machine that a function is compiled for.

    Raises:
        TopologyError: the mesh does not fit the topology.
    """
    return target(topology, function.shape, tuple(function.axis_names))


@contextmanager
def _folder() -> Iterator[tuple[Guard, Path]]:
    """A folder for a child process; the guard deletes it where this process is killed."""
    with Guard() as guard, tempfile.TemporaryDirectory(prefix="shardlib-why-") as name:
        guard.clear(Path(name))
        yield guard, Path(name)


def propagate(
    functions: Sequence[TracedFunction], machine: Target, limits: Limits
) -> tuple[JsonObject, ...]:
    """The shardings of functions as Shardy propagates them (`shardings.read_shardings`); with a
    "problem" where it does not.
    """
    with _folder() as (guard, folder):
        for number, function in enumerate(functions):
            (folder / f"module-{number:03}.mlir").write_text(function.module, encoding="utf-8")
        command = [sys.executable, "-m", "shardlib.diagnosis.shardings", str(folder)]
        outcome = run_child(command, folder, machine, limits, guard)
        why = outcome.message if isinstance(outcome, Failure) else "Shardy wrote nothing"
        return tuple(
            json.loads(file.read_text(encoding="utf-8"))
            if (file := folder / f"shardings-{number:03}.json").is_file()
            else {"meetings": [], "values": [], "problem": why}
            for number in range(len(functions))
        )


def compile_function(
    function: TracedFunction, machine: Target, limits: Limits, options: Options
) -> Compiled | Failure:
    """Compiles a function.

    Args:
        options: of the compiler, beside those of this process's flags.
    """
    require_compiler(machine.platform)
    with _folder() as (guard, folder):
        (folder / "program.bin").write_bytes(function.program)
        job = {
            "target": machine.to_json(),
            "mesh": [list(axis) for axis in function.mesh],
            "kinds": list(function.kinds),
            "donated": list(function.donated),
            "options": dict(options),
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "shardlib.diagnosis.child", str(folder)]
        return run_child(command, folder, machine, limits, guard)
