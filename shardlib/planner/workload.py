"""The workload: a problem prepared for pricing on one vendor's chips, with its colours and its cost
items. Shared by all searches of the problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from shardlib.compact import compact
from shardlib.cost.activations import keep_rows, rewritten
from shardlib.cost.experts import TokenExchange, expert_colour, localised
from shardlib.cost.facts import Facts, Phase, Traits, phases, traits
from shardlib.cost.framework import ANYTHING, XLA, Abilities, Framework, FrameworkProfile
from shardlib.cost.items import fused_parameters, order_items, work_items
from shardlib.cost.memory import Peaks, parameter_segments, peaks, stored_items
from shardlib.cost.stages import ModelFacts
from shardlib.cost.tables import (
    ROWS,
    ItemEntries,
    MeasureIndex,
    MeasureValues,
    Tally,
    TallyEntry,
    tallied,
)
from shardlib.cost.terms import Item
from shardlib.decisions.table import Dtypes
from shardlib.graph import ITEMSIZE, Problem, StepGraph, forward_pass
from shardlib.planner.stored import under
from shardlib.propagation.colours import Choice, Colouring, colour, stack_dims

# --------------------------------------------------------------------------------------------------
# Limits of a model, whatever is pinned.

#: Most colours of which all subsets are tried for the tensor axis: those with the most FLOPs.
MAX_TENSOR_COLOURS = 6
#: Most microbatches that are tried.
MAX_MICROBATCHES = 256


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a model, and of the framework that runs it, other than its colours.

    Attributes:
        batch: examples per batch.
        sequence: positions; 1 without a sequence.
        layers: layers of the largest class; 0 without layers.
        experts: number of experts; 1 without.
        splits: True if microbatches give the same numbers as the whole batch.
        staged: True if microbatches can go through pipeline stages.
    """

    batch: int
    sequence: int
    layers: int
    experts: int
    splits: bool = True
    staged: bool = True
    groups: int = 1
    able: Abilities = ANYTHING


def experts_form(problem: Problem) -> str:
    """The routing form of a model's experts: "dropless" or "capacity"."""
    return "capacity" if "capacity" in problem.functions else "dropless"


def batch_size(problem: Problem, colouring: Colouring) -> int:
    """Greatest common divisor of the batch dims of the batch arrays, in examples; 1 where no dim is
    named batch.
    """
    return math.gcd(*_sizes(problem, colouring, colouring.batch_colour)) or 1


def sequence_size(problem: Problem, colouring: Colouring) -> int:
    """Greatest common divisor of the sequence dims of the batch arrays, in positions; 1 where there
    is none.
    """
    return math.gcd(*_sizes(problem, colouring, colouring.sequence_colour)) or 1


def _sizes(problem: Problem, colouring: Colouring, name: str | None) -> list[int]:
    """Sizes of the dims of the batch arrays that have a colour."""
    return [
        shape[dim]
        for path, shape, _, _ in problem.batch
        for dim, axis in enumerate(colouring.batch[path])
        if name and axis == name
    ]


def sequences_text(problem: Problem, colouring: Colouring, parts: str) -> str:
    """The part of a message that gives a model's sequence lengths, which `parts` do not divide, or
    the reason why there is no sequence to shard.
    """
    name = colouring.named_sequence
    if name is None:
        return "has no sequence"
    if colouring.colours[name].iterated:
        return "walks along its sequence in a loop, one position after the other"
    lengths = set(_sizes(problem, colouring, name))
    listed = " and ".join(map(str, sorted(lengths)))
    return (
        f"has sequences of {listed}, which {parts} not divide{'' if len(lengths) < 2 else ' all'}"
    )


