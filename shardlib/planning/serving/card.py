"""A serving plan in one line, and as a card in a notebook, with its curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from shardlib.planning.serving.estimate import ServingPoint
from shardlib.planning.serving.serving_plan import ServingPlan
from shardlib.planning.serving.text import explained
from shardlib.planning.units.cards import card, short
from shardlib.planning.units.quantity import bytes_text, count_text, seconds_text

#: Width and height of the curve, and what its axes take.
WIDE, HIGH, LEFT, BELOW = 640, 220, 54, 30


def serving_line(plan: ServingPlan) -> str:
    """A plan in one line."""
    choice, estimate = plan.choice, plan.estimate
    return short(
        "ServingPlan",
        f"{plan.model} on {plan.topology}: {choice.replicas} x tensor={choice.tensor}",
        f"{choice.batch} requests each",
        f"{count_text(estimate.output_tokens_per_second_per_chip)} tokens/s a chip",
        f"a token every {seconds_text(estimate.tpot_seconds)}",
    )


def serving_card(plan: ServingPlan, points: Sequence[ServingPoint] = ()) -> str:
    """A plan as HTML for a notebook."""
    estimate, sizes = plan.estimate, plan.estimate.device_bytes
    memory = [
        (name, size, bytes_text(size))
        for name, size in (
            ("weights", sizes.weights),
            ("pages", sizes.cache),
            ("temporaries", sizes.temporaries),
            ("spare", sizes.limit - sizes.peak),
        )
        if size > 0
    ]
    first, _, remainder = explained(plan).partition("\n\n")
    html = card(
        first.replace("\n", " "),
        [remainder.partition("\n\n")[0].replace("\n", " ")],
        bars=(
            (
                "from token to token",
                [(part, size, seconds_text(size)) for part, size in estimate.parts.items() if size],
            ),
            ("memory of a device", memory),
        ),
        text=explained(plan),
    )
    return (
        html
        if len(points) < 2
        else html.replace("<details>", f"{curve_svg(points, plan)}<details>")
    )


def curve_svg(points: Sequence[ServingPoint], plan: ServingPlan | None = None) -> str:
    """Tokens a second and chip against seconds from token to token, as SVG; the latter on a
    logarithmic axis. What is chosen is filled.
    """
    times = [math.log(point.tpot_seconds) for point in points]
    highest = max(point.output_tokens_per_second_per_chip for point in points)
    low, high = min(times), max(times)
    span = (high - low) or 1.0

    def at(point: ServingPoint) -> tuple[float, float]:
        across = (math.log(point.tpot_seconds) - low) / span
        up = point.output_tokens_per_second_per_chip / highest
        return LEFT + across * (WIDE - LEFT - 12), HIGH - BELOW - up * (HIGH - BELOW - 14)

    def chosen(point: ServingPoint) -> bool:
        return plan is not None and (point.tensor, point.batch, point.chunk) == (
            plan.choice.tensor,
            plan.choice.batch,
            plan.choice.chunk,
        )

    places = [at(point) for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if chosen(point) else 3}"'
        f' fill="{"#d55e00" if chosen(point) else "#0072b2"}">'
        f"<title>{escape(_told(point))}</title></circle>"
        for point, (x, y) in zip(points, places, strict=True)
    ]
    ends = [
        (LEFT, HIGH - 8, "start", seconds_text(math.exp(low))),
        (WIDE - 12, HIGH - 8, "end", seconds_text(math.exp(high)) + " a token"),
        (LEFT - 6, 22, "end", count_text(highest)),
        (LEFT - 6, HIGH - BELOW, "end", "0"),
        (LEFT + 4, 12, "start", "tokens/s a chip"),
    ]
    words = [
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11" fill="currentColor">'
        f"{escape(text)}</text>"
        for x, y, anchor, text in ends
    ]
    return (
        f'<svg viewBox="0 0 {WIDE} {HIGH}" style="width:100%;height:auto;max-width:{WIDE}px"'
        ' role="img" aria-label="throughput against latency">'
        f'<polyline points="{line}" fill="none" stroke="#0072b2" stroke-width="1.5"/>'
        + "".join((*marks, *words))
        + f'<path d="M{LEFT} 14V{HIGH - BELOW}H{WIDE - 12}" fill="none" stroke="currentColor"'
        ' stroke-opacity=".4"/></svg>'
    )


def _told(point: ServingPoint) -> str:
    return (
        f"{point.replicas} x tensor {point.tensor}, {point.batch} requests, chunk {point.chunk}:"
        f" {count_text(point.output_tokens_per_second_per_chip)} tokens/s a chip, a token every"
        f" {seconds_text(point.tpot_seconds)}, the first after {seconds_text(point.ttft_seconds)}"
    )
