"""Prices of variants of a step: layer groups with different remat policies, a part of the layers
rematerialised or offloaded, collective matmuls, and compute that is replicated over an axis.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardlib.cost.collectives import Slot, axis_group, collective_cost, slot_cost, spans_of
from shardlib.cost.facts import Facts
from shardlib.cost.items import gathers_of, kernel_items, reductions_of
from shardlib.cost.pricing import Totals
from shardlib.cost.stages import Meshes, Plans
from shardlib.cost.tables import Pricer, Quantity, evaluate, local_fraction, transfer_collectives
from shardlib.cost.terms import OUTSIDE_LAYERS, Amount, Compute, Elements, Transfer, amount
from shardlib.layout import TENSOR
from shardlib.machines.topology import Placement
from shardlib.propagation.colours import Choice, sharded_by

# --------------------------------------------------------------------------------------------------
# The kernel of one shard of a matmul whose operand arrives shard by shard: it has fewer rows, and
# reads its weight again, or reads and writes the sums of a gradient.


def matmul_shard(facts: Facts, index: int, term: Compute, choice: Choice, shards: int) -> Compute:
    """The kernel of one of `shards` shards of a weight matmul, or of a weight-gradient matmul,
    which reads and writes sums in float32.
    """
    op = facts.graph.ops[index]
    side = next((i for i, value in enumerate(op.operands) if value in facts.weights), 2)
    value = (*op.operands, *op.results)[side]
    reread_bytes = (
        facts.graph.values[value].bytes
        if side < 2
        else 8.0 * math.prod(facts.graph.values[value].shape)
    )
    reread = Amount(
        total=reread_bytes * (1 - 1 / shards),
        batch=False,
        tensor=sharded_by(facts.value_spec(value, choice), TENSOR.name),
        context=False,
        expert=False,
    )
    matmul = term.matmul
    if matmul is not None:  # rows of the activation, or the contracted dim
        sharded = "depth" if side == 2 else ("columns", "rows")[side]
        matmul = replace(matmul, **{sharded: _shard(getattr(matmul, sharded), shards)})
    return replace(
        term,
        flops=_shard(term.flops, shards),
        traffic=(*_shards(term.traffic, shards), reread),
        elements=Elements(
            simple=_shards(term.elements.simple, shards),
            transcendental=_shards(term.elements.transcendental, shards),
        ),
        matmul=matmul,
    )


def _shard(amount: Amount, shards: int) -> Amount:
    return replace(amount, total=amount.total / shards)


def _shards(amounts: Iterable[Amount], shards: int) -> tuple[Amount, ...]:
    return tuple(_shard(amount, shards) for amount in amounts)


# --------------------------------------------------------------------------------------------------
# Collective matmul: collectives over tensor that run as loops over shards of their matmuls.
#
# A gather of the sequence, or a scatter along it, over n devices becomes n - 1 messages of a shard
# each, and its matmuls are computed shard by shard, while the next message is in transit (Wang et
# al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
# Models", ASPLOS 2023, section 5). With `steps` messages in sequence, of `hop` seconds each, and
# matmuls of `work` seconds in shards
#
#     exposed = hop + max(0, (steps - 1) hop - work)
#
# replaces the whole collective: nothing hides the first message of a gather or the last of a
# scatter. Messages go in both directions: on a torus at once, n // 2 steps; elsewhere they share
# the device's one link, n - 1 steps. Separate kernels add up the messages.
#
# Gathers that are repeated only for weight gradients delay no matmul: they hide behind the time
# that the other gathers of their region leave.


@dataclass(frozen=True, kw_only=True)
class CollectiveMatmul:
    """A collective over tensor that a collective matmul can replace.

    Attributes:
        transfer: the collective.
        matmuls: ops whose shards wait for one message each; () if only weight gradients need the
            gathered value.
        gradients: weight gradients, which are summed over shards.
        region: region of the graph.
    """

    transfer: Transfer
    matmuls: tuple[int, ...]
    gradients: tuple[int, ...]
    region: int


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Changes of a step by collective matmuls.

    Attributes:
        exposed_s: seconds of collectives that are no longer exposed.
        compute_s: additional seconds of the sharded matmuls.
        messages: per replaced collective, bytes of a message, messages per execution, and seconds
            per message.
    """

    exposed_s: float
    compute_s: float
    messages: dict[Transfer, tuple[float, int, float]]

    @property
    def seconds(self) -> float:
        """Seconds saved per step; negative if collective matmuls are slower."""
        return self.exposed_s - self.compute_s


