"""How attention may be computed on a machine, and how a context axis is used."""

from __future__ import annotations

from collections.abc import Callable
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
) -> tuple[list[Strategy], list[Strategy]]:
    """How attention may be computed and the context axis used, and what else plans may do where
    nothing fits.

    A model that calls attention as a function (`shardlib.functions`) leaves to the plan how it is
    computed: by the kernel of the chip's vendor where that applies, which writes no scores. On a
    context axis keys and values go around; gathering them is never faster in the model, and leaves
    attention as it is written. A ring is for those who ask for a context axis, and where nothing
    else fits.

    Args:
        problem: the model.
        pins: the user's decisions.
        profile: the software; some fuses attention whatever the plan says.
        chip: the chips of the machine.
        able: what the framework can do.

    Raises:
        PinError: pinned attention that the model or the chips cannot have.
    """

    def strategy(context: str, attention: str, *, contexts: bool | None = None) -> Strategy:
        made = replace(pins.unsearched, context=context, attention=attention)
        return Strategy(decisions=made, contexts=contexts)

    calls = "attention" in problem.functions
    why_not = (
        _without(problem, chip, pins.attention) if pins.attention not in (None, "traced") else ""
    )
    if why_not:
        raise PinError(
            f"attention={pins.attention!r} is pinned, and {why_not}\nTry: attention='traced'"
        )
    fused, blocks = (
        profile.attention == "fused",
        ("blocks" if calls and pins.attention is None else pins.attention or "traced"),
    )
    best = OF_VENDOR.get(chip.vendor, "traced")
    kernel = pins.attention or (
        "traced" if profile.attention != "traced" or _without(problem, chip, best) else best
    )
    if pins.context is not None:
        attention = {
            "none": kernel,
            "all-gather": "traced",
            "ring": blocks,
            "ulysses": kernel if kernel != "traced" else blocks,
        }[pins.context]
        gathered = "all-gather" if pins.context == "none" else pins.context
        return [strategy(gathered, attention, contexts=pins.context != "none")], []
    if not able.free:
        return _of_framework(strategy, pins, able, kernel), []
    around = (
        [strategy("ring", blocks, contexts=True)]
        if (calls or fused) and blocks in ("blocks", "traced") and (fused or blocks != "traced")
        else []
    )
    asked = (
        pins.mesh["context"] if pins.mesh is not None else dict(pins.axes).get("context", 1)
    ) > 1
    if not fused and kernel == "traced":
        traced = strategy("all-gather", "traced")
        return ([traced, *around], []) if asked else ([traced], around)
    alone = strategy("all-gather", kernel, contexts=False)
    if asked and not around:  # a kernel that a ring has no use for
        return [strategy("ulysses", kernel, contexts=True)], []
    return ([alone, *around], []) if asked or fused else ([alone], around)


def _of_framework(
    strategy: Callable[..., Strategy], pins: Pins, able: Abilities, kernel: str
) -> list[Strategy]:
    """The strategies of a framework, whose profile says how attention is computed: without a
    context axis, and with one in each way that the framework has.
    """
    blocks = "blocks" if kernel == "traced" else kernel
    attention = {"all-gather": "traced", "ring": "blocks", "ulysses": blocks}
    size = dict(pins.mesh if pins.mesh is not None else pins.axes).get("context", 1)
    alone = [] if size > 1 else [strategy("all-gather", kernel, contexts=False)]
    ways = able.contexts if "context" in able.axes else ()
    return alone + [strategy(way, attention[way], contexts=True) for way in ways]


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
