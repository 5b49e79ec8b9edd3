"""Numbers as a command line spells them.

>>> numbers("0-3,8", "--lost"), sizes("8..64"), sizes("8,24,16")
((0, 1, 2, 3, 8), (8, 16, 32, 64), (8, 16, 24))
>>> duration("500ms", "--ttft"), duration("3h", "--mtbf")
(0.5, 10800.0)
>>> quantity("15T", "--tokens")
15000000000000.0
>>> price("2.40", "--price"), price("2.40/h", "--price"), price("48/d", "--price")
(2.4, 2.4, 2.0)
"""

from __future__ import annotations

import itertools
import re

from shardlib.errors import PlanError

#: Quantities below it are spelled with a unit.
LEAST = 1_000_000


def numbers(text: str, what: str) -> tuple[int, ...]:
    """Numbers and ranges: "0-3,8"; nothing for an empty text."""
    listed: list[int] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise PlanError(
                f"{what} has {word!r}, which is neither a number nor a range\nTry: {what} 0-7,16"
            )
        listed += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(sorted(set(listed)))


def sizes(text: str) -> tuple[int, ...]:
    """Numbers of devices: "8..16384" doubles from the first to the last, "8,24" lists them;
    ascending.
    """
    match = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
    if match is not None and 0 < int(match[1]) <= int(match[2]):
        first, last = int(match[1]), int(match[2])
        return tuple(first << step for step in range((last // first).bit_length()))
    counts = (
        sorted(int(word) for word in text.split(","))
        if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text)
        else []
    )
    if not counts or counts[0] < 1:
        raise PlanError(
            f"{text!r} says no numbers of devices\nTry: 8..16384 for doublings, or 8,24,48"
        )
    twice = [str(number) for number, after in itertools.pairwise(counts) if number == after]
    if twice:
        once = ",".join(map(str, dict.fromkeys(counts)))
        raise PlanError(f"{text!r} names {', '.join(dict.fromkeys(twice))} twice\nTry: {once}")
    return tuple(counts)


def duration(text: str, what: str) -> float:
    """Seconds of "500ms", "2s", "300us", "10m", "3h" or "30d"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|m|h|d|)\s*", text)
    if match is not None and not match[2]:
        likely = f"{match[1]}s, {match[1]}h or {match[1]}d"
        raise PlanError(f"{what} {text!r} has no unit: us, ms, s, m, h or d\nTry: {what} {likely}")
    if match is None or not float(match[1]):
        more = ", above 0" if match is not None else ", a number and us, ms, s, m, h or d"
        many = "; a number of devices after @ is for `shardlib compare`" if "@" in text else ""
        raise PlanError(f"{what} {text!r} is no duration{more}{many}\nTry: {what} 3h, or 500ms")
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    return float(match[1]) * units[match[2]]


def quantity(text: str, what: str) -> float:
    """A number with K, M, B (or G), or T for thousands, millions, billions, trillions."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMBGT]?)\s*", text.upper())
    if match is not None and not match[2] and 0 < float(match[1]) < LEAST:
        raise PlanError(
            f"{what} {text!r} has no unit, K, M, B or T, and is less than {LEAST:,}\nTry: {what}"
            f" {match[1]}B or {match[1]}T"
        )
    if match is None or not float(match[1]):
        raise PlanError(
            f"{what} {text!r} is no number above 0, which K, M, B or T may follow\nTry: {what} 15T"
        )
    return float(match[1]) * {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}[match[2]]


def price(text: str, what: str) -> float:
    """Money of an hour: "2.40", "2.40/h", or "57.60/d"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:/\s*(h|d))?\s*", text)
    if match is None:
        raise PlanError(
            f"{what} {text!r} is no price: a number in your own money, of an hour, or with /h or"
            f" /d\nTry: {what} 2.40/h"
        )
    return float(match[1]) / {None: 1.0, "h": 1.0, "d": 24.0}[match[2]]
