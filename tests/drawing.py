"""Which tests of a run are drawn: those that take long, and cases of large matrices, by a name that
changes with the commit.

    of a matrix (`pytest.mark.matrix`)                      one case in 12, at least one
    of what takes long (`pytest.mark.long`), all together   one in 6
    of other tests that compile or start processes          one case in 4, at least one
    of other unit tests                                     all

`long` is a test of three seconds or more, or a unit test of one. What the command line names is
run: a case by its name, the long tests and all cases of a file by the file's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A test with one set of arguments, as drawing sees it."""

    name: str
    tier: str
    matrix: bool = False
    long: bool = False

    @property
    def test(self) -> str:
        return self.name.partition("[")[0]


@dataclass(frozen=True)
class Draw:
    """How many are drawn; `name` decides which.

    >>> draw = Draw("a commit")
    >>> cases = [Case(f"tests/test_it.py::test_it[{n}]", "compile") for n in range(8)]
    >>> len(draw.kept(cases)), len(draw.kept(cases, named=["tests/test_it.py"]))
    (2, 8)
    """

    name: str
    matrix: int = 12
    long: int = 6
    others: int = 4
    units: int = 1

    def kept(self, cases: Sequence[Case], named: Iterable[str] = ()) -> set[str]:
        """The names of the cases that are run.

        Args:
            cases: all that were collected.
            named: files and cases that the command line names.
        """
        words = tuple(named)
        files = {word for word in words if word.endswith(".py")}
        asked = {case.name for case in cases if case.name.endswith(words)} if words else set()
        at_hand = {
            case.name for case in cases if case.name.partition("::")[0].endswith(tuple(files))
        }
        matrix = [case for case in cases if case.matrix]
        others = [case for case in cases if not case.matrix and case.name not in at_hand]
        kept = self._of_each(matrix, lambda case: self.matrix)
        kept |= self._of_each(
            others, lambda case: self.units if case.tier == "unit" else self.others
        )
        long = [case.name for case in cases if case.long and case.name in kept - at_hand]
        return (kept - set(long)) | self._some(long, self.long) | (at_hand - _names(matrix)) | asked

    def _of_each(self, cases: Sequence[Case], sparse: Callable[[Case], int]) -> set[str]:
        tests: dict[str, list[Case]] = {}
        for case in cases:
            tests.setdefault(case.test, []).append(case)
        return {
            name for group in tests.values() for name in self._some(_names(group), sparse(group[0]))
        }

    def _some(self, names: Iterable[str], sparse: int) -> set[str]:
        """One of so many, at least one of any."""
        drawn = sorted(names, key=lambda name: zlib.crc32(f"{self.name} {name}".encode()))
        return set(drawn[: -(-len(drawn) // sparse)])


def _names(cases: Iterable[Case]) -> set[str]:
    return {case.name for case in cases}
