"""The space of candidates: meshes, attention strategies, schedules, and the cost tables of colour
components, under the user's pins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from shardlib.cost.facts import traits
from shardlib.cost.framework import ANY_PLAN, XLA, Abilities, FrameworkProfile
from shardlib.cost.stages import Meshes
from shardlib.cost.terms import Degrees
from shardlib.decisions.lowerings import (
    Unsupported,
    facts_of_decisions,
    facts_of_mesh,
    facts_of_pins,
    lowerable,
    unsupported_on,
)
from shardlib.decisions.pins import Pins
from shardlib.decisions.table import ANY_GROUP, Decisions
from shardlib.errors import PinError, raise_all
from shardlib.graph import OF_VENDOR, Problem, Rows
from shardlib.layout import BATCH_AXES, MESH_AXES, STORED_AXES, TENSOR
from shardlib.machines.chips import Chip
from shardlib.machines.topology import divisors
from shardlib.planner.parts import dtype_changes, dtype_combinations
from shardlib.planner.workload import (
    MAX_MICROBATCHES,
    ComponentTallies,
    ModelLimits,
    ModelTallies,
    Programs,
    Workload,
    batch_size,
    experts_form,
    framework_colours,
    mixes_positions,
    sequence_size,
    tensor_colours,
)
from shardlib.propagation.colours import Choice, Colouring
from shardlib.schedules import NONE, SCHEDULES, Pipelines, Schedule, named, pipelines

# --------------------------------------------------------------------------------------------------
# Attention kernels of a machine, and uses of a context axis.


@dataclass(frozen=True, kw_only=True)
class AttentionStrategy:
    """A kernel for attention and a use of the context axis.

    Attributes:
        decisions: `context` and `attention`, and the decisions that the planner does not search.
        context_axis: True if all plans have a context axis of more than one device, False if none
            has, None if some may.
    """

    decisions: Decisions
    context_axis: bool | None = None


def attention_strategies(
    problem: Problem,
    pins: Pins,
    profile: FrameworkProfile,
    chip: Chip,
    abilities: Abilities = ANY_PLAN,
) -> list[AttentionStrategy]:
    """Lists the ways to compute attention and to use the context axis.

    Where a model calls attention as a function (`shardlib.functions`), the plan chooses the
    implementation: the chip vendor's kernel where that applies, which writes no scores to memory;
    in blocks; or as traced. On a context axis, keys and values are all-gathered (attention as
    traced) or passed around a ring, or heads are exchanged for the sequence (Ulysses).
    """
    pinned = pins.attention not in (None, "traced")
    if pinned and (why_not := _kernel_refusal(problem, chip, pins.attention)):
        raise PinError(
            f"attention={pins.attention!r} is pinned, and {why_not}\nTry: attention='traced'"
        )
    if not abilities.free and pins.context is None:
        return _framework_strategies(pins, abilities, _kernel(problem, pins, profile, chip))
    no_context, needs_context = pins.context == "none", pins.context not in (None, "none")
    options = _attention_options(problem, pins, profile, chip)
    return [
        AttentionStrategy(
            decisions=replace(pins.unsearched, context=context, attention=attention),
            context_axis=False if no_context else True if needs_context else context_axis,
        )
        for context, attention, context_axis in dict.fromkeys(options)
        if not (no_context and context_axis is True)
        and not (needs_context and (context_axis is False or context != pins.context))
    ]


def _attention_options(
    problem: Problem, pins: Pins, profile: FrameworkProfile, chip: Chip
) -> Iterator[tuple[str, str, bool | None]]:
    """(context, attention, `AttentionStrategy.context_axis`) of all strategies, whatever context is
    pinned to.
    """
    pinned, calls = pins.attention, "attention" in problem.functions
    kernel_in_ring = pinned or ("blocks" if calls else "traced")
    if profile.attention == "fused":  # then all-gathering keys and values is never faster
        yield "all-gather", pinned or "traced", False
        others = () if pins.context in (None, "none", "ring") else (pins.context,)
        for context in ("ring", *others):
            yield context, "traced" if context == "all-gather" else kernel_in_ring, True
        return
    kernel = OF_VENDOR.get(chip.vendor, "traced")
    applies = calls and kernel != "traced" and not _kernel_refusal(problem, chip, kernel)
    kernels = [kernel] if applies and profile.attention == "traced" else []
    # in blocks attention needs what a kernel needs without tiles, more buffers, and longer
    dominated = kernels and not traits(chip.vendor).lanes
    blocks = ["blocks"] if calls and profile.attention == "traced" and not dominated else []
    for attention in (pinned,) if pinned else (*kernels, *blocks, "traced"):
        yield "all-gather", attention, None if attention == "traced" else False
    if kernel_in_ring in ("blocks", "traced") and calls:
        yield "ring", kernel_in_ring, True
    for attention in (pinned,) if pinned else (*kernels, *blocks):
        if calls:
            yield "ulysses", attention, True


def _kernel(problem: Problem, pins: Pins, profile: FrameworkProfile, chip: Chip) -> str:
    """The default attention kernel: the pinned one, or the vendor's where it applies."""
    best = OF_VENDOR.get(chip.vendor, "traced")
    untraced = profile.attention != "traced" or _kernel_refusal(problem, chip, best)
    return pins.attention or ("traced" if untraced else best)


def _framework_strategies(pins: Pins, abilities: Abilities, kernel: str) -> list[AttentionStrategy]:
    """The strategies of a framework whose profile decides the attention kernel: without a context
    axis, and with one in each way that the framework supports.
    """

    def strategy(context: str, attention: str, *, context_axis: bool) -> AttentionStrategy:
        decisions = replace(pins.unsearched, context=context, attention=attention)
        return AttentionStrategy(decisions=decisions, context_axis=context_axis)

    blocks = "blocks" if kernel == "traced" else kernel
    attention = {"all-gather": "traced", "ring": "blocks", "ulysses": blocks}
    size = dict(pins.mesh if pins.mesh is not None else pins.axes).get("context", 1)
    no_axis = [] if size > 1 else [strategy("all-gather", kernel, context_axis=False)]
    supported = abilities.contexts if "context" in abilities.axes else ()
    return no_axis + [
        strategy(context, attention[context], context_axis=True) for context in supported
    ]


