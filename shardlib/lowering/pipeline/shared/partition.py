"""Where does a traced loss fall apart into what comes before the layers, the layers, and what comes
after them?

The loop over layers, and what its operands are, stands in
`shardlib.lowering.pipeline.shared.layer_loop`. What travels hops from stage to stage; stacked
results of the layers that the rest of the loss reads travel too, in a buffer that every stage
writes its layers' slices into.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardlib._jax_compat import scan_counts
from shardlib.errors import PlanError
from shardlib.lowering.pipeline.shared.layer_loop import (
    BATCH,
    FROZEN,
    KEY,
    PARAMETERS,
    STATE,
    Roles,
    loop_over_layers,
    roles_of,
)
from shardlib.tracing.program import Equation, Program
from shardlib.tracing.rewriting.dependence import Labels, dependence, needed

#: Arrays in some order.
Arrays = list[Any]
#: Arrays by number of the value in the traced loss.
Values = dict[int, Any]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A loss around its loop over layers. Values are numbers of `program`.

    Attributes:
        program: the loss over the leaves of (params, state, batch).
        loop: the scan over layers.
        layers: number of layers.
        labels: what each value is made from.
        roles: what the operands of the loop are.
        exits: positions among the stacked results of the loop that are read after it.
        once: equations that need parameters alone, done once a step.
        kept: values made from parameters, or from nothing, that the rest reads.
        before: equations of a microbatch that the loop needs.
        after: equations of a microbatch that loss and metrics need, those of `before` that they
            read included; the loop is in neither.
        results: values of loss and metrics.
        state: values of the model state after the step.
    """

    program: Program
    loop: Equation
    layers: int
    labels: Mapping[int, Labels]
    roles: Roles
    exits: tuple[int, ...]
    once: tuple[Equation, ...]
    kept: tuple[int, ...]
    before: tuple[Equation, ...]
    after: tuple[Equation, ...]
    results: tuple[int, ...]
    state: tuple[int, ...]

    @property
    def frozen_tables(self) -> tuple[int, ...]:
        """Those of `Roles.tables` that are made from frozen parameters."""
        return tuple(k for k in self.roles.tables if self.labels[self.scanned[k]])

    @property
    def constants(self) -> tuple[int, ...]:
        """Constant operands of the loop."""
        return self.loop.inputs[: scan_counts(self.loop.params)[0]]

    @property
    def carry(self) -> tuple[int, ...]:
        """Initial carry of the loop."""
        constants, carried = scan_counts(self.loop.params)
        return self.loop.inputs[constants : constants + carried]

    @property
    def scanned(self) -> tuple[int, ...]:
        """Scanned operands of the loop."""
        return self.loop.inputs[sum(scan_counts(self.loop.params)) :]

    @property
    def entering(self) -> tuple[int, ...]:
        """Values that enter the first stage: the carry, then what travels with it."""
        return (*self.carry, *(self.constants[k] for k in self.roles.activations))

    @property
    def final(self) -> tuple[int, ...]:
        """Results of the loop that hold the carry after the last layer."""
        return self.loop.outputs[: len(self.carry)]

    @property
    def stacked(self) -> tuple[int, ...]:
        """Results of the loop that hold what is read of the layers' own results."""
        return tuple(self.loop.outputs[len(self.carry) + k] for k in self.exits)

    @cached_property
    def read_outside(self) -> frozenset[int]:
        """Values that are read before and after the loop, and those that enter the first stage or
        are results.
        """
        return frozenset(
            number for equation in (*self.before, *self.after) for number in equation.inputs
        ) | {*self.entering, *self.results}

    @cached_property
    def owners(self) -> Mapping[int, int]:
        """Value -> position of the parameter that it is, or is a cast of."""
        positions = {
            number: position
            for position, number in enumerate(self.program.inputs)
            if self.labels[number] in (frozenset({PARAMETERS}), frozenset({FROZEN}))
        }
        for equation in self.once:
            if equation.name == "convert_element_type" and equation.inputs[0] in positions:
                positions[equation.outputs[0]] = positions[equation.inputs[0]]
        return positions


def cut(
    program: Program,
    parameters: int,
    state: int,
    results: int,
    keys: Collection[int] = (),
    frozen: Collection[int] = (),
) -> Cut:
    """Cuts a loss around its loop over layers."""
    labels = dependence(program, _kinds(len(program.inputs), parameters, state, keys, frozen))
    loop = loop_over_layers(program, labels)
    constants, carried = scan_counts(loop.params)
    outputs, after_state = program.outputs[:results], program.outputs[results:]
    _require_own_state(labels, after_state)
    once, alone = _once(program, loop, parameters)
    done = {loop.path, *(equation.path for equation in once)}
    mixed = [equation for equation in program.equations if equation.path not in done]
    roles = roles_of(loop, labels, alone)
    entering = [
        *loop.inputs[constants : constants + carried],
        *(loop.inputs[k] for k in roles.activations),
    ]
    before, reads_before = needed(mixed, entering)
    after, reads_after = needed(mixed, outputs)
    reads = {*reads_before, *reads_after, *loop.inputs}
    return Cut(
        program=program,
        loop=loop,
        layers=loop.params["length"],
        labels=labels,
        roles=roles,
        exits=tuple(k for k, number in enumerate(loop.outputs[carried:]) if number in reads_after),
        once=tuple(once),
        kept=tuple(
            sorted(
                number for number in reads if number in alone and number not in program.constants
            )
        ),
        before=tuple(before),
        after=tuple(after),
        results=outputs,
        state=after_state,
    )


def _kinds(
    inputs: int, parameters: int, state: int, keys: Collection[int], frozen: Collection[int]
) -> list[Labels]:
    """What each input of a loss is, see `cut`."""

    def kind(position: int) -> str:
        if position in frozen:
            return FROZEN
        if position < parameters:
            return PARAMETERS
        if position < parameters + state:
            return STATE
        return KEY if position in keys else BATCH

    return [frozenset({kind(position)}) for position in range(inputs)]


def _require_own_state(labels: Mapping[int, Labels], state: Sequence[int]) -> None:
    """Raises where the model state after a step is made from more than that before it."""
    made_from = frozenset[str]().union(*(labels[number] for number in state))
    if not made_from <= {STATE}:
        raise PlanError(
            "the model state that a step leaves is made from"
            f" {' and '.join(sorted(made_from - {STATE}))}, and microbatches of a pipeline are"
            " under way together\nTry: a plan without stages (mesh axis stage=1), or a model whose"
            " state depends on nothing but itself, random streams for example"
        )


def _once(program: Program, loop: Equation, parameters: int) -> tuple[list[Equation], set[int]]:
    """The equations that need nothing but parameters, and all values that are known with them."""
    values = {*program.constants, *program.inputs[:parameters]}
    equations: list[Equation] = []
    for equation in program.equations:
        if equation is not loop and values.issuperset(equation.inputs):
            equations.append(equation)
            values.update(equation.outputs)
    return equations, values
