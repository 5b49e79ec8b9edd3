"""A plan as configurations need it: sizes of its mesh and of its microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.axes import BATCH_AXES, MESH_AXES, STORED_AXES
from shardlib.planning.plan import FrameworkJob, Plan

#: Kind of the slowest links, between slices or hosts.
NETWORK = "network"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan for a framework.

    Attributes:
        plan: the plan.
        sizes: its framework, and the sizes of the job.
    """

    plan: Plan
    sizes: FrameworkJob

    def axis(self, name: str) -> int:
        """The size of a mesh axis; 1 where the mesh has none."""
        return self.plan.mesh[name]

    @property
    def staged(self) -> bool:
        """Whether the plan has stages."""
        return self.axis("stage") > 1

    @property
    def local_batch(self) -> int:
        """Examples of a step that one part of the batch has."""
        return self.sizes.batch // math.prod(self.axis(axis) for axis in BATCH_AXES)

    @property
    def micro_batch(self) -> int:
        """Examples of a microbatch that one part of the batch has."""
        return self.local_batch // self.plan.microbatches

    @property
    def stored_over(self) -> int:
        """Devices that parameters, or their optimizer state, are stored sharded over."""
        return math.prod(self.axis(axis) for axis in STORED_AXES)

    @property
    def chunk_layers(self) -> int:
        """Layers of a chunk of a stage."""
        return self.sizes.layers // (self.axis("stage") * self.plan.virtual_stages)

    def network(self, name: str) -> int:
        """The part of a mesh axis that lies on the slowest links."""
        links = dict(self.plan.placement).get(name, ())
        return math.prod(link.ways for link in links if link.kind == NETWORK)

    @property
    def head(self) -> str:
        """One line that says what the configuration is of."""
        one = self.plan
        return f"shardlib: {one.model} on {one.topology}, mesh {one.mesh}, plan {one.digest}"

    def indivisible(self) -> list[str]:
        """What does not divide of a plan that was changed by hand, in words."""
        one, failures = self.plan, list[str]()
        parts = math.prod(self.axis(axis) for axis in BATCH_AXES) * one.microbatches
        if self.sizes.batch % parts:
            failures.append(
                f"a batch of {self.sizes.batch} in {one.microbatches} microbatches on {one.mesh}"
            )
        chunks = self.axis("stage") * one.virtual_stages
        if self.staged and self.sizes.layers % chunks:
            failures.append(f"{self.sizes.layers} layers in {chunks} equal chunks")
        return failures


def axes_of(plan: Plan) -> Mapping[str, int]:
    """The sizes of all mesh axes of a plan."""
    return {axis: plan.mesh[axis] for axis in MESH_AXES}
