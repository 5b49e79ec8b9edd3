"""The trained parameters of a program in the order in which its loss uses them."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from shardlib.exchanges.parts import Part
from shardlib.lowering.islands.halves import name_of, trained
from shardlib.lowering.program.program import Program
from shardlib.planning.transfers.buckets import in_order
from shardlib.planning.transfers.first_use import FirstUse, first_uses
from shardlib.tracing.jaxpr_to_graph import graph_from_program


def parts_in_order(program: Program) -> tuple[Part, ...]:
    """All elements of trained parameters, those that are used first in front."""
    shapes = {path: tuple(leaf.shape) for path, leaf in trained(program).items()}
    return in_order(_uses(program, shapes), shapes)


def _uses(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> tuple[FirstUse, ...]:
    """Of every parameter; without a trace, in the order of paths."""
    if program.source is None:
        return tuple(FirstUse.unknown(path, number) for number, path in enumerate(sorted(shapes)))
    leaves = jax.tree_util.tree_leaves_with_path(program.state.params)
    flat = program.source.program
    names = [(name_of(path), "parameter") for path, _ in leaves]
    names += [("", "batch")] * (len(flat.inputs) - len(names))
    return first_uses(graph_from_program(flat, names))
