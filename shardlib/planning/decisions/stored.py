"""Is this the plan that was written, and can its values be those of a plan?

What a plan may hold follows from the annotations of `PlanData` and of what it is made of
(`shardlib.untrusted.typed`), so that a new field is checked like the others. Decisions are held to
the words that pins have; layouts to the shapes and the mesh that they shard.

A plan carries a checksum of its content, which says that nobody has changed it since; it is no
signature, and whoever changes a plan on purpose can write a new one. Of a plan without one nobody
knows whether it was changed: it is treated as one that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from shardlib.axes import MeshShape
from shardlib.cost.estimate import LARGEST
from shardlib.decisions.plain_data import illegal
from shardlib.errors import PlanError, raise_all
from shardlib.exchanges.reading import read_exchange
from shardlib.exchanges.values import Exchange
from shardlib.layout import Layout
from shardlib.planning.decisions.activation_layout import ActivationLayout
from shardlib.planning.decisions.compiled_trials import MESH
from shardlib.planning.decisions.plan_data import FORMAT, ParameterLayout, PlanData, checksum
from shardlib.report import Finding
from shardlib.rules import Rules
from shardlib.untrusted import Form, construct, shown
from shardlib.untrusted.json_types import Json, JsonMapping
from shardlib.untrusted.shown import bounded

P = TypeVar("P", bound=PlanData)
#: How the types of a plan that are no dataclasses are written.
FORMS: Mapping[Any, Form] = {
    MeshShape: MESH,
    Layout: Form(plain=tuple[tuple[str, ...], ...], build=lambda dims: Layout(*dims)),
    Rules: Form(plain=tuple[tuple[str, tuple[str, ...]], ...], build=Rules.parse),
    Exchange: Form(plain=Mapping[str, str | int | float], build=partial(read_exchange, "exchange")),
}
AGAIN = "make it again with `shardlib plan ... --out plan.json`"
#: What a plan is made of that no file has.
ABSENT = ("source",)


class ChangedPlanError(PlanError):
    """A plan that is not what was written."""


def read(form: type[P], data: Json, *, changed: bool = False) -> P:
    """A plan of plain data.

    Args:
        form: the class of the plan.
        data: what `plan_to_data` gave.
        changed: whether a plan that was changed since is taken, with a finding.

    Raises:
        PlanError: no plan of this format, a changed one, or values that no plan has.
    """
    found: object = (
        cast("Mapping[str, Any]", data).get("format")
        if isinstance(data, Mapping)
        else type(data).__name__
    )
    if isinstance(found, str) and found.startswith("serving-"):
        raise PlanError(
            "this plans a server, and no training\nTry: shardlib explain FILE; or shardlib plan"
            " MODEL --serve for another machine"
        )
    if not isinstance(data, Mapping) or isinstance(found, bool) or found != FORMAT:
        raise PlanError(
            f"this is no plan of format {FORMAT} (found {shown(found)}); make it with `shardlib"
            " plan ... --out plan.json`"
        )
    table = cast("Mapping[str, Any]", data)
    plan = _usual(
        construct(
            form,
            {key: value for key, value in table.items() if key not in ABSENT},
            "the plan",
            PlanError,
            forms=FORMS,
            least=0.0,
            most=LARGEST,
            hint=AGAIN,
        )
    )
    faults = _faults(plan)
    if faults:
        raise_all(PlanError, "the plan is not usable", bounded(faults), hint=AGAIN)
    return plan.with_findings(*_judged(plan, table, changed))


def _usual(plan: P) -> P:
    """The usual order of axes is not said."""
    return replace(plan, axis_order=()) if plan.axis_order == tuple(plan.mesh) else plan


def _judged(plan: PlanData, data: JsonMapping, changed: bool) -> list[Finding]:
    """What there is to say about who wrote the plan.

    Raises:
        PlanError: it was changed, or nobody can know that it was not, and that is not allowed.
    """
    said = data.get("checksum")
    if said is not None and said == checksum(data):
        return []
    if not changed:
        what = (
            "the plan has no checksum, with which every plan is written: somebody has changed it,"
            " or made it by hand"
            if said is None
            else (
                "the plan was changed since it was written: it is not what its checksum was made of"
            )
        )
        raise ChangedPlanError(
            f"{what}, so that its estimate and findings may be those of another plan\nTry: {AGAIN},"
            " with --pin for decisions of your own; or take it as it is: --changed, or"
            " Plan.from_json(text, changed=True)"
        )
    if said is None:
        as_written = (
            "its decisions are those of its digest, and"
            if data.get("digest") == plan.digest
            else "its decisions are not those of its digest;"
        )
        return [
            Finding(
                code="plan-unchecked",
                severity="warning",
                where="checksum",
                hint=AGAIN,
                message=(
                    f"The plan has no checksum: {as_written} its estimate, search and findings may"
                    " be those of another plan."
                ),
            )
        ]
    return [
        Finding(
            code="plan-changed",
            severity="warning",
            where="checksum",
            hint=AGAIN,
            message=(
                "The plan was changed since it was written; its estimate, search and findings may"
                " be those of another plan."
            ),
        )
    ]


def _faults(plan: PlanData) -> list[str]:
    """Values of the right types that no plan has."""
    found = illegal(plan.decisions)
    found += (
        [f"estimate.peak_flops_per_s is {plan.estimate.peak_flops_per_s}; it is positive"]
        if plan.estimate.peak_flops_per_s <= 0
        else []
    )
    found += [
        f"axis_order is {shown(plan.axis_order)}; it names axes of the mesh {plan.mesh}, each once"
        for _ in [0]
        if not set(plan.axis_order) <= set(plan.mesh)
        or len(set(plan.axis_order)) < len(plan.axis_order)
    ]
    found += [
        f"placement is of {shown(axis)}, which is no axis of the mesh {plan.mesh}"
        for axis, _ in plan.placement
        if axis not in plan.mesh
    ]
    found += [fault for parameter in plan.parameters for fault in _cut_wrong(parameter)]
    found += [fault for one in plan.activations for fault in _held_wrong(one)]
    return found


def _held_wrong(one: ActivationLayout) -> list[str]:
    """Layouts of an activation that have other dims than it."""
    dims = len(one.shape)
    layouts = [("held", one.held), *(("a move", move.layout) for move in one.moves)]
    found = [
        f"{what} of {shown(one.name)} is {layout}, which has {len(layout)} dims, and the activation"
        f" has {dims}"
        for what, layout in layouts
        if len(layout) != dims
    ]
    if len(one.colours) != dims:
        found.append(f"{shown(one.name)} has {len(one.colours)} colours for {dims} dims")
    return found


def _cut_wrong(parameter: ParameterLayout) -> list[str]:
    found = (
        [
            f"{shown(parameter.path)} has {len(parameter.colours)} colours for"
            f" {len(parameter.shape)} dims"
        ]
        if len(parameter.colours) != len(parameter.shape)
        else []
    )
    for name in ("compute", "rest", "gradient", "state"):
        layout: Layout = getattr(parameter, name)
        if len(layout) != len(parameter.shape):
            found.append(
                f"{name} of {shown(parameter.path)} is {layout}, which has {len(layout)} dims, and"
                f" the parameter has {len(parameter.shape)}"
            )
    return found
