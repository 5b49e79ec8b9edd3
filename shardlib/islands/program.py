"""Islands that train apart, and synchronise in an outer step.

Each island runs the unchanged program of its own plan on its own devices, so that nothing can cross
inside of a step. What crosses is a second program over the devices of all islands, a *meeting*,
which takes the islands' parameters as they lie, without copies:
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib import _jax_compat
from shardlib.annotation.names import Seed, UserLoss, UserModule
from shardlib.annotation.trees import Tree, path_text
from shardlib.errors import PinError, StateError, raise_all
from shardlib.findings import Finding
from shardlib.islands.exchanges import Compressed, Meets, Part, Several
from shardlib.islands.meeting import (
    Meeting,
    alike,
    local,
    meetings_of,
    mesh_of_all,
    replaced,
    stacked,
    stacked_shape,
    stacked_sharding,
    unstacked,
)
from shardlib.islands.planning import updated_by_steps
from shardlib.islands.transfers import FirstUse, first_uses, in_order
from shardlib.jax_types import Function, Metrics, Value
from shardlib.layout import ISLAND, Layout
from shardlib.lowering import mesh
from shardlib.lowering.checks import require_batch
from shardlib.lowering.collectives import cast_like
from shardlib.lowering.mesh import batch_path, constrain_tree
from shardlib.lowering.mesh import constrain as mesh_held
from shardlib.lowering.pipeline.per_stage import StepPrograms, UpdateInputs
from shardlib.lowering.program import Options, Program, Verifier, shardings_of, verified_by
from shardlib.lowering.random_keys import BatchDims, KeyFold, is_key
from shardlib.lowering.runtime import TrainState, require_not_donated
from shardlib.lowering.step import Evaluation, updated_state, with_digest
from shardlib.lowering.uses import LossJaxpr
from shardlib.planner.plan import Plan
from shardlib.processes.progress import Progress
from shardlib.tracing.trace import graph_from_program

# --------------------------------------------------------------------------------------------------
# The two halves of a step as programs of their own: gradients, and the update.
#
#     gradients, update = GradientProgram.of(program), UpdateProgram.of(program)
#     metrics, found, model_state = gradients.call(params, model_state, batch)
#     state = update.call(state, found, model_state, metrics["loss"])
#
# They are the program's own lowering: the loss with its layouts, microbatches, stages and
# reductions, up to where the optimizer takes over, and the rest. What becomes of gradients in
# between is for others to say: a parameter server, islands. The gradients donate nothing; the
# update donates the state.


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
        return GradientProgram(program=program, call=_compiled_gradients(program, program.batch))


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
            return updated_state(
                parts, state, loss, cast_like(gradients, parts.update_params), model_state
            )

        with_digest(update, "update", program.plan.digest)
        replicated = mesh.named_sharding(program.mesh, Layout())
        gradients = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=sharding),
            program.model.partition.trained(state.params),
            parts.param_shardings.state,
        )
        loss = jax.ShapeDtypeStruct((), np.float32, sharding=replicated)
        arguments = (state, gradients, state.model_state, loss)
        call = _compiled(program, update, arguments, shardings_of(state), donated=(0,))
        return UpdateProgram(program=program, call=call)


def _compiled_gradients(program: Program, batch: Tree) -> jax.stages.Compiled:
    """(params, model state, batch) -> (metrics, gradients, model state), compiled.

    Args:
        batch: abstract; or what the stages of a pipeline leave of it.
    """
    parts, state = program.parts, program.state

    def gradients(params: Tree, model_state: Tree, batch: Tree) -> tuple[Metrics, Tree, Tree]:
        (loss, (metrics, after)), grads = parts.run.gradients(params, model_state, batch)
        grads = cast_like(
            constrain_tree(grads, parts.param_shardings.gradient), parts.update_params
        )
        return {"loss": loss, **metrics}, grads, after

    with_digest(gradients, "gradients", program.plan.digest)
    arguments = (state.params, state.model_state, batch)
    replicated = mesh.named_sharding(program.mesh, Layout())
    results = (replicated, parts.param_shardings.gradient, shardings_of(state.model_state))
    return _compiled(program, gradients, arguments, results)


def _compiled(
    program: Program,
    function: Function,
    arguments: tuple[Tree, ...],
    results: Tree,
    donated: tuple[int, ...] = (),
) -> jax.stages.Compiled:
    """Half a step, compiled for abstract arguments that have shardings."""
    assert isinstance(program.mesh, Mesh)
    with _jax_compat.in_mesh(program.mesh), Progress("compiling half a step"):
        return (
            jax.jit(function, out_shardings=results, donate_argnums=donated)
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


def by_path(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree of trained parameters, or of something like them, by path."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def name_of(path: tuple[object, ...]) -> str:
    """The path of a parameter as text; "params" for one that is the whole tree."""
    return path_text(path) or "params"


def not_in_float32(parameters: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
    """Lists the parameters that float32 cannot hold, with their dtypes."""
    return [
        f"{path} is {leaf.dtype}"
        for path, leaf in parameters.items()
        if not jnp.issubdtype(leaf.dtype, np.floating) or leaf.dtype.itemsize > 4
    ]


def require_divided(program: Program, *, staged: bool = False) -> None:
    """Refuses a program whose update is not part of its own."""
    failures: list[str] = []
    if program.programs is not None and not staged:
        failures.append("its stages are programs of their own (pipeline='programs')")
    if program.disk is not None:
        failures.append("its optimizer state is on disk (offload=['disk'])")
    if program.parts.guards is not None:
        failures.append("it has guards, which skip updates")
    if updated := updated_by_steps(program.plan.parameters):
        failures.append(
            f"steps update {updated}, which are not parameters: each worker would have its own"
        )
    if failures:
        raise_all(PinError, "gradients without an update cannot be taken of this step", failures)


# --------------------------------------------------------------------------------------------------
# The batch of all islands, divided by rows, island by island.


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IslandBatches:
    """A batch for each island, placed on its devices.

    Attributes:
        islands: the batches.
    """

    islands: tuple[Tree, ...]


def parts(batch: Tree, dims: BatchDims, islands: int) -> tuple[Tree, ...]:
    """The part of a batch that each island trains on. A random key that belongs to no row is
    another one on each.

    Args:
        dims: the batch dim of each array, by path; None for one without, a `Fold` for a key.
    """

    def part(number: int) -> Tree:
        def of_leaf(path: Any, leaf: Any) -> Any:
            dim = dims[batch_path(path)]
            if isinstance(dim, KeyFold):
                return dim.microbatch_keys(jnp.asarray(leaf), islands)[number]
            if dim is None:
                return leaf
            rows = leaf.shape[dim] // islands
            index = [slice(None)] * dim + [slice(number * rows, (number + 1) * rows)]
            return leaf[tuple(index)]

        return jax.tree_util.tree_map_with_path(of_leaf, batch)

    return tuple(part(number) for number in range(islands))


def of_all(batch: Tree, dims: BatchDims, mesh: Mesh) -> Tree:
    """The abstract batch of all islands, sharded over the islands, and then as on one."""

    def of_leaf(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        dim, shape, spec = dims[batch_path(path)], list(leaf.shape), [*leaf.sharding.spec]
        if isinstance(dim, int):
            spec += [None] * (dim + 1 - len(spec))
            inner = spec[dim] or ()
            spec[dim] = (ISLAND.name, *((inner,) if isinstance(inner, str) else inner))
            shape[dim] *= mesh.shape[ISLAND.name]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(of_leaf, batch)


def placed_parts(batch: Tree, rows_abstract: Tree, batches: IslandBatches) -> tuple[Tree, ...]:
    """The parts of a batch that lies on the devices of all islands, without a copy; nothing where
    it does not.
    """
    leaves, structure = jax.tree.flatten(batch)
    if not all(
        isinstance(leaf, jax.Array)
        and leaf.sharding == target.sharding
        and leaf.shape == target.shape
        for leaf, target in zip(leaves, jax.tree.leaves(rows_abstract), strict=True)
    ):
        return ()
    return tuple(
        structure.unflatten(
            [
                local(leaf, target.sharding, target.shape)
                for leaf, target in zip(leaves, jax.tree.leaves(island_batch), strict=True)
            ]
        )
        for island_batch in batches.islands
    )


# --------------------------------------------------------------------------------------------------
# Gradients of a pipeline whose stages are programs of their own, without an update.
#
# Where every value that stages take from parameters is a parameter as it is stored (no cast,
# nothing tied to all layers), a step can begin with parts: each stage as soon as its own
# parameters have landed, the first one first; and gradients of a stage can be taken as soon as it
# has gone back with its last microbatch, the last one first. Elsewhere the stages wait for all
# parameters.

#: One of the equal runs of a parameter that stages need one by one: its path, and which.
Run = tuple[str, int]


class Landed(Protocol):
    """Parameters of which some are there."""

    def there(self, runs: tuple[Run, ...]) -> bool:
        """Returns whether all of these are, or never will be."""
        ...

    def run(self, path: str, number: int) -> np.ndarray:
        """Elements of a run, float32, once they are there."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Gradients as stages have summed them, which may not be computed yet.

    Attributes:
        loss: sum of the loss over microbatches, [1].
        parts: of each run what one stage, or the first and the last, have summed.
        count: number of microbatches.
        model_state: after the step.
    """

    loss: jax.Array
    parts: Mapping[Run, tuple[jax.Array, ...]]
    count: int
    model_state: Tree


@dataclass(kw_only=True, eq=False)
class _GradientUpdate:
    """An update that gives gradients in place of a state; compiled where it is called.

    Attributes:
        program: whose.
        made: what stages leave, abstract.
    """

    program: Program
    made: UpdateInputs

    def step(self, state: TrainState, batch: UpdateInputs, /) -> tuple[Any, Metrics]:
        metrics, grads, after = self._call(state.params, state.model_state, batch)
        return (grads, after), metrics

    def memory(self) -> dict[str, int]:
        return _jax_compat.compiled_memory(self._call)

    @cached_property
    def _call(self) -> jax.stages.Compiled:
        return _compiled_gradients(self.program, self.made)


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedGradients:
    """The programs of the stages of a pipeline, up to gradients.

    Attributes:
        program: whose step they are part of.
        dispatch: the programs.
    """

    program: Program
    dispatch: StepPrograms

    @staticmethod
    def of(program: Program) -> StagedGradients:
        """Compiles them."""
        require_divided(program, staged=True)
        assert program.programs is not None
        dispatch = program.programs.compiled(
            program.state,
            program.batch,
            lambda stage_results: _GradientUpdate(program=program, made=stage_results),
            f"shardlib_{program.plan.digest}",
        )
        return StagedGradients(program=program, dispatch=dispatch)

    def call(self, params: Tree, model_state: Tree, batch: Tree) -> tuple[Metrics, Tree, Tree]:
        """(metrics, gradients, model state) of a step whose parameters are all there."""
        state = replace(self.program.state, params=params, model_state=model_state)
        (grads, after), metrics = self.dispatch.step(state, batch)
        return metrics, grads, after

    @cached_property
    def runs(self) -> dict[str, int]:
        """Into how many equal runs each parameter is divided that stages need one by one; empty
        where no stage can begin before all parameters are there.
        """
        dispatch, runs = self.dispatch, dict[str, int]()
        simple = all(chunk.gather is None and chunk.reduce is None for chunk in dispatch.chunks)
        whole_mesh = self._whole_mesh
        if not simple or len(dispatch.chunks) != len(dispatch.stages) or self._shared:
            return {}
        inputs = jax.tree.unflatten(dispatch.inputs_treedef, list(dispatch.setup.sources))
        sources = [(True, source) for stack in inputs.stacks for source in stack]
        sources += [(False, source) for source in inputs.per_step.values()]
        for in_stack, (fresh, source_index) in sources:
            if fresh or source_index >= len(self._names):
                return {}
            runs[self._names[source_index]] = len(dispatch.stages) if in_stack else 1
        assert len(inputs.stacks) == len(whole_mesh.all_stacks), "a turn of each"
        return runs if runs.keys() >= trained(self.program).keys() else {}

    def begun(self, params: Tree, model_state: Tree, batch: Tree, landed: Landed) -> Sums:
        """Queues a step whose parameters are on their way; returns once all stages have them."""
        arriving = _Arriving(staged=self, params=params, landed=landed)
        step = self.dispatch.start(params, model_state, batch, arriving)
        last, outside = len(self.dispatch.chunks) - 1, self.dispatch.outside
        parts = dict[Run, tuple[jax.Array, ...]]()
        for stage in range(last + 1):
            for number, sums in zip(self._whole_mesh.stacks, step.late[stage], strict=False):
                parts[self._path(number), stage] = (sums,)
        for stage in dict.fromkeys((0, last)):
            for number, sums in zip(outside[stage], step.early[stage], strict=False):
                run = (self._path(number), 0)
                parts[run] = (*parts.get(run, ()), sums)
        after = jax.tree.unflatten(jax.tree.structure(model_state), step.inputs.after)
        loss = step.early[last][len(outside[last])]
        return Sums(loss=loss, parts=parts, count=self._whole_mesh.microbatches, model_state=after)

    def needs(self, stage: int) -> tuple[Run, ...]:
        """The runs that a stage needs."""
        names = trained(self.program)
        numbers = [(number, stage) for number in self._whole_mesh.all_stacks]
        numbers += [(number, 0) for number in self.dispatch.per_step[stage]]
        runs = [(self._path(number), run) for number, run in numbers]
        return tuple(run for run in runs if run[0] in names)

    def _path(self, number: int) -> str:
        """The path of the parameter that a value is."""
        return self._names[self._whole_mesh.pipeline.sections.program.inputs.index(number)]

    @property
    def _whole_mesh(self) -> Any:
        assert self.program.programs is not None
        return self.program.programs.whole_mesh

    @property
    def _shared(self) -> bool:
        """True if all layers use some parameter."""
        return bool(self._whole_mesh.pipeline.sections.roles.shared)

    @cached_property
    def _names(self) -> list[str]:
        leaves = jax.tree_util.tree_leaves_with_path(self.program.state.params)
        return [name_of(path) for path, _ in leaves]


class _Arriving:
    """Parameters of one step; each run is placed once."""

    def __init__(self, *, staged: StagedGradients, params: Tree, landed: Landed) -> None:
        self._staged, self._landed = staged, landed
        names = trained(staged.program)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self._paths = {id(leaf): name_of(path) for path, leaf in leaves if name_of(path) in names}
        self._known = names
        self._needs = [staged.needs(stage) for stage in range(len(staged.dispatch.stages))]

    def has_arrived(self, stage: int) -> bool:
        return self._landed.there(self._needs[stage])

    def shard(self, array: jax.Array, stage: int) -> jax.Array | None:
        path = self._paths.get(id(array))
        if path is None:
            return None
        leaf, meshes = self._known[path], self._staged.dispatch.meshes
        elements = self._landed.run(path, stage if self._staged.runs[path] > 1 else 0)
        value = elements.reshape(meshes.shape(leaf)).astype(leaf.dtype)
        return jax.device_put(value, meshes.stage_sharding(leaf.sharding, stage))


# --------------------------------------------------------------------------------------------------
# State that islands carry from step to step.


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OuterState:
    """State that belongs to all islands, on the devices of each.

    Attributes:
        step: number of steps that every island has done, int32 of the host.
        params: trained parameters that all islands started this round from, float32.
        momentum: of the outer update, like `params`.
    """

    step: Any
    params: list[Any]
    momentum: list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class InFlightState(OuterState):
    """State that belongs to all islands, and outer gradients in flight between them.

    Attributes:
        sent: the outer gradients that every island sent last, one island after the other along the
            first dim, float32, for each trained parameter.
        sent_at: the step after which those were sent that have not arrived, int32 of the host; 0
            where nothing is on the way.
    """

    sent: list[Any]
    sent_at: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ResidualState:
    """Residuals of gradients that were not sent, and the state that compresses the next ones.

    Attributes:
        step: number of steps that every island has done, int32 of the host.
        residual: what every island did not send, one after the other along the first dim, float32,
            for each trained parameter.
        momentum: sums of gradients, like `residual`; empty where nothing is summed.
        factors: Q of each trained parameter, alike on all islands; a scalar for others than
            matrices; empty where there are none.
    """

    step: Any
    residual: list[Any]
    momentum: list[Any]
    factors: list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IslandsState:
    """A pytree with the state of every island, and what is outer; a step donates it.

    Attributes:
        islands: a state for each island.
        exchange: what belongs to all of them.
        trained: paths of the trained parameters, in the order of what is outer.
    """

    islands: tuple[TrainState, ...]
    exchange: OuterState | ResidualState
    trained: tuple[str, ...] = field(default=(), metadata={"static": True})

    @property
    def step(self) -> int:
        """Number of steps done."""
        return int(self.exchange.step)

    @property
    def keeps(self) -> bool:
        """True if parameters are outer."""
        return isinstance(self.exchange, OuterState) and bool(self.exchange.params)

    @property
    def guard(self) -> None:
        """There is no guard of all islands: each has its own."""

    def mapped(self, function: Callable[[TrainState], TrainState]) -> IslandsState:
        """The same with a function applied to the state of each island."""
        return replace(self, islands=tuple(map(function, self.islands)))

    def stored_form(self) -> StoredIslands:
        """The arrays over the devices of all islands, as a checkpoint has them."""
        return together(self)

    def of_stored_form(self, form: StoredIslands) -> IslandsState:
        """A state like this one of such arrays."""
        return apart(form, self)

    def is_stored_in(self, arrays: Mapping[str, Any]) -> bool:
        """Returns whether a checkpoint has as many islands, and outer parameters if these have."""
        step, exchange = arrays.get("islands.step"), self.exchange
        return (
            step is not None
            and step.shape[:1] == (len(self.islands),)
            and has_outer(arrays, "params") == self.keeps
            and has_outer(arrays, "residual") == isinstance(exchange, ResidualState)
            and has_outer(arrays, "sent") == isinstance(exchange, InFlightState)
        )


def has_outer(arrays: Iterable[str], name: str) -> bool:
    """Returns whether a checkpoint with arrays of these paths has a part of what is outer."""
    return any(path.startswith(f"outer.{name}.") for path in arrays)


def outer_of(state: IslandsState) -> OuterState:
    """Returns what is outer of a state."""
    if not isinstance(state.exchange, OuterState):
        raise StateError(
            "the state has residuals of compressed gradients, and the program meets\nTry:"
            " program.init(), or a checkpoint of this exchange"
        )
    return state.exchange


def require_arrived(outer: OuterState) -> None:
    """Refuses what is outer of islands that meet with a delay: what is on the way would be lost."""
    if isinstance(outer, InFlightState):
        raise StateError(
            "the state has what is on the way between islands, and the program meets without a"
            " delay\nTry: program.init(), or a checkpoint, which goes on as this exchange"
        )


class IslandMetrics(Mapping[str, np.ndarray]):
    """Metrics of a step: the mean over islands, taken when it is asked for, so that no number
    crosses and a step does not wait.

    Attributes:
        islands: the metrics of each island, arrays on its devices.
    """

    def __init__(self, islands: tuple[dict[str, Tree], ...]) -> None:
        self.islands = islands

    def __getitem__(self, name: str) -> np.ndarray:
        values = [np.asarray(metrics[name]) for metrics in self.islands]
        return np.asarray(np.mean(values, axis=0, dtype=np.float32))

    def __iter__(self) -> Iterator[str]:
        return iter(self.islands[0])

    def __len__(self) -> int:
        return len(self.islands[0])


# --------------------------------------------------------------------------------------------------
# Checks of islands before anything runs.


def require_islands(state: object, islands: int) -> None:
    """Refuses what is not a state of so many islands."""
    if not isinstance(state, IslandsState):
        raise StateError(
            f"the state is of type {type(state).__name__}, and not of islands\nTry: program.init()"
        )
    if len(state.islands) != islands:
        raise StateError(
            f"the state has {len(state.islands)} islands, and the program {islands}\nTry: the"
            " program that it was made by"
        )


# --------------------------------------------------------------------------------------------------
# The first state of islands: outer parameters, which are those of all, and random streams of their
# own.


def abstract_outer(
    mesh: Mesh, states: Sequence[NamedSharding], trained: Sequence[jax.ShapeDtypeStruct]
) -> OuterState:
    """Returns what is outer, abstract, with shardings: alike on all islands."""
    outer = [
        jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=NamedSharding(mesh, state.spec))
        for leaf, state in zip(trained, states if trained else (), strict=True)
    ]
    replicated = NamedSharding(mesh, PartitionSpec())
    step = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    return OuterState(step=step, params=outer, momentum=outer)


def first_outer(
    mesh: Mesh, states: Sequence[NamedSharding], trained: Sequence[Sequence[jax.Array]]
) -> OuterState:
    """Returns what is outer before the first step: the parameters that all islands start from,
    float32.
    """

    def wide(array: Any, state: NamedSharding) -> jax.Array:
        """A copy in a buffer of its own."""
        sharding = NamedSharding(array.sharding.mesh, state.spec)
        return jax.jit(lambda x: jnp.copy(x.astype(jnp.float32)), out_shardings=sharding)(array)

    params = [
        alike([wide(array, state) for array in arrays], mesh)
        for arrays, state in zip(zip(*trained, strict=True), states if trained else (), strict=True)
    ]
    return OuterState(step=np.int32(0), params=params, momentum=[zeros(array) for array in params])


def zeros(leaf: Tree) -> jax.Array:
    """An array of zeros."""
    return jax.jit(partial(jnp.zeros, leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()


def bytes_of(outer: OuterState | ResidualState) -> int:
    """Bytes of what is outer on a device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(outer)
    )


