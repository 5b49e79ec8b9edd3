"""A plan in one line, and as a card in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from shardlib.cost.estimate import DeviceBytes, Seconds
from shardlib.planning.plan import Plan
from shardlib.planning.text.decision_lines import decision_lines
from shardlib.planning.text.explain import explain, headline, usable_bytes
from shardlib.planning.text.figures import LABELS
from shardlib.planning.units.cards import card, short
from shardlib.planning.units.html_elements import Part
from shardlib.planning.units.quantity import bytes_text, seconds_text


def plan_line(plan: Plan, name: str = "Plan") -> str:
    """A plan in one line."""
    estimate = plan.estimate
    return short(
        name,
        f"{plan.model} on {plan.topology}: {plan.mesh}",
        f"zero {plan.zero}" if plan.zero else "",
        f"{seconds_text(estimate.step_seconds)} a step",
        f"{bytes_text(estimate.device_bytes.peak)} a device",
    )


def plan_card(plan: Plan) -> str:
    """A plan as HTML for a notebook."""
    first, *lines = headline(plan).splitlines()
    room = usable_bytes(plan)
    memory = _parts(plan.estimate.device_bytes, bytes_text)
    spare = 0.0 if room is None else room - plan.estimate.device_bytes.peak
    if spare > 0:
        memory.append(("spare", spare, bytes_text(spare)))
    return card(
        first,
        lines,
        bars=(
            ("time of a step", _parts(plan.estimate.seconds, seconds_text)),
            ("memory of a device", memory),
        ),
        rows=decision_lines(plan),
        text=explain(plan),
    )


def _parts(value: Seconds | DeviceBytes, words: Callable[[float], str]) -> list[Part]:
    found: list[Part] = []
    for one in fields(value):
        size = float(getattr(value, one.name))
        if size > 0:
            label = LABELS.get(one.name, one.name) if isinstance(value, Seconds) else one.name
            found.append((label, size, words(size)))
    return found
