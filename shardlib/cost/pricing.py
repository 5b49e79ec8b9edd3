"""What do the terms of a step cost on many meshes at once?

`Candidates` are meshes with microbatch counts, as arrays; `tally` adds up the terms of some items under one choice into an
array of quantities by candidate. Quantities of different items add up, so tables of partial sums can be combined; only
`combine`, at the very end, does anything that is not a sum (hiding communication behind compute, the largest of several
memory points).

Collective costs are linear in bytes: latency + bytes x seconds per byte (`cost/collectives.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from shardlib.axes import MeshShape
from shardlib.collective import Collective
from shardlib.cost.collectives import LinearCost, collective_cost
from shardlib.cost.corrections import applied
from shardlib.cost.efficiency import Efficiency, efficiency
from shardlib.cost.estimate import DeviceBytes, Estimate, Seconds
from shardlib.cost.roofline import kernel_seconds
from shardlib.cost.terms import Amount, Compute, Item, Resident, Rest, Transfer
from shardlib.hardware.placement import Span, gather_stages, place, scatter_stages
from shardlib.hardware.topology import Topology
from shardlib.propagation.assignment import Choice, Cut

Array = np.ndarray


class Q(IntEnum):
    """Quantities that add up over items; seconds and FLOPs per step, bytes per device."""

    COMPUTE = 0  # seconds of kernels
    TENSOR = 1  # seconds of collectives over tensor
    SUM = 2  # seconds of small reductions over data and fsdp
    GATHER = 3  # seconds of parameter gathers, if parameters are cut at rest (ZeRO 3)
    REDUCE = 4  # seconds of gradient reductions, if gradients are not cut (ZeRO 0, 1)
    SCATTER = 5  # seconds of gradient reductions, if they are (ZeRO 2, 3)
    FLOPS = 6  # executed on one device
    GATHERED = 7  # bytes of parameters in use, if they are cut at rest (ZeRO 3)
    PARAMETERS = 8  # bytes of parameters, uncut by fsdp
    PARAMETERS_CUT = 9  # the same, cut by fsdp where a dim divides
    STATE = 10  # bytes of optimizer state, uncut by fsdp
    STATE_CUT = 11  # the same, cut by fsdp where a dim divides
    SAVED = 12  # bytes that the forward pass keeps for the backward pass
    TEMPORARY = 13  # bytes of other values alive
    GRADIENT = 14  # bytes of gradients alive, if they are not cut (ZeRO 0, 1)
    GRADIENT_CUT = 15  # the same, if they are (ZeRO 2, 3)
    COPY = 16  # bytes of copies of parameters that are saved, uncut by fsdp
    COPY_CUT = 17  # the same, cut by fsdp where a dim divides


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Meshes with microbatch counts, as arrays of equal length.

    Attributes:
        meshes: mesh per candidate.
        data, fsdp, tensor, micro: sizes per candidate.
        latency, per_byte: seconds and seconds per byte, keyed by (group, kind).
        stages: for each mesh and kind the steps of a reduce-scatter ("reduce-scatter") and of a gather ("all-gather") over fsdp:
            (result of the step over the result of the whole, cost).
    """

    meshes: tuple[MeshShape, ...]
    data: Array
    fsdp: Array
    tensor: Array
    micro: Array
    latency: dict[tuple[str, str], Array]
    per_byte: dict[tuple[str, str], Array]
    stages: dict[tuple[MeshShape, str], tuple[tuple[float, LinearCost], ...]]

    @property
    def batch(self) -> Array:
        """Ways that data, fsdp and microbatches divide the batch."""
        return self.data * self.fsdp * self.micro

    def __len__(self) -> int:
        return len(self.meshes)


_GROUPS: dict[str, tuple[str, ...]] = {"tensor": ("tensor",), "fsdp": ("fsdp",), "data": ("data",), "both": ("data", "fsdp"),
                                     "data·tensor": ("data", "tensor"), "all": ("data", "fsdp", "tensor")}
