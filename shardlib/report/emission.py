"""The configuration of a plan in the form of its framework, an error for decisions that the
framework cannot express, and the plan's layouts as JAX's shardings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import tomli_w
import yaml

from shardlib.cost.framework import Framework, framework, framework_profiles, frameworks
from shardlib.decisions.table import TABLE
from shardlib.errors import ArgumentError, LayoutError, PlanError, raise_all
from shardlib.layout import Layout
from shardlib.planner.plan import Plan, source_of
from shardlib.report.frameworks import (
    Job,
    axes_of,
    deepspeed,
    levanter,
    maxtext,
    megatron,
    torchtitan,
)
from shardlib.untrusted.data import JsonObject


def _flags(job: Job, options: JsonObject) -> str:
    """Options of a command line, one a line; True is a flag alone."""
    lines = [f"# {job.head}"]
    for name, value in options.items():
        lines.append(f"--{name}" if value is True else f"--{name} {value}")
    return "\n".join(lines) + "\n"


def _yaml(job: Job, options: JsonObject) -> str:
    return f"# {job.head}\n{yaml.safe_dump(options, sort_keys=False, width=100)}"


def _toml(job: Job, options: JsonObject) -> str:
    return f"# {job.head}\n{tomli_w.dumps(options)}"


def _json(job: Job, options: JsonObject) -> str:
    return json.dumps(options, indent=1) + "\n"


#: A form -> what makes the options of a plan, adding to a list what they have no word for; and what
#: writes them.
_FORMS: Mapping[
    str, tuple[Callable[[Job, list[str]], JsonObject], Callable[[Job, JsonObject], str]]
] = {
    "megatron": (megatron, _flags),
    "torchtitan": (torchtitan, _toml),
    "maxtext": (maxtext, _yaml),
    "deepspeed": (deepspeed, _json),
    "levanter": (levanter, _yaml),
}


def emit(plan: Plan, form: str | None = None, *, mode: str = "auto") -> str:
    """The configuration of a plan's framework (Megatron-Core's flags, torchtitan's TOML, MaxText's
    or Levanter's YAML, DeepSpeed's JSON), or the plan as a file of plain JAX; see `Plan.emit`.
    """
    if mode not in ("auto", "explicit"):
        raise ArgumentError(f"mode is {mode!r}\nTry: 'auto' or 'explicit'")
    if form is None:
        return _configuration(plan)
    if form != "jax":
        raise PlanError(f"no plan is written as {form!r}\nTry: 'jax'")
    if plan.framework is not None:
        raise PlanError(
            f"the plan is made for {plan.framework.name}\nTry: plan.emit(), or a plan without"
            " framework="
        )
    written = source_of(plan).written
    if written is None:
        raise PlanError(
            "only plans of a model and its loss, or of a step, are written as plain JAX\nTry:"
            " shardlib.plan(init, loss, ...).emit('jax'), or"
            " shardlib.compile_step(init, step, ...).plan.emit('jax')"
        )
    return written(plan, mode)


def _configuration(plan: Plan) -> str:
    one = emitter(plan)
    assert plan.framework is not None
    job = Job(plan=plan, sizes=plan.framework)
    failures = [*one.able.refusals(_unusual(plan), axes_of(plan)), *job.indivisible()]
    options, write = _FORMS[one.emits]
    made: JsonObject = {} if failures else options(job, failures)
    if failures:
        raise_all(
            PlanError,
            f"{one.release} has no words for this plan",
            failures,
            hint="plan again with framework=, which keeps to what it can do",
        )
    return write(job, made)


def emitter(plan: Plan) -> Framework:
    """The framework of a plan whose configuration can be written."""
    job = plan.framework
    require_written(job.name if job is not None else None)
    assert job is not None
    return framework(job.name, job.vendor)


def require_written(name: str | None) -> None:
    """Returns whether the configuration of a framework can be written.

    Args:
        name: of the framework; None for programs of shardlib.
    """
    known = frameworks()
    written = ", ".join(one for one, its in known.items() if its.emits)
    if name is None:
        raise PlanError(
            "the plan is made for programs of shardlib, which need no configuration\nTry: 'jax',"
            f" for a file of plain JAX, or a framework, one of {written}"
        )
    able = {
        word for one, its in known.items() if its.emits in _FORMS for word in (one, *its.releases)
    }
    if name in framework_profiles() and name not in able:
        raise PlanError(f"no configuration of {name} is written\nTry: one of {written}")


def _unusual(plan: Plan) -> Mapping[str, Any]:
    """The decisions of a plan that are not defaults, in the words of pins."""
    skipped = ("mesh", "rules", "attention")
    return {
        word: value
        for word, entry in TABLE.items()
        if word not in skipped
        and (value := getattr(plan, word)) != entry.default
        and not (word == "gather" and "stage" not in plan.mesh)
    } | ({"sequence_parallel": plan.sequence_parallel} if "tensor" in plan.mesh else {})


# --------------------------------------------------------------------------------------------------
# The layouts of a plan as JAX's shardings over a mesh of the user's.

#: A `jax.sharding.NamedSharding`.
NamedSharding = Any


class AxisSizes(Protocol):
    """The attributes read of a `jax.sharding.Mesh` or an abstract one."""

    @property
    def shape(self) -> Mapping[str, int]:
        """Size of every axis by its name."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlanShardings:
    """The shardings of a plan, by path.

    Attributes:
        parameters: of every parameter as it is stored.
        compute: of every parameter while it is used.
        gradients: of the gradient of every trained parameter.
        optimizer: of the optimizer state of every trained parameter, of the arrays that have its
            shape; all others are replicated.
        batch: of every array of the batch; "batch" where it is one array, otherwise "batch.x".
    """

    parameters: Mapping[str, NamedSharding]
    compute: Mapping[str, NamedSharding]
    gradients: Mapping[str, NamedSharding]
    optimizer: Mapping[str, NamedSharding]
    batch: Mapping[str, NamedSharding]


