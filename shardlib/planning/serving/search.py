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
        """The choices that keep to the limits.

        Args:
            ttft: whether to that of the first token.
            tpot: whether to that of the others.
        """
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


def search(asked: Asked) -> Found:
    """Every choice that keeps to the limits.

    Args:
        asked: what is planned.

    Raises:
        PinError: the pins leave no choice.
        InfeasibleError: the model does not fit, or nothing keeps to the limits; the message says
            what does.
    """
    found = every(asked)
    kept = found.within()
    if not len(kept.choices):
        raise _infeasible(found)
    return kept


def every(asked: Asked) -> Found:
    """Every choice, whatever the limits.

    Args:
        asked: what is planned.
    """
    rows: list[Numbers] = []
    count = 0
    for one in all_priced(asked):
        count += len(one.batch)
        rows.append(_sustained(one) if asked.workload.rate else _saturated(one))
    table = np.concatenate(rows) if rows else np.zeros((0, _COLUMNS))
    return Found(asked=asked, choices=table, priced=count)


def _replicas(one: Priced) -> Iterator[int]:
    """Numbers of replicas that the devices and the pins allow."""
    asked = one.replica.asked
    most = asked.topology.devices // one.replica.tensor
    pinned = asked.pins.replicas
    if pinned is None:
        yield from range(1, most + 1)
    elif pinned <= most:
        yield pinned


def _saturated(one: Priced) -> Numbers:
    """All devices, and requests in every slot."""
    replicas = max(_replicas(one), default=0)
    tensor, batch = one.replica.tensor, one.batch
    if not replicas:
        return np.zeros((0, _COLUMNS))
    same = np.ones_like(batch)
    return np.stack(
        [
            tensor * same,
            replicas * same,
            batch,
            one.chunk * same,
            batch,
            one.tpot,
            one.ttft,
            replicas * one.requests,
            tensor * replicas * same,
        ],
        axis=1,
    )


def _sustained(one: Priced) -> Numbers:
    """For each number of replicas the fewest requests at a time that sustain the rate."""
    asked = one.replica.asked
    rate = asked.workload.rate or 0.0
    replicas = np.array(list(_replicas(one)), float)
    reached = np.maximum.accumulate(one.requests)
    at = np.searchsorted(reached, rate / replicas)
    held = at < len(reached)
    replicas, at = replicas[held], at[held]
    running = one.batch[at]
    slots = np.ceil(running + 3 * np.sqrt(running))
    if asked.pins.batch is not None:
        slots = np.full_like(running, asked.pins.batch)
    held = slots <= one.replica.most(one.chunk)
    replicas, at, running, slots = replicas[held], at[held], running[held], slots[held]
    tensor = np.full_like(running, one.replica.tensor)
    return np.stack(
        [
            tensor,
            replicas,
            slots,
            np.full_like(running, one.chunk),
            running,
            one.tpot[at],
            one.ttft[at],
            np.full_like(running, rate),
            tensor * replicas,
        ],
        axis=1,
    )


def _infeasible(found: Found) -> PinError | InfeasibleError:
    """Why there is no choice."""
    asked, load = found.asked, found.asked.workload
    name, machine = asked.model.name, asked.topology.name
    pinned = f" under the pins {asked.pins.to_json()}" if asked.pins.to_json() else ""
    replicas = [one for tensor in asked.tensors() if (one := asked.replica(tensor)) is not None]
    if not replicas:
        return PinError(
            f"{machine} has no group of {asked.pins.tensor} devices among {asked.topology.devices}"
        )
    fewest = min(one.tensor for one in replicas)
    if (asked.pins.replicas or 1) * fewest > asked.topology.devices:
        return PinError(
            f"{asked.pins.replicas} groups of {fewest} devices are more than the"
            f" {asked.topology.devices} of {machine}"
        )
    if not found.priced:
        chunk = asked.chunks()[0]
        wanted = asked.pins.batch or 1
        least = min(one.short(wanted, chunk) for one in replicas)
        if least > 0:
            return InfeasibleError(
                f"{name} does not fit {machine}{pinned}: with {wanted} requests of {load.tokens}"
                f" tokens a device lacks {bytes_text(least)}\nTry: more devices, weights='int8',"
                " cache='int8', or shorter requests",
                short_bytes=math.ceil(least),
            )
        return PinError(
            f"prompts come faster than chunks of {asked.chunks()[-1]} tokens compute"
            f" them{pinned}: a request has {load.prompt} tokens of prompt for {load.output} of"
            " answer\nTry: a larger chunk, or a smaller batch"
        )
    if not len(found.choices):
        best = max(float(one.requests.max()) * _most(one) for one in all_priced(asked))
        return InfeasibleError(
            f"{name} on {machine} serves {count_text(best)} requests a second at"
            f" most{pinned}, and {load.rate:g} are asked for\nTry: more devices, or a longer tpot",
            short_bytes=0,
        )
    return InfeasibleError(
        f"no plan for {name} on {machine}{pinned} keeps to the limits: {_least(found)}\nTry: longer"
        " limits, more devices, or weights='int8'",
        short_bytes=0,
    )


def _most(one: Priced) -> int:
    return max(_replicas(one), default=0)


def _least(found: Found) -> str:
    """What is reached at best, for each limit and under the other."""
    load = found.asked.workload
    said: list[str] = []
    for name, limit, column, others in (
        ("tpot", load.tpot, 5, found.within(tpot=False)),
        ("ttft", load.ttft, 6, found.within(ttft=False)),
    ):
        if limit is None:
            continue
        alone, text = float(found.choices[:, column].min()), f"{name} {seconds_text(limit)}"
        said.append(f"{text} is asked for, and {seconds_text(alone)} can be reached")
        if len(others.choices) and alone <= limit:
            least = float(others.choices[:, column].min())
            said[-1] += f", {seconds_text(least)} within the other limit"
    return "; ".join(said)