def collective_matmuls(facts: Facts, choice: Choice) -> list[CollectiveMatmul]:
    """The collectives of a step that collective matmuls can replace: those that are needed only by
    matmuls of weights that tensor shards.
    """
    candidates = [
        (transfer, ops)
        for transfer, ops in gathers_of(facts, choice)
        if transfer.kind == "all-gather"
    ]
    candidates += [
        (transfer, ops)
        for transfer, ops in reductions_of(facts, choice)
        if transfer.kind == "reduce-scatter"
    ]
    listed: list[CollectiveMatmul] = []
    for transfer, ops in candidates:
        if transfer.purpose != TENSOR.name or not all(
            _of_weight(facts, index, choice) for index in ops
        ):
            continue
        of_gradients = [facts.graph.ops[i].results[0] in facts.gradients for i in ops]
        listed.append(
            CollectiveMatmul(
                transfer=transfer,
                matmuls=tuple(
                    i for i, gradient in zip(ops, of_gradients, strict=True) if not gradient
                ),
                gradients=tuple(
                    i for i, gradient in zip(ops, of_gradients, strict=True) if gradient
                ),
                region=facts.graph.ops[ops[0]].region,
            )
        )
    return listed


def _of_weight(facts: Facts, index: int, choice: Choice) -> bool:
    """True for a matmul of a weight that tensor shards, or of the gradient of one."""
    op = facts.graph.ops[index]
    values = [value for value in op.operands if value in facts.weights] or [
        value for value in op.results if value in facts.gradients
    ]
    return (
        op.kind == "dot_general"
        and len(values) == 1
        and sharded_by(facts.value_spec(values[0], choice), TENSOR.name)
    )


def saving(
    facts: Facts, choice: Choice, placement: Placement, meshes: Meshes, pricer: Pricer, groups: int
) -> Saving:
    """The saving of collective matmuls in one candidate without stages; zero if there are none."""
    assert len(meshes) == 1
    costs = _CollectiveMatmulCosts(facts, choice, placement, meshes, pricer, groups)
    exposed = compute = 0.0
    spare: dict[int, float] = defaultdict(float)
    messages: dict[Transfer, tuple[float, int, float]] = {}
    for replaced in sorted(
        collective_matmuls(facts, choice) if costs.ways > 1 else [],
        key=lambda replaced: not replaced.matmuls,
    ):
        ((slot, size, count),) = transfer_collectives(
            replaced.transfer, facts.layers.segment(replaced.region), meshes.degrees, pricer
        )
        before = slot_cost(slot, placement, pricer.topology).seconds(float(size[0]))
        shard = float(size[0]) / (costs.ways if slot.kind == "all-gather" else 1)
        hop = costs.permute.seconds(shard)
        times = {
            index: costs.matmul(index)
            for index in (*replaced.matmuls, *replaced.gradients)
            if index in costs.kernels
        }
        work = sum(times[index][1] for index in replaced.matmuls if index in times)
        others = (costs.steps - 1) * hop
        if replaced.matmuls:
            waits = hop + max(0.0, others - work)
            spare[replaced.region] += max(0.0, work - others)
        else:
            waits = max(0.0, hop + others - spare[replaced.region])
            spare[replaced.region] = max(0.0, spare[replaced.region] - hop - others)
        runs = float(count[0]) * int(meshes.micro[0])
        exposed += runs * (before - waits)
        compute += runs * (
            sum(max(0.0, sharded - unsharded) for unsharded, sharded in times.values())
            + costs.moved(replaced, slot, shard)
        )
        messages[replaced.transfer] = shard, costs.ways - 1, hop
    return Saving(exposed_s=exposed, compute_s=compute, messages=messages)