_KINDS: tuple[str, ...] = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")


def candidates(pairs: Sequence[tuple[MeshShape, int]], topology: Topology) -> Candidates:
    """Builds the arrays for (mesh, microbatches) pairs on a topology."""
    spans = {mesh: place(mesh, topology) or {} for mesh in dict.fromkeys(mesh for mesh, _ in pairs)}
    latency: dict[tuple[str, str], Array] = {}
    per_byte: dict[tuple[str, str], Array] = {}
    for group, axes in _GROUPS.items():
        for kind in _KINDS:
            costs = {mesh: collective_cost(kind, tuple(s for axis in axes for s in by_axis.get(axis, ())), topology) for mesh, by_axis in spans.items()}
            latency[group, kind] = np.array([costs[mesh].latency_s for mesh, _ in pairs])
            per_byte[group, kind] = np.array([costs[mesh].seconds_per_byte for mesh, _ in pairs])

    steps = {(mesh, kind): _steps(kind, by_axis.get("fsdp", ()), topology) for mesh, by_axis in spans.items() for kind in ("reduce-scatter", "all-gather")}
    for kind in ("reduce-scatter", "all-gather"):
        latency["fsdp", kind] = np.array([sum(cost.latency_s for _, cost in steps[mesh, kind]) for mesh, _ in pairs])
        per_byte["fsdp", kind] = np.array([sum(share * cost.seconds_per_byte for share, cost in steps[mesh, kind]) for mesh, _ in pairs])

    def sizes(axis: str) -> Array:
        return np.array([mesh[axis] for mesh, _ in pairs], dtype=np.int64)

    return Candidates(meshes=tuple(mesh for mesh, _ in pairs), data=sizes("data"), fsdp=sizes("fsdp"), tensor=sizes("tensor"),
                      micro=np.array([micro for _, micro in pairs], dtype=np.int64), latency=latency, per_byte=per_byte, stages=steps)


def _steps(kind: str, spans: tuple[Span, ...], topology: Topology) -> tuple[tuple[float, LinearCost], ...]:
    """The steps of a collective over fsdp: (result of the step over the result of the whole, cost)."""
    groups = (scatter_stages if kind == "reduce-scatter" else gather_stages)(spans, topology)
    ways = [math.prod(span.ways for span in group) for group in groups]
    after = [math.prod(ways[i + 1:]) for i in range(len(ways))]
    shares = [float(n) if kind == "reduce-scatter" else 1.0 / n for n in after]
    return tuple((share, collective_cost(kind, group, topology)) for share, group in zip(shares, groups, strict=True))


def local(amount: Amount, c: Candidates) -> Array:
    """An amount on one device, per microbatch."""
    size = np.full(len(c), float(amount.total))
    if amount.batch:
        size = size / c.batch
    return size / c.tensor if amount.tensor else size


def fsdp_divides(shape: tuple[int, ...], cut: Cut, frozen: frozenset[int], c: Candidates) -> Array:
    """Whether some dim that is no stack of layers divides over fsdp (and tensor, where tensor cuts it too); vectors rest whole."""
    found = np.zeros(len(c), dtype=bool)
    dims = [dim for dim, size in enumerate(shape) if dim not in frozen and size > 1]
    for dim in dims if len(dims) > 1 else ():
        found |= shape[dim] % (c.fsdp * np.where(cut[dim] == "tensor", c.tensor, 1)) == 0
    return found & (c.fsdp > 1)


#: Quantity of a correction -> where it is in an array of quantities.
_CORRECTED: dict[str, tuple[Q, ...]] = {
    "compute": (Q.COMPUTE,), "activations": (Q.SAVED, Q.COPY, Q.COPY_CUT), "temporaries": (Q.TEMPORARY,), "communication": (Q.GATHERED,),
}


