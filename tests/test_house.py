"""The house keeps its form: no import circles, lines of 100 columns, the field's words, documented public names.

`benchmarks/house.py` reads the figures; imports are in `tests/test_architecture.py`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks import house as read


@pytest.fixture(scope="module")
def house() -> dict[str, Any]:
    return read.house()


@pytest.mark.parametrize(
    "figure",
    [
        "circles",
        "classes cut over two files",
        "lines over 100 columns",
        "old words",
    ],
)
def test_figure_is_nothing(house: dict[str, Any], figure: str) -> None:
    assert not house[figure], house[figure]


@pytest.fixture(scope="module")
def limits() -> dict[str, Any]:
    return tomllib.loads((read.ROOT / "pyproject.toml").read_text())["tool"]["house"]


def test_code_keeps_within_its_budgets(limits: dict[str, Any]) -> None:
    code = {part: figures["code"] for part, figures in read.sizes(read.PACKAGE).items()}
    assert code.keys() == limits["budgets"].keys()
    assert {part: lines for part, lines in code.items() if lines > limits["budgets"][part]} == {}


def test_modules_hang_together_as_promised(limits: dict[str, Any]) -> None:
    shape = read.shape(read.PACKAGE)
    assert shape["fillers in 1,000 names"] <= limits["fillers"]
    assert shape["modules with one importer, %"] <= limits["one-importer"]
    assert shape["functions called once, from another file, %"] <= limits["called-once"]


def test_lines_of_code_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        '"""Says.\n\nMore."""\n\n# why\nx = (\n    1\n)\n\n\ndef f():\n    """One."""\n    return x\n'
    )
    assert read.code_lines(file) == 5


def test_cut_classes_are_found(tmp_path: Path) -> None:
    base, other = tmp_path / "base.py", tmp_path / "other.py"
    base.write_text("class Half:\n    pass\n\nclass Whole:\n    pass\n\nwhole = Whole()\n")
    other.write_text("class Other(base.Half):\n    pass\n\nclass More(Whole):\n    pass\n")
    assert read.cut_classes([base, other]) == ["Half"]


def test_public_names_describe_all_their_parameters(house: dict[str, Any]) -> None:
    assert house["parameters of public names that are not described"] == []


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
