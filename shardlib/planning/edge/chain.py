"""What is a model's forward pass as a chain of pieces that devices can take runs of?

The pieces are what comes before the layers, every layer, what comes between classes of layers, and
what comes after them, in the order of the program. Each has kernels, weights, values that it works
on, and what has to be handed on for the pieces after it: the residual stream, and whatever else
they read that is made of the batch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from shardlib.cost.items.kernels import kernel_items
from shardlib.cost.machine.efficiency_curves import efficiency_of
from shardlib.cost.machine.roofline import kernel_seconds
from shardlib.cost.step.fusion import traits
from shardlib.cost.step.liveness import intervals, leaves_loop
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.terms import ENDS, Amount, Compute
from shardlib.errors import TracingError
from shardlib.graph import Op
from shardlib.graph.forward import forward_pass
from shardlib.graph.problem import Problem
from shardlib.hardware.cluster import Device
from shardlib.propagation.assignment import Choice

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal pieces that follow each other.

    Attributes:
        name: "before the layers", "layer", "between layers", "after the layers".
        count: how many.
        layers: class of layers; `ENDS` outside of them.
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
        sizes: bytes of the parameters in `Group.shared`, by value.
    """

    groups: tuple[Group, ...]
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
        found = [
            size
            for group in self.groups
            for size in (*[group.inner] * (group.count - 1), group.outer)
        ]
        return np.array([0.0, *found[:-1], 0.0])

    def bytes(self) -> Array:
        """Bytes that a device needs for pieces [i, j): weights, the largest working set, and what
        comes in and goes out; array [pieces + 1, pieces + 1], infinite where i >= j.
        """
        pieces, handed = sum(group.count for group in self.groups), self.handed()
        weights = np.concatenate(
            ([0.0], np.cumsum(self.each([group.weights for group in self.groups])))
        )
        found = weights[None, :] - weights[:, None] + handed[:, None] + handed[None, :]
        for value, size in self.sizes.items():
            reads = np.concatenate(
                (
                    [0.0],
                    np.cumsum(self.each([float(value in group.shared) for group in self.groups])),
                )
            )
            found = found + size * (reads[None, :] > reads[:, None])
        working = self.each([group.working for group in self.groups])
        for i in range(pieces):
            found[i, i + 1 :] += np.maximum.accumulate(working[i:])
        return np.where(
            np.arange(pieces + 1)[:, None] < np.arange(pieces + 1)[None, :], found, np.inf
        )

    def seconds(self, device: Device) -> Array:
        """Seconds of each piece on a device."""
        chip = device.chip
        constants = efficiency_of(chip.name, chip.vendor, "xla", dict(device.efficiency))

        def local(amount: Amount) -> Array:
            return np.array([amount.total])

        found = [
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
            found = [seconds * device.layer_seconds / found[longest] for seconds in found]
        return self.each(found)


def chain_of(problem: Problem, vendor: str) -> Chain:
    """The chain of a model, with kernels as a vendor's compiler makes them.

    Raises:
        TracingError: the model has no layers that repeat.
    """
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
            f"{problem.model} has no layers that repeat, so it is no chain that devices could take"
            " parts of\nTry: layers of one shape, in a loop or a scan"
        )
    owner = np.full(len(graph.ops), -1)
    for number, group in enumerate(groups):
        owner[group.first : group.last + 1] = number
    kernels, shared, live = (
        _kernels(facts, groups, owner),
        _shared(facts, groups, owner),
        _live(facts),
    )
    made = tuple(
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
        groups=made,
        sizes={
            value: float(graph.values[value].bytes) for reads in shared.values() for value in reads
        },
    )


def _groups(facts: Facts) -> list[Group]:
    """The groups of a program, with their ops."""
    layers, total = facts.layers, len(facts.graph.ops)
    spans: dict[int, tuple[int, int]] = {}
    for index, op in enumerate(facts.graph.ops):
        number = layers.segment(op.region)
        if number != ENDS:
            spans[number] = (spans.get(number, (index, index))[0], index)
    found: list[Group] = []
    at = 0
    for number, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first > at:
            found.append(
                Group(
                    name="between layers" if found else "before the layers",
                    count=1,
                    layers=ENDS,
                    first=at,
                    last=first - 1,
                )
            )
        found.append(
            Group(name="layer", count=layers.counts[number], layers=number, first=first, last=last)
        )
        at = last + 1
    return (
        [*found, Group(name="after the layers", count=1, layers=ENDS, first=at, last=total - 1)]
        if at < total
        else found
    )


def _kernels(facts: Facts, groups: list[Group], owner: Array) -> dict[int, list[Compute]]:
    """Kernels of one piece of each group."""
    found: dict[int, list[Compute]] = defaultdict(list)
    for kernel, item in zip(facts.fusion.kernels, kernel_items(facts), strict=True):
        number = int(owner[kernel.op])
        for term in item.terms(Choice()):
            assert isinstance(term, Compute)
            found[number].append(replace(term, trips=term.trips // groups[number].count))
    return found


def _sliced(facts: Facts, group: Group) -> float:
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


def _shared(facts: Facts, groups: list[Group], owner: Array) -> dict[int, set[int]]:
    """Parameters that the pieces of a group read whole."""
    found: dict[int, set[int]] = defaultdict(set)
    slices: set[int] = set()
    for index, op in enumerate(facts.graph.ops):
        if (
            op.results and op.results[0] in facts.weights
        ):  # slices, casts and views of parameters are no uses
            if op.kind == "enter" or slices.intersection(op.operands):
                slices.update(op.results)
            continue
        found[int(owner[index])].update(
            facts.weights[value]
            for value in op.operands
            if value in facts.weights and value not in slices
        )
    return found


def _live(facts: Facts) -> Array:
    """Bytes of values alive while each op runs, weights left out."""
    graph = facts.graph
    change = np.zeros(len(graph.ops) + 1)
    for value, (birth, death) in intervals(graph, facts.fusion, frozenset(facts.weights)).items():
        change[birth] += graph.values[value].bytes
        change[death + 1] -= graph.values[value].bytes
    return np.cumsum(change)[:-1]


def _handed(facts: Facts, group: Group | None, at: int) -> float:
    """Bytes that are handed on where the program is cut: before op `at`, or, with a group, between
    two of its pieces.
    """
    graph = facts.graph
    made = _of_batch(facts)

    def enters(op: Op) -> bool:
        return (
            op.kind == "carry"
            and not leaves_loop(op)
            and group is not None
            and facts.layers.segment(op.region) == group.layers
            and graph.regions[op.region].parent == 0
        )

    before = {value for op in graph.ops[:at] for value in op.results} | set(graph.inputs)
    entering = {op.operands[0] for op in graph.ops if enters(op)}
    crossing = {
        value for op in graph.ops[at:] for value in op.operands if value in before and value in made
    } | (set(graph.outputs) & before & made)
    if group is None:
        return float(sum(graph.values[value].bytes for value in crossing))
    carried = {op.results[0] for op in graph.ops if enters(op)}
    read = {value for op in graph.ops[at:] if not enters(op) for value in op.operands}
    return float(
        sum(
            graph.values[value].bytes
            for value in (carried & made)
            | {value for value in crossing if value not in entering or value in read}
        )
    )


def _of_batch(facts: Facts) -> set[int]:
    """Values that depend on the batch."""
    graph = facts.graph
    found = set(graph.inputs_of("batch"))
    for _ in range(2):  # what goes around a loop is found the second time
        for op in graph.ops:
            if found.intersection(op.operands):
                found.update(op.results)
    return found
