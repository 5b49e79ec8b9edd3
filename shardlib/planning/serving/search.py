"""The best choice under the limits, and the curve of those that nothing beats.

Every choice of the space is priced, so the answer is exact within the prices, and nothing has to be
bounded. Without a rate, all devices work and as many requests come as can be served. With one, the
fewest requests run at a time that sustain it, slots are kept for chance (three standard deviations
of a Poisson number), and devices that are not needed stay unused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardlib.errors import InfeasibleError, PinError
from shardlib.planning.serving.estimate import ServingPoint
from shardlib.planning.serving.priced import Priced, all_priced
from shardlib.planning.serving.space import Asked, Numbers
from shardlib.planning.units.quantity import bytes_text, count_text, seconds_text

#: Columns of the table of choices.
_COLUMNS = 9


@dataclass(frozen=True, kw_only=True)
class Found:
    """All choices of a space.

    Attributes:
        asked: what is planned.
        choices: one row each: tensor, replicas, batch, chunk, running, tpot, ttft, requests a
            second, chips.
        priced: how many were priced, those included that do not keep to the limits.
    """

    asked: Asked
    choices: Numbers
    priced: int

    @property
    def per_chip(self) -> Numbers:
        """Tokens of answers a second and chip, of each choice."""
        return self.choices[:, 7] * self.asked.workload.output / self.choices[:, 8]

    def within(self, *, ttft: bool = True, tpot: bool = True) -> Found:
        """The choices that keep to the limits."""
        load = self.asked.workload
        keep = np.ones(len(self.choices), bool)
        if tpot and load.tpot is not None:
            keep &= self.choices[:, 5] <= load.tpot
        if ttft and load.ttft is not None:
            keep &= self.choices[:, 6] <= load.ttft
        return Found(asked=self.asked, choices=self.choices[keep], priced=self.priced)

    def point(self, row: int) -> ServingPoint:
        """A choice."""
        tensor, replicas, batch, chunk, running, tpot, ttft, requests, chips = self.choices[row]
        return ServingPoint(
            tensor=int(tensor),
            replicas=int(replicas),
            batch=int(batch),
            chunk=int(chunk),
            running=int(running),
            tpot_seconds=float(tpot),
            ttft_seconds=float(ttft),
            requests_per_second=float(requests),
            output_tokens_per_second_per_chip=float(self.per_chip[row]),
            chips=int(chips),
        )

    def best(self) -> int:
        """The row of the best choice by the objective."""
        tpot, ttft, per_chip = self.choices[:, 5], self.choices[:, 6], -self.per_chip
        first = tpot if self.asked.workload.objective == "latency" else per_chip
        second = per_chip if self.asked.workload.objective == "latency" else tpot
        return int(np.lexsort((ttft, second, first))[0])

    def front(self) -> tuple[ServingPoint, ...]:
        """The choices with more tokens a second and chip than all that are as fast from token to
        token, the fastest first.
        """
        order = np.lexsort((self.choices[:, 6], -self.per_chip, self.choices[:, 5]))
        per_chip = self.per_chip[order]
        before = np.concatenate([[-np.inf], np.maximum.accumulate(per_chip)[:-1]])
        return tuple(self.point(int(row)) for row in order[per_chip > before * (1 + 1e-12)])


def search(request: Asked) -> Found:
    """Every choice that keeps to the limits."""
    choices = every(request)
    within_limits = choices.within()
    if not len(within_limits.choices):
        raise _infeasible(choices)
    return within_limits


def every(request: Asked) -> Found:
    """Every choice, whatever the limits."""
    rows: list[Numbers] = []
    count = 0
    for prices in all_priced(request):
        count += len(prices.batch)
        rows.append(_sustained(prices) if request.workload.rate else _saturated(prices))
    table = np.concatenate(rows) if rows else np.zeros((0, _COLUMNS))
    return Found(asked=request, choices=table, priced=count)


def _replicas(prices: Priced) -> Iterator[int]:
    """Numbers of replicas that the devices and the pins allow."""
    request = prices.replica.asked
    limit = request.topology.devices // prices.replica.tensor
    pinned = request.pins.replicas
    if pinned is None:
        yield from range(1, limit + 1)
    elif pinned <= limit:
        yield pinned


def _saturated(prices: Priced) -> Numbers:
    """All devices, and requests in every slot."""
    replicas = max(_replicas(prices), default=0)
    tensor, batch = prices.replica.tensor, prices.batch
    if not replicas:
        return np.zeros((0, _COLUMNS))
    same = np.ones_like(batch)
    return np.stack(
        [
            tensor * same,
            replicas * same,
            batch,
            prices.chunk * same,
            batch,
            prices.tpot,
            prices.ttft,
            replicas * prices.requests,
            tensor * replicas * same,
        ],
        axis=1,
    )


def _sustained(prices: Priced) -> Numbers:
    """For each number of replicas the fewest requests at a time that sustain the rate."""
    request = prices.replica.asked
    rate = request.workload.rate or 0.0
    replicas = np.array(list(_replicas(prices)), float)
    reached = np.maximum.accumulate(prices.requests)
    positions = np.searchsorted(reached, rate / replicas)
    feasible = positions < len(reached)
    replicas, positions = replicas[feasible], positions[feasible]
    running = prices.batch[positions]
    slots = np.ceil(running + 3 * np.sqrt(running))
    if request.pins.batch is not None:
        slots = np.full_like(running, request.pins.batch)
    feasible = slots <= prices.replica.most(prices.chunk)
    replicas, positions, running, slots = (
        replicas[feasible],
        positions[feasible],
        running[feasible],
        slots[feasible],
    )
    tensor = np.full_like(running, prices.replica.tensor)
    return np.stack(
        [
            tensor,
            replicas,
            slots,
            np.full_like(running, prices.chunk),
            running,
            prices.tpot[positions],
            prices.ttft[positions],
            np.full_like(running, rate),
            tensor * replicas,
        ],
        axis=1,
    )


def _infeasible(outcome: Found) -> PinError | InfeasibleError:
    """Why there is no choice."""
    request, load = outcome.asked, outcome.asked.workload
    name, machine = request.model.name, request.topology.name
    pinned = f" under the pins {request.pins.to_json()}" if request.pins.to_json() else ""
    replicas = [
        replica for tensor in request.tensors() if (replica := request.replica(tensor)) is not None
    ]
    if not replicas:
        return PinError(
            f"{machine} has no group of {request.pins.tensor} devices among"
            f" {request.topology.devices}"
        )
    fewest = min(replica.tensor for replica in replicas)
    if (request.pins.replicas or 1) * fewest > request.topology.devices:
        return PinError(
            f"{request.pins.replicas} groups of {fewest} devices are more than the"
            f" {request.topology.devices} of {machine}"
        )
    if not outcome.priced:
        chunk = request.chunks()[0]
        batch = request.pins.batch or 1
        short_bytes = min(replica.short(batch, chunk) for replica in replicas)
        if short_bytes > 0:
            return InfeasibleError(
                f"{name} does not fit {machine}{pinned}: with {batch} requests of {load.tokens}"
                f" tokens a device lacks {bytes_text(short_bytes)}\nTry: more devices,"
                " weights='int8', cache='int8', or shorter requests",
                short_bytes=math.ceil(short_bytes),
            )
        return PinError(
            f"prompts come faster than chunks of {request.chunks()[-1]} tokens compute"
            f" them{pinned}: a request has {load.prompt} tokens of prompt for {load.output} of"
            " answer\nTry: a larger chunk, or a smaller batch"
        )
    if not len(outcome.choices):
        best = max(float(prices.requests.max()) * _most(prices) for prices in all_priced(request))
        return InfeasibleError(
            f"{name} on {machine} serves {count_text(best)} requests a second at"
            f" most{pinned}, and {load.rate:g} are asked for\nTry: more devices, or a longer tpot",
            short_bytes=0,
        )
    return InfeasibleError(
        f"no plan for {name} on {machine}{pinned} keeps to the limits: {_least(outcome)}\nTry:"
        " longer limits, more devices, or weights='int8'",
        short_bytes=0,
    )


def _most(prices: Priced) -> int:
    return max(_replicas(prices), default=0)


def _least(outcome: Found) -> str:
    """What is reached at best, for each limit and under the other."""
    load = outcome.asked.workload
    reached: list[str] = []
    for name, limit, column, others in (
        ("tpot", load.tpot, 5, outcome.within(tpot=False)),
        ("ttft", load.ttft, 6, outcome.within(ttft=False)),
    ):
        if limit is None:
            continue
        alone, text = float(outcome.choices[:, column].min()), f"{name} {seconds_text(limit)}"
        reached.append(f"{text} is asked for, and {seconds_text(alone)} can be reached")
        if len(others.choices) and alone <= limit:
            lowest = float(others.choices[:, column].min())
            reached[-1] += f", {seconds_text(lowest)} within the other limit"
    return "; ".join(reached)
