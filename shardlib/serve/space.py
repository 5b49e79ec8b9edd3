"""The choices of a serving plan, and their prices."""

from __future__ import annotations

import bisect
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from shardlib.cost.collectives import NO_COST, LinearCost, collective_cost
from shardlib.cost.terms import ArrayTable
from shardlib.errors import ArgumentError, PinError, raise_all
from shardlib.graph import Problem
from shardlib.layout import MeshShape
from shardlib.machines.topology import Topology, place
from shardlib.serve.cost import (
    STORED,
    Pricing,
    ServedModel,
    StepWork,
    group_of,
    learned,
    limit,
    needed,
    ordered,
    pages_each,
    split,
    temporaries,
)
from shardlib.serve.propagation import serving_layouts
from shardlib.untrusted.data import JsonObject, is_integer, is_number

#: A pin's value: a number, or the sizes of a mesh.
ServingPin = int | Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ServingPins:
    """Pinned decisions; None where the search decides.

    Attributes:
        tensor: devices that share every layer.
        replicas: groups of such devices, each of which serves requests of its own.
        batch: requests that a replica serves at a time.
        chunk: tokens of prompts that a step computes at most.
        page: tokens of a page.
    """

    tensor: int | None = None
    replicas: int | None = None
    batch: int | None = None
    chunk: int | None = None
    page: int | None = None

    @classmethod
    def parse(cls, values: Mapping[str, ServingPin] | None) -> Self:
        """Reads pins by name; "mesh" is a table of "tensor" and "data", the number of replicas."""
        table: dict[str, object] = dict(values or {})
        mesh = table.pop("mesh", {})
        failures: list[str] = []
        if isinstance(mesh, Mapping):
            for axis, size in cast("Mapping[str, object]", mesh).items():
                table["replicas" if axis == "data" else axis] = size
        else:
            failures.append(f"mesh is {mesh!r}; it is a table such as {{'tensor': 8}}")
        words = [field.name for field in fields(cls)]
        for word, value in table.items():
            if word not in words:
                near = difflib.get_close_matches(word, [*words, "mesh"], 1)
                hint = f"; do you mean {near[0]!r}?" if near else ""
                failures.append(f"{word!r} is not a decision of serving{hint}")
            elif not is_integer(value) or value < 1:
                failures.append(f"{word} is {value!r}; it is a whole number from 1 on")
        if failures:
            raise_all(
                PinError,
                "the pins cannot be kept",
                failures,
                hint=f"decisions are mesh, {', '.join(words)}",
            )
        return cls(**{word: value for word, value in table.items() if is_integer(value)})

    def changed(self, others: Self) -> Self:
        """These pins, overridden by others."""
        values = {field.name: getattr(others, field.name) for field in fields(others)}
        return replace(self, **{name: value for name, value in values.items() if value is not None})

    def to_json(self) -> dict[str, int]:
        """The pinned decisions."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        }


OBJECTIVES: tuple[str, ...] = ("throughput", "latency")
#: No request is longer, tokens.
LONGEST = 1 << 24


@dataclass(frozen=True, kw_only=True)
class ServingWorkload:
    """Requests, and how fast their answers must be.

    Attributes:
        prompt: tokens of a prompt, on average.
        output: tokens of an answer, on average.
        rate: requests a second that must be served; None for as many as there is room for.
        ttft: seconds from a request's begin to its first token at most; None for no limit.
        tpot: seconds from token to token at most; None for no limit.
        objective: "throughput" for the most tokens a second and chip, which with a `rate` are the
            fewest chips; "latency" for the fewest seconds from token to token.
        weights: how they are stored: "bf16", "int8", "fp8", or "model" for as the model has them.
            Matmuls of "fp8" are computed in it where the chip can; those of "int8" are in bfloat16.
        cache: how keys and values are stored, the same words.

    Raises:
        ArgumentError: illegal values; all of them are listed.
    """

    prompt: int
    output: int
    rate: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    objective: str = "throughput"
    weights: str = "bf16"
    cache: str = "bf16"

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {value!r}; it is a whole number of tokens from 1 to {LONGEST}"
            for name in ("prompt", "output")
            if not is_integer(value := getattr(self, name)) or not 1 <= value <= LONGEST
        ]
        failures += [
            f"{name} is {value!r}; it is {what} above 0"
            for name, what in (
                ("rate", "requests a second"),
                ("ttft", "seconds"),
                ("tpot", "seconds"),
            )
            if (value := getattr(self, name)) is not None and (not is_number(value) or value <= 0)
        ]
        failures += [
            f"{name} is {getattr(self, name)!r}; it is one of {', '.join(words)}"
            for name, words in (
                ("objective", OBJECTIVES),
                ("weights", (*STORED, "model")),
                ("cache", (*STORED, "model")),
            )
            if getattr(self, name) not in words
        ]
        if failures:
            raise_all(ArgumentError, "this cannot be served", failures)

    @property
    def tokens(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt + self.output

    @property
    def context(self) -> float:
        """Tokens before a next token, on average."""
        return self.prompt + self.output / 2


Numbers = NDArray[np.float64]
#: Requests that a replica serves at a time at most; the host does some work for each.
MOST_REQUESTS = 4096
#: Tokens of a page, unless they are pinned.
PAGE = 16
#: The smallest and the largest chunk, tokens.
CHUNKS = (64, 8192)
#: The sizes that are priced: powers of two, and what lies between them.
CHUNK_SIZES: tuple[int, ...] = tuple(
    sorted({size for power in range(8) for size in (64 << power, 96 << power) if size <= CHUNKS[1]})
)


@dataclass(frozen=True, kw_only=True)
class ServingProblem:
    """A model, a machine and a workload, for which a serving plan is made.

    Attributes:
        model: the forward pass.
        cut: colours of its dims that are sharded.
        topology: the machine.
        workload: requests, and limits of their answers.
        pins: decisions fixed by hand.
        problem: the same forward pass, of which programs lay out the weights; None to follow `cut`.
    """

    model: ServedModel
    cut: frozenset[str]
    topology: Topology
    workload: ServingWorkload
    pins: ServingPins
    problem: Problem | None = None

    def parts(self, tensor: int) -> Mapping[str, int] | None:
        """Number of shards of each weight in the programs, by path; None to follow `cut`."""
        if self.problem is None:
            return None
        shared = self.shared(tensor)
        mesh = MeshShape(context=shared, tensor=tensor // shared)
        layouts = serving_layouts(self.problem, mesh)
        return {path: mesh.ways(tuple(layout.axes)) for path, layout in layouts.items()}

    @property
    def dtype(self) -> str:
        """The dtype of matmuls: 8-bit floats where weights are, if the chip has a rate."""
        fast = "float8_e4m3fn" in dict(self.topology.chip.flops_per_s)
        if self.workload.weights == "fp8" and fast:
            return "float8_e4m3fn"
        return "bfloat16" if self.workload.weights != "model" else self.model.dtype

    def shared(self, tensor: int) -> int:
        """Devices that share the tokens of every page, where key heads are fewer than devices."""
        heads = [max(count for _, count in call.kept) for call in self.model.attention]
        return tensor // math.gcd(tensor, *heads)

    def tensors(self) -> list[int]:
        """Numbers of devices that may share a layer, rising."""
        devices = self.topology.devices
        return [
            degree
            for degree in range(1, devices + 1)
            if devices % degree == 0 and self.pins.tensor in (None, degree)
        ]

    def chunks(self) -> list[int]:
        """Sizes of chunks, rising."""
        if self.pins.chunk is not None:
            return [self.pins.chunk]
        return list(CHUNK_SIZES)

    def replica(self, tensor: int) -> Replica | None:
        """A group of devices that share every layer; None where the links have no such group, or
        the tokens of a pinned page do not divide among them.
        """
        devices = self.topology.devices
        if self.pins.page is not None and self.pins.page % self.shared(tensor):
            return None
        reduce = NO_COST
        if tensor > 1:
            spans = place(MeshShape(data=devices // tensor, tensor=tensor), self.topology)
            if spans is None:
                return None
            reduce = collective_cost("all-reduce", spans["tensor"], self.topology)
        return Replica(problem=self, tensor=tensor, reduce=reduce)

    def replicas(self) -> list[Replica]:
        """A replica of each possible size, rising."""
        return [
            replica for tensor in self.tensors() if (replica := self.replica(tensor)) is not None
        ]


@dataclass(frozen=True, kw_only=True)
class Replica:
    """Devices that share every layer.

    Attributes:
        problem: what is planned.
        tensor: devices.
        reduce: an all-reduce over them.
    """

    problem: ServingProblem
    tensor: int
    reduce: LinearCost

    @cached_property
    def pricing(self) -> Pricing:
        """The prices of its steps."""
        problem = self.problem
        return Pricing(
            split=split(
                problem.model,
                problem.cut,
                self.tensor,
                weights=problem.workload.weights,
                cache=problem.workload.cache,
                parts=problem.parts(self.tensor),
            ),
            chip=problem.topology.chip,
            reduce=self.reduce,
            constants=learned(),
            dtype=problem.dtype,
        )

    @property
    def counts(self) -> range:
        """Numbers of replicas that the devices and the pins allow."""
        limit, pinned = self.problem.topology.devices // self.tensor, self.problem.pins.replicas
        if pinned is None:
            return range(1, limit + 1)
        return range(pinned, pinned + 1) if pinned <= limit else range(0)

    def steps(self, rows: Numbers | float, chunk: int) -> tuple[StepWork, StepWork]:
        """The work of a step with a next token of each of `rows` requests, alone and beside a chunk
        of prompts.
        """
        load = self.problem.workload
        alone = StepWork(rows=rows, context=load.context)
        beside = replace(
            alone, prompt=float(chunk), before=load.prompt / 2, ended=chunk / load.prompt
        )
        return alone, beside

    @property
    def page(self) -> int:
        """Tokens of a page: `PAGE`, or more where more devices share them."""
        shared = self.problem.shared(self.tensor)
        return self.problem.pins.page or -(-PAGE // shared) * shared

    @property
    def pages_each(self) -> int:
        """Pages of a request at its end."""
        return -(-self.problem.workload.tokens // self.page)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Tokens that layers keep, the most first; 0 for all."""
        windows = (entry.window for entry in self.pricing.split.cached)
        return ordered(windows, longest=self.problem.workload.tokens)

    def pages(self, batch: int, chunk: int) -> tuple[int, ...]:
        """Pages of each cache group, as `shardlib.serve.Capacity` has them."""
        sizes, limit = {"budget": batch + chunk, "size": self.page}, self.pages_each
        if self.windows[0]:
            limit = min(limit, needed(window=self.windows[0], **sizes))
        return pages_each(self.windows, first=batch * limit, slots=batch, **sizes)

    def cache_bytes(self, batch: int, chunk: int) -> float:
        """Bytes of all pages, on a device."""
        pages = self.pages(batch, chunk)
        return self.page * sum(
            entry.bytes * pages[group_of(entry.window, self.windows)]
            for entry in self.pricing.split.cached
        )

    def short(self, batch: int, chunk: int) -> float:
        """Bytes that a device lacks; 0 or less where the batch fits."""
        split_ = self.pricing.split
        used_bytes = split_.weights + temporaries(split_, tokens=batch + chunk, rows=batch)
        return used_bytes + self.cache_bytes(batch, chunk) - limit(self.problem.topology.chip)

    def most(self, chunk: int) -> int:
        """The largest batch that fits."""
        return bisect.bisect_right(
            range(1, MOST_REQUESTS + 1), 0.0, key=lambda batch: self.short(batch, chunk)
        )


