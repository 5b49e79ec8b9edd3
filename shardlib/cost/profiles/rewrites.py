"""A step as a training framework runs it.

A stack that fuses attention computes other kernels than the traced program has, and one whose
layers are written by hand keeps other values for the backward pass. Both are rewrites of the step
graph: everything after them, kernels, lifetimes and layouts, works as it does on any graph.
"""

from __future__ import annotations

from shardlib.axes import LogicalAxes
from shardlib.cost.profiles.eight_bit import quantised
from shardlib.cost.profiles.half_precision import in_halves
from shardlib.cost.profiles.saved_activations import (
    keep_named,
    keep_operands,
    rematerialise_attention,
)
from shardlib.cost.step.attention import fused
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.graph.problem import StepGraph


def rewritten(
    step: StepGraph, names: tuple[LogicalAxes, ...], stack: FrameworkProfile
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """A step graph as a stack runs it, and the colours of its values.

    Args:
        step: as traced.
        names: colour per dim of every value.
        stack: the software; the default changes nothing.

    Returns:
        The step and the names of its values: those of the traced step keep their numbers, new ones
        follow them.
    """
    if stack.attention in ("fused", "blocks"):
        step = fused(step, stack.attention_block)
    if stack.attention == "rematerialised":
        step, names = rematerialise_attention(step, names)
    if stack.kept or stack.offloaded:
        step, names = keep_named(step, names, (*stack.kept, *stack.offloaded))
    elif stack.saves in ("operands", "eager"):
        step, names = keep_operands(step, names, eager=stack.saves == "eager")
    if stack.products == "half":
        step, names = in_halves(step, names)
    if stack.matmul_dtype:
        step, names = quantised(
            step,
            names,
            stack.matmul_dtype,
            delayed=stack.scaling == "delayed",
            rows=stack.scaling == "rows",
        )
    return step, names
