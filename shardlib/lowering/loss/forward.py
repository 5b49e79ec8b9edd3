"""How does the user's loss become a loss with the plan's layouts in it?

The loss is traced once for the shapes of one microbatch, under the plan's mesh, so that annotations
of the user's own keep their meaning; then it is evaluated again with a constraint on every value
that the plan places. The gradient of a parameter is laid out for the optimizer where it is made: of
a stacked one inside the scan, layer by layer.

Parameters that rest in pieces (ZeRO 3) are gathered by the operations that use them, and again in
the backward pass, see `lowering/weights/gradients.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib._jax_compat import in_mesh, scan_counts
from shardlib.annotation.activations import no_mesh
from shardlib.annotation.model import PureLoss
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.axes import MESH_AXES
from shardlib.errors import LayoutError, ShardlibError, TracingError
from shardlib.layout import Layout
from shardlib.lowering.collective_matmul.groups import loops
from shardlib.lowering.collective_matmul.matmuls import Matmul, matmuls
from shardlib.lowering.loss.remat import apart
from shardlib.lowering.loss.substitutes import substitute
from shardlib.lowering.mesh.collectives import machine_of
from shardlib.lowering.mesh.device_mesh import logical_mesh, on_mesh, parts_of
from shardlib.lowering.mesh.eight_bit import is_eight_bit
from shardlib.lowering.mesh.precision import Precision, is_real
from shardlib.lowering.mesh.shardings import (
    ParameterShardings,
    batch_path,
    named_sharding,
    returning,
)
from shardlib.lowering.reading.contractions import AsWritten, Pins, pinned
from shardlib.lowering.reading.custom_calls import Site, sites
from shardlib.lowering.reading.fused_dims import AS_WRITTEN, Interleaving, Orders, dealt, taken
from shardlib.lowering.reading.parameter_uses import Use, as_dtype, weight_uses
from shardlib.lowering.weights.gradients import reduced
from shardlib.planning.decisions.plan_data import ParameterLayout
from shardlib.planning.plan import Plan
from shardlib.report import Finding
from shardlib.tracing.program import (
    CUSTOM,
    REMAT,
    Equation,
    Program,
    callee,
    flatten,
    has_matmul,
    with_frozen,
)
from shardlib.tracing.rewriting.interpreter import Together, Walk, as_array, bind, evaluate_program

#: Operations at computed positions. In a region where some axes are manual, XLA's partitioner
#: aborts the process on those of arrays that two automatic axes cut (seen on CPU with JAX 0.12:
#: "Check failed" in spmd_partitioner_util.cc); there, they and their gradients work on whole
#: arrays.
INDEXED: frozenset[str] = frozenset({"gather", "scatter", "scatter-add"})

#: (path of an equation, index of its result) -> layout.
Placements = Mapping[tuple[str, int], Layout]


@dataclass(frozen=True, kw_only=True)
class LossJaxpr:
    """A loss as a jaxpr.

    Attributes:
        closed_jaxpr: over the leaves of (params, state, batch).
        out_tree: structure of (loss, (metrics, state)).
    """

    closed_jaxpr: Any
    out_tree: Any


def trace_loss(
    loss: PureLoss,
    params: Tree,
    state: Tree,
    batch: Tree,
    mesh: Mesh | AbstractMesh | None,
    *,
    what: str = "one microbatch,",
) -> LossJaxpr:
    """Traces a loss under a mesh, or under none; `what` says of what, for errors.

    Raises:
        TracingError: the loss does not trace for these shapes under this mesh.
    """
    try:
        with no_mesh() if mesh is None else in_mesh(logical_mesh(mesh)):
            closed_jaxpr, shapes = jax.make_jaxpr(loss, return_shape=True)(params, state, batch)
    except ShardlibError:
        raise
    except Exception as error:
        arrays = ", ".join(
            f"{batch_path(path)} {leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        )
        raise TracingError(
            f"the loss does not trace for {what} {arrays}, under the plan's mesh:"
            f" {type(error).__name__}: {error}"
        ) from error
    return LossJaxpr(closed_jaxpr=closed_jaxpr, out_tree=jax.tree.structure(shapes))


def placed_loss(
    traced: LossJaxpr, placing: Placing, change: Callable[[Walk], Walk] = lambda walk: walk
) -> PureLoss:
    """The traced loss with the plan's layouts and rematerialisation, as a function of parameters at
    rest; `change` has the last word on the walk.
    """
    plan, program = (
        placing.plan,
        with_frozen(
            flatten(traced.closed_jaxpr),
            [k for k, i in enumerate(placing.order) if not placing.plan.parameters[i].trained],
        ),
    )
    policies = apart(plan, program, [plan.parameters[i].path for i in placing.order])
    walk = change(
        replace(
            placing.walk(), remat=plan.remat, apart=policies, hosted="activations" in plan.offload
        )
    )

    def loss(params: Tree, state: Tree, batch: Tree) -> Any:
        arguments = [*placing.start(jax.tree.leaves(params)), *jax.tree.leaves((state, batch))]
        results = zip(program.outputs, evaluate_program(program, arguments, walk), strict=True)
        return jax.tree.unflatten(
            traced.out_tree, [as_array(program, number, leaf) for number, leaf in results]
        )

    return loss


@dataclass(frozen=True, kw_only=True, eq=False)
class Placing:
    """How the values of a traced loss are laid out.

    Attributes:
        plan: the decisions.
        mesh: the mesh of the program.
        placements: layouts of activations.
        compute, gradient: shardings of each parameter in use, and of its gradient.
        order: position of each parameter's layout in the plan.
        slices: path of a slice of a scan -> the stacked parameter that it is one layer of.
        uses: operations that use parameters.
        kernels: shapes of the kernels of convolutions.
        tables: parameters that are read by lookups alone.
        sites: calls of marked functions, by path.
        dtypes: traced dtype of each parameter.
        matmuls: matmuls of weights that loops over the tensor axis may take the place of; none
            where the plan has no such loops.
        interleaving: what the loss does otherwise where fused dims are interleaved.
    """

    plan: Plan
    mesh: Mesh | AbstractMesh
    placements: Placements
    compute: Sequence[NamedSharding]
    gradient: Sequence[NamedSharding]
    order: Sequence[int]
    slices: Mapping[str, int]
    uses: Mapping[str, Use]
    kernels: frozenset[tuple[int, ...]]
    tables: frozenset[int]
    sites: Mapping[str, Site]
    dtypes: Sequence[Any]
    matmuls: tuple[Matmul, ...] = ()
    interleaving: Interleaving = AS_WRITTEN

    @staticmethod
    def of(
        traced: LossJaxpr,
        plan: Plan,
        mesh: Mesh | AbstractMesh,
        params: ParameterShardings,
        placements: Placements,
        interleaving: Interleaving | None = None,
    ) -> Placing:
        """Reads a traced loss."""
        program = flatten(traced.closed_jaxpr)
        gradient, compute = jax.tree.leaves(params.gradient), jax.tree.leaves(params.compute)
        return Placing(
            plan=plan,
            mesh=mesh,
            placements=placements,
            compute=compute,
            gradient=gradient,
            order=parameter_order(plan, params.compute),
            slices=stacked_parameters(program, len(gradient)),
            uses=_in_dtypes(weight_uses(program, len(gradient)), Precision.of(plan)),
            kernels=convolved(traced.closed_jaxpr.jaxpr),
            tables=looked_up(program, len(gradient)),
            sites=sites(program, len(gradient)),
            matmuls=matmuls(program, len(gradient)) if plan.collective_matmul == "loop" else (),
            dtypes=[program.avals[number].dtype for number in program.inputs[: len(gradient)]],
            interleaving=interleaving or AS_WRITTEN,
        )

    def start(self, leaves: Sequence[Any]) -> list[Any]:
        """The parameters as the loss takes them; those with a slice a layer as they rest."""
        return [self.enter(i, leaf) for i, leaf in enumerate(leaves)]

    def enter(self, parameter: int, leaf: Any) -> Any:
        """One parameter as the loss takes it."""
        if parameter in self.slices.values():
            return leaf
        kernels, tables = self._whole(self._at_rest)
        # Rows looked up in a table that is cut along both dims make XLA replicate the result: the
        # table is gathered first.
        whole = parameter in tables or leaf.shape in kernels
        used = self._used(parameter, leaf, whole, self.compute[parameter], self.gradient[parameter])
        return self._taken(
            parameter, used, self.interleaving.parameters.get(parameter, {}), whole, self.mesh
        )

    def _taken(
        self, parameter: int, value: Any, orders: Orders, whole: bool, mesh: Mesh | AbstractMesh
    ) -> Any:
        """A parameter, or a layer of it, with its fused dims interleaved."""
        if not orders:
            return value
        layouts = self._parameter(parameter, mesh)

        def shardings(layout: Layout) -> tuple[NamedSharding, NamedSharding]:
            after = Layout(*tuple(layout)[len(layout) - value.ndim :])
            return named_sharding(mesh, after), named_sharding(
                mesh, dealt(after, orders, value.shape, self.plan.mesh)
            )

        return taken(
            value,
            orders,
            self.interleaving.ways,
            shardings(layouts.compute if whole else layouts.rest),
            shardings(layouts.gradient),
        )

    def _used(
        self, parameter: int, leaf: Any, whole: bool, use: NamedSharding, back: NamedSharding
    ) -> Any:
        """A parameter, or a layer of it, in the traced dtype; moved in the narrower of that and the
        one at rest.
        """
        dtype = self.dtypes[parameter]
        moved = as_dtype(leaf, dtype) if dtype.itemsize < leaf.dtype.itemsize else leaf
        return as_dtype(laid_out(moved, whole, use, back), dtype)

    @cached_property
    def _at_rest(self) -> Mapping[str, Callable[..., Any]]:
        """What runs in place of operations outside of manual regions."""
        return self._functions(self.mesh)

    def walk(self, mesh: Mesh | AbstractMesh | None = None, *, loose: bool = False) -> Walk:
        """A walk that lays out every value that the plan places.

        Args:
            mesh: the mesh around the walk; inside of a manual region, that of the region, whose
                manual axes cut nothing there.
            loose: leave dims that the plan does not cut to the compiler, and every gradient.
        """
        mesh = self.mesh if mesh is None else mesh
        manual = manual_axes(mesh)
        functions = {} if loose else self._functions(mesh)
        kernels = self._whole(functions)[0]
        narrow = {path for path, use in self.uses.items() if use.product is not None}

        def place(path: str, index: int, value: Any) -> Any:
            if path in self.slices:
                i = self.slices[path]
                used = self._used(
                    i,
                    value,
                    value.shape in kernels,
                    within(mesh, one_layer(self.compute[i])),
                    within(mesh, one_layer(self.gradient[i])),
                )
                return self._taken(
                    i, used, self.interleaving.slices.get(path, {}), value.shape in kernels, mesh
                )
            layout = self.placements.get((path, index))
            return (
                value
                if layout is None
                else constrained(value, layout, self.plan, mesh, path, loose=loose)
            )

        def run(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
            asked = equation.params.get("sharding")
            if (
                equation.name == "sharding_constraint"
                and isinstance(asked, NamedSharding)
                and (manual or len(self.mesh.axis_names) > len(MESH_AXES))
            ):
                return [
                    jax.lax.with_sharding_constraint(
                        operands[0], within(mesh, on_mesh(mesh, asked))
                    )
                ]
            if (
                manual and isinstance(asked, NamedSharding)
                # of the mesh that was traced under, where all axes were automatic: it asks for nothing
            ):
                return bind(equation, operands, sharding=None)
            if manual and equation.name in INDEXED:
                return [
                    whole(result, mesh)
                    for result in bind(equation, [whole(operand, mesh) for operand in operands])
                ]
            if equation.path in functions:
                return [functions[equation.path](*operands)]
            if equation.name in CUSTOM and has_matmul(equation.eqn):
                return bind(
                    equation,
                    [
                        (
                            value
                            if (layout := self.placements.get((f"{equation.path}/operand", at)))
                            is None
                            else constrained(value, layout, self.plan, mesh, equation.path)
                        )
                        for at, value in enumerate(operands)
                    ],
                )
            use, pins = (
                self.uses[equation.path] if equation.path in narrow else None,
                Pins.of(equation, self.placements, mesh),
            )
            if pins is None:
                return None if use is None else [use.run(operands)]
            return [
                (
                    pinned(AsWritten(equation=equation), pins, operands)
                    if use is None
                    else pinned(use, pins, use.narrowed(operands))
                )
            ]

        return self.interleaving.around(
            Walk(
                place=place,
                run=run,
                calls=self._calls(mesh),
                together={} if manual else self.together(mesh),
            )
        )

    def together(self, mesh: Mesh | AbstractMesh) -> dict[str, Together]:
        """The matmuls that run in loops over the tensor axis, by path."""
        return loops(
            self.matmuls,
            lambda one: self._parameter(one.use.view.parameter, mesh),
            self.placements,
            machine_of(self.plan, mesh),
        )

    def parameter(self, use: Use, mesh: Mesh | AbstractMesh) -> ParameterLayout:
        """Layouts of the parameter that an operation uses, in a region where some axes of the mesh
        are manual: there, they cut nothing.
        """
        return self._parameter(use.view.parameter, mesh)

    def with_pins(self, use: Use, mesh: Mesh | AbstractMesh) -> Use:
        """The use of a parameter in the layouts that the plan has for the operation."""
        return replace(use, pins=Pins.of(use.equation, self.placements, mesh))

    def _parameter(self, number: int, mesh: Mesh | AbstractMesh) -> ParameterLayout:
        manual = manual_axes(mesh)
        gone = {
            axis for axis in self.plan.mesh if manual and set(parts_of(mesh, (axis,))) <= manual
        }
        found = self.plan.parameters[self.order[number]]

        def left(layout: Layout) -> Layout:
            return Layout(*(tuple(axis for axis in dim if axis not in gone) for dim in layout))

        return replace(
            found,
            compute=left(found.compute),
            rest=left(found.rest),
            gradient=left(found.gradient),
            state=left(found.state),
        )

    def _calls(self, mesh: Mesh | AbstractMesh) -> dict[str, Callable[..., Sequence[Any]]]:
        """What runs in place of calls of marked functions, by path."""
        machine = machine_of(self.plan, mesh)
        found = {
            path: substitute(
                site,
                self.plan,
                [
                    None if view is None else self._parameter(view.parameter, mesh)
                    for view in site.views
                ],
                self.placements,
                machine,
            )
            for path, site in self.sites.items()
        }
        return {path: function for path, function in found.items() if function is not None}

    def _whole(
        self, functions: Mapping[str, Any]
    ) -> tuple[frozenset[tuple[int, ...]], frozenset[int]]:
        """What is gathered at once: shapes of kernels, and tables, without those that some function
        gathers.
        """
        return self.kernels - {self.uses[path].shape for path in functions}, self.tables - {
            self.uses[path].view.parameter for path in functions
        }

    def _functions(self, mesh: Mesh | AbstractMesh) -> dict[str, Callable[..., Any]]:
        """What runs instead of the operations that use parameters, by path.

        Nothing among simulated devices of one process, unless gradients have a dtype of their own
        on the wire: they share a memory, where all that counts is the number of collectives, and
        XLA's CPU compiler combines all-reduces and no reduce-scatters.
        """
        if Precision.of(self.plan).wire is None and all(
            link.kind == "memory" for _, links in self.plan.placement for link in links
        ):
            return {}
        machine = machine_of(self.plan, mesh)
        found = {
            path: reduced(
                self.with_pins(use, mesh),
                self.placements[path, 0],
                self.parameter(use, mesh),
                machine,
            )
            for path, use in self.uses.items()
            if (path, 0) in self.placements
        }
        return {path: function for path, function in found.items() if function is not None}


def _in_dtypes(uses: Mapping[str, Use], precision: Precision) -> Mapping[str, Use]:
    """Uses of parameters in the dtypes of a plan: its products are those of real numbers in loops
    over layers.
    """

    def product(use: Use) -> Any:
        widest = (
            2 if is_eight_bit(precision.products) else 8
        )  # products in 8 bits are those that run in 16, and not the router
        real = all(
            is_real(variable.aval) and variable.aval.dtype.itemsize <= widest
            for variable in use.equation.eqn.invars
        )
        return (
            precision.products
            if use.equation.name == "dot_general" and "/body/" in use.equation.path and real
            else None
        )

    return {
        path: replace(use, product=product(use), rests=precision.rest) for path, use in uses.items()
    }


def laid_out(value: Any, whole: bool, use: NamedSharding, back: NamedSharding) -> Any:
    """A parameter whose gradient comes back laid out for the optimizer; gathered at once where it
    is needed whole.
    """
    same = returning(back)(value)
    return jax.lax.with_sharding_constraint(same, use) if whole else same


def parameter_order(plan: Plan, params: Tree) -> list[int]:
    """For every leaf of the params the position of its layout in the plan."""
    position = {parameter.path: i for i, parameter in enumerate(plan.parameters)}
    return [position[path_text(path)] for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def constrained(
    value: Any,
    layout: Layout,
    plan: Plan,
    mesh: Mesh | AbstractMesh,
    path: str,
    *,
    loose: bool = False,
) -> Any:
    """A value pinned to a layout; loosely, only along the dims that it cuts.

    Raises:
        LayoutError: the layout does not fit the value.
    """
    try:
        layout.local_shape(value.shape, plan.mesh)
    except LayoutError as error:
        raise LayoutError(
            f"the plan places {layout} on the value at equation {path}: {error}"
        ) from error
    sharding = named_sharding(mesh, layout)
    if loose:
        sharding = NamedSharding(
            mesh,
            PartitionSpec(
                *(PartitionSpec.UNCONSTRAINED if dim is None else dim for dim in sharding.spec)
            ),
        )
    return jax.lax.with_sharding_constraint(value, sharding)


def manual_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """The axes that are manual in the region around."""
    return frozenset(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Manual
    )


def whole(value: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A value that the automatic axes of a region do not cut."""
    return (
        jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec()))
        if jnp.ndim(value)
        else value
    )


