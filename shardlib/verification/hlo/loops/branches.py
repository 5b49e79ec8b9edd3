"""How often the branches of a conditional are taken: once, or in some of the turns of a loop.

In a pipeline in one program, microbatches enter and leave in some of its ticks.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.verification.hlo.hlo import Computation, Instruction, Module
from shardlib.verification.hlo.loops.whole_numbers import Scope, Turn, UnknownError, value

#: Turns that are followed one by one; pipelines have fewer ticks.
MOST_TURNS = 1 << 11


def turns(
    loop: Instruction, body: Computation, outside: Scope, trips: int, module: Module
) -> tuple[Turn, ...]:
    """The turns of a loop; none where there are too many to follow."""
    listed: list[Turn] = []
    for _ in range(trips if trips <= MOST_TURNS else 0):
        listed.append(Turn(module, body, loop, outside, listed[-1] if listed else None))
    return tuple(listed)


def taken(
    conditional: Instruction, scopes: Sequence[Scope], module: Module
) -> tuple[int, ...] | None:
    """How often each branch of a conditional is taken; None where the text does not say."""
    branches, counts = conditional.branches, [0] * len(conditional.branches)
    if not scopes or not branches or not conditional.operands:
        return None
    try:
        for scope in scopes:
            selector = scope.computation.by_name[conditional.operands[0]]
            number = int(value(module, selector.name, scope).reshape(-1)[0])
            if selector.shape.startswith("pred"):
                number = 0 if number else 1
            counts[number if 0 <= number < len(branches) else -1] += 1
    except (UnknownError, KeyError, ValueError, TypeError, IndexError, RecursionError):
        return None
    return tuple(counts)
