"""Gradients that a step takes outside of the losses that it marks, as with `jax.value_and_grad`.

They are computed as they are written: on the whole batch, with what the user rematerialises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardlib.tracing.program import Equation, Program
from shardlib.tracing.steps.marked_losses import FoundLoss


@dataclass(frozen=True, kw_only=True)
class UnmarkedGradients:
    """Gradients that a step takes outside of its marked losses.

    Attributes:
        gradients: number of a weight among the state -> the value of the program that is its
            gradient.
        unknown: weights that are trained outside of the losses, where no such value is found: in a
            loop, or a branch, that has a marked loss, too.
    """

    gradients: Mapping[int, int] = field(default_factory=dict[int, int])
    unknown: tuple[int, ...] = ()


def unmarked_gradients(
    program: Program,
    values: Mapping[int, int],
    gradients: Mapping[int, int],
    losses: Sequence[FoundLoss],
    state: int,
) -> UnmarkedGradients:
    """The gradients that a step takes outside of its marked losses; none where it marks none.

    Args:
        values: number of a value of the program -> value of its graph.
        gradients: weight -> the value of the graph that is its gradient.
    """
    if not losses:
        return UnmarkedGradients()
    marked = {root for loss in losses for root in (loss.roots[leaf] for leaf in loss.trained)}
    calls = {loss.call.path for loss in losses}
    makers = {number: equation for equation in program.equations for number in equation.outputs}
    numbers = {value: number for number, value in values.items() if number in makers}
    batch = {*program.inputs[state:]}
    gradient_numbers: dict[int, int] = {}
    for position, value in gradients.items():
        number = numbers.get(value)
        if number is None or _marked(makers[number], calls):
            continue
        if position not in marked or not batch.isdisjoint(_read(number, makers, calls)):
            gradient_numbers[position] = number
    unknown = tuple(
        weight for weight in gradients if weight not in gradient_numbers and weight not in marked
    )
    return UnmarkedGradients(gradients=gradient_numbers, unknown=unknown)


def _marked(equation: Equation, calls: set[str]) -> bool:
    """Whether an equation is one of a marked loss, or has one inside."""
    inside = equation.call is not None and equation.call.path in calls
    return inside or any(path.startswith(f"{equation.path}/") for path in calls)


def _read(number: int, makers: Mapping[int, Equation], calls: set[str]) -> set[int]:
    """The values that one is made of, up to marked losses."""
    seen, waiting = {number}, [number]
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is None or _marked(maker, calls):
            continue
        fresh = [operand for operand in maker.inputs if operand not in seen]
        seen.update(fresh)
        waiting.extend(fresh)
    return seen
