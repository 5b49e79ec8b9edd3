"""Checks of the arguments of the public functions, and the traced model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh

from shardlib.annotation import tree
from shardlib.annotation.flax import LinenInit
from shardlib.annotation.names import Model
from shardlib.annotation.tree import Init, read
from shardlib.annotation.trees import Filter, Tree
from shardlib.decisions.pins import Pins
from shardlib.errors import AnnotationError, TracingError
from shardlib.findings import Finding, diagnostic
from shardlib.frontend.own_layouts import require_honour
from shardlib.graph import Problem
from shardlib.machines.topology import Topology, devices_of
from shardlib.planner.plan import Plan
from shardlib.planner.search import garbage_put_off
from shardlib.tracing.layouts import NO_MESH, brings_layouts, freed, names_axes
from shardlib.tracing.trace import Traced, abstract, trace
from shardlib.untrusted.data import Kind, require_kinds


def _transformation(value: Any) -> bool:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def _devices(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and all(
        isinstance(device, jax.Device) for device in np.asarray(value, object).flat
    )


def _guards(value: Any) -> bool:
    # Whoever has guards has loaded the lowering; planning does without it.
    from shardlib.lowering.step import Guards

    return isinstance(value, Guards)


_KINDS: Mapping[str, Kind] = {
    "loss": (callable, "a function", "loss=lambda model, batch: jnp.mean(...)"),
    "evaluation": (callable, "a function", "evaluation=lambda model, batch: jnp.mean(...)"),
    "optimizer": (_transformation, "an optax transformation", "optimizer=optax.adam(1e-3)"),
    "batch": (
        lambda value: not isinstance(value, (bool, int, float, complex, str, bytes)),
        "a tree of arrays, of which the leading dim is the number of rows",
        'batch={"x": jax.ShapeDtypeStruct((64, 128), jnp.float32)}',
    ),
    "topology": (
        lambda value: isinstance(value, (str, Topology)) or devices_of(value) is not None,
        "a topology",
        'topology="cpu:8", a jax.sharding.Mesh, or a list of devices',
    ),
    "pin": (
        lambda value: isinstance(value, (Mapping, Pins)),
        "a mapping of decisions",
        'pin={"mesh": {"data": 8}}',
    ),
    "allow": (
        lambda value: isinstance(value, Mapping),
        "a mapping of dtypes",
        'allow={"moment_dtype": ["bfloat16"]}',
    ),
    "limits": (
        lambda value: hasattr(value, "seconds") and hasattr(value, "memory_bytes"),
        "limits of a compiler",
        "limits=shardlib.verification.isolation.Limits(seconds=600.0)",
    ),
    "name": (lambda value: isinstance(value, str), "a string", 'name="model"'),
    "framework": (
        lambda value: isinstance(value, str),
        "the name of a framework",
        'framework="megatron-core"',
    ),
    "plan": (
        lambda value: isinstance(value, Plan),
        "a plan",
        "plan=shardlib.plan(...), or plan=shardlib.Plan.from_json(text)",
    ),
    "devices": (_devices, "a list of devices", "devices=jax.devices()"),
    "guards": (
        _guards,
        "guards",
        "guards=shardlib.Guards(clip=1.0)",
    ),
    "disk": (
        lambda value: isinstance(value, (str, os.PathLike)),
        "the path of a folder",
        'disk="/path"',
    ),
}
#: Those that cannot be left out.
_NEEDED = ("loss", "optimizer")


def require_arguments(asked: str, **given: object) -> None:
    """Refuses arguments of the wrong kind.

    Args:
        given: arguments by name; None where one is left out.
    """
    require_kinds(asked, _KINDS, given, needed=_NEEDED)


# --------------------------------------------------------------------------------------------------
# A model that has been read and whose loss has been traced: annotate and trace.

#: The user's loss: (model, batch) -> scalar, or -> (scalar, dict of metrics).
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A model that has been read, and what was traced of it.

    Attributes:
        model: as it was read.
        traced: its loss.
        loss: (model, batch) -> scalar or (scalar, metrics).
        optimizer: what trains it.
        batch: the global batch, arrays or their shapes and dtypes.
        honour: what layouts of the program are, "hints" or "pins".
    """

    model: Model
    traced: Traced
    loss: Loss
    optimizer: optax.GradientTransformation
    batch: Tree
    honour: str = "hints"