#: Part of a resident value -> where it is counted; those that ZeRO cuts are counted whole and cut.
_PARTS: dict[str, Q] = {"saved": Q.SAVED, "temporary": Q.TEMPORARY, "gathered": Q.GATHERED}
_PIECES: dict[str, tuple[Q, Q]] = {"gradient": (Q.GRADIENT, Q.GRADIENT_CUT), "copy": (Q.COPY, Q.COPY_CUT)}


class Pricer:
    """Prices terms on one topology.

    Attributes:
        topology: where the program runs.
        constants: efficiencies of its chips.
        factors: learned factor of each quantity that has one (`shardlib.cost.corrections`).
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.factors = {quantity: one.factor for one in applied(topology) for quantity in _CORRECTED[one.quantity]}
        self.constants: Efficiency = efficiency(topology.chip.vendor)

    def corrected(self, quantities: Array) -> Array:
        """Quantities with the factors applied: array [len(Q), candidates]."""
        if not self.factors:
            return quantities
        return quantities * np.array([[self.factors.get(quantity, 1.0)] for quantity in Q])

    def tally(self, items: Iterable[Item], choice: Choice, c: Candidates) -> Array:
        """Quantities of some items under a choice: array [len(Q), len(c)]."""
        total = np.zeros((len(Q), len(c)))
        for item in items:
            for term in item.terms(choice):
                self._add(total, term, c)
        return total

    def _add(self, total: Array, term: object, c: Candidates) -> None:
        if isinstance(term, Compute):
            self._add_compute(total, term, c)
        elif isinstance(term, Transfer):
            self._add_transfer(total, term, c)
        elif isinstance(term, Resident):
            self._add_resident(total, term, c)
        elif isinstance(term, Rest):
            self._add_rest(total, term, c)

    def _add_compute(self, total: Array, term: Compute, c: Candidates) -> None:
        def on_device(amount: Amount) -> Array:
            return local(amount, c)

        runs = term.trips * c.micro
        total[Q.COMPUTE] += kernel_seconds(term, on_device, self.topology.chip, self.constants) * runs
        total[Q.FLOPS] += on_device(term.flops) * runs

    def _add_resident(self, total: Array, term: Resident, c: Candidates) -> None:
        size = local(term.bytes, c)
        if term.part in _PIECES:
            whole, cut = _PIECES[term.part]
            total[whole] += size
            total[cut] += np.where(fsdp_divides(term.shape, term.cut, frozenset(), c), size / c.fsdp, size)
        else:
            total[_PARTS[term.part]] += size

    def _add_transfer(self, total: Array, term: Transfer, c: Candidates) -> None:
        size, runs = local(term.bytes, c), term.trips * c.micro
        if term.group == "tensor":
            scattered = size / c.tensor if term.kind == "reduce-scatter" else size
            total[Q.TENSOR] += self.seconds("tensor", term.kind, scattered, c) * runs
        elif term.group == "sum":
            total[Q.SUM] += self.seconds("both", "all-reduce", size, c) * runs
        elif term.group == "gather":
            cut = fsdp_divides(term.shape, term.cut, term.frozen, c)
            total[Q.GATHER] += np.where(cut, self.seconds("fsdp", "all-gather", size, c), 0.0) * runs
        else:
            cut = fsdp_divides(term.shape, term.cut, term.frozen, c)
            among, left = ("all", "data·tensor") if term.over_tensor else ("both", "data")
            whole = self.seconds(among, "all-reduce", size, c)
            parts = self.seconds("fsdp", "reduce-scatter", size / c.fsdp, c) + self.seconds(left, "all-reduce", size / c.fsdp, c)
            total[Q.REDUCE] += whole * runs
            total[Q.SCATTER] += np.where(cut, parts, whole) * runs

    def seconds(self, group: str, kind: str, size: Array, c: Candidates) -> Array:
        """Seconds of one collective of `size` bytes over a group of axes, by candidate."""
        return c.latency[group, kind] + size * c.per_byte[group, kind]

    def _add_rest(self, total: Array, term: Rest, c: Candidates) -> None:
        elements = np.full(len(c), float(term.elements * term.count))
        if "tensor" in term.cut:
            elements = elements / c.tensor
        cut = np.where(fsdp_divides(term.shape, term.cut, term.frozen, c), elements / c.fsdp, elements)
        total[Q.PARAMETERS] += elements * term.itemsize
        total[Q.PARAMETERS_CUT] += cut * term.itemsize
        total[Q.STATE] += elements * term.state
        total[Q.STATE_CUT] += cut * term.state


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Priced candidates, as arrays; the names are those of `Seconds` and `DeviceBytes`.

    Attributes:
        seconds: parts of the step time per candidate.
        device_bytes: parts of the memory per candidate.
        flops: executed per device and step.
    """

    seconds: dict[str, Array]
    device_bytes: dict[str, Array]
    flops: Array

    @property
    def step_seconds(self) -> Array:
        """Seconds of a step per candidate."""
        return sum(self.seconds.values(), np.zeros_like(self.flops))

    @property
    def peak_bytes(self) -> Array:
        """Bytes per device per candidate."""
        return sum(self.device_bytes.values(), np.zeros_like(self.flops))


