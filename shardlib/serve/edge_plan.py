"""Plans for inference over a chain of unlike devices: the model as a chain, its cuts, and the
device of each run of pieces.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from shardlib.cost.facts import Facts, leaves_loop, live_spans, traits
from shardlib.cost.items import kernel_items
from shardlib.cost.roofline import efficiency_of, kernel_seconds
from shardlib.cost.terms import OUTSIDE_LAYERS, Amount, Compute
from shardlib.errors import InfeasibleError, TracingError
from shardlib.graph import Op, Problem, forward_pass
from shardlib.machines.topology import Device, cluster
from shardlib.propagation.colours import Choice
from shardlib.report.elements import aligned, bytes_text, count_text, percent_text, seconds_text
from shardlib.untrusted.data import JsonObject

# --------------------------------------------------------------------------------------------------
# A model's forward pass as a chain of pieces that devices can take runs of.
#
# The pieces are what comes before the layers, every layer, what comes between layer groups, and
# what comes after them, in the order of the program. Each has kernels, weights, values that it
# works on, and what has to be handed on for the pieces after it: the residual stream, and whatever
# else they read that is made of the batch.

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class PieceGroup:
    """A run of equal pieces.

    Attributes:
        name: "before the layers", "layer", "between layers", "after the layers".
        count: how many.
        layers: layer group; `OUTSIDE_LAYERS` outside of them.
        first, last: its ops.
        kernels: of one piece.
        weights: bytes of parameters that one piece has for itself.
        shared: parameters that it reads and that others may read, too, by value in the graph.
        working: most bytes of values alive at once, weights left out.
        inner: bytes handed on between two of its pieces.
        outer: bytes handed on after its last piece.
    """

    name: str
    count: int
    layers: int
    first: int
    last: int
    kernels: tuple[Compute, ...] = ()
    weights: float = 0.0
    shared: frozenset[int] = frozenset()
    working: float = 0.0
    inner: float = 0.0
    outer: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The forward pass of a model as a chain.

    Attributes:
        groups: runs of equal pieces, in order.
        sizes: bytes of the parameters in `PieceGroup.shared`, by value.
    """

    groups: tuple[PieceGroup, ...]
    sizes: dict[int, float]

    @property
    def names(self) -> tuple[str, ...]:
        """Every piece by name, layers with their number."""
        return tuple(
            f"{group.name} {i}" if group.layers >= 0 else group.name
            for number, group in enumerate(self.groups)
            for i in range(self._layers_before(number), self._layers_before(number) + group.count)
        )

    def _layers_before(self, number: int) -> int:
        return sum(group.count for group in self.groups[:number] if group.layers >= 0)

    def each(self, amounts: list[float]) -> Array:
        """An amount of each group's pieces as an array over all pieces."""
        return np.repeat(np.array(amounts, dtype=float), [group.count for group in self.groups])

    def handed(self) -> Array:
        """Bytes that cross the cut before each piece, and after the last, array [pieces + 1]: 0 at
        both ends.
        """
        handed_bytes = [
            size
            for group in self.groups
            for size in (*[group.inner] * (group.count - 1), group.outer)
        ]
        return np.array([0.0, *handed_bytes[:-1], 0.0])

    def bytes(self) -> Array:
        """Bytes that a device needs for pieces [i, j): weights, the largest working set, and what
        comes in and goes out; array [pieces + 1, pieces + 1], infinite where i >= j.
        """
        pieces, handed = sum(group.count for group in self.groups), self.handed()
        weights = np.concatenate(
            ([0.0], np.cumsum(self.each([group.weights for group in self.groups])))
        )
        needed = weights[None, :] - weights[:, None] + handed[:, None] + handed[None, :]
        for value, size in self.sizes.items():
            reads = np.concatenate(
                (
                    [0.0],
                    np.cumsum(self.each([float(value in group.shared) for group in self.groups])),
                )
            )
            needed = needed + size * (reads[None, :] > reads[:, None])
        working = self.each([group.working for group in self.groups])
        for i in range(pieces):
            needed[i, i + 1 :] += np.maximum.accumulate(working[i:])
        return np.where(
            np.arange(pieces + 1)[:, None] < np.arange(pieces + 1)[None, :], needed, np.inf
        )

    def seconds(self, device: Device) -> Array:
        """Seconds of each piece on a device."""
        chip = device.chip
        constants = efficiency_of(chip.name, chip.vendor, "xla", dict(device.efficiency))

        def local(amount: Amount) -> Array:
            return np.array([amount.total])

        piece_seconds = [
            sum(
                float(kernel_seconds(kernel, local, chip, constants)[0]) * kernel.trips
                for kernel in group.kernels
            )
            for group in self.groups
        ]
        if device.layer_seconds is not None:
            longest = max(
                (k for k, group in enumerate(self.groups) if group.layers >= 0),
                key=lambda k: self.groups[k].count,
            )
            piece_seconds = [
                seconds * device.layer_seconds / piece_seconds[longest] for seconds in piece_seconds
            ]
        return self.each(piece_seconds)


