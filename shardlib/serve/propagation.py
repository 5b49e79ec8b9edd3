"""Shardings of a served model.

A step reads every weight for a few tokens, so every weight is sharded over all devices that share a
layer, along a dim that the program contracts or looks up; of several, along the one that products
of activations have, such as heads, or else along the one that most weights have. The residual
stream is replicated, so that a matmul into it ends in an all-reduce of activations; so are vectors
of the stream, such as scales of norms.

Devices of one `tensor` group are those along the mesh axes `tensor`, which cuts key heads, and
`context`, which cuts the tokens of every page where there are fewer key heads than devices; other
weights are sharded over both.

>>> str(serving_mesh(tensor=16, key_heads=[8]))
'context=2 x tensor=8'
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from shardlib.graph import Parameter, Problem
from shardlib.layout import Layout, MeshShape
from shardlib.propagation.colours import BATCH_NAMES, SEQUENCE_NAMES, Colouring, colour
from shardlib.propagation.contractions import CONTRACTIONS

#: Mesh axes that share every layer, those of key heads first.
SHARED_AXES = ("tensor", "context")


def serving_mesh(*, tensor: int, key_heads: Iterable[int], data: int = 1) -> MeshShape:
    """The mesh of devices that serve."""
    heads = math.gcd(tensor, *key_heads)
    return MeshShape(data=data, context=tensor // heads, tensor=heads)


def serving_layouts(problem: Problem, mesh: MeshShape) -> Mapping[str, Layout]:
    """Returns the layout of each parameter, by path."""
    colouring = colour(problem)
    walked = _walked(problem, colouring)
    fit = _fit(problem, colouring)
    return {
        parameter.path: _layout(parameter, colouring, fit, walked, mesh)
        for parameter in problem.parameters
    }


#: Preference for sharding along a colour: products of activations whose results have it, as heads
#: are in two of attention, and widths of heads in one; and elements of weights that have it.
_Rank = tuple[int, int]


def _fit(problem: Problem, colouring: Colouring) -> Mapping[str, _Rank]:
    """Colours along which weights may be sharded, with the preference for each."""
    row_colours = {colouring.canonical(name) for name in (*BATCH_NAMES, *SEQUENCE_NAMES)} - {None}
    multiplied, mixed = set[str | None](), Counter[str | None]()
    for op in problem.forward.ops:
        sides = [colouring.forward[value] for value in op.operands]
        results = {name for value in op.results for name in colouring.forward[value]}
        if op.category in CONTRACTIONS or op.category == "gather" or op.rule.outer:
            multiplied.update(results, *sides)
        if op.category in CONTRACTIONS and all(row_colours & set(names) for names in sides):
            mixed.update(results)
    weights = _sizes(problem, colouring)
    stream = max(weights, key=lambda name: weights[name], default=None)
    return {
        name: (mixed[name], size)
        for name, size in weights.items()
        if name in multiplied and name != stream
    }


def _walked(problem: Problem, colouring: Colouring) -> set[str | None]:
    """Colours of dims over which loops iterate, such as layers."""
    return {
        colouring.forward[op.operands[0]][0] for op in problem.forward.ops if op.kind == "enter"
    }


def _sizes(problem: Problem, colouring: Colouring) -> Counter[str]:
    """Elements of weights that have a colour, of those that are not rows, tokens or layers."""
    row_colours = {colouring.canonical(name) for name in (*BATCH_NAMES, *SEQUENCE_NAMES)}
    weights = Counter[str]()
    for parameter in problem.parameters:
        for name in {*colouring.parameters[parameter.path]} - {
            None,
            *_walked(problem, colouring),
            *row_colours,
        }:
            weights[str(name)] += math.prod(parameter.shape)
    return weights


def _layout(
    parameter: Parameter,
    colouring: Colouring,
    fit: Mapping[str, _Rank],
    walked: Collection[str | None],
    mesh: MeshShape,
) -> Layout:
    axes = {
        dim: name
        for dim, name in enumerate(colouring.parameters[parameter.path])
        if name is not None
    }
    cut = {
        dim: sharding_axes
        for dim, name in axes.items()
        if name in fit and (sharding_axes := _sharding_axes(parameter.shape[dim], mesh))
    }
    if cut:
        dim = max(cut, key=lambda dim: _preference(fit[axes[dim]], mesh.ways(cut[dim]), dim))
        return _cut(parameter, dim, cut[dim])
    stream = [dim for dim in range(len(parameter.shape)) if axes.get(dim) not in walked]
    if sum(parameter.shape[dim] > 1 for dim in stream) > 1:
        for dim in reversed(stream):
            if sharding_axes := _sharding_axes(parameter.shape[dim], mesh):
                return _cut(parameter, dim, sharding_axes)
    return Layout.replicated(len(parameter.shape))


def _preference(rank: _Rank, shards: int, dim: int) -> tuple[int, int, int, int]:
    """Ranks a dim for sharding: as attention has it, or else into the most parts, as the widths of
    experts are where there are fewer experts than devices.
    """
    mixed, size = rank
    return mixed, shards, size, -dim


def _sharding_axes(size: int, mesh: MeshShape) -> tuple[str, ...]:
    """The largest set of axes over which a dim divides."""
    for axes in (SHARED_AXES, ("tensor",), ("context",)):
        if mesh.ways(axes) > 1 and size % mesh.ways(axes) == 0:
            return axes
    return ()


def _cut(parameter: Parameter, dim: int, axes: tuple[str, ...]) -> Layout:
    return Layout(*(axes if index == dim else () for index in range(len(parameter.shape))))
