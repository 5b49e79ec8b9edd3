"""The list: residual streams, what weights read and make, attention, experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardlib.axes import MeshShape
from shardlib.cost.step.attention_kernels import KERNELS
from shardlib.cost.step.routed_experts import routed_values
from shardlib.cost.step.step_facts import Facts
from shardlib.graph import Op
from shardlib.planning.assembly.activations.of_attention import of_kernel
from shardlib.planning.assembly.activations.step_layouts import (
    Listed,
    StepLayouts,
    arriving,
    backward,
    merged,
)
from shardlib.planning.decisions.activation_layout import ActivationLayout, Move, together
from shardlib.propagation.assignment import Choice

#: Activations that a plan lists.
MOST = 64


def activation_layouts(
    facts: Facts, choice: Choice, mesh: MeshShape, context: str, groups: Sequence[str]
) -> tuple[ActivationLayout, ...]:
    """The main activations of a step, in the order of the program, `MOST` at most."""
    at = StepLayouts(facts=facts, choice=choice, mesh=mesh, context=context)
    found: dict[tuple[object, ...], ActivationLayout] = {}
    for _, one in sorted((*_residuals(at, groups), *_used(at)), key=lambda each: each[0]):
        key = one.name, one.shape, one.dtype, one.held
        known = found.get(key)
        found[key] = one if known is None else _joined(known, one)
    return tuple(found.values())[:MOST]


def _joined(one: ActivationLayout, other: ActivationLayout) -> ActivationLayout:
    return replace(one, count=one.count + other.count, moves=merged((*one.moves, *other.moves)))


def _residuals(at: StepLayouts, groups: Sequence[str]) -> Iterator[Listed]:
    """What every layer group hands from layer to layer."""
    carried = at.facts.layers.carried
    for group, value in zip(groups, carried, strict=False):
        if value < 0:
            continue
        stages = at.axes("stage") if value == carried[0] else ()
        held = at.held(value)
        moves = [
            Move(kind="collective-permute", axes=stages, of=("stages",), layout=held)
            for _ in stages
        ]
        index = at.facts.producers[value]
        yield at.described(f"residual stream of {group}", value, moves, index)


def _used(at: StepLayouts) -> Iterator[Listed]:
    """What ops with weights and kernels of attention make and read."""
    readers: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(at.facts.graph.ops):
        if op.kind in KERNELS:
            yield from of_kernel(at, index, op)
        elif weight := at.weight(op):
            for value in op.operands:
                if _is_activation(at, op, value):
                    readers[value].append(index)
            if op.results[0] not in at.facts.gradients:
                yield from _result(at, index, op, weight)
        elif op.category == "matmul" and op.results[0] in at.facts.gradients:
            for value in op.operands:
                readers[value].append(index)
    for value, ops in readers.items():
        yield from _operand(at, value, ops)
    yield from _routed(at)


def _routed(at: StepLayouts) -> Iterator[Listed]:
    """Rows of tokens that are dispatched to their experts and combined again."""
    facts = at.facts
    if not facts.routes or at.choice.expert is None or "expert" not in at.mesh:
        return
    for index, value in routed_values(facts.graph, facts.names, facts.batch):
        move = Move(kind="all-to-all", axes=("expert",), of=("experts",), layout=at.held(value))
        name = (
            "gradient of rows of experts" if backward(facts.graph.ops[index]) else "rows of experts"
        )
        yield at.described(name, value, [move], index)


def _is_activation(at: StepLayouts, op: Op, value: int) -> bool:
    return (
        value not in at.facts.weights
        and "float" in at.facts.graph.values[value].dtype
        and op.category != "gather"
    )


def _result(at: StepLayouts, index: int, op: Op, weight: str) -> Iterator[Listed]:
    """What an op with a weight makes, which may be partial sums."""
    value, back = op.results[0], backward(op)
    if index in at.later or (back and index not in at.reductions):
        return
    made, names = at.inside(index, value), dict.fromkeys([weight])
    moves: list[Move] = []
    for transfer, ops in at.reductions.get(index, ()):
        of = tuple(name for one in ops if (name := at.weight(at.facts.graph.ops[one])))
        names |= dict.fromkeys(of)
        axes = at.axes(transfer.group)
        if axes:
            moves.append(Move(kind=transfer.kind, axes=axes, of=of, layout=made, before=True))
    if back and not moves:
        return
    name = f"{'gradient of the input' if back else 'output'} of {together(names)}"
    logits = not back and op.category == "matmul" and at.facts.names[value][-1] == "vocab"
    yield at.described(f"logits, {name}" if logits else name, value, moves, index)


def _operand(at: StepLayouts, value: int, readers: Sequence[int]) -> Iterator[Listed]:
    """What ops with weights read, and gradients of weights with them; listed where it is moved."""
    held, moves = at.held(value), list[Move]()
    ops = [(index, at.facts.graph.ops[index]) for index in readers]
    for index, op in ops:
        of = at.weight(op) or "gradients of weights"
        moves += arriving(held, at.inside(index, value), of)
    named = [(op, weight) for _, op in ops if (weight := at.weight(op))]
    weights = together(weight for _, weight in named)
    if moves and weights:
        back = all(backward(op) for op, _ in named)
        name = f"gradient of the output of {weights}" if back else f"input of {weights}"
        yield at.described(name, value, moves, readers[0])
