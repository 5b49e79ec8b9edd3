"""What do collectives over tensor cost when they are loops over the matmuls that they feed
(collective matmul)?

A gather of the sequence, or a scatter along it, over n devices becomes n - 1 messages of a piece
each, and its matmuls are made piece by piece, while the next message is on its way (Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
ASPLOS 2023, section 5). With `turns` turns of `hop` seconds and matmuls of `work` seconds in pieces

    exposed = hop + max(0, (turns - 1) hop - work)

in place of the whole collective: nothing hides the first message of a gather or the last of a
scatter. Messages go both ways around: on a torus at once, n // 2 turns; elsewhere they share the
device's one link, n - 1 turns. Matmuls in pieces read their weight n times, or read and write the
sums of a gradient, and have fewer rows each; sums of messages are added up by kernels of their own.

What is gathered again for gradients of weights alone waits for no matmul: it hides behind what the
others of its loop have left over.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardlib.cost.items.items import gathers_of, kernel_items, reductions_of
from shardlib.cost.machine.collective_tables import Slot, along, slot_cost, spans_of
from shardlib.cost.machine.collectives import collective_cost
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.pricing.step_time import Totals
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.tables.basis_functions import evaluate, part
from shardlib.cost.tables.coefficients import Pricer, Q, moves
from shardlib.cost.terms.terms import Amount, Compute, Transfer, amount
from shardlib.hardware.placement import Placement
from shardlib.propagation.assignment import Choice, has

TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A collective over tensor that a loop can take the place of.

    Attributes:
        transfer: the collective.
        matmuls: ops whose pieces wait for a message each; () where gradients of weights alone need
            what is gathered.
        gradients: gradients of weights, which are summed up over pieces.
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
        compute_s: seconds that matmuls in pieces take longer.
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
    need which tensor cuts, and nothing else.
    """
    found = [
        (transfer, ops)
        for transfer, ops in gathers_of(facts, choice)
        if transfer.kind == "all-gather"
    ]
    found += [
        (transfer, ops)
        for transfer, ops in reductions_of(facts, choice)
        if transfer.kind == "reduce-scatter"
    ]
    listed: list[Loop] = []
    for transfer, ops in found:
        if transfer.group != TENSOR or not all(_of_weight(facts, index, choice) for index in ops):
            continue
        made = [facts.graph.ops[i].results[0] in facts.gradients for i in ops]
        listed.append(
            Loop(
                transfer=transfer,
                matmuls=tuple(i for i, gradient in zip(ops, made, strict=True) if not gradient),
                gradients=tuple(i for i, gradient in zip(ops, made, strict=True) if gradient),
                region=facts.graph.ops[ops[0]].region,
            )
        )
    return listed


def _of_weight(facts: Facts, index: int, choice: Choice) -> bool:
    """Whether an op is a matmul of a weight that tensor cuts, or of the gradient of one."""
    op = facts.graph.ops[index]
    values = [value for value in op.operands if value in facts.weights] or [
        value for value in op.results if value in facts.gradients
    ]
    return (
        op.kind == "dot_general"
        and len(values) == 1
        and has(facts.value_cut(values[0], choice), TENSOR)
    )


def saving(
    facts: Facts, choice: Choice, placement: Placement, c: Candidates, pricer: Pricer, classes: int
) -> Saving:
    """What loops save in one candidate, without stages; nothing where there are none.

    Args:
        facts: of the step graph.
        choice: the chosen colours.
        placement, c: where the candidate lies; exactly one.
        pricer: the machine and the software.
        classes: number of classes of layers.
    """
    assert len(c) == 1
    prices = _Prices(facts, choice, placement, c, pricer, classes)
    exposed = compute = 0.0
    spare: dict[int, float] = defaultdict(float)
    messages: dict[Transfer, tuple[float, int, float]] = {}
    for loop in sorted(
        loops(facts, choice) if prices.ways > 1 else [], key=lambda loop: not loop.matmuls
    ):
        ((slot, size, count),) = moves(loop.transfer, c.shapes, pricer)
        before = slot_cost(slot, placement, pricer.topology).seconds(float(size[0]))
        piece = float(size[0]) / (prices.ways if slot.kind == "all-gather" else 1)
        hop = prices.permute.seconds(piece)
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
            sum(max(0.0, pieces - whole) for whole, pieces in times.values())
            + prices.moved(loop, slot, piece)
        )
        messages[loop.transfer] = piece, prices.ways - 1, hop
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
        """Seconds of a matmul whole, and in pieces."""
        item = self.kernels[index]
        terms = [term for term in item.terms(self._choice) if isinstance(term, Compute)]
        return self._seconds(item.segment, terms), self.ways * self._seconds(
            item.segment,
            [in_pieces(self._facts, index, term, self._choice, self.ways) for term in terms],
        )

    def moved(self, loop: Loop, slot: Slot, piece: float) -> float:
        """Seconds of kernels that are there for pieces alone: sums are added up in a kernel for
        each message, and results put in their places, which compilers for TPUs do inside of
        matmuls.
        """
        chip = self._pricer.topology.chip
        if slot.kind == "reduce-scatter":
            size, kernels = 3 * piece * (self.ways - 1), self.ways - 1
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


def in_pieces(facts: Facts, index: int, term: Compute, choice: Choice, ways: int) -> Compute:
    """The kernel of one of the pieces that a matmul of a weight, or of the gradient of one, is made
    in: it reads the weight, or reads and writes sums in float32.
    """
    op = facts.graph.ops[index]
    side = next((i for i, value in enumerate(op.operands) if value in facts.weights), 2)
    value = (*op.operands, *op.results)[side]
    again_bytes = (
        facts.graph.values[value].bytes
        if side < 2
        else 8.0 * math.prod(facts.graph.values[value].shape)
    )
    again = Amount(
        total=again_bytes * (1 - 1 / ways),
        batch=False,
        tensor=has(facts.value_cut(value, choice), TENSOR),
        context=False,
        expert=False,
    )
    dims = term.matmul
    if dims is not None:  # rows of the activation, or what is summed over
        cut = 2 if side == 2 else 1 - side
        first, second, third = (
            _part(size, ways) if i == cut else size for i, size in enumerate(dims)
        )
        dims = first, second, third
    return replace(
        term,
        flops=_part(term.flops, ways),
        traffic=(*_parts(term.traffic, ways), again),
        simple=_parts(term.simple, ways),
        transcendental=_parts(term.transcendental, ways),
        matmul=dims,
    )


def _part(amount: Amount, ways: int) -> Amount:
    return replace(amount, total=amount.total / ways)


def _parts(amounts: Iterable[Amount], ways: int) -> tuple[Amount, ...]:
    return tuple(_part(amount, ways) for amount in amounts)


def looped(totals: Totals, saved: Saving | None) -> Totals:
    """The price with what loops save; None where there are none."""
    if saved is None:
        return totals
    seconds = {
        **totals.seconds,
        "exposed": totals.seconds["exposed"] - saved.exposed_s,
        "compute": totals.seconds["compute"] + saved.compute_s,
    }
    return replace(totals, seconds=seconds)
