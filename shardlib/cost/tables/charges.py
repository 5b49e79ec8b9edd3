"""What every term of a step adds to which quantity: (row, measure, coefficient).

A kernel of three executions adds three times its seconds to `Q.COMPUTE`; a gather of parameters
adds to the count and the bytes of its slot, by `moved`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardlib.axes import CONTEXT, EXPERT, STAGE, TENSOR, Axis
from shardlib.cost.machine.collective_tables import (
    INDEX,
    Slot,
    along,
    on_all_stages,
    replicas,
    stored,
    tokens,
)
from shardlib.cost.tables.measures import (
    Counts,
    DividesStored,
    Kernel,
    Launch,
    Load,
    Measure,
    Part,
    StoredWays,
    Ways,
    part,
)
from shardlib.cost.tables.quantities import BYTES, COUNTS, Q
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import ends_on_all_stages
from shardlib.cost.terms.terms import OUTSIDE_LAYERS, Compute, Resident, Stored, Term, Transfer
from shardlib.propagation.assignment import Cut, has

#: Part of a resident value -> where it is counted; those that ZeRO shards are counted whole and
#: cut.
_PARTS: dict[str, Q] = {
    "cast": Q.CAST,
    "saved": Q.SAVED,
    "temporary": Q.TEMPORARY,
    "gathered": Q.GATHERED,
}
_PIECES: dict[str, tuple[Q, Q]] = {
    "gradient": (Q.GRADIENT, Q.GRADIENT_CUT),
    "copy": (Q.COPY, Q.COPY_CUT),
}
#: Group of a transfer -> the role of its collectives, and the axis that they run along.
_ROLES: dict[str, tuple[str, Axis]] = {
    "tensor": ("block", TENSOR),
    "context": ("context", CONTEXT),
    "keys": ("keys", CONTEXT),
    "ring": ("ring", CONTEXT),
    "exchange": ("exchange", CONTEXT),
    "expert": ("block", EXPERT),
    "stage": ("stage", STAGE),
}


def moved(term: Transfer, segment: int, profile: FrameworkProfile) -> list[tuple[Slot, Part, Part]]:
    """(slot, size, count) of the collectives of a transfer, a microbatch, over `term.bytes.total`
    and over `term.trips`.
    """
    all_stages = segment == OUTSIDE_LAYERS and ends_on_all_stages(profile)
    size, once = part(term.bytes), Part().by(*_counts(term))
    if term.group in _ROLES:
        role, axis = _ROLES[term.group]
        sharded = term.kind == "reduce-scatter"
        moved = size.by(Ways(axis.name)) if sharded else size
        return [(Slot(role, along(axis), term.kind), moved, once)]
    if term.group == "ends":
        return [(Slot("ends", along(STAGE), term.kind), size, once)] if all_stages else []
    if term.group == "sum":
        role, group = ("ends", on_all_stages(tokens())) if all_stages else ("block", tokens())
        return [(Slot(role, group, "all-reduce"), size, once)]
    experts, tensor = has(term.cut, EXPERT.name), term.over_tensor
    sharded, replicated = (
        once.by(DividesStored(term.shape, term.cut, term.frozen, profile.flat, divides))
        for divides in (True, False)
    )
    if term.group == "gather":
        return [(Slot("gather", stored(experts=experts), "all-gather"), size, sharded)]
    everywhere, shard = tokens(experts=experts, tensor=tensor), size.by(StoredWays(experts))
    alike = replicas(tensor=tensor)
    if all_stages and not experts:
        everywhere, alike = on_all_stages(everywhere), on_all_stages(alike)
    shards = [
        (Slot("scatter", stored(experts=experts), "reduce-scatter"), shard, sharded),
        (Slot("scatter", alike, "all-reduce"), shard, sharded),
    ]
    reductions = [
        (Slot("reduce", everywhere, "all-reduce"), size, once),
        (Slot("scatter", everywhere, "all-reduce"), size, replicated),
    ]
    of = {"shards": shards, "whole": reductions, "again": shards[:1], "": [*shards, *reductions]}
    return of[term.only]


#: The host's part in one kernel.
_LAUNCH = Part(factors=(Launch(),))
#: One entry of a tally: row, measure, coefficient.
Charge = tuple[int, Measure, float]


def charges(segment: int, term: Term, profile: FrameworkProfile) -> Iterator[Charge]:
    """What a term of a segment adds to which row of a tally."""
    match term:
        case Compute():
            return _compute(segment, term)
        case Transfer():
            return _transfer(segment, term, profile)
        case Resident():
            return _resident(term, profile)
        case Stored():
            return _rest(term, profile)


def _compute(segment: int, term: Compute) -> Iterator[Charge]:
    kernel = Kernel(term if term.trips == 1 else replace(term, trips=1), segment == OUTSIDE_LAYERS)
    counting = _counts(term)
    yield Q.COMPUTE, kernel, term.trips
    if term.weight:
        yield Q.WEIGHTS, kernel, term.trips
    yield Q.FLOPS, part(term.flops).by(*counting), term.flops.total * term.trips
    yield Q.HOST, _LAUNCH.by(*counting), term.trips


def _counts(term: Compute | Transfer | Resident) -> tuple[Counts, ...]:
    return () if term.heads is None else (Counts(term.heads),)


def _transfer(segment: int, term: Transfer, profile: FrameworkProfile) -> Iterator[Charge]:
    load = (Load(term.routed),) if term.routed is not None else ()
    for slot, size, count in moved(term, segment, profile):
        yield COUNTS + INDEX[slot], count, term.trips
        yield BYTES + INDEX[slot], size.by(*count.factors, *load), term.bytes.total * term.trips


def _cut(
    unsharded: Part,
    shape: tuple[int, ...],
    cut: Cut,
    frozen: frozenset[int],
    profile: FrameworkProfile,
) -> tuple[Part, Part]:
    """The measures whose sum is that of an array as it is stored: sharded where it divides, and
    replicated where not.
    """
    degree = StoredWays(has(cut, EXPERT.name))
    return unsharded.by(DividesStored(shape, cut, frozen, profile.flat), degree), unsharded.by(
        DividesStored(shape, cut, frozen, profile.flat, divides=False)
    )


def _resident(term: Resident, profile: FrameworkProfile) -> Iterator[Charge]:
    unsharded, size = part(term.bytes).by(*_counts(term)), term.bytes.total
    if term.part not in _PIECES:
        yield _PARTS[term.part], unsharded, size
        return
    row, cut = _PIECES[term.part]
    yield row, unsharded, size
    for shard in _cut(unsharded, term.shape, term.cut, frozenset(), profile):
        yield cut, shard, size


def _rest(term: Stored, profile: FrameworkProfile) -> Iterator[Charge]:
    unsharded = Part(tensor=has(term.cut, "tensor"), expert=has(term.cut, "expert"))
    shards, elements = (
        _cut(unsharded, term.shape, term.cut, term.frozen, profile),
        float(term.elements * term.count),
    )
    if not term.trained:
        yield Q.FROZEN, unsharded, elements * term.itemsize
        for shard in shards:
            yield Q.FROZEN_CUT, shard, elements * term.itemsize
        return
    state = term.state if profile.state_bytes is None else profile.state_bytes
    sizes = (
        (Q.PARAMETERS, Q.PARAMETERS_CUT, term.itemsize),
        (Q.STATE, Q.STATE_CUT, state),
        (Q.KEPT, Q.KEPT_CUT, profile.gradient_bytes(term.itemsize)),
    )
    for row, cut, size in sizes:
        yield row, unsharded, elements * size
        for shard in shards:
            yield cut, shard, elements * size
    if has(term.cut, "expert"):
        yield Q.EXPERTS, unsharded, elements * term.itemsize