def _kernel_refusal(problem: Problem, chip: Chip, kind: str | None) -> str:
    """The reason why a kernel cannot compute attention; empty where it can."""
    if "attention" not in problem.functions:
        return f"{problem.model} does not call attention as a function (shardlib.attention)"
    makers = {kernel: maker for maker, kernel in OF_VENDOR.items()}
    if kind in makers and makers[kind] != chip.vendor:
        return f"that is a kernel for chips of {makers[kind]}, not of {chip.vendor}"
    if kind == "cudnn" and problem.attention.width > chip.attention_width:
        return (
            f"heads are {problem.attention.width} wide; the kernel takes {chip.attention_width} on"
            f" {chip.name}"
        )
    return dict(problem.attention.without).get(kind or "", "")


# --------------------------------------------------------------------------------------------------
# Splitting the batch into microbatches.

#: Hints where the loss mixes rows of the batch, and where it is written for one number of rows.
MIXED_ROWS_HINT = (
    "pin microbatches to 1, or return shardlib.WeightedMean(total, weight) for a ratio of sums over"
    " rows, or say rows='mean' where it is a mean all the same"
)
FIXED_ROWS_HINT = (
    "take the number of rows from an array, x.shape[0], or -1 in a reshape, in place of a literal"
)


def require_splittable(rows: Rows, microbatches: int) -> None:
    """Raises if splitting the batch into microbatches would change the results."""
    if microbatches > 1 and not rows.splits:
        raise_all(
            PinError,
            f"{microbatches} microbatches cannot be computed: the loss is written for one number of"
            " rows"
            if rows.loss.fixed
            else f"{microbatches} microbatches would change the numbers: rows of the batch are"
            " combined other than by a final sum or mean",
            list(rows.reasons),
            hint=FIXED_ROWS_HINT if rows.loss.fixed else MIXED_ROWS_HINT,
        )


def require_no_row_results(rows: Rows, microbatches: int, stages: int) -> None:
    """Raises if microbatches would go through pipeline stages and the loss returns a value for
    every row, which stages cannot combine.
    """
    if microbatches > 1 and stages > 1 and rows.by_row:
        raise_all(
            PinError,
            f"{microbatches} microbatches cannot go through {stages} pipeline stages: results have"
            " a value for every row",
            [name for name, _ in rows.by_row],
            hint="return a sum or a mean over the rows, or pin stage to 1",
        )


# --------------------------------------------------------------------------------------------------
# The space of plans.
#
# `Space` lists the legal values of every decision under the user's pins and the legal
# combinations. The search prices all of them that no bound excludes; no decision is made greedily.
#
# The space, where pins do not narrow it:
#
# - meshes: every factorisation over the six axes of every number of devices that
#   `shardlib.machines.topology.device_counts` lists (on a small machine all that can be placed on
#   its links); where none of them has a legal mesh, of the largest number that has one;
# - placement on the links: the usual order of axes, or one axis moved to the innermost or the
#   outermost links (`shardlib.machines.topology.orders`);
# - microbatches: every divisor of the batch per device, up to `MAX_MICROBATCHES`;
# - colours that the tensor axis shards: every subset of up to `MAX_TENSOR_COLOURS`, with and
#   without sequence parallelism; further ones are added one by one to the fastest plans
#   (`planner/search.py`);
# - ZeRO 0 to 3; a remat policy, for all layers or, where that fits, for some; where
#   `remat_classes` is "any", a policy and a number of layers for each layer group
#   (`shardlib.planner.incumbents`);
# - schedules: 1F1B, interleaved with up to `MAX_CHUNKS` chunks per stage, zero-bubble
#   without rematerialisation. GPipe with whole stages is as fast as 1F1B and needs more memory, so
#   it must be pinned;
# - sharded weights on stages in lockstep (all in one program): all-gathered for every operation, or
#   once for all microbatches; then also breadth first (GPipe with chunks), with chunks that divide
#   the layers of a stage, but at least three, since two chunks are all-gathered at a time;
# - attention by the chip vendor's kernel where it applies, in blocks, or as traced; along a context
#   axis keys and values all-gathered or passed around a ring, or heads exchanged (Ulysses);
# - tokens sorted by expert where they are, as the model is written, or sent to the devices of
#   their experts (routed);
# - optimizer state, activations or both in host memory, where a plan does not fit without;
# - dtypes of the traced model, and others where they are allowed (`shardlib.planner.parts`).
#
# Every plan of the space can be lowered: combinations that cannot (`shardlib.decisions.lowerings`)
# are left out.


#: (remat policy, number of layers; None: all) of every layer group; () where all follow one policy.
PinnedPolicies = tuple[tuple[str, int | None], ...]
#: Most chunks of layers per stage that are tried.
MAX_CHUNKS = 8
#: Fewest chunks of layers per stage that are tried breadth first (all microbatches through one
#: chunk before the next), since two chunks are all-gathered at a time.
MIN_CHUNKS = 3