class _CollectiveMatmulCosts:
    """Seconds of messages and matmuls in one candidate; the arguments are those of `saving`.

    Attributes:
        ways: size of the tensor axis.
        torus: True if its devices are on a torus.
        steps: messages in sequence of a collective matmul.
        permute: cost of a message to a neighbour.
        kernels: item of the kernel of an op.
    """

    def __init__(
        self,
        facts: Facts,
        choice: Choice,
        placement: Placement,
        meshes: Meshes,
        pricer: Pricer,
        groups: int,
    ) -> None:
        spans = spans_of(axis_group(TENSOR), placement)
        self.ways = math.prod(span.ways for span in spans)
        self.torus = all(pricer.topology.tiers[span.tier].kind == "torus" for span in spans)
        self.steps = self.ways // 2 if self.torus else self.ways - 1
        self.permute = collective_cost("collective-permute", spans, pricer.topology)
        self.kernels = {
            kernel.op: item
            for kernel, item in zip(facts.fusion.kernels, kernel_items(facts), strict=True)
        }
        self._facts, self._choice, self._meshes = facts, choice, meshes
        self._pricer, self._groups = pricer, groups

    def matmul(self, index: int) -> tuple[float, float]:
        """Seconds of a matmul as a whole, and shard by shard."""
        item = self.kernels[index]
        terms = [term for term in item.terms(self._choice) if isinstance(term, Compute)]
        return self._seconds(item.segment, terms), self.ways * self._seconds(
            item.segment,
            [matmul_shard(self._facts, index, term, self._choice, self.ways) for term in terms],
        )

    def moved(self, replaced: CollectiveMatmul, slot: Slot, shard: float) -> float:
        """Seconds of kernels that only shards need: one per message to add it up, and one to write
        results to their places, which TPU compilers do inside of matmuls.
        """
        chip = self._pricer.topology.chip
        if slot.kind == "reduce-scatter":
            size, kernels = 3 * shard * (self.ways - 1), self.ways - 1
        else:
            results = [
                value
                for index in replaced.matmuls
                for value in self._facts.graph.ops[index].results
            ]
            size = 0.0 if self.torus else 2 * sum(self._local(value) for value in results)
            kernels = 0 if self.torus else self.ways * len(results)
        return (
            size / (chip.hbm_bytes_per_s * self._pricer.efficiency.bandwidth_share("elementwise"))
            + kernels * chip.launch_s
        )

    def _local(self, value: int) -> float:
        """Bytes of a value per device."""
        size = amount(
            float(self._facts.graph.values[value].bytes),
            self._facts.value_spec(value, self._choice),
        )
        return size.total * float(
            evaluate(local_fraction(size), self._meshes.degrees, self._pricer.efficiency)[0]
        )

    def _seconds(self, segment: int, terms: list[Compute]) -> float:
        return float(
            self._pricer.tally_terms(
                [(segment, replace(term, trips=1)) for term in terms],
                self._meshes.degrees,
                self._groups,
            )[:, Quantity.COMPUTE].sum()
        )


# --------------------------------------------------------------------------------------------------
# Prices of steps whose layer groups follow different remat policies.
#
# A *corner* has one policy per layer group, for all its layers. Its kernels and collectives are
# those of each group under its policy; its memory in a phase of the step is that of the group
# whose loop runs, plus the values that the others have saved under theirs (`shardlib.cost.facts`).
#
# Between corners, n of the L layers of a group follow a policy and the others rematerialise
# nothing. The price is linear in n / L for each group: the multilinear interpolation of the
# corners, except that parts of memory other than saved activations take the maximum.

#: The policy of each layer group.
Corner = tuple[str, ...]
#: Per layer group the policy and the number of layers of the fullest stage that follow it;
#: ("none", 0) without rematerialisation.
RematLayers = tuple[tuple[str, int], ...]
#: The policy without rematerialisation.
NO_REMAT = "none"


@dataclass(frozen=True, kw_only=True)
class PolicyTallies:
    """The tallies of one policy's program.

    Attributes:
        work: array [segments, rows, degrees].
        points: by phase, the tallies of its points.
        stacks: by phase, the tally of the values that loops have saved.
    """

    work: Array
    points: tuple[tuple[Array, ...], ...]
    stacks: tuple[Array, ...]


