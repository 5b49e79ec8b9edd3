"""Rows of `benchmarks/tables/mutations.yaml` keep up with the code that they change."""

from __future__ import annotations

import ast

from benchmarks.environment import ROOT
from benchmarks.mutations import MUTATIONS


def test_mutated_text_occurs_once_and_still_parses() -> None:
    stale = []
    for mutation in MUTATIONS:
        text = (ROOT / "shardlib" / mutation.file).read_text()
        if text.count(mutation.before) != 1:
            stale.append((mutation.name, mutation.file, text.count(mutation.before)))
        else:
            ast.parse(text.replace(mutation.before, mutation.after), mutation.name)
    assert stale == []


def test_responsible_tests_exist() -> None:
    paths = {
        (mutation.name, word.split("::")[0])
        for mutation in MUTATIONS
        for word in mutation.tests.split()
        if word.startswith("tests/")
    }
    assert {name for name, _ in paths} == {mutation.name for mutation in MUTATIONS}
    assert [path for _, path in paths if not (ROOT / path).exists()] == []
