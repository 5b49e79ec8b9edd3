"""The workload: a problem prepared for pricing on one vendor's chips, with its colours and its cost
items. Shared by all searches of the problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np

from shardlib.compact import compact
from shardlib.cost.activations import remat_rows, rewritten
from shardlib.cost.experts import TokenExchange, expert_colour, with_local_routing
from shardlib.cost.facts import CompilerTraits, Facts, Phase, phases, traits
from shardlib.cost.framework import ANY_PLAN, XLA, Abilities, Framework, FrameworkProfile
from shardlib.cost.items import fused_parameters, reorder_items, work_items
from shardlib.cost.memory import Peaks, parameter_segments, peaks, stored_items
from shardlib.cost.stages import ModelFacts
from shardlib.cost.tables import (
    ROWS,
    ItemEntries,
    Joined,
    MeasureIndex,
    MeasureValues,
    Tally,
    TallyEntries,
    tallied,
)
from shardlib.cost.terms import Item
from shardlib.decisions.table import Dtypes
from shardlib.graph import ITEMSIZE, Parameter, Problem, StepGraph, forward_pass
from shardlib.layout import LogicalAxes
from shardlib.planner.parts import with_dtypes
from shardlib.propagation.colours import Choice, Colouring, colour, stack_dims

# --------------------------------------------------------------------------------------------------
# Limits of a model, whatever is pinned.

#: Most colours of which all subsets are tried for the tensor axis: those with the most FLOPs.
MAX_TENSOR_COLOURS = 6
#: Most microbatches that are tried.
MAX_MICROBATCHES = 256


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """Limits of a model, and of the framework that runs it, other than its colours.

    Attributes:
        batch: examples per batch.
        sequence: positions; 1 without a sequence.
        mixes: True if positions see each other, so that a context axis is more than a batch axis.
        layers: layers of the largest group; 0 without layers.
        experts: number of experts; 1 without.
        splits: True if microbatches give the same numbers as the whole batch.
        staged: True if microbatches can go through pipeline stages.
        pipelines: True for meshes with stages alone, False for those without, None for both.
        groups: number of layer groups.
        abilities: abilities of the framework that runs the model.
    """

    batch: int
    sequence: int
    layers: int
    experts: int
    mixes: bool = True
    splits: bool = True
    staged: bool = True
    pipelines: bool | None = None
    groups: int = 1
    abilities: Abilities = ANY_PLAN


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


def mixes_positions(problem: Problem, colouring: Colouring) -> bool:
    """Whether a position of the sequence sees others in the loss: attention, convolutions, shifts,
    sums over positions that go back to them. A mean over all positions does not count.
    """
    name, summed = colouring.sequence_colour, set[int]()
    for op in problem.forward.ops:
        sides = (*op.rule.operands, *op.rule.results)
        along = {
            op.rule.major(dim)
            for value, dims in zip((*op.operands, *op.results), sides, strict=True)
            for axis, dim in zip(colouring.forward[value], dims, strict=True)
            if axis == name
        }
        after = any(name in colouring.forward[value] for value in op.results)
        if len(along) > 1 or along & {None, *op.rule.whole} or (after and summed & {*op.operands}):
            return True
        if not after and (along or summed & {*op.operands}):
            summed |= {*op.results}
    return False


def _sizes(problem: Problem, colouring: Colouring, name: str | None) -> list[int]:
    """Sizes of the dims of the batch arrays that have a colour, and of the parts that have it."""
    if not name:
        return []
    colour, axes = colouring.colours[name], colouring.batch
    shapes = {path: shape for path, shape, _, _ in problem.batch}
    return [
        size if axes[path][dim] is None else shapes[path][dim]
        for (path, dim), size in zip(colour.inputs, colour.sizes, strict=True)
        if path in shapes
    ]


def sequences_text(problem: Problem, colouring: Colouring, parts: str) -> str:
    """The part of a message that gives a model's sequence lengths, which `parts` do not divide, or
    the reason why there is no sequence to shard.
    """
    name = colouring.named_sequence
    if name is None:
        return "has no sequence"
    if colouring.colours[name].iterated:
        return "processes its sequence in a loop, one position after the other"
    lengths = set(_sizes(problem, colouring, name))
    listed = " and ".join(map(str, sorted(lengths)))
    all_of = "all of " if len(lengths) > 1 else ""
    return f"has sequences of {listed}, {all_of}which {parts} not divide"


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


def framework_colours(colouring: Colouring, expert: str | None) -> tuple[str, ...]:
    """Colours that frameworks shard over tensor: one dim of every parameter, the one with the most
    FLOPs and the outer one of two that always come together (heads, and not their width); of
    experts all but their number.
    """
    shardable = {colour.name: colour for colour in colouring.shardable if colour.name != expert}
    held = [[name for name in dims if name in shardable] for dims in colouring.parameters.values()]
    outer = {name for names in held for name in names[:1]}
    chosen: set[str] = set()
    for name in sorted(
        outer, key=lambda name: (-shardable[name].flops, -shardable[name].divisor, name)
    ):
        if not any(name in names and chosen & {*names} for names in held):
            chosen.add(name)
    return most_specific_first(chosen, colouring)


def most_specific_first(names: Iterable[str], colouring: Colouring) -> tuple[str, ...]:
    """Colours in the order of their priority for the tensor axis."""
    return tuple(sorted(names, key=lambda name: (colouring.colours[name].matmuls, name)))


# --------------------------------------------------------------------------------------------------
# Programs of a model: every way to run its step, as cost items.

#: Most layer groups that may follow different remat policies; with more, all follow one.
MAX_POLICY_GROUPS = 3


@dataclass(frozen=True, kw_only=True)
class CostProgram:
    """One way to run a step, as cost items.

    Attributes:
        step: the step graph as the framework runs it.
        peak_choices: choices under which memory may peak.
        can_mix_remat: True if layer groups can follow different remat policies.
        work: items of computation and communication.
    """

    facts: Facts
    step: StepGraph
    peak_choices: tuple[Choice, ...]
    profile: FrameworkProfile
    can_mix_remat: bool
    work: list[Item]

    @cached_property
    def _peaks(self) -> Peaks:
        return peaks(
            self.facts, self.step, self.peak_choices, self.profile, with_phases=self.can_mix_remat
        )

    @property
    def points(self) -> tuple[list[Item], ...]:
        """Memory items by the point where memory may peak."""
        return self._peaks.points

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Memory by phase of the step, where layer groups can follow different policies."""
        return self._peaks.phases

    @property
    def phase_segments(self) -> tuple[int, ...]:
        """The segment of every phase."""
        phase_list = phases(self.facts.graph, self.facts.layers) if self.can_mix_remat else ()
        return tuple(span.segment for span in phase_list)

    @cached_property
    def forward(self) -> list[Item]:
        """Work items of the forward pass alone."""
        return work_items(self.facts.for_graph(forward_pass(self.facts.graph, saves=True)))