def corner_tallies(
    corner: Corner, parts: Mapping[str, PolicyTallies], phases: Sequence[int], counts: Sequence[int]
) -> tuple[Array, list[Array]]:
    """The tallies of a corner: of work, and of memory at each point where it may peak."""
    work = sum(
        (
            parts[policy].work * (count / sum(counts))
            for policy, count in zip(corner, counts, strict=True)
        ),
        np.zeros_like(parts[corner[0]].work),
    )
    for k, policy in enumerate(corner):
        work[k] = parts[policy].work[k]
    points: list[Array] = []
    for number, segment in enumerate(phases):
        for peak_policy in (
            dict.fromkeys(corner) if segment == OUTSIDE_LAYERS else (corner[segment],)
        ):
            for point in parts[peak_policy].points[number]:
                point = point.copy()
                for k, policy in enumerate(corner):
                    if policy != peak_policy:
                        point[k] = parts[policy].stacks[number][k]
                points.append(point)
    return work, points


def corners(policies: Sequence[str], groups: int) -> list[Corner]:
    """Every corner: a remat policy for each layer group."""
    return list(itertools.product(policies, repeat=groups))


def interpolated_corners(weighted: Sequence[tuple[Array, Totals]]) -> Totals:
    """Prices between corners: weighted averages, except that parts of memory other than saved
    activations take the maximum.
    """

    def average(value: Callable[[Totals], Array]) -> Array:
        return sum(
            (weight * value(totals) for weight, totals in weighted),
            np.zeros_like(weighted[0][1].flops),
        )

    first = weighted[0][1]
    memory = {
        name: (
            average(lambda totals, name=name: totals.device_bytes[name])
            if name == "activations"
            else np.maximum.reduce([totals.device_bytes[name] for _, totals in weighted])
        )
        for name in first.device_bytes
    }
    return Totals(
        seconds={
            name: average(lambda totals, name=name: totals.seconds[name]) for name in first.seconds
        },
        device_bytes=memory,
        flops=average(lambda totals: totals.flops),
        stacks=average(lambda totals: totals.stacks),
        in_flight=first.in_flight,
        largest_state=first.largest_state,
    )


def partly_rematerialised(
    policies: Sequence[tuple[str, Array | int]],
    layers: Sequence[Array],
    price: Callable[[Corner], Totals],
) -> Totals:
    """The price of candidates in which only some layers of a group follow its policy."""
    options: list[list[tuple[str, Array]]] = []
    for (policy, number), count in zip(policies, layers, strict=True):
        share = number / count
        weighted = (
            [(policy, share), (NO_REMAT, 1 - share)]
            if policy != NO_REMAT
            else [(NO_REMAT, np.ones_like(share))]
        )
        options.append([(name, weight) for name, weight in weighted if weight.any()])
    weighted = [
        (
            np.multiply.reduce([weight for _, weight in combination]),
            price(tuple(name for name, _ in combination)),
        )
        for combination in itertools.product(*options)
    ]
    return interpolated_corners(weighted)


# --------------------------------------------------------------------------------------------------
# The fastest mixture of remat policies over layer groups that fits.
#
# For one group with n free layers, time and memory are linear in n, so the best n is at an end of
# the range that fits; the numbers of the other groups are enumerated. That is exact.

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The best mixture of policies, by candidate.

    Attributes:
        pattern: index of the pattern, see `patterns`; -1 if nothing fits.
        numbers: layers that rematerialise, array [layer groups, candidates].
        seconds: seconds per step; infinite if nothing fits.
    """

    pattern: Array
    numbers: Array
    seconds: Array


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A policy for each layer group; `partly` is True if only some of its layers follow it."""

    corner: Corner
    partly: tuple[bool, ...]

    def active(self) -> list[Corner]:
        """The corners that it interpolates."""
        return list(
            itertools.product(
                *(
                    ((NO_REMAT, policy) if partly else (policy,))
                    for policy, partly in zip(self.corner, self.partly, strict=True)
                )
            )
        )


def patterns(policies: Sequence[str], groups: int) -> list[Pattern]:
    """Every pattern, those with the fewest partly rematerialised groups first; corners with a
    single policy are not mixtures.
    """
    listed = [
        Pattern(corner=corner, partly=partly)
        for corner in corners(policies, groups)
        for partly in itertools.product((False, True), repeat=groups)
        if not any(
            in_part and policy == NO_REMAT for policy, in_part in zip(corner, partly, strict=True)
        )
        and (any(partly) or len(set(corner)) > 1)
    ]
    return sorted(listed, key=lambda pattern: sum(pattern.partly))


