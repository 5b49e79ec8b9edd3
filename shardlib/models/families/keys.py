"""Keys of a configuration, read one by one; what is missing or wrong is remembered and reported at
once.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.models.config_parts import SIZE
from shardlib.untrusted import shown
from shardlib.untrusted.json_types import Json, JsonMapping


class Keys:
    """Reads keys of a configuration and remembers what is wrong with them."""

    def __init__(self, data: JsonMapping, defaults: JsonMapping | None = None):
        self.data = {**(defaults or {}), **data}
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.refused: list[str] = []

    def need(self, key: str, minimum: int = 1) -> int:
        """The size that a key has, at least `minimum`; what is missing or no size is remembered,
        and 1 stands in for it.
        """
        value = self.data.get(key)
        if value is None:
            self.missing.append(key)
        elif isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < SIZE:
            self.wrong.append(
                f"{key} is {shown(value)}; it is an integer from {minimum} on, below {SIZE:.0e}"
            )
        else:
            return value
        return 1

    def get(self, key: str, default: Json) -> Json:
        """The value of a key, or the default where it is absent or null; one of another type than
        the default is remembered.
        """
        value = self.data.get(key)
        if value is None:
            return default
        if expected := _unlike(value, default):
            self.wrong.append(f"{key} is {shown(value)}; it is {expected}")
            return default
        return value

    def part(self, key: str) -> Keys:
        """The keys of an object in it; of none where it is absent or null. What is wrong with them
        is remembered here.
        """
        nested = Keys(self.get(key, {}))
        nested.missing, nested.wrong, nested.refused = self.missing, self.wrong, self.refused
        return nested

    def refuse(self, wrong: object, message: str) -> None:
        """Remembers a setting that the reference model does not have."""
        if wrong:
            self.refused.append(message)


def _unlike(value: Json, default: Json) -> str:
    """Of what type a value should be like a default; empty where it is."""
    if isinstance(default, bool) or isinstance(value, bool):
        return (
            ""
            if isinstance(value, bool) and isinstance(default, bool)
            else "true or false"
            if isinstance(default, bool)
            else _KINDS[type(default)]
        )
    if isinstance(default, int) and isinstance(value, int):
        return "" if 0 <= value < SIZE else f"an integer from 0 on, below {SIZE:.0e}"
    fits = (
        isinstance(value, int | float)
        if isinstance(default, float)
        else isinstance(value, type(default))
    )
    return "" if fits else _KINDS[type(default)]


_KINDS: Mapping[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
