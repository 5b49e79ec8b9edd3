"""A training step as bytes, for the process that compiles it.

As a portable StableHLO program (`jax.export`) lowered once, here, for an abstract mesh, with the
layouts of its arguments and results beside it. No Python object of the user's has to be pickled,
and no compiler is loaded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import export

from shardlib import _jax_compat
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import VerificationError
from shardlib.jax_types import Function, KeyPath
from shardlib.lowering.host_memory.offload import HOST
from shardlib.lowering.islands.compression.exchange import GradientExchange
from shardlib.lowering.islands.delayed.call import IslandCall
from shardlib.lowering.islands.meeting.meeting import Meeting
from shardlib.lowering.program.program import Program
from shardlib.untrusted.json_types import JsonObject

#: A partition spec as plain data: for every dim the mesh axes that shard it.
Spec = list[list[str]]


@dataclass(frozen=True, kw_only=True)
class ExportedStep:
    """One training step, ready to be compiled elsewhere.

    Attributes:
        program: the serialised program over the flat leaves of (state, batch).
        mesh: (axis, size) of every mesh axis.
        arguments: a name for every argument: "params.layers.mlp.up", "batch.inputs".
        in_specs: how each argument is sharded.
        out_specs: how each leaf of the new state is sharded; metrics are replicated.
        in_kinds, out_kinds: the memory of each argument and of each leaf of the new state,
            "pinned_host"; "" for that of the device.
        donated: how many of the first arguments are donated.
    """

    program: bytes
    mesh: tuple[tuple[str, int], ...]
    arguments: tuple[str, ...]
    in_specs: tuple[Spec, ...]
    out_specs: tuple[Spec, ...]
    in_kinds: tuple[str, ...]
    out_kinds: tuple[str, ...]
    donated: int

    def to_json(self) -> JsonObject:
        """All but the program, as plain data."""
        return {name: value for name, value in self.__dict__.items() if name != "program"}


def export_step(program: Program, platform: str) -> ExportedStep:
    """Lowers the step of a program for a platform that need not be here."""
    state = jax.tree.leaves(program.state)
    step = program.step_function()

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        return step(state, batch)

    run.__name__ = run.__qualname__ = step.__name__
    return exported(
        run,
        (program.state, program.batch),
        results=state,
        mesh=program.mesh,
        platform=platform,
        what="the training step",
    )


def export_meeting(meeting: Meeting | GradientExchange | IslandCall, platform: str) -> ExportedStep:
    """Lowers a meeting of islands for a platform that need not be here."""
    arguments = meeting.arguments()

    def meet(*arguments: Any) -> tuple[Any, Any]:
        return meeting.function(*arguments), ()

    return exported(
        meet,
        arguments,
        results=jax.tree.leaves(meeting.results()),
        mesh=meeting.mesh,
        platform=platform,
        what="the meeting of islands",
    )


def exported(
    function: Function,
    arguments: tuple[Tree, ...],
    *,
    results: Sequence[Tree],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    platform: str,
    what: str,
) -> ExportedStep:
    """A function of trees as a serialised program over their flat leaves."""
    paths, tree = jax.tree_util.tree_flatten_with_path(arguments)
    leaves = [leaf for _, leaf in paths]

    def flat(*leaves: Any) -> tuple[tuple[Any, ...], Any]:
        after, metrics = function(*tree.unflatten(leaves))
        return tuple(jax.tree.leaves(after)), metrics

    flat.__name__ = flat.__qualname__ = function.__name__
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jitted = jax.jit(
        flat,
        in_shardings=tuple(leaf.sharding for leaf in leaves),
        out_shardings=(tuple(leaf.sharding for leaf in results), replicated),
        donate_argnums=tuple(range(len(results))),
    )
    try:
        with _jax_compat.in_mesh(mesh):
            program = export.export(
                jitted, platforms=[platform], disabled_checks=_unstable_calls()
            )(*leaves)
        data = bytes(program.serialize())
    except Exception as error:
        raise VerificationError(
            f"{what} does not lower for {platform}: {type(error).__name__}: {str(error)[:800]}"
        ) from error
    return ExportedStep(
        program=data,
        mesh=tuple((axis, size) for axis, size in mesh.shape.items()),
        arguments=tuple(_name(path) for path, _ in paths),
        in_specs=tuple(_spec(leaf) for leaf in leaves),
        out_specs=tuple(_spec(leaf) for leaf in results),
        in_kinds=tuple(_kind(leaf) for leaf in leaves),
        out_kinds=tuple(_kind(leaf) for leaf in results),
        donated=len(results),
    )


def _unstable_calls() -> list[export.DisabledSafetyCheck]:
    """Programs are compiled with the very JAX that exported them: a custom call need not stay
    stable over versions.
    """
    return [
        export.DisabledSafetyCheck.custom_call(name)
        for name in ("tpu_custom_call", "LayoutConstraint", "AllocateBuffer")
    ]


def _spec(leaf: Tree) -> Spec:
    spec = leaf.sharding.spec
    return [
        [] if axes is None else [axes] if isinstance(axes, str) else list(axes) for axes in spec
    ]


def _kind(leaf: Tree) -> str:
    return leaf.sharding.memory_kind if leaf.sharding.memory_kind == HOST else ""


def _name(path: KeyPath) -> str:
    """A readable name of a leaf of (state, batch)."""
    words = [
        str(
            getattr(key, "name", None) or getattr(key, "key", None)
            if not hasattr(key, "idx")
            else key.idx
        )
        for key in path
    ]
    return ".".join((["batch"] if words[0] == "1" else []) + words[1:])
