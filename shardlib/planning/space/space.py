"""The space of plans: what there is to choose from.

`Space` lists the legal values of every decision under the user's pins; which combinations are legal
say its neighbours (`meshes`, `schedules`). The search prices all of them that no bound excludes.
Nothing is decided one axis at a time.

The space, where pins do not narrow it:

- meshes: every factorisation over the six axes of every number of devices that
  `shardlib.hardware.slices.device_counts` lists: of a small machine all that have a place on its
  links; where none of them has a legal mesh, of the largest that has one;
- their place on the links: the usual order of axes, or one axis moved to the innermost or the
  outermost links (`shardlib.hardware.placement.orders`);
- microbatches: every divisor of what a device has of the batch, up to `MAX_MICROBATCHES`;
- colours that the tensor axis shards: every subset of up to `MAX_TENSOR_COLOURS`, with and without
  sequence parallelism; in the fastest plans further ones, one after the other
  (`planning/search/left_out.py`);
- ZeRO 0 to 3; recomputation by policy, of all layers or, where that fits, of some; where
  `remat_classes` is "any", for each layer group a policy and a number of them
  (`shardlib.planning.offers.price_by_layer_group`);
- schedules: 1F1B, interleaved with up to `MAX_VIRTUAL` chunks a stage, zero-bubble where nothing is
  recomputed. GPipe is as fast as 1F1B and larger, so it must be pinned;
- sharded weights on stages in lockstep: gathered for every operation, or once for all
  microbatches; then also breadth first (GPipe with chunks), with as many chunks as divide the
  layers of a stage, but for two, which are whole at a time;
- attention by the kernel of the chip's vendor where it applies, in blocks, or as it is written;
  along a context axis keys and values gathered or around a ring, or heads exchanged;
- tokens of experts sorted as the model is written, or routed;
- optimizer state, activations or both in host memory, where a plan does not fit without;
- dtypes of the traced model, and others where they are allowed
  (`shardlib.planning.decisions.dtypes`).

A program can be made of every plan of it: combinations that have no lowering
(`shardlib.decisions.lowerings`) are left out.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shardlib.cost.terms.abilities import ANYTHING, Abilities
from shardlib.cost.terms.framework_profiles import XLA, gathers
from shardlib.decisions.lowerings import Gap, on_chips
from shardlib.decisions.pins import Pins
from shardlib.decisions.readers import ANY_GROUP
from shardlib.errors import PinError
from shardlib.planning.space.attention import Strategy
from shardlib.planning.space.limits import (
    Limits,
    batch_size,
    experts_form,
    sequence_size,
    tensor_colours,
)
from shardlib.planning.space.microbatching import require_unstaged, require_whole
from shardlib.planning.space.remat_policies import policies_of_groups, policies_of_space
from shardlib.planning.space.why_empty import misfit
from shardlib.planning.space.workload import Workload
from shardlib.propagation.assignment import Choice
from shardlib.propagation.colours import Colouring


@dataclass(frozen=True, kw_only=True)
class Space:
    """The plans of a problem under pins.

    Attributes:
        tensor: colours that the tensor axis may shard, in order of priority.
        left_out: colours beyond `MAX_TENSOR_COLOURS`, which are tried one after the other in the
            fastest plans (`planning/search/left_out.py`).
        policies: remat policies.
        choices: every set of colours, with and without sequence parallelism.
        routes: whether tokens of experts may be routed, each in turn.
        pins: what the user fixed.
        limits: what the model allows.
        gaps: what has no lowering and is therefore not in it.
        by_class: whether the model's layer groups can follow remat policies of their own.
        gathers: when stages may gather weights that are stored sharded, "use" and "once".
        each: the pinned policy of each class, and how many of its layers follow it (None: all); ()
            where that is not pinned.
        strategy: how attention is computed and the context axis used, and what the planner does
            not decide.
    """

    tensor: tuple[str, ...]
    left_out: tuple[str, ...]
    policies: tuple[str, ...]
    choices: tuple[Choice, ...]
    routes: tuple[bool, ...]
    pins: Pins
    limits: Limits
    gaps: tuple[Gap, ...]
    by_class: bool
    gathers: tuple[str, ...]
    each: tuple[tuple[str, int | None], ...]
    strategy: Strategy

    @property
    def apart(self) -> bool:
        """Whether plans whose layer groups differ are in the space: where they are pinned, or let
        the planner choose.
        """
        if self.each:
            return True
        return (
            self.by_class
            and self.pins.remat_classes == ANY_GROUP
            and len(self.policies) > 1
            and "none" in self.policies
            and self.pins.remat_layers != 0
        )


def build(load: Workload, pins: Pins, fixed: Choice | None, strategy: Strategy) -> Space:
    """Lists the space.

    Args:
        fixed: the choice that pinned rules stand for; None without.
    """
    problem, colouring = load.problem, load.colouring
    limits = Limits(
        batch=batch_size(problem, colouring),
        sequence=sequence_size(problem, colouring),
        layers=max(load.counts, default=0),
        experts=colouring.colours[load.expert].divisor if load.expert else 1,
        splits=problem.rows.splits,
        staged=not problem.rows.by_row,
        groups=len(load.counts),
        able=load.framework.able if load.framework is not None else ANYTHING,
    )
    parts = max(pins.microbatches or 1, pins.accumulation or 1)
    require_whole(problem.rows, parts)
    stages = dict(pins.axes).get("stage", 1) if pins.mesh is None else pins.mesh["stage"]
    require_unstaged(problem.rows, parts, stages or 1)
    pins, each = policies_of_groups(problem, pins, load.class_names, load.by_class)
    tensor, left_out = tensor_colours(colouring)
    return Space(
        tensor=tensor,
        left_out=left_out if fixed is None and limits.able.free else (),
        policies=policies_of_space(problem, pins, each, limits.able),
        choices=tuple(
            choice
            for choice in _choices(colouring, tensor, pins, fixed)
            if _able(choice, tensor, load.expert, limits.able)
        ),
        routes=_routes(load, pins, limits),
        pins=pins,
        limits=limits,
        gaps=gaps_of(load),
        by_class=load.by_class,
        gathers=(
            (pins.gather,)
            if pins.gather
            else tuple(gather for gather in gathers(load.profile) if gather in limits.able.gathers)
        ),
        each=each,
        strategy=strategy,
    )


def gaps_of(load: Workload) -> tuple[Gap, ...]:
    """What has no lowering, where plans are for programs of shardlib; of other software, whose
    plans are priced and not lowered here, nothing is left out.
    """
    ours = load.profile.name == XLA.name and load.framework is None
    return on_chips(load.vendor) if ours else ()


def _choices(
    colouring: Colouring, tensor: tuple[str, ...], pins: Pins, fixed: Choice | None
) -> tuple[Choice, ...]:
    """Every set of colours for the tensor axis, with and without sequence parallelism; or the
    pinned one.
    """
    if fixed is not None:
        bare = Choice(batch=fixed.batch)  # rules for tensor say nothing on a mesh without it
        return (fixed,) if fixed == bare else (fixed, bare)
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


def _able(choice: Choice, tensor: tuple[str, ...], expert: str | None, able: Abilities) -> bool:
    """Whether a framework can shard what a choice does over tensor: nothing, or what it shards
    always, and the width of experts, which has ranks of its own, if the plan says so.
    """
    if not choice.tensor or able.free:
        return True
    if choice.sequence is None and able.sequence_parallel == "always":
        return False
    if choice.sequence is not None and able.sequence_parallel == "never":
        return False
    always = {name for name in tensor if name != expert and not name.startswith(expert or name)}
    return able.tensor == "any" or always <= {*choice.tensor} <= {*tensor} - {expert}


def _routes(load: Workload, pins: Pins, limits: Limits) -> tuple[bool, ...]:
    """Whether tokens of experts may be routed, each in turn."""
    problem, expert = load.problem, load.expert
    form, ours = experts_form(problem), bool(gaps_of(load))
    routes = tuple(
        flag
        for flag in (False, True)
        if (expert or not flag)
        and not (flag and ours and form not in problem.functions)
        and pins.experts in (None, form if flag else "none")
        and (limits.able.free or flag or not expert)
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
        raise PinError(misfit("expert", size, problem, load.colouring))
    if not routes:
        raise PinError(
            f"experts={pins.experts!r} is pinned, and the experts of {problem.model} are {form!r}:"
            f" how many tokens they take is the model's own decision\nTry: experts={form!r}"
        )
    return routes
