"""Which plans are there to choose from?

A plan is a mesh with its place on the links, a number of microbatches, and the decisions of `What`.
`Space` lists the legal values of each under the user's pins and says which combinations are legal;
the search prices all of them that no bound excludes. Nothing is decided one axis at a time.

The space, where pins do not narrow it:

- meshes: every factorisation over the six axes of every number of devices that divides the
  machine's, or of the largest that has a legal mesh;
- their place on the links: the usual order of axes, or one axis moved to the innermost or the
  outermost links (`shardlib.hardware.placement.orders`);
- microbatches: every divisor of what a device has of the batch, up to `MAX_MICROBATCHES`;
- colours that the tensor axis cuts: every subset of up to `MAX_TENSOR_COLOURS`, with and without
  sequence parallelism;
- ZeRO 0 to 3; recomputation by policy, of all layers or, where that fits, of some; where
  `remat_classes` is "any", for each class of layers a policy and a number of them
  (`shardlib.planning.search.price_by_layer_group`);
- schedules: 1F1B, interleaved with up to `MAX_VIRTUAL` chunks a stage, zero-bubble where nothing is
  recomputed. GPipe is as fast as 1F1B and larger, so it must be pinned;
- weights in pieces on stages in lockstep, where pins ask for stages or `gather` is "any": gathered
  for every operation, or once for all microbatches; then also breadth first (GPipe with chunks),
  with as many chunks as divide the layers of a stage, but for two, which are whole at a time;
- attention by the kernel of the chip's vendor where it applies, and as it is written where not;
  keys and values around a ring where a context axis is asked for, or where nothing else fits.
  Gathering them is never faster in the model where attention is a kernel, so it must be pinned
  then;
- tokens of experts sorted as the model is written, or routed;
- optimizer state, activations or both in host memory, where a plan does not fit without;
- dtypes of the traced model, and others where they are allowed
  (`shardlib.planning.decisions.dtypes`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardlib.axes import BATCH_AXES, MESH_AXES, STORED_AXES, MeshShape
from shardlib.cost.pricing.candidates import Candidates
from shardlib.cost.step.routed_experts import expert_colour
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.knobs import Knobs
from shardlib.errors import BatchError, PinError, raise_all
from shardlib.graph.kernels import OF_VENDOR
from shardlib.graph.problem import Problem
from shardlib.planning.decisions.pins import ANY, Pins
from shardlib.planning.space.microbatching import require_whole
from shardlib.propagation.assignment import Choice
from shardlib.propagation.colours import Colouring
from shardlib.schedules.none import NONE
from shardlib.schedules.schedule import Pipelines, Schedule
from shardlib.schedules.table import SCHEDULES, named, pipelines

#: Largest number of colours whose subsets are all tried for the tensor axis: those that take part
#: in the most FLOPs.
MAX_TENSOR_COLOURS = 6
#: Largest number of gradient accumulation steps that is tried.
MAX_MICROBATCHES = 256
#: Largest number of chunks of layers on a stage that is tried.
MAX_VIRTUAL = 8
#: Smallest number of chunks of layers on a stage that is tried where all microbatches go through
#: one chunk before the next: two are whole at a time.
FEWEST = 3

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model allows, beside its colours.

    Attributes:
        batch: examples in the batch.
        sequence: positions; 1 where there is no sequence.
        layers: layers of the largest class; 0 without layers.
        experts: experts; 1 without.
        splits: whether the batch can be worked through in parts with the numbers of the whole.
    """

    batch: int
    sequence: int
    layers: int
    experts: int
    splits: bool = True


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How attention is computed, and the context axis used.

    Attributes:
        context: how keys and values meet queries along the context axis, see `Knobs`.
        contexts: whether plans have a context axis of more than one device: all of them (True),
            none (False), or some (None).
        attention: how its core is computed, see `Knobs`.
    """

    context: str = "all-gather"
    contexts: bool | None = None
    attention: str = "traced"

    @property
    def knobs(self) -> Knobs:
        """The same as decisions."""
        return Knobs(context=self.context, attention=self.attention)


@dataclass(frozen=True, kw_only=True)
class Space:
    """The plans of a problem under pins.

    Attributes:
        tensor: colours that the tensor axis may cut, in order of priority.
        left_out: colours beyond `MAX_TENSOR_COLOURS`.
        policies: remat policies.
        choices: every set of colours, with and without sequence parallelism.
        routes: whether tokens of experts may be routed, each in turn.
        pins: what the user fixed.
        limits: what the model allows.
        lowered: whether only plans that can be run are in it.
        by_class: whether the model's classes of layers can follow remat policies of their own.
        gathers: when stages may gather weights that rest in pieces, "use" and "once".
        each: the pinned policy of each class, and how many of its layers follow it (None: all); ()
            where that is not pinned.
        strategy: how attention is computed and the context axis used.
    """

    tensor: tuple[str, ...]
    left_out: tuple[str, ...]
    policies: tuple[str, ...]
    choices: tuple[Choice, ...]
    routes: tuple[bool, ...]
    pins: Pins
    limits: Limits
    lowered: bool
    by_class: bool = False
    gathers: tuple[str, ...] = ("use",)
    each: tuple[tuple[str, int | None], ...] = ()
    strategy: Strategy = Strategy()


def experts_form(problem: Problem) -> str:
    """How many tokens the experts of a model take: all of them ("dropless"), or as many as there is
    room for ("capacity").
    """
    return "capacity" if "capacity" in problem.functions else "dropless"


def strategies(
    problem: Problem, pins: Pins, stack: FrameworkProfile, vendor: str
) -> tuple[list[Strategy], list[Strategy]]:
    """How attention may be computed and the context axis used, and what else plans may do where
    nothing fits.

    A model that calls attention as a function (`shardlib.functions`) leaves to the plan how it is
    computed: by the kernel of the chip's vendor where that applies, which writes no scores. On a
    context axis keys and values go around; gathering them is never faster in the model, and leaves
    attention as it is written. A ring is for those who ask for a context axis, and where nothing
    else fits.

    Args:
        problem: the model.
        pins: the user's decisions.
        stack: the software; some fuses attention whatever the plan says.
        vendor: of the chips.

    Raises:
        PinError: pinned attention that the model or the chips cannot have.
    """
    calls = "attention" in problem.functions
    why_not = (
        _without(problem, vendor, pins.attention) if pins.attention not in (None, "traced") else ""
    )
    if why_not:
        raise PinError(
            f"attention={pins.attention!r} is pinned, and {why_not}\nTry: attention='traced'"
        )
    fused, blocks = (
        stack.attention == "fused",
        ("blocks" if calls and pins.attention is None else pins.attention or "traced"),
    )
    best = OF_VENDOR.get(vendor, "traced")
    kernel = pins.attention or (
        "traced" if stack.attention != "traced" or _without(problem, vendor, best) else best
    )
    if pins.context is not None:
        attention = {
            "none": kernel,
            "all-gather": "traced",
            "ring": blocks,
            "ulysses": kernel if kernel != "traced" else blocks,
        }[pins.context]
        return [
            Strategy(
                context="all-gather" if pins.context == "none" else pins.context,
                contexts=pins.context != "none",
                attention=attention,
            )
        ], []
    around = (
        [Strategy(context="ring", contexts=True, attention=blocks)]
        if (calls or fused) and blocks in ("blocks", "traced") and (fused or blocks != "traced")
        else []
    )
    asked = (
        pins.mesh["context"] if pins.mesh is not None else dict(pins.axes).get("context", 1)
    ) > 1
    if not fused and kernel == "traced":
        return ([Strategy(), *around], []) if asked else ([Strategy()], around)
    alone = Strategy(contexts=False, attention=kernel)
    if asked and not around:  # a kernel that a ring has no use for
        return [Strategy(context="ulysses", contexts=True, attention=kernel)], []
    return ([alone, *around], []) if asked or fused else ([alone], around)


def _without(problem: Problem, vendor: str, kind: str | None) -> str:
    """Why attention cannot be computed by a kernel; empty where it can."""
    if "attention" not in problem.functions:
        return f"{problem.model} does not call attention as a function (shardlib.attention)"
    makers = {kernel: maker for maker, kernel in OF_VENDOR.items()}
    if kind in makers and makers[kind] != vendor:
        return f"that is a kernel for chips of {makers[kind]}, not of {vendor}"
    return dict(problem.without_kernel).get(kind or "", "")


def batch_size(problem: Problem, colouring: Colouring) -> int:
    """Greatest common divisor of the batch dims of the batch arrays, examples; 1 where nothing is
    named a batch.
    """
    name = colouring.batch_colour
    sizes = [
        shape[dim]
        for path, shape, _, _ in problem.batch
        for dim, axis in enumerate(colouring.batch[path])
        if axis == name
    ]
    return math.gcd(*sizes) if sizes and name else 1


def sequence_size(problem: Problem, colouring: Colouring) -> int:
    """Greatest common divisor of the sequence dims of the batch arrays, positions; 1 where there is
    none.
    """
    name = colouring.sequence_colour
    sizes = [
        shape[dim]
        for path, shape, _, _ in problem.batch
        for dim, axis in enumerate(colouring.batch[path])
        if axis == name
    ]
    return math.gcd(*sizes) if sizes and name else 1


def divisors(number: int, most: int | None = None) -> list[int]:
    """All divisors up to `most`, ascending. Of what has no bound, such as a batch, only small ones
    are of use, and to look for all takes the root of the number.
    """
    most = number if most is None else most
    small = [n for n in range(1, min(math.isqrt(number), most) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small if number // n <= most)})


def meshes(
    devices: int,
    pins: Pins,
    limits: Limits,
    lowered: bool,
    contexts: bool | None = None,
    lowers: tuple[str, ...] = (),
) -> Iterator[tuple[int, ...]]:
    """Sizes of the axes, in the order of `MESH_AXES`, of every factorisation of a device count that
    pins and model allow.
    """
    if pins.mesh is not None:
        if pins.mesh.devices == devices and contexts in (None, pins.mesh["context"] > 1):
            yield tuple(pins.mesh[axis] for axis in MESH_AXES)
        return
    fixed = dict(pins.axes)
    beyond = {"stage": limits.layers, "expert": limits.experts, "context": limits.sequence}
    piped = pins.staged  # who asks for a schedule and the like asks for stages

    def allowed(axis: str, left: int) -> list[int]:
        if axis in fixed:
            return (
                [fixed[axis]]
                if left % fixed[axis] == 0
                and (axis != "context" or contexts in (None, fixed[axis] > 1))
                else []
            )
        if (
            lowered
            and axis in beyond
            and axis not in lowers
            and not (axis == "stage" and piped)
            and not (axis == "context" and contexts)
        ) or (axis == "stage" and pins.unstaged):
            return [1]
        most = max(1, beyond.get(axis, left))
        wanted = contexts if axis == "context" else None
        return [
            n
            for n in divisors(left, most)
            if wanted in (None, n > 1)
            and (axis == "stage" or axis not in beyond or most % n == 0)
            and not (axis == "stage" and piped and n == 1)
        ]

    def extend(sizes: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
        axis = MESH_AXES[len(sizes)]
        if len(sizes) == len(MESH_AXES) - 1:
            if fixed.get(axis, left) == left:
                yield (*sizes, left)
            return
        for size in allowed(axis, left):
            yield from extend((*sizes, size), left // size)

    yield from extend((), devices)


def tensor_colours(colouring: Colouring) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Colours that the tensor axis may cut, the most specific first, and those left out for being
    too many.

    The colour of the residual stream is no candidate where the sequence can be cut instead: both
    cost the same collectives, and along the sequence the normalisation needs none.
    """
    barred = {colouring.batch_colour, colouring.sequence_colour}
    fit = [
        c
        for c in colouring.colours.values()
        if c.matmuls
        and c.divisor > 1
        and c.name not in barred
        and not (c.carried and colouring.sequence_colour)
    ]
    by_use = sorted(fit, key=lambda c: (-c.flops * math.log2(c.divisor + 1), c.name))
    kept, rest = by_use[:MAX_TENSOR_COLOURS], by_use[MAX_TENSOR_COLOURS:]
    return tuple(c.name for c in sorted(kept, key=lambda c: (c.matmuls, c.name))), tuple(
        c.name for c in rest
    )