# --------------------------------------------------------------------------------------------------
# Every choice with its predictions.
#
# For each tensor and chunk all batches are priced side by side. Requests are taken to be as long
# as the average, and to come evenly. In a step every request of the batch gets a token, and a
# share of the steps computes a chunk of prompts beside:
#
#     share = batch x prompt / (output x chunk),
#
# since a request needs its prompt once in as many steps as its answer has tokens. It stays below
# `BUSY`. A prompt waits behind others as in a queue of fixed service times (M/D/1), takes a step
# for each of its chunks, and half a step to begin with.

#: Share of the steps that compute a chunk at most: above it, prompts wait for ever longer.
BUSY = 0.95


@dataclass(frozen=True, kw_only=True)
class ServingPoint:
    """A choice with its predictions.

    Attributes:
        tensor: devices that share every layer.
        replicas: groups of them.
        batch: requests that a replica serves at a time.
        chunk: tokens of prompts that a step computes at most.
        running: requests that are served at a time on average; less than `batch` where a rate is
            given.
        tpot_seconds, ttft_seconds: see `ServingEstimate`.
        requests_per_second: of all replicas.
        output_tokens_per_second_per_chip: of the devices that are used.
        chips: devices that are used.
    """

    tensor: int
    replicas: int
    batch: int
    chunk: int
    running: int
    tpot_seconds: float
    ttft_seconds: float
    requests_per_second: float
    output_tokens_per_second_per_chip: float
    chips: int

    def to_json(self) -> JsonObject:
        """The point as plain data."""
        data = asdict(self)
        del data["running"]
        return {"mesh": {"tensor": data.pop("tensor")}, **data}


