"""How the parameters of a loss are laid out, and what runs in place of operations on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib.layout import Layout
from shardlib.lowering.collective_matmul.matmuls import Matmul
from shardlib.lowering.loss.constraints import (
    laid_out,
    manual_axes,
)
from shardlib.lowering.mesh.collectives import Machine, machine_of
from shardlib.lowering.mesh.device_mesh import parts_of
from shardlib.lowering.mesh.shardings import (
    named_sharding,
    without_axes,
)
from shardlib.lowering.reading.contractions import Pins
from shardlib.lowering.reading.fused_dims import AS_WRITTEN, Interleaving, Orders, dealt, taken
from shardlib.lowering.reading.loss import LossReading
from shardlib.lowering.reading.use import Use, as_dtype
from shardlib.lowering.weights.added import reduced_sum
from shardlib.lowering.weights.gradients import reduced
from shardlib.lowering.weights.reduction_plan import (
    GradientReductions,
)
from shardlib.lowering.weights.sliced import gathered_slice
from shardlib.planning.plan import ParameterLayout, Plan

#: (path of an equation, index of its result) -> layout.
Placements = Mapping[tuple[str, int], Layout]


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightPlacing:
    """How the parameters of a traced loss are laid out.

    Attributes:
        plan: the decisions.
        mesh: the mesh of the program.
        placements: layouts of activations.
        compute, gradient: shardings of each parameter in use, and of its gradient.
        order: position of each parameter's layout in the plan.
        loss: what is known of the loss.
        uses: operations that use parameters, in the dtypes of the plan.
        reductions: how gradients are reduced.
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
    loss: LossReading
    uses: Mapping[str, Use]
    reductions: GradientReductions
    matmuls: tuple[Matmul, ...] = ()
    interleaving: Interleaving = AS_WRITTEN

    def machine(self, mesh: Mesh | AbstractMesh) -> Machine:
        """Where regions of a mesh run, and how partial sums of gradients are exchanged there."""
        return machine_of(self.plan, mesh, self.reductions.exchange)

    def start(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The parameters as the loss takes them; those with a slice a layer as they rest."""
        return [self.enter(i, leaf) for i, leaf in enumerate(leaves)]

    def enter(self, parameter: int, leaf: jax.Array) -> jax.Array:
        """One parameter as the loss takes it.

        Args:
            parameter: its number in tree order.
            leaf: as it is stored.
        """
        if parameter in self.loss.slices.values():
            return leaf
        kernels, tables = self._whole(self._at_rest)
        # Rows looked up in a table that is sharded along both dims make XLA replicate the result:
        # the table is gathered first.
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
        """A parameter, or a layer of it, with its fused dims interleaved; moved in the dtype in
        which it is read.
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
            self.interleaving.ways,
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
        """A parameter, or a layer of it, in the traced dtype; moved in the narrower of that and the
        one as stored, or in that in which it is read, where no matmul, lookup or slice moves it.
        """
        dtype, added = self.loss.dtypes[parameter], parameter in self._added and leaf.ndim > 1
        read = self.loss.narrowed.get(parameter, dtype) if added else dtype
        moved = as_dtype(leaf, read) if read.itemsize < leaf.dtype.itemsize else leaf
        return as_dtype(laid_out(moved, gathered or added, use, back), dtype)

    @cached_property
    def _added(self) -> frozenset[int]:
        """Matrices that are only added to activations, or multiplied by them element by element:
        the positions of a vision transformer.
        """
        adding = [use for path, use in self.loss.added.items() if path in self._at_rest]
        uses = *self.uses.values(), *self.loss.sliced.values(), *adding
        moved = {use.view.parameter for use in uses}
        trained = {i for i, number in enumerate(self.order) if self.plan.parameters[number].trained}
        return frozenset(trained - moved if self.reductions.explicit else ())

    @cached_property
    def _at_rest(self) -> Mapping[str, Callable[..., Any]]:
        """What runs in place of operations outside of manual regions."""
        return self._functions(self.mesh)

    def parameter(self, use: Use, mesh: Mesh | AbstractMesh) -> ParameterLayout:
        """Layouts of the parameter that an operation uses, in a region where some axes of the mesh
        are manual: there, they shard nothing.

        Args:
            use: the operation.
            mesh: of the region.
        """
        return self._parameter(use.view.parameter, mesh)

    def with_pins(self, use: Use, mesh: Mesh | AbstractMesh) -> Use:
        """The use of a parameter in the layouts that the plan has for the operation.

        Args:
            use: the operation.
            mesh: of the region.
        """
        return replace(
            use, pins=Pins.of(use.equation, self.placements, mesh), again=self._finds_gathered
        )

    @cached_property
    def _finds_gathered(self) -> bool:
        """Whether backward passes find activations gathered. XLA for GPUs makes one of the gathers
        of an activation by itself, and keeps less.
        """
        plan = self.plan
        every_layer = not plan.remat_layers and not plan.remat_classes
        return every_layer and plan.remat != "none" and self.machine(self.mesh).torus

    def _parameter(self, number: int, mesh: Mesh | AbstractMesh) -> ParameterLayout:
        manual = manual_axes(mesh)
        gone = {
            axis for axis in self.plan.mesh if manual and set(parts_of(mesh, (axis,))) <= manual
        }
        return without_axes(self.plan.parameters[self.order[number]], gone)

    def _whole(
        self, functions: Mapping[str, Any]
    ) -> tuple[frozenset[tuple[int, ...]], frozenset[int]]:
        """What is gathered at once: shapes of kernels, and tables, without those that some function
        gathers.
        """
        uses_by_path = {**self.uses, **self.loss.sliced, **self.loss.added}
        uses = [uses_by_path[path] for path in functions]
        return (
            self.loss.kernels - {use.shape for use in uses},
            self.loss.tables - {use.view.parameter for use in uses},
        )

    def _functions(self, mesh: Mesh | AbstractMesh) -> dict[str, Callable[..., Any]]:
        """What runs instead of the operations that use parameters, by path.

        Nothing where the compiler is left to reduce gradients (`GradientReductions.explicit`).
        """
        if not self.reductions.explicit:
            return {}
        machine = self.machine(mesh)
        reductions = {
            path: reduced(
                self.with_pins(use, mesh),
                self.placements[path, 0],
                self.parameter(use, mesh),
                machine,
            )
            for path, use in self.uses.items()
            if (path, 0) in self.placements
        }
        replacements = {
            path: function for path, function in reductions.items() if function is not None
        }
        return replacements | self._slices(mesh, machine) | self._sums(mesh, machine)

    def _sums(self, mesh: Mesh | AbstractMesh, machine: Machine) -> dict[str, Callable[..., Any]]:
        """What runs instead of additions of matrices that nothing else uses, where the batch alone
        shards activations.
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
            path: reduced_sum(use, rows, self.parameter(use, mesh), machine)
            for path, use in uses.items()
            if times[use.view.parameter] == 1
        }
        return {path: function for path, function in reductions.items() if function is not None}

    def _slices(self, mesh: Mesh | AbstractMesh, machine: Machine) -> dict[str, Callable[..., Any]]:
        """What runs instead of slices of parameters, of which all slices can be taken so."""
        uses = self.loss.sliced
        gathers = {
            path: gathered_slice(use, self.parameter(use, mesh), machine)
            for path, use in uses.items()
        }
        left = {uses[path].view.parameter for path, function in gathers.items() if function is None}
        return {
            path: function
            for path, function in gathers.items()
            if function is not None and uses[path].view.parameter not in left
        }
