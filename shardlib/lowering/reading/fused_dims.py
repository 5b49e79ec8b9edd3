"""How is a fused dim sharded so that each of its pieces is?

Where the tensor axis shards a fused dim (`shardlib.propagation.pieces`), the program works on it in
another order: device t of T has part t of the first piece, then part t of the second, and so on.
That is the order of Megatron-LM's fused weights, here for any pieces:

    as the model has it    q0 q1 q2 q3 k0 k1 k2 k3
    interleaved over T=2   q0 q1 k0 k1 | q2 q3 k2 k3

A split of the interleaved dim takes from every device what it has of the piece; nothing moves. Ops
that treat all positions alike (products, sums, activations) run as they are. Parameters are stored
as the model has them, and are interleaved where the program takes them: a weight of which a device
has a part of the columns is dealt out by rows first, so that the order changes on each device alone
(two all-to-alls of the device's part of the weight). Whatever else reads or makes the dim has it in
the model's order, and pays for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardlib.axes import MeshShape
from shardlib.graph.factors import Window
from shardlib.layout import Layout
from shardlib.report import Finding
from shardlib.tracing.program import Equation
from shardlib.tracing.rewriting.binding import bind
from shardlib.tracing.rewriting.walk import Run, Walk

#: Sizes of the pieces of a dim, in the model's order.
Sizes = tuple[int, ...]
#: Dims of an array that are interleaved.
Orders = Mapping[int, Sizes]


def interleaved(value: jax.Array, dim: int, sizes: Sizes, shards: int) -> jax.Array:
    """A value with the positions of a dim in the interleaved order.

    >>> interleaved(jnp.arange(8), 0, (4, 4), 2).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    return joined(cut(value, dim, sizes), dim, shards)


def in_order(value: jax.Array, dim: int, sizes: Sizes, shards: int) -> jax.Array:
    """The reverse of `interleaved`."""
    return jnp.concatenate(pieces(value, dim, sizes, shards), axis=dim)


def cut(value: jax.Array, dim: int, sizes: Sizes) -> list[jax.Array]:
    """The pieces of a dim in the model's order."""
    return jnp.split(value, list(accumulate(sizes))[:-1], axis=dim)


