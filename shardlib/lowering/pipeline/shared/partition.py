"""Where does a traced loss fall apart into what comes before the layers, the layers, and what comes
after them?

The loop over layers is the scan that multiplies matrices; of several, the one with the most layers,
the last of equals. Every value of the loss is labelled with what it is made from (parameters,
frozen ones, model state, batch), and every operand of the loop gets a role:

    weights      made from trained parameters, one slice a layer: sharded over the stages
    tables       made from frozen parameters or from nothing (flags and the like), one slice a
                 layer: sharded over the stages
    drawn        made from model state, or from keys of the batch, one slice a layer: random keys;
                 another value in every microbatch
    shared       made from trained parameters, the same for all layers
    travelling   the loop's carry, and what is made from the batch (masks, positions, encoder
                 outputs): hops from stage to stage

Stacked results of the layers that the rest of the loss reads travel too, in a buffer that every
stage writes its layers' slices into.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardlib._jax_compat import scan_counts
from shardlib.errors import PlanError
from shardlib.tracing.program import Equation, Program, has_matmul
from shardlib.tracing.rewriting.dependence import Labels, dependence, needed

PARAMETERS, FROZEN, STATE, BATCH, KEY = "parameters", "frozen parameters", "state", "batch", "key"
#: Arrays in some order.
Arrays = list[Any]
#: Arrays by number of the value in the traced loss.
Values = dict[int, Any]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What the operands of the loop are, by position.

    Attributes:
        weights, tables, drawn: positions among the scanned operands.
        shared, constant, travelling: positions among the constant operands; `constant` are made
            from frozen parameters or from nothing.
    """

    weights: tuple[int, ...]
    tables: tuple[int, ...]
    drawn: tuple[int, ...]
    shared: tuple[int, ...]
    constant: tuple[int, ...]
    travelling: tuple[int, ...]


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
        return (*self.carry, *(self.constants[k] for k in self.roles.travelling))

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
        found = {
            number: position
            for position, number in enumerate(self.program.inputs)
            if self.labels[number] in (frozenset({PARAMETERS}), frozenset({FROZEN}))
        }
        for equation in self.once:
            if equation.name == "convert_element_type" and equation.inputs[0] in found:
                found[equation.outputs[0]] = found[equation.inputs[0]]
        return found


def cut(
    program: Program,
    parameters: int,
    state: int,
    results: int,
    keys: Collection[int] = (),
    frozen: Collection[int] = (),
) -> Cut:
    """Cuts a loss around its loop over layers.

    Args:
        program: the loss over the leaves of (params, state, batch).
        parameters: how many inputs are parameters.
        state: how many are model state.
        results: how many outputs are loss and metrics; the rest is model state.
        keys: positions of inputs that are random keys of a whole microbatch.
        frozen: positions of the parameters that are not trained.

    Raises:
        PlanError: there is no such loop, or its layers are tied together by more than what can
            travel between stages.
    """
    kinds = [
        (
            FROZEN
            if i in frozen
            else (
                PARAMETERS
                if i < parameters
                else STATE
                if i < parameters + state
                else KEY
                if i in keys
                else BATCH
            )
        )
        for i in range(len(program.inputs))
    ]
    inputs = [frozenset({kind}) for kind in kinds]
    labels = dependence(program, inputs)
    loop = _loop(program)
    constants, carried = scan_counts(loop.params)
    outputs, after_state = program.outputs[:results], program.outputs[results:]
    made_from = frozenset[str]().union(*(labels[number] for number in after_state))
    if not made_from <= {STATE}:
        raise PlanError(
            "the model state that a step leaves is made from"
            f" {' and '.join(sorted(made_from - {STATE}))}, and microbatches of a pipeline are"
            " under way together\nTry: a plan without stages (mesh axis stage=1), or a model whose"
            " state depends on nothing but itself, random streams for example"
        )
    once, alone = _once(program, loop, parameters)
    done = {loop.path, *(equation.path for equation in once)}
    mixed = [equation for equation in program.equations if equation.path not in done]
    roles = {
        k: _role(number, labels[number], alone, k, loop)
        for k, number in enumerate(loop.inputs[constants + carried :])
    }
    fixed = {
        k: "shared" if PARAMETERS in labels[number] else "constant"
        for k, number in enumerate(loop.inputs[:constants])
        if number in alone
    }
    entering = [
        *loop.inputs[constants : constants + carried],
        *(loop.inputs[k] for k in range(constants) if k not in fixed),
    ]
    before, reads_before = needed(mixed, entering)
    after, reads_after = needed(mixed, outputs)
    reads = {*reads_before, *reads_after, *loop.inputs}
    return Cut(
        program=program,
        loop=loop,
        layers=loop.params["length"],
        labels=labels,
        roles=Roles(
            weights=tuple(k for k, role in roles.items() if role == "weights"),
            tables=tuple(k for k, role in roles.items() if role == "tables"),
            drawn=tuple(k for k, role in roles.items() if role == "drawn"),
            shared=tuple(k for k, role in fixed.items() if role == "shared"),
            constant=tuple(k for k, role in fixed.items() if role == "constant"),
            travelling=tuple(k for k in range(constants) if k not in fixed),
        ),
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


def _loop(program: Program) -> Equation:
    """The scan over layers.

    Raises:
        PlanError: there is none.
    """
    loops = [
        equation
        for equation in program.equations
        if equation.name == "scan" and has_matmul(equation.eqn)
    ]
    if not loops:
        names = (
            ", ".join(
                dict.fromkeys(
                    equation.name for equation in program.equations if has_matmul(equation.eqn)
                )
            )
            or "none"
        )
        raise PlanError(
            "a pipeline needs layers that repeat, and the loss has none at its top level;"
            f" operations that multiply matrices: {names}\nTry: layers under one jax.lax.scan"
            " (nnx.vmap over the constructor, or nn.scan in Linen), or equal layers one after"
            " another; or a plan without stages"
        )
    return max(reversed(loops), key=lambda equation: equation.params["length"])


def _once(program: Program, loop: Equation, parameters: int) -> tuple[list[Equation], set[int]]:
    """The equations that need nothing but parameters, and all values that are known with them."""
    known = {*program.constants, *program.inputs[:parameters]}
    found: list[Equation] = []
    for equation in program.equations:
        if equation is not loop and known.issuperset(equation.inputs):
            found.append(equation)
            known.update(equation.outputs)
    return found, known


def _role(number: int, made: Labels, alone: set[int], position: int, loop: Equation) -> str:
    if number not in alone and not made <= {STATE, KEY}:
        raise PlanError(
            f"the loop over layers at {loop.scope or loop.path} takes a slice of something made"
            f" from the batch for every layer (operand {position}); a pipeline hands the same"
            " values to all its stages\nTry: pass it to the layers whole, or a plan without stages"
        )
    if loop.params["reverse"]:
        raise PlanError(
            "the loop over layers runs from the last to the first, and stages take layers from the"
            " first to the last\nTry: reverse the stack of parameters instead"
        )
    return "drawn" if number not in alone else "weights" if PARAMETERS in made else "tables"