def within(mesh: Mesh | AbstractMesh, sharding: NamedSharding) -> NamedSharding:
    """A sharding in a region where some axes of the mesh are manual: there, they cut nothing."""
    manual = manual_axes(mesh)
    if not manual:
        return sharding

    def left(dim: Any) -> Any:
        return (
            dim
            if dim is None or dim is PartitionSpec.UNCONSTRAINED
            else tuple(
                axis for axis in ((dim,) if isinstance(dim, str) else dim) if axis not in manual
            )
            or None
        )

    return NamedSharding(mesh, PartitionSpec(*map(left, sharding.spec)))


def one_layer(stacked: NamedSharding) -> NamedSharding:
    """The sharding of one slice along the leading dim."""
    return NamedSharding(stacked.mesh, PartitionSpec(*stacked.spec[1:]))


def looked_up(program: Program, parameters: int) -> frozenset[int]:
    """Which parameters are tables, read by lookups and nothing else? Their gathered form is not
    needed for the backward pass.
    """
    tables: set[int] = set()
    others: set[int] = set(program.outputs)
    for equation in program.equations:
        lookup = equation.name == "gather"
        tables.update(equation.inputs[:1] if lookup else ())
        others.update(equation.inputs[1:] if lookup else equation.inputs)
    return frozenset(
        i for i, number in enumerate(program.inputs[:parameters]) if number in tables - others
    )