@dataclass(frozen=True, kw_only=True)
class Choices(ArrayTable):
    """Choices with their predictions, as arrays; the fields are those of `ServingPoint`."""

    tensor: Numbers
    replicas: Numbers
    batch: Numbers
    chunk: Numbers
    running: Numbers
    tpot_seconds: Numbers
    ttft_seconds: Numbers
    requests_per_second: Numbers
    output_tokens_per_second_per_chip: Numbers
    chips: Numbers

    def __len__(self) -> int:
        return len(self.batch)

    def point(self, row: int) -> ServingPoint:
        """One choice."""
        values: dict[str, Any] = {
            field.name: (int if field.type == "int" else float)(getattr(self, field.name)[row])
            for field in fields(ServingPoint)
        }
        return ServingPoint(**values)

    def on(self, replicas: Numbers | int, requests: Numbers, output: int) -> Choices:
        """The same on several replicas.

        Args:
            requests: a second that they serve together.
            output: tokens of an answer.
        """
        chips = self.tensor * replicas
        return replace(
            self,
            replicas=np.ones_like(self.batch) * replicas,
            requests_per_second=requests,
            output_tokens_per_second_per_chip=requests * output / chips,
            chips=chips,
        )


NO_CHOICES = Choices(**{field.name: np.zeros(0) for field in fields(Choices)})


