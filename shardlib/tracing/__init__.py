"""From JAX to the graph: trace a loss, describe what it computes, evaluate it again."""

from shardlib.tracing.jaxpr_to_graph import graph_from_jaxpr
from shardlib.tracing.rewriting.interpreter import evaluate
from shardlib.tracing.trace import Traced, trace

__all__ = ["Traced", "evaluate", "graph_from_jaxpr", "trace"]