@dataclass(frozen=True, kw_only=True)
class Space:
    """The plans of a problem under pins.

    Attributes:
        tensor: colours that the tensor axis may shard, in order of priority.
        left_out: colours beyond `MAX_TENSOR_COLOURS`, which are added one after the other to the
            fastest plans (`planner/search.py`).
        policies: remat policies.
        choices: every set of colours, with and without sequence parallelism.
        routes: the values to try for routing the tokens of experts.
        unsupported: combinations that cannot be lowered, which are excluded.
        can_mix_remat: True if the model's layer groups can follow different remat policies.
        gathers: when stages may all-gather weights that are stored sharded: "use", "once".
        group_policies: the pinned (policy, number of layers; None: all) of each layer group; () if
            not pinned.
        strategy: the attention kernel, the use of the context axis, and the decisions that the
            planner does not search.
    """

    tensor: tuple[str, ...]
    left_out: tuple[str, ...]
    policies: tuple[str, ...]
    choices: tuple[Choice, ...]
    routes: tuple[bool, ...]
    pins: Pins
    limits: ModelLimits
    unsupported: tuple[Unsupported, ...]
    can_mix_remat: bool
    gathers: tuple[str, ...]
    group_policies: PinnedPolicies
    strategy: AttentionStrategy

    @property
    def mixes_remat(self) -> bool:
        """True if the space has plans whose layer groups differ: they are pinned, or the planner
        may choose them.
        """
        if self.group_policies:
            return True
        return (
            self.can_mix_remat
            and self.pins.remat_classes == ANY_GROUP
            and len(self.policies) > 1
            and "none" in self.policies
            and self.pins.remat_layers != 0
        )

    def mesh_sizes(self, colouring: Colouring, devices: int) -> dict[str, Array]:
        """Every mesh of `devices` devices with every number of microbatches."""
        names = {*self.tensor, *(name for choice in self.choices for name in choice.tensor)}
        tensor_sizes = frozenset(colouring.colours[name].divisor for name in names)
        candidates = _sizes(
            self.pins,
            self.limits,
            tensor_sizes | {self.limits.sequence},
            True in self.routes,
            devices,
        )
        fits = lowerable(facts_of_pins(self.pins), facts_of_mesh(candidates), self.unsupported)
        if (context_axis := self.strategy.context_axis) is not None:
            fits = fits & ((candidates["context"] > 1) == context_axis)
        return {name: column[fits] for name, column in candidates.items()}

    def legal(self, choice: Choice, routes: bool, sizes: Mapping[str, Array]) -> Array:
        """Mask of the candidates (given by their sizes) that a choice fits, among those that fit
        their tensor axis: the sequence divides, and an expert axis has tokens to route and a
        lowering.
        """
        fits = (
            self.limits.sequence
            % (sizes["tensor"] * sizes["context"] if choice.sequence else sizes["context"])
            == 0
        )
        if self.limits.abilities.requires("experts in sequence") and routes and not choice.sequence:
            fits &= sizes["tensor"] == 1
        if routes:
            facts = facts_of_pins(self.pins) | facts_of_decisions(self.strategy.decisions)
            return fits & lowerable(facts | {"routed"}, facts_of_mesh(sizes), self.unsupported)
        return fits & (sizes["expert"] == 1)

    @property
    def accumulation_groups(self) -> int:
        """Number of groups of microbatches that go through a pipeline one after the other; more
        than one only where that is pinned, and then all plans have stages.
        """
        return self.pins.accumulation or 1

    def legal_zero(self, zero: int, meshes: Meshes) -> Array:
        """Mask of the candidates that a ZeRO stage fits: with ZeRO there are devices to shard over,
        without it there is no fsdp axis, and the framework supports it.
        """
        abilities = self.limits.abilities
        if zero:
            replicable = not abilities.requires("ZeRO or replicas")
            return (meshes.ways(STORED_AXES) > 1) & ((meshes.ways(("data",)) == 1) | replicable)
        axes = STORED_AXES if abilities.requires("ZeRO over all") else ("fsdp",)
        return meshes.ways(axes) == 1

    def zeros_and_schedules(self, policy: str, *, pipelined: bool) -> list[Decisions]:
        """Every ZeRO stage and schedule under a remat policy, whether or not a candidate allows
        them.
        """
        pins = self.pins
        zeros = [zero for zero in self.limits.abilities.zero if pins.zero in (None, zero)]
        standard = self._schedules(policy) if pipelined else [(NONE.name, 1)]
        listed = [
            (zero, schedule, virtual, gather)
            for zero in zeros
            for schedule, virtual in standard
            for gather in self.gathers
            if gather == "use" or (zero == 3 and pipelined)
        ]
        listed += [
            (3, schedule.name, virtual, "once")
            for schedule in forward_first()
            if pins.schedule in (None, schedule.name)
            for virtual in (self.breadth_first_chunks if pipelined else ())
        ]
        return [
            replace(
                self.strategy.decisions,
                zero=zero,
                remat=policy,
                schedule=schedule,
                virtual_stages=virtual,
                gather=gather,
                accumulation=self.accumulation_groups,
            )
            for zero, schedule, virtual, gather in listed
        ]

    @cached_property
    def _schedules_of(self) -> dict[str, list[tuple[str, int]]]:
        return {}

    def _schedules(self, policy: str) -> list[tuple[str, int]]:
        """(schedule, chunks per stage) to try, those with one chunk first; cached."""
        if policy in self._schedules_of:
            return self._schedules_of[policy]
        pins, abilities = self.pins, self.limits.abilities
        tried = [
            (schedule.name, chunks)
            for schedule in SCHEDULES.values()
            if pins.schedule in (None, schedule.name)
            and (abilities.free or schedule.name in abilities.schedules)
            for chunks in schedule.chunk_options(
                pinned=pins.schedule is not None or len(abilities.schedules) == 1,
                chunks=pins.virtual_stages,
                policy=policy,
                limit=MAX_CHUNKS,
            )
        ]
        self._schedules_of[policy] = sorted(tried, key=lambda pair: pair[1] > 1)
        return self._schedules_of[policy]

    def schedules(self, policy: str) -> list[tuple[Schedule, int]]:
        """Schedules of the space under a remat policy with numbers of chunks per stage, without
        breadth-first ones.
        """
        return [(named(name), chunks) for name, chunks in self._schedules(policy)]

    @cached_property
    def _standard_schedules(self) -> set[tuple[str, int]]:
        return {pair for policy in self.policies for pair in self._schedules(policy)}

    def breadth_first_options(self, schedule: str, chunks: int) -> list[bool]:
        """The orders of work that a schedule may have: breadth first (True) or not (False)."""
        staged, forward_first = named(schedule).staged, named(schedule).forward_first
        standard = [False] if not staged or (schedule, chunks) in self._standard_schedules else []
        return standard + ([True] if forward_first and chunks in self.breadth_first_chunks else [])

    @cached_property
    def breadth_first_chunks(self) -> list[int]:
        """Numbers of chunks per stage of breadth-first pipelines; none where a pinned schedule has
        them anyway.
        """
        pins = self.pins
        if (
            "once" not in self.gathers
            or pins.zero not in (None, 3)
            or pins.schedule not in (None, *(schedule.name for schedule in forward_first()))
            or (pins.schedule and pins.virtual_stages)
            or pins.pipeline == "programs"
        ):
            return []
        if pins.virtual_stages:
            return [pins.virtual_stages] if pins.virtual_stages > 1 else []
        return list(_dividing(self.limits.layers))

    def max_breadth_first_chunks(self, sizes: Mapping[str, Array]) -> Array:
        """The most chunks per stage of a breadth-first pipeline, by candidate; 0 where it has
        none.
        """
        most = np.zeros_like(sizes["stage"])
        for rows, chunks in self.breadth_first_rows(sizes):
            most[rows] = max(chunks)
        return most

    def breadth_first_rows(
        self, sizes: Mapping[str, Array]
    ) -> Iterator[tuple[Array, Sequence[int]]]:
        """Candidates that may have breadth-first pipelines, by number of stages, with their numbers
        of chunks per stage.
        """
        stages, layers, pinned = sizes["stage"], self.limits.layers, self.pins.virtual_stages
        if not self.breadth_first_chunks:
            return
        fits = (stages > 1) & (sizes["micro"] >= stages * self.accumulation_groups)
        fits &= math.prod(sizes[axis] for axis in STORED_AXES) > 1
        for number in np.unique(stages[fits]).tolist():
            chunks = [
                chunks
                for chunks in self.breadth_first_chunks
                if number * chunks <= layers and (pinned or -(-layers // number) % chunks == 0)
            ]
            if chunks:
                yield np.flatnonzero((stages == number) & fits), chunks

    def legal_schedule(self, decisions: Decisions, meshes: Meshes) -> Array:
        """Mask of the candidates that a schedule fits: a layer for every chunk, and, with several
        chunks, microbatches for every stage; breadth first, equally many layers in every chunk.
        """
        layers = self.limits.layers
        fits = meshes.stage * decisions.virtual_stages <= layers
        abilities, chunks = self.limits.abilities, decisions.virtual_stages
        if abilities.requires("equal stages"):
            fits &= layers % (meshes.stage * chunks) == 0
        if abilities.requires("chunked in groups") and chunks > 1:
            fits &= meshes.micro % meshes.stage == 0
        if abilities.requires("a microbatch a chunk"):
            fits &= meshes.micro >= meshes.stage * chunks
        schedule = named(decisions.schedule)
        if schedule.forward_first and decisions.virtual_stages > 1 and not self.pins.virtual_stages:
            fits &= -(-layers // meshes.stage) % decisions.virtual_stages == 0
        return fits & schedule.fits(
            Pipelines(
                stages=meshes.stage,
                chunks=np.full_like(meshes.stage, decisions.virtual_stages),
                microbatches=meshes.micro // decisions.accumulation,
                lockstep=self.pins.pipeline != "programs",
            )
        )


def resolve_group_policies(
    problem: Problem, pins: Pins, names: Sequence[str], can_mix_remat: bool
) -> tuple[Pins, PinnedPolicies]:
    """The pins with `remat_classes` resolved, and the policy of each layer group.

    Where all groups follow one policy it becomes `remat` and `remat_layers`, and there is no policy
    by group. Groups that are not named rematerialise nothing.
    """
    pinned = {name: (policy, layers) for name, policy, layers in pins.remat_classes}
    if not pinned or pins.remat_classes == ANY_GROUP:
        return pins, ()
    _require_groups(problem, pinned, names)
    group_policies = tuple(pinned.get(name, ("none", None)) for name in names)
    policy, layers = group_policies[0]
    if len(set(group_policies)) == 1 and (layers is None or len(group_policies) == 1):
        return pins.replace(remat=policy, remat_layers=layers, remat_classes=()), ()
    if not can_mix_remat:
        raise PinError(
            f"remat_classes gives layer groups different policies, and {problem.model} has"
            f" {len(names)} of them; at most a few can differ\nTry: remat, with the same policy"
            " for all"
        )
    return pins.replace(remat=None, remat_layers=None), group_policies


def _require_groups(
    problem: Problem, pinned: Mapping[str, tuple[str, int | None]], names: Sequence[str]
) -> None:
    """Raises if `remat_classes` names an unknown layer group or a policy that no group can
    follow.
    """
    if not names:
        raise PinError(
            f"remat_classes names {', '.join(map(repr, pinned))}, and {problem.model} has no layer"
            " groups: none of its layers repeat\nTry: layers with parameters of equal shapes, in a"
            " list or under a scan, or no remat_classes"
        )
    failures = [f"{name!r} is not one of them" for name in pinned if name not in names]
    failures += [
        f"{name!r} is pinned to {policy!r}, which needs layers that repeat"
        for name, (policy, _) in pinned.items()
        if name in names and policy not in problem.steps
    ]
    if failures:
        raise_all(
            PinError,
            f"remat_classes does not fit the layer groups of {problem.model}, which are"
            f" {', '.join(names)}",
            failures,
            hint=f"remat_classes={{{names[0]!r}: 'full'}}",
        )


def searched_policies(
    problem: Problem, pins: Pins, group_policies: PinnedPolicies, abilities: Abilities
) -> tuple[str, ...]:
    """The remat policies that layers of some plan follow."""
    if group_policies:
        pinned = {"none", *(policy for policy, _ in group_policies)}
        return tuple(policy for policy in problem.steps if policy in pinned)
    if pins.remat is None:
        return tuple(policy for policy in problem.steps if policy in abilities.remat)
    if pins.remat not in problem.steps:
        raise PinError(
            f"remat={pins.remat!r} rematerialises layers, and {problem.model} has no repeated"
            f" layer; it can be {', '.join(problem.steps)}\nTry: layers in jax.lax.scan, or"
            " remat='none'"
        )
    # the other layers rematerialise nothing
    return ("none", pins.remat) if pins.remat_layers and "none" in problem.steps else (pins.remat,)


def subsets(colours: Sequence[str]) -> list[tuple[str, ...]]:
    """Every subset, the smallest first."""
    return [
        subset
        for count in range(len(colours) + 1)
        for subset in itertools.combinations(colours, count)
    ]


def build_space(
    workload: Workload, pins: Pins, pinned_choice: Choice | None, strategy: AttentionStrategy
) -> Space:
    """The space of a workload under pins.

    Args:
        pinned_choice: the choice that pinned rules stand for; None without.
    """
    problem, colouring = workload.problem, workload.colouring
    limits = ModelLimits(
        batch=batch_size(problem, colouring),
        sequence=sequence_size(problem, colouring),
        layers=max(workload.layer_counts, default=0),
        experts=colouring.colours[workload.expert].divisor if workload.expert else 1,
        mixes=pins.context not in (None, "none") or mixes_positions(problem, colouring),
        splits=problem.rows.splits,
        staged=not problem.rows.by_row,
        groups=len(workload.layer_counts),
        abilities=workload.framework.abilities if workload.framework is not None else ANY_PLAN,
    )
    parts = max(pins.microbatches or 1, pins.accumulation or 1)
    require_splittable(problem.rows, parts)
    stages = dict(pins.axes).get("stage", 1) if pins.mesh is None else pins.mesh["stage"]
    require_no_row_results(problem.rows, parts, stages or 1)
    pins, group_policies = resolve_group_policies(
        problem, pins, workload.group_names, workload.can_mix_remat
    )
    tensor, left_out = tensor_colours(colouring)
    if limits.abilities.tensor == "all":
        tensor, left_out = framework_colours(colouring, workload.expert), ()
    return Space(
        tensor=tensor,
        left_out=left_out if pinned_choice is None else (),
        policies=searched_policies(problem, pins, group_policies, limits.abilities),
        choices=tuple(
            choice
            for choice in _choices(colouring, tensor, pins, pinned_choice)
            if _framework_allows(choice, tensor, workload.expert, limits.abilities)
        ),
        routes=_routes(workload, pins, limits),
        pins=pins,
        limits=limits,
        unsupported=unsupported_for(workload),
        can_mix_remat=workload.can_mix_remat,
        gathers=(
            (pins.gather,)
            if pins.gather
            else tuple(
                gather for gather in workload.profile.gathers if gather in limits.abilities.gathers
            )
        ),
        group_policies=group_policies,
        strategy=strategy,
    )


def spaces(
    workload: Workload, chip: Chip, pins: Pins, pinned_choice: Choice | None = None
) -> Iterator[tuple[Workload, Space]]:
    """The space of every combination of dtypes, attention strategy and layout of the optimizer's
    matrices, with the variant of the workload that it is for; two where stages run what the model
    writes as a loop.
    """
    problem, profile = workload.problem, workload.profile
    abilities = workload.framework.abilities if workload.framework is not None else ANY_PLAN
    all_dtypes = dict.fromkeys(
        dtype_changes(dtypes, problem, profile, pins.dtypes)
        for dtypes in dtype_combinations(pins.dtypes, pins.allow)
    )
    strategies = attention_strategies(problem, pins, profile, chip, abilities)
    layouts = ("owned", "gathered") if problem.updates else ("owned",)
    combined = itertools.product(
        all_dtypes,
        strategies,
        (pins.optimizer_layout,) if pins.optimizer_layout else layouts,
        _parts(workload, pins, abilities),
    )
    for dtypes, strategy, layout, staged in combined:
        decisions = replace(strategy.decisions, dtypes=dtypes, optimizer_layout=layout)
        variant = workload.variant(dtypes, decisions.attention_kernel, staged=staged)
        space = build_space(variant, pins, pinned_choice, replace(strategy, decisions=decisions))
        yield variant, replace(space, limits=replace(space.limits, pipelines=staged))


def _parts(workload: Workload, pins: Pins, abilities: Abilities) -> tuple[bool | None, ...]:
    """`ModelLimits.pipelines` of the spaces of a model: plans with stages are apart where they run
    its layers in another way.
    """
    if not workload.writes_layers or pins.remat not in (None, "none"):
        return (None,)
    if pins.always_staged:
        return (True,)
    stages = (pins.mesh or dict(pins.axes)).get("stage", 2)
    single = stages == 1 or pins.unstaged or max(workload.layer_counts, default=0) < 2
    return (False,) if single or "stage" not in abilities.axes else (False, True)


def unsupported_for(workload: Workload) -> tuple[Unsupported, ...]:
    """The combinations that cannot be lowered; empty for frameworks whose plans are priced but not
    lowered here.
    """
    ours = workload.profile.name == XLA.name and workload.framework is None
    return unsupported_on(workload.vendor) if ours else ()


def _choices(
    colouring: Colouring, tensor: tuple[str, ...], pins: Pins, pinned_choice: Choice | None
) -> tuple[Choice, ...]:
    """Every set of colours for the tensor axis, with and without sequence parallelism; or the
    pinned one.
    """
    if pinned_choice is not None:
        # without a tensor axis its rules do not apply
        without_tensor = Choice(batch=pinned_choice.batch)
        return tuple(dict.fromkeys((pinned_choice, without_tensor)))
    sequence = colouring.sequence_colour
    flags = [
        flag
        for flag in (False, True)
        if pins.sequence_parallel in (None, flag) and (sequence or not flag)
    ]
    return tuple(
        Choice(tensor=subset, batch=colouring.batch_colour, sequence=sequence if flag else None)
        for count in range(len(tensor) + 1)
        for subset in itertools.combinations(tensor, count)
        for flag in flags
        if subset or not flag
    )


def _framework_allows(
    choice: Choice, tensor: tuple[str, ...], expert: str | None, abilities: Abilities
) -> bool:
    """True if a framework can shard over tensor what a choice shards: nothing, or all that it
    always shards. The width of experts, which have tensor ranks of their own, is optional.
    """
    if not choice.tensor or abilities.free:
        return True
    if choice.sequence is None and abilities.sequence_parallel == "always":
        return False
    if choice.sequence is not None and abilities.sequence_parallel == "never":
        return False
    always = {name for name in tensor if not (expert and name.startswith(expert))}
    return abilities.tensor == "any" or always <= {*choice.tensor}


def _routes(workload: Workload, pins: Pins, limits: ModelLimits) -> tuple[bool, ...]:
    """The values to try for routing the tokens of experts."""
    problem, expert = workload.problem, workload.expert
    form, ours = experts_form(problem), bool(unsupported_for(workload))
    routes = tuple(
        flag
        for flag in (False, True)
        if (expert or not flag)
        and not (flag and ours and form not in problem.functions)
        and pins.experts in (None, form if flag else "none")
        and (limits.abilities.free or flag or not expert)
    )
    if pins.experts not in (None, "none") and expert and ours and form not in problem.functions:
        raise PinError(
            f"experts={pins.experts!r} needs experts that are called as a function, and"
            f" {problem.model} calls none\nTry: shardlib.functions.experts.visit(x, weights,"
            " chosen, up, down, gate) in the model, or experts='none'"
        )
    if pins.experts not in (None, "none") and not expert:
        raise PinError(
            f"experts={pins.experts!r} sends tokens to experts, and {problem.model} has no grouped"
            " matmul with a dim of experts"
        )
    size = dict(pins.mesh if pins.mesh is not None else pins.axes).get("expert", 1)
    if limits.experts > 1 and limits.experts % size:
        from shardlib.planner.no_plan import axis_misfit

        raise PinError(axis_misfit("expert", size, problem, workload.colouring))
    if not routes:
        raise PinError(
            f"experts={pins.experts!r} is pinned, and the experts of {problem.model} are {form!r}:"
            f" how many tokens they take is the model's own decision\nTry: experts={form!r}"
        )
    return routes


# --------------------------------------------------------------------------------------------------
# The meshes of a space, with every number of microbatches, and the choices that fit them.

Array = np.ndarray
#: Positions in `MESH_AXES` of the tensor axis, the stage axis, and the axes that split the batch.
_TENSOR = MESH_AXES.index(TENSOR.name)
_STAGE = MESH_AXES.index("stage")
_BATCH: tuple[int, ...] = tuple(MESH_AXES.index(axis) for axis in BATCH_AXES)


@lru_cache(maxsize=64)
def _sizes(
    pins: Pins, limits: ModelLimits, tensor_sizes: frozenset[int], routed: bool, devices: int
) -> dict[str, Array]:
    """The sizes of every mesh with every number of microbatches, in increasing order of the axes,
    however the context axis is used. Cached: callers must not modify the arrays.
    """
    free = limits.abilities.free
    rows: list[tuple[int, ...]] = []
    microbatches: dict[int, list[int]] = {}
    for mesh in factorisations(pins, limits, routed, devices):
        degree = mesh[_TENSOR]
        if degree > 1 and all(size % degree for size in tensor_sizes):
            continue
        parts = math.prod(mesh[position] for position in _BATCH)
        if parts not in microbatches:
            microbatches[parts] = (
                _microbatches(limits.batch, parts, pins)
                if limits.splits
                else [1] * (limits.batch % parts == 0)
            )
        rows += [
            (*mesh, micro)
            for micro in microbatches[parts]
            if (micro == 1 or mesh[_STAGE] == 1 or limits.staged)
            and (free or _framework_runs(limits, dict(zip(MESH_AXES, mesh, strict=True)), micro))
        ]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(MESH_AXES) + 1)
    return dict(zip((*MESH_AXES, "micro"), table.T, strict=True))


def factorisations(
    pins: Pins, limits: ModelLimits, routed: bool, devices: int
) -> Iterator[tuple[int, ...]]:
    """Axis sizes, in the order of `MESH_AXES`, of every factorisation of a device count that the
    pins and the model allow, however the context axis is used.
    """
    if pins.mesh is not None:
        if pins.mesh.devices == devices and limits.pipelines in (None, pins.mesh["stage"] > 1):
            yield tuple(pins.mesh[axis] for axis in MESH_AXES)
        return
    pinned_sizes = dict(pins.axes)
    positions = limits.sequence if limits.mixes else 1
    dim_sizes = {"stage": limits.layers, "expert": limits.experts, "context": positions}
    axes = limits.abilities.axes

    def allowed(axis: str, remaining: int) -> list[int]:
        if axis not in axes:
            return [1]
        if axis in pinned_sizes:
            return [pinned_sizes[axis]] if remaining % pinned_sizes[axis] == 0 else []
        if (axis == "stage" and (pins.unstaged or limits.pipelines is False)) or (
            axis == "expert" and not routed
        ):
            return [1]
        limit = max(1, dim_sizes.get(axis, remaining))
        return [
            n
            for n in divisors(remaining, limit)
            if (axis == "stage" or axis not in dim_sizes or limit % n == 0)
            and not (axis == "stage" and (pins.always_staged or limits.pipelines) and n == 1)
        ]

    last = MESH_AXES[-1]
    partial_meshes: list[tuple[tuple[int, ...], int]] = [((), devices)]
    for axis in MESH_AXES[:-1]:
        by_remaining: dict[int, list[int]] = {}
        extended: list[tuple[tuple[int, ...], int]] = []
        for sizes, remaining in partial_meshes:
            if remaining not in by_remaining:
                by_remaining[remaining] = allowed(axis, remaining)
            extended += [((*sizes, size), remaining // size) for size in by_remaining[remaining]]
        partial_meshes = extended
    for sizes, remaining in partial_meshes:
        if pinned_sizes.get(last, remaining) == remaining and (remaining == 1 or last in axes):
            yield (*sizes, remaining)


def _framework_runs(limits: ModelLimits, mesh: Mapping[str, int], micro: int) -> bool:
    """False if the framework cannot run a mesh with this number of microbatches, whatever else is
    decided.
    """
    abilities, stages = limits.abilities, mesh["stage"]
    staged, uneven = stages > 1, limits.layers % stages or limits.groups > 1
    replicated = mesh["data"] > 1 and math.prod(mesh.values()) > mesh["data"]
    sharded = math.prod(mesh[axis] for axis in STORED_AXES) > 1
    return not (
        (abilities.requires("equal stages") and staged and uneven)
        or (abilities.requires("microbatches in groups") and staged and micro % stages)
        or (abilities.requires("a microbatch a chunk") and staged and micro < stages)
        or (abilities.requires("replicas alone") and replicated and not sharded)
    )


def _microbatches(size: int, degree: int, pins: Pins) -> list[int]:
    if size % degree:
        return []
    allowed = [
        n for n in divisors(size // degree, MAX_MICROBATCHES) if n % (pins.accumulation or 1) == 0
    ]
    return (
        [n for n in allowed if pins.microbatches in (None, n)]
        if pins.microbatches is None or pins.microbatches <= MAX_MICROBATCHES
        else ([pins.microbatches] if (size // degree) % pins.microbatches == 0 else [])
    )


def forward_first() -> list[Schedule]:
    """Schedules that take all microbatches through a chunk of layers before the next."""
    return [schedule for schedule in pipelines() if schedule.forward_first]


@lru_cache(maxsize=256)
def _dividing(layers: int) -> tuple[int, ...]:
    """Every number of chunks that divides the layers of a stage, for some number of stages."""
    return tuple(
        sorted(
            {
                chunks
                for stages in range(2, layers + 1)
                for chunks in divisors(-(-layers // stages))
                if chunks >= MIN_CHUNKS
            }
        )
    )


# --------------------------------------------------------------------------------------------------
# Quantities that are sums over components of colours, on all degrees of parallelism of a space.
#
# The cost of a choice is a sum over components (`planner/workload.py`), so the quantities of a
# choice are a sum of cached arrays, and the minimum over all choices is the sum of the minima of
# the components. The caller defines the quantities: seconds or bytes (`planner/bounds.py`).

#: Prepares to turn tallies into quantities on some degrees, by index: array [quantities, tallies,
#: degrees].
TallyValues = Callable[[ComponentTallies], Callable[[Array], Array]]


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The choices that bounds cover.

    Attributes:
        shardable: colours that some choice shards.
        context_colour: the colour that the context axis shards.
        routes: True if tokens of experts are routed.
    """

    workload: Workload
    space: Space
    shardable: tuple[str, ...]
    context_colour: str | None
    routes: bool

    @cached_property
    def model_tallies(self) -> ModelTallies:
        """The tallies of the model."""
        return self.workload.tallies.of_shardable(self.shardable)

    @cached_property
    def work(self) -> Programs:
        """Computation and communication of the programs of the space."""
        return self.model_tallies.work(self.space.policies, routes=self.routes)

    @cached_property
    def points(self) -> Programs:
        """Memory of the programs of the space, one list per point where it may peak."""
        return self.model_tallies.points(self.space.policies, routes=self.routes)

    @cached_property
    def choices(self) -> list[Choice]:
        """The choices of the space."""
        return [self.choice(choice) for choice in self.space.choices]

    @cached_property
    def first_choices(self) -> dict[str | None, Choice]:
        """The first choice with and without sequence parallelism, by the colour of the sequence."""
        return {choice.sequence: choice for choice in reversed(self.choices)}

    def component_choices(self, component: tuple[str, ...]) -> ComponentChoices:
        """The ways to shard one component and nothing else."""
        if component not in self._component_choices:
            options: dict[Choice, None] = {}
            if self.space.pins.rules is not None:
                options = dict.fromkeys(_restricted(choice, component) for choice in self.choices)
            else:
                for first in self.first_choices.values():
                    options |= dict.fromkeys(
                        replace(first, tensor=tensor) for tensor in subsets(component)
                    )
            numbers = {option: number for number, option in enumerate(options)}
            self._component_choices[component] = ComponentChoices(
                options=tuple(options),
                of_choices=np.array(
                    [numbers[_restricted(choice, component)] for choice in self.choices],
                    dtype=np.int64,
                ),
            )
        return self._component_choices[component]

    @cached_property
    def _component_choices(self) -> dict[tuple[str, ...], ComponentChoices]:
        return {}

    def choice(self, choice: Choice) -> Choice:
        """A choice of the space with the colours of the context and expert axes added."""
        return replace(
            choice,
            context=self.context_colour,
            expert=self.workload.expert if self.routes else None,
        )


@dataclass(frozen=True, kw_only=True)
class ComponentChoices:
    """The ways to shard a component.

    Attributes:
        options: choices that shard nothing else.
        of_choices: index of the option of each choice of the space.
    """

    options: tuple[Choice, ...]
    of_choices: Array


def _restricted(choice: Choice, component: tuple[str, ...]) -> Choice:
    return replace(choice, tensor=tuple(name for name in choice.tensor if name in component))


class LazyColumns:
    """Quantities by degrees or entry, evaluated lazily and once.

    Args:
        shape: of the quantities.
        size: number of degrees or entries.
        evaluate: computes the quantities at the given indices (ascending).
    """

    def __init__(
        self, shape: tuple[int, ...], size: int, evaluate: Callable[[Array], Array]
    ) -> None:
        self._values, self._used = np.empty((*shape, 0)), 0
        self._position, self._evaluate = np.full(size, -1), evaluate

    def take(self, index: Array) -> Array:
        """The quantities at the given indices, array [*shape, indices]; callers must not modify
        it.
        """
        positions = self._positions(index)
        if len(positions) == self._used and np.array_equal(positions, np.arange(self._used)):
            return self._values[..., : self._used]
        return self._values.take(positions, axis=-1)

    def select(self, rows: Array, index: Array) -> Array:
        """The quantities at one position of the last dim of `shape` for each index."""
        positions = self._positions(index)
        return self._values[..., rows, positions]

    def _positions(self, index: Array) -> Array:
        """Where the quantities at some indices are stored."""
        positions = self._position[index]
        if positions.min(initial=0) < 0:
            new = np.zeros(len(self._position), dtype=bool)
            new[index] = True
            self._add(np.flatnonzero(new & (self._position < 0)))
            positions = self._position[index]
        return positions

    def _add(self, new: Array) -> None:
        """Evaluates the quantities at new indices."""
        end = self._used + len(new)
        if end > self._values.shape[-1]:
            grown = np.empty((*self._values.shape[:-1], max(end, 2 * self._used)))
            grown[..., : self._used] = self._values[..., : self._used]
            self._values = grown
        self._values[..., self._used : end] = self._evaluate(new)
        self._position[new] = np.arange(self._used, end)
        self._used = end


class ComponentCosts:
    """Cached quantities by component and remat policy, on some degrees.

    Args:
        scope: the choices.
        programs: the tallies.
        values: turns tallies into quantities.
        count: number of quantities.
    """

    def __init__(
        self, scope: Scope, programs: Programs, degrees: Degrees, values: TallyValues, count: int
    ) -> None:
        self._scope, self._programs, self._values = scope, programs, values
        self._shape = count, len(programs.tallies)
        self._tensor = degrees.tensor
        self._legal = degrees.expert >= 1 if scope.routes else degrees.expert == 1
        colours = scope.workload.colouring.colours
        self._divides = {
            name: colours[name].divisor % degrees.tensor == 0 for name in scope.shardable
        }
        self._cache: dict[tuple[str, ...], LazyColumns] = {}
        self._minima: dict[tuple[str, ...], LazyColumns] = {}
        self._sums: dict[int | None, LazyColumns] = {}

    def total(self, choices: Array, index: Array) -> Array:
        """The quantities of some choices, each on some degrees, array [quantities, policies,
        choices].
        """
        total = np.zeros((*self._shape, len(index)))
        for component in ((), *self._programs.components):
            options = self._scope.component_choices(component).of_choices[choices]
            total += self._of_component(component).select(options, index)
        return total

    def least(self, index: Array, stop: int | None = None) -> Array:
        """The minimum of each quantity over all choices, array [quantities, policies, degrees];
        infinite where no choice fits. With `stop`, only the components before that index are
        summed: a lower bound.
        """
        if stop not in self._sums:
            self._sums[stop] = LazyColumns(
                self._shape, len(self._tensor), lambda new: self._minimum(new, stop)
            )
        return self._sums[stop].take(index)

    def _minimum(self, index: Array, stop: int | None) -> Array:
        """See `least`."""
        total = sum(
            (
                self._component_minimum(component).take(index)
                for component in ((), *self._programs.components[:stop])
            ),
            np.zeros((len(self._scope.first_choices), *self._shape, len(index))),
        )
        for number, sequence in enumerate(self._scope.first_choices):
            if sequence is not None:
                total[number, ..., self._tensor[index] == 1] = np.inf
        return np.where(self._legal[index], total.min(0), np.inf)

    def _component_minimum(self, component: tuple[str, ...]) -> LazyColumns:
        """The minimum of a component over the ways to shard it that fit, with and without sequence
        parallelism: [sequences, quantities, policies, degrees].
        """
        if component not in self._minima:
            options = self._scope.component_choices(component).options
            sequences = list(self._scope.first_choices)
            fits = np.stack([self._fits(option) for option in options])
            rows = [
                [number for number, option in enumerate(options) if option.sequence == sequence]
                for sequence in sequences
            ]

            def evaluate(index: Array) -> Array:
                quantities = self._of_component(component).take(index)
                quantities = np.where(fits[:, index], quantities, np.inf)
                return np.stack([quantities[:, :, own].min(2) for own in rows])

            shape = len(sequences), *self._shape
            self._minima[component] = LazyColumns(shape, len(self._tensor), evaluate)
        return self._minima[component]

    def _fits(self, option: Choice) -> Array:
        """Mask of the degrees on which a component can be sharded as an option says."""
        divides = [self._divides[name] for name in option.tensor]
        return np.logical_and.reduce([*divides, self._tensor > (1 if option.tensor else 0)])

    def _of_component(self, component: tuple[str, ...]) -> LazyColumns:
        """The quantities of a component under every way to shard it, [quantities, policies,
        options, degrees]; 0 for ways that need a tensor axis where there is none.
        """
        if component not in self._cache:
            options = self._scope.component_choices(component).options
            shape = *self._shape, len(options)
            values = self._values(self._programs.of(component, options))
            sharded = np.array([bool(option.tensor or option.sequence) for option in options])

            def evaluate(index: Array) -> Array:
                applies = (self._tensor[index] > sharded[:, None]) & self._legal[index]
                return np.where(applies, values(index).reshape(*shape, -1), 0.0)

            self._cache[component] = LazyColumns(shape, len(self._tensor), evaluate)
        return self._cache[component]
