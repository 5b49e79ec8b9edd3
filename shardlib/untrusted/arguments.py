"""Arguments of public functions: whether they are of the kind that is asked for, and seeds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, SupportsIndex

from shardlib.errors import ArgumentError, raise_all

#: Seeds are below it.
SEEDS = 2**31
#: Whether a value is of a kind, the kind in words, and an example.
Kind = tuple[Callable[[Any], bool], str, str]


def require_kinds(
    function: str,
    kinds: Mapping[str, Kind],
    values: Mapping[str, object],
    *,
    needed: Collection[str],
) -> None:
    """Refuses arguments of the wrong kind.

    Args:
        values: arguments by name; None where one is left out.
    """
    wrong = [
        name
        for name, value in values.items()
        if (value is not None or name in needed) and not kinds[name][0](value)
    ]
    if wrong:
        raise_all(
            ArgumentError,
            f"shardlib.{function} cannot use its arguments",
            [f"{name} is {_shown(values[name])} and no {kinds[name][1]}" for name in wrong],
            hint="; ".join(kinds[name][2] for name in wrong),
        )


def read_seed(seed: SupportsIndex) -> int:
    """A seed as an integer."""
    try:
        number = operator.index(seed)
    except TypeError:
        raise ArgumentError(
            f"seed is {_shown(seed)} and no integer\nTry: an integer from 0 to {SEEDS - 1}"
        ) from None
    if not 0 <= number < SEEDS:
        raise ArgumentError(f"seed {number} is out of range\nTry: an integer from 0 to {SEEDS - 1}")
    return number


def _shown(value: Any) -> str:
    """A value in a few words."""
    if value is None or isinstance(value, (bool, int, float, str)):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}..."
    return (
        f"the function {value.__name__}"
        if hasattr(value, "__name__")
        else f"a {type(value).__name__}"
    )
