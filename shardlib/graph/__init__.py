"""The intermediate representation: what a program computes, with no JAX in it.

graph.py    values, ops and regions of a program
factors.py  how dims of operands and results of an op hang together
problem.py  all that planning knows about a model
forward.py  the forward pass of a step graph
rows.py     how a loss depends on the rows of its batch
kernels.py  kernels by which a called attention can be computed
prune.py    the ops that results need
check.py    whether a graph is well formed
text.py     graphs as text
"""

from shardlib.graph.factors import FactorRule
from shardlib.graph.graph import Graph, Op, Region, Value

__all__ = ["FactorRule", "Graph", "Op", "Region", "Value"]
