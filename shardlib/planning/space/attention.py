"""How attention may be computed on a machine, and how a context axis is used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardlib.cost.terms.abilities import ANYTHING, Abilities
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.decisions.pins import Pins
from shardlib.decisions.table import Decisions
from shardlib.errors import PinError
from shardlib.graph.kernels import OF_VENDOR
from shardlib.graph.problem import Problem
from shardlib.hardware.chip import Chip


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How attention is computed, and the context axis used.

    Attributes:
        decisions: with `context` and `attention`, and what the planner does not decide.
        contexts: whether plans have a context axis of more than one device: all of them (True),
            none (False), or some (None).
    """

    decisions: Decisions
    contexts: bool | None = None


def strategies(
    problem: Problem,
    pins: Pins,
    profile: FrameworkProfile,
    chip: Chip,
    able: Abilities = ANYTHING,
) -> list[Strategy]:
    """How attention may be computed and the context axis used.

    A model that calls attention as a function (`shardlib.functions`) leaves to the plan how it is
    computed: by the kernel of the chip's vendor where that applies, which writes no scores; in
    blocks, or as it is written. On a context axis keys and values are gathered, which leaves
    attention as it is written, or go around, or devices exchange parts of the sequence for heads.
    """
    why_not = (
        _without(problem, chip, pins.attention) if pins.attention not in (None, "traced") else ""
    )
    if why_not:
        raise PinError(
            f"attention={pins.attention!r} is pinned, and {why_not}\nTry: attention='traced'"
        )
    if not able.free and pins.context is None:
        return _of_framework(pins, able, _kernel(problem, pins, profile, chip))
    without, required = pins.context == "none", pins.context not in (None, "none")
    return [
        Strategy(
            decisions=replace(pins.unsearched, context=context, attention=attention),
            contexts=False if without else True if required else contexts,
        )
        for context, attention, contexts in dict.fromkeys(_ways(problem, pins, profile, chip))
        if not (without and contexts is True)
        and not (required and (contexts is False or context != pins.context))
    ]


def _ways(
    problem: Problem, pins: Pins, profile: FrameworkProfile, chip: Chip
) -> Iterator[tuple[str, str, bool | None]]:
    """(context, attention, whether with a context axis) of all strategies, whatever context is
    pinned to.
    """
    pinned, calls = pins.attention, "attention" in problem.functions
    around = pinned or ("blocks" if calls else "traced")
    if profile.attention == "fused":  # then to gather keys and values is never faster
        yield "all-gather", pinned or "traced", False
        others = () if pins.context in (None, "none", "ring") else (pins.context,)
        for context in ("ring", *others):
            yield context, "traced" if context == "all-gather" else around, True
        return
    kernel = OF_VENDOR.get(chip.vendor, "traced")
    applies = calls and kernel != "traced" and not _without(problem, chip, kernel)
    kernels = [kernel] if applies and profile.attention == "traced" else []
    blocks = ["blocks"] if calls and profile.attention == "traced" else []
    for attention in (pinned,) if pinned else (*kernels, *blocks, "traced"):
        yield "all-gather", attention, None if attention == "traced" else False
    if around in ("blocks", "traced") and calls:
        yield "ring", around, True
    for attention in (pinned,) if pinned else (*kernels, *blocks):
        if calls:
            yield "ulysses", attention, True


def _kernel(problem: Problem, pins: Pins, profile: FrameworkProfile, chip: Chip) -> str:
    """How attention is computed where nothing else is said: as pinned, or by the kernel of the
    vendor where that applies.
    """
    best = OF_VENDOR.get(chip.vendor, "traced")
    untraced = profile.attention != "traced" or _without(problem, chip, best)
    return pins.attention or ("traced" if untraced else best)


def _of_framework(pins: Pins, able: Abilities, kernel: str) -> list[Strategy]:
    """The strategies of a framework, whose profile says how attention is computed: without a
    context axis, and with one in each way that the framework has.
    """

    def strategy(context: str, attention: str, *, contexts: bool) -> Strategy:
        decisions = replace(pins.unsearched, context=context, attention=attention)
        return Strategy(decisions=decisions, contexts=contexts)

    blocks = "blocks" if kernel == "traced" else kernel
    attention = {"all-gather": "traced", "ring": "blocks", "ulysses": blocks}
    size = dict(pins.mesh if pins.mesh is not None else pins.axes).get("context", 1)
    alone = [] if size > 1 else [strategy("all-gather", kernel, contexts=False)]
    contexts_able = able.contexts if "context" in able.axes else ()
    return alone + [
        strategy(context, attention[context], contexts=True) for context in contexts_able
    ]


def _without(problem: Problem, chip: Chip, kind: str | None) -> str:
    """Why attention cannot be computed by a kernel; empty where it can."""
    if "attention" not in problem.functions:
        return f"{problem.model} does not call attention as a function (shardlib.attention)"
    makers = {kernel: maker for maker, kernel in OF_VENDOR.items()}
    if kind in makers and makers[kind] != chip.vendor:
        return f"that is a kernel for chips of {makers[kind]}, not of {chip.vendor}"
    if kind == "cudnn" and problem.attention.width > chip.attention_width:
        return (
            f"heads are {problem.attention.width} wide; the kernel takes {chip.attention_width} on"
            f" {chip.name}"
        )
    return dict(problem.attention.without).get(kind or "", "")
