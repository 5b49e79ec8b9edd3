"""An exchange as the command line spells it."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any, ClassVar, Protocol


class Settings(Protocol):
    """A dataclass of settings with a word for its kind."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    kind: ClassVar[str]
    places: ClassVar[tuple[str, ...]]


def spelled(exchange: Settings) -> str:
    """The kind and what stands in its place, then what differs from the defaults:
    "diloco:2:100:rate=0.5".
    """
    settings: dict[str, Any] = {
        field.name: getattr(exchange, field.name) for field in fields(exchange)
    }
    usual = {field.name: field.default for field in fields(exchange)}
    words = [exchange.kind, *(text(settings[name]) for name in exchange.places)]
    words += [
        f"{name}={text(value)}"
        for name, value in settings.items()
        if name not in exchange.places and value != usual[name]
    ]
    return ":".join(words)


def text(value: object) -> str:
    """A setting as it is spelled."""
    return f"{value:g}" if isinstance(value, float) else str(value)
