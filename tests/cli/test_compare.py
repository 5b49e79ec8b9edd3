"""`shardlib compare`: words, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardlib

WORDS = (
    *("compare", "tests.cli.perceptron:make", "--tokens", "4T", "--topologies", "h100:2,v5e"),
    *("--deadline", "40d", "--largest", "4"),
)


def test_a_comparison_is_a_table_json_pictures_and_plans(shell, tmp_path: Path):
    files = [tmp_path / name for name in ("a.svg", "a.html", "plans")]
    more = ("--svg", str(files[0]), "--html", str(files[1]), "--plans", str(files[2]))
    code, out, err = shell(*WORDS, *more, "--price", "h100=2,v5e=0.5", "--mtbf", "3h@64", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["target"]["mtbf"] == {"seconds": 10800.0, "devices": 64}
    assert files[0].read_text().startswith("<svg ") and "<table" in files[1].read_text()
    digests = {shardlib.Plan.from_json(p.read_text()).digest for p in files[2].iterdir()}
    chosen = [one[what] for one in data["families"] for what in ("smallest", "cheapest")]
    assert digests == {one["digest"] for one in chosen if one is not None} and digests


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--price", "2.40"), "--price '2.40' says no price\nTry: --price h100=2.40"),
        (("--price", "h100=1,h100=2"), "'h100=2' stands there twice"),
        (("--price", "h100=0"), "the price of h100 is 0.0; it is a number above 0"),
        (("--mtbf", "3h"), "does not say of how many devices"),
        (("--mtbf", "3h@0"), "does not say of how many devices"),
        (("--plans", "/nowhere/at/all"), "the folder /nowhere/at for all does not exist"),
        (("--deadline", "soon"), "--deadline 'soon' is no duration"),
        (
            ("--deadline", "30"),
            "error: --deadline '30' has no unit: us, ms, s, m, h or d\nTry: --deadline 30s, 30h or"
            " 30d\n",
        ),
        (
            ("--tokens", "15"),
            "error: --tokens '15' has no unit, K, M, B or T, and is less than 1,000,000\nTry:"
            " --tokens 15B or 15T\n",
        ),
        (
            ("--price", "h100=2/week"),
            "error: --price h100 '2/week' is no price: a number in your own money, of an hour, or"
            " with /h or /d\nTry: --price h100 2.40/h\n",
        ),
        (("--deadline", "0d"), "--deadline '0d' is no duration, above 0"),
        (
            ("--price", "h100=2,v6e=1"),
            "there is a price of v6e, and the machines that are compared",
        ),
        (("--batch", "8"), "brings its own batch"),
    ],
)
def test_compare_refuses_nonsense(shell, more: tuple[str, ...], message: str):
    code, _, err = shell(*WORDS, *more)
    assert code == 2 and message in err
