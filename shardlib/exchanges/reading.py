"""Reads an exchange as users pin it.

>>> read_exchange("exchange", "diloco:2:100").every
100
>>> read_exchange("exchange", "gossip:4:ring").graph
'ring'
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
from shardlib.exchanges.compressed import Compressed
from shardlib.exchanges.values import KINDS, Exchange, Form
from shardlib.untrusted.shown import shown

#: How pins spell exchanges.
EXAMPLES = (
    "'exact', 'diloco:2:100' (islands, steps between meetings), 'gossip:8:exponential' (islands,"
    " graph), 'compressed:2:powersgd' (islands, how), shardlib.DiLoCo(islands=2)"
)


def read_exchange(word: str, value: object) -> Exchange:
    """An exchange of a value, a word, or plain data."""
    if isinstance(value, Exchange):
        return value
    if isinstance(value, Asynchronous):
        refuse_pin(word)
    if isinstance(value, str):
        kind, *parts = value.lower().split(":")
        form = _form(word, value, kind)
        return _made(word, value, form, _settings(word, value, form, parts))
    if isinstance(value, Mapping):
        options = dict(cast("Mapping[str, Any]", value))
        return _made(word, value, _form(word, value, options.pop("kind", None)), options)
    raise PinError(f"{word} is {shown(value)}; it is one of {EXAMPLES}")


def _form(word: str, value: object, kind: object) -> Form:
    """The type of the exchanges of a kind."""
    if kind == Asynchronous.kind:
        refuse_pin(word)
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    near = difflib.get_close_matches(str(kind), KINDS, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise PinError(f"{word} is {shown(value)}; it is one of {EXAMPLES}{meant}")


def _settings(word: str, value: str, form: Form, parts: list[str]) -> dict[str, Any]:
    """Settings of what stands after the kind: some by their places, then name=value."""
    settings: dict[str, Any] = {}
    for place, text in enumerate(parts):
        name, named, setting = text.rpartition("=")
        if not named and place >= len(form.places):
            first_name = next(
                (field.name for field in fields(form) if field.name not in form.places), ""
            )
            hint = f"{HINT}{first_name}={text}" if first_name else f"; {form.kind} has no settings"
            raise PinError(f"{word} is {shown(value)}, whose part {text!r} has no name{hint}")
        name = name if named else form.places[place]
        if name in settings:
            raise PinError(f"{word} is {shown(value)}, which says {name} twice{HINT}{name} once")
        settings[name] = _read(setting)
    return settings


def _read(text: str) -> int | float | str:
    """A number, or the word that it is."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _made(word: str, value: object, form: Form, settings: dict[str, Any]) -> Exchange:
    """The exchange of a kind with settings."""
    if form is Compressed:
        return Compressed.read(settings)
    names = [field.name for field in fields(form)]
    strange = sorted(str(name) for name in settings if name not in names)
    if strange:
        has = f"has {', '.join(names)}" if names else "has no settings"
        raise PinError(f"{word} is {shown(value)}; {form.kind} {has}, and not {', '.join(strange)}")
    return form(**settings)
