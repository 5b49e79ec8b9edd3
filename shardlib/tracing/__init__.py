"""From JAX to the graph: trace a loss, describe what it computes, evaluate it again.

unchanged.py       inputs that are handed on as they are

folding.py         how does a model with layers written out become one with a loop over layers?
jaxpr_to_graph.py  how does a jaxpr become a `Graph`?
layouts.py         layouts that a program brings along
program.py         in which order are the equations of a traced program walked, and what is each
                   one called?
rewriting.py       traced programs run again with a hand on every value
row_kinds.py       what is known of a value
row_rules.py       how each family of primitives carries rows of the batch
rows.py            how does a loss depend on the rows of its batch? Two traces of it, for
                   different numbers of rows, are walked side by side (`analysis.py`)
rules.py           one table from primitive to the factor rule of its equation
steps.py           A step that a user wrote, with gradients and optimizers inside, as a problem
                   to be planned
trace.py           what does a loss compute, and what does its gradient? The door between JAX and
                   the planner
"""

from shardlib.tracing.jaxpr_to_graph import graph_from_jaxpr
from shardlib.tracing.rewriting import evaluate
from shardlib.tracing.trace import Traced, trace

__all__ = ["Traced", "evaluate", "graph_from_jaxpr", "trace"]