def build(
    problem: Problem,
    colouring: Colouring,
    layers: Sequence[int],
    pins: Pins,
    fixed: Choice | None,
    *,
    expert: str | None,
    lowered: bool,
    by_class: bool = False,
    names: Sequence[str] = (),
    gathers: tuple[str, ...] = ("use",),
    context: Strategy = Strategy(),
) -> Space:
    """Lists the space.

    Args:
        problem: the model.
        colouring: its colours.
        layers: layers of each class.
        pins: the user's decisions.
        fixed: the choice that pinned rules stand for.
        expert: colour of the experts that tokens can be routed to; None without.
        lowered: whether only plans that can be run are wanted.
        by_class: whether classes of layers can follow remat policies of their own.
        names: what people call each class of layers.
        gathers: when the software lets stages gather weights that rest in pieces.
        context: one of `strategies`.

    Raises:
        PinError: the pinned remat policy does not exist for this model, or a class of layers that
            remat_classes names.
    """
    limits = Limits(
        batch=batch_size(problem, colouring),
        sequence=sequence_size(problem, colouring),
        layers=max(layers, default=0),
        experts=colouring.colours[expert].divisor if expert else 1,
        splits=problem.rows.splits,
    )
    require_whole(problem.rows, max(pins.microbatches or 1, pins.accumulation or 1))
    pins, each = _by_class(problem, pins, names, by_class)
    policies = (
        _policies(problem, pins)
        if not each
        else tuple(
            policy
            for policy in problem.steps
            if policy in {"none", *(policy for policy, _ in each)}
        )
    )
    tensor, left_out = tensor_colours(colouring)
    sequence = colouring.sequence_colour
    flags = [
        flag
        for flag in (False, True)
        if pins.sequence_parallel in (None, flag) and (sequence or not flag)
    ]
    if fixed is not None:
        bare = Choice(
            batch=fixed.batch
        )  # rules for the tensor axis say nothing on a mesh without one
        choices = [fixed] if fixed == bare else [fixed, bare]
    else:
        choices = [
            Choice(tensor=subset, batch=colouring.batch_colour, sequence=sequence if flag else None)
            for count in range(len(tensor) + 1)
            for subset in itertools.combinations(tensor, count)
            for flag in flags
            if subset or not flag
        ]
    form = experts_form(problem)
    routes = tuple(
        flag
        for flag in (False, True)
        if (expert or not flag)
        and not (lowered and flag and pins.experts is None and form not in problem.functions)
        and pins.experts in (None, form if flag else "none")
    )
    if pins.experts not in (None, "none") and not expert:
        raise PinError(
            f"experts={pins.experts!r} sends tokens to experts, and {problem.model} has no grouped"
            " matmul with a dim of experts"
        )
    size = dict(pins.mesh if pins.mesh is not None else pins.axes).get("expert", 1)
    if limits.experts > 1 and limits.experts % size:
        raise PinError(_misfit("expert", size, problem, colouring))
    if not routes:
        raise PinError(
            f"experts={pins.experts!r} is pinned, and the experts of {problem.model} are {form!r}:"
            f" how many tokens they take is the model's own decision\nTry: experts={form!r}"
        )
    return Space(
        tensor=tensor,
        left_out=left_out,
        policies=policies,
        choices=tuple(choices),
        routes=routes,
        pins=pins,
        limits=limits,
        lowered=lowered,
        by_class=by_class,
        gathers=_gathers(pins, gathers),
        each=each,
        strategy=context,
    )