def tensor_colours(colouring: Colouring) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Colours of which all subsets are tried for the tensor axis, the most specific first; and
    those beyond `MAX_TENSOR_COLOURS`, by decreasing FLOPs.
    """
    by_use = sorted(
        colouring.shardable, key=lambda c: (-c.flops * math.log2(c.divisor + 1), c.name)
    )
    searched = (c.name for c in by_use[:MAX_TENSOR_COLOURS])
    return most_specific_first(searched, colouring), tuple(
        c.name for c in by_use[MAX_TENSOR_COLOURS:]
    )


def most_specific_first(names: Iterable[str], colouring: Colouring) -> tuple[str, ...]:
    """Colours in the order of their priority for the tensor axis."""
    return tuple(sorted(names, key=lambda name: (colouring.colours[name].matmuls, name)))


# --------------------------------------------------------------------------------------------------
# Programs of a model: every way to run its step, as cost items.

#: Most layer groups that may follow different remat policies; with more, all follow one.
MAX_CLASSES = 3


@dataclass(frozen=True, kw_only=True)
class Program:
    """One way to run a step, as cost items.

    Attributes:
        step: the step graph as the framework runs it.
        guesses: choices under which memory may peak.
        by_group: True if layer groups can follow different remat policies.
        work: items of computation and communication.
    """

    facts: Facts
    step: StepGraph
    guesses: tuple[Choice, ...]
    profile: FrameworkProfile
    by_group: bool
    work: list[Item]

    @cached_property
    def _peaks(self) -> Peaks:
        return peaks(self.facts, self.step, self.guesses, self.profile, moments=self.by_group)

    @property
    def points(self) -> tuple[list[Item], ...]:
        """Memory items by the point where memory may peak."""
        return self._peaks.points

    @property
    def moments(self) -> tuple[Phase, ...]:
        """Memory by moment of the step, where layer groups can follow different policies."""
        return self._peaks.phases

    @property
    def loops(self) -> tuple[int, ...]:
        """The segments of `moments`."""
        moments = phases(self.facts.graph, self.facts.layers) if self.by_group else ()
        return tuple(span.segment for span in moments)

    @cached_property
    def forward(self) -> list[Item]:
        """Work items of the forward pass alone."""
        return work_items(self.facts.for_graph(forward_pass(self.facts.graph, saves=True)))


def program_of(
    problem: Problem,
    colouring: Colouring,
    frozen: frozenset[tuple[str, int]],
    profile: FrameworkProfile,
    vendor: str,
    *,
    policy: str,
    routes: bool,
) -> Program:
    """One way to run a step, as cost items."""
    step, names = rewritten(problem.steps[policy], colouring.steps[policy], profile)
    if routes:
        step, names = localised(step, names, colouring.batch_colour)
        step, names = keep_rows(step, names) if profile.routed_saves == "rows" else (step, names)
    facts = Facts(
        step,
        names,
        frozen,
        _traits(vendor, profile),
        batch=(colouring.batch_colour, batch_size(problem, colouring)),
        sequence=(colouring.sequence_colour, sequence_size(problem, colouring)),
        routes=routes,
        exchange=TokenExchange(padding=profile.exchange_room, sent=profile.exchange),
    )
    by_group = (
        1 < len(facts.layers.counts) <= MAX_CLASSES
        and len(problem.steps) > 1
        and "none" in problem.steps
    )
    return Program(
        facts=facts,
        step=step,
        guesses=tuple(_guesses(colouring, expert_colour(facts.graph, names) if routes else None)),
        profile=profile,
        by_group=by_group,
        work=[*work_items(facts), *order_items(facts, fused_parameters(problem))],
    )


def _traits(vendor: str, profile: FrameworkProfile) -> Traits:
    """The traits of the compiler under a framework profile."""
    vendor_traits = traits(vendor)
    return (
        replace(vendor_traits, shares_gathers=True)
        if profile.gathered_inputs == "shared"
        else vendor_traits
    )


def _guesses(colouring: Colouring, expert: str | None) -> list[Choice]:
    """Hypothetical choices, used to find the points where memory may peak; `expert` is the colour
    of the experts to which tokens are routed.
    """
    tensor, _ = tensor_colours(colouring)
    batch, sequence = colouring.batch_colour, colouring.sequence_colour
    narrow = tuple(
        name
        for name in tensor
        if colouring.colours[name].matmuls
        <= min((colouring.colours[t].matmuls for t in tensor), default=0) * 2
    )
    return [
        *([Choice(batch=batch, expert=expert)] if expert else []),
        Choice(batch=batch),
        *(
            Choice(batch=batch, tensor=names, sequence=s)
            for names in (tensor, narrow)
            for s in (None, sequence)
        ),
    ]


# --------------------------------------------------------------------------------------------------
# Remat policies of a plan, the same for all layers or by layer group.


def names_of_classes(parameters: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Names of layer groups: the common prefix of the paths of their parameters, or "layers" with
    the index of the group.

    >>> names_of_classes([["encoder.layers.up", "encoder.layers.down"], ["decoder.layers.up"]])
    ('encoder.layers', 'decoder.layers')
    >>> names_of_classes([["a", "b"]])
    ('layers#0',)
    """
    shared = [_shared_path(paths) for paths in parameters]
    return tuple(
        name if name and shared.count(name) == 1 else f"{name or 'layers'}#{k}"
        for k, name in enumerate(shared)
    )


