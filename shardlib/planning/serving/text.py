"""A serving plan as text."""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.planning.serving.estimate import LIMITS, ServingPoint
from shardlib.planning.serving.serving_plan import ServingPlan
from shardlib.planning.serving.space import CHUNK_SIZES, MOST_REQUESTS
from shardlib.planning.serving.two_meshes import TwoMeshes
from shardlib.planning.units.quantity import (
    bytes_text,
    count_text,
    percent_text,
    ratio_text,
    seconds_text,
)
from shardlib.planning.units.tables import aligned, wrapped

#: Points of the curve that are shown.
SHOWN = 8


def explained(plan: ServingPlan) -> str:
    """What was chosen, what it is predicted to do, and what limits it."""
    lines = [*_head(plan), "", *_seconds(plan), "", *_memory(plan)]
    lines += ["", *_search(plan)]
    for one in plan.findings:
        lines += wrapped(
            f"{one.severity}: ", f"{one.message}{f' Try: {one.hint}' * bool(one.hint)}"
        )
    return "\n".join(lines) + "\n"


def curve(points: Sequence[ServingPoint]) -> str:
    """A curve of choices as a table; of many, some that are evenly spread."""
    step = max(1, (len(points) - 1) / (SHOWN - 1)) if len(points) > SHOWN else 1
    shown = [points[round(at * step)] for at in range(min(SHOWN, len(points)))]
    rows = [["tensor", "replicas", "batch", "chunk", "a token", "first token", "tokens/s a chip"]]
    rows += [
        [
            str(one.tensor),
            str(one.replicas),
            str(one.batch),
            str(one.chunk),
            seconds_text(one.tpot_seconds),
            seconds_text(one.ttft_seconds),
            count_text(one.output_tokens_per_second_per_chip),
        ]
        for one in shown
    ]
    return "\n".join(aligned(rows, right=range(7)))


def differences(plan: ServingPlan, other: ServingPlan) -> str:
    """What another plan decides and does differently."""
    one, two = plan.estimate, other.estimate
    rows = [["", "this", "other", ""]]
    for name, mine, its in (
        ("model", plan.model, other.model),
        ("topology", plan.topology, other.topology),
        ("tensor", plan.choice.tensor, other.choice.tensor),
        ("replicas", plan.choice.replicas, other.choice.replicas),
        ("batch", plan.choice.batch, other.choice.batch),
        ("chunk", plan.choice.chunk, other.choice.chunk),
        ("page", plan.choice.page, other.choice.page),
    ):
        if mine != its:
            rows.append([name, str(mine), str(its), ""])
    for name, mine, its, text in (
        (
            "tokens/s a chip",
            one.output_tokens_per_second_per_chip,
            two.output_tokens_per_second_per_chip,
            count_text,
        ),
        ("from token to token", one.tpot_seconds, two.tpot_seconds, seconds_text),
        ("first token", one.ttft_seconds, two.ttft_seconds, seconds_text),
        ("chips", float(one.chips), float(two.chips), count_text),
        ("memory of a device", one.device_bytes.peak, two.device_bytes.peak, bytes_text),
    ):
        rows.append([name, text(mine), text(its), ratio_text(its / mine)])
    return "\n".join(aligned(rows, right={1, 2, 3})) + "\n"


