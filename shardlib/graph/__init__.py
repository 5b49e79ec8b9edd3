"""The intermediate representation: what a program computes, with no JAX in it."""

from shardlib.graph.factors import FactorRule
from shardlib.graph.graph import Graph, Op, Region, Value

__all__ = ["FactorRule", "Graph", "Op", "Region", "Value"]
