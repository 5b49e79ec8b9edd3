"""Reads an exchange as users pin it.

>>> read_exchange("exchange", "diloco:2:100") == read_exchange("exchange", DiLoCo())
True
>>> read_exchange("exchange", {"kind": "diloco", "islands": 4}).islands
4
>>> print(read_exchange("exchange", "diloco:4:50:momentum=0"))
diloco:4:50:momentum=0
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from shardlib.errors import HINT, PinError
from shardlib.exchanges.asynchronous import Asynchronous, refuse_pin
from shardlib.exchanges.values import KINDS, DiLoCo, Exact, Exchange
from shardlib.untrusted.shown import shown

#: How pins spell exchanges.
EXAMPLES = "'exact', 'diloco:2:100' (islands, steps between meetings), shardlib.DiLoCo(islands=2)"
#: What stands in a word without its name, in its order.
_PLACES = ("islands", "every")


def read_exchange(word: str, value: object) -> Exchange:
    """An exchange of a value, a word, or plain data.

    Args:
        word: of the decision, for messages.
        value: what was given.

    Raises:
        PinError: it is none; the message says what would be one.
    """
    if isinstance(value, Exact | DiLoCo):
        return value
    if isinstance(value, Asynchronous):
        refuse_pin(word)
    if isinstance(value, str):
        kind, *rest = value.lower().split(":")
        return _made(word, value, kind, _settings(word, value, rest))
    if isinstance(value, Mapping):
        given = dict(cast("Mapping[str, Any]", value))
        return _made(word, value, given.pop("kind", None), given)
    raise PinError(f"{word} is {shown(value)}; it is one of {EXAMPLES}")


def _settings(word: str, value: str, rest: list[str]) -> dict[str, Any]:
    """Settings of what stands after the kind: numbers by their places, then name=number."""
    found: dict[str, Any] = {}
    for place, text in enumerate(rest):
        name, named, number = text.rpartition("=")
        if not named and place >= len(_PLACES):
            raise PinError(
                f"{word} is {shown(value)}, whose part {text!r} has no name{HINT}rate={text}"
            )
        name = name if named else _PLACES[place]
        if name in found:
            raise PinError(f"{word} is {shown(value)}, which says {name} twice{HINT}{name} once")
        found[name] = _number(word, value, number)
    return found


def _number(word: str, value: str, text: str) -> int | float:
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        raise PinError(
            f"{word} is {shown(value)}, whose part {text!r} is no number; exchanges are {EXAMPLES}"
        ) from None


def _made(word: str, value: object, kind: object, settings: dict[str, Any]) -> Exchange:
    """The exchange of a kind with settings.

    Raises:
        PinError: there is no such kind, or it has no such settings.
    """
    if kind == Asynchronous.kind:
        refuse_pin(word)
    if not isinstance(kind, str) or kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise PinError(f"{word} is {shown(value)}; it is one of {EXAMPLES}{meant}")
    form = KINDS[kind]
    known = [field.name for field in fields(form)]
    strange = sorted(str(name) for name in settings if name not in known)
    if strange:
        has = f"has {', '.join(known)}" if known else "has no settings"
        raise PinError(f"{word} is {shown(value)}; {kind} {has}, and not {', '.join(strange)}")
    return form(**settings)
