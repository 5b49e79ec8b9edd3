"""Bytes of a device that serves."""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.cost.serving.split import Split
from shardlib.hardware.chip import Chip
from shardlib.untrusted.json_types import JsonObject

#: Share of a device's memory that stays free, for what is not counted: the compiler's own, and
#: fragments. Compiled programs of `python benchmarks/serving_compiled.py` take up to 0.3 GiB of
#: temporaries beside weights and pages.
MARGIN = 0.03


@dataclass(frozen=True, kw_only=True)
class ServingBytes:
    """What a device holds.

    Attributes:
        weights: of the model.
        cache: pages of keys and values.
        temporaries: of a step.
        limit: what there is for all of it.
    """

    weights: float
    cache: float
    temporaries: float
    limit: float

    @property
    def peak(self) -> float:
        """All of it at once."""
        return self.weights + self.cache + self.temporaries

    def to_json(self) -> JsonObject:
        """The parts, with their sum."""
        return {
            "weights": self.weights,
            "cache": self.cache,
            "temporaries": self.temporaries,
            "peak": self.peak,
            "limit": self.limit,
        }


def limit(chip: Chip) -> float:
    """Bytes of a device that can be planned with."""
    return chip.usable_bytes - MARGIN * chip.hbm_bytes


def temporaries(split: Split, *, tokens: int, rows: int) -> float:
    """Bytes of a step beside weights and pages: activations of one layer, read and written, and the
    logits, in float32.
    """
    layer = split.moved / max(1, split.layers)
    return tokens * layer + 4.0 * split.vocab * (rows + tokens / split.tensor)
