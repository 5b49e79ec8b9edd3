"""How the next token is chosen: what a request may ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlib.errors import ArgumentError, raise_all

#: Tokens with a bias, and likeliest tokens that are listed, at most: those of OpenAI's interface.
MOST_BIASED, MOST_LISTED = 300, 20


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: likeliest tokens that are left to choose from; 0 for all.
        top_p: of those, the fewest likeliest whose probabilities add up to it are left.
        min_p: of those, tokens at least so likely, over the likeliest, are left.
        seed: of the choices: the same seed, prompt and settings give the same tokens, whatever
            else is served.
        frequency: is subtracted from the logit of a token for each time that the answer has it.
        presence: is subtracted from the logit of a token that the answer has.
        repetition: positive logits of tokens that prompt or answer have are divided by it, negative
            ones multiplied.
        bias: is added to logits, by token.
        barred: tokens that are never chosen.

    Raises:
        ArgumentError: a figure is not usable.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict[int, float])
    barred: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {value!r}; it is a number {what}"
            for name, value, what, right in (
                ("temperature", self.temperature, "from 0 on", lambda x: x >= 0),
                ("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1),
                ("min_p", self.min_p, "from 0 to 1", lambda x: 0 <= x <= 1),
                ("frequency", self.frequency, "from -2 to 2", lambda x: -2 <= x <= 2),
                ("presence", self.presence, "from -2 to 2", lambda x: -2 <= x <= 2),
                ("repetition", self.repetition, "above 0", lambda x: x > 0),
            )
            if not number(value) or not right(value)
        ]
        failures += [
            f"{name} is {value!r}; it is a whole number {what}"
            for name, value, what, right in (
                ("top_k", self.top_k, "from 0 to 2^31 - 1", lambda x: 0 <= x < 1 << 31),
                ("seed", self.seed, "from 0 to 2^32 - 1", lambda x: 0 <= x < 1 << 32),
            )
            if not whole(value) or not right(value)
        ]
        failures += [
            f"bias of token {token!r} is {value!r}; it is a number from -100 to 100"
            for token, value in self.bias.items()
            if not number(value) or not -100 <= value <= 100
        ][:3]
        if len(self.bias) > MOST_BIASED:
            failures.append(f"{len(self.bias)} tokens have a bias; at most {MOST_BIASED} may")
        if failures:
            raise_all(ArgumentError, "the next token cannot be chosen so", failures)

    def __hash__(self) -> int:
        return hash((self.temperature, self.seed, frozenset(self.bias.items()), self.barred))

    @property
    def penalises(self) -> bool:
        """Whether what has been said counts."""
        return bool(self.frequency or self.presence or self.repetition != 1)


def whole(value: object) -> bool:
    """Whether a value is a whole number, which no boolean is."""
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: object) -> bool:
    """Whether a value is a number, and finite; no boolean is."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
