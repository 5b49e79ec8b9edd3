"""A candidate: one point of the space of plans, as the search knows it.

It holds the same `Decisions` that its plan will have. Three of them the search knows by other names
until the plan is built: what is sharded as a `Choice` of colours, the policies of layer groups by
their place among the groups, and whether tokens are routed to experts, of whatever kind they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardlib.axes import MeshShape
from shardlib.cost.pricing.variants.mixed_remat import Each
from shardlib.decisions.dtypes import Dtypes
from shardlib.decisions.table import Decisions
from shardlib.propagation.assignment import Choice
from shardlib.schedules.none import NONE
from shardlib.schedules.table import named

_CONTEXT = {"all-gather": "", "ring": "ring attention", "ulysses": "heads exchanged"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan of the space, or what many have in common before meshes and microbatches are said.

    Attributes:
        decisions: the decisions; of those that follow, and of `rules`, `sequence_parallel` and
            `experts`, nothing. `remat_layers` are those of the fullest stage; where layer groups
            differ, `remat` is the policy of the most layers, and `remat_layers` counts them all.
            Without a context axis `context` is that of the space.
        choice: what is sharded.
        groups: for each layer group its policy and how many layers of the fullest stage follow it,
            where groups differ; () where they do not.
        routes: whether tokens are routed to their experts between devices.
    """

    decisions: Decisions
    choice: Choice
    groups: Each = ()
    routes: bool = False

    @property
    def mesh(self) -> MeshShape:
        """Sizes of the mesh axes."""
        return self.decisions.mesh

    def on(self, mesh: MeshShape, microbatches: int, order: tuple[str, ...]) -> Candidate:
        """The candidate on a mesh, without what the mesh has no axis for."""
        staged = "stage" in mesh
        one = self.decisions
        return replace(
            self,
            choice=self.choice if "context" in mesh else replace(self.choice, context=None),
            decisions=replace(
                one,
                mesh=mesh,
                microbatches=microbatches,
                axis_order=order,
                context=one.context if "context" in mesh else "all-gather",
                schedule=one.schedule if staged else NONE.name,
                virtual_stages=one.virtual_stages if staged else 1,
                accumulation=one.accumulation if staged else 1,
            ),
        )

    def but(self, **changes: object) -> Candidate:
        """The candidate with other decisions."""
        return replace(self, decisions=replace(self.decisions, **changes))

    @property
    def summary(self) -> str:
        """The decisions other than the mesh, in a few words."""
        one, order = self.decisions, self.decisions.axis_order
        parts = [
            f"tensor shards {_listed(self.choice.tensor)}" if self.choice.tensor else "",
            "sequence parallel" if self.choice.sequence else "",
            "collective matmul" if one.collective_matmul == "loop" else "",
            f"ZeRO {one.zero}" if one.zero else "",
            self._remat,
            (microbatches_text(one.microbatches, one.accumulation) if one.microbatches > 1 else ""),
            named(one.schedule).words(one.virtual_stages),
            "weights gathered once" if one.gather == "once" else "",
            _CONTEXT[one.context] if "context" in one.mesh else "",
            "routed experts" if self.routes else "",
            _elsewhere(one.offload),
            dtypes_text(one.dtypes),
            f"{order[0]} outermost, {order[-1]} innermost" if order else "",
        ]
        return ", ".join(part for part in parts if part)

    @property
    def _remat(self) -> str:
        if self.decisions.remat == "none":
            return ""
        if self.groups:
            return (
                "remat "
                + " and ".join(
                    f"{policy} of {number} layers" if number else "none"
                    for policy, number in self.groups
                )
                + " a stage, by class"
            )
        layers = self.decisions.remat_layers
        return f"remat {self.decisions.remat}" + (f" of {layers} layers a stage" if layers else "")

    def simplicity(self) -> tuple[object, ...]:
        """Sorts equally fast plans, the simplest first."""
        one = self.decisions
        return (
            bool(one.axis_order),
            one.mesh.devices,
            len(one.mesh),
            one.microbatches,
            one.remat != "none",
            one.zero,
            one.gather != "use",
            self.choice.sequence is not None,
            len(self.choice.tensor),
            one.dtypes,
            tuple(dict(one.mesh).items()),
            one.remat,
            one.remat_layers,
            self.groups,
            self.choice.tensor,
            one.schedule,
            one.virtual_stages,
            one.accumulation,
            one.offload,
            one.axis_order,
        )


def completed(
    candidate: Candidate, experts: str, names: Sequence[str], **others: object
) -> Decisions:
    """The decisions of a candidate's plan, all in the words of plans."""
    one = candidate.decisions
    return replace(
        one,
        sequence_parallel=candidate.choice.sequence is not None,
        remat_classes=tuple(
            (name, *each) for name, each in zip(names, candidate.groups, strict=False)
        ),
        context=one.context if "context" in one.mesh else "none",
        experts=experts if candidate.routes else "none",
        **others,
    )


def by_group(each: Each) -> tuple[str, int]:
    """The policy of the most layers that are rematerialised, and the number of all that are."""
    return max(each, key=lambda one: one[1])[0], sum(number for _, number in each)


def microbatches_text(micro: int, groups: int) -> str:
    """Microbatches of a step in words."""
    return f"{micro} microbatches" + (f" in {groups} groups" if groups > 1 else "")


def _listed(names: Sequence[str]) -> str:
    """Names in words: "mlp", "mlp and vocab", "heads, mlp and vocab"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def dtypes_text(dtypes: Dtypes) -> str:
    """Dtypes other than the model's in words."""
    return ", ".join(f"{word} {dtype}" for word, dtype in dtypes)


def _elsewhere(offload: tuple[str, ...]) -> str:
    offloaded = " and ".join(part for part in offload if part != "disk")
    return ", ".join(
        [
            *([f"{offloaded} in host memory"] if offloaded else []),
            *(["optimizer state on disk"] if "disk" in offload else []),
        ]
    )
