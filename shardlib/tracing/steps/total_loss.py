"""The sum of the marked losses of a step, as a function of its weights and of the batch.

Gradients that the step takes otherwise, as with `jax.value_and_grad`, are computed as the step
computes them, and become a part of the gradients of the sum.

That is what is planned of a marked step. What the losses get is computed as the step computes it,
and no gradient goes through it; weights that the step has updated are the weights. What no loss
needs, as updates, is left out.

Loops run their body as often as the step does, from the values that they begin with, and of
branches those run that have a loss: costs are those of the step, numbers need not be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardlib._jax_compat import scan_counts
from shardlib.jax_types import Value
from shardlib.tracing.program import CUSTOM, REMAT, Equation, Program, callee, flatten
from shardlib.tracing.rewriting.interpreter import evaluate_equations
from shardlib.tracing.rewriting.walk import Walk
from shardlib.tracing.steps.marked_losses import FoundLoss


def total_loss(
    program: Program,
    arguments: Sequence[Value | None],
    losses: Sequence[FoundLoss],
    weights: Mapping[int, Value],
    unmarked: Mapping[int, int] | None = None,
) -> Value:
    """The sum of the marked losses: float32 scalar.

    Args:
        arguments: for its inputs, the state and the batch; None for what no loss needs.
    """
    total = _Total(losses={loss.call.path: loss for loss in losses}, weights=weights)
    env = {**program.constants, **dict(zip(program.inputs, arguments, strict=True))}
    value = total.run(program, env, frozenset((unmarked or {}).values()))
    for position, number in (unmarked or {}).items():
        value = value + _taken(weights[position], env[number])
    return value


@dataclass(frozen=True, kw_only=True)
class _Total:
    losses: Mapping[str, FoundLoss]
    weights: Mapping[int, Value]

    def run(
        self, program: Program, env: dict[int, Any], targets: frozenset[int] = frozenset()
    ) -> Any:
        """The sum of the losses of a program, whose inputs and constants are in `env`; computes
        what is wanted beside it.
        """
        needed, inputs = self._needed(program, targets), {*program.inputs}
        values: list[Any] = []
        done: set[str] = set()
        for position, equation in enumerate(program.equations):
            loss = self._loss(equation)
            if loss is not None:
                if loss.call.path not in done:
                    done.add(loss.call.path)
                    values.append(self._value(loss, env, program))
            elif self._around(equation):
                values.append(self._inside(equation, env))
            elif position in needed:
                if targets:  # no gradient is taken of a gradient
                    env.update(
                        (number, _stopped(env[number]))
                        for number in sorted({*equation.inputs} & inputs)
                    )
                evaluate_equations([equation], env, Walk())
        return sum(values, start=jnp.zeros((), jnp.float32))

    def _loss(self, equation: Equation) -> FoundLoss | None:
        return None if equation.call is None else self.losses.get(equation.call.path)

    def _around(self, equation: Equation) -> bool:
        """Whether a loss stands inside of a loop, a branch or the like."""
        return any(path.startswith(f"{equation.path}/") for path in self.losses)

    def _needed(self, program: Program, targets: frozenset[int]) -> set[int]:
        """Positions of the equations that some loss needs, or what is wanted."""
        numbers: set[int] = {*targets}
        positions: set[int] = set()
        for position in reversed(range(len(program.equations))):
            equation = program.equations[position]
            loss = self._loss(equation)
            if loss is not None:
                first = loss.form.constants
                numbers |= {
                    number
                    for number, root in zip(loss.call.inputs[first:], loss.roots, strict=True)
                    if root is None
                } | {*loss.call.inputs[:first]}
            elif self._around(equation):
                numbers |= {*equation.inputs}
            elif not numbers.isdisjoint(equation.outputs):
                positions.add(position)
                numbers |= {*equation.inputs}
        return positions

    def _value(self, loss: FoundLoss, env: dict[int, Any], program: Program) -> Any:
        def taken(number: int) -> Any:  # what a loss is given and does not look at is not there
            value = env[number]
            return _zeros(program.avals[number]) if value is None else value

        first = loss.form.constants
        arguments = [_stopped(taken(number)) for number in loss.call.inputs[:first]]
        for position, (number, root) in enumerate(
            zip(loss.call.inputs[first:], loss.roots, strict=True)
        ):
            value = taken(number) if root is None else self.weights[root]
            arguments.append(value if position in loss.trained else _stopped(value))
        value, *aux = loss.form.evaluated(arguments)
        gradients = [arguments[first + position] for position in loss.trained]
        env.update(zip(loss.call.outputs, [value, *aux, *gradients], strict=True))
        return value.astype(jnp.float32)

    def _inside(self, equation: Equation, env: dict[int, Any]) -> Any:
        arguments = [env[number] for number in equation.inputs]
        if equation.name == "scan":
            value, results = self._scan(equation, arguments)
        elif equation.name == "cond":
            value, results = self._cond(equation, arguments)
        elif equation.name == "while":
            tests, first = (equation.params[f"{kind}_nconsts"] for kind in ("cond", "body"))
            body = flatten(equation.params["body_jaxpr"], f"{equation.path}/body/", equation.scope)
            value, _ = self._body(body, arguments[tests:])
            results = arguments[tests + first :]
        else:
            assert equation.name in (*REMAT, *CUSTOM)
            body = flatten(callee(equation.eqn), f"{equation.path}/", equation.scope)
            value, results = self._body(body, arguments)
        env.update(zip(equation.outputs, results, strict=True))
        return value

    def _body(self, program: Program, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The sum of the losses of a program, and its results where they are known."""
        env = {**program.constants, **dict(zip(program.inputs, arguments, strict=True))}
        value = self.run(program, env)
        return value, [env.get(number, _zeros(program.avals[number])) for number in program.outputs]

    def _scan(self, equation: Equation, arguments: list[Any]) -> tuple[Any, list[Any]]:
        constants, carried = scan_counts(equation.params)
        fixed, sliced = arguments[: constants + carried], arguments[constants + carried :]
        body = flatten(equation.params["jaxpr"], f"{equation.path}/body/", equation.scope)

        def one(_: None, items: list[Any]) -> tuple[None, Any]:
            return None, self._body(body, [*fixed, *items])[0]

        values = jax.lax.scan(one, None, sliced, length=equation.params["length"])[1]
        stacked = [_zeros(var.aval) for var in equation.eqn.outvars[carried:]]
        return values.sum(), [*fixed[constants:], *stacked]

    def _cond(self, equation: Equation, arguments: list[Any]) -> tuple[Any, list[Any]]:
        value, results = jnp.zeros((), jnp.float32), list[Any]()
        for index, branch in enumerate(equation.params["branches"]):
            path = f"{equation.path}/branch{index}/"
            if any(loss_path.startswith(path) for loss_path in self.losses):
                branch_value, results = self._body(
                    flatten(branch, path, equation.scope), arguments[1:]
                )
                value = value + branch_value
        return value, results


@jax.custom_vjp
def _taken(weight: Any, gradient: Any) -> Any:
    """Nothing, with a gradient that is known."""
    return jnp.zeros((), jnp.float32)


def _known(weight: Any, gradient: Any) -> tuple[Any, Any]:
    return jnp.zeros((), jnp.float32), gradient.reshape(weight.shape).astype(weight.dtype)


def _as_known(carry: Any, _: Any) -> tuple[Any, None]:
    return carry, None


_taken.defvjp(_known, _as_known)


def _stopped(value: Any) -> Any:
    floating = jnp.issubdtype(jnp.asarray(value).dtype, jnp.inexact)
    return jax.lax.stop_gradient(value) if floating else value


def _zeros(aval: Any) -> Any:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)
