"""The problem types live with the graph; this module only keeps their first address."""

from shardlib.graph.problem import InputDim, Parameter, Problem, StepGraph

__all__ = ["InputDim", "Parameter", "Problem", "StepGraph"]
