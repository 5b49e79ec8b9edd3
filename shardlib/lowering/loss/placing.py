"""How the values of a traced loss are laid out, and what runs in place of its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardlib.lowering.collective_matmul.groups import loops
from shardlib.lowering.collective_matmul.matmuls import Matmul, matmuls
from shardlib.lowering.loss.constraints import (
    constrained,
    manual_axes,
    one_layer,
    within,
)
from shardlib.lowering.loss.regions import on_this_mesh
from shardlib.lowering.loss.substitutes import substitute
from shardlib.lowering.loss.weight_placing import Placements, WeightPlacing
from shardlib.lowering.mesh.collectives import Machine, machine_of
from shardlib.lowering.mesh.eight_bit import is_eight_bit
from shardlib.lowering.mesh.gradient_exchange import GradientExchange
from shardlib.lowering.mesh.pinning import returning
from shardlib.lowering.mesh.precision import Precision, is_real
from shardlib.lowering.mesh.shardings import (
    ParameterShardings,
    named_sharding,
    parameter_order,
)
from shardlib.lowering.reading.contractions import AsWritten, Pins, pinned
from shardlib.lowering.reading.convolution_groups import by_groups
from shardlib.lowering.reading.custom_calls import Site
from shardlib.lowering.reading.fused_dims import AS_WRITTEN, Interleaving
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.lowering.reading.use import Use
from shardlib.lowering.weights.reduction_plan import (
    exchange_of,
    gradient_reductions,
)
from shardlib.planning.plan import ParameterLayout, Plan
from shardlib.propagation.contractions import returned
from shardlib.tracing.program import (
    CUSTOM,
    Equation,
    has_matmul,
)
from shardlib.tracing.rewriting.binding import bind
from shardlib.tracing.rewriting.walk import Together, Walk


@dataclass(frozen=True, kw_only=True, eq=False)
class Placing(WeightPlacing):
    """How the values of a traced loss are laid out."""

    @staticmethod
    def of(
        traced: LossJaxpr,
        plan: Plan,
        mesh: Mesh | AbstractMesh,
        params: ParameterShardings,
        placements: Placements,
        interleaving: Interleaving | None = None,
        exchange: GradientExchange | None = None,
    ) -> Placing:
        """Lays a traced loss out.

        Args:
            traced: it.
            plan: the decisions.
            mesh: the mesh of the program.
            params: shardings of the parameters.
            placements: layouts of activations.
            interleaving: what it does otherwise where fused dims are interleaved.
            exchange: how partial sums of gradients are exchanged; by default as the plan says.

        Raises:
            PlanError: the exchange keeps something from step to step that the plan has no place
                for.
        """
        gradient, compute = jax.tree.leaves(params.gradient), jax.tree.leaves(params.compute)
        loss, order = traced.read(len(gradient)), parameter_order(plan, params.compute)
        uses = _in_dtypes(loss.uses, Precision.of(plan))
        matmuls_of_weights = matmuls(loss) if plan.collective_matmul == "loop" else ()
        machine = machine_of(plan, mesh, exchange or exchange_of(plan))
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
        """A walk that lays out every value that the plan places.

        Args:
            mesh: the mesh around the walk; inside of a manual region, that of the region, whose
                manual axes shard nothing there.
            loose: leave dims that the plan does not shard to the compiler, and every gradient.
        """
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
            use, pins = (
                self.uses[equation.path] if equation.path in narrow else None,
                Pins.of(equation, self.placements, mesh),
            )
            if pins is None:
                return None if use is None else [use.run(operands)]
            if use is None:
                written = by_groups(AsWritten(equation=equation), equation, pins)
                return [pinned(written, pins, operands)]
            inside = by_groups(use, equation, pins, preferred_element_type=use.product)
            return [pinned(inside, pins, use.narrowed(operands))]

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
        """The slice of a stacked parameter that one layer uses, laid out."""
        i = self.loss.slices[path]
        compute, gradient = (
            within(mesh, one_layer(shardings[i])) for shardings in (self.compute, self.gradient)
        )
        used = self._used(i, value, kernel, compute, gradient)
        return self._taken(i, used, self.interleaving.slices.get(path, {}), kernel, mesh)

    def _operands(
        self, equation: Equation, operands: Sequence[jax.Array], mesh: Mesh | AbstractMesh
    ) -> list[jax.Array]:
        """Operands of a custom call, laid out where the plan says how."""
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
        """What runs in place of custom calls, by path, with results laid out as planned."""
        machine = self.machine(mesh)
        substitutes = {
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
            for path, site in self.loss.calls.items()
        }
        return {
            path: self._placed(function, self.loss.calls[path], mesh)
            for path, function in substitutes.items()
            if function is not None
        }

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