def best_mixture(
    prices: Mapping[Corner, Totals],
    choices: Sequence[Pattern],
    layers: Sequence[Array],
    capacity: float,
    *,
    total: int | None = None,
) -> Mixture:
    """The fastest mixture that fits, by candidate.

    Args:
        capacity: usable bytes per device; infinite for the fastest regardless of memory.
        total: number of layers that rematerialise, over all layer groups; None for the best number.
    """
    size = len(layers[0])
    best = Mixture(
        pattern=np.full(size, -1),
        numbers=np.zeros((len(layers), size)),
        seconds=np.full(size, np.inf),
    )
    for number, pattern in enumerate(choices):
        for numbers, seconds in _of_pattern(pattern, prices, layers, capacity, total):
            better = seconds < best.seconds * (1 - 1e-12)
            best.seconds[better], best.pattern[better] = seconds[better], number
            best.numbers[:, better] = numbers[:, better]
    return best


def _of_pattern(
    pattern: Pattern,
    prices: Mapping[Corner, Totals],
    layers: Sequence[Array],
    capacity: float,
    total: int | None,
) -> Iterator[tuple[Array, Array]]:
    """Layers that rematerialise and seconds, infinite if excluded, for every enumeration of all
    partly rematerialised groups except the one with the most layers.
    """
    active = {corner: prices[corner] for corner in pattern.active()}
    rematerialised = np.stack(
        [
            np.where(policy == NO_REMAT, 0.0, count)
            for policy, count in zip(pattern.corner, layers, strict=True)
        ]
    )
    names = [name for name in next(iter(active.values())).device_bytes if name != "activations"]
    others = sum(
        (
            np.maximum.reduce([totals.device_bytes[name] for totals in active.values()])
            for name in names
        ),
        np.zeros(len(layers[0])),
    )
    partly = sorted(
        (k for k, in_part in enumerate(pattern.partly) if in_part),
        key=lambda k: float(layers[k].max()),
    )
    if not partly:
        only = prices[pattern.corner]
        legal = (only.device_bytes["activations"] + others <= capacity) & (
            (total is None) | (rematerialised.sum(0) == (total or 0))
        )
        yield rematerialised, np.where(legal, only.step_seconds, np.inf)
        return
    *outer, last = partly
    space = capacity - others
    for chosen in itertools.product(*(range(1, int(layers[k].max())) for k in outer)):
        numbers = rematerialised.copy()
        for k, count in zip(outer, chosen, strict=True):
            numbers[k] = count
        legal = np.logical_and.reduce([numbers[k] < layers[k] for k in outer] + [layers[last] > 1])
        if legal.any():
            without, with_all = (
                _at_end(active, pattern, numbers / layers, last, policy)
                for policy in (NO_REMAT, pattern.corner[last])
            )
            numbers[last] = (
                total - np.delete(numbers, last, axis=0).sum(0)
                if total is not None
                else _best_number(without, with_all, layers[last], space)
            )
            share = numbers[last] / layers[last]
            legal &= (
                (without[1] + (with_all[1] - without[1]) * share <= space)
                & (numbers[last] >= 1)
                & (numbers[last] < layers[last])
            )
            yield numbers, np.where(legal, without[0] + (with_all[0] - without[0]) * share, np.inf)


def _at_end(
    active: Mapping[Corner, Totals], pattern: Pattern, shares: Array, last: int, policy: str
) -> tuple[Array, Array]:
    """Seconds and bytes of activations if all layers of group `last` follow `policy`, with given
    shares of the other partly rematerialised groups.
    """
    seconds, saved = np.zeros(shares.shape[1]), np.zeros(shares.shape[1])
    for corner, totals in active.items():
        if corner[last] == policy:
            weight = np.ones(shares.shape[1])
            for k, in_part in enumerate(pattern.partly):
                if in_part and k != last:
                    weight = weight * (
                        shares[k] if corner[k] == pattern.corner[k] else 1 - shares[k]
                    )
            seconds, saved = (
                seconds + weight * totals.step_seconds,
                saved + weight * totals.device_bytes["activations"],
            )
    return seconds, saved


