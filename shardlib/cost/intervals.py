"""Intervals of predicted step times: measured over predicted seconds of published runs to which no
figure was fitted, by framework profile and vendor.

`intervals.json` is written by `benchmarks/intervals.py`, which also holds how many runs of each
source lie in the interval that the other sources give.

>>> megatron = interval("megatron-core-2024", "nvidia")
>>> megatron.low < 1 < megatron.high, interval("xla", "cpu") is None
(True, True)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from shardlib.compact import plain_fields
from shardlib.errors import PinError
from shardlib.untrusted.data import JsonMapping, JsonObject, construct

#: Plans whose predicted times differ by less than this share of the faster cannot be told apart: of
#: published pairs of plans of one job that lie nearer, over a fifth were measured the other way
#: around (`benchmarks/results/intervals.json`, `pairs`).
INDISTINGUISHABLE = 0.05


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Measured over predicted step time, between which a share of unseen runs lies.

    Attributes:
        low: the least ratio, 1 for a run that takes as long as predicted.
        high: the largest ratio.
        share: the share of runs that lie between, with equal weight for every source.
        runs: number of published runs behind it.
        sources: number of their publications.
        profile: the framework profile of the runs; "" for all of the vendor's chips.
        vendor: of the chips.
    """

    low: float
    high: float
    share: float
    runs: int
    sources: int
    profile: str
    vendor: str

    def to_json(self) -> JsonObject:
        """The interval as plain data."""
        return plain_fields(self)

    @classmethod
    def from_json(cls, data: JsonMapping) -> Interval:
        """Reads what `to_json` wrote."""
        return construct(cls, data, "the interval", PinError)


@lru_cache(maxsize=1)
def intervals() -> Mapping[tuple[str, str], Interval]:
    """The intervals shipped with shardlib, by framework profile and vendor."""
    text = (resources.files("shardlib.cost") / "intervals.json").read_text(encoding="utf-8")
    every = [Interval.from_json(entry) for entry in json.loads(text)["intervals"]]
    return {(entry.profile, entry.vendor): entry for entry in every}


def interval(profile: str, vendor: str) -> Interval | None:
    """The interval of plans under a framework profile: its own, or that of all profiles on the
    vendor's chips where too few sources have it; None where nothing was published.
    """
    all_intervals = intervals()
    return all_intervals.get((profile, vendor), all_intervals.get(("", vendor)))
