"""Prices of collectives over tensor that run as loops over the matmuls they feed (collective
matmul).

A gather of the sequence, or a scatter along it, over n devices becomes n - 1 messages of a shard
each, and its matmuls are made shard by shard, while the next message is on its way (Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
ASPLOS 2023, section 5). With `turns` turns of `hop` seconds and matmuls of `work` seconds in shards

    exposed = hop + max(0, (turns - 1) hop - work)

in place of the whole collective: nothing hides the first message of a gather or the last of a
scatter. Messages go both ways around: on a torus at once, n // 2 turns; elsewhere they share the
device's one link, n - 1 turns. Sums of messages are added up by kernels of their own.

What is gathered again for gradients of weights alone waits for no matmul: it hides behind what the
others of its loop have left over.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from shardlib.axes import TENSOR
from shardlib.cost.items.gathers import gathers_of
from shardlib.cost.items.kernels import kernel_items
from shardlib.cost.items.reductions import reductions_of
from shardlib.cost.machine.collective_tables import Slot, along, slot_cost, spans_of
from shardlib.cost.machine.collectives import collective_cost
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.totals import Totals
from shardlib.cost.pricing.variants.matmul_shards import matmul_shard
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.tables.basis_functions import evaluate
from shardlib.cost.tables.measures import part
from shardlib.cost.tables.pricer import Pricer, moves
from shardlib.cost.tables.quantities import Q
from shardlib.cost.terms.terms import Compute, Transfer, amount
from shardlib.hardware.placement import Placement
from shardlib.propagation.assignment import Choice, has


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A collective over tensor that a loop can take the place of.

    Attributes:
        transfer: the collective.
        matmuls: ops whose shards wait for a message each; () where gradients of weights alone need
            what is gathered.
        gradients: gradients of weights, which are reduced over shards.
        region: of the graph.
    """

    transfer: Transfer
    matmuls: tuple[int, ...]
    gradients: tuple[int, ...]
    region: int


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What loops change in a step.

    Attributes:
        exposed_s: seconds that no longer wait for collectives.
        compute_s: seconds that sharded matmuls take longer.
        messages: of every collective that is replaced, bytes of a message, how many there are in
            place of one execution, and seconds of one.
    """

    exposed_s: float
    compute_s: float
    messages: dict[Transfer, tuple[float, int, float]]

    @property
    def seconds(self) -> float:
        """Seconds of a step that loops save; negative where they cost more."""
        return self.exposed_s - self.compute_s


def loops(facts: Facts, choice: Choice) -> list[Loop]:
    """The collectives of a step that loops can take the place of: those that matmuls of weights
    need which tensor shards, and nothing else.
    """
    candidates = [
        (transfer, ops)
        for transfer, ops in gathers_of(facts, choice)
        if transfer.kind == "all-gather"
    ]
    candidates += [
        (transfer, ops)
        for transfer, ops in reductions_of(facts, choice)
        if transfer.kind == "reduce-scatter"
    ]
    listed: list[Loop] = []
    for transfer, ops in candidates:
        if transfer.group != TENSOR.name or not all(
            _of_weight(facts, index, choice) for index in ops
        ):
            continue
        of_gradients = [facts.graph.ops[i].results[0] in facts.gradients for i in ops]
        listed.append(
            Loop(
                transfer=transfer,
                matmuls=tuple(
                    i for i, gradient in zip(ops, of_gradients, strict=True) if not gradient
                ),
                gradients=tuple(
                    i for i, gradient in zip(ops, of_gradients, strict=True) if gradient
                ),
                region=facts.graph.ops[ops[0]].region,
            )
        )
    return listed


def _of_weight(facts: Facts, index: int, choice: Choice) -> bool:
    """Whether an op is a matmul of a weight that tensor shards, or of the gradient of one."""
    op = facts.graph.ops[index]
    values = [value for value in op.operands if value in facts.weights] or [
        value for value in op.results if value in facts.gradients
    ]
    return (
        op.kind == "dot_general"
        and len(values) == 1
        and has(facts.value_cut(values[0], choice), TENSOR.name)
    )


def saving(
    facts: Facts, choice: Choice, placement: Placement, c: Candidates, pricer: Pricer, classes: int
) -> Saving:
    """What loops save in one candidate, without stages; nothing where there are none."""
    assert len(c) == 1
    prices = _Prices(facts, choice, placement, c, pricer, classes)
    exposed = compute = 0.0
    spare: dict[int, float] = defaultdict(float)
    messages: dict[Transfer, tuple[float, int, float]] = {}
    for loop in sorted(
        loops(facts, choice) if prices.ways > 1 else [], key=lambda loop: not loop.matmuls
    ):
        ((slot, size, count),) = moves(
            loop.transfer, facts.layers.segment(loop.region), c.shapes, pricer
        )
        before = slot_cost(slot, placement, pricer.topology).seconds(float(size[0]))
        shard = float(size[0]) / (prices.ways if slot.kind == "all-gather" else 1)
        hop = prices.permute.seconds(shard)
        times = {
            index: prices.matmul(index)
            for index in (*loop.matmuls, *loop.gradients)
            if index in prices.kernels
        }
        work, others = (
            sum(times[index][1] for index in loop.matmuls if index in times),
            (prices.turns - 1) * hop,
        )
        if loop.matmuls:
            waits = hop + max(0.0, others - work)
            spare[loop.region] += max(0.0, work - others)
        else:
            waits = max(0.0, hop + others - spare[loop.region])
            spare[loop.region] = max(0.0, spare[loop.region] - hop - others)
        runs = float(count[0]) * int(c.micro[0])
        exposed += runs * (before - waits)
        compute += runs * (
            sum(max(0.0, sharded - unsharded) for unsharded, sharded in times.values())
            + prices.moved(loop, slot, shard)
        )
        messages[loop.transfer] = shard, prices.ways - 1, hop
    return Saving(exposed_s=exposed, compute_s=compute, messages=messages)


class _Prices:
    """What messages and matmuls take in one candidate; the arguments are those of `saving`.

    Attributes:
        ways: devices of the tensor axis.
        torus: whether they are on a torus.
        turns: turns of a loop.
        permute: cost of a message to a neighbour.
        kernels: item of the kernel of an op.
    """

    def __init__(
        self,
        facts: Facts,
        choice: Choice,
        placement: Placement,
        c: Candidates,
        pricer: Pricer,
        classes: int,
    ) -> None:
        spans = spans_of(along(TENSOR), placement)
        self.ways = math.prod(span.ways for span in spans)
        self.torus = all(pricer.topology.tiers[span.tier].kind == "torus" for span in spans)
        self.turns = self.ways // 2 if self.torus else self.ways - 1
        self.permute = collective_cost("collective-permute", spans, pricer.topology)
        self.kernels = {
            kernel.op: item
            for kernel, item in zip(facts.fusion.kernels, kernel_items(facts), strict=True)
        }
        self._facts, self._choice, self._c, self._pricer, self._classes = (
            facts,
            choice,
            c,
            pricer,
            classes,
        )

    def matmul(self, index: int) -> tuple[float, float]:
        """Seconds of a matmul whole, and shard by shard."""
        item = self.kernels[index]
        terms = [term for term in item.terms(self._choice) if isinstance(term, Compute)]
        return self._seconds(item.segment, terms), self.ways * self._seconds(
            item.segment,
            [matmul_shard(self._facts, index, term, self._choice, self.ways) for term in terms],
        )

    def moved(self, loop: Loop, slot: Slot, shard: float) -> float:
        """Seconds of kernels that are there for shards alone: sums are added up in a kernel for
        each message, and results put in their places, which compilers for TPUs do inside of
        matmuls.
        """
        chip = self._pricer.topology.chip
        if slot.kind == "reduce-scatter":
            size, kernels = 3 * shard * (self.ways - 1), self.ways - 1
        else:
            results = [
                value for index in loop.matmuls for value in self._facts.graph.ops[index].results
            ]
            size = 0.0 if self.torus else 2 * sum(self._local(value) for value in results)
            kernels = 0 if self.torus else self.ways * len(results)
        return (
            size / (chip.hbm_bytes_per_s * self._pricer.constants.bandwidth_share("elementwise"))
            + kernels * chip.launch_s
        )

    def _local(self, value: int) -> float:
        """Bytes of a value on one device."""
        size = amount(
            float(self._facts.graph.values[value].bytes), self._facts.value_cut(value, self._choice)
        )
        return size.total * float(evaluate(part(size), self._c.shapes, self._pricer.constants)[0])

    def _seconds(self, segment: int, terms: list[Compute]) -> float:
        return float(
            self._pricer.tally_terms(
                [(segment, replace(term, trips=1)) for term in terms], self._c.shapes, self._classes
            )[:, Q.COMPUTE].sum()
        )


def looped(totals: Totals, saved: Saving | None) -> Totals:
    """The price with what loops save; None where there are none.

    Args:
        saved: seconds of a step that loops save, by part.
    """
    if saved is None:
        return totals
    seconds = {
        **totals.seconds,
        "exposed": totals.seconds["exposed"] - saved.exposed_s,
        "compute": totals.seconds["compute"] + saved.compute_s,
    }
    return replace(totals, seconds=seconds)
