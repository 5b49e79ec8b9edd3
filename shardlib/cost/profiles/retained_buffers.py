"""What a framework keeps in memory beside, or instead of, what the program says.

Facts of a `FrameworkProfile` about memory that are no rewrite of the program: copies beside what
the kernel of attention keeps, results of layers that wait in host memory, inputs of matmuls that
are kept as they were gathered along the sequence, and whatever a loss that is computed op by op
holds of its logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardlib.cost.step.attention_kernels import FORWARD
from shardlib.cost.step.layer_results import products, roles
from shardlib.cost.step.routed_experts import arrived_values
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.terms import OUTSIDE_LAYERS
from shardlib.graph import Graph
from shardlib.propagation.assignment import Choice, Cut

#: Layers whose saved results are on their way to or from host memory: one is written or read while
#: the next one is worked with.
_IN_TRANSIT = 2


@dataclass(frozen=True, kw_only=True)
class Life:
    """Where a value is in memory.

    Attributes:
        value: the value.
        part: see `Resident`.
        birth: index of the first op at which it is there.
        death: index of the last.
        share: bytes of memory over those of the value.
        kernel: op that is a kernel of attention inside of which the value is, with the heads that
            a device has there; None for what is outside.
        whole: whether the value is there only where devices cannot share these heads out, so that
            each has all of them.
    """

    value: int
    part: str
    birth: int
    death: int
    share: float = 1.0
    kernel: int | None = None
    whole: bool = False


class Keeping:
    """The memory of values under a framework profile."""

    def __init__(self, facts: Facts, profile: FrameworkProfile) -> None:
        self._facts, self._profile = facts, profile
        self._arrived = (
            arrived_values(facts.graph, facts.names, facts.batch) if facts.routes else {}
        )
        self._shares: dict[int, float] = {}
        self._gathered: set[int] = set()
        self._filled = (
            frozenset(_filled(facts.graph)) if profile.saves != "traced" else frozenset[int]()
        )
        exits = [op for op in facts.graph.ops if op.kind == "exit"]
        if not (profile.offloaded or profile.attention_copies or profile.gathered_inputs == "kept"):
            return
        for region in sorted({op.region for op in exits if facts.layers.segment(op.region) >= 0}):
            results = roles(facts.graph, region, facts.weights)
            offloaded = frozenset[int]().union(*(results[name] for name in profile.offloaded))
            statistics = {
                op.results[1]
                for op in facts.graph.ops
                if op.kind == FORWARD and op.region == region
            }
            inputs = (
                set(products(facts.graph, region, facts.weights).values())
                if profile.gathered_inputs == "kept"
                else set[int]()
            )
            for op in (op for op in exits if op.region == region):
                (inside,) = op.operands
                if inside in offloaded:
                    self._shares[op.results[0]] = min(1.0, _IN_TRANSIT / facts.trips[region])
                elif inside in results["context"] - statistics:
                    self._shares[op.results[0]] = 1.0 + profile.attention_copies
                if inside in inputs:
                    self._gathered.add(op.results[0])

    def cut(self, value: int, choice: Choice) -> Cut:
        """How the dims of a value are sharded as it is kept."""
        return self._facts.value_cut(
            value, replace(choice, sequence=None) if value in self._gathered else choice
        )

    def plain(self, value: int) -> bool:
        """Whether a value is kept as it is sharded, and takes no more than its bytes."""
        return value not in self._gathered and value not in self._arrived

    def room(self, value: int, choice: Choice) -> float:
        """Memory of a value over its bytes: rows that were dispatched to their experts lie where
        messages have room for them.
        """
        return (
            self._facts.exchange.room * self._arrived[value]
            if choice.expert is not None and value in self._arrived
            else 1.0
        )

    def lives(self, lives: Sequence[Life]) -> list[Life]:
        """Lives with what the profile says of their values."""
        shared = [
            replace(life, share=life.share * self._shares.get(life.value, 1.0))
            for life in lives
            if life.value not in self._filled
        ]
        return (
            shared
            if self._profile.logit_bytes is None
            else self._with_loss(shared, self._profile.logit_bytes)
        )

    def _with_loss(self, lives: Sequence[Life], size: float) -> list[Life]:
        """Logits and what is as large as they are, outside of layers: so many bytes an element
        until the head's backward pass begins, then their gradient alone.
        """
        graph, roots = self._facts.graph, self._facts.fusion.roots
        producers = graph.producers()

        def elements(life: Life) -> int:
            return math.prod(graph.values[life.value].shape)

        ends = [
            life
            for life in lives
            if life.part in ("saved", "temporary")
            and life.value in producers
            and graph.values[life.value].shape
            and self._facts.layers.segment(graph.ops[producers[life.value]].region)
            == OUTSIDE_LAYERS
        ]
        matmuls = [life for life in ends if graph.ops[producers[life.value]].category == "matmul"]
        if not matmuls:
            return list(lives)
        logits = max(matmuls, key=elements)
        alike = [life for life in ends if elements(life) == elements(logits)]
        large, last = {life.value for life in alike}, max(life.death for life in alike)
        readers = [
            (i, op)
            for i, op in enumerate(graph.ops)
            if op.category == "matmul"
            and any(large.intersection(roots[value]) for value in op.operands)
        ]
        turn = min((i for i, _ in readers), default=last + 1)
        narrow = min(
            (graph.values[value].itemsize for _, op in readers for value in op.operands), default=0
        )
        value = graph.values[logits.value]
        retained = replace(
            logits,
            part="temporary",
            birth=min(life.birth for life in alike),
            death=turn - 1,
            share=size / value.itemsize,
        )
        gradient = replace(
            retained, birth=turn, death=last, share=min(size, narrow) / value.itemsize
        )
        return [
            *(life for life in lives if life not in alike),
            retained,
            *([gradient] if last >= turn else []),
        ]


def _filled(graph: Graph) -> list[int]:
    """Results of ops that spread a constant: zeros that gradients are added to, which layers
    written by hand fill when they need them.
    """
    return [
        op.results[0]
        for op in graph.ops
        if op.kind == "broadcast_in_dim"
        and all(graph.values[value].role == "constant" for value in op.operands)
    ]
