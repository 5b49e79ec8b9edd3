"""How do manual regions and explicit gathers speak of the mesh?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import jax
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.jax_types import Function
from shardlib.lowering.mesh.device_mesh import parts_of
from shardlib.lowering.mesh.gradient_exchange import GradientExchange, InDtype
from shardlib.planning.plan import Plan

#: Partial sums are sent as they are.
PLAIN = InDtype()

#: Mesh axes per dim; dims that are not sharded may be left out.
Cuts = dict[int, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the reduction of gradients runs on.

    Attributes:
        mesh: the mesh of the program.
        torus: whether some of its links form a torus.
        exchange: how partial sums of gradients are exchanged.
    """

    mesh: Mesh | AbstractMesh
    torus: bool
    exchange: GradientExchange = PLAIN

    def parts(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The names that mesh axes have in the mesh."""
        return parts_of(self.mesh, axes)

    def ways(self, axes: Sequence[str]) -> int:
        """Number of pieces of a dim that is sharded over axes."""
        size = 1
        for part in self.parts(axes):
            size *= self.mesh.shape[part]
        return size

    def spec(self, cuts: Cuts, rank: int) -> PartitionSpec:
        """How each dim is sharded, as JAX says it."""
        return PartitionSpec(*(self.parts(cuts.get(dim, ())) or None for dim in range(rank)))

    def manual(
        self,
        function: Function,
        arguments: tuple[PartitionSpec, ...],
        result: PartitionSpec | tuple[PartitionSpec, ...],
    ) -> Function:
        """A function of what one device holds as a function of whole arrays; axes that are manual
        around it stay so.
        """
        automatic = {
            name
            for name, kind in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
            if kind != AxisType.Manual
        }
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(self._with_single(spec, automatic) for spec in arguments),
            out_specs=(
                self._with_single(result, automatic)
                if isinstance(result, PartitionSpec)
                else tuple(self._with_single(spec, automatic) for spec in result)
            ),
            axis_names=automatic,
            check_vma=False,
        )

    def _with_single(self, spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
        """A spec whose first dim is also sharded over those axes of one device that it leaves out.

        JAX reduces the gradient of what is not sharded over an axis along it, and the compiler for
        simulated devices keeps a reduction among single devices: a copy of the gradient.
        """
        named = {name for dim in spec for name in ([dim] if isinstance(dim, str) else dim or ())}
        single = [
            name
            for name, size in self.mesh.shape.items()
            if size == 1 and name in axes and name not in named
        ]
        if not len(spec) or not single:
            return spec
        first = (spec[0],) if isinstance(spec[0], str) else spec[0] or ()
        return PartitionSpec((*first, *single), *spec[1:])

    def gathered(self, array: jax.Array, dim: int, axes: Sequence[str]) -> jax.Array:
        """A device's shard of an array as the whole, along a dim that is sharded over axes; inside
        of a manual region. See `gather`.
        """
        parts = self.parts(axes)
        if parts and dim and not self.torus:
            array = row_major(array)
        for group in (
            [(part,) for part in reversed(parts)]
            if self.torus and len(parts) > 2
            else [parts]
            if parts
            else []
        ):
            array = jax.lax.all_gather(array, group, axis=dim, tiled=True)
        return array

    def gather(
        self, shape: Sequence[int], pieces: Cuts | None, cuts: Cuts
    ) -> Callable[[jax.Array], jax.Array]:
        """A function that gathers an array.

        One all-gather over all parts of an axis; on a torus of three dims, where the TPU compiler
        makes an all-reduce of that, one part after another, the minor one first.

        Args:
            pieces: how the array comes; None, or cuts that do not refine `cuts`, leave the way to
                the compiler.
        """
        rank = len(shape)
        if pieces is None or any(
            pieces.get(dim, ())[: len(cuts.get(dim, ()))] != cuts.get(dim, ())
            or shape[dim] % self.ways(pieces.get(dim, ()))
            for dim in range(rank)
        ):
            sharding = NamedSharding(self.mesh, self.spec(cuts, rank))
            return lambda array: jax.lax.with_sharding_constraint(array, sharding)
        missing = {dim: axes[len(cuts.get(dim, ())) :] for dim, axes in pieces.items()}

        def local(array: jax.Array) -> jax.Array:
            for dim, axes in missing.items():
                array = self.gathered(array, dim, axes)
            return array

        return self.manual(local, (self.spec(pieces, rank),), self.spec(cuts, rank))


def row_major(array: jax.Array) -> jax.Array:
    """An array with its last dim innermost in memory.

    Collectives of GPUs want the dim that they work on outermost. Left alone, XLA lays out the whole
    stack that a loop takes the array from, or puts it into, in that order: a copy of all layers at
    once.
    """
    return with_layout_constraint(array, ArrayLayout(major_to_minor=tuple(range(array.ndim))))


def machine_of(
    plan: Plan, mesh: Mesh | AbstractMesh, exchange: GradientExchange | None = None
) -> Machine:
    """The machine that a plan's program runs on; by default gradients are sent in their dtype."""
    return Machine(
        mesh=mesh,
        torus=any(link.kind == "torus" for _, links in plan.placement for link in links),
        exchange=exchange or PLAIN,
    )
