"""Small models and machines for plans that serve."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from shardlib.annotation.model import read
from shardlib.graph import Problem
from shardlib.layout import MeshShape
from shardlib.machines.topology import topology
from shardlib.models import build
from shardlib.models.config import TransformerConfig
from shardlib.models.presets import PRESETS
from shardlib.serve.cost import ServedModel, cuts
from shardlib.serve.frontend import traced_served
from shardlib.serve.propagation import serving_layouts
from shardlib.serve.space import ServingPins, ServingProblem, ServingWorkload
from shardlib.tracing.trace import served_problem


@cache
def served(name: str) -> ServedModel:
    """A preset, traced."""
    config = PRESETS[name]
    assert isinstance(config, TransformerConfig)
    return traced_served(
        replace(read(build(config)[0]), name=name),
        lambda model, tokens: model(tokens),
        longest=config.max_seq,
    )


@cache
def problem_of(name: str) -> Problem:
    """The forward pass of a preset, by which programs lay out its weights."""
    config = PRESETS[name]
    assert isinstance(config, TransformerConfig)
    return served_problem(
        read(build(config)[0]), lambda model, tokens: model(tokens), longest=config.max_seq
    )


def asked(
    name: str, machine: str, pins: dict[str, int] | None = None, **load: object
) -> ServingProblem:
    """What is planned."""
    given = {"prompt": 512, "output": 128, **load}
    return ServingProblem(
        model=served(name),
        cut=cuts(served(name)),
        topology=topology(machine),
        workload=ServingWorkload(**given),  # pyright: ignore[reportArgumentType]
        pins=ServingPins(**(pins or {})),
    )


def weight_bytes(problem: Problem, mesh: MeshShape, itemsize: int | None = None) -> int:
    """Bytes of weights on one device.

    Args:
        itemsize: bytes of an element; None for those of the stored dtypes.
    """
    layouts = serving_layouts(problem, mesh)
    sizes = {"bfloat16": 2, "float16": 2, "float64": 8, "int8": 1}
    return sum(
        math.prod(layouts[parameter.path].local_shape(parameter.shape, mesh))
        * (itemsize or sizes.get(parameter.dtype, 1 if parameter.dtype.startswith("float8") else 4))
        for parameter in problem.parameters
    )
