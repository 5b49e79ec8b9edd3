"""What can be chosen.

tensor     every number of devices that divides those of the machine
chunk      64 to 8,192 tokens: powers of two, and one and a half times as much
batch      every whole number of requests whose pages fit, up to `MOST_REQUESTS`
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardlib.axes import MeshShape
from shardlib.cost.machine.collectives import FREE, LinearCost, collective_cost
from shardlib.cost.serving.constants import learned
from shardlib.cost.serving.kept_pages import group_of, needed, ordered, pages_each
from shardlib.cost.serving.memory import limit, temporaries
from shardlib.cost.serving.served_model import ServedModel
from shardlib.cost.serving.split import split
from shardlib.cost.serving.step_price import Pricing
from shardlib.graph.problem import Problem
from shardlib.hardware.placement import place
from shardlib.hardware.topology import Topology
from shardlib.planning.serving.pins import ServingPins
from shardlib.planning.serving.workload import ServingWorkload
from shardlib.propagation.serving import serving_layouts

Numbers = NDArray[np.float64]
#: Requests that a replica serves at a time at most; the host does some work for each.
MOST_REQUESTS = 4096
#: Tokens of a page, unless they are pinned.
PAGE = 16
#: The smallest and the largest chunk, tokens.
CHUNKS = (64, 8192)
#: The sizes that are priced: powers of two, and what lies between them.
CHUNK_SIZES: tuple[int, ...] = tuple(
    sorted({size for power in range(8) for size in (64 << power, 96 << power) if size <= CHUNKS[1]})
)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is planned: a model on a machine.

    Attributes:
        model: the forward pass.
        cut: colours of its dims that are sharded.
        topology: the machine.
        workload: what is asked of it.
        pins: what is fixed.
        problem: the same forward pass, of which programs lay out the weights; None to follow `cut`.
    """

    model: ServedModel
    cut: frozenset[str]
    topology: Topology
    workload: ServingWorkload
    pins: ServingPins
    problem: Problem | None = None

    def parts(self, tensor: int) -> Mapping[str, int] | None:
        """Into how many parts programs cut each weight, by path."""
        if self.problem is None:
            return None
        shared = self.shared(tensor)
        mesh = MeshShape(context=shared, tensor=tensor // shared)
        layouts = serving_layouts(self.problem, mesh)
        return {path: mesh.ways(tuple(layout.axes)) for path, layout in layouts.items()}

    @property
    def dtype(self) -> str:
        """The dtype of matmuls: 8-bit floats where weights are, if the chip has a rate."""
        fast = "float8_e4m3fn" in dict(self.topology.chip.flops_per_s)
        if self.workload.weights == "fp8" and fast:
            return "float8_e4m3fn"
        return "bfloat16" if self.workload.weights != "model" else self.model.dtype

    def shared(self, tensor: int) -> int:
        """Devices that share the tokens of every page: as many as there are too few key heads for."""
        heads = [max(count for _, count in call.kept) for call in self.model.attention]
        return tensor // math.gcd(tensor, *heads)

    def tensors(self) -> list[int]:
        """Numbers of devices that may share a layer, rising."""
        devices = self.topology.devices
        return [
            degree
            for degree in range(1, devices + 1)
            if devices % degree == 0 and self.pins.tensor in (None, degree)
        ]

    def chunks(self) -> list[int]:
        """Sizes of chunks, rising."""
        if self.pins.chunk is not None:
            return [self.pins.chunk]
        return list(CHUNK_SIZES)

    def replica(self, tensor: int) -> Replica | None:
        """So many devices that share every layer; None where the links have no such group, or the
        tokens of a pinned page do not divide among them.
        """
        devices = self.topology.devices
        if self.pins.page is not None and self.pins.page % self.shared(tensor):
            return None
        reduce = FREE
        if tensor > 1:
            spans = place(MeshShape(data=devices // tensor, tensor=tensor), self.topology)
            if spans is None:
                return None
            reduce = collective_cost("all-reduce", spans["tensor"], self.topology)
        return Replica(asked=self, tensor=tensor, reduce=reduce)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Devices that share every layer.

    Attributes:
        asked: what is planned.
        tensor: devices.
        reduce: an all-reduce over them.
    """

    asked: Asked
    tensor: int
    reduce: LinearCost

    @cached_property
    def pricing(self) -> Pricing:
        """What its steps cost."""
        request = self.asked
        return Pricing(
            split=split(
                request.model,
                request.cut,
                self.tensor,
                weights=request.workload.weights,
                cache=request.workload.cache,
                parts=request.parts(self.tensor),
            ),
            chip=request.topology.chip,
            reduce=self.reduce,
            constants=learned(),
            dtype=request.dtype,
        )

    @property
    def page(self) -> int:
        """Tokens of a page: `PAGE`, or more where more devices share them."""
        shared = self.asked.shared(self.tensor)
        return self.asked.pins.page or -(-PAGE // shared) * shared

    @property
    def pages_each(self) -> int:
        """Pages of a request at its end."""
        return -(-self.asked.workload.tokens // self.page)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Tokens that layers keep, the most first; 0 for all."""
        windows = (entry.window for entry in self.pricing.split.cached)
        return ordered(windows, longest=self.asked.workload.tokens)

    def pages(self, batch: int, chunk: int) -> tuple[int, ...]:
        """Pages of each cache group, as `shardlib.serving.Capacity` has them."""
        sizes, limit = {"budget": batch + chunk, "size": self.page}, self.pages_each
        if self.windows[0]:
            limit = min(limit, needed(window=self.windows[0], **sizes))
        return pages_each(self.windows, first=batch * limit, slots=batch, **sizes)

    def cache_bytes(self, batch: int, chunk: int) -> float:
        """Bytes of all pages, on a device."""
        pages = self.pages(batch, chunk)
        return self.page * sum(
            entry.bytes * pages[group_of(entry.window, self.windows)]
            for entry in self.pricing.split.cached
        )

    def short(self, batch: int, chunk: int) -> float:
        """Bytes that a device lacks; none where it is not above 0."""
        split_ = self.pricing.split
        used_bytes = split_.weights + temporaries(split_, tokens=batch + chunk, rows=batch)
        return used_bytes + self.cache_bytes(batch, chunk) - limit(self.asked.topology.chip)

    def most(self, chunk: int) -> int:
        """Requests that fit at a time."""
        return bisect.bisect_right(
            range(1, MOST_REQUESTS + 1), 0.0, key=lambda batch: self.short(batch, chunk)
        )
