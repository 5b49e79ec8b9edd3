"""From JAX to the graph: trace a loss, describe what it computes, evaluate it again.

Terms:

program      a jaxpr with calls of jit inlined and values numbered; a path names each equation
run          of a program: repetitions of one block of equations, such as unrolled layers
walk         evaluation of a traced program with callbacks on its values (`Walk`)
rule         of a primitive: a factor for every index, by which dims of its values are tied
row          an example of the batch; the kind of a value says which rows it depends on (`Kind`):
             its family, the position of the rows in its dims, and traits that results inherit
two traces   of a loss, for two numbers of rows; what differs between them depends on that number
learned      depends on parameters
whole batch  of a value: it needs several rows, so that microbatches are passed it
root         of a weight in a step: the array of the state that it is made of, element by element
retrace      to trace a step again for another number of rows

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
