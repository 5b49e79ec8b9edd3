"""Prompts on one mesh, and next tokens on another.

A prompt's keys and values move between them over the outermost links, once. Neither phase waits for
the other, and each has the number of devices per layer that suits it (DistServe, arXiv:2401.09670;
Splitwise, arXiv:2311.18677). The engine of shardlib runs both phases on one mesh; this says what
two would give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardlib.cost.serving.step_price import Load
from shardlib.planning.serving.space import CHUNKS, Asked, Replica
from shardlib.untrusted.json_types import JsonObject


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
    prompt, chunk = replica.asked.workload.prompt, CHUNKS[1]
    seconds = 0.0
    for begin in range(0, prompt, chunk):
        count = min(chunk, prompt - begin)
        load = Load(prompt=float(count), before=begin + count / 2, ended=1.0)
        seconds += float(replica.pricing.seconds(load))
    return seconds


def two_meshes(request: Asked) -> TwoMeshes | None:
    """The plan of two meshes with the most tokens a second within the limits, without a rate of
    requests; None where there is none.
    """
    load, devices = request.workload, request.topology.devices
    replicas = [
        replica for degree in request.tensors() if (replica := request.replica(degree)) is not None
    ]
    sizes = [replica for replica in replicas if replica.most(CHUNKS[0]) > 0]
    moved = request.model.kept_bytes(load.cache, load.prompt)
    best: TwoMeshes | None = None
    for first in sizes:
        alone = prefill_seconds(first)
        for second in sizes:
            batch = np.arange(1, second.most(0) + 1, dtype=float)
            tpot = second.pricing.seconds(Load(rows=batch, context=load.context))
            rate = request.topology.tiers[0].reached_bytes_per_s * min(first.tensor, second.tensor)
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