def convolved(jaxpr: Any) -> frozenset[tuple[int, ...]]:
    """Shapes of the kernels of all convolutions of a program.

    A kernel that rests in pieces is gathered, and its gradient reduced, in the layout of use: where
    the gradient of a kernel is cut over tensor and fsdp while the batch is cut over a third axis,
    XLA's partitioner gives wrong numbers (seen on CPU with JAX 0.10.2).
    """
    found: set[tuple[int, ...]] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            found.add(tuple(eqn.invars[1].aval.shape))
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found |= convolved(inner)
    return frozenset(found)


def stacked_parameters(program: Program, parameters: int) -> dict[str, int]:
    """Which slices of which scans are layers of a stacked parameter?

    Args:
        program: the loss; its first inputs are the parameters.
        parameters: how many inputs are parameters.

    Returns:
        Path under which a slice reaches `place` -> index of the parameter; only for parameters that
        nothing else reads.
    """
    found: dict[str, int] = {}
    reads: Counter[int] = Counter()
    _find_slices(
        program, {number: i for i, number in enumerate(program.inputs[:parameters])}, found, reads
    )
    return {path: parameter for path, parameter in found.items() if reads[parameter] == 1}


def _find_slices(
    program: Program, known: Mapping[int, int], found: dict[str, int], reads: Counter[int]
) -> None:
    for equation in program.equations:
        inner: dict[int, int] = {}
        if equation.name in REMAT:
            inner = {
                at: known[number] for at, number in enumerate(equation.inputs) if number in known
            }
            body = flatten(callee(equation.eqn), f"{equation.path}/", equation.scope)
            _find_slices(
                body, {body.inputs[at]: parameter for at, parameter in inner.items()}, found, reads
            )
            continue
        reads.update(known[number] for number in equation.inputs if number in known)
        if equation.name == "scan":
            first = sum(scan_counts(equation.params))
            found.update(
                {
                    f"{equation.path}/enter/{k}": known[number]
                    for k, number in enumerate(equation.inputs[first:])
                    if number in known
                }
            )
    reads.update(known[number] for number in program.outputs if number in known)


