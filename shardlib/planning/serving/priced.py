"""Every choice with what it is predicted to do.

For each tensor and chunk all batches are priced side by side. Requests are taken to be as long as
the average, and to come evenly. In a step every request of the batch gets a token, and a share of
the steps computes a chunk of prompts beside:

    share = batch x prompt / (output x chunk),

since a request needs its prompt once in as many steps as its answer has tokens. It stays below
`BUSY`. A prompt waits behind others as in a queue of fixed service times (M/D/1),
takes a step for each of its chunks, and half a step to begin with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardlib.cost.serving.step_price import Load
from shardlib.planning.serving.space import Asked, Numbers, Replica

#: Share of the steps that compute a chunk at most: above it, prompts wait for ever longer.
BUSY = 0.95


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Batches of one replica under one chunk, side by side.

    Attributes:
        replica: the devices.
        chunk: tokens of prompts in a step.
        batch: requests at a time.
        tpot: seconds from token to token.
        ttft: seconds from a request's begin to its first token.
        requests: that a replica serves a second.
        share: of the steps that compute a chunk of prompts.
    """

    replica: Replica
    chunk: int
    batch: Numbers
    tpot: Numbers
    ttft: Numbers
    requests: Numbers
    share: Numbers


def priced(replica: Replica, chunk: int) -> Priced:
    """All batches that fit."""
    load, pinned = replica.asked.workload, replica.asked.pins.batch
    limit = replica.most(chunk)
    batch = np.arange(1, limit + 1, dtype=float)
    if pinned is not None:
        batch = batch[batch == pinned]
    share = batch * load.prompt / (load.output * chunk)
    keep = share <= BUSY
    batch, share = batch[keep], share[keep]
    pricing, chunks = replica.pricing, math.ceil(load.prompt / chunk)
    alone = pricing.seconds(Load(rows=batch, context=load.context))
    beside = pricing.seconds(
        Load(
            rows=batch,
            context=load.context,
            prompt=float(chunk),
            before=load.prompt / 2,
            ended=chunk / load.prompt,
        )
    )
    tpot = (1 - share) * alone + share * beside
    service = chunks * beside
    waiting = share / (2 * (1 - share)) * service
    return Priced(
        replica=replica,
        chunk=chunk,
        batch=batch,
        tpot=tpot,
        ttft=tpot / 2 + waiting + service,
        requests=batch / (load.output * tpot),
        share=share,
    )


def all_priced(request: Asked) -> Iterator[Priced]:
    """Every choice, by tensor and chunk."""
    for tensor in request.tensors():
        replica = request.replica(tensor)
        if replica is not None:
            for chunk in request.chunks():
                prices = priced(replica, chunk)
                if len(prices.batch):
                    yield prices