def _shared_path(paths: Sequence[str]) -> str:
    """The common prefix of dotted paths, without their last parts."""
    shared: list[str] = []
    for parts in zip(*(path.split(".")[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


# --------------------------------------------------------------------------------------------------
# Costs of a program under every choice of colours, before shapes and links are known.
#
# Items that depend on the same colours form a group. Colours that no op ties together are
# independent: the cost of sharding one does not depend on whether another is sharded. So the
# colours fall into *components*, every group belongs to one of them or to none, and the tally of a
# choice is a sum over components, each of which has few ways to be sharded. Hence, exactly:
#
# - the minimum cost of a choice is the sum of the minimum costs of the components;
# - the tallies of all choices are sums of the few tallies of components, which do not depend on
#   shapes either: they are computed once per model (`shardlib.cost.tables`).

Array = np.ndarray


class Group:
    """Items that depend on the same colours of a choice, with the rows of the tally to which they
    add.
    """

    def __init__(self, colours: frozenset[str], item_entries: ItemEntries) -> None:
        self.colours = colours
        self.items: list[tuple[int, int]] = []
        self._item_entries = item_entries
        self._entries: dict[Choice, list[TallyEntry]] = {}

    def entries(self, choice: Choice) -> list[TallyEntry]:
        """(row, number of the measure, amount) of all items under a choice."""
        key = choice.restrict(self.colours)
        if key not in self._entries:
            self._entries[key] = list(self._item_entries.entries(key, self.items))
        return self._entries[key]


def grouped(
    lists: Sequence[Iterable[Item]], relevant: frozenset[str], item_entries: ItemEntries
) -> tuple[Group, ...]:
    """Items grouped by the relevant colours on which they depend; the segments of each list follow
    those of the list before.
    """
    groups: dict[frozenset[str], Group] = {}
    for number, items in enumerate(lists):
        for item in items:
            colours = item.colours & relevant
            if colours not in groups:
                groups[colours] = Group(colours, item_entries)
            groups[colours].items.append(
                (number * item_entries.segments, item_entries.number(item))
            )
    return tuple(groups.values())


def components(
    groups: Iterable[frozenset[str]], colours: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Connected components of the colours that groups tie together; each in the order of `colours`,
    and those that can be sharded in the fewest ways first.
    """
    tied_sets: list[set[str]] = [{name} for name in colours]
    for group in groups:
        tied = [part for part in tied_sets if part & group]
        if len(tied) > 1:
            tied_sets = [part for part in tied_sets if part not in tied] + [set[str]().union(*tied)]
    return tuple(
        sorted(
            (tuple(name for name in colours if name in part) for part in tied_sets),
            key=lambda part: (len(part), colours.index(part[0])),
        )
    )


@dataclass(kw_only=True)
class ItemTallies:
    """The tallies of some lists of items under every choice.

    Attributes:
        segments: number of segments of each list.
        parts: components of the colours; `()` stands for items that depend on no colour that the
            tensor axis could shard.
    """

    lists: int
    segments: int
    groups: tuple[Group, ...]
    parts: tuple[tuple[str, ...], ...]
    _known: dict[tuple[tuple[str, ...], Choice], Tally] = field(
        default_factory=dict[tuple[tuple[str, ...], Choice], Tally], init=False, repr=False
    )
    _asked: dict[tuple[tuple[str, ...], Choice], tuple[tuple[tuple[str, ...], Choice], Tally]] = (
        field(
            default_factory=dict[
                tuple[tuple[str, ...], Choice], tuple[tuple[tuple[str, ...], Choice], Tally]
            ],
            init=False,
            repr=False,
        )
    )

    def of(
        self, part: tuple[str, ...], choice: Choice
    ) -> tuple[tuple[tuple[str, ...], Choice], Tally]:
        """The tally of a component under a choice, and its cache key; choices that shard the
        component alike share both.
        """
        request = part, choice
        if request not in self._asked:
            key = (
                part,
                replace(choice, tensor=tuple(name for name in choice.tensor if name in part)),
            )
            if key not in self._known:
                cuttable = {name for component in self.parts for name in component}
                own_colours = set(part)
                groups = (
                    group
                    for group in self.groups
                    if (
                        group.colours & own_colours if own_colours else not group.colours & cuttable
                    )
                )
                self._known[key] = tallied(
                    entry for group in groups for entry in group.entries(choice)
                )
            self._asked[request] = key, self._known[key]
        return self._asked[request]

    def on(self, values: MeasureValues, shapes: Array) -> OnShapes:
        """The tallies on some shapes."""
        return OnShapes(tallies=self, values=values, at=shapes)


@dataclass(kw_only=True)
class OnShapes:
    """Tallies on the shapes of `values` numbered `at`; components are evaluated once."""

    tallies: ItemTallies
    values: MeasureValues
    at: Array
    _known: dict[tuple[tuple[str, ...], Choice], Array] = field(
        default_factory=dict[tuple[tuple[str, ...], Choice], Array], init=False, repr=False
    )

    def total(self, choice: Choice) -> Array:
        """Quantities under a choice: array [lists, segments, rows, shapes]."""
        return self.columns([(choice, np.arange(len(self.at)))])

    def columns(self, choices: Sequence[tuple[Choice, Array]]) -> Array:
        """Quantities under choices, each at some positions of `at`, concatenated: array [lists,
        segments, rows, columns].
        """
        tallies = self.tallies
        quantities = np.zeros(
            (
                tallies.lists * tallies.segments * ROWS,
                sum(len(positions) for _, positions in choices),
            )
        )
        begin = 0
        for choice, positions in choices:
            columns = slice(begin, begin := begin + len(positions))
            for part in ((), *tallies.parts):
                key, tally = tallies.of(part, choice)
                if key not in self._known:
                    self._known[key] = tally.on(self.values, self.at)
                quantities[tally.rows, columns] += self._known[key][:, positions]
        return quantities.reshape(tallies.lists, tallies.segments, ROWS, -1)


@dataclass(frozen=True, kw_only=True)
class ModelTallies:
    """The tallies of a model.

    Attributes:
        rest: stored arrays.
        work: computation and communication, by (remat policy, True where tokens are routed).
        points: memory, one list per point where it may peak, by the same keys.
    """

    rest: ItemTallies
    work: dict[tuple[str, bool], ItemTallies]
    points: dict[tuple[str, bool], ItemTallies]


class TallyCache:
    """The tallies of a model, computed lazily.

    Args:
        work: work items by (remat policy, True where tokens are routed).
        points: returns the memory items of each point, by the same keys.
        resting: items of stored parameters.
        classes: number of layer classes.
        fixed: colours other than those of a choice's tensor axis on which items may depend.
        beside: a cache to share measures with, and the groups of lists of items that are in both.
    """

    def __init__(
        self,
        work: dict[tuple[str, bool], list[Item]],
        points: Callable[[], dict[tuple[str, bool], tuple[list[Item], ...]]],
        resting: list[Item],
        classes: int,
        profile: FrameworkProfile,
        fixed: frozenset[str],
        beside: TallyCache | None = None,
    ) -> None:
        self._work, self._points, self._rest = work, points, resting
        self._segments, self._fixed = classes + 2, fixed
        self._item_entries = (
            ItemEntries(MeasureIndex(), profile, classes + 2)
            if beside is None
            else beside._item_entries
        )
        self._groups: dict[
            tuple[frozenset[str], tuple[int, ...]], tuple[Sequence[list[Item]], tuple[Group, ...]]
        ] = {} if beside is None else beside._groups
        self._known: dict[tuple[str, ...], ModelTallies] = {}

    @property
    def index(self) -> MeasureIndex:
        """The measures."""
        return self._item_entries.index

    def uncut(self, key: tuple[str, bool] | None) -> ItemTallies:
        """The tallies without tensor sharding of a program's work, or of stored arrays.

        Args:
            key: (remat policy, True where tokens are routed); None for stored arrays.
        """
        items = self._rest if key is None else self._work[key]
        groups = self._grouped([items], self._fixed)
        return ItemTallies(lists=1, segments=self._segments, groups=groups, parts=())

    def of_cuttable(self, cuttable: tuple[str, ...]) -> ModelTallies:
        """The tallies where the tensor axis may shard the given colours."""
        if cuttable not in self._known:
            relevant = self._fixed | set(cuttable)
            points = self._points()
            lists: list[Sequence[list[Item]]] = [
                [self._rest],
                *([items] for items in self._work.values()),
                *points.values(),
            ]
            groups = [self._grouped(items, relevant) for items in lists]
            parts = components((group.colours for items in groups for group in items), cuttable)
            resting, *others = [
                ItemTallies(lists=len(listed), segments=self._segments, groups=items, parts=parts)
                for listed, items in zip(lists, groups, strict=True)
            ]
            self._known[cuttable] = ModelTallies(
                rest=resting,
                work=dict(zip(self._work, others[: len(self._work)], strict=True)),
                points=dict(zip(points, others[len(self._work) :], strict=True)),
            )
        return self._known[cuttable]

    def _grouped(self, lists: Sequence[list[Item]], relevant: frozenset[str]) -> tuple[Group, ...]:
        """See `grouped`; cached by the identity of the lists, which are therefore kept alive."""
        key = relevant, tuple(map(id, lists))
        if key not in self._groups:
            self._groups[key] = lists, grouped(lists, relevant, self._item_entries)
        return self._groups[key][1]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A problem prepared for pricing.

    Attributes:
        vendor: vendor of the chips.
        frozen: (path, dim) of parameter dims that count layers.
        expert: colour of experts to which tokens can be routed; None without.
        programs: by (remat policy, True where tokens are routed).
        rest: items of stored parameters.
        model: layers, and bytes of the batch.
        framework: the framework of the profile, with its abilities; None for programs of shardlib.
        beside: the same problem under a profile with another attention kernel, whose tallies are
            shared.
    """

    problem: Problem
    vendor: str
    colouring: Colouring
    frozen: frozenset[tuple[str, int]]
    expert: str | None
    programs: Mapping[tuple[str, bool], Program]
    rest: list[Item]
    model: ModelFacts
    profile: FrameworkProfile = XLA
    framework: Framework | None = None
    beside: Workload | None = None

    __repr__ = compact

    @cached_property
    def tallies(self) -> TallyCache:
        """The tallies of all programs, computed lazily and shared by all searches."""
        work = {key: program.work for key, program in self.programs.items()}

        def points() -> dict[tuple[str, bool], tuple[list[Item], ...]]:
            return {key: program.points for key, program in self.programs.items()}

        beside = None
        if self.beside is not None and self.profile == replace(
            self.beside.profile, attention=self.profile.attention
        ):
            beside = self.beside.tallies
        return TallyCache(
            work, points, self.rest, len(self.counts), self.profile, self._fixed, beside=beside
        )

    @property
    def _fixed(self) -> frozenset[str]:
        """Colours that axes other than tensor shard."""
        return frozenset({self.colouring.batch_colour or "", self.colouring.sequence_colour or ""})

    @cached_property
    def moments(self) -> TallyCache:
        """The tallies of every program's moments: for each moment what is saved, then its points.
        Its measures are in the index of `tallies`.
        """
        return self._of(
            {
                key: tuple(
                    items for moment in program.moments for items in (moment.stacks, *moment.points)
                )
                for key, program in self.programs.items()
            }
        )

    @cached_property
    def stacks(self) -> TallyCache:
        """The tallies of the activations that every program's loops over layers have saved at the
        end of the forward pass. Its measures are in the index of `tallies`.
        """
        return self._of(
            {key: (program.moments[0].stacks,) for key, program in self.programs.items()}
        )

    def _of(self, points: dict[tuple[str, bool], tuple[list[Item], ...]]) -> TallyCache:
        return TallyCache(
            {}, lambda: points, [], len(self.counts), self.profile, self._fixed, beside=self.tallies
        )

    @cached_property
    def by_class(self) -> bool:
        """True if layer groups can follow different remat policies: there are several, and all
        programs have the same loops.
        """
        loops = {program.loops for program in self.programs.values()}
        return len(loops) == 1 and () not in loops

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """Display names of the layer groups; see `names_of_classes`."""
        first = next(iter(self.programs.values()))
        segments = parameter_segments(first.facts)
        return names_of_classes(
            [
                [path for path, segment in segments.items() if segment == k]
                for k in range(len(self.counts))
            ]
        )

    def under(self, dtypes: Dtypes, attention: str = "traced") -> Workload:
        """The same model in other dtypes (`shardlib.planner.stored`) or with another attention
        kernel; cached.
        """
        kind = (
            "traced"
            if attention == "traced" or self.profile.attention != "traced"
            else "blocks"
            if attention == "blocks"
            else "fused"
        )
        if (dtypes, kind) not in self._under:
            problem, profile = under(dtypes, self.problem, self.profile)
            changed = profile if kind == "traced" else replace(profile, attention=kind)
            prepared_other = self._under.get((dtypes, "fused" if kind == "blocks" else "blocks"))
            if kind == "traced" and not dtypes:
                variant = self
            elif kind != "traced" and prepared_other is not None:
                variant = prepared_other.attending(kind)
            else:
                beside = None if dtypes else self
                variant = prepare(problem, self.vendor, changed, self.framework, beside)
            self._under[dtypes, kind] = variant
        return self._under[dtypes, kind]

    def attending(self, kind: str) -> Workload:
        """The same model with another attention kernel, which changes its memory alone."""
        profile = replace(self.profile, attention=kind)
        programs = {
            key: replace(program, profile=profile) for key, program in self.programs.items()
        }
        return replace(self, profile=profile, programs=programs, beside=self)

    @cached_property
    def _under(self) -> dict[tuple[Dtypes, str], Workload]:
        return {}

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of layers of each class."""
        return self.model.counts


def prepare(
    problem: Problem,
    vendor: str = "nvidia",
    profile: FrameworkProfile = XLA,
    framework: Framework | None = None,
    beside: Workload | None = None,
) -> Workload:
    """Colours a problem and splits its cost into items.

    Args:
        framework: the framework of the profile; None for programs of shardlib.
    """
    colouring = colour(problem) if beside is None else beside.colouring
    frozen = frozenset(stack_dims(problem)) if beside is None else beside.frozen
    first = next(iter(problem.steps))
    expert = expert_colour(problem.steps[first].graph, colouring.steps[first])
    programs = {
        (policy, routes): program_of(
            problem, colouring, frozen, profile, vendor, policy=policy, routes=routes
        )
        for policy in problem.steps
        for routes in ((False, True) if expert else (False,))
    }
    facts = programs[first, False].facts
    segments = parameter_segments(facts)
    batch_bytes = float(
        sum(math.prod(shape) * ITEMSIZE.get(dtype, 4) for _, shape, dtype, _ in problem.batch)
        + sum(rows.bytes for _, rows in problem.rows.by_row)
    )
    return Workload(
        problem=problem,
        vendor=vendor,
        colouring=colouring,
        frozen=frozen,
        expert=expert,
        programs=programs,
        rest=stored_items(problem.parameters, colouring.parameters, frozen, segments),
        profile=profile,
        framework=framework,
        beside=beside,
        model=ModelFacts(
            counts=facts.layers.counts,
            batch_bytes=batch_bytes,
            state_bytes=problem.state_bytes,
            largest_end=_largest_end(problem, segments),
            reduction_dtype_ratio=_reduction(profile, problem),
            matmul_dtype_ratio=_working(problem),
            head_layers=_head_layers(facts),
        ),
    )


def _largest_end(problem: Problem, segments: Mapping[str, int]) -> float:
    """The largest share of one array in the parameters outside the layers: about 1/2 with an
    embedding and a head, 1 where one array is both.
    """
    sizes = [
        float(math.prod(parameter.shape))
        for parameter in problem.parameters
        if parameter.path not in segments
    ]
    return max(sizes) / sum(sizes) if sizes else 1.0


def _working(problem: Problem) -> float:
    """Ratio of the bytes of parameters in the compute dtype to their bytes as stored."""
    elements = [float(math.prod(parameter.shape)) for parameter in problem.parameters]
    stored_bytes = sum(
        size * ITEMSIZE[parameter.dtype]
        for size, parameter in zip(elements, problem.parameters, strict=True)
    )
    return sum(elements) * ITEMSIZE[problem.compute_dtype] / stored_bytes if stored_bytes else 1.0


def _head_layers(facts: Facts) -> float:
    """FLOPs of the weight matmuls outside the layers, over those of a mean layer."""
    flops = [0.0, 0.0]
    for op in facts.graph.ops:
        if op.category == "matmul" and (
            facts.weights.keys() & set(op.operands) or facts.gradients & set(op.results)
        ):
            inside = facts.layers.segment(op.region) >= 0
            flops[inside] += op.flops * facts.graph.trips(op.region)
    return flops[0] * sum(facts.layers.counts) / flops[1] if flops[1] else 0.0


def _reduction(profile: FrameworkProfile, problem: Problem) -> float:
    """Ratio of the bytes of a gradient in communication under a profile to those in the compute
    dtype.
    """
    return (
        ITEMSIZE[profile.reduction_dtype] / ITEMSIZE[problem.compute_dtype]
        if profile.reduction_dtype
        else 1.0
    )
