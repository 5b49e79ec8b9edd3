"""What no result needs is dropped: in loops, and from the step of a training program."""

from __future__ import annotations

import pytest

from shardlib.graph import Graph, check, forward_pass, prune
from tests.graph.graphs import array, loop, op


def paths(graph: Graph) -> list[str]:
    return [op.path for op in graph.ops]


@pytest.mark.parametrize(
    ("outputs", "kept"),
    [
        ((9,), ["0/carry/0", "0/enter/0", "0/body/0", "0/final/0"]),
        ((10,), ["0/carry/1", "0/body/1", "0/final/1"]),
        (
            (9, 10),
            [
                "0/carry/0",
                "0/carry/1",
                "0/enter/0",
                "0/body/0",
                "0/body/1",
                "0/final/0",
                "0/final/1",
            ],
        ),
        ((1,), []),
    ],
)
def test_a_carry_stays_with_what_the_body_makes_of_it(
    outputs: tuple[int, ...], kept: list[str]
) -> None:
    pruned = prune(loop(outputs))
    check(pruned)
    assert paths(pruned) == kept and pruned.values == loop().values


def step() -> Graph:
    """A loss of a parameter and a batch, its gradient, and what the forward pass keeps for it."""
    values = (
        array(4, path="w", role="parameter"),
        array(4, path="x", role="batch"),
        *(array(4) for _ in range(5)),
    )
    made = [
        ("exp", (0,), 2),
        ("sin", (2,), 3),
        ("cos", (2,), 4),
        ("neg", (4,), 5),
        ("tanh", (1,), 6),
    ]
    ops = tuple(
        op(kind, operands, result, str(number), region=0)
        for number, (kind, operands, result) in enumerate(made)
    )
    return Graph(values=values, ops=ops, inputs=(0, 1), outputs=(3, 5))


def test_the_forward_pass_is_what_the_loss_needs_and_says_what_it_keeps() -> None:
    lean = forward_pass(step(), saves=False)
    assert ([op.kind for op in lean.ops], lean.outputs) == (["exp", "sin"], (3,))
    saving = forward_pass(step(), saves=True)
    assert ([op.kind for op in saving.ops], saving.outputs) == (["exp", "sin"], (3, 2))
    check(lean)
    check(saving)