def combine(work: Array, rest: Array, residents: Sequence[Array], zero: int, batch_bytes: float, state_bytes: float, pricer: Pricer, c: Candidates) -> Totals:
    """Turns summed quantities into the parts of time and memory.

    Args:
        work: quantities of `work_items`.
        rest: quantities of `rest_items`.
        residents: quantities of `resident_items` at each point where memory may peak.
        zero: ZeRO stage, 0 to 3.
        batch_bytes: bytes of the global batch.
        state_bytes: bytes of untrained model state, replicated.
        pricer: constants.
        c: the candidates.
    """
    constants = pricer.constants
    work, residents = pricer.corrected(work), [pricer.corrected(r) for r in residents]
    cut_state, cut_gradient, cut_parameter = zero >= 1, zero >= 2, zero >= 3
    parameters = rest[Q.PARAMETERS_CUT if cut_parameter else Q.PARAMETERS]
    gradients = rest[Q.PARAMETERS_CUT if cut_gradient else Q.PARAMETERS]
    state = rest[Q.STATE_CUT if cut_state else Q.STATE]
    updated = rest[Q.PARAMETERS_CUT if cut_state else Q.PARAMETERS]
    hideable = work[Q.SCATTER if cut_gradient else Q.REDUCE] + (work[Q.GATHER] if cut_parameter else 0.0)
    if cut_state and not cut_parameter:
        hideable = hideable + c.latency["fsdp", "all-gather"] + rest[Q.PARAMETERS] * c.per_byte["fsdp", "all-gather"]
    exposed = work[Q.TENSOR] + work[Q.SUM] + np.maximum(0.0, hideable - constants.overlap * work[Q.COMPUTE])
    update = (2 * updated + updated + 2 * state) / (pricer.topology.chip.hbm_bytes_per_s * constants.memory)
    zeros = np.zeros(len(c))
    kept = (Q.SAVED, Q.COPY_CUT if cut_parameter else Q.COPY)
    others = (Q.TEMPORARY, Q.GRADIENT_CUT if cut_gradient else Q.GRADIENT, *((Q.GATHERED,) if cut_parameter else ()))
    at = np.argmax(np.stack([sum(r[q] for q in (*kept, *others)) for r in residents]), axis=0) if residents else None

    def resident(*quantities: Q) -> Array:
        return np.choose(at, [sum((r[q] for q in quantities), zeros) for r in residents]) if at is not None else zeros

    accumulators = np.where(c.micro > 1, gradients, 0.0)
    return Totals(
        seconds={"compute": work[Q.COMPUTE], "exposed": exposed, "optimizer": update, "overhead": zeros + constants.step_s},
        device_bytes={
            "parameters": parameters, "gradients": resident(others[1]) + accumulators, "optimizer": state, "activations": resident(*kept),
            "temporaries": resident(Q.TEMPORARY), "communication": resident(*others[2:]), "batch": batch_bytes / (c.data * c.fsdp) + state_bytes,
        },
        flops=work[Q.FLOPS],
    )