# --------------------------------------------------------------------------------------------------
# The best runs: for each of some unlike devices a run of the chain, in an order in which the
# slowest is as fast as can be.
#
# The dynamic program of EdgePipe (arXiv:2110.14895, section IV), exact over all cuts, orders and
# subsets of devices. Equal devices are counted, not told apart: a state is how many pieces of the
# chain are done, how many devices of each type are used, and the type of the last one. With `b`
# the best slowest time of a state,
#
#     b(j, used + v, v) = min over i, u of
#                         max(b(i, used, u), message from u to v at i, pieces i..j on v)
#
# since no device waits for another but for the slowest, computation and messages being beside each
# other. Among all cuts that are as fast the one with the least time from end to end is taken: the
# same program with sums, over runs and messages that are no slower than the slowest.

#: Times that differ by less than this are equal.
_SAME = 1e-12


@dataclass(frozen=True, kw_only=True)
class Run:
    """The pieces that one device takes.

    Attributes:
        device: number of its type.
        first, stop: pieces [first, stop).
    """

    device: int
    first: int
    stop: int


def best_runs(compute: Array, messages: Array, counts: Sequence[int]) -> tuple[Run, ...] | None:
    """The runs of the best cut, in order; None where no cut is allowed.

    Args:
        compute: seconds of pieces [i, j) on a device of type v, array [types, pieces + 1, pieces +
            1]; infinite where that is not allowed.
        messages: seconds of what crosses the cut before piece i from type u to type v, array
            [types, types, pieces + 1].
    """
    slowest, _ = _program(compute, messages, counts, np.maximum)
    if not np.isfinite(slowest):
        return None
    limit = slowest * (1 + _SAME)
    _, runs = _program(
        np.where(compute <= limit, compute, np.inf),
        np.where(messages <= limit, messages, np.inf),
        counts,
        np.add,
    )
    return runs


def furthest(allowed: Array, counts: Sequence[int]) -> int:
    """The largest number of pieces, from the front, that the devices can take.

    Args:
        allowed: whether a device of type v can take the pieces [i, j), array [types, pieces + 1,
            pieces + 1].
    """
    start = np.zeros(allowed.shape[1], dtype=bool)
    start[0] = True
    reach = {(0,) * len(counts): start}
    for used in _uses(counts):
        reach[used] = np.logical_or.reduce(
            [allowed[v][reach[_less(used, v)]].any(axis=0) for v in range(len(counts)) if used[v]]
        )
    return max(int(np.flatnonzero(reached)[-1]) for reached in reach.values() if reached.any())


def _program(
    compute: Array, messages: Array, counts: Sequence[int], join: Callable[[Array, Array], Array]
) -> tuple[float, tuple[Run, ...]]:
    """The lowest value of all cuts, to which `join` adds each run, and the runs of that cut."""
    types, size = compute.shape[:2]
    start = np.full((types, size), np.inf)
    values: dict[tuple[int, ...], Array] = {(0,) * types: start}
    origins: dict[
        tuple[int, ...], Array
    ] = {}  # [types, pieces + 1, (first piece of the last run, type before it)]
    best, end = np.inf, None
    for used in _uses(counts):
        values_here, origin = (
            np.full((types, size), np.inf),
            np.zeros((types, size, 2), dtype=np.int64),
        )
        for v in range(types):
            if not used[v]:
                continue
            before = _less(used, v)
            if any(before):
                reached = join(values[before], messages[:, v])
                from_type = np.argmin(reached, axis=0)
                left = reached[from_type, np.arange(size)]
            else:
                from_type, left = np.full(size, -1), np.full(size, np.inf)
                left[0] = 0.0
            totals = join(np.asarray(left)[:, None], compute[v])
            first = np.argmin(totals, axis=0)
            values_here[v] = totals[first, np.arange(size)]
            origin[v, :, 0], origin[v, :, 1] = first, from_type[first]
            if values_here[v, -1] < best * (1 - _SAME):
                best, end = float(values_here[v, -1]), (used, v)
        values[used], origins[used] = values_here, origin
    runs: list[Run] = []
    end_piece = size - 1
    while end is not None:
        used, v = end
        first, before = (int(n) for n in origins[used][v, end_piece])
        runs.append(Run(device=v, first=first, stop=end_piece))
        end_piece, end = first, (_less(used, v), before) if before >= 0 else None
    return best, tuple(reversed(runs))