def pieces(value: jax.Array, dim: int, sizes: Sizes, shards: int) -> list[jax.Array]:
    """The pieces of an interleaved dim; where each device has its part of the dim, it has its part
    of every piece, and nothing moves.
    """
    seen = _seen(value, dim, (shards, value.shape[dim] // shards))
    parts = cut(seen, dim + 1, tuple(size // shards for size in sizes))
    return [
        part.reshape(*value.shape[:dim], size, *value.shape[dim + 1 :])
        for part, size in zip(parts, sizes, strict=True)
    ]


def joined(values: Sequence[jax.Array], dim: int, shards: int) -> jax.Array:
    """The reverse of `pieces`."""
    parts = [_seen(value, dim, (shards, value.shape[dim] // shards)) for value in values]
    fused = jnp.concatenate(parts, axis=dim + 1)
    return fused.reshape(*fused.shape[:dim], shards * fused.shape[dim + 1], *fused.shape[dim + 2 :])


def _seen(value: jax.Array, dim: int, sizes: tuple[int, ...]) -> jax.Array:
    return value.reshape(*value.shape[:dim], *sizes, *value.shape[dim + 1 :])


@dataclass(frozen=True, kw_only=True)
class Taken:
    """An op that takes a fused dim apart or makes one of its pieces.

    Attributes:
        dim: the fused dim.
        sizes: its pieces.
        windows: of the op.
    """

    dim: int
    sizes: Sizes
    windows: tuple[Window, ...]

    def run(
        self, equation: Equation, operands: Sequence[jax.Array], shards: int
    ) -> list[jax.Array]:
        """The results of the op; the long dim is interleaved, the short ones are not."""
        if equation.name in ("split", "slice"):
            parts = pieces(operands[0], self.dim, self.sizes, shards)
            return [self._covered(parts, window) for window in self.windows]
        if equation.name == "concatenate":
            return [
                joined(
                    [
                        piece
                        for operand, window in zip(operands, self.windows, strict=True)
                        for piece in self._cut(operand, window)
                    ],
                    self.dim,
                    shards,
                )
            ]
        assert equation.name == "pad", equation.name
        (window,) = self.windows
        before, after = window.start, sum(self.sizes) - window.start - window.size
        filled = [
            jnp.full(
                (*operands[0].shape[: self.dim], size, *operands[0].shape[self.dim + 1 :]),
                operands[1],
            )
            for size in (before, after)
        ]
        filled_dim = jnp.concatenate([filled[0], operands[0], filled[1]], axis=self.dim)
        return [joined(cut(filled_dim, self.dim, self.sizes), self.dim, shards)]

    def _covered(self, parts: Sequence[jax.Array], window: Window) -> jax.Array:
        covered = [parts[index] for index in self._inside(window)] or [
            cut(parts[0], self.dim, (0, 0))[0]
        ]
        return covered[0] if len(covered) == 1 else jnp.concatenate(covered, axis=self.dim)

    def _cut(self, operand: jax.Array, window: Window) -> list[jax.Array]:
        return cut(operand, self.dim, tuple(self.sizes[index] for index in self._inside(window)))

    def _inside(self, window: Window) -> list[int]:
        starts = [0, *accumulate(self.sizes)]
        return [
            index
            for index in range(len(self.sizes))
            if window.start <= starts[index] < window.start + window.size
        ]


@dataclass(frozen=True, kw_only=True)
class Reshaped:
    """A reshape between a fused dim of n equal pieces and a dim that counts them.

    Attributes:
        dim: the fused dim, of the operand or of the result; the counting dim has the same place on
            the other side.
        sizes: its pieces.
        apart: whether the fused dim is the operand's.
    """

    dim: int
    sizes: Sizes
    apart: bool

    def run(
        self, equation: Equation, operands: Sequence[jax.Array], shards: int
    ) -> list[jax.Array]:
        """The result of the reshape; the fused dim is interleaved."""
        (value,), shape = operands, tuple(equation.eqn.outvars[0].aval.shape)
        count, size = len(self.sizes), self.sizes[0]
        if self.apart:
            seen = _seen(value, self.dim, (shards, count, size // shards))
            return [jnp.swapaxes(seen, self.dim, self.dim + 1).reshape(shape)]
        outside = shape[: self.dim]
        inside = shape[self.dim + 1 :]
        seen = value.reshape(*outside, count, shards, size // shards, *inside)
        return [jnp.swapaxes(seen, self.dim, self.dim + 1).reshape(shape)]


@dataclass(frozen=True, kw_only=True)
class Interleaving:
    """What a program does otherwise where fused dims are interleaved.

    Attributes:
        ways: parts of every piece.
        parameters: dims of parameters that the program takes interleaved, by number.
        slices: the same for slices of stacked ones, by the path of the slice.
        special: ops that take fused dims apart, by path.
        operands: dims of operands in another order than they come in: path -> operand -> dim ->
            (pieces, whether they are to be interleaved).
        results: dims of results to be interleaved, by path and index.
        findings: fused dims that are sharded in the model's order.
    """

    ways: int = 1
    parameters: Mapping[int, Orders] = field(default_factory=dict)
    slices: Mapping[str, Orders] = field(default_factory=dict)
    special: Mapping[str, Taken | Reshaped] = field(default_factory=dict)
    operands: Mapping[str, Mapping[int, Mapping[int, tuple[Sizes, bool]]]] = field(
        default_factory=dict
    )
    results: Mapping[tuple[str, int], Orders] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def around(self, walk: Walk) -> Walk:
        """A walk that does what another does, on interleaved dims."""
        return (
            replace(walk, place=self._place(walk), run=self._run(walk.run))
            if self.ways > 1
            else walk
        )

    def _place(self, walk: Walk) -> Callable[[str, int, jax.Array], jax.Array]:
        def place(path: str, index: int, value: jax.Array) -> jax.Array:
            placed = value
            for dim, sizes in self.results.get((path, index), {}).items():
                placed = interleaved(placed, dim, sizes, self.ways)
            return walk.put(path, index, placed)

        return place

    def _run(self, inner: Run | None) -> Run:
        def run(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
            changed = self.operands.get(equation.path)
            if changed is None and equation.path not in self.special:
                return None if inner is None else inner(equation, operands)
            values = [
                self._turned(value, (changed or {}).get(position, {}))
                for position, value in enumerate(operands)
            ]
            if equation.path in self.special:
                return self.special[equation.path].run(equation, values, self.ways)
            results = None if inner is None else inner(equation, values)
            return bind(equation, values) if results is None else results

        return run

    def _turned(self, value: jax.Array, dims: Mapping[int, tuple[Sizes, bool]]) -> jax.Array:
        for dim, (sizes, to_interleaved) in dims.items():
            value = (interleaved if to_interleaved else in_order)(value, dim, sizes, self.ways)
        return value


#: Nothing is interleaved.
AS_WRITTEN = Interleaving()


def taken(
    value: jax.Array,
    orders: Orders,
    shards: int,
    forth: tuple[NamedSharding, NamedSharding],
    back: tuple[NamedSharding, NamedSharding],
) -> jax.Array:
    """A parameter as the program takes it, with interleaved dims."""

    def moved(value: Any, change: Callable[..., Any], shardings: tuple[Any, Any]) -> Any:
        stored, during = shardings
        # Pinned on both sides: otherwise the compiler makes the gradient in the layout in between,
        # and gathers activations for it.
        value = jax.lax.with_sharding_constraint(
            jax.lax.with_sharding_constraint(value, stored), during
        )
        for dim, sizes in orders.items():
            value = change(value, dim, sizes, shards)
        return jax.lax.with_sharding_constraint(
            jax.lax.with_sharding_constraint(value, during), stored
        )

    @jax.custom_vjp
    def function(value: jax.Array) -> jax.Array:
        return moved(value, interleaved, forth)

    function.defvjp(
        lambda value: (function(value), None),
        lambda _, cotangent: (moved(cotangent, in_order, back),),
    )
    return function(value)


def dealt(layout: Layout, orders: Orders, shape: Sequence[int], mesh: MeshShape) -> Layout:
    """The layout in which a parameter changes the order of its fused dims: nothing shards them;
    what did cuts another dim, where one divides.

    >>> str(dealt(Layout((), ("tensor",)), {1: (8, 8)}, (4, 16), MeshShape(tensor=4)))
    '[tensor, -]'
    """
    left = [() if dim in orders else axes for dim, axes in enumerate(layout)]
    for axis in (axis for dim in orders for axis in layout[dim]):
        fits = [
            dim
            for dim, axes in enumerate(left)
            if dim not in orders and shape[dim] % (mesh.ways(axes) * mesh[axis]) == 0
        ]
        if fits:
            left[fits[0]] = (*left[fits[0]], axis)
    return Layout(*left)
