"""From JAX to the graph: trace a loss, describe what it computes, evaluate it again.

trace.py           a loss and its gradient, traced
program.py         the equations of a traced program, in order
jaxpr_to_graph.py  a jaxpr as a graph
rules/             from primitives to factor rules
batch.py           the dims of a batch, and its tokens
parameters.py      parameters, and the optimizer state of each
rows/              how a loss depends on the rows of its batch
row_proofs.py      that, by tracing for other numbers of rows
rewriting/         traced programs run again, with other values or remat
trip_counts.py     how often loops run
unchanged.py       inputs that are handed on as they are
"""

from shardlib.tracing.jaxpr_to_graph import graph_from_jaxpr
from shardlib.tracing.rewriting import evaluate
from shardlib.tracing.trace import Traced, trace

__all__ = ["Traced", "evaluate", "graph_from_jaxpr", "trace"]
