"""From the words of a command line to models and plans."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardlib.cli.output import read_text, status
from shardlib.errors import BatchError, InfeasibleError, PlanError, raise_all
from shardlib.untrusted import parse_json, shown
from shardlib.untrusted.json_types import JsonObject

if TYPE_CHECKING:
    from shardlib.planning.plan import Plan

#: Keyword arguments of `shardlib.plan` that say what is planned.
PlanInputs = dict[str, Any]


def make_plan(
    spec: str,
    topology: str,
    batch: int | None,
    seq: int | None,
    pins: JsonObject,
    refine: int = 0,
    *,
    framework: str | None = None,
) -> Plan:
    """Plans the model that a command line names; the plan remembers where it came from.

    Args:
        framework: the training framework that will run the plan; None for programs of shardlib.
    """
    from dataclasses import replace

    from shardlib.cost.terms.frameworks import framework as find_framework
    from shardlib.hardware import topology as find_topology

    vendor = find_topology(topology).chip.vendor
    if framework is not None:  # what is misspelt is said before anything is traced
        find_framework(framework, vendor)
    with status(
        f"planning {spec} for {topology}" + (f", compiling the {refine} best" if refine else "")
    ):
        inputs = inputs_of(spec, batch, seq)
        import shardlib

        plan = shardlib.plan(
            **inputs,
            topology=topology,
            pin=pins,
            refine=refine,
            framework=framework,
        )
    origin = {
        "model": spec,
        **({"batch": str(batch)} if batch else {}),
        **({"seq": str(seq)} if seq else {}),
        "pin": json.dumps(pins),
    }
    return replace(plan, origin=tuple(origin.items()))


def inputs_of(spec: str, batch: int | None, seq: int | None) -> PlanInputs:
    """The model that a command line names, as keyword arguments of `shardlib.plan`."""
    from shardlib.models import UserModel, build, example_batch, load

    os.environ.setdefault(
        "JAX_PLATFORMS", "cpu"
    )  # planning needs no accelerator and must not occupy one
    loaded = load(spec)
    if isinstance(loaded, UserModel):
        _refuse_sizes(spec, batch, seq)
        init, loss, example, name, axes, optimizer = (
            loaded.init,
            loaded.loss,
            loaded.batch,
            loaded.name,
            loaded.batch_axes,
            loaded.optimizer,
        )
        more = {"wrt": loaded.wrt, "rows": loaded.rows}
    else:
        rows, tokens = _sizes(spec, batch, seq)
        (init, loss), example, name, axes, optimizer, more = (
            build(loaded),
            example_batch(loaded, rows, tokens),
            loaded.name,
            None,
            None,
            {},
        )
    if optimizer is None:
        import optax

        optimizer = optax.adamw(3e-4)
    return {
        "init": init,
        "loss": loss,
        "optimizer": optimizer,
        "batch": example,
        "batch_axes": axes,
        "name": name,
        **more,
    }


def _sizes(spec: str, batch: int | None, seq: int | None) -> tuple[int, int]:
    if batch is None or seq is None:
        missing = [flag for flag, value in (("--batch", batch), ("--seq", seq)) if value is None]
        raise BatchError(
            f"the size of the batch of {spec} is open: {' and '.join(missing)} missing\nTry:"
            " --batch 256 --seq 4096"
        )
    return batch, seq


def _refuse_sizes(spec: str, batch: int | None, seq: int | None) -> None:
    flags = [flag for flag, value in (("--batch", batch), ("--seq", seq)) if value is not None]
    if flags:
        raise BatchError(
            f"{spec} brings its own batch; {' and '.join(flags)} cannot change it\nTry: leave out"
            f" {' and '.join(flags)}"
        )


def _overrides(new: str, old: str) -> bool:
    """Whether a pin takes the place of another: the same decision, or the mesh and one of its
    axes.
    """
    return (
        new == old
        or (old == "mesh" and new.startswith("mesh."))
        or (new == "mesh" and old.startswith("mesh."))
    )


def replanned(plan: Plan, pins: JsonObject) -> Plan | str:
    """The best plan under other pins, or why there is none."""
    origin = dict(plan.origin)
    if "model" not in origin:
        raise PlanError(
            "the plan does not say which model it is for, so that it cannot be made again\nTry:"
            " make it with `shardlib plan MODEL ... --out plan.json`"
        )
    previous = {
        key: value
        for key, value in _origin_pins(origin).items()
        if not any(_overrides(new, key) for new in pins)
    }
    batch, seq = origin_sizes(plan)
    try:
        framework = plan.framework.name if plan.framework else None
        return make_plan(
            origin["model"], plan.topology, batch, seq, {**previous, **pins}, framework=framework
        )
    except InfeasibleError as error:
        return str(error)


def origin_sizes(plan: Plan) -> tuple[int | None, int | None]:
    """Batch and sequence that a plan was made with; None where the model brought its own."""
    origin = dict(plan.origin)
    sizes_given = [(key, origin[key]) for key in ("batch", "seq") if key in origin]
    wrong = [
        f"{key} is {shown(text)}; it is an integer of at least 1"
        for key, text in sizes_given
        if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text))
    ]
    if wrong:
        raise_all(PlanError, "the plan does not say what it was made for", wrong)
    sizes = {key: int(text) for key, text in sizes_given}
    return sizes.get("batch"), sizes.get("seq")


def _origin_pins(origin: dict[str, str]) -> PlanInputs:
    pins = parse_json(origin.get("pin", "{}"), "what the plan says of its pins", PlanError)
    if not isinstance(pins, dict):
        raise PlanError(f"the plan says that its pins are {shown(pins)}; they are an object")
    return cast("dict[str, Any]", pins)


def with_source(plan: Plan) -> Plan:
    """A plan from a file with what it was made from: its model traced again, its topology and its
    pins.
    """
    from dataclasses import replace

    again = replanned(plan, {})
    if isinstance(again, str):
        raise PlanError(f"the plan cannot be made again: {again}")
    return _priced_here(replace(plan, source=again.source))


def _priced_here(plan: Plan) -> Plan:
    """A plan for devices whose rates are measured, at the rates of this machine; with a finding
    where it was written with others.
    """
    from dataclasses import replace

    from shardlib.hardware import topology as find_topology
    from shardlib.planning.plan import source_of
    from shardlib.planning.questions.counterfactual import priced_on
    from shardlib.planning.questions.replan import PRICED_AGAIN
    from shardlib.planning.units.quantity import TIE, seconds_text
    from shardlib.report import Finding

    source = source_of(plan)
    if source.topology == find_topology(plan.topology):  # the figures are the same everywhere
        return plan
    here = priced_on(plan, source.topology)
    if here is None:  # this machine has less memory
        return plan
    before, now = plan.estimate.step_seconds, here.estimate.step_seconds
    if abs(now - before) <= TIE * before:
        return plan
    finding = Finding(
        code=PRICED_AGAIN,
        severity="info",
        where=plan.topology,
        message=(
            f"the plan was written with {seconds_text(before)} a step, by rates measured elsewhere"
            f" or before; by those of this machine it takes {seconds_text(now)}"
        ),
    )
    return replace(plan, estimate=here.estimate).with_findings(finding)


def read_plan(path: Path, *, changed: bool = False) -> Plan:
    """Reads a plan from a file."""
    from shardlib.planning.plan import ChangedPlanError, plan_from_data

    again = f"shardlib plan MODEL --topology T ... --out {path}"
    text = read_text(path, "plan", again, PlanError)
    try:
        return plan_from_data(parse_json(text, "the plan", PlanError, hint=again), changed=changed)
    except ChangedPlanError as error:
        raise PlanError(f"{path}: {error}") from error
    except PlanError as error:
        raise PlanError(f"{path} holds no plan: {error}") from error
