"""Which form a plan's configuration has, and what its framework has no word for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import tomli_w
import yaml

from shardlib.cost.terms.framework_profiles import framework_profiles
from shardlib.cost.terms.frameworks import Framework, framework, frameworks
from shardlib.decisions.table import TABLE
from shardlib.errors import ArgumentError, PlanError, raise_all
from shardlib.planning.emission.deepspeed import deepspeed
from shardlib.planning.emission.job import Job, axes_of
from shardlib.planning.emission.levanter import levanter
from shardlib.planning.emission.maxtext import maxtext
from shardlib.planning.emission.megatron import megatron
from shardlib.planning.emission.torchtitan import torchtitan
from shardlib.planning.plan import Plan, source_of
from shardlib.untrusted.json_types import JsonObject


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
    """Whether the configuration of a framework can be written.

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
    """The decisions of a plan that are no defaults, in the words of pins."""
    skipped = ("mesh", "rules", "attention")
    return {
        word: value
        for word, entry in TABLE.items()
        if word not in skipped
        and (value := getattr(plan, word)) != entry.default
        and not (word == "gather" and "stage" not in plan.mesh)
    } | ({"sequence_parallel": plan.sequence_parallel} if "tensor" in plan.mesh else {})
