"""The loop over layers of a traced loss, and what its operands are.

The loop over layers is the scan that multiplies matrices; of several, one that takes slices of
parameters before one that takes none (as over time); of those the one with the most layers, the
last of equals. Every value of the loss is labelled with what it is made from (parameters,
frozen ones, model state, batch), and every operand of the loop gets a role:

    weights      made from trained parameters, one slice a layer: sharded over the stages
    tables       made from frozen parameters or from nothing (flags and the like), one slice a
                 layer: sharded over the stages
    drawn        made from model state, or from keys of the batch, one slice a layer: random keys;
                 another value in every microbatch
    shared       made from trained parameters, the same for all layers
    activations  the loop's carry, and what is made from the batch (masks, positions, encoder
                 outputs): hops from stage to stage
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardlib._jax_compat import scan_counts
from shardlib.errors import PlanError
from shardlib.tracing.program import Equation, Program, has_matmul
from shardlib.tracing.rewriting.dependence import Labels

PARAMETERS, FROZEN, STATE, BATCH, KEY = "parameters", "frozen parameters", "state", "batch", "key"


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What the operands of the loop are, by position.

    Attributes:
        weights, tables, drawn: positions among the scanned operands.
        shared, constant, activations: positions among the constant operands; `constant` are made
            from frozen parameters or from nothing.
    """

    weights: tuple[int, ...]
    tables: tuple[int, ...]
    drawn: tuple[int, ...]
    shared: tuple[int, ...]
    constant: tuple[int, ...]
    activations: tuple[int, ...]


def loop_over_layers(program: Program, labels: Mapping[int, Labels]) -> Equation:
    """The scan over layers."""
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

    def rank(loop: Equation) -> tuple[bool, int]:
        sliced = [labels[number] for number in loop.inputs[sum(scan_counts(loop.params)) :]]
        over_layers = any(PARAMETERS in origins and BATCH not in origins for origins in sliced)
        return over_layers, loop.params["length"]

    return max(reversed(loops), key=rank)


def roles_of(loop: Equation, labels: Mapping[int, Labels], alone: Collection[int]) -> Roles:
    """What the operands of the loop over layers are."""
    constants, carried = scan_counts(loop.params)
    scanned = {
        k: _role(number, labels[number], alone, k, loop)
        for k, number in enumerate(loop.inputs[constants + carried :])
    }
    fixed = {
        k: "shared" if PARAMETERS in labels[number] else "constant"
        for k, number in enumerate(loop.inputs[:constants])
        if number in alone
    }

    def with_role(roles: Mapping[int, str], role: str) -> tuple[int, ...]:
        return tuple(k for k, assigned in roles.items() if assigned == role)

    return Roles(
        weights=with_role(scanned, "weights"),
        tables=with_role(scanned, "tables"),
        drawn=with_role(scanned, "drawn"),
        shared=with_role(fixed, "shared"),
        constant=with_role(fixed, "constant"),
        activations=tuple(k for k in range(constants) if k not in fixed),
    )


def _role(
    number: int, origins: Labels, alone: Collection[int], position: int, loop: Equation
) -> str:
    if number not in alone and not origins <= {STATE, KEY}:
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
    return "drawn" if number not in alone else "weights" if PARAMETERS in origins else "tables"
