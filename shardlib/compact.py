"""Dataclasses as plain data, and as text in few lines: `__repr__ = compact` in one whose parts are
many or large.

>>> @dataclasses.dataclass(frozen=True)
... class Found:
...     name: str
...     parts: tuple[int, ...]
...     __repr__ = compact
>>> Found("a", (1,)), Found("b", (1, 2, 3, 4, 5))
(Found(name='a', parts=(1,)), Found(name='b', parts=<5 of int>))
>>> plain_fields(Found("a", (1,)))
{'name': 'a', 'parts': [1]}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

#: Characters of a part, and of all of them: ten lines of a terminal are 800.
_PART, _WHOLE = 64, 700


def plain_fields(value: object) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them."""
    fields = dataclasses.fields(cast("Any", value))
    return {entry.name: plain(getattr(value, entry.name)) for entry in fields}


def plain(value: Any) -> Any:
    """A value as JSON has it: a dataclass by its `to_json` or its fields, a tuple as a list."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return plain_fields(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        return {key: plain(item) for key, item in items.items()}
    return list(map(plain, value)) if isinstance(value, list | tuple) else value


def compact(self: object) -> str:
    """A dataclass with its parts; large ones are counted or named."""
    value = cast("Any", self)
    parts = (
        f"{entry.name}={_part(getattr(value, entry.name))}" for entry in dataclasses.fields(value)
    )
    text = ", ".join(parts)
    short = text if len(text) <= _WHOLE else text[:_WHOLE] + "..."
    return f"{type(value).__name__}({short})"


def _part(value: object) -> str:
    """A part, or how many there are of it, or its type."""
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        items = cast("Sequence[object]", value)
        if len(items) > 3 or any(dataclasses.is_dataclass(entry) for entry in items):
            kinds = {type(entry).__name__ for entry in items}
            return f"<{len(items)} of {kinds.pop() if len(kinds) == 1 else 'several types'}>"
    if dataclasses.is_dataclass(value):
        return f"<{type(value).__name__}>"
    text = repr(value)
    return text if len(text) <= _PART else text[:_PART] + "..."
