"""Which plans are there to choose from?

A plan is a mesh, a number of microbatches, a set of colours for the tensor axis, sequence parallelism, a ZeRO stage and a
remat policy. `Space` lists the legal values of each under the user's pins and says which combinations are legal; search
prices all of them. Nothing is decided one axis at a time.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardlib.axes import MeshShape
from shardlib.cost.pricing import Candidates
from shardlib.errors import BatchError, PinError, raise_all
from shardlib.graph.problem import Problem
from shardlib.planning.pins import PLANNED_AXES, Pins
from shardlib.propagation.assignment import Choice
from shardlib.propagation.colours import Colouring

#: Largest number of colours whose subsets are all tried for the tensor axis.
MAX_TENSOR_COLOURS = 10
#: Largest number of gradient accumulation steps that is tried.
MAX_MICROBATCHES = 256


@dataclass(frozen=True, kw_only=True)
class Space:
    """The plans of a problem under pins.

    Attributes:
        pairs: (mesh, microbatches) whose batch divides.
        tensor: colours that the tensor axis may cut, in order of priority.
        left_out: colours beyond `MAX_TENSOR_COLOURS`.
        policies: remat policies.
        choices: every set of colours, with and without sequence parallelism.
    """

    pairs: tuple[tuple[MeshShape, int], ...]
    tensor: tuple[str, ...]
    left_out: tuple[str, ...]
    policies: tuple[str, ...]
    choices: tuple[Choice, ...]


def batch_size(problem: Problem, colouring: Colouring) -> int:
    """Greatest common divisor of the batch dims of the batch arrays, examples; 1 where nothing is named a batch."""
    name = colouring.batch_colour
    sizes = [shape[dim] for path, shape, _, _ in problem.batch for dim, axis in enumerate(colouring.batch[path]) if axis == name]
    return math.gcd(*sizes) if sizes and name else 1


def sequence_size(problem: Problem, colouring: Colouring) -> int:
    """Greatest common divisor of the sequence dims of the batch arrays, positions; 1 where there is none."""
    name = colouring.sequence_colour
    sizes = [shape[dim] for path, shape, _, _ in problem.batch for dim, axis in enumerate(colouring.batch[path]) if axis == name]
    return math.gcd(*sizes) if sizes and name else 1


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def meshes(devices: int, pins: Pins) -> Iterator[MeshShape]:
    """Every factorisation of a device count over the planned axes that the pins allow."""
    if pins.mesh is not None:
        if pins.mesh.devices == devices:
            yield pins.mesh
        return
    fixed = dict(pins.axes)
    for data, fsdp in itertools.product(divisors(devices), repeat=2):
        if devices % (data * fsdp):
            continue
        sizes = {"data": data, "fsdp": fsdp, "tensor": devices // (data * fsdp)}
        if all(sizes.get(axis, 1) == size for axis, size in fixed.items()):
            yield MeshShape(sizes)


def tensor_colours(colouring: Colouring) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Colours that the tensor axis may cut, the most specific first, and those left out for being too many.

    The colour of the residual stream is no candidate where the sequence can be cut instead: both cost the same
    collectives, and along the sequence the normalisation needs none.
    """
    barred = {colouring.batch_colour, colouring.sequence_colour}
    fit = [c for c in colouring.colours.values() if c.matmuls and c.divisor > 1 and c.name not in barred
           and not (c.carried and colouring.sequence_colour)]
    by_use = sorted(fit, key=lambda c: (-c.matmuls * math.log2(c.divisor + 1), c.name))
    kept, rest = by_use[:MAX_TENSOR_COLOURS], by_use[MAX_TENSOR_COLOURS:]
    return tuple(c.name for c in sorted(kept, key=lambda c: (c.matmuls, c.name))), tuple(c.name for c in rest)


def build(problem: Problem, colouring: Colouring, devices: int, pins: Pins, fixed: Choice | None = None) -> Space:
    """Lists the space for exactly `devices` devices.

    Args:
        problem: the model.
        colouring: its colours.
        devices: devices that a mesh must use.
        pins: the user's decisions.
        fixed: the choice that pinned rules stand for.

    Raises:
        PinError: the pinned remat policy does not exist for this model.
    """
    size = batch_size(problem, colouring)
    pairs = [(mesh, micro) for mesh in meshes(devices, pins) for micro in _microbatches(size, mesh, pins)]
    policies = _policies(problem, pins)
    tensor, left_out = tensor_colours(colouring)
    sequence = colouring.sequence_colour
    flags = [flag for flag in (False, True) if pins.sequence_parallel in (None, flag) and (sequence or not flag)]
    if fixed is not None:
        bare = Choice(batch=fixed.batch)  # rules for the tensor axis say nothing on a mesh without one
        choices = [fixed] if fixed == bare else [fixed, bare]
    else:
        choices = [Choice(tensor=subset, batch=colouring.batch_colour, sequence=sequence if flag else None)
                   for count in range(len(tensor) + 1) for subset in itertools.combinations(tensor, count) for flag in flags if subset or not flag]
    return Space(pairs=tuple(pairs), tensor=tensor, left_out=left_out, policies=policies, choices=tuple(choices))


