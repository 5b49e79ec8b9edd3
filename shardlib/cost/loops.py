"""What do collectives over tensor cost when they are loops over the matmuls that they feed (collective matmul)?

A gather of the sequence, or a scatter along it, over n devices becomes n - 1 messages of a piece each, and its matmuls are made piece by piece, while the next message is on its way (Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023, section 5). With `turns` turns of `hop` seconds and matmuls of `work` seconds in pieces

    exposed = hop + max(0, (turns - 1) hop - work)

in place of the whole collective: nothing hides the first message of a gather or the last of a scatter. Messages go both ways around: on a torus at once, n // 2 turns; elsewhere they share the
device's one link, n - 1 turns. Matmuls in pieces read their weight n times, and have fewer rows each.

What is gathered again for gradients of weights alone waits for no matmul: it hides behind what the others of its loop have left over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from shardlib.cost.candidates import Candidates
from shardlib.cost.collectives import collective_cost
from shardlib.cost.facts import Facts
from shardlib.cost.items import gathers_of, kernel_items, reductions_of
from shardlib.cost.links import slot_cost, spans_of
from shardlib.cost.pricing import Totals
from shardlib.cost.tally import Pricer, Q, moves
from shardlib.cost.terms import Amount, Compute, Transfer
from shardlib.hardware.placement import Placement
from shardlib.propagation.assignment import Choice, has

TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A collective over tensor that a loop can take the place of.

    Attributes:
        transfer: the collective.
        matmuls: ops that are made piece by piece; () where gradients of weights alone need what is gathered.
        region: of the graph.
        segment: class of layers.
    """

    transfer: Transfer
    matmuls: tuple[int, ...]
    region: int
    segment: int


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What loops change in a step.

    Attributes:
        exposed_s: seconds that no longer wait for collectives.
        compute_s: seconds that matmuls in pieces take longer.
        messages: of every collective that is replaced, bytes of a message, how many there are in place of one execution, and seconds of one.
    """

    exposed_s: float
    compute_s: float
    messages: dict[Transfer, tuple[float, int, float]]


def loops(facts: Facts, choice: Choice) -> list[Loop]:
    """The collectives of a step that loops can take the place of: those that matmuls of weights need which tensor cuts, and nothing else."""
    found = [(transfer, ops) for transfer, ops in gathers_of(facts, choice) if transfer.kind == "all-gather"]
    found += [(transfer, ops) for transfer, ops in reductions_of(facts, choice) if transfer.kind == "reduce-scatter"]
    listed: list[Loop] = []
    for transfer, ops in found:
        if transfer.group != TENSOR or not all(_of_weight(facts, index, choice) for index in ops):
            continue
        region = facts.graph.ops[ops[0]].region
        listed.append(Loop(transfer=transfer, matmuls=tuple(i for i in ops if facts.graph.ops[i].results[0] not in facts.gradients), region=region, segment=facts.layers.segment(region)))
    return listed


def _of_weight(facts: Facts, index: int, choice: Choice) -> bool:
    """Whether an op is a matmul of a weight that tensor cuts, or of the gradient of one."""
    op = facts.graph.ops[index]
    values = [value for value in op.operands if value in facts.weights] or [value for value in op.results if value in facts.gradients]
    return op.kind == "dot_general" and len(values) == 1 and has(facts.value_cut(values[0], choice), TENSOR)


def saving(facts: Facts, choice: Choice, placement: Placement, c: Candidates, pricer: Pricer, classes: int) -> Saving:
    """What loops save in one candidate, without stages; nothing where there are none.

    Args:
        facts: of the step graph.
        choice: the chosen colours.
        placement, c: where the candidate lies; exactly one.
        pricer: the machine and the software.
        classes: number of classes of layers.
    """
    assert len(c) == 1
    spans, micro = spans_of(TENSOR, placement), int(c.micro[0])
    ways = int(np.prod([span.ways for span in spans])) if spans else 1
    listed = loops(facts, choice) if ways > 1 else []
    kernels = {kernel.op: item for kernel, item in zip(facts.fusion.kernels, kernel_items(facts), strict=True)}
    turns = ways // 2 if all(pricer.topology.tiers[span.tier].kind == "torus" for span in spans) else ways - 1
    one = collective_cost("collective-permute", spans, pricer.topology)
    exposed = compute = 0.0
    spare: dict[int, float] = defaultdict(float)
    messages: dict[Transfer, tuple[float, int, float]] = {}

    def seconds(segment: int, terms: list[Compute]) -> float:
        return float(pricer.tally_terms([(segment, replace(term, trips=1)) for term in terms], c.shapes, classes)[:, Q.COMPUTE].sum())

    def matmul(index: int) -> tuple[float, float]:
        """Seconds of a matmul whole, and in pieces."""
        item = kernels[index]
        terms = [term for term in item.terms(choice) if isinstance(term, Compute)]
        return seconds(item.segment, terms), ways * seconds(item.segment, [in_pieces(facts, index, term, choice, ways) for term in terms])

    for loop in sorted(listed, key=lambda loop: not loop.matmuls):
        ((slot, size, count),) = moves(loop.transfer, c.shapes, pricer)
        before = slot_cost(slot, placement, pricer.topology).seconds(float(size[0]))
        piece = float(size[0]) / ways if slot.kind == "all-gather" else float(size[0])
        hop = one.seconds(piece)
        times = [matmul(index) for index in loop.matmuls if index in kernels]
        work = sum(pieces for _, pieces in times)
        if times:
            waits = hop + max(0.0, (turns - 1) * hop - work)
            spare[loop.region] += max(0.0, work - (turns - 1) * hop)
        else:
            waits = max(0.0, turns * hop - spare[loop.region])
            spare[loop.region] = max(0.0, spare[loop.region] - turns * hop)
        runs = float(count[0]) * micro
        exposed += runs * (before - waits)
        compute += runs * sum(max(0.0, pieces - whole) for whole, pieces in times)
        messages[loop.transfer] = piece, ways - 1, hop
    return Saving(exposed_s=exposed, compute_s=compute, messages=messages)


def in_pieces(facts: Facts, index: int, term: Compute, choice: Choice, ways: int) -> Compute:
    """The kernel of one of the pieces that a matmul of a weight is made in."""
    op = facts.graph.ops[index]
    side = next(i for i, value in enumerate(op.operands) if value in facts.weights)
    weight = op.operands[side]
    cut = facts.value_cut(weight, choice)
    again = Amount(total=facts.graph.values[weight].bytes * (1 - 1 / ways), batch=False, tensor=has(cut, TENSOR), context=False, expert=False)
    dims = term.matmul
    if dims is not None:
        dims = (dims[0], _part(dims[1], ways), dims[2]) if side == 0 else (_part(dims[0], ways), dims[1], dims[2])
    return replace(term, flops=_part(term.flops, ways), traffic=(*(_part(amount, ways) for amount in term.traffic), again), simple=_parts(term.simple, ways),
                   transcendental=_parts(term.transcendental, ways), matmul=dims)


def _part(amount: Amount, ways: int) -> Amount:
    return replace(amount, total=amount.total / ways)


def _parts(amounts: Iterable[Amount], ways: int) -> tuple[Amount, ...]:
    return tuple(_part(amount, ways) for amount in amounts)


def looped(totals: Totals, saved: Saving) -> Totals:
    """The price with loops."""
    seconds = {**totals.seconds, "exposed": totals.seconds["exposed"] - saved.exposed_s, "compute": totals.seconds["compute"] + saved.compute_s}
    return replace(totals, seconds=seconds)
