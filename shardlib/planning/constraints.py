"""What holds a plan back?

A search can be stopped short by three things: memory (faster plans that do not fit), pins (the best plan without one of them), and sizes
that do not divide (a mesh axis that can grow no further). Each is answered by asking again: for memory every faster plan is known with its
bytes, for a pin the search is repeated without it, and for a size the largest number of parts that divides is compared with the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shardlib.axes import MeshShape
from shardlib.errors import InfeasibleError, PinError
from shardlib.planning import space
from shardlib.planning.counterfactual import faster_without_limit, searched, source_of
from shardlib.planning.plan import Plan
from shardlib.planning.quantity import bytes_text, percent_text, seconds_text
from shardlib.planning.ranking import TIE
from shardlib.planning.tables import aligned, wrapped

#: Rows of the table of plans that do not fit.
_MOST_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class OutOfReach:
    """A plan that is faster and does not fit; none that needs less memory is as fast, unless it recomputes a part of the layers only.

    Attributes:
        mesh: its mesh.
        summary: its other decisions in a few words.
        step_seconds: predicted time of a step.
        peak_bytes: predicted bytes per device.
        short_bytes: bytes that a device lacks for it.
    """

    mesh: MeshShape
    summary: str
    step_seconds: float
    peak_bytes: int
    short_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {**self.__dict__, "mesh": dict(self.mesh)}


@dataclass(frozen=True, kw_only=True)
class Binding:
    """A constraint without which the plan would be faster, or could be.

    Attributes:
        kind: "memory", "pin" or "size".
        what: the memory of the chip, the pin, or the colour whose size it is.
        message: one sentence.
        step_seconds: time of the best plan without it; 0 where it is not known.
    """

    kind: str
    what: str
    message: str
    step_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The constraint as plain data."""
        return dict(self.__dict__)


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What holds a plan back.

    Attributes:
        step_seconds: time of the plan.
        binding: the constraints, the one that costs most first.
        staircase: faster plans that do not fit, the one that lacks least first; each is faster than all before it.
    """

    step_seconds: float
    binding: tuple[Binding, ...]
    staircase: tuple[OutOfReach, ...]

    def to_json(self) -> dict[str, Any]:
        """The constraints as plain data."""
        return {"step_seconds": self.step_seconds, "binding": [one.to_json() for one in self.binding], "staircase": [one.to_json() for one in self.staircase]}

    def __str__(self) -> str:
        lines = ["What holds the plan back"]
        lines += [line for one in self.binding for line in wrapped("  - ", one.message)] or wrapped("  - ", "nothing: no memory, pin or size stands in the way of a faster plan.")
        if self.staircase:
            rows = [("step", "memory", "lacking", "mesh", "other decisions")]
            rows += [(seconds_text(one.step_seconds), bytes_text(one.peak_bytes), bytes_text(one.short_bytes), str(one.mesh), one.summary or "-")
                     for one in self.staircase[:_MOST_ROWS]]
            more = len(self.staircase) - _MOST_ROWS
            lines += ["", "Faster plans that do not fit", *aligned(rows, right={0, 1, 2}), *([f"  and {more} that lack still more"] if more > 0 else [])]
        return "\n".join(lines) + "\n"


def constraints(plan: Plan) -> Constraints:
    """What holds a plan back.

    Raises:
        PlanError: the plan was read from a file.
    """
    steps = staircase(plan)
    found = [*_memory(plan, steps), *_pins(plan), *_sizes(plan)]
    found.sort(key=lambda one: (one.step_seconds or plan.estimate.step_seconds, one.kind, one.what))
    return Constraints(step_seconds=plan.estimate.step_seconds, binding=tuple(found), staircase=steps)


def staircase(plan: Plan) -> tuple[OutOfReach, ...]:
    """Faster plans that do not fit, the one that lacks least memory first."""
    usable = source_of(plan).topology.chip.usable_bytes
    steps: list[OutOfReach] = []
    for one in faster_without_limit(plan):
        if steps and one.seconds <= steps[-1].step_seconds * (1 + TIE):
            steps.pop()  # as fast, and needs more
        steps.append(OutOfReach(mesh=one.decision.mesh, summary=one.decision.summary, step_seconds=one.seconds, peak_bytes=int(one.peak_bytes),
                                short_bytes=int(one.peak_bytes - usable)))
    return tuple(reversed(steps))


def _memory(plan: Plan, steps: tuple[OutOfReach, ...]) -> Iterable[Binding]:
    if not steps:
        return
    nearest, fastest, before = steps[0], steps[-1], plan.estimate.step_seconds
    message = f"Memory: {bytes_text(nearest.short_bytes)} more on every device would allow {nearest.mesh} and save {seconds_text(before - nearest.step_seconds)} a step"
    if fastest is not nearest:
        message += f"; with memory to spare a step would take {seconds_text(fastest.step_seconds)} ({percent_text(1 - fastest.step_seconds / before)} less)"
    yield Binding(kind="memory", what=source_of(plan).topology.chip.name, message=message + ".", step_seconds=fastest.step_seconds)


def _pins(plan: Plan) -> Iterable[Binding]:
    source, before = source_of(plan), plan.estimate.step_seconds
    for name, others in source.pins.without().items():
        try:
            free = searched(source, source.topology, others)
        except (InfeasibleError, PinError):
            continue
        gain = before - free.estimate.step_seconds
        if gain > TIE * before:
            yield Binding(kind="pin", what=name, step_seconds=free.estimate.step_seconds,
                          message=f"The pin on {name} costs {seconds_text(gain)} a step: left to the planner, {free.mesh} takes {seconds_text(free.estimate.step_seconds)}.")


def _sizes(plan: Plan) -> Iterable[Binding]:
    """Sizes that the mesh has used up: the batch, the sequence, and colours that the tensor axis cuts."""
    source, colouring = source_of(plan), source_of(plan).load.colouring
    problem, mesh = source.load.problem, plan.mesh
    batch, ways = space.batch_size(problem, colouring), mesh.ways(("data", "fsdp", "expert"))
    if mesh.devices < source.topology.devices:
        yield Binding(kind="size", what="devices", message=f"The plan uses {mesh.devices:,} of {source.topology.devices:,} devices: more divide neither the batch of {batch:,} nor the model.")
    if mesh.devices > 1 and batch > 1 and ways >= batch:
        yield Binding(kind="size", what=colouring.batch_colour or "batch",
                      message=f"Every one of the {batch:,} examples of the batch has a device of its own: the batch can be cut no further.")
    if (tensor := mesh["tensor"]) > 1:
        cut = [name for name, axes in plan.rules.entries if "tensor" in axes and name in colouring.colours]
        stuck = [f"{name} ({colouring.colours[name].divisor:,})" for name in cut if colouring.colours[name].divisor % (2 * tensor)]
        if stuck:
            yield Binding(kind="size", what="tensor", message=f"A tensor axis of {2 * tensor} does not divide {', '.join(stuck)}, which {tensor} parts cut now.")
