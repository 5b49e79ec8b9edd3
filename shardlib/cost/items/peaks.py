"""Items of memory: what is alive at the points of a step where memory may peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from shardlib.cost.items.live_buffers import lives
from shardlib.cost.profiles.retained_buffers import Keeping, Life
from shardlib.cost.step.liveness import alive_at, levels, points
from shardlib.cost.step.phases import Moment, Span, spans
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import XLA
from shardlib.cost.terms.terms import INSIDE, OUTSIDE_LAYERS, Item, Resident, Term, amount, named
from shardlib.graph.problem import StepGraph
from shardlib.propagation.assignment import Choice

#: How much less a part weighs under ZeRO 2 and 3 with a large fsdp axis, in search of the points
#: where memory may peak.
_WEIGHTS: tuple[dict[str, float], ...] = (
    {"gathered": 0.0},
    {"gathered": 0.0, "gradient": 1 / 64},
    {"gradient": 1 / 64, "copy": 1 / 64},
)


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Memory of a program.

    Attributes:
        points: items of memory for each point where memory may peak.
        moments: the same for each moment from the end of the forward pass on, where they are asked
            for.
    """

    points: tuple[list[Item], ...]
    moments: tuple[Moment, ...]


def peaks(
    facts: Facts,
    step: StepGraph,
    choices: Iterable[Choice],
    profile: FrameworkProfile = XLA,
    *,
    moments: bool = False,
) -> Peaks:
    """Items of memory for each point of the program where memory may peak, found under several
    hypothetical choices.
    """
    keeping = Keeping(facts, profile)
    all_lives = keeping.lives(lives(facts, step, profile))
    producers = facts.graph.producers()
    when = {number: (life.birth, life.death) for number, life in enumerate(all_lives)}
    alive = levels(
        facts.graph,
        when,
        [
            sizes * np.array([parts.get(life.part, 1.0) for life in all_lives])
            for choice in choices
            for sizes in [_sizes(facts, all_lives, choice)]
            for parts in _WEIGHTS
        ],
    )
    cache: dict[int, Item] = {}

    def item(number: int) -> Item:
        if number not in cache:
            cache[number] = _item(facts, producers, all_lives[number], keeping)
        return cache[number]

    def items(numbers: Iterable[int]) -> list[Item]:
        return [item(number) for number in sorted(numbers)]

    def moment(span: Span) -> Moment:
        peak_points = (
            dict.fromkeys(
                span.first + int(np.argmax(level[span.first : span.last + 1])) for level in alive
            )
            if span.first <= span.last
            else {}
        )
        return Moment(
            segment=span.segment,
            points=tuple(items(alive_at(when, peak, peak)) for peak in peak_points),
            stacks=[
                stacked
                for stacked in items(alive_at(when, span.before, span.after))
                if stacked.segment >= 0
            ],
        )

    return Peaks(
        points=tuple(map(items, points(when, alive))),
        moments=tuple(map(moment, spans(facts.graph, facts.layers))) if moments else (),
    )


def _sizes(facts: Facts, all_lives: list[Life], choice: Choice) -> np.ndarray:
    """Bytes of every life if each kind of cut divides by 64."""
    return np.array(
        [
            facts.graph.values[life.value].bytes
            * life.share
            / 64.0 ** sum(part is not None for part in facts.value_cut(life.value, choice))
            for life in all_lives
        ]
    )


def _item(facts: Facts, producers: dict[int, int], life: Life, keeping: Keeping) -> Item:
    value = facts.graph.values[life.value]
    op = facts.graph.ops[producers[life.value]] if life.value in producers else None
    segment = facts.layers.segment(op.region) if op else OUTSIDE_LAYERS
    stacked = op is not None and (op.kind == "exit" or life.part == "cast") and segment >= 0

    def terms(choice: Choice) -> tuple[Term, ...]:
        cut = keeping.cut(life.value, choice)
        resident = Resident(
            bytes=amount(value.bytes * life.share * keeping.room(life.value, choice), cut),
            part=life.part,
            stacked=stacked,
            shape=value.shape,
            cut=cut,
        )
        return (resident,) if life.kernel is None else _by_heads(facts, life, resident, choice)

    counted_in = segment if stacked or segment == OUTSIDE_LAYERS else INSIDE
    names, size = facts.names[life.value], value.bytes * life.share
    kernels = () if life.kernel is None else (life.kernel,)
    alike = facts.plain(kernels, (life.value,)) and keeping.plain(life.value)
    return Item(
        colours=named(names),
        terms=terms,
        segment=counted_in,
        made_of=(life.part, stacked, names, value.shape, size, counted_in) if alike else None,
    )


def _by_heads(facts: Facts, life: Life, resident: Resident, choice: Choice) -> tuple[Term, ...]:
    """What a device has inside of a kernel of attention: of its own heads where the tensor axis
    shards them inside of it alone, and of all heads where the devices cannot share them out.
    """
    assert life.kernel is not None
    if not facts.shares_heads(life.kernel, choice):
        return () if life.whole else (resident,)
    heads = facts.heads[life.kernel]
    replicated = replace(
        resident, bytes=replace(resident.bytes, tensor=False), heads=heads.where("none")
    )
    return (
        (replicated,)
        if life.whole
        else (replace(resident, heads=heads.where("all", "queries")), replicated)
    )