def _head(plan: ServingPlan) -> list[str]:
    load, choice, estimate = plan.workload, plan.choice, plan.estimate
    asked = f"prompts of {load.prompt} tokens, answers of {load.output}"
    limits = [
        *([f"{load.rate:g} requests a second"] if load.rate is not None else []),
        *([f"first token within {seconds_text(load.ttft)}"] if load.ttft is not None else []),
        *([f"a token every {seconds_text(load.tpot)}"] if load.tpot is not None else []),
    ]
    several = choice.replicas > 1
    group = f"{choice.tensor} devices" if choice.tensor > 1 else "one device"
    groups = (
        f"{choice.replicas} groups of {group} each serve"
        if several
        else (f"A group of {group} serves" if choice.tensor > 1 else "One device serves")
    )
    return [
        *wrapped("", f"{plan.model} on {plan.topology}: {', '.join([asked, *limits])}"),
        "",
        *wrapped(
            "",
            (
                f"{groups} {choice.batch} requests at a time, with {choice.chunk} tokens of prompts"
                f" in a step and {choice.pages} pages of {choice.page} tokens; weights"
                f" {load.weights}, cache {load.cache}."
            ),
        ),
        *wrapped(
            "",
            (
                f"{count_text(estimate.output_tokens_per_second_per_chip)} tokens/s a chip"
                f" ({count_text(estimate.requests_per_second)} requests a second on"
                f" {estimate.chips}), {estimate.chip_hours_per_million:.3g} chip-hours a million"
                f" tokens. The first token comes after {seconds_text(estimate.ttft_seconds)}, then"
                f" one every {seconds_text(estimate.tpot_seconds)}."
            ),
        ),
        *wrapped("", f"Most of it goes to the {LIMITS[estimate.limited_by]}."),
    ]


def _seconds(plan: ServingPlan) -> list[str]:
    estimate = plan.estimate
    decode, prompt = dict(estimate.decode), dict(estimate.prompt)
    rows = [["a step", "next tokens", "and a chunk", "from token to token"]]
    for part, seconds in estimate.parts.items():
        if decode.get(part, 0.0) or prompt.get(part, 0.0):
            rows.append(
                [
                    part,
                    seconds_text(decode.get(part, 0.0)),
                    seconds_text(prompt.get(part, 0.0)),
                    f"{seconds_text(seconds)} {percent_text(seconds / estimate.tpot_seconds):>4}",
                ]
            )
    rows.append(
        [
            "all",
            seconds_text(sum(decode.values())),
            seconds_text(sum(prompt.values())),
            f"{seconds_text(estimate.tpot_seconds)} {percent_text(1.0):>4}",
        ]
    )
    return [
        *aligned(rows, right={1, 2, 3}),
        f"{percent_text(estimate.chunk_share)} of the steps compute a chunk of prompts.",
    ]


def _memory(plan: ServingPlan) -> list[str]:
    found = plan.estimate.device_bytes
    rows = [
        ["a device", "bytes"],
        ["weights", bytes_text(found.weights)],
        ["pages", bytes_text(found.cache)],
        ["temporaries", bytes_text(found.temporaries)],
        ["all", f"{bytes_text(found.peak)} of {bytes_text(found.limit)}"],
    ]
    return aligned(rows, right={1})


def _search(plan: ServingPlan) -> list[str]:
    found = plan.search
    kept = "" if found.kept == found.candidates else f", {found.kept} of them within the limits"
    return wrapped(
        "",
        (
            f"All {found.candidates} choices that fit were priced{kept}, in"
            f" {seconds_text(found.seconds)}: every number of devices that divides, every batch up"
            f" to {MOST_REQUESTS:,} and {len(CHUNK_SIZES)} sizes of chunks; among them and within"
            " the prices no better one exists."
        ),
    )


def meshes(two: TwoMeshes | None) -> str:
    """What prompts on a mesh of their own would give, as text.

    Args:
        two: the plan of two meshes; None where there is none.
    """
    if two is None:
        return "With prompts on a mesh of their own nothing fits, or keeps to the limits."
    return "\n".join(
        wrapped(
            "",
            (
                f"With prompts on a mesh of their own ({two.prefill_replicas} x tensor"
                f" {two.prefill_tensor}) and next tokens on another ({two.decode_replicas} x tensor"
                f" {two.decode_tensor}, {two.batch} requests each):"
                f" {count_text(two.output_tokens_per_second_per_chip)} tokens/s a chip, a token"
                f" every {seconds_text(two.tpot_seconds)}, the first after"
                f" {seconds_text(two.ttft_seconds)}; {bytes_text(two.transfer_bytes)} of a request"
                f" move in {seconds_text(two.transfer_seconds)}. shardlib's engine runs both on one"
                " mesh."
            ),
        )
    )
