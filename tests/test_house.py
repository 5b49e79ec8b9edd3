"""The house keeps its form: sizes of files and folders, lines, and the field's words.

`benchmarks/house.py` reads the figures; imports are in `tests/test_architecture.py`.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

import shardlib
from benchmarks import house as read

#: Least share of the public functions of two parameters or more whose docstring has Args.
LEAST_DESCRIBED = 0.8
#: Uses of `Any` in signatures of public functions: where nothing says more, a name does, with a
#: comment on what it stands for.
MOST_ANY = 0
#: Most names that stand for `Any` alone; fewer are better.
MOST_NAMES_OF_ANY = 14


@pytest.fixture(scope="module")
def house() -> dict[str, Any]:
    return read.house()


@pytest.mark.parametrize(
    "figure",
    [
        "circles",
        "lines over 100 columns",
        "files over 300 lines",
        "folders over 12 files",
        "old words",
        "classes over 12 fields",
        "functions over 8 parameters",
    ],
)
def test_figure_is_nothing(house: dict[str, Any], figure: str) -> None:
    assert not house[figure], house[figure]


def test_tables_and_entries_are_large_and_say_why() -> None:
    """The lists of exceptions have no name that is gone, or has become small."""
    large: set[str] = set()
    for _, node in read.definitions(list(read.sources().values())):
        if isinstance(node, ast.ClassDef):
            big = read.fields(node) > read.FIELDS
        else:
            big = read.parameters(node) > read.PARAMETERS
        large |= {node.name} if big else set()
    assert large == {*read.TABLES, *read.ENTRIES}
    assert all({**read.TABLES, **read.ENTRIES}.values())
    assert not [
        name
        for name, why in read.ENTRIES.items()
        if "shardlib.__all__" in why and name not in shardlib.__all__
    ]


def test_public_names_describe_all_their_parameters(house: dict[str, Any]) -> None:
    assert house["docstrings"]["parameters of them that are not described"] == []


def test_most_public_functions_describe_their_parameters(house: dict[str, Any]) -> None:
    figures = house["docstrings"]
    most, described = (
        figures["public functions of two parameters or more"],
        figures["of these with Args"],
    )
    assert described >= LEAST_DESCRIBED * most, f"{described} of {most}"


def test_signatures_say_more_than_any(house: dict[str, Any]) -> None:
    assert house["uses of Any"]["signatures of public functions"] <= MOST_ANY
    assert len(house["uses of Any"]["names that stand for it"]) <= MOST_NAMES_OF_ANY


def test_names_of_sections_are_read() -> None:
    doc = "One.\n\n    Args:\n        a, b: x.\n            c: more.\n    Raises:\n        E: d.\n    "
    assert read.told(doc, "Args") == {"a", "b"}
    assert read.told(doc, "Args", "Raises") == {"a", "b", "E"}

    def of(a: int, c: int) -> None:
        """One.

        Args:
            a: first.
        """

    assert read.untold(of, "of") == ["of(c)"]


def test_old_words_are_found() -> None:
    assert read.old_words("a weight at rest, at\nrest") == {"at rest": 2}
    assert read.old_words("the rest of it") == {}
