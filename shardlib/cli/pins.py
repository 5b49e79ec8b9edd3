"""Pins as a command line spells them."""

from __future__ import annotations

import json
from typing import Any

from shardlib.errors import PinError, raise_all
from shardlib.untrusted.json_types import JsonObject


def parse_pins(words: list[str]) -> JsonObject:
    """Pins from the command line: `key=value` with the value as JSON, or else as a string."""
    pins: dict[str, Any] = {}
    failures: list[str] = []
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not key or not equals or not value:
            failures.append(f"{word!r} is no KEY=VALUE")
        elif key in pins:
            failures.append(f"{key!r} is given twice")
        else:
            pins[key] = _value(value)
    if failures:
        raise_all(
            PinError,
            "pins are not usable",
            failures,
            hint="for example --pin mesh.tensor=8 --pin remat=full",
        )
    if pins:
        from shardlib.decisions.pin_words import aliased
        from shardlib.decisions.pins import Pins

        Pins.parse(pins)
        pins = {**aliased(pins)}
    return pins


def parse_allow(words: list[str]) -> JsonObject:
    """Dtypes that the planner may choose, as pins: `what=dtype` or `what=dtype,dtype`."""
    allowed: dict[str, list[str]] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not key or not equals or not value:
            raise PinError(f"--allow {word!r} is no WHAT=DTYPE\nTry: --allow moment_dtype=bfloat16")
        allowed.setdefault(key, []).extend(part.strip() for part in value.split(","))
    if not allowed:
        return {}
    from shardlib.decisions.pins import Pins

    Pins.parse({"allow": allowed})
    return {"allow": allowed}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def pin_text(pins: JsonObject) -> str:
    """Pins as they are spelled on a command line."""
    return ", ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in pins.items()
    )
