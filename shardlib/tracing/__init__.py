"""From JAX to the graph: trace a loss, describe what it computes, evaluate it again.

folding.py         unrolled layers become a loop over layers
layouts.py         layouts written in the user's program
primitives.py      one row for each primitive: factor rule, effect on rows (with the rules for it),
                   linearity, also of hand-written derivatives
program.py         the order and the names of the equations of a traced program; repeated blocks
rewriting.py       traced programs re-evaluated with a callback on every value
row_kinds.py       kinds of values by the rows of the batch that they depend on
rows.py            dependence of a loss on the rows of its batch
rules.py           the factor rule of each primitive
steps.py           a step that a user wrote, with gradients and optimizers inside, as a problem to
                   be planned
trace.py           the traced loss and its gradient as graphs: the only entry from JAX to the
                   planner
updates.py         the matrix updates of a traced optimizer
"""

from shardlib.tracing.rewriting import evaluate
from shardlib.tracing.trace import Traced, graph_from_jaxpr, trace

__all__ = ["Traced", "evaluate", "graph_from_jaxpr", "trace"]