def _uses(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """All numbers of devices of each type but 0 of all, fewest devices first."""
    return sorted(
        (used for used in itertools.product(*(range(count + 1) for count in counts)) if any(used)),
        key=lambda used: (sum(used), used),
    )


def _less(used: tuple[int, ...], v: int) -> tuple[int, ...]:
    return (*used[:v], used[v] - 1, *used[v + 1 :])


@dataclass(frozen=True, kw_only=True)
class EdgeStage:
    """The work of one device.

    Attributes:
        device: its name.
        first, last: numbers of its first and last piece.
        pieces: the same in words.
        seconds: of a batch on it.
        received_bytes, receive_seconds: what comes from the device before it, and how long that
            takes; 0 for the first.
        bytes: memory that it needs: weights, values, and what comes in and goes out.
        capacity_bytes: memory that it has.
    """

    device: str
    first: int
    last: int
    pieces: str
    seconds: float
    received_bytes: float
    receive_seconds: float
    bytes: float
    capacity_bytes: float


@dataclass(frozen=True, kw_only=True)
class EdgePlan:
    """A model over a chain of unlike devices.

    Attributes:
        model: its name.
        stages: what each device does, in order.
        examples: in a batch.
        idle: (device, count) of those that take no part.
        single_seconds: of a batch on the fastest device that holds the whole model; None where none
            does.
    """

    model: str
    stages: tuple[EdgeStage, ...]
    examples: int
    idle: tuple[tuple[str, int], ...] = ()
    single_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds between two batches: of the slowest device or message."""
        return max(max(stage.seconds, stage.receive_seconds) for stage in self.stages)

    @property
    def latency(self) -> float:
        """Seconds of one batch from end to end."""
        return sum(stage.seconds + stage.receive_seconds for stage in self.stages)

    @property
    def throughput(self) -> float:
        """Examples a second."""
        return self.examples / self.seconds

    @property
    def bottleneck(self) -> str:
        """The slowest device or message, in words."""
        number = max(
            range(len(self.stages)),
            key=lambda k: max(self.stages[k].seconds, self.stages[k].receive_seconds),
        )
        stage = self.stages[number]
        return (
            f"the message from stage {number - 1} to stage {number}"
            if stage.receive_seconds > stage.seconds
            else f"stage {number} on {stage.device}"
        )

    def explain(self) -> str:
        """The plan as text for people."""
        rows = [["stage", "device", "pieces", "a batch", "busy", "received in", "memory", "of"]]
        rows += [
            [
                str(k),
                stage.device,
                stage.pieces,
                seconds_text(stage.seconds),
                percent_text(stage.seconds / self.seconds),
                seconds_text(stage.receive_seconds) if k else "",
                bytes_text(stage.bytes),
                bytes_text(stage.capacity_bytes),
            ]
            for k, stage in enumerate(self.stages)
        ]
        lines = [
            (
                f"{self.model} on {len(self.stages)} device{'s' * (len(self.stages) > 1)}:"
                f" {count_text(self.throughput)} examples/s, a batch of {self.examples} every"
                f" {seconds_text(self.seconds)}, {seconds_text(self.latency)} from end to end"
            ),
            "",
            *aligned(rows, right={3, 4, 5, 6, 7}),
            "",
            f"{self.bottleneck.capitalize()} is the slowest.",
        ]
        if self.single_seconds is not None:
            lines.append(
                f"The best device alone takes {seconds_text(self.single_seconds)} a batch:"
                f" {self.single_seconds / self.seconds:.2f}x the throughput of that."
            )
        if self.idle:
            lines.append(
                f"Without a part: {', '.join(f'{count} {name}' for name, count in self.idle)}."
            )
        return "\n".join(lines) + "\n"

    def to_json(self) -> JsonObject:
        """The plan as plain data."""
        return {
            "model": self.model,
            "examples": self.examples,
            "seconds": self.seconds,
            "latency": self.latency,
            "throughput": self.throughput,
            "bottleneck": self.bottleneck,
            "single_seconds": self.single_seconds,
            "stages": [asdict(stage) for stage in self.stages],
            "idle": dict(self.idle),
        }


def chain_of(problem: Problem, vendor: str) -> Chain:
    """The chain of a model, with kernels as a vendor's compiler makes them."""
    step = problem.steps["none"]
    graph = forward_pass(step.graph, saves=False)
    facts = Facts(
        replace(step, graph=graph, gradients=()),
        tuple((None,) * len(value.shape) for value in graph.values),
        frozenset(),
        traits(vendor),
    )
    groups = _groups(facts)
    if not any(group.layers >= 0 for group in groups):
        raise TracingError(
            f"{problem.model} has no layers that repeat, so it is not a chain that devices could"
            " take parts of\nTry: layers of one shape, in a loop or a scan"
        )
    owner = np.full(len(graph.ops), -1)
    for number, group in enumerate(groups):
        owner[group.first : group.last + 1] = number
    kernels, shared, live = (
        _kernels(facts, groups, owner),
        _shared(facts, groups, owner),
        _live(facts),
    )
    sized_groups = tuple(
        replace(
            group,
            kernels=tuple(kernels[k]),
            weights=_sliced(facts, group),
            shared=frozenset(shared[k]),
            working=float(live[group.first : group.last + 1].max()),
            inner=_handed(facts, group, group.first) if group.layers >= 0 else 0.0,
            outer=_handed(facts, None, group.last + 1),
        )
        for k, group in enumerate(groups)
    )
    return Chain(
        groups=sized_groups,
        sizes={
            value: float(graph.values[value].bytes) for reads in shared.values() for value in reads
        },
    )


def _groups(facts: Facts) -> list[PieceGroup]:
    """The groups of a program, with their ops."""
    layers, total = facts.layers, len(facts.graph.ops)
    spans: dict[int, tuple[int, int]] = {}
    for index, op in enumerate(facts.graph.ops):
        number = layers.segment(op.region)
        if number != OUTSIDE_LAYERS:
            spans[number] = (spans.get(number, (index, index))[0], index)
    listed: list[PieceGroup] = []
    start = 0

    def outside(name: str, stop: int) -> list[PieceGroup]:
        group = PieceGroup(name=name, count=1, layers=OUTSIDE_LAYERS, first=start, last=stop - 1)
        return [group] if stop > start else []

    for number, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        listed += outside("between layers" if listed else "before the layers", first)
        count = layers.layer_counts[number]
        listed.append(PieceGroup(name="layer", count=count, layers=number, first=first, last=last))
        start = last + 1
    return [*listed, *outside("after the layers", total)]


def _kernels(facts: Facts, groups: list[PieceGroup], owner: Array) -> dict[int, list[Compute]]:
    """Kernels of one piece of each group."""
    by_group: dict[int, list[Compute]] = defaultdict(list)
    for kernel, item in zip(facts.fusion.kernels, kernel_items(facts), strict=True):
        number = int(owner[kernel.op])
        for term in item.terms(Choice()):
            assert isinstance(term, Compute)
            by_group[number].append(replace(term, trips=term.trips // groups[number].count))
    return by_group


def _sliced(facts: Facts, group: PieceGroup) -> float:
    """Bytes of parameters of which every piece of a group has a slice."""
    values = facts.graph.values
    sliced = {
        facts.weights[op.operands[0]]
        for op in facts.graph.ops[group.first : group.last + 1]
        if op.kind == "enter"
        and op.operands[0] in facts.weights
        and facts.layers.segment(op.region) == group.layers
    }
    return sum(values[value].bytes for value in sliced) / group.count if group.layers >= 0 else 0.0


def _shared(facts: Facts, groups: list[PieceGroup], owner: Array) -> dict[int, set[int]]:
    """Parameters that the pieces of a group read whole."""
    read_whole: dict[int, set[int]] = defaultdict(set)
    slices: set[int] = set()
    for index, op in enumerate(facts.graph.ops):
        if (
            op.results and op.results[0] in facts.weights
        ):  # slices, casts and views of parameters are not uses
            if op.kind == "enter" or slices.intersection(op.operands):
                slices.update(op.results)
            continue
        read_whole[int(owner[index])].update(
            facts.weights[value]
            for value in op.operands
            if value in facts.weights and value not in slices
        )
    return read_whole


def _live(facts: Facts) -> Array:
    """Live bytes at each op, without weights."""
    graph = facts.graph
    change = np.zeros(len(graph.ops) + 1)
    for value, (birth, death) in live_spans(graph, facts.fusion, frozenset(facts.weights)).items():
        change[birth] += graph.values[value].bytes
        change[death + 1] -= graph.values[value].bytes
    return np.cumsum(change)[:-1]


def _handed(facts: Facts, group: PieceGroup | None, position: int) -> float:
    """Bytes that are handed on where the program is cut: before op `position`, or, with a
    group, between two of its pieces.
    """
    graph = facts.graph
    of_batch = _of_batch(facts)

    def enters(op: Op) -> bool:
        return (
            op.kind == "carry"
            and not leaves_loop(op)
            and group is not None
            and facts.layers.segment(op.region) == group.layers
            and graph.regions[op.region].parent == 0
        )

    before = {value for op in graph.ops[:position] for value in op.results} | set(graph.inputs)
    entering = {op.operands[0] for op in graph.ops if enters(op)}
    crossing = {
        value
        for op in graph.ops[position:]
        for value in op.operands
        if value in before and value in of_batch
    } | (set(graph.outputs) & before & of_batch)
    if group is None:
        return float(sum(graph.values[value].bytes for value in crossing))
    carried = {op.results[0] for op in graph.ops if enters(op)}
    read = {value for op in graph.ops[position:] if not enters(op) for value in op.operands}
    return float(
        sum(
            graph.values[value].bytes
            for value in (carried & of_batch)
            | {value for value in crossing if value not in entering or value in read}
        )
    )


def _of_batch(facts: Facts) -> set[int]:
    """Values that depend on the batch."""
    graph = facts.graph
    dependent = set(graph.inputs_of("batch"))
    for _ in range(2):  # what goes around a loop is found the second time
        for op in graph.ops:
            if dependent.intersection(op.operands):
                dependent.update(op.results)
    return dependent


# --------------------------------------------------------------------------------------------------
# The planner of chains.
#
# For inference on what is there: a few boards, phones or cards of several generations, each with
# its own speed, memory and link (EdgePipe, arXiv:2110.14895). Devices take runs of pieces of the
# model (`shardlib.serve.edge_plan`), one after the other, and batches follow each other through
# them. The time between two batches is that of the slowest device or message, since messages go
# beside the computation; `shardlib.serve.edge_plan` finds the cut, the order and the devices for
# which that is least. Nothing else is decided here: a device computes its part alone.


@dataclass(frozen=True, kw_only=True)
class ChainCosts:
    """Costs of pieces on devices.

    Attributes:
        names: of the pieces.
        seconds: of each piece, array [devices, pieces].
        bytes: needed for pieces [i, j), array [devices, pieces + 1, pieces + 1].
        handed: bytes that cross the cut before each piece, array [pieces + 1].
    """

    names: tuple[str, ...]
    seconds: Array
    bytes: Array
    handed: Array

    def compute(self) -> Array:
        """Seconds of pieces [i, j) in any memory, array [devices, pieces + 1, pieces + 1]."""
        total = np.concatenate(
            [np.zeros((len(self.seconds), 1)), np.cumsum(self.seconds, axis=1)], axis=1
        )
        totals = total[:, None, :] - total[:, :, None]
        return np.where(np.isfinite(self.bytes), totals, np.inf)


def costs_of(problem: Problem, devices: Sequence[Device]) -> ChainCosts:
    """The costs of a model's forward pass."""
    chains: dict[str, Chain] = {}
    for device in devices:
        if device.chip.vendor not in chains:
            chains[device.chip.vendor] = chain_of(problem, device.chip.vendor)
    listed = [chains[device.chip.vendor] for device in devices]
    return ChainCosts(
        names=listed[0].names,
        seconds=np.stack(
            [chain.seconds(device) for chain, device in zip(listed, devices, strict=True)]
        ),
        bytes=np.stack([chain.bytes() for chain in listed]),
        handed=listed[0].handed(),
    )


def plan_chain(
    costs: ChainCosts, devices: Sequence[Device], *, model: str = "", examples: int = 1
) -> EdgePlan:
    """The plan with the least time between two batches, and among those the least from end to
    end.
    """
    capacity = np.array([float(device.chip.usable_bytes) for device in devices])
    counts = [device.count for device in devices]
    fits = costs.bytes <= capacity[:, None, None]
    compute = costs.compute()
    messages = np.array(
        [[[message_seconds(size, a, b) for size in costs.handed] for b in devices] for a in devices]
    )
    runs = best_runs(np.where(fits, compute, np.inf), messages, counts)
    if runs is None:
        raise _infeasible(costs, devices, capacity, counts, model)
    single = float(np.where(fits[:, 0, -1], compute[:, 0, -1], np.inf).min())
    return EdgePlan(
        model=model,
        stages=tuple(
            _stage(costs, devices, run, runs[k - 1] if k else None) for k, run in enumerate(runs)
        ),
        examples=examples,
        idle=tuple(
            (device.name, left)
            for v, device in enumerate(devices)
            if (left := device.count - sum(run.device == v for run in runs))
        ),
        single_seconds=single if np.isfinite(single) else None,
    )


def _stage(costs: ChainCosts, devices: Sequence[Device], run: Run, before: Run | None) -> EdgeStage:
    device, names = devices[run.device], costs.names[run.first : run.stop]
    size = float(costs.handed[run.first]) if before else 0.0
    return EdgeStage(
        device=device.name,
        first=run.first,
        last=run.stop - 1,
        pieces=names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
        seconds=float(costs.seconds[run.device, run.first : run.stop].sum()),
        received_bytes=size,
        receive_seconds=message_seconds(size, devices[before.device], device) if before else 0.0,
        bytes=float(costs.bytes[run.device, run.first, run.stop]),
        capacity_bytes=float(device.chip.usable_bytes),
    )


def _infeasible(
    costs: ChainCosts, devices: Sequence[Device], capacity: Array, counts: Sequence[int], model: str
) -> InfeasibleError:
    """Returns the error of lacking memory: for one piece that no device holds, or on every
    device.
    """
    lacking, pieces = costs.bytes - capacity[:, None, None], len(costs.names)
    lacking_bytes = [
        lacking[:, : k + 1, k + 1 :].min() for k in range(pieces)
    ]  # of all runs that a piece is in: a longer one may hand on less
    worst = int(np.argmax(lacking_bytes))
    if lacking_bytes[worst] > 0:
        v, i, j = (
            int(n)
            for n in np.argwhere(lacking[:, : worst + 1, worst + 1 :] == lacking_bytes[worst])[0]
        )
        return InfeasibleError(
            f"no device holds {costs.names[worst]!r} of {model}: it needs"
            f" {bytes_text(float(costs.bytes[v, i, worst + 1 + j]))} on {devices[v].name}, which"
            f" has {bytes_text(float(capacity[v]))}: {bytes_text(float(lacking_bytes[worst]))} too"
            " little\nTry: a smaller batch, or a smaller dtype",
            short_bytes=int(np.ceil(lacking_bytes[worst])),
        )
    done = furthest(lacking <= 0, counts)
    low, high = 0.0, float(lacking[np.isfinite(lacking)].max())
    while high - low > max(1.0, 1e-4 * high):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if furthest(lacking <= middle, counts) == pieces else (middle, high)
        )
    return InfeasibleError(
        f"{sum(counts)} devices hold {done} of the {pieces} pieces of {model}, up to"
        f" {costs.names[done - 1]!r}; with {bytes_text(high)} more on each they would hold"
        " all\nTry: more devices, a smaller batch, or a smaller dtype",
        short_bytes=int(np.ceil(high)),
    )


def plan_edge(problem: Problem, devices: str | Path | Sequence[Device]) -> EdgePlan:
    """Spreads the forward pass of a traced model over unlike devices.

    Args:
        problem: the model, traced for one batch as it goes through the devices.
        devices: a TOML file (`shardlib.machines.topology`), or devices.

    Raises:
        TopologyError, MissingFileError: the devices are not usable.
        TracingError: the model has no layers that repeat.
        InfeasibleError: the devices do not hold the model.
    """
    listed = cluster(devices)
    sizes = [shape[0] for _, shape, _, axes in problem.batch if axes and axes[0] == "batch"]
    return plan_chain(
        costs_of(problem, listed),
        listed,
        model=problem.model,
        examples=math.gcd(*sizes) if sizes else 1,
    )


def message_seconds(size: float, source: Device, target: Device) -> float:
    """Seconds of a message of `size` bytes from one device to another."""
    return (
        source.link_latency_s
        + target.link_latency_s
        + size / min(source.link_bytes_per_s, target.link_bytes_per_s)
    )
