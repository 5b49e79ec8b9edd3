"""The figures of serving that were learned from published runs.

They were fitted to rows of four sources by `python benchmarks/published_serving.py --fit`, which
also says how well each source is predicted by figures that were fitted to the others. Rates of
chips and links are those of the catalogue; a share says how much of one a step reaches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files

from shardlib.errors import ArgumentError, raise_all

#: The file beside this one that has them.
FILE = "constants.json"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What separates a step from the data sheets of its machine. Shares are above 0 and at most 1.

    Attributes:
        matmul: share of the peak FLOP/s that matmuls of many tokens sustain.
        eight_bit: the same for those in 8-bit formats.
        memory: share of the memory's rate at which weights are read.
        cache: the same for keys and values.
        attention: share of the peak FLOP/s of attention of prompts.
        moved: times that the activations of matmuls are moved, element-wise work beside them
            included.
        latency: times as long as the catalogue says that an all-reduce of nothing takes.
        links: share of the links' rate that all-reduces reach.
        layer_s: fixed seconds of every layer of a step: launches, synchronisation.
        step_s: fixed seconds of a step: launch, sampling, the host.
        row_s: seconds of a step for each request that gets a token: sampling and the host.
    """

    matmul: float
    eight_bit: float
    memory: float
    cache: float
    attention: float
    moved: float
    latency: float
    links: float
    layer_s: float
    step_s: float
    row_s: float

    def __post_init__(self) -> None:
        shares = ("matmul", "eight_bit", "memory", "cache", "attention", "links")
        failures = [
            f"{field.name} is {getattr(self, field.name)!r}"
            for field in fields(self)
            if not 0 < getattr(self, field.name) <= (1 if field.name in shares else 1e6)
        ]
        if failures:
            raise_all(ArgumentError, "constants of serving are not usable", failures)


@lru_cache(maxsize=1)
def learned() -> Constants:
    """The constants that come with shardlib."""
    text = files("shardlib.cost.serving").joinpath(FILE).read_text()
    return Constants(**json.loads(text)["constants"])
