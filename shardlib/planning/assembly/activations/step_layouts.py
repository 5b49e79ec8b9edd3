"""A step graph under a choice on a mesh: how its values are sharded, held and in use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardlib.axes import BATCH_AXES, MeshShape
from shardlib.cost.items.reductions import reductions_of
from shardlib.cost.step.attention_kernels import KERNELS
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import Needed
from shardlib.graph import Op
from shardlib.layout import Layout
from shardlib.planning.decisions.activation_layout import ActivationLayout, Move
from shardlib.propagation.assignment import TOKENS, Choice, Cut, kinds

#: An activation, and the number of an op that makes or reads it.
Listed = tuple[int, ActivationLayout]


@dataclass(frozen=True, kw_only=True)
class StepLayouts:
    """A step graph under a choice on a mesh."""

    facts: Facts
    choice: Choice
    mesh: MeshShape
    context: str

    def layout(self, cut: Cut, shape: Sequence[int]) -> Layout:
        """The layout of a cut, without what does not divide the dims."""
        dims = (tuple(axis for kind in kinds(part) for axis in self.axes(kind)) for part in cut)
        return Layout(
            *(
                axes if size % self.mesh.ways(axes) == 0 else ()
                for axes, size in zip(dims, shape, strict=True)
            )
        )

    def axes(self, kind: str) -> tuple[str, ...]:
        """The axes of the mesh of a kind."""
        names = BATCH_AXES if kind == "batch" else (kind,)
        return tuple(axis for axis in names if axis in self.mesh)

    def held(self, value: int) -> Layout:
        """The layout of a value between operations."""
        return self.layout(self.facts.value_cut(value, self.choice), self.shape(value))

    def shape(self, value: int) -> tuple[int, ...]:
        """Elements per dim."""
        return self.facts.graph.values[value].shape

    def inside(self, index: int, value: int) -> Layout:
        """The layout of an operand or a result of an op while it runs."""
        op, cut = self.facts.graph.ops[index], self.facts.op_cut(index, self.choice)
        dims = dict(
            zip((*op.operands, *op.results), (*op.rule.operands, *op.rule.results), strict=True)
        )[value]
        majors = [op.rule.major(dim) for dim in dims]
        plain = self.layout(
            tuple(None if major is None else cut[major] for major in majors), self.shape(value)
        )
        exchanged = op.kind in KERNELS and self.context == "ulysses"
        if not exchanged or "context" not in self.held(value).axes:
            return plain
        return self._over_heads(plain, index, majors, self.shape(value))

    def _over_heads(
        self, layout: Layout, index: int, factors: Sequence[int | None], shape: Sequence[int]
    ) -> Layout:
        """The layout of a kernel's operand after the context axis has moved from the sequence to
        the heads; gathered along the sequence where there are too few of them.
        """
        dims = [tuple(axis for axis in axes if axis != "context") for axes in layout]
        heads = self.facts.heads[index].factors if index in self.facts.heads else frozenset[int]()
        for dim, factor in enumerate(factors):
            more = (*dims[dim], "context")
            if factor in heads and shape[dim] % self.mesh.ways(more) == 0:
                dims[dim] = more
                break
        return Layout(*dims)

    def weight(self, op: Op) -> str:
        """The parameter that a matmul or a lookup reads, "" where it reads none."""
        for value in op.operands[:2]:
            if value in self.facts.weights and op.category in ("matmul", "convolution", "gather"):
                paths = self.facts.sources[self.facts.weights[value]].paths
                parts = paths[0].split(".")
                many = len(paths) > 1
                return ".".join("*" if many and part.isdigit() else part for part in parts)
        return ""

    @cached_property
    def reductions(self) -> dict[int, list[Needed]]:
        """The reductions of activations over tensor and context, by the first op that makes what is
        reduced.
        """
        found: dict[int, list[Needed]] = defaultdict(list)
        for transfer, ops in reductions_of(self.facts, self.choice):
            if transfer.group in ("tensor", "context"):
                found[min(ops)].append((transfer, ops))
        return found

    @cached_property
    def later(self) -> frozenset[int]:
        """Ops whose results are reduced with those of one before."""
        needed = (one for some in self.reductions.values() for one in some)
        return frozenset(index for _, ops in needed for index in ops if index != min(ops))

    def described(self, name: str, value: int, moves: Iterable[Move], index: int) -> Listed:
        """The activation of a value, with the number of an op that makes or reads it."""
        made = self.facts.graph.values[value]
        region = self.facts.graph.ops[index].region
        return index, ActivationLayout(
            name=name,
            shape=made.shape,
            dtype=made.dtype,
            colours=tuple("tokens" if name == TOKENS else name for name in self.facts.names[value]),
            held=self.held(value),
            count=self.facts.trips[region],
            moves=merged(moves),
        )


def backward(op: Op) -> bool:
    return "transpose(" in op.scope and "rematted_computation" not in op.scope


def merged(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Moves that differ only in what they are of, added up."""
    found: dict[Move, dict[str, None]] = defaultdict(dict)
    for move in moves:
        found[replace(move, of=())].update(dict.fromkeys(move.of))
    return tuple(replace(move, of=tuple(names)) for move, names in found.items())


def arriving(held: Layout, read: Layout, of: str) -> Iterator[Move]:
    """The collectives by which an op gets an operand as it reads it."""
    for dim, axes in enumerate(held):
        for axis in ("tensor", "context"):
            if axis in axes and axis not in read[dim]:
                kind = "all-to-all" if axis in read.axes else "all-gather"
                yield Move(kind=kind, axes=(axis,), of=(of,), layout=read)