def same_program(one: Any, other: Any) -> bool:
    """Whether two traces have the same equations in the same places, whatever their shapes."""
    return [(e.path, e.name) for e in flatten(one).equations] == [
        (e.path, e.name) for e in flatten(other).equations
    ]


def unused_loops(
    traced: LossJaxpr,
    plan: Plan,
    mesh: Mesh | AbstractMesh,
    params: ParameterShardings,
    placements: Placements,
) -> tuple[Finding, ...]:
    """What the user should know when a plan has loops over the tensor axis, and the program
    none.
    """
    if plan.collective_matmul != "loop" or (
        plan.mesh["stage"] == 1
        and Placing.of(traced, plan, mesh, params, placements).together(mesh)
    ):
        return ()
    return (
        Finding(
            code="collective-matmul-unused",
            severity="warning",
            where="program",
            message=(
                "collective_matmul='loop' changes nothing: the program has no matmul of a weight"
                " that gathers or scatters the sequence over tensor, or it has stages"
            ),
            hint="a mesh with tensor and without stages, and sequence_parallel=True",
        ),
    )


def lost_placements(count: int) -> Finding:
    """What the user should know when the loss of a microbatch is another program than the loss of
    the batch.
    """
    return Finding(
        code="placements-lost",
        severity="warning",
        message=(
            "the loss computes other operations on a microbatch than on the whole batch; "
            f"{count} layouts of activations were left to the compiler."
        ),
        hint="pin microbatches to 1",
    )