def _gathers(pins: Pins, able: tuple[str, ...]) -> tuple[str, ...]:
    """When stages may gather weights: as pinned; as the software can, where plans have stages or
    that is asked for; otherwise at every use, since the whole space would take half as long again.
    """
    if pins.gather in ("use", "once"):
        return (pins.gather,)
    return able if pins.gather == "any" or pins.staged else ("use",)


def _by_class(
    problem: Problem, pins: Pins, names: Sequence[str], by_class: bool
) -> tuple[Pins, tuple[tuple[str, int | None], ...]]:
    """The pins with what `remat_classes` says of all layers in the words for all, and otherwise the
    policy of each class; classes that it leaves out recompute nothing.
    """
    given = {name: (policy, layers) for name, policy, layers in pins.remat_classes}
    if not given or pins.remat_classes == ANY:
        return pins, ()
    unknown = [
        f"no class of layers is named {name!r} (classes are {', '.join(names) or 'none'})"
        for name in given
        if name not in names
    ]
    unknown += [
        f"{name}: {policy!r} recomputes layers, and {problem.model} has no step with it"
        for name, (policy, _) in given.items()
        if policy not in problem.steps
    ]
    if unknown:
        raise_all(PinError, f"remat_classes does not fit {problem.model}", unknown)
    each = tuple(given.get(name, ("none", None)) for name in names)
    policy, layers = each[0]
    if len(set(each)) == 1 and (layers is None or len(each) == 1):
        return replace(pins, remat=policy, remat_layers=layers, remat_classes=()), ()
    if not by_class:
        raise PinError(
            f"remat_classes gives classes of layers different policies, and {problem.model} has"
            f" {len(names)} classes; at most a few can differ\nTry: remat, with the same policy"
            " for all"
        )
    return replace(pins, remat=None, remat_layers=None), each