def priced(replica: Replica, chunk: int) -> Choices:
    """All batches that fit one replica, rising, with a request in every slot."""
    load, pinned = replica.problem.workload, replica.problem.pins.batch
    batch = np.arange(1, replica.most(chunk) + 1, dtype=float)
    if pinned is not None:
        batch = batch[batch == pinned]
    share = batch * load.prompt / (load.output * chunk)
    keep = share <= BUSY
    batch, share = batch[keep], share[keep]
    alone, beside = map(replica.pricing.seconds, replica.steps(batch, chunk))
    tpot = (1 - share) * alone + share * beside
    service = math.ceil(load.prompt / chunk) * beside
    waiting = share / (2 * (1 - share)) * service
    every = np.ones_like(batch)
    choices = Choices(
        tensor=replica.tensor * every,
        replicas=every,
        batch=batch,
        chunk=chunk * every,
        running=batch,
        tpot_seconds=tpot,
        ttft_seconds=tpot / 2 + waiting + service,
        requests_per_second=every,
        output_tokens_per_second_per_chip=every,
        chips=every,
    )
    return choices.on(1, batch / (load.output * tpot), load.output)


def all_priced(problem: ServingProblem) -> Iterator[tuple[Replica, Choices]]:
    """Every batch of one replica, by tensor and chunk."""
    for replica in problem.replicas():
        for chunk in problem.chunks():
            choices = priced(replica, chunk)
            if len(choices):
                yield replica, choices


def saturated(replica: Replica, choices: Choices) -> Choices:
    """The same on all devices, with a request in every slot."""
    count = max(replica.counts, default=0)
    if not count:
        return NO_CHOICES
    requests = count * choices.requests_per_second
    return choices.on(count, requests, replica.problem.workload.output)


def sustained(replica: Replica, choices: Choices, rate: float) -> Choices:
    """For each number of replicas the fewest requests at a time that sustain a rate; slots are kept
    for chance, three standard deviations of a Poisson number.
    """
    replicas = np.array(replica.counts, float)
    reached = np.maximum.accumulate(choices.requests_per_second)
    rows = np.searchsorted(reached, rate / replicas)
    feasible = rows < len(reached)
    running, replicas = choices.take(rows[feasible]), replicas[feasible]
    slots = np.ceil(running.batch + 3 * np.sqrt(running.batch))
    pinned = replica.problem.pins.batch
    slots = slots if pinned is None else np.full_like(slots, pinned)
    on_all = running.on(replicas, np.full_like(slots, rate), replica.problem.workload.output)
    return replace(on_all, batch=slots).take(slots <= replica.most(int(choices.chunk[0])))


