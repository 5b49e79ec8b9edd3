"""A point of the space of plans: everything that distinguishes one plan from another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardlib.axes import MeshShape
from shardlib.cost.pricing.variants.mixed_remat import Each
from shardlib.cost.terms.knobs import Knobs
from shardlib.planning.decisions.dtypes import Dtypes
from shardlib.planning.decisions.plan_data import PlanData
from shardlib.propagation.assignment import Choice
from shardlib.schedules.table import lowered, named

#: Mesh axes that programs are lowered to today; plans may use the others, and say so.
LOWERED_AXES: tuple[str, ...] = ("stage", "data", "fsdp", "expert", "context", "tensor")
_CONTEXT = {"all-gather": "", "ring": "ring attention", "ulysses": "heads exchanged"}
#: Dtypes that programs are lowered to; those of 64 bits need a mode of JAX.
LOWERED_DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16")
#: Dtypes of products beside them: what rests in 8 bits would need scales that rest with it.
LOWERED_PRODUCTS: tuple[str, ...] = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True)
class What:
    """The decisions that many candidates share: all but the mesh, its place and the microbatches.

    Attributes:
        policy: remat policy.
        recomputed: layers that follow the policy, of those that the fullest stage has; the others
            recompute nothing. 0: all follow it.
        classes: for each class of layers its policy and how many layers of the fullest stage follow
            it, where classes differ; `policy` is then that of the most layers, and `recomputed`
            counts them all. () where they do not differ.
        choice: what is cut.
        dtypes: what is in another dtype than in the traced model, see
            `shardlib.planning.decisions.dtypes`.
        routes: whether tokens are routed to their experts between devices.
        how: ZeRO stage, schedule and the like.
        collective_matmul: "loop" where matmuls over tensor gather and scatter piece by piece;
            "none" otherwise.
    """

    policy: str
    choice: Choice
    recomputed: int = 0
    classes: Each = ()
    dtypes: Dtypes = ()
    routes: bool = False
    how: Knobs = field(default_factory=Knobs)
    collective_matmul: str = "none"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One plan.

    Attributes:
        mesh: sizes of the mesh axes.
        order: order in which axes take the links, see `shardlib.hardware.placement.orders`.
        micro: microbatches.
        what: everything else.
    """

    mesh: MeshShape
    micro: int
    what: What
    order: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The decisions other than the mesh, in a few words."""
        what, how = self.what, self.what.how
        parts = [
            f"tensor cuts {'+'.join(what.choice.tensor)}" if what.choice.tensor else "",
            "sequence parallel" if what.choice.sequence else "",
            "collective matmul" if what.collective_matmul == "loop" else "",
            f"ZeRO {how.zero}" if how.zero else "",
            _remat(what),
            microbatches_text(self.micro, how.accumulation) if self.micro > 1 else "",
            named(how.schedule).words(how.virtual),
            "weights gathered once" if how.gather == "once" else "",
            _CONTEXT[how.context] if "context" in self.mesh else "",
            "routed experts" if what.routes else "",
            _elsewhere(how.offload),
            ", ".join(f"{word} {dtype}" for word, dtype in what.dtypes),
            f"{self.order[0]} outermost, {self.order[-1]} innermost" if self.order else "",
        ]
        return ", ".join(part for part in parts if part)

    @property
    def waits_for(self) -> tuple[str, ...]:
        """What of it has no lowering yet."""
        what = self.what
        return _waits(
            self.mesh,
            what.how.schedule,
            what.policy,
            what.recomputed,
            bool(what.classes),
            what.how.offload,
            self.order,
            what.dtypes,
        )

    def simplicity(self) -> tuple[object, ...]:
        """Sorts equally fast plans, the simplest first."""
        what, how = self.what, self.what.how
        return (
            len(self.waits_for),
            self.mesh.devices,
            len(self.mesh),
            self.micro,
            what.policy != "none",
            how.zero,
            how.gather != "use",
            what.choice.sequence is not None,
            len(what.choice.tensor),
            what.dtypes,
            tuple(dict(self.mesh).items()),
            what.policy,
            what.recomputed,
            what.classes,
            what.choice.tensor,
            how.schedule,
            how.virtual,
            how.accumulation,
            how.offload,
            self.order,
        )


def waits_for(plan: PlanData) -> tuple[str, ...]:
    """What of a plan has no lowering yet."""
    return _waits(
        plan.mesh,
        plan.schedule,
        plan.remat,
        plan.remat_layers,
        bool(plan.remat_classes),
        plan.offload,
        plan.axis_order,
        plan.dtypes,
    )


def _elsewhere(offload: tuple[str, ...]) -> str:
    hosted = " and ".join(part for part in offload if part != "disk")
    return ", ".join(
        [
            *([f"{hosted} in host memory"] if hosted else []),
            *(["optimizer state on disk"] if "disk" in offload else []),
        ]
    )


def _waits(
    mesh: MeshShape,
    schedule: str,
    policy: str,
    recomputed: int,
    classes: bool,
    offload: tuple[str, ...],
    order: tuple[str, ...],
    dtypes: Dtypes,
) -> tuple[str, ...]:
    found = [f"the {axis} axis" for axis in mesh if axis not in LOWERED_AXES]
    found += [] if lowered(schedule) else [f"the schedule {schedule}"]
    if "stage" in mesh:
        found += (
            ["recomputing by class of layers in stages"]
            if classes
            else ["recomputing a part of the layers of stages"]
            if recomputed
            else []
        )
    found += (
        ["activations in host memory"]
        if "activations" in offload and ("stage" in mesh or policy == "none")
        else []
    )
    found += [
        f"{word.replace('_', ' ')} {dtype}" for word, dtype in dtypes if not _lowered(word, dtype)
    ]
    return (*found, *(["axes in another order on the links"] if order else []))


def _lowered(word: str, dtype: str) -> bool:
    return dtype in LOWERED_DTYPES or (word == "matmul_dtype" and dtype in LOWERED_PRODUCTS)


def lowered_dtypes(
    allowed: Sequence[tuple[str, tuple[str, ...]]],
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Of dtypes that are allowed those that programs are lowered to."""
    return tuple(
        (word, tuple(dtype for dtype in dtypes if _lowered(word, dtype)))
        for word, dtypes in allowed
    )


def microbatches_text(micro: int, groups: int) -> str:
    """Microbatches of a step in words."""
    return f"{micro} microbatches" + (f" in {groups} groups" if groups > 1 else "")


def _remat(what: What) -> str:
    if what.policy == "none":
        return ""
    if what.classes:
        return (
            "remat "
            + " and ".join(
                f"{policy} of {number} layers" if number else "none"
                for policy, number in what.classes
            )
            + " a stage, by class"
        )
    return f"remat {what.policy}" + (
        f" of {what.recomputed} layers a stage" if what.recomputed else ""
    )


def by_class(each: Each) -> tuple[str, int]:
    """The policy of the most layers that recompute, and the number of all that do."""
    return max(each, key=lambda one: one[1])[0], sum(number for _, number in each)