def apart(room: Space) -> bool:
    """Whether plans whose classes of layers differ are in the space: where they are pinned, or let
    the planner choose.
    """
    pins = room.pins
    if room.each:
        return True
    return (
        room.by_class
        and pins.remat_classes == ANY
        and len(room.policies) > 1
        and "none" in room.policies
        and pins.remat_layers != 0
    )


def sizes(room: Space, colouring: Colouring, devices: int) -> dict[str, Array]:
    """Every mesh of some number of devices, with every number of microbatches.

    Returns:
        The sizes of every mesh axis and "micro", arrays of equal length.
    """
    limits, pins = room.limits, room.pins
    cuttable = [
        colouring.colours[name].divisor
        for name in {*room.tensor, *(name for choice in room.choices for name in choice.tensor)}
    ] + [limits.sequence]
    rows: list[tuple[int, ...]] = []
    microbatches: dict[int, list[int]] = {}
    for mesh in meshes(
        devices,
        pins,
        limits,
        room.lowered,
        room.strategy.contexts,
        ("expert",) if True in room.routes else (),
    ):
        _, data, fsdp, expert, _, ways = mesh
        if ways > 1 and all(size % ways for size in cuttable):
            continue
        parts = data * fsdp * expert
        if parts not in microbatches:
            microbatches[parts] = (
                _microbatches(limits.batch, parts, pins)
                if limits.splits
                else [1] * (limits.batch % parts == 0)
            )
        rows += [(*mesh, micro) for micro in microbatches[parts]]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(MESH_AXES) + 1)
    return dict(zip((*MESH_AXES, "micro"), table.T, strict=True))


