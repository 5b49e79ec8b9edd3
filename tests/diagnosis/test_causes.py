"""What `shardlib.why` says of programs whose communication has a known cause, and warnings of the
compiler at their rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from shardlib.diagnosis.edits import edited
from shardlib.diagnosis.report import Diagnosis, report_text
from tests.diagnosis.causes import CASES, Case, diagnose, judge
from tests.docs.test_readme import compare

PAGE = (Path(__file__).parents[2] / "docs" / "why.md").read_text()
pytestmark = pytest.mark.long
TPU, GPU = pytest.mark.compiler("tpu"), pytest.mark.compiler("gpu")
TOPOLOGIES = ("cpu:8", pytest.param("v5e:4x2", marks=TPU), pytest.param("h100:8", marks=GPU))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_line_shardings_and_cure_of_a_known_cause(case: Case, topology: str) -> None:
    diagnosis = diagnose(case, topology)
    judgement = judge(case, diagnosis)
    allowed = case.misses.get(topology.partition(":")[0], ())
    wrong = [name for name in ("line", "shardings", "cure") if not getattr(judgement, name)]
    assert set(wrong) <= set(allowed), f"{wrong}\n{report_text(diagnosis)}"
    if topology == "cpu:8" and f"\n{case.line}\n" in PAGE and not case.backward:
        row = re.sub(r"tests/diagnosis/causes\.py:\d+", "causes.py", judgement.row)
        assert row in " ".join(PAGE.split())
        assert all(cure.text in PAGE for cure in diagnosis.cures[:1])


def test_the_page_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Callable[..., tuple[int, str, str]]
) -> None:
    """The first program of docs/why.md, and the command under it."""
    (program,) = re.findall(r"```python\n# model.py\n(.*?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"shardlib why model:case -t cpu:8\n\n```\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "model.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = shell("why", "model:case", "-t", "cpu:8")
    assert code == 0, err
    compare(shown, out)


def test_a_cure_by_shard_map_computes_the_same() -> None:
    (case,) = (case for case in CASES if case.name == "largest")
    diagnosis: Diagnosis = diagnose(case, "cpu:8")
    edits = [edit for cure in diagnosis.cures for edit in cure.edits]
    assert [edit.manual for edit in edits] == [True]
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    logits = np.random.default_rng(0).normal(size=case.arguments[0].shape).astype(np.float32)
    expected = case.function(logits)
    with edited(edits, mesh):
        assert "shard_map" in str(jax.make_jaxpr(case.function)(logits))
        np.testing.assert_array_equal(jax.jit(case.function)(logits), expected)


def test_warnings_of_the_compiler_are_at_their_rows() -> None:
    (case,) = (case for case in CASES if case.name == "crossing-layouts")
    diagnosis = diagnose(case, "cpu:8")
    warned = [row for row in diagnosis.rows if row.warnings]
    assert {row.source.user.line for row in warned if row.source.user} == {
        diagnosis.rows[0].source.user.line  # type: ignore[union-attr]
    }
    (warning,) = {text for row in warned for text in row.warnings}
    assert warning.startswith("involuntary full rematerialization: f32[32,64,16] is replicated")
    assert "the compiler: involuntary" in str(diagnosis)
