"""What is wrong with a number of an exchange."""

from __future__ import annotations

import math
from collections.abc import Collection

from shardlib.untrusted.shown import shown


def whole(name: str, value: object, least: int) -> list[str]:
    """What is wrong with a whole number of at least `least`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return []
    return [f"{name} is {shown(value)}; it is an integer of at least {least}"]


def between(
    name: str, value: object, *, most: float, above: bool, reached: bool = False
) -> list[str]:
    """What is wrong with a number from 0 to less than `most`; above 0 where `above`."""
    number = (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    )
    fits = number <= most if reached else number < most
    if math.isfinite(number) and number >= 0 and fits and (number > 0 or not above):
        return []
    lower = "more than 0" if above else "at least 0"
    limit = f" and {'at most' if reached else 'less than'} {most:g}" if math.isfinite(most) else ""
    return [f"{name} is {shown(value)}; it is a number of {lower}{limit}"]


def one_of(name: str, value: object, words: Collection[str]) -> list[str]:
    """What is wrong with a word."""
    if isinstance(value, str) and value in words:
        return []
    return [f"{name} is {shown(value)}; it is one of {', '.join(map(repr, words))}"]
