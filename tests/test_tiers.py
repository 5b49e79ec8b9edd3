"""Every file of tests has a tier, every table of tiers names what exists, and draws reach all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drawing import Case, Draw
from tests.tiers import TESTS, TIERS, tier_of

ROOT = Path(__file__).parents[1]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def test_every_file_has_a_tier():
    assert [path for path in FILES if tier_of(path) not in TIERS] == []


def test_tables_name_what_exists():
    assert [name for name in TESTS if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.parametrize(
    ("path", "tier"),
    [
        ("tests/cost/test_collectives.py", "unit"),
        ("tests/machines/test_local_machine.py", "processes"),
        ("tests/lowering/test_step.py", "compile"),
        ("tests/attic/test_old.py", None),
        ("shardlib/cost/collectives.py", "unit"),
        ("shardlib/layout.py", "unit"),
        ("shardlib/lowering/step.py", "compile"),
    ],
)
def test_the_longest_name_counts(path: str, tier: str | None):
    assert tier_of(path) == tier


CASES = [
    *(Case(f"tests/test_a.py::test_matrix[{n}]", "compile", matrix=True) for n in range(12)),
    *(Case(f"tests/test_a.py::test_long_{n}", "compile", long=True) for n in range(8)),
    *(Case(f"tests/test_b.py::test_long_{n}", "processes", long=True) for n in range(8)),
    *(Case(f"tests/test_b.py::test_cases[{n}]", "processes") for n in range(5)),
    Case("tests/test_b.py::test_alone", "processes"),
    *(Case(f"tests/test_c.py::test_unit[{n}]", "unit") for n in range(5)),
]


def test_so_many_are_drawn():
    """Two of twelve, four of sixteen, three of five, the one, and all of five."""
    draw = Draw("x", matrix=6, long=4, others=2, units=1)
    assert len(draw.kept(CASES)) == 2 + 4 + 3 + 1 + 5


def test_draws_reach_every_test_in_time():
    commits = [Draw(f"commit {n}").kept(CASES) for n in range(60)]
    assert set.union(*commits) == {case.name for case in CASES}
    assert Draw("commit 1").kept(CASES) == commits[1]


def test_what_is_named_is_run():
    kept = Draw("x").kept(CASES, ["tests/test_b.py", "tests/test_a.py::test_matrix[7]"])
    assert {case.name for case in CASES if case.name.startswith("tests/test_b.py")} <= kept
    assert "tests/test_a.py::test_matrix[7]" in kept
    assert len([name for name in kept if "test_long" in name and "test_a.py" in name]) == 2
    assert len([name for name in kept if "matrix" in name]) in (2, 3)


FAULTY = """
import subprocess, sys
import pytest

pytestmark = pytest.mark.unit

def test_compiles():
    import jax
    jax.jit(lambda x: x + 1)(1.0)

def test_starts_a_process():
    subprocess.run([sys.executable, "-c", ""], check=True)

@pytest.mark.compile
def test_may_compile():
    import jax
    jax.jit(lambda x: x + 2)(1.0)

def test_is_fine():
    pass
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_unit_test_that_compiles_or_starts_a_process_fails(tmp_path: Path):
    """In a run of its own, with the conftest of this one."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "drawing.py", "tiers.py"):
        (tmp_path / "tests" / name).write_text((ROOT / "tests" / name).read_text())
    (tmp_path / "tests" / "test_faulty.py").write_text(FAULTY)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    words = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-rE", "tests/test_faulty.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert "4 passed, 2 errors" in done.stdout, done.stdout
    assert (
        "ERROR tests/test_faulty.py::test_compiles - Failed: a test of the unit tier compiled 1"
        " program" in done.stdout
    )
    assert (
        "ERROR tests/test_faulty.py::test_starts_a_process - Failed: a test of the unit tier"
        " started a process: " in done.stdout
    )
