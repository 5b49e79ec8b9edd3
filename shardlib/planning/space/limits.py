"""What a model allows, whatever is pinned: sizes of its batch and its sequence, its layers and
experts, and the colours that the tensor axis may shard; and what the framework can do that runs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardlib.cost.terms.abilities import ANYTHING, Abilities
from shardlib.graph.problem import Problem
from shardlib.propagation.colours import Colouring

#: Largest number of colours whose subsets are all tried for the tensor axis: those that take part
#: in the most FLOPs.
MAX_TENSOR_COLOURS = 6
#: Largest number of gradient accumulation steps that is tried.
MAX_MICROBATCHES = 256


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model, and the framework that runs it, allow, beside its colours.

    Attributes:
        batch: examples in the batch.
        sequence: positions; 1 where there is no sequence.
        layers: layers of the largest class; 0 without layers.
        experts: experts; 1 without.
        splits: whether the batch can be worked through in parts with the numbers of the whole.
        staged: whether microbatches can go through pipeline stages.
        groups: layer groups.
        able: what the framework can do.
    """

    batch: int
    sequence: int
    layers: int
    experts: int
    splits: bool = True
    staged: bool = True
    groups: int = 1
    able: Abilities = ANYTHING


def experts_form(problem: Problem) -> str:
    """How many tokens the experts of a model take: all of them ("dropless"), or as many as there is
    room for ("capacity").
    """
    return "capacity" if "capacity" in problem.functions else "dropless"


def batch_size(problem: Problem, colouring: Colouring) -> int:
    """Greatest common divisor of the batch dims of the batch arrays, examples; 1 where nothing is
    named a batch.
    """
    name = colouring.batch_colour
    sizes = [
        shape[dim]
        for path, shape, _, _ in problem.batch
        for dim, axis in enumerate(colouring.batch[path])
        if axis == name
    ]
    return math.gcd(*sizes) if sizes and name else 1


def sequence_size(problem: Problem, colouring: Colouring) -> int:
    """Greatest common divisor of the sequence dims of the batch arrays, positions; 1 where there is
    none.
    """
    name = colouring.sequence_colour
    sizes = [
        shape[dim]
        for path, shape, _, _ in problem.batch
        for dim, axis in enumerate(colouring.batch[path])
        if axis == name
    ]
    return math.gcd(*sizes) if sizes and name else 1


def sequences_text(problem: Problem, colouring: Colouring, parts: str) -> str:
    """What a message says of the sequences of a model: their lengths, which some number of parts
    does not divide, or why there is none to shard.
    """
    name = colouring.named_sequence
    if name is None:
        return "has no sequence"
    if colouring.colours[name].walked:
        return "walks along its sequence in a loop, one position after the other"
    lengths = {
        shape[dim]
        for path, shape, _, _ in problem.batch
        for dim, axis in enumerate(colouring.batch[path])
        if axis == name
    }
    listed = " and ".join(map(str, sorted(lengths)))
    return (
        f"has sequences of {listed}, which {parts} not divide{'' if len(lengths) < 2 else ' all'}"
    )


def tensor_colours(colouring: Colouring) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Colours whose subsets are all tried for the tensor axis, the most specific first, and those
    beyond `MAX_TENSOR_COLOURS`, those of the most FLOPs first.
    """
    by_use = sorted(
        colouring.shardable, key=lambda c: (-c.flops * math.log2(c.divisor + 1), c.name)
    )
    searched = (c.name for c in by_use[:MAX_TENSOR_COLOURS])
    return most_specific_first(searched, colouring), tuple(
        c.name for c in by_use[MAX_TENSOR_COLOURS:]
    )


def most_specific_first(names: Iterable[str], colouring: Colouring) -> tuple[str, ...]:
    """Colours in the order of their priority for the tensor axis."""
    return tuple(sorted(names, key=lambda name: (colouring.colours[name].matmuls, name)))
