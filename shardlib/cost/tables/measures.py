"""Measures: functions of the shape alone, of which tallies are made.

The seconds of one kernel are a measure, and "one over the ways that the batch is sharded": a `Part`
is a product of such factors.

>>> Part(batch=True).by(Ways("tensor")).factors
(Ways(axis='tensor'),)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardlib.axes import STORED_AXES
from shardlib.cost.terms.terms import Amount, Compute, Heads, Routed
from shardlib.propagation.assignment import Cut


@dataclass(frozen=True)
class Ways:
    """A factor: one over the size of a mesh axis, "tensor" or "context"."""

    axis: str


@dataclass(frozen=True)
class StoredWays:
    """A factor: one over the ways that a parameter is stored sharded beside its sharding in
    compute; with `experts` the expert axis shards it in compute already.
    """

    experts: bool


@dataclass(frozen=True)
class DividesStored:
    """A factor: 1 where an array divides as it is stored (`divides_stored`) and 0 elsewhere, or the
    other way around.
    """

    shape: tuple[int, ...]
    cut: Cut
    frozen: frozenset[int]
    flat: bool = False
    divides: bool = True


@dataclass(frozen=True)
class Load:
    """A factor: load of the busiest device over the mean (`shardlib.cost.machine.expert_load`)."""

    routed: Routed


@dataclass(frozen=True)
class Launch:
    """A factor: seconds that the host takes to launch a kernel."""


@dataclass(frozen=True)
class Counts:
    """A factor: 1 where a term of attention counts (`Heads.counts`), and 0 elsewhere."""

    heads: Heads


Factor = Ways | StoredWays | DividesStored | Load | Launch | Counts


@dataclass(frozen=True)
class Part:
    """What one device has of an amount of 1, as the fields of `Amount` say, times some factors."""

    batch: bool = False
    tensor: bool = False
    context: bool = False
    expert: bool = False
    factors: tuple[Factor, ...] = ()

    def by(self, *factors: Factor) -> Part:
        """The part times more factors."""
        if not factors:
            return self
        return Part(self.batch, self.tensor, self.context, self.expert, (*self.factors, *factors))


@dataclass(frozen=True)
class Kernel:
    """Seconds of one execution of a kernel, whose `trips` are 1; `outside` of all layers or in
    one.
    """

    term: Compute
    outside: bool


Measure = Part | Kernel


@lru_cache(maxsize=64)
def _part(batch: bool, tensor: bool, context: bool, expert: bool) -> Part:
    return Part(batch, tensor, context, expert)


def part(amount: Amount) -> Part:
    """The measure of an amount; its total is the coefficient."""
    return _part(amount.batch, amount.tensor, amount.context, amount.expert)


#: Sizes that a measure may depend on, the fields of `Shapes`.
SIZES: tuple[str, ...] = ("batch", "context", "tensor", "expert", "fsdp")


def depends(measure: Measure) -> frozenset[str]:
    """The sizes that a measure depends on."""
    if isinstance(measure, Kernel):
        term, matmul = measure.term, measure.term.matmul
        routed = (term.routed.rows, term.routed.experts) if term.routed else ()
        amounts = (
            term.flops,
            *term.traffic,
            *term.elements.simple,
            *term.elements.transcendental,
            *(matmul.dims if matmul else ()),
            *((matmul.batches,) if matmul and matmul.batches else ()),
            *routed,
        )
        counting = frozenset({"tensor"} if term.heads else ())
        return counting.union(*map(_cutting, amounts))
    return frozenset[str]().union(_cutting(measure), *map(_in_factor, measure.factors))


def _cutting(amount: Amount | Part) -> frozenset[str]:
    """The sizes that cut an amount."""
    return frozenset(name for name in SIZES[:-1] if getattr(amount, name))


def _in_factor(factor: Factor) -> frozenset[str]:
    match factor:
        case Ways("tensor" | "context" as axis):
            return frozenset({axis})
        case Counts():
            return frozenset({"tensor"})
        case Ways() | StoredWays():
            return frozenset(STORED_AXES)
        case DividesStored():
            return frozenset(SIZES[1:])
        case Load(routed):
            return _cutting(routed.rows) | _cutting(routed.experts)
        case Launch():
            return frozenset()
