"""Layouts of the values of a traced loss, and replacements of its operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from shardlib.lowering.collective_matmul import WeightMatmul, ring_loops, weight_matmuls
from shardlib.lowering.collectives import Precision, Regions, is_eight_bit, is_real, regions_of
from shardlib.lowering.context.dispatch import lower_attention
from shardlib.lowering.contractions import (
    NO_INTERLEAVING,
    ContractionShardings,
    FusedDims,
    Interleaving,
    ModelContraction,
    Use,
    ValueLayouts,
    as_dtype,
    interleaved_parameter,
    reordering_layout,
    run_in_layouts,
    with_manual_groups,
)
from shardlib.lowering.experts import lower_experts
from shardlib.lowering.mesh import (
    ParameterShardings,
    constrain,
    named_sharding,
    physical_axes,
    plan_indices,
    with_gradient_sharding,
    without_axes,
)
from shardlib.lowering.uses import CallSite, LossFacts, LossJaxpr
from shardlib.lowering.weights import (
    DeferredOp,
    GradientReductions,
    added_matrix,
    deferred_op,
    gathered_slice,
    gradient_reductions,
    with_reduced_gradient,
)
from shardlib.planner.plan import ParameterLayout, Plan
from shardlib.propagation.contractions import gradient_key
from shardlib.tracing.program import CUSTOM, Equation, by_masking, has_matmul, is_element_lookup
from shardlib.tracing.rewriting import EquationGroup, Walk, bind

# --------------------------------------------------------------------------------------------------
# Sharding constraints on values of a loss, inside and outside of manual regions.


def parameter_in_use(
    value: jax.Array, gathered: bool, compute: NamedSharding, gradient: NamedSharding
) -> jax.Array:
    """A parameter whose gradient is resharded for the optimizer; gathered before its uses if
    `gathered`.
    """
    value = with_gradient_sharding(gradient)(value)
    return constrain(value, compute) if gathered else value


def constrain_to_layout(
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
    return constrain(value, sharding)


def manual_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """The axes that are manual in the surrounding region."""
    return frozenset(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Manual
    )


def replicated(value: jax.Array, mesh: Mesh | AbstractMesh) -> jax.Array:
    """A value that is replicated over the automatic axes of a region."""
    return (
        jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec()))
        if jnp.ndim(value)
        else value
    )


def without_manual_axes(mesh: Mesh | AbstractMesh, sharding: NamedSharding) -> NamedSharding:
    """A sharding without the axes that are manual in the surrounding region."""
    manual = manual_axes(mesh)
    if not manual:
        return sharding

    def automatic_axes(dim: Any) -> Any:
        return (
            dim
            if dim is None or dim is PartitionSpec.UNCONSTRAINED
            else tuple(
                axis for axis in ((dim,) if isinstance(dim, str) else dim) if axis not in manual
            )
            or None
        )

    return NamedSharding(mesh, PartitionSpec(*map(automatic_axes, sharding.spec)))


def layer_sharding(stacked: NamedSharding) -> NamedSharding:
    """The sharding of one slice along the leading dim."""
    return NamedSharding(stacked.mesh, PartitionSpec(*stacked.spec[1:]))


# --------------------------------------------------------------------------------------------------
# Operations at computed positions, which are replaced in manual regions.

#: Operations at computed positions. In a region where some axes are manual, XLA's partitioner
#: aborts the process on those of arrays that two automatic axes shard (seen on CPU with JAX 0.12:
#: "Check failed" in spmd_partitioner_util.cc); there, they and their gradients work on replicated
#: arrays.
INDEXED: frozenset[str] = frozenset({"gather", "scatter", "scatter-add"})


def replaced_on_mesh(
    equation: Equation, operands: Sequence[jax.Array], mesh: Mesh | AbstractMesh
) -> list[jax.Array] | None:
    """The results of an operation that is replaced on this mesh; None for all others."""
    if is_element_lookup(equation):
        return by_masking(equation, operands)
    if equation.name in INDEXED and manual_axes(mesh):
        results = bind(equation, [replicated(operand, mesh) for operand in operands])
        return [replicated(result, mesh) for result in results]
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class LossLayouts:
    """Layouts of the values of a traced loss.

    Attributes:
        values: layouts of activations.
        compute, gradient: shardings of each parameter in use, and of its gradient.
        plan_indices: index of each parameter's layouts in the plan.
        facts: of the loss.
        uses: operations that use parameters, in the dtypes of the plan.
        reductions: how gradients are reduced.
        matmuls: matmuls of weights that collective matmuls may replace; empty if the plan has none.
        interleaving: operations that change where fused dims are interleaved.
    """

    plan: Plan
    mesh: Mesh | AbstractMesh
    values: ValueLayouts
    compute: Sequence[NamedSharding]
    gradient: Sequence[NamedSharding]
    plan_indices: Sequence[int]
    facts: LossFacts
    uses: Mapping[str, Use]
    reductions: GradientReductions
    matmuls: tuple[WeightMatmul, ...] = ()
    interleaving: Interleaving = NO_INTERLEAVING

    def regions(self, mesh: Mesh | AbstractMesh) -> Regions:
        """The manual regions of a mesh."""
        return regions_of(self.plan, mesh)

    def parameters(
        self, leaves: Sequence[jax.Array], deferred: Iterable[str] = ()
    ) -> list[jax.Array]:
        """The parameters as the loss reads them; stacked ones in their stored sharding.

        Args:
            deferred: paths of operations that gather their own.
        """
        return [self.parameter(i, leaf, deferred) for i, leaf in enumerate(leaves)]

    def parameter(self, parameter: int, leaf: jax.Array, deferred: Iterable[str] = ()) -> jax.Array:
        """One parameter as the loss reads it."""
        if parameter in self.facts.stacked_slices.values():
            return leaf
        kernels, tables = self._gathered_first([*self._outer, *deferred])
        # XLA replicates the rows looked up in a table that is sharded along both dims: the table is
        # gathered first.
        gathered = parameter in tables or leaf.shape in kernels
        used = self._in_use(
            parameter, leaf, gathered, self.compute[parameter], self.gradient[parameter]
        )
        return self._interleaved(
            parameter, used, self.interleaving.parameters.get(parameter, {}), gathered, self.mesh
        )

    def _interleaved(
        self,
        parameter: int,
        value: jax.Array,
        fused_dims: FusedDims,
        gathered: bool,
        mesh: Mesh | AbstractMesh,
    ) -> jax.Array:
        """A parameter, or a layer of it, with its fused dims interleaved; communicated in the dtype
        in which it is read.
        """
        if not fused_dims:
            return value
        layouts = self._parameter_layout(parameter, mesh)

        def shardings(layout: Layout) -> tuple[NamedSharding, NamedSharding]:
            layout = Layout(*tuple(layout)[len(layout) - value.ndim :])
            return named_sharding(mesh, layout), named_sharding(
                mesh, reordering_layout(layout, fused_dims, value.shape, self.plan.mesh)
            )

        narrow = self.facts.narrow_dtypes.get(parameter, value.dtype)
        return interleaved_parameter(
            as_dtype(value, narrow),
            fused_dims,
            self.interleaving.shards,
            shardings(layouts.compute if gathered else layouts.rest),
            shardings(layouts.gradient),
        ).astype(value.dtype)

    def _in_use(
        self,
        parameter: int,
        leaf: jax.Array,
        gathered: bool,
        compute: NamedSharding,
        gradient: NamedSharding,
    ) -> jax.Array:
        """A parameter, or a layer of it, in the traced dtype. It is communicated in the narrower of
        the traced and the stored dtype, or, if no matmul, lookup or slice gathers it, in the dtype
        in which it is read.
        """
        dtype, added = self.facts.dtypes[parameter], parameter in self._only_added and leaf.ndim > 1
        read = self.facts.narrow_dtypes.get(parameter, dtype) if added else dtype
        cast = as_dtype(leaf, read) if read.itemsize < leaf.dtype.itemsize else leaf
        return as_dtype(parameter_in_use(cast, gathered or added, compute, gradient), dtype)

    @cached_property
    def _only_added(self) -> frozenset[int]:
        """Matrices that are only added to activations, or multiplied by them element by element,
        such as the positions of a vision transformer.
        """
        adding = [use for path, use in self.facts.additions.items() if path in self._outer]
        uses = *self.uses.values(), *self.facts.slice_uses.values(), *adding
        gathered = {use.view.parameter for use in uses}
        trained = {
            i for i, number in enumerate(self.plan_indices) if self.plan.parameters[number].trained
        }
        return frozenset(trained - gathered if self.reductions.manual else ())

    @cached_property
    def _outer(self) -> Mapping[str, Callable[..., Any]]:
        """Replacements of operations outside of manual regions."""
        return self._replacements(self.mesh)

    def deferred(
        self, path: str, mesh: Mesh | AbstractMesh, *, lookups: bool = False
    ) -> DeferredOp | None:
        """The operation at a path, if its gradient can be reduced after several runs; lookups only
        with `lookups`.
        """
        if (path, 0) not in self.values:
            return None
        return deferred_op(*self._use_layouts(path, mesh), self.regions(mesh), lookups=lookups)

    def _use_layouts(
        self, path: str, mesh: Mesh | AbstractMesh
    ) -> tuple[Use, Layout, ParameterLayout]:
        """The use of a parameter in the plan's layouts for the operation, the layout of its result,
        and the layouts of the parameter.
        """
        use = self.uses[path]
        layouts_of_use = ContractionShardings.of(use.equation, self.values, mesh)
        return (
            replace(use, shardings=layouts_of_use, recomputed=self._regathers_activations),
            self.values[path, 0],
            self._parameter_layout(use.view.parameter, mesh),
        )

    @cached_property
    def _regathers_activations(self) -> bool:
        """True if backward passes read all-gathered activations, which they recompute. On GPUs XLA
        itself merges the all-gathers of an activation, and saves less.
        """
        plan = self.plan
        every_layer = not plan.remat_layers and not plan.remat_classes
        return every_layer and plan.remat != "none" and self.regions(self.mesh).torus

    def _parameter_layout(self, number: int, mesh: Mesh | AbstractMesh) -> ParameterLayout:
        """Layouts of a parameter, without the axes that are manual in the surrounding region."""
        manual = manual_axes(mesh)
        removed = {
            axis
            for axis in self.plan.mesh
            if manual and set(physical_axes(mesh, (axis,))) <= manual
        }
        return without_axes(self.plan.parameters[self.plan_indices[number]], removed)

    def _gathered_first(
        self, functions: Iterable[str]
    ) -> tuple[frozenset[tuple[int, ...]], frozenset[int]]:
        """Shapes of kernels, and tables, that are gathered before their uses, without those that a
        replaced operation gathers.
        """
        uses_by_path = {**self.uses, **self.facts.slice_uses, **self.facts.additions}
        uses = [uses_by_path[path] for path in functions]
        return (
            self.facts.kernel_shapes - {use.shape for use in uses},
            self.facts.lookup_tables - {use.view.parameter for use in uses},
        )

    def _replacements(self, mesh: Mesh | AbstractMesh) -> dict[str, Callable[..., Any]]:
        """Replacements of operations that use parameters, by path.

        Empty if the compiler reduces gradients (`GradientReductions.manual`).
        """
        if not self.reductions.manual:
            return {}
        regions = self.regions(mesh)
        reductions = {
            path: with_reduced_gradient(*self._use_layouts(path, mesh), regions)
            for path in self.uses
            if (path, 0) in self.values
        }
        replacements = {
            path: function for path, function in reductions.items() if function is not None
        }
        return (
            replacements
            | self._slice_replacements(mesh, regions)
            | self._addition_replacements(mesh, regions)
        )

    def _addition_replacements(
        self, mesh: Mesh | AbstractMesh, regions: Regions
    ) -> dict[str, Callable[..., Any]]:
        """Replacements of additions of matrices that nothing else uses, if the batch alone shards
        activations.
        """
        batch = {layout[0] for _, layout in self.plan.batch_layouts if len(layout)}
        if manual_axes(mesh) or len(batch) != 1:
            return {}
        (rows,) = batch
        if any(size > 1 and axis not in rows for axis, size in self.plan.mesh.items()):
            return {}
        uses = self.facts.additions
        gathered = [
            use.view.parameter for use in (*self.uses.values(), *self.facts.slice_uses.values())
        ]
        use_counts = Counter([*gathered, *(use.view.parameter for use in uses.values())])
        reductions = {
            path: added_matrix(use, rows, self._parameter_layout(use.view.parameter, mesh), regions)
            for path, use in uses.items()
            if use_counts[use.view.parameter] == 1
        }
        return {path: function for path, function in reductions.items() if function is not None}

    def _slice_replacements(
        self, mesh: Mesh | AbstractMesh, regions: Regions
    ) -> dict[str, Callable[..., Any]]:
        """Replacements of slices of parameters all of whose slices can be replaced."""
        uses = self.facts.slice_uses
        gathers = {
            path: gathered_slice(use, self._parameter_layout(use.view.parameter, mesh), regions)
            for path, use in uses.items()
        }
        kept = {uses[path].view.parameter for path, function in gathers.items() if function is None}
        return {
            path: function
            for path, function in gathers.items()
            if function is not None and uses[path].view.parameter not in kept
        }

    @staticmethod
    def of(
        traced: LossJaxpr,
        plan: Plan,
        mesh: Mesh | AbstractMesh,
        params: ParameterShardings,
        value_layouts: ValueLayouts,
        interleaving: Interleaving | None = None,
    ) -> LossLayouts:
        """The layouts of a traced loss under a plan."""
        gradient, compute = jax.tree.leaves(params.gradient), jax.tree.leaves(params.compute)
        facts, indices = traced.facts(len(gradient)), plan_indices(plan, params.compute)
        uses = _in_plan_dtypes(facts.uses, Precision.of(plan))
        matmuls_of_weights = weight_matmuls(facts) if plan.collective_matmul == "loop" else ()
        regions = regions_of(plan, mesh)
        loops = _ring_loops(
            matmuls_of_weights, [plan.parameters[i] for i in indices], value_layouts, regions
        )
        return LossLayouts(
            plan=plan,
            mesh=mesh,
            values=value_layouts,
            compute=compute,
            gradient=gradient,
            plan_indices=indices,
            facts=facts,
            uses=uses,
            reductions=gradient_reductions(
                plan,
                indices,
                uses,
                value_layouts,
                regions,
                {path for group in loops.values() for path in group.paths},
            ),
            matmuls=matmuls_of_weights,
            interleaving=interleaving or NO_INTERLEAVING,
        )

    def walk(self, mesh: Mesh | AbstractMesh | None = None, *, loose: bool = False) -> Walk:
        """A walk that constrains every value that has a layout in the plan.

        Args:
            loose: constrain only dims that layouts shard, and no gradients; replace no operations.
        """
        mesh = self.mesh if mesh is None else mesh
        manual = manual_axes(mesh)
        functions = {} if loose else self._replacements(mesh)
        kernels = self._gathered_first(functions)[0]
        narrow = {path for path, use in self.uses.items() if use.matmul_dtype is not None}

        def place(path: str, index: int, value: jax.Array) -> jax.Array:
            if path in self.facts.stacked_slices:
                return self._layer_slice(path, value, value.shape in kernels, mesh)
            layout = self.values.get((path, index))
            if layout is None:
                return value
            value = constrain_to_layout(value, layout, self.plan, mesh, path, loose=loose)
            cotangent = None if loose else self.values.get(gradient_key(path))
            return (
                value
                if cotangent is None
                else with_gradient_sharding(named_sharding(mesh, cotangent))(value)
            )

        def run(equation: Equation, operands: Sequence[jax.Array]) -> list[jax.Array] | None:
            replaced = replaced_on_mesh(equation, operands, mesh)
            if replaced is not None:
                return replaced
            if equation.path in functions:
                return [functions[equation.path](*operands)]
            if equation.name in CUSTOM and has_matmul(equation.eqn):
                return bind(equation, self._constrained_operands(equation, operands, mesh))
            use = self.uses[equation.path] if equation.path in narrow else None
            layouts_of_use = ContractionShardings.of(equation, self.values, mesh)
            if layouts_of_use is None:
                return None if use is None else [use.run(operands)]
            if use is None:
                contraction = with_manual_groups(
                    ModelContraction(equation=equation), equation, layouts_of_use
                )
                return [run_in_layouts(contraction, layouts_of_use, operands)]
            contraction = with_manual_groups(
                use, equation, layouts_of_use, preferred_element_type=use.matmul_dtype
            )
            return [run_in_layouts(contraction, layouts_of_use, use.narrow_operands(operands))]

        return self.interleaving.wrap(
            Walk(
                on_value=place,
                run=run,
                calls=self._call_replacements(mesh),
                groups={} if manual else self.ring_loops(mesh),
            )
        )

    def _layer_slice(
        self, path: str, value: jax.Array, kernel: bool, mesh: Mesh | AbstractMesh
    ) -> jax.Array:
        """The slice of a stacked parameter that one layer uses, in its layout."""
        i = self.facts.stacked_slices[path]
        compute, gradient = (
            without_manual_axes(mesh, layer_sharding(shardings[i]))
            for shardings in (self.compute, self.gradient)
        )
        used = self._in_use(i, value, kernel, compute, gradient)
        return self._interleaved(i, used, self.interleaving.slices.get(path, {}), kernel, mesh)

    def _constrained_operands(
        self, equation: Equation, operands: Sequence[jax.Array], mesh: Mesh | AbstractMesh
    ) -> list[jax.Array]:
        """Operands of a custom call, constrained to their layouts in the plan."""
        layouts = [
            self.values.get((f"{equation.path}/operand", index)) for index in range(len(operands))
        ]
        return [
            value
            if layout is None
            else constrain_to_layout(value, layout, self.plan, mesh, equation.path)
            for value, layout in zip(operands, layouts, strict=True)
        ]

    def ring_loops(self, mesh: Mesh | AbstractMesh) -> dict[str, EquationGroup]:
        """The matmuls that run in loops over the tensor axis, by path."""
        return _ring_loops(
            self.matmuls,
            [
                self._parameter_layout(i, mesh)
                for i in range(len(self.plan_indices) if self.matmuls else 0)
            ],
            self.values,
            self.regions(mesh),
        )

    def _call_replacements(
        self, mesh: Mesh | AbstractMesh
    ) -> dict[str, Callable[..., Sequence[jax.Array]]]:
        """Replacements of custom calls, by path, with results constrained to the plan's layouts."""
        regions = self.regions(mesh)
        replacements = {
            path: self._call_replacement(site, mesh, regions)
            for path, site in self.facts.calls.items()
        }
        return {
            path: self._in_result_layouts(function, self.facts.calls[path], mesh)
            for path, function in replacements.items()
            if function is not None
        }

    def _call_replacement(
        self, site: CallSite, mesh: Mesh | AbstractMesh, regions: Regions
    ) -> Callable[..., Sequence[jax.Array]] | None:
        """A program for many devices in place of a call; None if its equations are left to
        automatic partitioning.
        """
        if isinstance(site.call.form, Attention):
            return lower_attention(site, self.plan, self.values, regions)
        if isinstance(site.call.form, ExpertForm):
            parameters = [
                None if view is None else self._parameter_layout(view.parameter, mesh)
                for view in site.views
            ]
            return lower_experts(site, self.plan, parameters, self.values, regions)
        return None

    def _in_result_layouts(
        self, function: Callable[..., Sequence[Any]], site: CallSite, mesh: Mesh | AbstractMesh
    ) -> Callable[..., Sequence[Any]]:
        layouts = [None if key is None else self.values.get(key) for key in site.producers]

        def run(*arrays: Any) -> list[Any]:
            return [
                value
                if layout is None
                else constrain_to_layout(value, layout, self.plan, mesh, site.call.path)
                for value, layout in zip(function(*arrays), layouts, strict=True)
            ]

        return run


def _ring_loops(
    candidates: Sequence[WeightMatmul],
    parameters: Sequence[ParameterLayout],
    value_layouts: ValueLayouts,
    regions: Regions,
) -> dict[str, EquationGroup]:
    """The matmuls that run in loops over the tensor axis, by path."""
    return ring_loops(
        candidates, lambda matmul: parameters[matmul.use.view.parameter], value_layouts, regions
    )


def _in_plan_dtypes(uses: Mapping[str, Use], precision: Precision) -> Mapping[str, Use]:
    """Uses of parameters in the dtypes of a plan: matmuls of real numbers in loops over layers use
    those of `Precision.matmuls`.
    """

    def product(use: Use) -> Any:
        # 8-bit matmuls are those that run in 16 bits otherwise, without the router.
        widest = 2 if is_eight_bit(precision.matmuls) else 8
        real = all(
            is_real(variable.aval) and variable.aval.dtype.itemsize <= widest
            for variable in use.equation.eqn.invars
        )
        return (
            precision.matmuls
            if use.equation.name == "dot_general" and "/body/" in use.equation.path and real
            else None
        )

    return {
        path: replace(use, matmul_dtype=product(use), stored_dtype=precision.parameters)
        for path, use in uses.items()
    }