# --------------------------------------------------------------------------------------------------
# Prompts on one mesh, and next tokens on another.
#
# A prompt's keys and values move between them over the outermost links, once. Neither phase waits
# for the other, and each has the number of devices per layer that suits it (DistServe,
# arXiv:2401.09670; Splitwise, arXiv:2311.18677). The engine of shardlib runs both phases on one
# mesh; this says what two would give.


@dataclass(frozen=True, kw_only=True)
class TwoMeshes:
    """A plan of two meshes.

    Attributes:
        prefill_tensor, decode_tensor: devices that share every layer.
        prefill_replicas, decode_replicas: groups of them.
        batch: requests that a group of the second mesh serves at a time.
        ttft_seconds, tpot_seconds: as of a plan.
        requests_per_second: that are served.
        output_tokens_per_second_per_chip: of all devices of both.
        transfer_bytes: of a request that move.
        transfer_seconds: that they take.
    """

    prefill_tensor: int
    prefill_replicas: int
    decode_tensor: int
    decode_replicas: int
    batch: int
    ttft_seconds: float
    tpot_seconds: float
    requests_per_second: float
    output_tokens_per_second_per_chip: float
    transfer_bytes: float
    transfer_seconds: float

    def to_json(self) -> JsonObject:
        """The plan as plain data."""
        return {
            "prefill": {
                "mesh": {"tensor": self.prefill_tensor},
                "replicas": self.prefill_replicas,
            },
            "decode": {
                "mesh": {"tensor": self.decode_tensor},
                "replicas": self.decode_replicas,
                "batch": self.batch,
            },
            "ttft_seconds": self.ttft_seconds,
            "tpot_seconds": self.tpot_seconds,
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second_per_chip": self.output_tokens_per_second_per_chip,
            "transfer_bytes": self.transfer_bytes,
            "transfer_seconds": self.transfer_seconds,
        }


def prefill_seconds(replica: Replica) -> float:
    """Seconds of one prompt alone."""
    prompt, chunk = replica.problem.workload.prompt, CHUNKS[1]
    seconds = 0.0
    for begin in range(0, prompt, chunk):
        count = min(chunk, prompt - begin)
        load = StepWork(prompt=float(count), before=begin + count / 2, ended=1.0)
        seconds += float(replica.pricing.seconds(load))
    return seconds


def two_meshes(problem: ServingProblem) -> TwoMeshes | None:
    """The plan of two meshes with the most tokens per second within the limits, for any rate of
    requests; None if nothing fits.
    """
    load, devices = problem.workload, problem.topology.devices
    sizes = [replica for replica in problem.replicas() if replica.most(CHUNKS[0]) > 0]
    moved = problem.model.kept_bytes(load.cache, load.prompt)
    best: TwoMeshes | None = None
    for first in sizes:
        alone = prefill_seconds(first)
        for second in sizes:
            batch = np.arange(1, second.most(0) + 1, dtype=float)
            tpot = second.pricing.seconds(StepWork(rows=batch, context=load.context))
            rate = problem.topology.tiers[0].reached_bytes_per_s * min(first.tensor, second.tensor)
            for count in range(1, (devices - first.tensor) // second.tensor + 1):
                before = (devices - count * second.tensor) // first.tensor
                served = np.minimum(before / alone, count * batch / (load.output * tpot))
                busy = np.minimum(served * alone / before, 0.999)
                ttft = alone * (1 + busy / (2 * (1 - busy))) + moved / rate
                served = np.where(busy < 0.95, served, 0.95 * before / alone)
                keep = np.ones(len(batch), bool)
                if load.tpot is not None:
                    keep &= tpot <= load.tpot
                if load.ttft is not None:
                    keep &= ttft <= load.ttft
                if not keep.any():
                    continue
                best_index = int(np.argmax(np.where(keep, served, -math.inf)))
                if best is None or served[best_index] > best.requests_per_second * (1 + 1e-9):
                    best = TwoMeshes(
                        prefill_tensor=first.tensor,
                        prefill_replicas=before,
                        decode_tensor=second.tensor,
                        decode_replicas=count,
                        batch=int(batch[best_index]),
                        ttft_seconds=float(ttft[best_index]),
                        tpot_seconds=float(tpot[best_index]),
                        requests_per_second=float(served[best_index]),
                        output_tokens_per_second_per_chip=float(
                            served[best_index] * load.output / devices
                        ),
                        transfer_bytes=moved,
                        transfer_seconds=moved / rate,
                    )
    return best