def cost_program(
    problem: Problem,
    colouring: Colouring,
    step: StepGraph,
    colours: tuple[LogicalAxes, ...],
    stack_dims: frozenset[tuple[str, int]],
    profile: FrameworkProfile,
    vendor: str,
    *,
    routes: bool,
) -> CostProgram:
    """One way to run a step, as cost items.

    Args:
        step, colours: as the framework runs it, with tokens not yet routed.
    """
    if routes:
        step, colours = with_local_routing(step, colours, colouring.batch_colour)
        if profile.routed_saves == "rows":
            step, colours = remat_rows(step, colours)
    facts = Facts(
        step,
        colours,
        stack_dims,
        _traits(vendor, profile),
        batch=(colouring.batch_colour, batch_size(problem, colouring)),
        sequence=(colouring.sequence_colour, sequence_size(problem, colouring)),
        routes=routes,
        token_exchange=TokenExchange(padding=profile.exchange_room, sent=profile.exchange),
    )
    can_mix_remat = (
        1 < len(facts.layers.layer_counts) <= MAX_POLICY_GROUPS
        and len(problem.steps) > 1
        and "none" in problem.steps
    )
    return CostProgram(
        facts=facts,
        step=step,
        peak_choices=tuple(
            _peak_choices(colouring, expert_colour(facts.graph, colours) if routes else None)
        ),
        profile=profile,
        can_mix_remat=can_mix_remat,
        work=[*work_items(facts), *reorder_items(facts, fused_parameters(problem))],
    )