def with_own_streams(number: int, state: TrainState) -> TrainState:
    """A state whose model draws other random numbers than that of the first island."""
    if number == 0:
        return state

    def other(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        keys = jax.jit(_folded, static_argnums=1, out_shardings=leaf.sharding)
        return keys(leaf, number)

    return replace(state, model_state=jax.tree.map(other, state.model_state))


def _folded(keys: jax.Array, number: int) -> jax.Array:
    flat = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    return flat.reshape(keys.shape)


# --------------------------------------------------------------------------------------------------
# The program of several islands: their steps, and their outer steps.
#
# exchange = shardlib.islands.DiLoCo(islands=2, every=100)
# program = shardlib.compile(..., pin={"exchange": exchange})
# state, metrics = program.step(program.init(seed=0), batch) # meets after every 100th step


def mean_parameters(meeting: Meeting, thetas: list[jax.Array]) -> list[jax.Array]:
    """The mean of the parameters of all islands, sharded as optimizer state is and alike on all
    islands.
    """
    mesh = meeting.mesh
    specs = [sharding.spec for sharding in meeting.states]

    def mean(stacks_local: list[jax.Array]) -> list[jax.Array]:
        return [
            jax.lax.pmean(stack.astype(jnp.float32), ISLAND.name).reshape(
                stack.shape if parameter.leaf.ndim else ()
            )
            for parameter, stack in zip(meeting.about, stacks_local, strict=True)
        ]

    def function(thetas: list[jax.Array]) -> list[jax.Array]:
        return jax.shard_map(
            mean,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=[parameter.state.spec for parameter in meeting.about],
            check_vma=False,
        )([mesh_held(theta, to) for theta, to in zip(thetas, meeting.states, strict=True)])

    return jax.jit(function)(thetas)


@dataclass(frozen=True, kw_only=True, eq=False)
class IslandsProgram:
    """The programs of islands that train apart and meet.

    Attributes:
        plan: of all islands.
        exchange: how they meet.
        programs: of the islands, alike but for their devices.
        dims: the batch dim of each array of the batch, by path; a `Fold` for a key of the whole
            batch.
        retraced: traces the loss for the batch of all islands.
        verifier: see `Program`.
    """

    plan: Plan
    exchange: Several
    programs: tuple[Program, ...]
    dims: BatchDims
    retraced: Callable[[], LossJaxpr]
    verifier: Verifier | None = None

    @property
    def state(self) -> IslandsState:
        """Abstract training state, each leaf with its sharding."""
        return IslandsState(
            islands=tuple(program.state for program in self.programs),
            exchange=self._kept(),
            trained=self.trained,
        )

    @property
    def batch(self) -> IslandBatches:
        """Abstract batches, one for each island, each leaf with its sharding."""
        return IslandBatches(islands=tuple(program.batch for program in self.programs))

    @property
    def rows(self) -> Tree:
        """Abstract batch of all islands, each leaf sharded over the islands, and then as on one."""
        return of_all(self.programs[0].batch, self.dims, self.mesh)

    @cached_property
    def source(self) -> LossJaxpr:
        """The loss traced for the batch of all islands."""
        return self.retraced()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Returns what the plan has to say, and what lowering noticed."""
        return tuple(dict.fromkeys((*self.plan.findings, *self.programs[0].findings)))

    def init(self, seed: Seed = 0) -> IslandsState:
        """Makes the state before the first step: alike on all islands, but for random streams.

        Args:
            seed: see `Program.init`.

        Raises:
            ArgumentError: the seed is neither an integer from 0 to 2**31 - 1 nor a key.
        """
        return self.init_with(lambda program: program.init(seed))

    def init_with(self, first: Callable[[Program], TrainState]) -> IslandsState:
        """The state before the first step: models get random streams of their own.

        Args:
            first: makes the state of an island, the same for all.
        """
        states = map(first, self.programs)
        own_streams = tuple(with_own_streams(number, state) for number, state in enumerate(states))
        return IslandsState(
            islands=own_streams, exchange=self._first(own_streams), trained=self.trained
        )

    def step(self, state: IslandsState, batch: Tree) -> tuple[IslandsState, IslandMetrics]:
        """Runs one step on every island, and a meeting after every so many.

        Args:
            state: from `init` or the step before; its buffers are donated.
            batch: of all islands, host arrays, arrays sharded as `rows`, or what `put` gave.

        Returns:
            The next state, and metrics: means over islands.

        Raises:
            StateError: the state is not one of islands, or was donated.
            BatchError: the batch is not the one that the program was compiled for.
        """
        self._require(state)
        parts = batch.islands if isinstance(batch, IslandBatches) else self._parts(batch)
        done = [
            program.step(island_state, rows)
            for program, island_state, rows in zip(self.programs, state.islands, parts, strict=True)
        ]
        count = np.int32(int(state.exchange.step) + 1)
        after = replace(
            state,
            islands=tuple(island_state for island_state, _ in done),
            exchange=replace(state.exchange, step=count),
        )
        metrics = IslandMetrics(tuple(metrics for _, metrics in done))
        return self._between(after, int(count)), metrics

    def meet(self, state: IslandsState, meeting: int = 0) -> IslandsState:
        """Runs a meeting now; `step` does so when it is due.

        Args:
            state: of this program; its parameters and what is outer are donated.
            meeting: which, where there are several: 0 to `exchange.meetings` - 1.
        """
        require_islands(state, len(self.programs))
        synchronisation, outer = self.meetings[meeting], outer_of(state)
        trained = [self._trained(island) for island in state.islands]
        places = [island.place for island in synchronisation.about]
        outer_places = places if self.exchange.keeps else []
        together, params, momentum = synchronisation(
            [stacked([arrays[place] for arrays in trained], self.mesh) for place in places],
            [outer.params[place] for place in outer_places],
            [outer.momentum[place] for place in outer_places],
        )
        like = [jax.tree.leaves(self._partition(p.state.params)) for p in self.programs]
        for place, array in zip(places, together, strict=True):
            split = unstacked(array, [leaves[place] for leaves in like])
            for arrays, array_of_island in zip(trained, split, strict=True):
                arrays[place] = array_of_island
        exchange = replace(
            outer,
            params=replaced(outer.params, outer_places, params),
            momentum=replaced(outer.momentum, outer_places, momentum),
        )
        islands = tuple(map(self._with_trained, state.islands, trained))
        return replace(state, islands=islands, exchange=exchange)

    def put(self, batch: Tree) -> IslandBatches:
        """Places the rows of every island on its devices.

        Args:
            batch: of all islands.

        Raises:
            BatchError: it is not the one that the program was compiled for.
        """
        parts = zip(self.programs, self._parts(batch), strict=True)
        return IslandBatches(islands=tuple(program.put(rows) for program, rows in parts))

    @property
    def loss_program(self) -> Program:
        """The program of the first island."""
        return self.programs[0]

    @property
    def metrics(self) -> None:
        """Nothing is said of them beforehand: "loss" is among them."""

    def learned(self, state: IslandsState) -> TrainState:
        """The state of the first island with the outer parameters, see `outer`.

        Args:
            state: of this program; it stays usable.
        """
        return self.outer(state)

    def evaluation(self, loss: UserLoss | None = None, *, batch_axes: Tree = None) -> Evaluation:
        """An evaluation on the first island, of what `learned` gives; see `Program.evaluation`.

        Args:
            loss, batch_axes: see `Program.evaluation`.
        """
        return self.programs[0].evaluation(loss, batch_axes=batch_axes)

    def anew(self, state: IslandsState) -> IslandsState:
        """A state with the optimizers as before the first step, see `Program.anew`.

        Args:
            state: of this program.
        """
        pairs = zip(self.programs, state.islands, strict=True)
        return replace(state, islands=tuple(program.anew(island) for program, island in pairs))

    def evaluate(self, state: IslandsState, batch: Tree) -> dict[str, jax.Array]:
        """The metrics of rows with the outer parameters, on one island; see `Program.evaluate`.

        Args:
            state: of this program; it stays usable.
            batch: the rows.
        """
        return self.programs[0].evaluate(self.outer(state), batch)

    def module(self, state: IslandsState) -> UserModule:
        """The user's own model with the outer parameters, on the first island.

        Args:
            state: of this program; it stays usable.
        """
        return self.programs[0].module(self.outer(state))

    def outer(self, state: IslandsState) -> TrainState:
        """The state of the first island with the outer parameters: those of the last meeting; where
        nothing is outer, with the mean of the islands' parameters.

        Args:
            state: of this program; it stays usable.
        """
        require_islands(state, len(self.programs))
        require_not_donated(
            "outer", ([island.inference for island in state.islands], outer_of(state).params)
        )
        like = jax.tree.leaves(self._partition(self.programs[0].state.params))
        outer = outer_of(state).params if self.exchange.keeps else self._means(state)
        params = [
            jax.device_put(local(array, spec).astype(leaf.dtype), leaf.sharding)
            for array, leaf, spec in zip(outer, like, self._states, strict=True)
        ]
        return self._with_trained(state.islands[0], params)

    def prepare(self) -> None:
        """Compiles all that steps and meetings run, if that has not been done."""
        for program in self.programs:
            program.prepare()
        for meeting in self.meetings:
            meeting.prepare()

    def compiled(self) -> jax.stages.Compiled:
        """The compiled step of the first island."""
        return self.programs[0].compiled()

    def verify(self, *, limits: Any = None, options: Options | None = None) -> Any:
        """The step of an island and the meetings of all against the plan, see `Program.verify`.

        Args:
            limits, options: see `Program.verify`.
        """
        return verified_by(self.verifier, self, limits, options)

    def timeline(self) -> str:
        """The schedule of the pipeline of an island, see `Program.timeline`."""
        return self.programs[0].timeline()

    def memory(self) -> dict[str, int]:
        """Bytes per device of an island's compiled step, and "exchange", of what is outer."""
        by_part, outer_bytes = self.programs[0].memory(), bytes_of(self.state.exchange)
        return {**by_part, "exchange": outer_bytes, "peak": by_part["peak"] + outer_bytes}

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Paths of the trained parameters."""
        leaves = jax.tree_util.tree_leaves_with_path(self._partition(self.programs[0].state.params))
        return tuple(path_text(path) for path, _ in leaves)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of all islands."""
        return mesh_of_all([p.mesh for p in self.programs if isinstance(p.mesh, Mesh)])

    @cached_property
    def meetings(self) -> tuple[Meeting, ...]:
        """The meetings of the islands that differ: about a fragment each, or at a distance."""
        return meetings_of(self._meets, self.programs[0], self.mesh)

    @property
    def _meets(self) -> Meets:
        """Returns how islands that train apart meet."""
        assert not isinstance(self.exchange, Compressed)
        return self.exchange

    def _require(self, state: IslandsState) -> None:
        """Refuses a state of another exchange, before a step takes it over."""
        require_islands(state, len(self.programs))
        require_arrived(outer_of(state))

    def _between(self, state: IslandsState, step: int) -> IslandsState:
        """The state after what islands do between a step and the next."""
        due = self._meets.due(step)
        return state if due is None else self.meet(state, due)

    def _kept(self) -> Any:
        """Abstract: what is outer."""
        trained = jax.tree.leaves(self._partition(self.programs[0].state.params))
        return abstract_outer(self.mesh, self._states, trained if self.exchange.keeps else [])

    def _first(self, states: tuple[TrainState, ...]) -> Any:
        """Returns what is outer before the first step."""
        trained = [self._trained(state) for state in states] if self.exchange.keeps else []
        return first_outer(self.mesh, self._states, trained)

    @property
    def _states(self) -> list[NamedSharding]:
        """Shardings of optimizer state on the first island."""
        return jax.tree.leaves(self.programs[0].parts.param_shardings.state)

    def _means(self, state: IslandsState) -> list[jax.Array]:
        """The mean of the islands' parameters, alike on all."""
        trained = zip(*map(self._trained, state.islands), strict=True)
        return mean_parameters(self.meetings[0], [stacked(leaves, self.mesh) for leaves in trained])

    def _parts(self, batch: Tree) -> tuple[Tree, ...]:
        require_batch(batch, self.rows)
        folded = any(isinstance(dim, KeyFold) for dim in self.dims.values())
        placed = () if folded else placed_parts(batch, self.rows, self.batch)
        return placed or parts(batch, self.dims, len(self.programs))

    def _partition(self, params: Tree) -> Tree:
        return self.programs[0].model.partition.trained(params)

    def _trained(self, state: TrainState) -> list[jax.Array]:
        return jax.tree.leaves(self._partition(state.params))

    def _with_trained(self, state: TrainState, arrays: list[jax.Array]) -> TrainState:
        partition = self.programs[0].model.partition
        structure = jax.tree.structure(partition.trained(state.params))
        params = partition.joined(jax.tree.unflatten(structure, arrays), state.params)
        return replace(state, params=params)


# --------------------------------------------------------------------------------------------------
# The state of islands as named arrays over the devices of all: what a checkpoint has of it. No
# byte of an array is copied, and every device holds what it held.
#
#     islands.params.up    trained parameters of all islands, stacked; likewise all else of a state
#     frozen.table         parameters that no step changes, once
#     outer.params.up      what belongs to all islands, by the paths of trained parameters


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StoredIslands:
    """The state of islands, each array over the devices of all.

    Attributes:
        islands: states of the islands, each array stacked; of the parameters the trained ones, by
            path.
        frozen: parameters that are not trained, by path.
        outer: what belongs to all islands: by the name of the field, and there by the path of the
            parameter.
    """

    islands: TrainState
    frozen: dict[str, Tree]
    outer: dict[str, Tree]


def together(state: IslandsState) -> StoredIslands:
    """The state of islands as arrays over the devices of all."""
    mesh = mesh_of_islands(state)
    split = [_split(island.params, state.trained) for island in state.islands]
    states = [
        replace(island, params=trained)
        for island, (trained, _) in zip(state.islands, split, strict=True)
    ]
    return StoredIslands(
        islands=jax.tree.map(lambda *leaves: _stacked(leaves, mesh), *states),
        frozen=jax.tree.map(lambda *leaves: _alike(leaves, mesh), *(island for _, island in split)),
        outer={
            field.name: _over_all(_by_path(getattr(state.exchange, field.name), state), mesh)
            for field in fields(state.exchange)
        },
    )


def apart(stored: StoredIslands, like: IslandsState) -> IslandsState:
    """The state of islands out of arrays over the devices of all."""
    count = len(like.islands)
    trained, frozen = zip(
        *(_split(island.params, like.trained) for island in like.islands), strict=True
    )
    trained_states = [
        replace(island, params=params) for island, params in zip(like.islands, trained, strict=True)
    ]
    leaves, structure = jax.tree.flatten(stored.islands)
    split = [
        unstacked(leaf, ones)
        for leaf, ones in zip(
            leaves, zip(*map(jax.tree.leaves, trained_states), strict=True), strict=True
        )
    ]
    islands: list[TrainState] = []
    for number in range(count):
        island_state = structure.unflatten([arrays[number] for arrays in split])
        fixed = {
            path: local(array, frozen[number][path].sharding)
            for path, array in stored.frozen.items()
        }
        islands.append(
            replace(
                island_state,
                params=_joined(like.islands[number].params, island_state.params, fixed),
            )
        )
    return replace(like, islands=tuple(islands), exchange=_outer(stored.outer, like))


def on_all(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An abstract array of one island as one that is the same on all."""
    sharding: Any = leaf.sharding
    moved = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=moved)


def mesh_of_islands(state: IslandsState) -> Mesh:
    """The mesh of all islands of a state."""
    return mesh_of_all([island.step.sharding.mesh for island in state.islands])


def _split(params: Tree, trained: Sequence[str]) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Trained parameters and the others, by path."""
    names = set(trained)
    leaves = {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    return (
        {path: leaf for path, leaf in leaves.items() if path in names},
        {path: leaf for path, leaf in leaves.items() if path not in names},
    )


def _joined(like: Tree, trained: dict[str, Tree], frozen: dict[str, Tree]) -> Tree:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: trained[name] if (name := path_text(path)) in trained else frozen[name],
        like,
    )


def _by_path(value: Tree, state: IslandsState) -> Tree:
    """A list with an array for each trained parameter as a dict by path; others as they are."""
    if isinstance(value, list) and len(value) == len(state.trained):
        return dict(zip(state.trained, value, strict=True))
    return value


def _outer(stored: dict[str, Tree], like: IslandsState) -> Any:
    """Returns what is outer, as the program holds it: numbers on the host, and lists."""
    outer: dict[str, Tree] = {}
    for name, value in stored.items():
        expected = getattr(like.exchange, name)
        if isinstance(expected, list) and isinstance(value, dict):
            outer[name] = [value[path] for path in like.trained]
        else:
            outer[name] = np.asarray(value)[()] if np.ndim(value) == 0 else value
    return replace(like.exchange, **outer)


def _stacked(leaves: Sequence[Any], mesh: Mesh) -> Any:
    """One array of all islands, abstract where its parts are."""
    if _is_abstract(leaves[0]):
        spec, kind = stacked_sharding(leaves[0].sharding, mesh).spec, leaves[0].sharding.memory_kind
        return jax.ShapeDtypeStruct(
            stacked_shape(leaves[0].shape, len(leaves)),
            leaves[0].dtype,
            sharding=NamedSharding(mesh, spec, memory_kind=kind),
        )
    return stacked(leaves, mesh)


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _alike(leaves: Sequence[Any], mesh: Mesh) -> Any:
    """One array that is the same on all islands, abstract where its parts are."""
    return on_all(leaves[0], mesh) if _is_abstract(leaves[0]) else alike(leaves, mesh)


def _over_all(value: Tree, mesh: Mesh) -> Tree:
    """Returns what is outer with numbers of the host on the devices of all islands."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def put(leaf: Any) -> Any:
        on_devices = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
        return leaf if on_devices else jax.device_put(leaf, replicated)

    return jax.tree.map(put, value)


# --------------------------------------------------------------------------------------------------
# The trained parameters of a program in the order in which its loss uses them.


def parts_in_order(program: Program) -> tuple[Part, ...]:
    """All elements of trained parameters, those that are used first in front."""
    shapes = {path: tuple(leaf.shape) for path, leaf in trained(program).items()}
    return in_order(_uses(program, shapes), shapes)


def _uses(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> tuple[FirstUse, ...]:
    """Of every parameter; without a trace, in the order of paths."""
    if program.source is None:
        return tuple(FirstUse.unknown(path, number) for number, path in enumerate(sorted(shapes)))
    leaves = jax.tree_util.tree_leaves_with_path(program.state.params)
    flat = program.source.program
    names = [(name_of(path), "parameter") for path, _ in leaves]
    names += [("", "batch")] * (len(flat.inputs) - len(names))
    return first_uses(graph_from_program(flat, names))
