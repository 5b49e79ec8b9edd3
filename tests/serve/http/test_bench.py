"""`shardlib bench-serve` asks what is stored, and tells what it saw."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from shardlib.errors import DataError
from shardlib.serve.hosting import Deployment
from shardlib.serve.measuring import MeasuredAnswer, figures, read_workload
from tests.serve.http.conftest import TOKENS
from tests.serve.http.test_load import held, idle


@pytest.mark.unit
def test_figures_are_those_of_a_timetable_by_hand():
    seen = [
        MeasuredAnswer(begun=0.0, first=0.1, ended=1.1, tokens=11),  # 0.1 s a token
        MeasuredAnswer(begun=0.5, first=0.3, ended=0.5, tokens=2, cached=16),  # 0.2 s
        MeasuredAnswer(begun=1.0, first=0.2, ended=0.2, tokens=1),
        MeasuredAnswer(begun=1.0, first=None, ended=0.0, status=429, error="busy"),
        MeasuredAnswer(begun=1.0, first=0.2, ended=1.0, tokens=4, error="cut off"),
    ]
    found = figures(seen, ttft_limit=0.25, tpot_limit=0.15)
    assert (found["answered"], found["refused"], found["failed"]) == (3, 1, 1)
    assert found["seconds"] == 2.0 and found["output_tokens"] == 14
    assert found["output_tokens_per_second"] == 7.0 and found["cached_tokens"] == 16
    assert found["ttft_seconds"]["p50"] == pytest.approx(0.2)
    assert found["tpot_seconds"]["mean"] == pytest.approx(0.15)
    assert found["in_time"] == 2 / 5
    assert figures(seen)["in_time"] == 3 / 5


@pytest.mark.unit
def test_workloads_are_drawn_and_timed_the_same_every_time():
    text = json.dumps([{"length": 5, "most": 2, "at": 1.0}, {"prompt": [7], "most": 1}]).encode()
    jobs = read_workload(text, "w", seed=3)
    assert [(job.at, len(job.prompt), job.most) for job in jobs] == [(0.0, 1, 1), (1.0, 5, 2)]
    assert jobs == read_workload(text, "w", seed=3) != read_workload(text, "w", seed=4)
    many = read_workload(json.dumps([{"length": 1, "most": 1}] * 4000).encode(), "w", rate=20.0)
    assert many[-1].at == pytest.approx(200, rel=0.1)
    gaps = [two.at - one.at for one, two in itertools.pairwise(many)]
    assert sum(gap**2 for gap in gaps) / len(gaps) == pytest.approx(2 / 20**2, rel=0.2)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "holds no list of requests"),
        ({}, "holds no list of requests"),
        ([{"most": 1}], "has a prompt of tokens, or the length of one"),
        ([{"prompt": [1], "length": 3, "most": 1}], "has a prompt of tokens, or the length"),
        ([{"length": 1, "most": 0}], "at least one token"),
        ([{"length": 1, "most": True}], "most"),
        ([{"length": 1, "most": 1, "at": -1}], "times are from 0 on"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_workload_is_said(data: Any, said: str):
    with pytest.raises(DataError, match=said):
        read_workload(json.dumps(data).encode(), "w")


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Twelve requests in a tenth of a second."""
    path = tmp_path / "workload.json"
    jobs = [
        {"length": 5 + number, "most": 1 + 3 * number, "at": number / 100} for number in range(12)
    ]
    path.write_text(json.dumps(jobs))
    return path


def test_a_server_is_asked(
    url: str, deployed: Deployment, workload: Path, tmp_path: Path, shell: Any
):
    (tmp_path / "token").write_text(TOKENS[0])

    def run(more: str) -> str:
        words = f"bench-serve {workload} --url {url}/v1 --token-file {tmp_path / 'token'}"
        code, out, err = shell(*words.split(), "--together", "4", *more.split())
        assert code == 0, err
        return out

    out = tmp_path / "result.json"
    found = json.loads(run(f"--json --ttft 60s --tpot 10s --out {out}"))
    assert (found["answered"], found["in_time"]) == (12, 1.0)
    assert found["output_tokens"] == sum(1 + 3 * number for number in range(12))
    seen = json.loads(out.read_text())["seen"]
    assert [one["tokens"] for one in seen] == [1 + 3 * number for number in range(12)]
    assert all(0 < one["first"] <= one["ended"] for one in seen)
    text = run("--ttft 0.001ms")
    assert "12 of 12 requests answered" in text and "in time         0.0% of all requests" in text
    with held(deployed), deployed.worker.places(8):  # the server is full
        found = json.loads(run("--json"))
    assert (found["answered"], found["refused"], found["in_time"]) == (0, 12, 0.0)
    assert idle(deployed)


@pytest.mark.long
def test_a_server_is_started_for_as_long_as_it_takes(card: Path, workload: Path, shell: Any):
    words = f"bench-serve {workload} --serve {card} --slots 2 --json"
    found = json.loads(shell(*words.split())[1])
    assert found["answered"] == 12
