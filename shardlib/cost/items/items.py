"""Items: the separable parts of a step's cost.

The cost of a step is a sum over *items*: a kernel computes, a value is gathered, a partial result
is reduced, a value occupies memory at a certain point, a parameter is stored. Each item depends
only on the few colours that it touches, so the cost of a choice over all colours is a sum of small
table entries; that is what makes an exact search cheap.

An item, under a `Choice`, yields *terms*: quantities of the whole program with a note of what
divides them. A term is free of mesh sizes; `shardlib.cost.pricing` turns terms into seconds and
bytes for many meshes at once.
"""

from __future__ import annotations

from shardlib.cost.items.exchanges import boundary_items, exchange_item, route_items
from shardlib.cost.items.gathers import value_gather_item
from shardlib.cost.items.head_exchanges import head_exchange_item
from shardlib.cost.items.kernels import kernel_items
from shardlib.cost.items.parameter_gathers import gather_item, gathered
from shardlib.cost.items.reductions import reduce_item
from shardlib.cost.items.summands import sum_groups
from shardlib.cost.step.attention_kernels import (
    KERNELS,
)
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import (
    Item,
)


def work_items(facts: Facts) -> list[Item]:
    """Items of computation and communication of a step graph."""
    items = kernel_items(facts)
    items += [reduce_item(facts, group) for group in sum_groups(facts)]
    items += [
        item for value in facts.consumers if (item := value_gather_item(facts, value)) is not None
    ]
    items += [gather_item(facts, item) for item in gathered(facts)]
    items += [
        exchange_item(facts, index)
        for index, op in enumerate(facts.graph.ops)
        if op.kind in KERNELS
    ]
    items += [head_exchange_item(facts, index) for index in facts.heads]
    return [*items, *route_items(facts), *boundary_items(facts)]
