"""What rules of thumb need to know about a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlib.axes import TOKEN_AXES
from shardlib.graph.graph import ITEMSIZE
from shardlib.hardware.topology import Topology
from shardlib.planning.plan import Plan
from shardlib.planning.space.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A plan, and what the rules need to know besides.

    Attributes:
        plan: the finished plan.
        topology: its machine.
        compute_dtype: dtype of the matmuls that dominate.
        itemsize: bytes of a number of that dtype.
        weights: numbers in the parameters, embeddings left out.
        language: whether the model reads sequences of tokens.
    """

    plan: Plan
    topology: Topology
    compute_dtype: str
    itemsize: int
    weights: int
    language: bool

    @property
    def device_tokens(self) -> float:
        """Tokens that a device works on at once: one microbatch of its part of the batch."""
        plan = self.plan
        return plan.estimate.tokens / plan.microbatches / plan.mesh.ways(TOKEN_AXES)


def situation_of(load: Workload, topology: Topology, plan: Plan) -> Situation:
    """The situation of a plan for a model."""
    vocabulary = load.colouring.canonical("vocab")
    weights = sum(
        math.prod(p.shape)
        for p in plan.parameters
        if vocabulary is None or vocabulary not in p.colours
    )
    dtype = load.problem.compute_dtype
    return Situation(
        plan=plan,
        topology=topology,
        compute_dtype=dtype,
        itemsize=ITEMSIZE.get(dtype, 4),
        weights=weights,
        language=load.colouring.named_sequence is not None,
    )
