"""What takes the place of matmuls that gather the sequence for their activation, or scatter their
result along it?

One program for a group of matmuls of one activation: in place of an all-gather before them, pieces
go around the tensor axis and each is multiplied by all weights while the next is on its way; in
place of a reduce-scatter after a matmul, sums go around while the next part of them is made. The
backward pass is made of the same loops. Weights that are stored sharded are gathered, and their
gradients reduced over the batch, as everywhere (`lowering/weights/gradients.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardlib.layout import Layout
from shardlib.lowering.collective_matmul.matmuls import TENSOR, Found, Matmul, found_in, groups
from shardlib.lowering.collective_matmul.products import (
    Product,
    gathering,
    gathering_back,
    scattering,
    scattering_back,
)
from shardlib.lowering.collective_matmul.ring import Ring
from shardlib.lowering.mesh.collectives import Cuts, Machine
from shardlib.lowering.reading.custom_calls import Source
from shardlib.lowering.weights.contraction import Contraction
from shardlib.lowering.weights.gathering import in_use
from shardlib.lowering.weights.reduction import reduction
from shardlib.planning.plan import ParameterLayout
from shardlib.tracing.rewriting.remat_policies import IN_PIECES
from shardlib.tracing.rewriting.walk import Together


def loops(
    candidates: Sequence[Matmul],
    parameters: Callable[[Matmul], ParameterLayout],
    placements: Mapping[Source, Layout],
    machine: Machine,
) -> dict[str, Together]:
    """What runs in place of matmuls, by path of each."""
    size = machine.ways((TENSOR,))
    if size == 1:
        return {}
    matches = [
        match
        for matmul in candidates
        if (match := found_in(matmul, parameters(matmul), placements, size)) is not None
    ]
    ring = Ring.along(
        machine.parts((TENSOR,)),
        tuple(machine.mesh.shape[part] for part in machine.parts((TENSOR,))),
        in_turn=not machine.torus,
    )
    by_path: dict[str, Together] = {}
    for members in groups(matches, candidates, placements):
        paths = tuple(member.matmul.path for member in members)
        loop = Loop(
            ring=ring,
            machine=machine,
            members=tuple(
                _member(member, parameters(member.matmul), machine) for member in members
            ),
            gathers=members[0].gathers,
            activation=machine.spec(
                dict(enumerate(members[0].activation)), len(members[0].activation)
            ),
        )
        by_path |= dict.fromkeys(paths, Together(paths=paths, run=loop.run))
    return by_path


@dataclass(frozen=True, kw_only=True)
class Member:
    """A matmul in a loop.

    Attributes:
        product: what one device does.
        weight: which operand the weight is.
        gather: the weight as it rests -> in use.
        held: how the weight is sharded in use.
        result: how the result is sharded.
    """

    product: Product
    weight: int
    gather: Callable[[jax.Array], jax.Array]
    held: jax.sharding.PartitionSpec
    result: jax.sharding.PartitionSpec


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop over the devices of the tensor axis.

    Attributes:
        ring: the devices.
        machine: where it runs.
        members: the matmuls; one where it scatters.
        gathers: whether it gathers the activation; otherwise it scatters the result.
        activation: how the activation is sharded.
    """

    ring: Ring
    machine: Machine
    members: tuple[Member, ...]
    gathers: bool
    activation: jax.sharding.PartitionSpec

    def run(self, operands: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """The results of all matmuls, from the operands of each."""
        activation = operands[0][1 - self.members[0].weight]
        results = self._differentiable(
            activation,
            *(arrays[member.weight] for member, arrays in zip(self.members, operands, strict=True)),
        )
        return [checkpoint_name(result, IN_PIECES) for result in results]

    @property
    def _differentiable(self) -> Callable[..., tuple[Any, ...]]:
        run = jax.custom_vjp(self._forward)
        run.defvjp(lambda *operands: (self._forward(*operands), operands), self._backward)
        return run

    def _gathered(self, weights: Sequence[jax.Array]) -> list[jax.Array]:
        return [member.gather(weight) for member, weight in zip(self.members, weights, strict=True)]

    def _forward(self, activation: Any, *weights: Any) -> tuple[Any, ...]:
        products = [member.product for member in self.members]

        def local(activation: Any, *weights: Any) -> tuple[Any, ...]:
            if self.gathers:
                return gathering(products, self.ring, activation, weights)
            return (scattering(products[0], self.ring, activation, weights[0]),)

        specs, results = (
            (self.activation, *(member.held for member in self.members)),
            tuple(member.result for member in self.members),
        )
        return self.machine.manual(local, specs, results)(activation, *self._gathered(weights))

    def _backward(self, saved: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        activation, *weights = saved
        products, count = [member.product for member in self.members], len(self.members)

        def local(activation: Any, *arrays: Any) -> tuple[Any, ...]:
            weights, cotangents = arrays[:count], arrays[count:]
            if self.gathers:
                back, sums = gathering_back(products, self.ring, activation, weights, cotangents)
            else:
                back, to_weight = scattering_back(
                    products[0], self.ring, activation, weights[0], cotangents[0]
                )
                sums = (to_weight,)
            return back, *(
                product.parts.plan.apply(partial, self.machine)
                for product, partial in zip(products, sums, strict=True)
            )

        specs = (
            self.activation,
            *(member.held for member in self.members),
            *(member.result for member in self.members),
        )
        weight_specs = (self.activation, *(product.parts.kept for product in products))
        return self.machine.manual(local, specs, weight_specs)(
            activation, *self._gathered(weights), *cotangents
        )


def _member(match: Found, parameter: ParameterLayout, machine: Machine) -> Member:
    use = match.matmul.use
    cuts: Cuts = {
        dim: (TENSOR,)
        for dim, source in enumerate(use.view.dims)
        if source is not None and parameter.compute[source]
    }
    partial = tuple(axis for dim in match.dims.own for axis in match.result[dim] if axis != TENSOR)
    plan, rank = reduction(use, parameter.gradient, partial, machine, cuts), len(use.shape)
    specs = (
        machine.spec(dict(enumerate(match.activation)), len(match.activation)),
        machine.spec(dict(enumerate(match.result)), len(match.result)),
    )
    parts = Contraction(
        use=use,
        plan=plan,
        held=cuts,
        partial=partial,
        arguments=specs,
        kept=machine.spec(
            {dim: (*cuts.get(dim, ()), *plan.scattered.get(dim, ())) for dim in range(rank)}, rank
        ),
        local_shape=tuple(
            size // machine.ways(cuts.get(dim, ())) for dim, size in enumerate(use.shape)
        ),
    )
    return Member(
        product=Product(parts=parts, activation=match.rows[0], result=match.rows[1]),
        weight=use.operand,
        gather=in_use(use, parameter, machine),
        held=machine.spec(cuts, rank),
        result=specs[1],
    )
