"""Which matmuls of a loss gather their activation along the sequence, or scatter their result, over
the tensor axis?

A matmul gathers where its weight is sharded over tensor along columns, its activation along another
dim (the sequence, beside the norms), and its result no longer there. It scatters where tensor
shards what is summed over and the result along such a dim. Matmuls of one activation are one group:
it is gathered once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.layout import Layout
from shardlib.lowering.reading.custom_calls import Source, Step
from shardlib.lowering.reading.loss import LossReading
from shardlib.lowering.reading.use import Use
from shardlib.lowering.weights.operands import Dims, dims_of
from shardlib.planning.plan import ParameterLayout
from shardlib.tracing.program import Program

#: The mesh axis that cuts weights in use.
TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """A matmul of a weight.

    Attributes:
        use: how it uses the weight.
        activation: what the activation is, equal for equal ones.
        source: what makes it; None for inputs of the loss.
    """

    use: Use
    activation: tuple[Any, ...]
    source: Source | None

    @property
    def path(self) -> str:
        """Where it stands."""
        return self.use.equation.path

    @property
    def key(self) -> Source:
        """Where placements have the layout of the activation."""
        return f"{self.path}/operand", 1 - self.use.operand


@dataclass(frozen=True, kw_only=True)
class Found:
    """A matmul that a loop can take the place of.

    Attributes:
        matmul: the matmul.
        gathers: whether its activation is gathered; otherwise its result is scattered.
        dims: which dims are matched.
        activation, result: layouts of both.
        rows: the dim of the activation and that of the result which one of them has in shards.
    """

    matmul: Matmul
    gathers: bool
    dims: Dims
    activation: Layout
    result: Layout
    rows: tuple[int, int]


def matmuls(loss: LossReading) -> tuple[Matmul, ...]:
    """The matmuls of weights of a loss, in order."""
    candidates = [
        _matmul(step)
        for step in loss.steps
        if step.equation.name == "dot_general" and step.equation.call is None
    ]
    return tuple(matmul for matmul in candidates if matmul is not None)


def operands(matmuls_read: Sequence[Matmul]) -> dict[Source, Source]:
    """Where placements have the layouts of activations -> what makes them."""
    return {matmul.key: matmul.source for matmul in matmuls_read if matmul.source is not None}


def _matmul(step: Step) -> Matmul | None:
    equation = step.equation
    if len(step.operands) != 1:
        return None
    ((weight, view),) = step.operands
    number = equation.inputs[1 - weight]
    return Matmul(
        use=Use(equation=equation, operand=weight, view=view),
        activation=(equation.path.rpartition("/")[0], *_same(step.program, number)),
        source=step.sources[1 - weight],
    )


def _same(program: Program, number: int) -> tuple[Any, ...]:
    """A value by what it is cast from: layers cast their input anew for each matmul."""
    for equation in program.equations:
        if number in equation.outputs and equation.name == "convert_element_type":
            return (*_same(program, equation.inputs[0]), str(program.avals[number].dtype))
    return (number,)


def found_in(
    matmul: Matmul, parameter: ParameterLayout, placements: Mapping[Source, Layout], size: int
) -> Found | None:
    """How a loop can take the place of a matmul under a plan; None where its operands and result
    are sharded otherwise.
    """
    activation, result = placements.get(matmul.key), placements.get((matmul.path, 0))
    if activation is None or result is None:
        return None
    dims = dims_of(matmul.use.equation, matmul.use.operand)
    sharded = [
        dim
        for dim, source in enumerate(matmul.use.view.dims)
        if source is not None and parameter.compute[source]
    ]
    if (
        len(sharded) != 1
        or set(parameter.compute.axes) != {TENSOR}
        or parameter.compute[matmul.use.view.dims[sharded[0]] or 0] != (TENSOR,)
    ):
        return None
    gathers = sharded[0] in dims.result
    cut = (
        result[dims.result[sharded[0]]]
        if gathers
        else activation[dims.activation[sharded[0]]]
        if sharded[0] in dims.activation
        else ()
    )
    pieces, gathered = (activation, result) if gathers else (result, activation)
    pairs = [(theirs, ours) if gathers else (ours, theirs) for ours, theirs in dims.own.items()]
    rows = [(a, b) for a, b in pairs if pieces[a] == (*gathered[b], TENSOR)]
    if (
        cut != (TENSOR,)
        or len(rows) != 1
        or any(pieces[a] != gathered[b] for a, b in pairs if (a, b) != rows[0])
    ):
        return None
    ((first, second),) = rows
    first_dim, to = (first, second) if gathers else (second, first)
    if not _whole_elsewhere(
        activation, dims.own.values(), dims.activation.get(sharded[0])
    ) or not _whole_elsewhere(result, dims.own, dims.result.get(sharded[0])):
        return None
    return (
        Found(
            matmul=matmul,
            gathers=gathers,
            dims=dims,
            activation=activation,
            result=result,
            rows=(first_dim, to),
        )
        if matmul.use.other.shape[first_dim] % size == 0
        else None
    )


def _whole_elsewhere(layout: Layout, own_dims: Any, sharded: int | None) -> bool:
    """Whether nothing but its own dims, and the one that the weight is sharded along, is
    sharded.
    """
    return not any(
        layout[dim] for dim in range(len(layout)) if dim not in set(own_dims) and dim != sharded
    )


def groups(
    matches: Sequence[Found], candidates: Sequence[Matmul], placements: Mapping[Source, Layout]
) -> list[tuple[Found, ...]]:
    """Matmuls that go in one loop: those that gather the same activation, unless another one needs
    it gathered all the same; those that scatter, each on its own.
    """
    paths = {match.matmul.path for match in matches}
    barred = {
        matmul.activation
        for matmul in candidates
        if matmul.path not in paths
        and TENSOR not in placements.get((matmul.path, 0), Layout()).axes
    }
    together: dict[Any, list[Found]] = {}
    for match in matches:
        together.setdefault(
            (match.matmul.activation, match.rows[0]) if match.gathers else match.matmul.path, []
        ).append(match)
    return [
        tuple(members)
        for members in together.values()
        if not members[0].gathers or members[0].matmul.activation not in barred
    ]
