"""Layouts of the values of a traced loss, and replacements of its operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.errors import LayoutError
from shardlib.functions.attention import Attention
from shardlib.functions.experts import ExpertForm
from shardlib.layout import Layout
from shardlib.lowering.collective_matmul import Matmul, loops, matmuls
from shardlib.lowering.collectives import (
    Machine,
    Precision,
    is_eight_bit,
    is_real,
    machine_of,
)
from shardlib.lowering.context.dispatch import around_devices
from shardlib.lowering.contractions import (
    AS_WRITTEN,
    AsWritten,
    ContractionShardings,
    Interleaving,
    Orders,
    Use,
    as_dtype,
    by_groups,
    dealt,
    pinned,
    taken,
)
from shardlib.lowering.experts import on_their_devices
from shardlib.lowering.mesh import (
    ParameterShardings,
    held,
    named_sharding,
    parameter_order,
    parts_of,
    returning,
    without_axes,
)
from shardlib.lowering.uses import LossJaxpr, LossReading, Site
from shardlib.lowering.weights import (
    Deferred,
    GradientReductions,
    deferred,
    gathered_slice,
    gradient_reductions,
    reduced,
    reduced_sum,
)
from shardlib.planner.plan import ParameterLayout, Plan
from shardlib.propagation.contractions import returned
from shardlib.tracing.program import CUSTOM, Equation, by_elements, has_matmul, is_element_lookup
from shardlib.tracing.rewriting import Together, Walk, bind

# --------------------------------------------------------------------------------------------------
# Sharding constraints on values of a loss, inside and outside of manual regions.


def laid_out(
    value: jax.Array, gathered: bool, use: NamedSharding, back: NamedSharding
) -> jax.Array:
    """A parameter whose gradient is resharded for the optimizer; gathered at once if `gathered`."""
    same = returning(back)(value)
    return held(same, use) if gathered else same


def constrained(
    value: jax.Array,
    layout: Layout,
    plan: Plan,
    mesh: Mesh | AbstractMesh,
    path: str,
    *,
    loose: bool = False,
) -> jax.Array:
    """A value constrained to a layout; with `loose`, only along the dims that the layout shards."""
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
    return held(value, sharding)


def manual_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """The axes that are manual in the surrounding region."""
    return frozenset(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Manual
    )


def whole(value: jax.Array, mesh: Mesh | AbstractMesh) -> jax.Array:
    """A value that is replicated over the automatic axes of a region."""
    return (
        jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec()))
        if jnp.ndim(value)
        else value
    )


def within(mesh: Mesh | AbstractMesh, sharding: NamedSharding) -> NamedSharding:
    """A sharding without the axes that are manual in the surrounding region."""
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


# --------------------------------------------------------------------------------------------------
# Operations at computed positions, which are replaced in manual regions.

#: Operations at computed positions. In a region where some axes are manual, XLA's partitioner
#: aborts the process on those of arrays that two automatic axes shard (seen on CPU with JAX 0.12:
#: "Check failed" in spmd_partitioner_util.cc); there, they and their gradients work on replicated
#: arrays.
INDEXED: frozenset[str] = frozenset({"gather", "scatter", "scatter-add"})


def on_this_mesh(
    equation: Equation, operands: Sequence[jax.Array], mesh: Mesh | AbstractMesh
) -> list[jax.Array] | None:
    """The results of an operation that is replaced on this mesh; None for all others."""
    if is_element_lookup(equation):
        return by_elements(equation, operands)
    if equation.name in INDEXED and manual_axes(mesh):
        results = bind(equation, [whole(operand, mesh) for operand in operands])
        return [whole(result, mesh) for result in results]
    return None


#: (path of an equation, index of its result) -> layout.
Placements = Mapping[tuple[str, int], Layout]


@dataclass(frozen=True, kw_only=True, eq=False)
class Placing:
    """Layouts of the values of a traced loss.

    Attributes:
        placements: layouts of activations.
        compute, gradient: shardings of each parameter in use, and of its gradient.
        order: index of each parameter's layouts in the plan.
        loss: facts about the loss.
        uses: operations that use parameters, in the dtypes of the plan.
        reductions: how gradients are reduced.
        matmuls: matmuls of weights that collective matmuls may replace; empty if the plan has none.
        interleaving: operations that change where fused dims are interleaved.
    """

    plan: Plan
    mesh: Mesh | AbstractMesh
    placements: Placements
    compute: Sequence[NamedSharding]
    gradient: Sequence[NamedSharding]
    order: Sequence[int]
    loss: LossReading
    uses: Mapping[str, Use]
    reductions: GradientReductions
    matmuls: tuple[Matmul, ...] = ()
    interleaving: Interleaving = AS_WRITTEN

    def machine(self, mesh: Mesh | AbstractMesh) -> Machine:
        """The machine of regions of a mesh."""
        return machine_of(self.plan, mesh)

    def start(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The parameters as the loss reads them; stacked ones in their stored sharding."""
        return [self.enter(i, leaf) for i, leaf in enumerate(leaves)]

    def enter(self, parameter: int, leaf: jax.Array) -> jax.Array:
        """One parameter as the loss reads it."""
        if parameter in self.loss.slices.values():
            return leaf
        kernels, tables = self._whole(self._at_rest)
        # XLA replicates the rows looked up in a table that is sharded along both dims: the table is
        # gathered first.
        gathered = parameter in tables or leaf.shape in kernels
        used = self._used(
            parameter, leaf, gathered, self.compute[parameter], self.gradient[parameter]
        )
        return self._taken(
            parameter, used, self.interleaving.parameters.get(parameter, {}), gathered, self.mesh
        )

    def _taken(
        self,
        parameter: int,
        value: jax.Array,
        orders: Orders,
        gathered: bool,
        mesh: Mesh | AbstractMesh,
    ) -> jax.Array:
        """A parameter, or a layer of it, with its fused dims interleaved; communicated in the dtype
        in which it is read.
        """
        if not orders:
            return value
        layouts = self._parameter(parameter, mesh)

        def shardings(layout: Layout) -> tuple[NamedSharding, NamedSharding]:
            after = Layout(*tuple(layout)[len(layout) - value.ndim :])
            return named_sharding(mesh, after), named_sharding(
                mesh, dealt(after, orders, value.shape, self.plan.mesh)
            )

        narrow = self.loss.narrowed.get(parameter, value.dtype)
        return taken(
            as_dtype(value, narrow),
            orders,
            self.interleaving.shards,
            shardings(layouts.compute if gathered else layouts.rest),
            shardings(layouts.gradient),
        ).astype(value.dtype)

    def _used(
        self,
        parameter: int,
        leaf: jax.Array,
        gathered: bool,
        use: NamedSharding,
        back: NamedSharding,
    ) -> jax.Array:
        """A parameter, or a layer of it, in the traced dtype. It is communicated in the narrower of
        the traced and the stored dtype, or, if no matmul, lookup or slice gathers it, in the dtype
        in which it is read.
        """
        dtype, added = self.loss.dtypes[parameter], parameter in self._added and leaf.ndim > 1
        read = self.loss.narrowed.get(parameter, dtype) if added else dtype
        moved = as_dtype(leaf, read) if read.itemsize < leaf.dtype.itemsize else leaf
        return as_dtype(laid_out(moved, gathered or added, use, back), dtype)

    @cached_property
    def _added(self) -> frozenset[int]:
        """Matrices that are only added to activations, or multiplied by them element by element,
        such as the positions of a vision transformer.
        """
        adding = [use for path, use in self.loss.added.items() if path in self._at_rest]
        uses = *self.uses.values(), *self.loss.sliced.values(), *adding
        moved = {use.view.parameter for use in uses}
        trained = {i for i, number in enumerate(self.order) if self.plan.parameters[number].trained}
        return frozenset(trained - moved if self.reductions.explicit else ())

    @cached_property
    def _at_rest(self) -> Mapping[str, Callable[..., Any]]:
        """Replacements of operations outside of manual regions."""
        return self._functions(self.mesh)

    def deferral(
        self, path: str, mesh: Mesh | AbstractMesh, *, lookups: bool = False
    ) -> Deferred | None:
        """The operation at a path, if its gradient can be reduced after several runs; lookups only
        with `lookups`.
        """
        if (path, 0) not in self.placements:
            return None
        return deferred(*self._laid_out(path, mesh), self.machine(mesh), lookups=lookups)

    def _laid_out(
        self, path: str, mesh: Mesh | AbstractMesh
    ) -> tuple[Use, Layout, ParameterLayout]:
        """The use of a parameter in the plan's layouts for the operation, the layout of its result,
        and the layouts of the parameter.
        """
        use = self.uses[path]
        layouts_of_use = ContractionShardings.of(use.equation, self.placements, mesh)
        return (
            replace(use, shardings=layouts_of_use, again=self._finds_gathered),
            self.placements[path, 0],
            self._parameter(use.view.parameter, mesh),
        )

    @cached_property
    def _finds_gathered(self) -> bool:
        """True if backward passes read activations gathered. On GPUs XLA itself merges the
        all-gathers of an activation, and saves less.
        """
        plan = self.plan
        every_layer = not plan.remat_layers and not plan.remat_classes
        return every_layer and plan.remat != "none" and self.machine(self.mesh).torus

    def _parameter(self, number: int, mesh: Mesh | AbstractMesh) -> ParameterLayout:
        """Layouts of a parameter, without the axes that are manual in the surrounding region."""
        manual = manual_axes(mesh)
        gone = {
            axis for axis in self.plan.mesh if manual and set(parts_of(mesh, (axis,))) <= manual
        }
        return without_axes(self.plan.parameters[self.order[number]], gone)

    def _whole(
        self, functions: Mapping[str, Any]
    ) -> tuple[frozenset[tuple[int, ...]], frozenset[int]]:
        """Shapes of kernels, and tables, that are gathered at once, without those that a replaced
        operation gathers.
        """
        uses_by_path = {**self.uses, **self.loss.sliced, **self.loss.added}
        uses = [uses_by_path[path] for path in functions]
        return (
            self.loss.kernels - {use.shape for use in uses},
            self.loss.tables - {use.view.parameter for use in uses},
        )

    def _functions(self, mesh: Mesh | AbstractMesh) -> dict[str, Callable[..., Any]]:
        """Replacements of operations that use parameters, by path.

        Empty if the compiler reduces gradients (`GradientReductions.explicit`).
        """
        if not self.reductions.explicit:
            return {}
        machine = self.machine(mesh)
        reductions = {
            path: reduced(*self._laid_out(path, mesh), machine)
            for path in self.uses
            if (path, 0) in self.placements
        }
        replacements = {
            path: function for path, function in reductions.items() if function is not None
        }
        return replacements | self._slices(mesh, machine) | self._sums(mesh, machine)

    def _sums(self, mesh: Mesh | AbstractMesh, machine: Machine) -> dict[str, Callable[..., Any]]:
        """Replacements of additions of matrices that nothing else uses, if the batch alone shards
        activations.
        """
        batch = {layout[0] for _, layout in self.plan.batch_layouts if len(layout)}
        if manual_axes(mesh) or len(batch) != 1:
            return {}
        (rows,) = batch
        if any(size > 1 and axis not in rows for axis, size in self.plan.mesh.items()):
            return {}
        uses = self.loss.added
        moved = [use.view.parameter for use in (*self.uses.values(), *self.loss.sliced.values())]
        times = Counter([*moved, *(use.view.parameter for use in uses.values())])
        reductions = {
            path: reduced_sum(use, rows, self._parameter(use.view.parameter, mesh), machine)
            for path, use in uses.items()
            if times[use.view.parameter] == 1
        }
        return {path: function for path, function in reductions.items() if function is not None}

    def _slices(self, mesh: Mesh | AbstractMesh, machine: Machine) -> dict[str, Callable[..., Any]]:
        """Replacements of slices of parameters all of whose slices can be replaced."""
        uses = self.loss.sliced
        gathers = {
            path: gathered_slice(use, self._parameter(use.view.parameter, mesh), machine)
            for path, use in uses.items()
        }
        left = {uses[path].view.parameter for path, function in gathers.items() if function is None}
        return {
            path: function
            for path, function in gathers.items()
            if function is not None and uses[path].view.parameter not in left
        }

    @staticmethod
    def of(
        traced: LossJaxpr,
        plan: Plan,
        mesh: Mesh | AbstractMesh,
        params: ParameterShardings,
        placements: Placements,
        interleaving: Interleaving | None = None,
    ) -> Placing:
        """Finds the layouts of a traced loss."""
        gradient, compute = jax.tree.leaves(params.gradient), jax.tree.leaves(params.compute)
        loss, order = traced.read(len(gradient)), parameter_order(plan, params.compute)
        uses = _in_dtypes(loss.uses, Precision.of(plan))
        matmuls_of_weights = matmuls(loss) if plan.collective_matmul == "loop" else ()
        machine = machine_of(plan, mesh)
        looped = _looped(
            matmuls_of_weights, [plan.parameters[i] for i in order], placements, machine
        )
        return Placing(
            plan=plan,
            mesh=mesh,
            placements=placements,
            compute=compute,
            gradient=gradient,
            order=order,
            loss=loss,
            uses=uses,
            reductions=gradient_reductions(
                plan,
                order,
                uses,
                placements,
                machine,
                {path for group in looped.values() for path in group.paths},
            ),
            matmuls=matmuls_of_weights,
            interleaving=interleaving or AS_WRITTEN,
        )

    def walk(self, mesh: Mesh | AbstractMesh | None = None, *, loose: bool = False) -> Walk:
        """A walk that constrains every value that has a layout in the plan."""
        mesh = self.mesh if mesh is None else mesh
        manual = manual_axes(mesh)
        functions = {} if loose else self._functions(mesh)
        kernels = self._whole(functions)[0]
        narrow = {path for path, use in self.uses.items() if use.product is not None}

        def place(path: str, index: int, value: jax.Array) -> jax.Array:
            if path in self.loss.slices:
                return self._layer(path, value, value.shape in kernels, mesh)
            layout = self.placements.get((path, index))
            if layout is None:
                return value
            placed = constrained(value, layout, self.plan, mesh, path, loose=loose)
            back = None if loose else self.placements.get(returned(path))
            return placed if back is None else returning(named_sharding(mesh, back))(placed)

        def run(equation: Equation, operands: Sequence[jax.Array]) -> list[jax.Array] | None:
            done = on_this_mesh(equation, operands, mesh)
            if done is not None:
                return done
            if equation.path in functions:
                return [functions[equation.path](*operands)]
            if equation.name in CUSTOM and has_matmul(equation.eqn):
                return bind(equation, self._operands(equation, operands, mesh))
            use = self.uses[equation.path] if equation.path in narrow else None
            layouts_of_use = ContractionShardings.of(equation, self.placements, mesh)
            if layouts_of_use is None:
                return None if use is None else [use.run(operands)]
            if use is None:
                written = by_groups(AsWritten(equation=equation), equation, layouts_of_use)
                return [pinned(written, layouts_of_use, operands)]
            inside = by_groups(use, equation, layouts_of_use, preferred_element_type=use.product)
            return [pinned(inside, layouts_of_use, use.narrowed(operands))]

        return self.interleaving.around(
            Walk(
                place=place,
                run=run,
                calls=self._calls(mesh),
                together={} if manual else self.together(mesh),
            )
        )

    def _layer(
        self, path: str, value: jax.Array, kernel: bool, mesh: Mesh | AbstractMesh
    ) -> jax.Array:
        """The slice of a stacked parameter that one layer uses, in its layout."""
        i = self.loss.slices[path]
        compute, gradient = (
            within(mesh, one_layer(shardings[i])) for shardings in (self.compute, self.gradient)
        )
        used = self._used(i, value, kernel, compute, gradient)
        return self._taken(i, used, self.interleaving.slices.get(path, {}), kernel, mesh)

    def _operands(
        self, equation: Equation, operands: Sequence[jax.Array], mesh: Mesh | AbstractMesh
    ) -> list[jax.Array]:
        """Operands of a custom call, constrained to their layouts in the plan."""
        layouts = [
            self.placements.get((f"{equation.path}/operand", index))
            for index in range(len(operands))
        ]
        return [
            value if layout is None else constrained(value, layout, self.plan, mesh, equation.path)
            for value, layout in zip(operands, layouts, strict=True)
        ]

    def together(self, mesh: Mesh | AbstractMesh) -> dict[str, Together]:
        """The matmuls that run in loops over the tensor axis, by path."""
        return _looped(
            self.matmuls,
            [self._parameter(i, mesh) for i in range(len(self.order))] if self.matmuls else [],
            self.placements,
            self.machine(mesh),
        )

    def _calls(self, mesh: Mesh | AbstractMesh) -> dict[str, Callable[..., Sequence[jax.Array]]]:
        """Replacements of custom calls, by path, with results constrained to the plan's layouts."""
        machine = self.machine(mesh)
        substitutes = {
            path: self._substitute(site, mesh, machine) for path, site in self.loss.calls.items()
        }
        return {
            path: self._placed(function, self.loss.calls[path], mesh)
            for path, function in substitutes.items()
            if function is not None
        }

    def _substitute(
        self, site: Site, mesh: Mesh | AbstractMesh, machine: Machine
    ) -> Callable[..., Sequence[jax.Array]] | None:
        """A program for many devices in place of a call; None if its equations are left to
        automatic partitioning.
        """
        if isinstance(site.call.form, Attention):
            return around_devices(site, self.plan, self.placements, machine)
        if isinstance(site.call.form, ExpertForm):
            parameters = [
                None if view is None else self._parameter(view.parameter, mesh)
                for view in site.views
            ]
            return on_their_devices(site, self.plan, parameters, self.placements, machine)
        return None

    def _placed(
        self, function: Callable[..., Sequence[Any]], site: Site, mesh: Mesh | AbstractMesh
    ) -> Callable[..., Sequence[Any]]:
        layouts = [None if maker is None else self.placements.get(maker) for maker in site.makers]

        def run(*arrays: Any) -> list[Any]:
            return [
                value
                if layout is None
                else constrained(value, layout, self.plan, mesh, site.call.path)
                for value, layout in zip(function(*arrays), layouts, strict=True)
            ]

        return run


def _looped(
    candidates: Sequence[Matmul],
    parameters: Sequence[ParameterLayout],
    placements: Placements,
    machine: Machine,
) -> dict[str, Together]:
    """The matmuls that run in loops over the tensor axis, by path."""
    return loops(
        candidates, lambda matmul: parameters[matmul.use.view.parameter], placements, machine
    )


def _in_dtypes(uses: Mapping[str, Use], precision: Precision) -> Mapping[str, Use]:
    """Uses of parameters in the dtypes of a plan: matmuls of real numbers in loops over layers use
    those of `products`.
    """

    def product(use: Use) -> Any:
        # 8-bit matmuls are those that run in 16 bits otherwise, without the router.
        widest = 2 if is_eight_bit(precision.products) else 8
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
        path: replace(use, product=product(use), stored=precision.rest)
        for path, use in uses.items()
    }
