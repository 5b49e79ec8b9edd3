"""The two halves of a step as programs of their own: gradients, and the update.

    gradients, update = GradientProgram.of(program), UpdateProgram.of(program)
    metrics, found, model_state = gradients.call(params, model_state, batch)
    state = update.call(state, found, model_state, metrics["loss"])

They are the program's own lowering: the loss with its layouts, microbatches, stages and reductions,
up to where the optimizer takes over, and the rest. What becomes of gradients in between is for
others to say: a parameter server, islands. The gradients donate nothing; the update donates the
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from shardlib import _jax_compat
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.errors import PinError, raise_all
from shardlib.jax_types import Function, Metrics, Value
from shardlib.layout import Layout
from shardlib.lowering.mesh import shardings
from shardlib.lowering.mesh.pinning import constrain
from shardlib.lowering.mesh.precision import like
from shardlib.lowering.program.program import Program, shardings_of
from shardlib.lowering.program.step import named
from shardlib.lowering.program.update.updated import updated
from shardlib.lowering.runtime.state import TrainState


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientProgram:
    """A compiled program that gives the gradients of trained parameters.

    Attributes:
        program: whose step it is part of.
        call: (params, model state, batch) -> (metrics, gradients, model state).
    """

    program: Program
    call: jax.stages.Compiled

    @staticmethod
    def of(program: Program) -> GradientProgram:
        """Compiles the gradients of a program."""
        require_divided(program)
        parts, state = program.parts, program.state

        def gradients(params: Tree, model_state: Tree, batch: Tree) -> tuple[Metrics, Tree, Tree]:
            (loss, (metrics, after)), found, _ = parts.run.gradients(
                params, model_state, batch, None
            )
            found = like(constrain(found, parts.params.gradient), parts.updated)
            return {"loss": loss, **metrics}, found, after

        named(gradients, "gradients", program.plan.digest)
        arguments = (state.params, state.model_state, program.batch)
        whole = shardings.named_sharding(program.mesh, Layout())
        results = (whole, parts.params.gradient, shardings_of(state.model_state))
        call = _compiled(program, gradients, arguments, results)
        return GradientProgram(program=program, call=call)


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateProgram:
    """A compiled program that updates a state by gradients.

    Attributes:
        program: whose step it is part of.
        call: (state, gradients sharded as optimizer state is, model state, loss) -> state.
    """

    program: Program
    call: jax.stages.Compiled

    @staticmethod
    def of(program: Program) -> UpdateProgram:
        """Compiles the update of a program."""
        require_divided(program)
        parts, state = program.parts, program.state

        def update(
            state: TrainState, gradients: Tree, model_state: Tree, loss: Value
        ) -> TrainState:
            return updated(parts, state, loss, like(gradients, parts.updated), model_state)

        named(update, "update", program.plan.digest)
        whole = shardings.named_sharding(program.mesh, Layout())
        gradients = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=sharding),
            program.model.partition.trained(state.params),
            parts.params.state,
        )
        loss = jax.ShapeDtypeStruct((), np.float32, sharding=whole)
        arguments = (state, gradients, state.model_state, loss)
        call = _compiled(program, update, arguments, shardings_of(state), donated=(0,))
        return UpdateProgram(program=program, call=call)


def _compiled(
    program: Program,
    function: Function,
    arguments: tuple[Tree, ...],
    results: Tree,
    donated: tuple[int, ...] = (),
) -> jax.stages.Compiled:
    """Half a step, compiled for abstract arguments that have shardings."""
    assert isinstance(program.mesh, Mesh)
    with _jax_compat.in_mesh(program.mesh):
        return (
            jax.jit(
                function,
                in_shardings=shardings_of(arguments),
                out_shardings=results,
                donate_argnums=donated,
            )
            .lower(*arguments)
            .compile()
        )


def trained(program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """The trained parameters of a program, abstract, by path."""
    return by_path(program.model.partition.trained(program.state.params))


def with_trained(program: Program, params: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """Parameters whose trained part is that of the host's arrays, placed as the plan says."""
    leaves = trained(program)
    placed = {path: placed_as(leaf, arrays[path]) for path, leaf in leaves.items()}
    return with_placed(program, params, placed)


def placed_as(leaf: jax.ShapeDtypeStruct, array: np.ndarray) -> jax.Array:
    """An array of the host, placed as a parameter is."""
    return jax.device_put(array.reshape(leaf.shape).astype(leaf.dtype), leaf.sharding)


def with_placed(program: Program, params: Tree, placed: Mapping[str, jax.Array]) -> Tree:
    """Parameters whose trained part is that of arrays that are in place."""
    partition = program.model.partition
    abstract, structure = jax.tree_util.tree_flatten_with_path(
        partition.trained(program.state.params)
    )
    leaves = [placed[name_of(path)] for path, _ in abstract]
    return partition.joined(jax.tree.unflatten(structure, leaves), params)


def by_path(tree: Tree) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves of a tree of trained parameters, or of something like them, by path."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def name_of(path: tuple[object, ...]) -> str:
    """The path of a parameter as text; "params" for one that is the whole tree."""
    return path_text(path) or "params"


def require_divided(program: Program, *, staged: bool = False) -> None:
    """Refuses a program whose update is no part of its own."""
    failures: list[str] = []
    if program.programs is not None and not staged:
        failures.append("its stages are programs of their own (pipeline='programs')")
    if program.disk is not None:
        failures.append("its optimizer state is on disk (offload=['disk'])")
    if program.parts.guards is not None:
        failures.append("it has guards, which skip updates")
    if program.parts.run.kept is not None:
        failures.append("its devices keep partial sums of gradients from step to step")
    updated = [one.path for one in program.plan.parameters if one.role == "updated"]
    if updated:
        failures.append(
            f"steps update {', '.join(updated[:4])}{' and others' if len(updated) > 4 else ''},"
            " which are no parameters: each worker would have its own"
        )
    if failures:
        raise_all(PinError, "gradients without an update cannot be taken of this step", failures)
