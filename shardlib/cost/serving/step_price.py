"""Seconds of a step that computes tokens of prompts and next tokens.

    matmuls        the greater of their FLOPs and the bytes of the weights, which every step reads
    activations    what matmuls read and write of the tokens
    cache          keys and values of all tokens before, for every next token
    attention      FLOPs of the tokens of prompts with those before them
    all-reduces    for each a latency and its bytes over the links
    fixed          of a layer, of a step, and of every request that gets a token

(Pope et al., "Efficiently Scaling Transformer Inference", arXiv:2211.05102; scaling book,
inference.md.) What a roofline lacks at few tokens is the latency of all-reduces and the fixed time
of a layer; both are learned, see `shardlib.cost.serving.constants`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardlib.cost.machine.collectives import LinearCost
from shardlib.cost.serving.constants import Constants
from shardlib.cost.serving.split import Experts, Split
from shardlib.hardware.chip import Chip

Numbers = NDArray[np.float64]
#: What a step's seconds consist of, in the order in which they are shown.
PARTS: tuple[str, ...] = (
    "weights",
    "matmuls",
    "activations",
    "cache",
    "attention",
    "all-reduces",
    "fixed",
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a step computes; numbers, or arrays of them that are priced side by side.

    Attributes:
        rows: requests that get a next token, and no more.
        context: tokens before such a token.
        prompt: tokens of prompts.
        before: tokens before such a token.
        ended: prompts that end, whose requests get their first token.
    """

    rows: Numbers | float = 0.0
    context: Numbers | float = 0.0
    prompt: Numbers | float = 0.0
    before: Numbers | float = 0.0
    ended: Numbers | float = 0.0


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """What steps of one split on one machine cost.

    Attributes:
        split: what a device has.
        chip: the device.
        reduce: an all-reduce over the devices that share a layer.
        constants: what was learned.
        dtype: that matmuls are computed in.
    """

    split: Split
    chip: Chip
    reduce: LinearCost
    constants: Constants
    dtype: str

    def parts(self, load: Load) -> Mapping[str, Numbers]:
        """Seconds of a step by what they are for; of "weights" and "matmuls" one is 0, since
        whichever takes longer hides the other.
        """
        split, chip, learned = self.split, self.chip, self.constants
        tokens = np.asarray(load.rows + load.prompt, float)
        share = learned.eight_bit if _is_eight_bit(self.dtype) else learned.matmul
        compute = split.flops * tokens / (chip.peak(self.dtype) * share)
        read = split.read + sum(visited(experts, tokens) for experts in split.experts)
        streamed = read / (chip.hbm_bytes_per_s * learned.memory)
        cached = sum(
            entry.bytes * np.minimum(load.context, entry.window or np.inf) for entry in split.cached
        )
        scored = sum(
            entry.flops * np.minimum(load.before, entry.window or np.inf) for entry in split.cached
        )
        count = sum(many for many, _ in split.sums)
        sent = sum(many * nbytes for many, nbytes in split.sums) * tokens
        parts: dict[str, Numbers | float] = {
            "weights": np.where(streamed >= compute, streamed, 0.0),
            "matmuls": np.where(streamed >= compute, 0.0, compute),
            "activations": learned.moved
            * split.moved
            * tokens
            / (chip.hbm_bytes_per_s * learned.memory),
            "cache": load.rows * cached / (chip.hbm_bytes_per_s * learned.cache),
            "attention": load.prompt * scored / (chip.peak("bfloat16") * learned.attention),
            "all-reduces": (
                count * learned.latency * self.reduce.latency_s
                + sent * self.reduce.seconds_per_byte / learned.links
            ),
            "fixed": (
                split.layers * learned.layer_s
                + learned.step_s
                + learned.row_s * np.asarray(load.rows + load.ended, float)
            ),
        }
        return {part: np.asarray(seconds, float) for part, seconds in parts.items()}

    def seconds(self, load: Load) -> Numbers:
        """Seconds of a step."""
        parts = self.parts(load)
        return np.asarray(sum(parts.values()), float)


def visited(experts: Experts, tokens: Numbers) -> Numbers:
    """Bytes of experts that a step of so many tokens reads, where each token chooses evenly."""
    rarely = 1.0 - experts.chosen / experts.count
    return experts.bytes * (1.0 - rarely**tokens)


def _is_eight_bit(dtype: str) -> bool:
    return dtype.startswith("float8") or dtype in ("int8", "uint8")
