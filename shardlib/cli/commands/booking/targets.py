"""Options that say what a run has to do, and by when.

>>> prices(["h100=2.40,v5p=4.20"])
{'h100': 2.4, 'v5p': 4.2}
>>> failures("3h@16384")
Failures(every=10800.0, devices=16384)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from shardlib.booking.target import Failures
from shardlib.cli.numbers import duration, price
from shardlib.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What machines cost, and how often they fail."""

    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="CHIP=MONEY[/h]",
            help="Of a chip and hour, or /d, in your own money: h100=2.40,v5p=4.20. Repeatable.",
        ),
    ] = None
    mtbf: Annotated[
        str | None,
        typer.Option(
            "--mtbf",
            metavar="3h@16384",
            help="Between two failures of a machine of so many devices; others in proportion.",
        ),
    ] = None


def prices(words: Sequence[str]) -> dict[str, float]:
    """Chips and what an hour of one costs."""
    costs: dict[str, float] = {}
    for word in (part.strip() for text in words for part in text.split(",")):
        match = re.fullmatch(r"([\w-]+)=(.+)", word)
        if match is None or match[1] in costs:
            twice = " stands there twice" if match else " says no price"
            raise PlanError(f"--price {word!r}{twice}\nTry: --price h100=2.40,v5p=4.20")
        costs[match[1]] = price(match[2], f"--price {match[1]}")
    return costs


def failures(text: str | None) -> Failures | None:
    """How often machines fail."""
    if text is None:
        return None
    interval, separator, devices = text.partition("@")
    if not separator or not re.fullmatch(r"0*[1-9]\d{0,11}", devices.strip()):
        raise PlanError(
            f"--mtbf {text!r} does not say of how many devices: machines of many sizes are"
            " compared, and larger ones fail oftener\nTry: --mtbf 3h@16384"
        )
    return Failures(every=duration(interval, "--mtbf"), devices=int(devices))
