"""What a serving plan is predicted to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.cost.serving.memory import ServingBytes
from shardlib.untrusted.json_types import JsonObject

#: Words for what limits a step, by its part.
LIMITS: Mapping[str, str] = {
    "weights": "bytes of the weights, which every step reads",
    "matmuls": "FLOPs of the matmuls",
    "activations": "bytes of activations",
    "cache": "bytes of keys and values",
    "attention": "FLOPs of attention over prompts",
    "all-reduces": "all-reduces between the devices of a layer",
    "fixed": "fixed times of layers, steps and requests",
}


@dataclass(frozen=True, kw_only=True)
class ServingEstimate:
    """What a serving plan is predicted to do.

    Attributes:
        ttft_seconds: from a request's begin to its first token, on average.
        tpot_seconds: from token to token, on average.
        output_tokens_per_second_per_chip: of all requests together, for each device that is used.
        requests_per_second: that are served.
        chips: devices that are used.
        decode: seconds of a step of next tokens alone, by what they are for.
        prompt: seconds of a step with a chunk of prompts, the same.
        chunk_share: of the steps that compute a chunk.
        device_bytes: of a device.
    """

    ttft_seconds: float
    tpot_seconds: float
    output_tokens_per_second_per_chip: float
    requests_per_second: float
    chips: int
    decode: tuple[tuple[str, float], ...]
    prompt: tuple[tuple[str, float], ...]
    chunk_share: float
    device_bytes: ServingBytes

    @property
    def parts(self) -> dict[str, float]:
        """Seconds from token to token by what they are for."""
        prompt = dict(self.prompt)
        share = self.chunk_share
        return {
            part: (1 - share) * seconds + share * prompt.get(part, 0.0)
            for part, seconds in self.decode
        }

    @property
    def limited_by(self) -> str:
        """What most of the time from token to token is for."""
        parts = self.parts
        return max(parts, key=lambda part: parts[part])

    @property
    def chip_hours_per_million(self) -> float:
        """Hours of a device for a million tokens of answers."""
        return 1e6 / self.output_tokens_per_second_per_chip / 3600

    def to_json(self) -> JsonObject:
        """The estimate as plain data."""
        return {
            "ttft_seconds": self.ttft_seconds,
            "tpot_seconds": self.tpot_seconds,
            "output_tokens_per_second_per_chip": self.output_tokens_per_second_per_chip,
            "requests_per_second": self.requests_per_second,
            "chips": self.chips,
            "decode": dict(self.decode),
            "prompt": dict(self.prompt),
            "chunk_share": self.chunk_share,
            "limited_by": self.limited_by,
            "chip_hours_per_million_output_tokens": self.chip_hours_per_million,
            "device_bytes": self.device_bytes.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class ServingPoint:
    """A choice, and what it is predicted to do.

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
        return {
            "mesh": {"tensor": self.tensor},
            "replicas": self.replicas,
            "batch": self.batch,
            "chunk": self.chunk,
            "tpot_seconds": self.tpot_seconds,
            "ttft_seconds": self.ttft_seconds,
            "requests_per_second": self.requests_per_second,
            "output_tokens_per_second_per_chip": self.output_tokens_per_second_per_chip,
            "chips": self.chips,
        }
