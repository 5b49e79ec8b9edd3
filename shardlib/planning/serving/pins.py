"""Decisions of a serving plan that are fixed by hand."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self, cast

from shardlib.errors import PinError, raise_all

#: A pin's value: a number, or the sizes of a mesh.
ServingPin = int | Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ServingPins:
    """What is fixed; None where the search decides.

    Attributes:
        tensor: devices that share every layer.
        replicas: groups of such devices, each of which serves requests of its own.
        batch: requests that a replica serves at a time.
        chunk: tokens of prompts that a step computes at most.
        page: tokens of a page.
    """

    tensor: int | None = None
    replicas: int | None = None
    batch: int | None = None
    chunk: int | None = None
    page: int | None = None

    @classmethod
    def parse(cls, given: Mapping[str, ServingPin] | None) -> Self:
        """The pins of a table by their words; "mesh" is a table of "tensor" and "data", which is
        the number of replicas.

        Args:
            given: words and values; None for no pins.
        """
        table: dict[str, object] = dict(given or {})
        mesh = table.pop("mesh", {})
        failures: list[str] = []
        if isinstance(mesh, Mapping):
            for axis, size in cast("Mapping[str, object]", mesh).items():
                table["replicas" if axis == "data" else axis] = size
        else:
            failures.append(f"mesh is {mesh!r}; it is a table such as {{'tensor': 8}}")
        words = [field.name for field in fields(cls)]
        for word, value in table.items():
            if word not in words:
                near = difflib.get_close_matches(word, [*words, "mesh"], 1)
                hint = f"; do you mean {near[0]!r}?" if near else ""
                failures.append(f"{word!r} is no decision of serving{hint}")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                failures.append(f"{word} is {value!r}; it is a whole number from 1 on")
        if failures:
            raise_all(
                PinError,
                "the pins cannot be kept",
                failures,
                hint=f"decisions are mesh, {', '.join(words)}",
            )
        return cls(**{word: value for word, value in table.items() if isinstance(value, int)})

    def changed(self, others: Self) -> Self:
        """These pins with others in their place.

        Args:
            others: those that are not None count.
        """
        values = {field.name: getattr(others, field.name) for field in fields(others)}
        return replace(self, **{name: value for name, value in values.items() if value is not None})

    def to_json(self) -> dict[str, int]:
        """The pins that there are."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        }
