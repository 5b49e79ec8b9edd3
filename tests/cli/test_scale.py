"""`shardlib scale`: curves over numbers of devices."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest


@pytest.mark.long
def test_scale_strong_and_weak(shell, shallow: Path, tmp_path: Path):
    picture = tmp_path / "curve.svg"
    words = (
        "scale",
        str(shallow),
        "--topology",
        "h100:8",
        "--devices",
        "1..2",
        "--batch",
        "32",
        "--seq",
        "64",
        "--pin",
        "mesh.stage=1",
        "--pin",
        "mesh.context=1",
    )
    code, out, err = shell(*words, "--svg", str(picture), "--json")
    assert (code, err) == (0, "")
    strong = json.loads(out)
    assert [point["devices"] for point in strong["points"]] == [1, 2] and {
        point["tokens"] for point in strong["points"]
    } == {32 * 64}
    assert picture.read_text().startswith("<svg ")
    first, second = (
        json.loads(shell("plan", str(shallow), "--topology", f"h100:{n}", *words[6:], "--json")[1])
        for n in (1, 2)
    )
    assert (
        strong["points"][0]["digest"] == first["digest"]
        and strong["points"][1]["step_seconds"] <= second["estimate"]["step_seconds"]
    )
    assert all(
        b["step_seconds"] <= a["step_seconds"] for a, b in itertools.pairwise(strong["points"])
    )
    code, out, _ = shell(*words, "--weak", "--json")
    weak = json.loads(out)
    assert weak["kind"] == "weak" and [point["tokens"] for point in weak["points"]] == [
        32 * 64,
        64 * 64,
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "0"), "'0' says no numbers of devices"),
        (("--devices", "x", "--json"), "'x' says no numbers"),
        (("--devices", "3,1,3,3"), "'3,1,3,3' names 3 twice\nTry: 1,3"),
        (("--devices", "8"), "the size of the batch of"),
    ],
)
def test_scale_refuses_nonsense(shell, card: Path, words: tuple[str, ...], message: str):
    code, out, err = shell("scale", str(card), "--topology", "h100:8", *words)
    assert code == 2 and message in err and (not out or "--json" in words)
