"""What holds a plan back?

A search can be stopped short by three things: memory (faster plans that do not fit), pins (the best
plan without one of them), and sizes that do not divide (a mesh axis that can grow no further). Each
is answered by asking again: for memory every faster plan is known with its bytes, for a pin the
search is repeated without it, and for a size the largest number of parts that divides is compared
with the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardlib.axes import BATCH_AXES
from shardlib.cost.machine.corrections import margin
from shardlib.errors import InfeasibleError, PinError
from shardlib.planning.answers.constraint import Binding, Constraints, OutOfReach
from shardlib.planning.plan import Plan, source_of
from shardlib.planning.questions.counterfactual import faster_without_limit
from shardlib.planning.space import limits
from shardlib.planning.units.quantity import TIE, bytes_text, percent_text, seconds_text


def constraints(plan: Plan) -> Constraints:
    """What holds a plan back."""
    steps = staircase(plan)
    bindings = [*_memory(plan, steps), *_pins(plan), *_sizes(plan)]
    bindings.sort(
        key=lambda binding: (
            binding.step_seconds or plan.estimate.step_seconds,
            binding.kind,
            binding.what,
        )
    )
    return Constraints(
        step_seconds=plan.estimate.step_seconds, binding=tuple(bindings), staircase=steps
    )


def staircase(plan: Plan) -> tuple[OutOfReach, ...]:
    """Faster plans that do not fit, the one that lacks least memory first."""
    topology = source_of(plan).topology
    usable, memory_margin = topology.chip.usable_bytes, margin(topology)
    steps: list[OutOfReach] = []
    for entry in faster_without_limit(plan):
        if steps and entry.seconds <= steps[-1].step_seconds * (1 + TIE):
            steps.pop()  # as fast, and needs more
        steps.append(
            OutOfReach(
                mesh=entry.candidate.mesh,
                summary=entry.candidate.summary,
                step_seconds=entry.seconds,
                peak_bytes=int(entry.peak_bytes),
                short_bytes=int(entry.peak_bytes * memory_margin - usable),
            )
        )
    return tuple(reversed(steps))


def _memory(plan: Plan, steps: tuple[OutOfReach, ...]) -> Iterable[Binding]:
    if not steps:
        return
    nearest, fastest, before = steps[0], steps[-1], plan.estimate.step_seconds
    message = (
        f"Memory: {bytes_text(nearest.short_bytes)} more on every device would allow {nearest.mesh}"
        f" and save {seconds_text(before - nearest.step_seconds)} a step"
    )
    if fastest is not nearest:
        message += (
            f"; with memory to spare a step would take {seconds_text(fastest.step_seconds)}"
            f" ({percent_text(1 - fastest.step_seconds / before)} less)"
        )
    yield Binding(
        kind="memory",
        what=source_of(plan).topology.chip.name,
        message=message + ".",
        step_seconds=fastest.step_seconds,
    )


def _pins(plan: Plan) -> Iterable[Binding]:
    source, before = source_of(plan), plan.estimate.step_seconds
    for name, others in source.pins.without().items():
        try:
            free = source.search(source.topology, others)
        except (InfeasibleError, PinError):
            continue
        gain = before - free.estimate.step_seconds
        if gain > TIE * before:
            yield Binding(
                kind="pin",
                what=name,
                step_seconds=free.estimate.step_seconds,
                message=(
                    f"The pin on {name} costs {seconds_text(gain)} a step: left to the planner,"
                    f" {free.mesh} takes {seconds_text(free.estimate.step_seconds)}."
                ),
            )


def _sizes(plan: Plan) -> Iterable[Binding]:
    """Sizes that the mesh has used up: the batch, the sequence, and colours that the tensor axis
    cuts.
    """
    source, colouring = source_of(plan), source_of(plan).load.colouring
    problem, mesh = source.load.problem, plan.mesh
    batch, degree = limits.batch_size(problem, colouring), mesh.ways(BATCH_AXES)
    for idle in (finding for finding in plan.findings if finding.code == "idle-devices"):
        yield Binding(
            kind="size",
            what="devices",
            message=f"{idle.message[:1].upper()}{idle.message[1:]}.",
        )
    if mesh.devices > 1 and batch > 1 and degree >= batch:
        yield Binding(
            kind="size",
            what=colouring.batch_colour or "batch",
            message=(
                f"Every one of the {batch:,} examples of the batch has a device of its own: the"
                " batch can be sharded no further."
            ),
        )
    if (tensor := mesh["tensor"]) > 1:
        cut = [
            name
            for name, axes in plan.rules.entries
            if "tensor" in axes and name in colouring.colours
        ]
        stuck = [
            f"{name} ({colouring.colours[name].divisor:,})"
            for name in cut
            if colouring.colours[name].divisor % (2 * tensor)
        ]
        if stuck:
            yield Binding(
                kind="size",
                what="tensor",
                message=(
                    f"A tensor axis of {2 * tensor} does not divide {', '.join(stuck)}, which"
                    f" {tensor} parts divide now."
                ),
            )
