"""The table of docs/peers.md is that of the stored result, and so is its picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "peers.md").read_text()
STORED = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text())


def table() -> dict[str, list[str]]:
    lines = PAGE.split("<!-- peers -->\n")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in lines]
    return {name: rest for name, *rest in cells}


def test_the_table_is_what_was_measured() -> None:
    shown = table()
    assert shown.keys() == STORED["simulated"].keys()
    for name, (step, compiled, sent, memory, tpu_sent) in shown.items():
        one, tpu = STORED["simulated"][name], STORED["tpu"]["peers"][name]
        assert step == f"{one['over_flax_fsdp']:.2f}"
        assert compiled == f"{one['compile_seconds']:.1f} s"
        for said, value in (
            (sent, one["traffic"].get("wire_bytes", 0.0)),
            (memory, tpu.get("peak_bytes")),
            (tpu_sent, tpu.get("wire_bytes")),
        ):
            assert said == ("not compiled" if value is None else f"{value / 2**20:,.1f} MiB")


def test_all_have_the_same_losses() -> None:
    losses = [one["losses"] for one in STORED["simulated"].values()]
    assert len(losses) == 6
    assert all(abs(a - b) < 1e-4 for one in losses for a, b in zip(one, losses[0], strict=True))


def test_the_picture_has_every_ratio_of_a_step() -> None:
    picture = (ROOT / "docs" / "pictures" / "peers.svg").read_text()
    found = re.findall(r">(\d+\.\d\d)<", picture)
    assert [f"{one['over_flax_fsdp']:.2f}" for one in STORED["simulated"].values()] == found[:6]
