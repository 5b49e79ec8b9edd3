"""Items of exchanges along tensor for the heads of a kernel of attention.

Where tensor shards the sequence of queries, keys and values, or the width of their heads, it shards
the heads inside of a kernel (`shardlib.lowering.context.dispatch`):

    heads that are shared out     one all-to-all in, one all-to-all out; gradients the other way
    too few heads of keys         keys and values are gathered, their gradients reduce-scattered,
                                  or all-reduced where they are whole for a rotation by positions
    too few heads of queries      all is gathered, and every device computes the same
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardlib.cost.items.exchanges import moved_values
from shardlib.cost.step.attention_kernels import BACKWARD, KernelHeads
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import Item, Term, Transfer, amount, named
from shardlib.propagation.assignment import Choice, has
from shardlib.propagation.head_sharding import Shared


def head_exchange_item(facts: Facts, index: int) -> Item:
    """What devices along tensor exchange for the heads of a kernel of attention."""
    op, moved = facts.graph.ops[index], moved_values(facts, index)

    def terms(choice: Choice) -> tuple[Term, ...]:
        if not facts.shares_heads(index, choice):
            return ()
        return tuple(
            term for value, times in moved for term in _moved(facts, index, value, times, choice)
        )

    return Item(
        colours=named(facts.factors[index]).union(
            *(named(facts.names[value]) for value in (*op.operands, *op.results))
        ),
        terms=terms,
        segment=facts.layers.segment(op.region),
    )


def _moved(facts: Facts, index: int, value: int, times: int, choice: Choice) -> Iterator[Transfer]:
    """The collectives of one value that goes into a kernel or comes out of it."""
    op, heads, cut = facts.graph.ops[index], facts.heads[index], facts.value_cut(value, choice)
    if not has(cut, "tensor"):
        return
    sharded = amount(_bytes(facts, index, value), cut)
    gradient, result = op.kind == BACKWARD, value in op.results

    def transfer(kind: str, count: int, *shared: Shared) -> Transfer:
        return Transfer(
            kind=kind,
            group="tensor",
            bytes=sharded if kind == "all-to-all" else replace(sharded, tensor=False),
            trips=count * facts.trips[op.region],
            cause=op.scope or op.kind,
            heads=heads.where(*shared),
        )

    separate = _apart(facts, index, value, heads)
    if separate:
        yield transfer("all-to-all", times, *separate)
    together: tuple[Shared, ...] = tuple(shared for shared in _SHARING if shared not in separate)
    if together:
        scattered = "all-reduce" if facts.pairs(value, choice) else "reduce-scatter"
        yield transfer(scattered if gradient else "all-gather", times, *together)
    # Where every device computes the same, it has all results; what comes in is gathered.
    coming = 0 if gradient else times - 1 if result else times
    if coming:
        yield transfer("all-gather", coming, "none")


#: The cases in which devices share out heads of queries at least.
_SHARING: tuple[Shared, ...] = ("all", "queries")


def _apart(facts: Facts, index: int, value: int, heads: KernelHeads) -> tuple[Shared, ...]:
    """The cases in which each device has heads of a value of its own."""
    rule = facts.graph.ops[index].rule
    values = (*facts.graph.ops[index].operands, *facts.graph.ops[index].results)
    dims = (*rule.operands, *rule.results)[values.index(value)]
    factors = {factor for dim in dims for factor in dim}
    if heads.group not in factors:
        return ()
    return _SHARING if heads.each == 1 or factors & heads.within else ("all",)


def _bytes(facts: Facts, index: int, value: int) -> float:
    """Bytes of a value as it is exchanged: gradients in the dtype of queries."""
    op, values = facts.graph.ops[index], facts.graph.values
    itemsize = values[value].itemsize
    if op.kind == BACKWARD:
        itemsize = min(itemsize, values[op.operands[0]].itemsize)
    return float(values[value].bytes / values[value].itemsize * itemsize)
