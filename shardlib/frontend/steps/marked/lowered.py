"""The marked losses of a step as programs, in the places of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from shardlib.errors import PlanError
from shardlib.frontend.lowered import lower
from shardlib.frontend.steps.marked.planned import MarkedStep
from shardlib.frontend.steps.marked.single import SingleLoss
from shardlib.jax_types import Value
from shardlib.lowering.mesh.pinning import constrain
from shardlib.lowering.mesh.precision import like
from shardlib.lowering.program.program import Program
from shardlib.lowering.steps.losses import InPlace, LoweredLosses
from shardlib.planning.plan import ParameterLayout, Plan


def lower_losses(
    step: MarkedStep, plan: Plan, devices: Sequence[jax.Device] | None
) -> LoweredLosses:
    """Lowers the marked losses of a step.

    Args:
        devices: to run on; None for none, where it is only compiled.
    """
    programs = [
        lower(
            one.model,
            loss_plan(plan, one),
            **({"abstract": True} if devices is None else {"devices": devices}),
        )
        for one in step.losses
    ]
    return LoweredLosses(
        calls={
            one.found.call.path: _in_place(one, program)
            for one, program in zip(step.losses, programs, strict=True)
        },
        findings=tuple(dict.fromkeys(one for program in programs for one in program.findings)),
    )


def loss_plan(plan: Plan, loss: SingleLoss) -> Plan:
    """The plan of a step as one of a marked loss alone."""
    planned = {one.path: one for one in plan.parameters}
    shapes = {path: shape for path, shape, _, _ in loss.model.traced.problem.batch}
    frozen = loss.model.model.frozen
    return replace(
        plan,
        parameters=tuple(
            _as_given(planned[path.rstrip("'")], path, path in frozen) for path, _ in loss.params
        ),
        batch_layouts=tuple(
            (path, plan.rules.resolve(loss.names[path], shape, plan.mesh).layout)
            for path, shape in shapes.items()
        ),
        source=None,
    )


def _as_given(one: ParameterLayout, path: str, frozen: bool) -> ParameterLayout:
    """The layouts of a weight as a parameter of a loss."""
    if not frozen:
        return replace(one, path=path)
    return replace(one, path=path, role="frozen", gradient=one.compute, state=one.rest)


def _in_place(loss: SingleLoss, program: Program) -> InPlace:
    """What takes the place of the call of a loss: operands -> value, auxiliary results, gradients
    of the trained leaves.
    """
    parts, form = program.parts, loss.found.form
    if parts.run.kept is not None:
        raise PlanError("gradients of a marked loss are exchanged exactly")
    trained = [path for path, at in loss.params if at in loss.found.trained]
    positions = dict(loss.params)

    def run(*operands: Value) -> list[Value]:
        params, batch = loss.arguments(operands[form.constants :])
        (value, (metrics, _)), found, _ = parts.run.gradients(params, {}, batch, None)
        laid = like(constrain(found, parts.params.gradient), parts.updated)
        gradients = {positions[path]: laid[path] for path in trained}
        traced = [var.aval for var in loss.model.traced.closed_jaxpr.jaxpr.outvars]
        results = [value, *(metrics[name] for name in sorted(metrics))]
        return [
            *(_in_dtype(one, aval.dtype) for one, aval in zip(results, traced, strict=False)),
            *(gradients[at] for at in loss.found.trained),
        ]

    return run


def _in_dtype(value: Value, dtype: jnp.dtype) -> Value:
    """A mean over microbatches in the dtype of the result."""
    if value.dtype == dtype:
        return value
    return (value if jnp.issubdtype(dtype, jnp.inexact) else jnp.round(value)).astype(dtype)
