"""What a server is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlib.cost.serving.served_model import STORED
from shardlib.errors import ArgumentError, raise_all

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
        ArgumentError: values that ask for nothing; all of them are listed.
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
            if isinstance(value := getattr(self, name), bool)
            or not isinstance(value, int)
            or not 1 <= value <= LONGEST
        ]
        failures += [
            f"{name} is {value!r}; it is {what} above 0"
            for name, what in (
                ("rate", "requests a second"),
                ("ttft", "seconds"),
                ("tpot", "seconds"),
            )
            if (value := getattr(self, name)) is not None
            and (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not (value > 0 and math.isfinite(value))
            )
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
