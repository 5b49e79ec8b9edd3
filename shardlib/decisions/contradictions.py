"""Which decisions go together: a table of rules, each with the pins that break it and the message.

>>> print(*contradictions({"schedule": "1f1b"}, {"stage": 1}))
schedule='1f1b' needs stages, and the stage axis is pinned to 1
Try: mesh.stage=2 or more, or schedule='none'
>>> contradictions({"zero": 3, "remat": "full"}, {})
[]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardlib.axes import INNER_AXES, MESH_AXES, STORED_AXES, MeshShape
from shardlib.decisions.readers import ANY_GROUP, GroupPolicies, PinValue
from shardlib.errors import HINT
from shardlib.exchanges.values import EXACT
from shardlib.schedules.schedule import Schedule
from shardlib.schedules.table import named, pipelines


@dataclass(frozen=True, kw_only=True)
class Given:
    """What pins fix.

    Attributes:
        pins: values by word; what is left to the planner is absent.
        axes: sizes of the mesh axes that are pinned.
    """

    pins: Mapping[str, Any]
    axes: Mapping[str, int]

    def get(self, word: str, default: PinValue = None) -> PinValue:
        """The pinned value, or what to take for one that is left to the planner."""
        return self.pins.get(word, default)

    def axis(self, name: str, default: int) -> int:
        """The pinned size of a mesh axis, or what to take for one that is left to the planner."""
        return self.axes.get(name, default)

    @property
    def schedule(self) -> Schedule | None:
        """The pinned schedule; None where it is left to the planner."""
        return named(self.pins["schedule"]) if "schedule" in self.pins else None

    @property
    def staged(self) -> bool:
        """Whether plans under these pins may have stages."""
        unstaged = self.schedule is not None and not self.schedule.staged
        return not unstaged and self.axis("stage", 2) > 1

    def chunked(self, *, lockstep: bool) -> bool:
        """Whether the pinned schedule, if there is one, allows the pinned chunks on a stage."""
        chunks = self.get("virtual_stages", 1)
        return self.schedule is None or self.schedule.allows(chunks, lockstep=lockstep)

    @property
    def groups(self) -> GroupPolicies:
        """The policies of layer groups; () where the planner may choose them."""
        pinned = self.get("remat_classes", ())
        return () if pinned == ANY_GROUP else pinned

    @property
    def rematerialised(self) -> list[int | None]:
        """How many layers of each group follow its policy; None: all."""
        return [layers for _, policy, layers in self.groups if policy != "none"]

    @property
    def unlaid(self) -> list[str]:
        """The axes of the pinned order that the pinned axes leave no place on the links."""
        return [axis for axis in self.get("axis_order", ()) if self.axis(axis, 2) == 1]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Decisions that cannot be together.

    Attributes:
        broken: whether pins contradict each other by this rule.
        says: the message: `{word}` is a pin's value, `{axes[name]}` the size of a mesh axis,
            `{chunked}` the schedules with chunks of layers, `{unlaid}` the axes of `axis_order`
            that are pinned to 1.
        hint: what to try, with the same words.
    """

    broken: Callable[[Given], bool]
    says: str
    hint: str


