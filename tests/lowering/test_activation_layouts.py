"""A plan says where activations are gathered; the compiled program does it there, with the shards
that the plan says.
"""

from __future__ import annotations

import re

import optax

from tests.lowering import small

#: "%name = f32[8,4,16]{...} op(%operand"
_MADE = re.compile(r"(%[\w.-]+) = f32\[([\d,]*)\]\S* ([\w-]+)\((%[\w.-]+)?")
PIN = {
    "mesh": {"data": 2, "tensor": 4},
    "rules": {"batch": ["data"], "mlp": ["tensor"], "seq": ["tensor"]},
}


def gathers(text: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes before and after the gathers of arrays with a batch in a compiled program."""
    made = {name: (shape, op, first) for name, shape, op, first in _MADE.findall(text)}
    sizes = {
        name: tuple(int(n) for n in shape.split(",") if n) for name, (shape, _, _) in made.items()
    }
    found = [
        (sizes[first], sizes[name]) for name, (_, op, first) in made.items() if op == "all-gather"
    ]
    return [tuple(tuple(n for n in shape if n > 1) for shape in pair) for pair in found]


def test_what_the_plan_gathers_the_program_gathers():
    program = small.program(optax.sgd(0.1), PIN)
    plan = program.plan
    moved = [
        (one.held.local_shape(one.shape, plan.mesh), move.layout.local_shape(one.shape, plan.mesh))
        for one in plan.activations
        for move in one.moves
        if move.kind == "all-gather"
    ]
    planned = {tuple(tuple(n for n in shape if n > 1) for shape in pair) for pair in moved}
    assert planned == {((8, 16), (8, 4, 16))}  # the sequence, of an input and of a gradient
    assert planned == set(gathers(program.compiled().as_text()))


def test_without_a_sharded_sequence_nothing_is_gathered_and_sums_are_reduced():
    rules = {"batch": ["data"], "mlp": ["tensor"], "vocab": []}
    program = small.program(optax.sgd(0.1), {**PIN, "rules": rules})
    moves = [move for one in program.plan.activations for move in one.moves]
    assert {(move.kind, move.before) for move in moves} == {("all-reduce", True)}
    assert gathers(program.compiled().as_text()) == []
