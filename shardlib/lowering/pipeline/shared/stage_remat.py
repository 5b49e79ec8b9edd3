"""What the layers of a stage save for their backward passes.

A plan says how many layers of the fullest stage are rematerialised, of all or by layer group. In
lockstep all chunks of all stages are one program, and as many layers of each are; with a program
for each stage, chunks share that number, those before the others taking one more.

>>> half = StageRemat(policy="full", count=3, layers=4, virtual=2)
>>> half.alike.count, [half.of_chunk(*one).count for one in ((0, 2), (1, 2), (1, 1))]
(2, [2, 1, 0])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardlib.lowering.loss.remat import apart, fullest_stage, layers
from shardlib.lowering.pipeline.shared.layers_in_turn import Saved
from shardlib.lowering.pipeline.shared.partition import Cut
from shardlib.lowering.reading.loss import LossReading
from shardlib.planning.plan import Plan
from shardlib.tracing.program import Program


@dataclass(frozen=True, kw_only=True)
class StageRemat:
    """What the layers of the fullest stage save.

    Attributes:
        policy: remat policy.
        count: how many of the layers follow it; the others save all that their gradients read.
        layers: how many it has, all chunks together.
        virtual: chunks.
        offloaded: whether what is saved waits in host memory.
        outside: by path of a loop that is not shared out: the policy and how many of its layers
            follow it.
    """

    policy: str
    count: int
    layers: int
    virtual: int
    offloaded: bool = False
    outside: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def alike(self) -> Saved:
        """What the layers of every chunk save, where all chunks are one program."""
        return self._saved(math.ceil(self.count / self.virtual))

    def of_chunk(self, number: int, layers: int) -> Saved:
        """What the layers of one chunk save, where it has a program of its own."""
        rematerialised = self.count // self.virtual + (number < self.count % self.virtual)
        missing = self.layers // self.virtual - layers
        return self._saved(max(0, rematerialised - missing))

    def _saved(self, count: int) -> Saved:
        return Saved(policy=self.policy, count=count, offloaded=self.offloaded)


def stage_remat(
    plan: Plan, cut: Cut, program: Program, loss: LossReading, paths: Sequence[str]
) -> StageRemat:
    """What the layers of the stages of a plan save."""
    fullest = fullest_stage(plan, cut.layers)
    policies = apart(plan, program, loss, paths)
    uniform = StageRemat(
        policy=plan.remat,
        count=fullest,
        layers=fullest,
        virtual=plan.virtual_stages,
        offloaded="activations" in plan.offload,
    )
    if not policies:
        return uniform
    counts = {group.path: group.count for group in layers(program, loss)}
    # layers that are written out are one loop in the program that is cut
    here = (
        cut.loop.path if cut.loop.path in counts else max(reversed(counts), key=counts.__getitem__)
    )
    policy, count = policies[here]
    outside = {
        path: (name, math.ceil(number * counts[path] / fullest_stage(plan, counts[path]) - 1e-9))
        for path, (name, number) in policies.items()
        if path != here
    }
    return replace(uniform, policy=policy if count else "none", count=count, outside=outside)