def _policies(problem: Problem, pins: Pins) -> tuple[str, ...]:
    if pins.remat is None:
        return tuple(problem.steps)
    if pins.remat not in problem.steps:
        raise PinError(
            f"remat={pins.remat!r} recomputes layers, and {problem.model} has no repeated layer; it"
            f" can be {', '.join(problem.steps)}"
        )
    return (
        ("none", pins.remat) if pins.remat_layers and "none" in problem.steps else (pins.remat,)
    )  # the layers that recompute nothing


def _microbatches(size: int, ways: int, pins: Pins) -> list[int]:
    if size % ways:
        return []
    allowed = [
        n for n in divisors(size // ways, MAX_MICROBATCHES) if n % (pins.accumulation or 1) == 0
    ]
    return (
        [n for n in allowed if pins.microbatches in (None, n)]
        if pins.microbatches is None or pins.microbatches <= MAX_MICROBATCHES
        else ([pins.microbatches] if (size // ways) % pins.microbatches == 0 else [])
    )


def legal(choice: Choice, limits: Limits, routes: bool, sizes: Mapping[str, Array]) -> Array:
    """Which candidates a choice fits that fits their tensor axis, by sizes of mesh axes: the
    sequence divides, and an expert axis has tokens to route.
    """
    fits = (
        limits.sequence
        % (sizes["tensor"] * sizes["context"] if choice.sequence else sizes["context"])
        == 0
    )
    return fits if routes else fits & (sizes["expert"] == 1)


def legal_zero(zero: int, c: Candidates) -> Array:
    """Which candidates a ZeRO stage fits: something to cut over, and an fsdp axis that cuts
    something.
    """
    return c.ways(STORED_AXES) > 1 if zero else c.fsdp == 1


def knobs(room: Space, policy: str, pipelined: bool) -> list[Knobs]:
    """Every ZeRO stage and schedule; whether a candidate allows them is not said here."""
    pins = room.pins
    zeros = [zero for zero in (0, 1, 2, 3) if pins.zero in (None, zero)]
    usual = _schedules(room, policy) if pipelined else [(NONE.name, 1)]
    listed = [
        (zero, schedule, virtual, gather)
        for zero in zeros
        for schedule, virtual in usual
        for gather in room.gathers
        if gather == "use" or (zero == 3 and pipelined)
    ]
    listed += [
        (3, schedule.name, virtual, "once")
        for schedule in forward_first()
        for virtual in (breadth_first(room) if pipelined else ())
    ]
    return [
        Knobs(
            zero=zero,
            schedule=schedule,
            virtual=virtual,
            context=room.strategy.context,
            attention=room.strategy.attention,
            gather=gather,
            accumulation=groups(room),
        )
        for zero, schedule, virtual, gather in listed
    ]


def _schedules(room: Space, policy: str) -> list[tuple[str, int]]:
    """Schedules and chunks of layers on a stage that are tried, those of whole stages first."""
    pins = room.pins
    tried = [
        (schedule.name, chunks)
        for schedule in SCHEDULES.values()
        if pins.schedule in (None, schedule.name)
        for chunks in schedule.tried(
            pinned=pins.schedule is not None,
            chunks=pins.virtual_stages,
            policy=policy,
            most=MAX_VIRTUAL,
        )
    ]
    return sorted(tried, key=lambda one: one[1] > 1)


def forward_first() -> list[Schedule]:
    """Schedules that take all microbatches through a chunk of layers before the next."""
    return [schedule for schedule in pipelines() if schedule.forward_first]


def breadth_first(room: Space) -> list[int]:
    """Chunks of layers on a stage of pipelines that take all microbatches through one chunk before
    the next, where no schedule is pinned that has them anyway.
    """
    pins = room.pins
    if (
        "once" not in room.gathers
        or pins.zero not in (None, 3)
        or pins.schedule not in (None, *(schedule.name for schedule in forward_first()))
        or (pins.schedule and pins.virtual_stages)
        or pins.pipeline == "programs"
    ):
        return []
    if pins.virtual_stages:
        return [pins.virtual_stages] if pins.virtual_stages > 1 else []
    return list(_dividing(room.limits.layers))


@lru_cache(maxsize=256)
def _dividing(layers: int) -> tuple[int, ...]:
    """Every number of chunks that divides the layers of a stage, for some number of stages."""
    return tuple(
        sorted(
            {
                chunks
                for stages in range(2, layers + 1)
                for chunks in divisors(-(-layers // stages))
                if chunks >= FEWEST
            }
        )
    )


def most_rounds(room: Space, sizes: Mapping[str, Array]) -> Array:
    """The most chunks that a stage has in a pipeline of `breadth_first`, by candidate; 0 where
    there is none.
    """
    stages, micro, rest = (
        sizes["stage"],
        sizes["micro"],
        math.prod(sizes[axis] for axis in STORED_AXES),
    )
    most, wanted = room.limits.layers // stages, room.pins.virtual_stages or FEWEST
    fits = (stages > 1) & (micro >= stages * groups(room)) & (rest > 1) & (most >= wanted)
    return (
        np.where(fits, room.pins.virtual_stages or most, 0)
        if breadth_first(room)
        else np.zeros_like(stages)
    )


def schedules(room: Space, policy: str) -> list[Schedule]:
    """Schedules of the space under a remat policy, but for `breadth_first`."""
    return [named(name) for name in dict.fromkeys(name for name, _ in _schedules(room, policy))]


def groups(room: Space) -> int:
    """Groups of microbatches that go through a pipeline one after the other; more than one only
    where that is pinned, and then all plans have stages.
    """
    return room.pins.accumulation or 1


def most_chunks(room: Space, policy: str, stages: Array, micro: Array) -> Array:
    """The most chunks of layers on a stage that a schedule of the space may have, by candidate."""
    most = max((virtual for _, virtual in _schedules(room, policy)), default=1)
    return np.where(
        micro >= stages * groups(room),
        np.maximum(1, np.minimum(most, room.limits.layers // stages)),
        1,
    )


def legal_schedule(room: Space, how: Knobs, c: Candidates) -> Array:
    """Which candidates a schedule fits: a layer for every chunk, and, with several chunks,
    microbatches for every stage; breadth first, as many layers in every chunk.
    """
    layers = room.limits.layers
    fits = c.stage * how.virtual <= layers
    schedule = named(how.schedule)
    if schedule.forward_first and how.virtual > 1 and not room.pins.virtual_stages:
        fits &= -(-layers // c.stage) % how.virtual == 0
    return fits & schedule.fits(
        Pipelines(
            stages=c.stage,
            chunks=np.full_like(c.stage, how.virtual),
            microbatches=c.micro // how.accumulation,
            lockstep=room.pins.pipeline != "programs",
        )
    )


def _in_order(pins: Pins, stages: int, together: int) -> bool:
    """Whether stages that wait for their neighbours alone can take so many microbatches in the
    order of the pinned schedule.
    """
    if not (pins.schedule and together):
        return True
    shape = Pipelines.one(stages=stages, microbatches=together)
    return bool(named(pins.schedule).fits(shape)[0])


def _no_rows(problem: Problem, mesh: MeshShape, parts: int) -> BatchError:
    """A batch is to be cut that has nothing to cut."""
    arrays = ", ".join(f"{path} {list(shape)}" for path, shape, _, _ in problem.batch)
    asked = " and ".join(
        [
            *([f"the mesh {mesh}"] if mesh.devices > 1 else []),
            *([f"microbatches={parts}"] if parts > 1 else []),
        ]
    )
    return BatchError(
        f"{asked} would cut the rows of the batch, and it has"
        f" {f'no dim called batch: {arrays}' if arrays else 'no arrays'}\nTry: a batch whose arrays"
        " have their rows along the first dim, or batch_axes that say where they are"
    )


def explain_empty(
    problem: Problem, colouring: Colouring, pins: Pins, devices: int
) -> BatchError | PinError:
    """Why no plan is legal under the pins, as the error to raise."""
    size = batch_size(problem, colouring)
    sizes = dict(pins.mesh) if pins.mesh is not None else dict(pins.axes)
    ways = math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)
    if (
        not any("batch" in axes for _, _, _, axes in problem.batch)
        and ways * (pins.microbatches or 1) > 1
    ):
        return _no_rows(problem, MeshShape(sizes), pins.microbatches or 1)
    if size % ways:
        return PinError(
            f"the mesh {MeshShape(sizes)} cuts the batch into {ways} parts, which do not divide its"
            f" {size} examples\nTry: a batch that is a multiple of {ways}, or smaller data and fsdp"
            " axes"
        )
    if pins.microbatches and size % (ways * pins.microbatches):
        return PinError(
            f"microbatches={pins.microbatches} does not divide the {size // ways} examples of each"
            f" of the {ways} parts of the batch\nTry: one of"
            f" {', '.join(map(str, divisors(size // ways, MAX_MICROBATCHES)))}"
        )
    if size // ways % (pins.accumulation or 1):
        return PinError(
            f"accumulation={pins.accumulation} takes microbatches in equal groups, which do not"
            f" divide the {size // ways} examples of each of the {ways} parts of the batch\nTry:"
            f" one of {', '.join(map(str, divisors(size // ways, MAX_MICROBATCHES)))}"
        )
    together, stages = (pins.microbatches or 0) // (pins.accumulation or 1), sizes.get("stage", 1)
    if 0 < together < stages and (pins.virtual_stages or 1) > 1:
        return PinError(
            f"stages of several chunks of layers need a microbatch for each of the {stages} stages,"
            f" and {together} go through them together\nTry: more microbatches, or virtual_stages=1"
        )
    if pins.pipeline == "programs" and not _in_order(pins, stages, together):
        return PinError(
            f"pipeline='programs' interleaves whole groups of {stages} microbatches, one for each"
            f" stage, and {together} go through the stages together\nTry: a multiple of that, or"
            " pipeline='lockstep'"
        )
    tensor = sizes.get("tensor", 1)
    length = sequence_size(problem, colouring)
    if pins.sequence_parallel and (colouring.sequence_colour is None or length % tensor):
        found = (
            "has no sequence"
            if colouring.sequence_colour is None
            else f"has sequences of {length}, which {tensor} parts do not divide"
        )
        return PinError(
            f"sequence_parallel=True cuts the sequence over tensor={tensor}, and {problem.model}"
            f' {found}\nTry: sequence_parallel=False, or name the dim "seq" in batch_axes'
        )
    if tensor > 1 and pins.rules is not None:
        cut = {
            name: colouring.canonical(name) for name, axes in pins.rules.entries if "tensor" in axes
        }
        whole = [
            f"{name!r} -> tensor: its dims have the largest common size"
            f" {colouring.colours[colour].divisor}, which {tensor} parts do not divide"
            for name, colour in cut.items()
            if colour is not None and colouring.colours[colour].divisor % tensor
        ]
        if whole:
            raise_all(
                PinError,
                f"pinned rules do not fit the pinned mesh {MeshShape(sizes)}",
                whole,
                hint="a tensor axis that divides them, or the rule to None",
            )
        if not cut:
            return PinError(
                f"tensor={tensor} is pinned, and the pinned rules shard nothing over tensor\nTry: a"
                f" rule (name, 'tensor') among {', '.join(tensor_colours(colouring)[0]) or 'none'},"
                " or no rules"
            )
    names = tensor_colours(colouring)[0]
    if tensor > 1 and all(colouring.colours[name].divisor % tensor for name in names):
        return _indivisible(tensor, colouring, names, length)
    beyond = [
        fault for axis, size in sizes.items() if (fault := _misfit(axis, size, problem, colouring))
    ]
    if beyond:
        return PinError(beyond[0])
    return PinError(
        f"no mesh of {devices} devices over {', '.join(MESH_AXES)} fits {problem.model} with a"
        f" batch of {size} under the pins {pins}\nTry: a batch that is a multiple of the number of"
        " devices"
    )


def _indivisible(tensor: int, colouring: Colouring, names: Sequence[str], length: int) -> PinError:
    """No colour that the tensor axis may cut divides into its parts; those that do, and why they
    are not cut.
    """
    listed = ", ".join(f"{name} ({colouring.colours[name].divisor})" for name in names)
    carried = [
        c.name
        for c in colouring.colours.values()
        if c.matmuls and c.carried and colouring.sequence_colour and c.divisor % tensor == 0
    ]
    aside = (
        f"\nNot among them: {', '.join(carried)}, which layers hand on; the sequence ({length}) is"
        " sharded in its place, beside another colour"
        if carried
        else ""
    )
    return PinError(
        f"tensor={tensor} divides no colour that it could cut; colours with their largest common"
        f" size are {listed or 'none'}{aside}\nTry: a tensor axis that divides one of them"
    )


def _misfit(axis: str, size: int, problem: Problem, colouring: Colouring) -> str:
    """Why a pinned axis fits no plan of a model; empty where it may."""
    length = sequence_size(problem, colouring)
    if axis == "context" and (colouring.sequence_colour is None or length % size):
        found = (
            "has no sequence"
            if colouring.sequence_colour is None
            else f"has sequences of {length}, which {size} parts do not divide"
        )
        return (
            f"context={size} cuts the sequence, and {problem.model} {found}\nTry: a context axis"
            ' that divides it, or name the dim "seq" in batch_axes'
        )
    if axis == "expert" and size > 1:
        name = expert_colour(problem.forward, colouring.forward)
        found = (
            f"has {colouring.colours[name].divisor} of them, which {size} parts do not divide"
            if name
            else "has none that a grouped matmul (jax.lax.ragged_dot) uses"
        )
        return (
            f"expert={size} cuts experts, and {problem.model} {found}\nTry: an expert axis that"
            " divides them, or none"
        )
    if axis == "stage" and size > 1:
        return (
            f"stage={size} cuts the layers, and {problem.model} has too few in a loop over a stack"
            " of layers\nTry: fewer stages, or layers under jax.lax.scan or nnx.scan"
        )
    return ""