RULES: tuple[Rule, ...] = (
    Rule(
        broken=lambda g: g.schedule is not None and g.schedule.staged and g.axis("stage", 2) == 1,
        says="schedule={schedule!r} needs stages, and the stage axis is pinned to 1",
        hint="mesh.stage=2 or more, or schedule='none'",
    ),
    Rule(
        broken=lambda g: (
            g.schedule is not None and not g.schedule.staged and g.axis("stage", 1) > 1
        ),
        says="schedule='none' runs without stages, and the stage axis is pinned to {axes[stage]}",
        hint="mesh.stage=1, or another schedule",
    ),
    Rule(
        broken=lambda g: g.get("virtual_stages", 1) > 1 and g.axis("stage", 2) == 1,
        says="virtual_stages={virtual_stages} are chunks of the layers of a stage, and the stage"
        " axis is pinned to 1",
        hint="mesh.stage=2 or more, or virtual_stages=1",
    ),
    Rule(
        broken=lambda g: not g.chunked(lockstep=True),
        says="virtual_stages={virtual_stages} needs the schedule {chunked}, and it is pinned to"
        " {schedule!r}",
        hint="virtual_stages=1, or another schedule",
    ),
    Rule(
        broken=lambda g: (
            g.get("gather") == "once" and (g.get("zero", 3) < 3 or g.axis("stage", 2) == 1)
        ),
        says="gather='once' is for sharded weights (zero=3) on the stages of a pipeline, and one"
        " of the two is pinned to something else",
        hint="zero=3 with mesh.stage=2 or more, or gather='use'",
    ),
    Rule(
        broken=lambda g: g.get("accumulation", 1) > 1 and not g.staged,
        says="accumulation={accumulation} is for the stages of a pipeline, and there are none;"
        " without stages gradients are accumulated over microbatches",
        hint="microbatches in place of accumulation, or mesh.stage=2 or more",
    ),
    Rule(
        broken=lambda g: (
            "microbatches" in g.pins and g.get("microbatches") % g.get("accumulation", 1) > 0
        ),
        says="accumulation={accumulation} takes the microbatches in equal groups, and"
        " {microbatches} are pinned",
        hint="a multiple of {accumulation} as microbatches",
    ),
    Rule(
        broken=lambda g: (
            g.get("pipeline") == "programs"
            and g.chunked(lockstep=True)
            and not g.chunked(lockstep=False)
        ),
        says="pipeline='programs' has no stages that work breadth first (schedule={schedule!r} with"
        " virtual_stages={virtual_stages})",
        hint="pipeline='lockstep', or virtual_stages=1",
    ),
    Rule(
        broken=lambda g: g.get("pipeline") == "programs" and not g.staged,
        says="pipeline='programs' is for the stages of a pipeline, and there are none",
        hint="pipeline='lockstep', or mesh.stage=2 or more with a schedule",
    ),
    Rule(
        broken=lambda g: g.get("context", "none") != "none" and g.axis("context", 2) == 1,
        says="context={context!r} needs a context axis, which is pinned to 1",
        hint="mesh.context=2 or more, or context='none'",
    ),
    Rule(
        broken=lambda g: g.get("context") == "none" and g.axis("context", 1) > 1,
        says="context='none' runs without a context axis, which is pinned to {axes[context]}",
        hint="mesh.context=1, or another context",
    ),
    Rule(
        broken=lambda g: (
            g.get("context") == "all-gather" and g.get("attention", "traced") != "traced"
        ),
        says="attention={attention!r} sees the whole sequence, and context='all-gather' leaves"
        " attention to the compiler as the model is written",
        hint="attention='traced', or another context",
    ),
    Rule(
        broken=lambda g: (
            g.get("context") == "ring" and g.get("attention", "blocks") not in ("blocks", "traced")
        ),
        says="a ring computes attention in blocks, and attention is pinned to {attention!r}",
        hint="attention='blocks', or another context",
    ),
    Rule(
        broken=lambda g: g.get("experts") == "none" and g.axis("expert", 1) > 1,
        says="experts='none' runs without an expert axis, which is pinned to {axes[expert]}",
        hint="mesh.expert=1, or no pin of experts",
    ),
    Rule(
        broken=lambda g: g.get("remat_layers", 0) > 0 and g.get("remat") == "none",
        says="remat_layers={remat_layers} rematerialises layers, and remat is pinned to 'none'",
        hint="remat='full', or remat_layers=0",
    ),
    Rule(
        broken=lambda g: (
            len(g.groups) > 0
            and g.get("remat", "none") not in ("none", *(policy for _, policy, _ in g.groups))
        ),
        says="remat={remat!r} is the policy of no layer group that remat_classes names",
        hint="remat_classes alone",
    ),
    Rule(
        broken=lambda g: (
            len(g.groups) > 0
            and None not in g.rematerialised
            and g.get("remat_layers") not in (None, sum(filter(None, g.rematerialised)))
        ),
        says="remat_layers={remat_layers} are not as many layers as remat_classes has",
        hint="remat_classes alone",
    ),
    Rule(
        broken=lambda g: g.get("zero", 0) > 0 and all(g.axis(axis, 0) == 1 for axis in STORED_AXES),
        says="zero={zero} shards over fsdp, which is pinned to 1",
        hint="mesh.fsdp=2 or more, or zero=0",
    ),
    Rule(
        broken=lambda g: g.get("zero") == 0 and g.axis("fsdp", 1) > 1,
        says="zero=0 shards nothing over fsdp, which is pinned to {axes[fsdp]}",
        hint="mesh.data in place of mesh.fsdp, or zero=1, 2 or 3",
    ),
    Rule(
        broken=lambda g: g.get("sequence_parallel", False) and g.axis("tensor", 0) == 1,
        says="sequence_parallel=True shards the sequence over tensor, which is pinned to 1",
        hint="mesh.tensor=2 or more, or sequence_parallel=False",
    ),
    Rule(
        broken=lambda g: len(g.unlaid) > 0,
        says="axis_order names {unlaid}, and the pinned mesh has no such axis",
        hint="axis_order without {unlaid}, or a mesh that has it",
    ),
    Rule(
        broken=lambda g: (
            g.get("axis_order") == () and any(g.axis(axis, 2) > 1 for axis in INNER_AXES)
        ),
        says="axis_order is [], which names no mesh axis",
        hint="axis_order=['stage', 'data', 'tensor'], or no pin of axis_order",
    ),
    Rule(
        broken=lambda g: g.axis("island", 1) not in (1, g.get("exchange", EXACT).islands),
        says="mesh.island={axes[island]} are islands, which are pinned with how they meet",
        hint="exchange='diloco:{axes[island]}:100', and no pin of mesh.island",
    ),
)


def contradictions(pins: Mapping[str, PinValue], axes: Mapping[str, int]) -> list[str]:
    """What pins say against each other, each with a second line "Try: ..."."""
    mesh: MeshShape | None = pins.get("mesh")
    failures = [
        f"mesh.{axis}={size} contradicts mesh={dict(mesh)}{HINT}mesh, or mesh.{axis} alone"
        for axis, size in axes.items()
        if mesh is not None and mesh[axis] != size
    ]
    sizes = dict(axes) if mesh is None else {axis: mesh[axis] for axis in MESH_AXES}
    pinned = Given(pins=pins, axes=sizes)
    broken = [rule for rule in RULES if rule.broken(pinned)]
    if not broken:
        return failures
    words = {**pins, "axes": sizes, "chunked": _chunked(), "unlaid": ", ".join(pinned.unlaid)}
    return failures + [f"{rule.says}{HINT}{rule.hint}".format_map(words) for rule in broken]


def _chunked() -> str:
    """The schedules whose stages may have several chunks of layers; first those that are tried with
    chunks alone.
    """
    names = [
        schedule.name
        for schedule in sorted(pipelines(), key=_tried_whole)
        if schedule.allows(2, lockstep=True)
    ]
    return " or ".join(map(repr, names))


def _tried_whole(schedule: Schedule) -> bool:
    return 1 in schedule.tried(pinned=True, chunks=None, policy="none", limit=2)
