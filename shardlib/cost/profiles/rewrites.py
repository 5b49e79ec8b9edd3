"""A step as a training framework runs it.

A framework that fuses attention computes other kernels than the traced program has, and one whose
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
    step: StepGraph, names: tuple[LogicalAxes, ...], profile: FrameworkProfile
) -> tuple[StepGraph, tuple[LogicalAxes, ...]]:
    """A step graph as a framework runs it, and the colours of its values."""
    if profile.attention in ("fused", "blocks"):
        step = fused(step, profile.attention_block)
    if profile.attention == "rematerialised":
        step, names = rematerialise_attention(step, names)
    if profile.kept or profile.offloaded:
        step, names = keep_named(step, names, (*profile.kept, *profile.offloaded))
    elif profile.saves in ("operands", "eager"):
        step, names = keep_operands(step, names, eager=profile.saves == "eager")
    if profile.products == "half":
        step, names = in_halves(step, names)
    if profile.matmul_dtype:
        step, names = quantised(
            step,
            names,
            profile.matmul_dtype,
            delayed=profile.scaling == "delayed",
            rows=profile.scaling == "rows",
        )
    return step, names