def collectives(
    items: Iterable[Item], choice: Choice, zero: int, updated_bytes: float, c: Candidates, pricer: Pricer
) -> tuple[Collective, ...]:
    """Lists the collectives of one candidate, equal ones added up, the slowest first.

    Args:
        items: work items of the step graph.
        choice: the chosen colours.
        zero: ZeRO stage.
        updated_bytes: bytes of parameters on a device, gathered after the update by ZeRO 1 and 2.
        c: exactly one candidate.
        pricer: constants.
    """
    assert len(c) == 1
    mesh = c.meshes[0]
    found: dict[tuple[str, tuple[str, ...], int, str], tuple[int, float]] = {}

    def note(kind: str, group: str, size: float, runs: int, cause: str, cost: LinearCost | None = None) -> None:
        axes = tuple(axis for axis in _GROUPS[group] if axis in mesh)
        if axes:
            key = (kind, axes, round(size), cause)
            seconds = (float(pricer.seconds(group, kind, np.array([size]), c)[0]) if cost is None else cost.seconds(size)) * runs
            count, before = found.get(key, (0, 0.0))
            found[key] = (count + runs, before + seconds)

    for item in items:
        for term in item.terms(choice):
            if isinstance(term, Transfer):
                _note_transfer(term, zero, c, note)
    if zero in (1, 2) and updated_bytes:
        for share, cost in c.stages[mesh, "all-gather"]:
            note("all-gather", "fsdp", updated_bytes * share, 1, "updated parameters", cost)
    listed = [Collective(kind=kind, axes=axes, bytes=size, count=count, seconds=seconds, cause=cause)
              for (kind, axes, size, cause), (count, seconds) in found.items()]
    return tuple(sorted(listed, key=lambda x: (-x.seconds, x.kind, x.axes, x.cause, x.bytes)))


def _note_transfer(term: Transfer, zero: int, c: Candidates, note: Callable[..., None]) -> None:
    size, runs = float(local(term.bytes, c)[0]), int(term.trips * c.micro[0])
    fsdp, tensor = int(c.fsdp[0]), int(c.tensor[0])
    if term.group == "tensor":
        note(term.kind, "tensor", size / tensor if term.kind == "reduce-scatter" else size, runs, term.cause)
    elif term.group == "sum":
        note("all-reduce", "both", size, runs, term.cause)
    elif term.group == "gather":
        if zero >= 3 and fsdp_divides(term.shape, term.cut, term.frozen, c)[0]:
            for share, cost in c.stages[c.meshes[0], "all-gather"]:
                note("all-gather", "fsdp", size * share, runs, term.cause, cost)
    elif zero >= 2 and fsdp_divides(term.shape, term.cut, term.frozen, c)[0]:
        for share, cost in c.stages[c.meshes[0], "reduce-scatter"]:
            note("reduce-scatter", "fsdp", size / fsdp * share, runs, term.cause, cost)
        note("all-reduce", "data·tensor" if term.over_tensor else "data", size / fsdp, runs, term.cause)
    else:
        note("all-reduce", "all" if term.over_tensor else "both", size, runs, term.cause)


def estimate(totals: Totals, index: int, *, listed: tuple[Collective, ...], tokens: int, model_flops: float, mesh: MeshShape, peak_flops_per_s: float) -> Estimate:
    """The estimate of one priced candidate."""
    return Estimate(
        seconds=Seconds(**{name: float(values[index]) for name, values in totals.seconds.items()}),
        device_bytes=DeviceBytes(**{name: math.ceil(values[index]) for name, values in totals.device_bytes.items()}),
        collectives=listed, tokens=tokens, model_flops=model_flops, hardware_flops=float(totals.flops[index]) * mesh.devices,
        peak_flops_per_s=peak_flops_per_s * mesh.devices,
    )