@garbage_put_off()
def read_and_trace(
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    batch_axes: Tree,
    name: str | None,
    rows: str = "prove",
    wrt: Filter = None,
    ambient: AbstractMesh = NO_MESH,
    honour: str = "hints",
) -> TracedModel:
    """Reads a model, and traces its loss; see `shardlib.api.plan` for the arguments.

    Args:
        init: a callable `nnx.Rngs -> nnx.Module`, or a description by `linen` or `tree`.
        loss: (model, batch) -> scalar or (scalar, metrics).
        batch_axes: logical axes of the batch; None for the convention.
        name: what to call the model; None for its own.
        wrt: what is trained; None for all parameters.
    """
    require_honour(honour)
    model = _read(init, wrt, ambient)
    if name is not None:
        model = replace(model, name=name)
    untraced, traced = model, _traced(model, loss, optimizer, batch, batch_axes, rows, ambient)
    model = traced.model
    if isinstance(init, LinenInit) and not tree.rules_in_force():
        ignored = tree.ignored_constraints(
            model.bind(loss), model.params, model.state, abstract(batch)
        )
        model = replace(model, findings=(*model.findings, *ignored))
    if isinstance(init, LinenInit):
        model = replace(model, findings=(*model.findings, *_unchanged(untraced, model, traced)))
    return TracedModel(
        model=model, traced=traced, loss=loss, optimizer=optimizer, batch=batch, honour=honour
    )


def _read(init: Init, wrt: Filter, ambient: AbstractMesh) -> Model:
    """The model; where it cannot be read with no mesh in force, as it is without its layouts."""
    try:
        return read(init, wrt)
    except AnnotationError as error:
        if error.__cause__ is None:
            raise
        try:
            return read(init, wrt, free=partial(freed, ambient=ambient))
        except AnnotationError:
            raise error from error.__cause__


def traced_again(model: TracedModel, batch: Tree, batch_axes: Tree) -> Traced:
    """The loss of a model traced for another batch; how it depends on the rows is not proven
    anew.
    """
    with tree.no_mesh():
        return _traced(model.model, model.loss, model.optimizer, batch, batch_axes, "mean")


def state_stays(model: Model, traced: Traced) -> bool:
    """Returns whether a step leaves all state of a model as it is."""
    count, parameters, program = (
        len(jax.tree.leaves(model.state)),
        len(jax.tree.leaves(model.params)),
        traced.program,
    )
    return not count or program.outputs[-count:] == program.inputs[parameters : parameters + count]


@diagnostic
def _unchanged(untraced: Model, model: Model, traced: Traced) -> tuple[Finding, ...]:
    """A finding where a step leaves all state of a Linen model as it is, `untraced` as it was read:
    its loss returns no updates.
    """
    if not jax.tree.leaves(untraced.state) or not state_stays(model, traced):
        return ()
    return (
        Finding(
            code="state-unchanged",
            severity="warning",
            where=", ".join(untraced.state),
            message=(
                f"no step changes the collections {', '.join(untraced.state)}: the loss returns no"
                " updates of them."
            ),
            hint=(
                "return (loss, updates) with the updates of module.apply(..., mutable=[...]), see"
                " help(shardlib.linen); no matter where they are meant to stay"
            ),
        ),
    )


def _traced(
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    batch_axes: Tree,
    rows: str,
    ambient: AbstractMesh = NO_MESH,
) -> Traced:
    """The loss of a model; that of the same model without layouts where it brings some."""

    def run(model: Model) -> Traced:
        return trace(model, loss, batch, batch_axes=batch_axes, optimizer=optimizer, rows=rows)

    if not names_axes(ambient):
        try:
            traced = run(model)
        except TracingError as error:
            if error.__cause__ is None:
                raise
        else:
            if not brings_layouts(traced.closed_jaxpr):
                return traced
    return run(
        replace(
            model,
            bind=lambda loss: freed(model.bind(loss), ambient),
            init=freed(model.init, ambient),
        )
    )


def problem(
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    *,
    batch_axes: Tree = None,
    name: str | None = None,
    wrt: Filter = None,
    rows: str = "prove",
) -> Problem:
    """Traces a model without planning it; see `shardlib.api.plan` for the arguments.

    Args:
        loss: (model, batch) -> scalar or (scalar, metrics).
        wrt: what is trained; None for all parameters.
    """
    require_arguments("problem", loss=loss, optimizer=optimizer, name=name)
    with tree.no_mesh():
        return read_and_trace(
            init, loss, optimizer, batch, batch_axes, name, rows=rows, wrt=wrt
        ).traced.problem