def plan_shardings(plan: Plan, mesh: AxisSizes) -> PlanShardings:
    """The shardings of a plan over a mesh that has its axes."""
    if not isinstance(getattr(mesh, "shape", None), Mapping):
        raise ArgumentError(
            f"mesh is {type(mesh).__name__}; it is a jax.sharding.Mesh\nTry:"
            " plan.shardings(jax.make_mesh((4, 2), ('fsdp', 'tensor')))"
        )
    here = dict(mesh.shape)
    wrong = [
        f"{axis} is {size} in the plan and {here.get(axis, 'missing')} in the mesh"
        for axis, size in plan.mesh.items()
        if size > 1 and here.get(axis) != size
    ]
    if wrong:
        sizes = {axis: size for axis, size in plan.mesh.items() if size > 1}
        raise_all(
            LayoutError,
            f"the mesh {here} is not that of the plan, {plan.mesh}",
            wrong,
            hint=f"jax.make_mesh({tuple(sizes.values())}, {tuple(sizes)})",
        )
    sharding: Any = sys.modules["jax"].sharding  # who has a mesh has loaded JAX; planning has not

    def over(layout: Layout) -> NamedSharding:
        dims = [tuple(axis for axis in dim if plan.mesh[axis] > 1) for dim in layout]
        spec = (None if not dim else dim[0] if len(dim) == 1 else dim for dim in dims)
        return sharding.NamedSharding(mesh, sharding.PartitionSpec(*spec))

    every = [one for one in plan.parameters if one.role != "updated"]
    trained = [one for one in every if one.trained]
    return PlanShardings(
        parameters={one.path: over(one.rest) for one in every},
        compute={one.path: over(one.compute) for one in every},
        gradients={one.path: over(one.gradient) for one in trained},
        optimizer={one.path: over(one.state) for one in trained},
        batch={path: over(layout) for path, layout in plan.batch_layouts},
    )
