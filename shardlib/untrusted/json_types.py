"""Types of plain data, by the names that signatures use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

#: Plain data, as JSON and TOML have it: None, booleans, numbers, strings, and lists and dicts of
#: plain data, with strings as keys.
Json: TypeAlias = Any
#: An object of plain data that whoever makes it may still change.
JsonObject: TypeAlias = dict[str, Json]
#: An object of plain data that is only read.
JsonMapping: TypeAlias = Mapping[str, Json]