def _policies(problem: Problem, pins: Pins) -> tuple[str, ...]:
    if pins.remat is None:
        return tuple(problem.steps)
    if pins.remat not in problem.steps:
        raise PinError(f"remat={pins.remat!r} recomputes layers, and {problem.model} has no repeated layer; it can be {', '.join(problem.steps)}")
    return (pins.remat,)


def _microbatches(size: int, mesh: MeshShape, pins: Pins) -> list[int]:
    ways = mesh["data"] * mesh["fsdp"]
    if size % ways:
        return []
    allowed = [n for n in divisors(size // ways) if n <= MAX_MICROBATCHES]
    return [n for n in allowed if pins.microbatches in (None, n)] if pins.microbatches is None or pins.microbatches <= MAX_MICROBATCHES else (
        [pins.microbatches] if (size // ways) % pins.microbatches == 0 else [])


def legal(space: Space, choice: Choice, colouring: Colouring, sequence: int, c: Candidates) -> np.ndarray:
    """Which candidates a choice fits: every cut colour divides, and no mesh axis is left without work."""
    fits = c.tensor > 1 if choice.tensor or choice.sequence else c.tensor == 1
    for name in choice.tensor:
        fits = fits & (colouring.colours[name].divisor % c.tensor == 0)
    return fits & (sequence % c.tensor == 0) if choice.sequence else fits


def explain_empty(problem: Problem, colouring: Colouring, pins: Pins, devices: int) -> BatchError | PinError:
    """Why no plan is legal under the pins, as the error to raise."""
    size = batch_size(problem, colouring)
    sizes = dict(pins.mesh) if pins.mesh is not None else dict(pins.axes)
    ways = sizes.get("data", 1) * sizes.get("fsdp", 1)
    if size % ways:
        return PinError(f"the mesh {MeshShape(sizes)} cuts the batch into {ways} parts, which do not divide its {size} examples\n"
                        f"Try: a batch that is a multiple of {ways}, or smaller data and fsdp axes")
    if pins.microbatches and size % (ways * pins.microbatches):
        return PinError(f"microbatches={pins.microbatches} does not divide the {size // ways} examples of each of the {ways} parts of the batch\n"
                        f"Try: one of {', '.join(map(str, divisors(size // ways)))}")
    tensor = sizes.get("tensor", 1)
    length = sequence_size(problem, colouring)
    if pins.sequence_parallel and (colouring.sequence_colour is None or length % tensor):
        found = "has no sequence" if colouring.sequence_colour is None else f"has sequences of {length}, which {tensor} parts do not divide"
        return PinError(f"sequence_parallel=True cuts the sequence over tensor={tensor}, and {problem.model} {found}\n"
                        "Try: sequence_parallel=False, or name the dim \"seq\" in batch_axes")
    if tensor > 1 and pins.rules is not None:
        cut = {name: colouring.canonical(name) for name, axes in pins.rules.entries if "tensor" in axes}
        whole = [f"{name!r} -> tensor: its dims have the largest common size {colouring.colours[colour].divisor}, which {tensor} parts do not divide"
                 for name, colour in cut.items() if colour is not None and colouring.colours[colour].divisor % tensor]
        if whole:
            raise_all(PinError, f"pinned rules do not fit the pinned mesh {MeshShape(sizes)}", whole,
                      hint="a tensor axis that divides them, or the rule to None")
    if tensor > 1:
        names = tensor_colours(colouring)[0]
        listed = ", ".join(f"{name} ({colouring.colours[name].divisor})" for name in names)
        return PinError(f"tensor={tensor} divides no colour that it could cut; colours with their largest common size are {listed or 'none'}\n"
                        "Try: a tensor axis that divides one of them")
    return PinError(f"no mesh of {devices} devices over {', '.join(PLANNED_AXES)} fits {problem.model} with a batch of {size} under the pins {pins}\n"
                    f"Try: a batch that is a multiple of the number of devices")


def count_by(values: list[str]) -> tuple[tuple[str, int], ...]:
    """How often each value occurs, sorted by name."""
    return tuple(sorted(Counter(values).items()))
