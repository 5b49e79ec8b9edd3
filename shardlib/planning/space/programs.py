"""Programs of a model: every way to run its step, in items that have a price."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from shardlib.cost.items.fused_weights import fused_parameters, order_items
from shardlib.cost.items.items import work_items
from shardlib.cost.items.peaks import Peaks, peaks
from shardlib.cost.profiles.rewrites import rewritten
from shardlib.cost.profiles.saved_activations import keep_rows
from shardlib.cost.step.fusion import Traits, traits
from shardlib.cost.step.phases import Moment, spans
from shardlib.cost.step.routed_experts import Exchange, expert_colour, localised
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.terms import Item
from shardlib.graph.forward import forward_pass
from shardlib.graph.problem import Problem, StepGraph
from shardlib.planning.space.limits import batch_size, sequence_size, tensor_colours
from shardlib.propagation.assignment import Choice
from shardlib.propagation.colours import Colouring

#: Most layer groups that each follow a remat policy of their own; with more, all follow one.
MAX_CLASSES = 3


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one way to run a step costs, in items.

    Attributes:
        facts: of its step graph.
        step: that graph, as the software runs it.
        guesses: choices under which memory may peak.
        profile: the software.
        apart: whether layer groups can follow policies of their own.
        work: work items.
    """

    facts: Facts
    step: StepGraph
    guesses: tuple[Choice, ...]
    profile: FrameworkProfile
    apart: bool
    work: list[Item]

    @cached_property
    def _peaks(self) -> Peaks:
        return peaks(self.facts, self.step, self.guesses, self.profile, moments=self.apart)

    @property
    def points(self) -> tuple[list[Item], ...]:
        """Memory items by the point where memory may peak."""
        return self._peaks.points

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Memory by moment of the step, where layer groups can follow policies of their own."""
        return self._peaks.moments

    @property
    def loops(self) -> tuple[int, ...]:
        """The segments of `moments`."""
        moments = spans(self.facts.graph, self.facts.layers) if self.apart else ()
        return tuple(span.segment for span in moments)

    @cached_property
    def forward(self) -> list[Item]:
        """Work items of the forward pass alone."""
        return work_items(self.facts.of(forward_pass(self.facts.graph, saves=True)))


def program_of(
    problem: Problem,
    colouring: Colouring,
    frozen: frozenset[tuple[str, int]],
    profile: FrameworkProfile,
    vendor: str,
    *,
    policy: str,
    routes: bool,
) -> Program:
    """One way to run a step, in items."""
    step, names = rewritten(problem.steps[policy], colouring.steps[policy], profile)
    if routes:
        step, names = localised(step, names, colouring.batch_colour)
        step, names = keep_rows(step, names) if profile.routed_saves == "rows" else (step, names)
    facts = Facts(
        step,
        names,
        frozen,
        _traits(vendor, profile),
        batch=(colouring.batch_colour, batch_size(problem, colouring)),
        sequence=(colouring.sequence_colour, sequence_size(problem, colouring)),
        routes=routes,
        exchange=Exchange(room=profile.exchange_room, sent=profile.exchange),
    )
    by_group = (
        1 < len(facts.layers.counts) <= MAX_CLASSES
        and len(problem.steps) > 1
        and "none" in problem.steps
    )
    return Program(
        facts=facts,
        step=step,
        guesses=tuple(_guesses(colouring, expert_colour(facts.graph, names) if routes else None)),
        profile=profile,
        apart=by_group,
        work=[*work_items(facts), *order_items(facts, fused_parameters(problem))],
    )


def _traits(vendor: str, profile: FrameworkProfile) -> Traits:
    """What the compiler does with the kernels under a framework profile."""
    vendor_traits = traits(vendor)
    return (
        replace(vendor_traits, shares_gathers=True)
        if profile.gathered_inputs == "shared"
        else vendor_traits
    )


def _guesses(colouring: Colouring, expert: str | None) -> list[Choice]:
    """Hypothetical choices, to find the points where memory may peak; with experts where tokens are
    routed to those of a colour.
    """
    tensor, _ = tensor_colours(colouring)
    batch, sequence = colouring.batch_colour, colouring.sequence_colour
    narrow = tuple(
        name
        for name in tensor
        if colouring.colours[name].matmuls
        <= min((colouring.colours[t].matmuls for t in tensor), default=0) * 2
    )
    return [
        *([Choice(batch=batch, expert=expert)] if expert else []),
        Choice(batch=batch),
        *(
            Choice(batch=batch, tensor=names, sequence=s)
            for names in (tensor, narrow)
            for s in (None, sequence)
        ),
    ]