def _traits(vendor: str, profile: FrameworkProfile) -> CompilerTraits:
    """The traits of the compiler under a framework profile."""
    own = traits(vendor)
    merges = own.merges_gathers or profile.gathered_inputs == "shared"
    return replace(own, merges_gathers=merges)


def _peak_choices(colouring: Colouring, expert: str | None) -> list[Choice]:
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
            Choice(batch=batch, tensor=names, sequence=sharded_sequence)
            for names in (tensor, narrow)
            for sharded_sequence in (None, sequence)
        ),
    ]


# --------------------------------------------------------------------------------------------------
# Remat policies of a plan, the same for all layers or by layer group.


def names_of_groups(parameters: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Names of layer groups: the common prefix of the paths of their parameters, or "layers" with
    the index of the group.

    >>> names_of_groups([["encoder.layers.up", "encoder.layers.down"], ["decoder.layers.up"]])
    ('encoder.layers', 'decoder.layers')
    >>> names_of_groups([["a", "b"]])
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
# Costs of a program under every choice of colours, before degrees and links are known.
#
# Items that depend on the same colours form a group. Colours that no op ties together are
# independent: the cost of sharding one does not depend on whether another is sharded. So the
# colours fall into *components*, every group belongs to one of them or to none, and the tally of a
# choice is a sum over components, each of which has few ways to be sharded. Hence, exactly:
#
# - the minimum cost of a choice is the sum of the minimum costs of the components;
# - the tallies of all choices are sums of the few tallies of components, which do not depend on
#   degrees either: they are computed once per model (`shardlib.cost.tables`).

Array = np.ndarray
#: A component, and a choice whose tensor colours are those of the component.
Key = tuple[tuple[str, ...], Choice]
#: (remat policy, True where tokens are routed) of a program.
ProgramKey = tuple[str, bool]


class ItemGroup:
    """Items that depend on the same colours of a choice, with the rows of the tally to which they
    add.
    """

    def __init__(self, colours: frozenset[str], item_entries: ItemEntries) -> None:
        self.colours = colours
        self.items: list[tuple[int, int]] = []
        self._item_entries = item_entries
        self._entries: dict[Choice, TallyEntries] = {}

    def entries(self, choice: Choice) -> TallyEntries:
        """The entries of all items under a choice."""
        key = choice.restrict(self.colours)
        if key not in self._entries:
            self._entries[key] = self._item_entries.entries(key, self.items)
        return self._entries[key]


def grouped(
    lists: Sequence[Iterable[Item]], relevant: frozenset[str], item_entries: ItemEntries
) -> tuple[ItemGroup, ...]:
    """Items grouped by the relevant colours on which they depend; the segments of each list follow
    those of the list before.
    """
    groups: dict[frozenset[str], ItemGroup] = {}
    for number, items in enumerate(lists):
        for item in items:
            colours = item.colours & relevant
            if colours not in groups:
                groups[colours] = ItemGroup(colours, item_entries)
            groups[colours].items.append(
                (number * item_entries.segments, item_entries.index_of(item))
            )
    return tuple(groups.values())


def connected_components(
    groups: Iterable[frozenset[str]], colours: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Connected components of the colours that groups tie together; each in the order of `colours`,
    and those that can be sharded in the fewest ways first.
    """
    tied_sets: list[set[str]] = [{name} for name in colours]
    for group in groups:
        tied = [tied_set for tied_set in tied_sets if tied_set & group]
        if len(tied) > 1:
            tied_sets = [other for other in tied_sets if other not in tied] + [
                set[str]().union(*tied)
            ]
    return tuple(
        sorted(
            (tuple(name for name in colours if name in tied_set) for tied_set in tied_sets),
            key=lambda tied_set: (len(tied_set), colours.index(tied_set[0])),
        )
    )


@dataclass(kw_only=True)
class ItemTallies:
    """The tallies of some lists of items under every choice.

    Attributes:
        segments: number of segments of each list.
        components: components of the colours; `()` stands for items that depend on no colour that
            the tensor axis could shard.
    """

    lists: int
    segments: int
    groups: tuple[ItemGroup, ...]
    components: tuple[tuple[str, ...], ...]
    _cache: dict[Key, Tally] = field(default_factory=dict[Key, Tally], init=False, repr=False)
    _by_request: dict[Key, Tally] = field(default_factory=dict[Key, Tally], init=False, repr=False)

    def of(self, component: tuple[str, ...], choice: Choice) -> Tally:
        """The tally of a component under a choice; choices that shard the component alike share
        it.
        """
        request = component, choice
        if request not in self._by_request:
            key = (
                component,
                replace(choice, tensor=tuple(name for name in choice.tensor if name in component)),
            )
            if key not in self._cache:
                shardable = {name for names in self.components for name in names}
                own = set(component)
                groups = (
                    group
                    for group in self.groups
                    if (group.colours & own if own else not group.colours & shardable)
                )
                self._cache[key] = tallied(group.entries(choice) for group in groups)
            self._by_request[request] = self._cache[key]
        return self._by_request[request]

    def evaluated(self, values: MeasureValues, index: Array) -> EvaluatedTallies:
        """The tallies on some degrees."""
        return EvaluatedTallies(tallies=self, values=values, index=index)


@dataclass(kw_only=True)
class EvaluatedTallies:
    """Tallies on the degrees of `values` at `index`; components are evaluated once."""

    tallies: ItemTallies
    values: MeasureValues
    index: Array
    _cache: dict[int, Array] = field(default_factory=dict[int, Array], init=False, repr=False)

    def total(self, choice: Choice) -> Array:
        """Quantities under a choice: array [lists, segments, rows, degrees]."""
        return self.columns([(choice, np.arange(len(self.index)))])

    def columns(self, choices: Sequence[tuple[Choice, Array]]) -> Array:
        """Quantities under choices, each at some positions of `index`, concatenated: array
        [lists, segments, rows, columns].
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
            for component in ((), *tallies.components):
                tally = tallies.of(component, choice)
                if id(tally) not in self._cache:
                    self._cache[id(tally)] = tally.evaluated(self.values, self.index)
                quantities[tally.rows, columns] += self._cache[id(tally)][:, positions]
        return quantities.reshape(tallies.lists, tallies.segments, ROWS, -1)


class Programs:
    """The tallies of programs that differ in their remat policy alone, with common components.

    Attributes:
        tallies: by remat policy; for stored arrays, one that has no policy.
    """

    def __init__(self, tallies: Mapping[str, ItemTallies]) -> None:
        self.tallies = tallies
        self.components = next(iter(tallies.values())).components
        self._joined: dict[tuple[tuple[str, ...], tuple[Choice, ...]], dict[Hashable, Joined]] = {}

    def of(self, component: tuple[str, ...], options: tuple[Choice, ...]) -> ComponentTallies:
        """The tallies of a component under some choices, policy by policy."""
        return ComponentTallies(
            tallies=[
                [tallies.of(component, option) for option in options]
                for tallies in self.tallies.values()
            ],
            cache=self._joined.setdefault((component, options), {}),
        )


@dataclass(frozen=True, kw_only=True)
class ComponentTallies:
    """The tallies of a component under some choices.

    Attributes:
        tallies: by remat policy and choice.
        cache: what was joined, by its key.
    """

    tallies: list[list[Tally]]
    cache: dict[Hashable, Joined]

    def __len__(self) -> int:
        return sum(map(len, self.tallies))

    def joined(self, width: int, key: Hashable, derived: Callable[[int, Tally], Tally]) -> Joined:
        """What is derived from the tallies, joined; cached by the key.

        Args:
            derived: (index of the policy, tally) -> a tally of at most `width` rows.
        """
        if key not in self.cache:
            self.cache[key] = Joined(
                [
                    derived(number, tally)
                    for number, row in enumerate(self.tallies)
                    for tally in row
                ],
                width,
            )
        return self.cache[key]


class ModelTallies:
    """The tallies of a model where the tensor axis may shard some colours, computed lazily."""

    def __init__(self, source: TallyCache, shardable: tuple[str, ...]) -> None:
        self._source, self._shardable = source, shardable
        self._programs: dict[Hashable, Programs] = {}

    @cached_property
    def stored(self) -> Programs:
        """Stored arrays."""
        return self._source.programs({"": [self._source.stored]}, self._shardable)

    def work(self, policies: tuple[str, ...], *, routes: bool) -> Programs:
        """Computation and communication, by remat policy.

        Args:
            routes: True where tokens are routed.
        """
        key = "work", policies, routes
        if key not in self._programs:
            lists = {policy: [self._source.work[policy, routes]] for policy in policies}
            self._programs[key] = self._source.programs(lists, self._shardable)
        return self._programs[key]

    def points(self, policies: tuple[str, ...], *, routes: bool) -> Programs:
        """Memory of the same programs, one list per point where it may peak."""
        key = "points", policies, routes
        if key not in self._programs:
            lists = {policy: self._source.points((policy, routes)) for policy in policies}
            self._programs[key] = self._source.programs(lists, self._shardable)
        return self._programs[key]


class TallyCache:
    """The tallies of a model, computed lazily.

    Args:
        work: work items by (remat policy, True where tokens are routed).
        points: returns the memory items of each point of a program.
        stored: items of stored parameters.
        groups: number of layer groups.
        other_colours: colours other than those of a choice's tensor axis on which items may depend.
        sibling: a cache whose measures, and whose groups of the same lists of items, are shared.
    """

    def __init__(
        self,
        work: dict[ProgramKey, list[Item]],
        points: Callable[[ProgramKey], Sequence[list[Item]]],
        stored: list[Item],
        groups: int,
        profile: FrameworkProfile,
        other_colours: frozenset[str],
        sibling: TallyCache | None = None,
    ) -> None:
        self.work, self.points, self.stored = work, points, stored
        self._segments, self._other_colours = groups + 2, other_colours
        self._item_entries = (
            ItemEntries(MeasureIndex(), profile, groups + 2)
            if sibling is None
            else sibling._item_entries
        )
        self._groups: dict[
            tuple[frozenset[str], tuple[int, ...]],
            tuple[Sequence[list[Item]], tuple[ItemGroup, ...]],
        ] = {} if sibling is None else sibling._groups
        self._cache: dict[tuple[str, ...], ModelTallies] = {}

    @property
    def index(self) -> MeasureIndex:
        """The measures."""
        return self._item_entries.index

    def unsharded(self, key: ProgramKey | None) -> ItemTallies:
        """The tallies without tensor sharding of a program's work, or of stored arrays.

        Args:
            key: (remat policy, True where tokens are routed); None for stored arrays.
        """
        items = self.stored if key is None else self.work[key]
        groups = self._grouped([items], self._other_colours)
        return ItemTallies(lists=1, segments=self._segments, groups=groups, components=())

    def of_items(self, items: list[Item], choice: Choice) -> Tally:
        """The tally of some items under a choice."""
        colours = frozenset[str]().union(*(item.colours for item in items))
        return tallied(group.entries(choice) for group in self._grouped([items], colours))

    def of_shardable(self, shardable: tuple[str, ...]) -> ModelTallies:
        """The tallies where the tensor axis may shard the given colours."""
        if shardable not in self._cache:
            self._cache[shardable] = ModelTallies(self, shardable)
        return self._cache[shardable]

    def programs(
        self, lists: Mapping[str, Sequence[list[Item]]], shardable: tuple[str, ...]
    ) -> Programs:
        """The tallies of lists of items by remat policy, where tensor may shard some colours."""
        relevant = self._other_colours | set(shardable)
        groups = {policy: self._grouped(items, relevant) for policy, items in lists.items()}
        components = connected_components(
            (group.colours for listed in groups.values() for group in listed), shardable
        )
        return Programs(
            {
                policy: ItemTallies(
                    lists=len(items),
                    segments=self._segments,
                    groups=groups[policy],
                    components=components,
                )
                for policy, items in lists.items()
            }
        )

    def _grouped(
        self, lists: Sequence[list[Item]], relevant: frozenset[str]
    ) -> tuple[ItemGroup, ...]:
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
        stack_dims: (path, dim) of parameter dims that count layers.
        expert: colour of experts to which tokens can be routed; None without.
        programs: by (remat policy, True where tokens are routed).
        stored: items of stored parameters.
        model: facts of the model that prices read.
        framework: the framework of the profile, with its abilities; None for programs of shardlib.
        sibling: the same problem under a profile with another attention kernel, whose tallies are
            shared.
    """

    problem: Problem
    vendor: str
    colouring: Colouring
    stack_dims: frozenset[tuple[str, int]]
    expert: str | None
    programs: Mapping[ProgramKey, CostProgram]
    stored: list[Item]
    model: ModelFacts
    profile: FrameworkProfile = XLA
    framework: Framework | None = None
    sibling: Workload | None = None

    __repr__ = compact

    @cached_property
    def tallies(self) -> TallyCache:
        """The tallies of all programs, computed lazily and shared by all searches."""
        work = {key: program.work for key, program in self.programs.items()}
        sibling = None
        if self.sibling is not None and self.profile == replace(
            self.sibling.profile, attention=self.profile.attention, layers=self.profile.layers
        ):
            sibling = self.sibling.tallies
        groups, other_colours = len(self.layer_counts), self._other_colours
        return TallyCache(
            work,
            lambda key: self.programs[key].points,
            self.stored,
            groups,
            self.profile,
            other_colours,
            sibling,
        )

    @property
    def _other_colours(self) -> frozenset[str]:
        """Colours that axes other than tensor shard."""
        return frozenset({self.colouring.batch_colour or "", self.colouring.sequence_colour or ""})

    @cached_property
    def phase_tallies(self) -> TallyCache:
        """The tallies of every program's phases: for each phase what is saved, then its points.
        Its measures are in the index of `tallies`.
        """
        return self._of(
            lambda program: [
                items for phase in program.phases for items in (phase.stacks, *phase.points)
            ]
        )

    @cached_property
    def stack_tallies(self) -> TallyCache:
        """The tallies of the activations that every program's loops over layers have saved at the
        end of the forward pass. Its measures are in the index of `tallies`.
        """
        return self._of(lambda program: [program.phases[0].stacks])

    def _of(self, points: Callable[[CostProgram], Sequence[list[Item]]]) -> TallyCache:
        groups, other_colours = len(self.layer_counts), self._other_colours

        @cache
        def of(key: ProgramKey) -> Sequence[list[Item]]:
            return points(self.programs[key])

        return TallyCache(
            {},
            of,
            [],
            groups,
            self.profile,
            other_colours,
            self.tallies,
        )

    @cached_property
    def can_mix_remat(self) -> bool:
        """True if layer groups can follow different remat policies: there are several, and all
        programs have the same loops.
        """
        phase_segments = {program.phase_segments for program in self.programs.values()}
        return len(phase_segments) == 1 and () not in phase_segments

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        """Display names of the layer groups; see `names_of_groups`."""
        first = next(iter(self.programs.values()))
        segments = parameter_segments(first.facts)
        return names_of_groups(
            [
                [path for path, segment in segments.items() if segment == k]
                for k in range(len(self.layer_counts))
            ]
        )

    @cached_property
    def writes_layers(self) -> bool:
        """True if the model writes layers one after the other, which stages run as a loop: then
        they save more (`FrameworkProfile.layers`).
        """
        step = self.problem.steps.get("none")
        return (
            self.profile.layers == "written"
            and step is not None
            and any(dim.stacked for dim in step.inputs)
        )

    def variant(
        self, dtypes: Dtypes, attention: str = "traced", *, staged: bool | None = None
    ) -> Workload:
        """The same model in other dtypes (`shardlib.planner.parts`), with another attention kernel
        or in stages; cached.
        """
        layers = "looped" if staged and self.writes_layers else self.profile.layers
        kind = (
            "traced"
            if attention == "traced" or self.profile.attention != "traced"
            else "blocks"
            if attention == "blocks"
            else "fused"
        )
        if (dtypes, kind, layers) not in self._variants:
            problem, profile = with_dtypes(dtypes, self.problem, self.profile)
            changed = replace(profile, layers=layers)
            if kind != "traced":
                changed = replace(changed, attention=kind)
            other_kernel = "fused" if kind == "blocks" else "blocks"
            prepared_other = self._variants.get((dtypes, other_kernel, layers))
            if changed == self.profile and not dtypes:
                other = self
            elif kind != "traced" and prepared_other is not None:
                other = prepared_other.with_attention(kind)
            else:
                sibling = None if dtypes else self
                other = prepare(problem, self.vendor, changed, self.framework, sibling)
            self._variants[dtypes, kind, layers] = other
        return self._variants[dtypes, kind, layers]

    def with_attention(self, kind: str) -> Workload:
        """The same model with another attention kernel, which changes its memory alone."""
        profile = replace(self.profile, attention=kind)
        programs = {
            key: replace(program, profile=profile) for key, program in self.programs.items()
        }
        return replace(self, profile=profile, programs=programs, sibling=self)

    @cached_property
    def _variants(self) -> dict[tuple[Dtypes, str, str], Workload]:
        return {}

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Number of layers of each group."""
        return self.model.layer_counts


def prepare(
    problem: Problem,
    vendor: str = "nvidia",
    profile: FrameworkProfile = XLA,
    framework: Framework | None = None,
    sibling: Workload | None = None,
) -> Workload:
    """Colours a problem and splits its cost into items.

    Args:
        framework: the framework of the profile; None for programs of shardlib.
    """
    colouring = colour(problem) if sibling is None else sibling.colouring
    stacked = frozenset(stack_dims(problem)) if sibling is None else sibling.stack_dims
    first = next(iter(problem.steps))
    expert = expert_colour(problem.steps[first].graph, colouring.steps[first])
    programs = dict[ProgramKey, CostProgram]()
    for policy, traced in problem.steps.items():
        step, colours = rewritten(
            traced,
            colouring.steps[policy],
            profile,
            policy=policy,
            fuses_operands=traits(vendor).fuses_operands,
        )
        for routes in (False, True) if expert else (False,):
            programs[policy, routes] = cost_program(
                problem, colouring, step, colours, stacked, profile, vendor, routes=routes
            )
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
        stack_dims=stacked,
        expert=expert,
        programs=programs,
        stored=stored_items(problem.parameters, colouring.parameters, stacked, segments),
        profile=profile,
        framework=framework,
        sibling=sibling,
        model=ModelFacts(
            layer_counts=facts.layers.layer_counts,
            batch_bytes=batch_bytes,
            state_bytes=problem.state_bytes,
            largest_outside_share=_largest_share(
                parameter for parameter in problem.parameters if parameter.path not in segments
            ),
            largest_share=_largest_share(p for p in problem.parameters if p.role == "trained"),
            reduction_dtype_ratio=_reduction(profile, problem),
            compute_dtype_ratio=_compute_dtype_ratio(problem),
            head_work=_head_work(facts),
            updates=problem.updates if profile.name == XLA.name else (),
            stacked_in_steps=profile.name == XLA.name
            and any(dim.stacked for dim in problem.steps[first].inputs),
        ),
    )


def _largest_share(parameters: Iterable[Parameter]) -> float:
    """The largest share of one array in parameters: of those outside the layers about 1/2 with an
    embedding and a head, 1 where one array is both.
    """
    sizes = [float(math.prod(parameter.shape)) for parameter in parameters]
    return max(sizes) / sum(sizes) if sizes else 1.0


def _compute_dtype_ratio(problem: Problem) -> float:
    """Ratio of the bytes of parameters in the compute dtype to their bytes as stored."""
    elements = [float(math.prod(parameter.shape)) for parameter in problem.parameters]
    stored_bytes = sum(
        size * ITEMSIZE[parameter.dtype]
        for size, parameter in zip(elements, problem.parameters, strict=True)
    )
    return sum(elements) * ITEMSIZE[problem.compute_dtype] / stored_bytes if stored_bytes else 1.0


def _head_work(facts: Facts) -> float:
    """FLOPs of the weight matmuls outside the layers, over those of a mean layer."""
    flops = [0.0, 0.0]
    for op in facts.graph.ops:
        if op.category == "matmul" and (
            facts.weights.keys() & set(op.operands) or facts.gradients & set(op.results)
        ):
            inside = facts.layers.segment(op.region) >= 0
            flops[inside] += op.flops * facts.graph.trips(op.region)
    return flops[0] * sum(facts.layers.layer_counts) / flops[1] if flops[1] else 0.0


def _reduction(profile: FrameworkProfile, problem: Problem) -> float:
    """Ratio of the bytes of a gradient in communication under a profile to those in the compute
    dtype.
    """
    return (
        ITEMSIZE[profile.reduction_dtype] / ITEMSIZE[problem.compute_dtype]
        if profile.reduction_dtype
        else 1.0
    )
