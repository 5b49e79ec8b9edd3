from __future__ import annotations

import math
from pathlib import Path

from shardlib.training.measures import EventFiles, JsonLines, by_step, read_records


def test_lines_come_back(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write({"step": 1, "loss": 2.5, "skipped": 1.0})
    sink.write({"step": 2, "loss": math.inf})
    assert read_records(path) == [
        {"step": 1, "loss": 2.5, "skipped": 1.0},
        {"step": 2, "loss": math.inf},
    ]  # before it is closed: every line is flushed
    sink.close()


def test_a_torn_line_costs_itself_alone(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    for torn in ('{"step": 2, "lo', '{"step": 2', "{", '{"step": 2, "loss": 1.0}', "[1]\n"):
        path.write_text('{"step": 1, "loss": 2.5}\n' + torn)
        sink = JsonLines(path)
        sink.write({"step": 3, "loss": 0.5})
        sink.close()
        assert [record["step"] for record in read_records(path)] == (
            [1, 2, 3] if torn.endswith("1.0}") else [1, 3]
        )
    assert read_records(tmp_path / "none.jsonl") == []


def test_steps_that_were_done_again_count_once():
    first = [{"step": step, "loss": float(step)} for step in range(1, 8)]
    again = [
        {"event": "resumed", "step": 4},
        *({"step": step, "loss": 10.0 * step} for step in (5, 6)),
    ]
    found = by_step([*first, *again])
    assert {step: record["loss"] for step, record in found.items()} == {
        1: 1.0,
        2: 2.0,
        3: 3.0,
        4: 4.0,
        5: 50.0,
        6: 60.0,
    }


def test_tensorboard_files_hold_the_numbers(tmp_path: Path):
    sink = EventFiles(tmp_path)
    sink.write({"step": 3, "loss": 0.125})
    sink.write({"step": 3, "event": "skipped"})
    sink.close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    assert (
        b"loss" in data and b"\x00\x00\x00>" in data and b"skipped" in data
    )  # 0.125 as a little-endian float
