"""A user's model as what computes steps: over pages, or with a cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.model import Model, Tree
from shardlib.annotation.read import Init, read
from shardlib.annotation.trees.paths import path_text
from shardlib.errors import ArgumentError, raise_all
from shardlib.lowering.mesh.device_mesh import device_mesh
from shardlib.lowering.serving.program import Forward, TracedForward, traced_forward
from shardlib.processes.agreement import processes_text
from shardlib.serving.compared import compare
from shardlib.serving.computing.slotted import OwnCache, SlotStep, own_cache, slotted
from shardlib.serving.scheduling.capacity import Capacity
from shardlib.serving.scheduling.requests import Told
from shardlib.serving.scheduling.schedule import Share
from shardlib.serving.step import Step
from shardlib.serving.weights import arranged, both, placed
from shardlib.untrusted.shown import bounded


class Computes(Protocol):
    """Computes the steps of an engine.

    Attributes:
        weights: (params, state) on their devices.
        compiled: programs that have been compiled.
    """

    weights: tuple[Tree, Tree]

    @property
    def compiled(self) -> int:
        """Programs that have been compiled."""
        ...

    def warm_up(self) -> None:
        """Compiles all programs."""
        ...

    def __call__(
        self, shares: Sequence[Share], allowed: Mapping[int, Sequence[np.ndarray]] | None = None
    ) -> list[list[Told]]:
        """Computes a step; returns what is chosen in the rows of each share."""
        ...


@dataclass(frozen=True, kw_only=True)
class Built:
    """What computes the steps of an engine.

    Attributes:
        compute: does.
        capacity: how many requests and tokens are served.
        forward: the traced forward pass.
        place: weights as a user gives them -> on their devices.
        chunk: tokens of a prompt that a step computes at most.
    """

    compute: Computes
    capacity: Capacity
    forward: TracedForward | OwnCache
    place: Callable[[Tree | int], tuple[Tree, Tree]]
    chunk: int


def built(
    init: Init,
    forward: Forward,
    *,
    weights: Tree | int,
    capacity: Capacity,
    grid: tuple[int, int],
    devices: Sequence[jax.Device],
    check: bool,
    windows: Iterable[int] | None = None,
) -> Built:
    """Makes what computes the steps of an engine.

    Args:
        windows: of cache groups that there are already, beside another model; None for its own.
    """
    data, tensor = grid
    _require_own(devices, weights)
    _check_devices(tensor, data, len(devices))
    model = read(init)
    cached_forward = own_cache(model, forward, longest=capacity.longest)
    if cached_forward is not None:
        return _slotted(cached_forward, weights, capacity, grid, devices[0])
    if capacity.adapters and capacity.storage.weights != "model":
        raise ArgumentError(
            f"weights are {capacity.storage.weights}, and those of adapters are not\nTry: no"
            ' adapters, or Storage(weights="model")'
        )
    traced = traced_forward(model, forward, longest=capacity.longest)
    capacity = capacity.within(traced.windows if windows is None else windows)
    arrangement = arranged(model, forward, traced, tensor=tensor, data=data)
    mesh = device_mesh(arrangement.mesh, devices[: tensor * data])[0]
    cpu = traced if devices[0].platform == "cpu" else None
    placement = placed(model, arrangement, mesh, capacity.storage, cpu)

    def place(weights: Tree | int) -> tuple[Tree, Tree]:
        return placement.weights(*_weights(model, weights))

    stored, pages = place(weights), placement.pages(traced, capacity.groups, capacity.page)
    if check:
        compare(model, forward, traced, stored, page=capacity.page)
    return Built(
        compute=Step(traced, stored, pages, capacity, placement.grid),
        capacity=capacity,
        forward=traced,
        place=place,
        chunk=capacity.most_tokens,
    )


def _slotted(
    forward: OwnCache,
    weights: Tree | int,
    capacity: Capacity,
    grid: tuple[int, int],
    device: jax.Device,
) -> Built:
    if grid != (1, 1):
        raise ArgumentError(
            f"data is {grid[0]}, tensor is {grid[1]}; a model with a cache of its own is served by"
            " one device\nTry: attention by shardlib.attention, whose cache is sharded"
        )
    if capacity.drafts:
        raise ArgumentError(
            f"drafts is {capacity.drafts}; a cache of the model's own takes no token back"
        )
    sizes = slotted(capacity)

    def place(weights: Tree | int) -> tuple[Tree, Tree]:
        return jax.device_put(_weights(forward.model, weights), device)

    compute = SlotStep(forward, place(weights), sizes)
    return Built(compute=compute, capacity=sizes, forward=forward, place=place, chunk=compute.chunk)


def _require_own(devices: Sequence[jax.Device], weights: Tree | int) -> None:
    """Refuses devices of other processes, and weights on them: every process schedules requests by
    its own clock.
    """
    others = sorted({device.process_index for device in devices} - {jax.process_index()})
    if others:
        raise ArgumentError(
            f"an engine computes on devices of its own process, and devices of"
            f" {processes_text(others)} are among the {len(devices)} that are to serve in"
            f" {processes_text([jax.process_index()])}\nTry: devices=jax.local_devices(), an engine"
            " in each process that is to answer"
        )
    leaves = jax.tree.leaves(weights)
    if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves):
        raise ArgumentError(
            "the weights are on devices of other processes, and an engine computes in one\nTry:"
            " jax.tree.map(whole, weights) with `whole` of shardlib.processes.values, which all"
            " processes call"
        )


def _check_devices(tensor: int, data: int, there: int) -> None:
    failures = [
        f"{name} is {value!r}; it is a whole number from 1 on"
        for name, value in (("tensor", tensor), ("data", data))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
    if not failures and tensor * data > there:
        failures = [
            f"{data} groups of {tensor} devices are more than the {there} devices that there are"
        ]
    if failures:
        raise_all(ArgumentError, "the model cannot be served so", failures)


def _weights(model: Model, weights: Tree | int) -> tuple[Tree, Tree]:
    """(params, state) of what a user gave."""
    alone = not isinstance(weights, int) and not (isinstance(weights, tuple) and len(weights) == 2)
    if alone and jax.tree.leaves(model.state):
        raise ArgumentError(
            "the model has state, and weights are params alone\nTry: (params, state)"
        )
    _require_own((), weights)
    pair = (weights, model.state) if alone else both(model, weights)
    _require_same(model.params, pair[0])
    return pair


def _require_same(expected: Tree, params: Tree) -> None:
    """Refuses weights of another model."""
    shapes, theirs = (
        {
            path_text(path) or "params": tuple(jnp.shape(leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (expected, params)
    )
    failures = [f"{path} is missing" for path in shapes if path not in theirs]
    failures += [f"{path} is no parameter of the model" for path in theirs if path not in shapes]
    failures += [
        f"{path} is {list(theirs[path])}; the model has {list(shape)}"
        for path, shape in shapes.items()
        if theirs.get(path, shape) != shape
    ]
    if failures:
        raise_all(ArgumentError, "the weights are not those of the model", bounded(failures))


def shapes(weights: Tree) -> list[object]:
    """What weights of one model have in common."""
    leaves = jax.tree.leaves(weights)
    return [jax.tree.structure(weights), *((leaf.shape, leaf.dtype) for leaf in leaves)]