def _best_number(
    without: tuple[Array, Array], with_all: tuple[Array, Array], layers: Array, space: Array
) -> Array:
    """The fastest number of layers that fits, from 1 to one less than all: seconds and bytes are
    linear in it.
    """
    bytes_per_layer = (with_all[1] - without[1]) / layers
    with np.errstate(divide="ignore", invalid="ignore"):
        limit = np.clip((space - without[1]) / bytes_per_layer, -1.0, layers + 1)
    smallest, largest = np.ones_like(layers), layers - 1
    smallest = np.where(bytes_per_layer < 0, np.maximum(1.0, np.ceil(limit - 1e-9)), smallest)
    largest = np.where(bytes_per_layer > 0, np.minimum(largest, np.floor(limit + 1e-9)), largest)
    smallest += (bytes_per_layer < 0) & (
        without[1] + bytes_per_layer * smallest > space
    )  # if rounding went the wrong way
    largest -= (bytes_per_layer > 0) & (without[1] + bytes_per_layer * largest > space)
    return np.where(with_all[0] < without[0], largest, smallest)


# --------------------------------------------------------------------------------------------------
# Prices with offloading, and with a part of the layers rematerialised.


def offloaded(totals: Totals, kinds: Sequence[str], pricer: Pricer, meshes: Meshes) -> Totals:
    """The price with offloading to host memory or disk: state is read and written during the
    update, that of a parameter at a time (beside the gradients, when activations are gone);
    transfers of activations hide behind compute.

    Stages of one program first fill the activation stash with zeros, also in host memory, before
    compute begins.

    If the rate of disks is unknown (`Chip.disk_bytes_per_s` is 0), disk transfers take no time
    here.
    """
    rate = pricer.topology.chip.host_bytes_per_s
    seconds, memory, stacks = dict(totals.seconds), dict(totals.device_bytes), totals.stacks
    if "optimizer" in kinds:
        seconds["optimizer"] = seconds["optimizer"] + 2 * memory["optimizer"] / rate
        memory["optimizer"] = np.zeros_like(stacks)
    if "disk" in kinds:
        disk = pricer.topology.chip.disk_bytes_per_s
        seconds["optimizer"] = seconds["optimizer"] + (
            2 * memory["optimizer"] / disk if disk else 0.0
        )
        memory["optimizer"] = np.zeros_like(stacks)
    if "activations" in kinds:
        outwards = stacks / rate
        moved = 2 * outwards / totals.in_flight * meshes.micro
        seconds["exposed"] = seconds["exposed"] + np.maximum(
            0.0, moved - pricer.efficiency.overlap * seconds["compute"]
        )
        if pricer.profile.pipeline == "lockstep":
            seconds["exposed"] = seconds["exposed"] + np.where(meshes.stage > 1, outwards, 0.0)
        memory["activations"] = memory["activations"] - stacks
        stacks = np.zeros_like(stacks)
    if "optimizer" in kinds:
        freed = memory["activations"] + memory["temporaries"] + memory["communication"]
        memory["temporaries"] = memory["temporaries"] + np.maximum(
            0.0, totals.largest_state - freed
        )
    return replace(totals, seconds=seconds, device_bytes=memory, stacks=stacks)


def interpolated(fast: Totals, rematerialised: Totals, share: Array) -> Totals:
    """The price if `share` of the layers rematerialise, as in `rematerialised`, and the others do
    not: interpolated, with the larger of the temporaries.
    """

    def between(a: Array, b: Array) -> Array:
        return a + (b - a) * share

    memory = {
        name: (
            between(value, rematerialised.device_bytes[name])
            if name == "activations"
            else np.maximum(value, rematerialised.device_bytes[name])
        )
        for name, value in fast.device_bytes.items()
    }
    return Totals(
        seconds={
            name: between(value, rematerialised.seconds[name])
            for name, value in fast.seconds.items()
        },
        device_bytes=memory,
        flops=between(fast.flops, rematerialised.flops),
        stacks=between(fast.stacks, rematerialised.stacks),
        in_flight=fast.in_flight,
        largest_state=fast.largest_state,
    )


def rematerialised_share(number: Array | int, plans: Plans) -> Array:
    """Share of the layers of the fullest stage that rematerialise, given their number: in lockstep,
    all chunks of a stage are one program, so each rematerialises equally many.
    """
    chunks = plans.chunks if plans.profile.pipeline == "lockstep" else np.ones(len(plans))
    return np.ceil(number / chunks) * chunks / sum(plans.layers, np.zeros(len(plans)))
