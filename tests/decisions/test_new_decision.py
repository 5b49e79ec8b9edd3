"""A new decision that nothing prices or lowers is one entry of the table. A copy of the package
gets one, in one file, and is asked for everything that knows decisions.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.processes import python

ROOT = Path(__file__).parents[2]
ENTRY = """    dtypes: Dtypes = decision(
"""
NEW = """    prefetch: str = decision(
        "one",
        meaning="how many layers ahead weights are gathered",
        choices={"one": "one layer ahead", "two": "two layers ahead"},
        added_later=True,
        searched=False,
    )
    unknown: str = decision(
        "one",
        meaning="what the search should decide and does not know",
        choices={"one": "the first", "two": "the second"},
        added_later=True,
    )
"""
ASKED = """
import json
from shardlib.decisions.table import table_text
from shardlib.decisions.pins import Pins
from shardlib.errors import ShardlibError
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from tests.planner import worlds

def refused(make):
    try:
        make()
    except ShardlibError as error:
        return str(error)

problem = worlds.mlp()
usual, pinned = (planner.search(problem, "h100:2", pin) for pin in ({}, {"prefetch": "two"}))
again = Plan.from_json(pinned.to_json())
wrong = json.loads(pinned.to_json()) | {"prefetch": "three"}
print(json.dumps({
    "digest": usual.digest,
    "usual": usual.decisions["prefetch"],
    "pinned": json.loads(pinned.to_json())["prefetch"],
    "told apart": usual.digest != pinned.digest,
    "again": again == pinned and again.prefetch == "two",
    "unknown": refused(lambda: Pins.parse({"prefech": "two"})),
    "illegal": refused(lambda: Pins.parse({"prefetch": "three"})),
    "stored": refused(lambda: Plan.from_json(json.dumps(wrong), changed=True)),
    "disobeyed": refused(lambda: planner.search(problem, "h100:2", {"unknown": "two"})),
    "explain": pinned.explain(),
    "diff": usual.diff(pinned),
    "page": table_text(),
}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "shardlib", folder / "shardlib", ignore=ignored)
    table = folder / "shardlib" / "decisions" / "table.py"
    text = table.read_text()
    assert text.count(ENTRY) == 1
    table.write_text(text.replace(ENTRY, NEW + ENTRY))
    done = python(
        "-c",
        ASKED,
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu", "PATH": ""},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_it_is_pinned_and_stored(answers: dict[str, Any]) -> None:
    assert (answers["usual"], answers["pinned"]) == ("one", "two")
    assert answers["told apart"] and answers["again"]


def test_plans_without_it_keep_their_identity(answers: dict[str, Any]) -> None:
    from shardlib.planner import search as planner
    from tests.planner import worlds

    assert planner.search(worlds.mlp(), "h100:2").digest == answers["digest"]


def test_it_is_checked(answers: dict[str, Any]) -> None:
    assert "'prefech' is not a decision; did you mean 'prefetch'?" in answers["unknown"]
    assert "prefetch is 'three'; it is one of 'one', 'two'" in answers["illegal"]
    assert "prefetch is 'three'; it is one of 'one', 'two'" in answers["stored"]


def test_a_pin_that_the_search_does_not_know_is_no_plan(answers: dict[str, Any]) -> None:
    assert answers["disobeyed"].startswith(
        "the search did not obey its pins: unknown is pinned to 'two', and the plan has 'one'\nTry:"
    )


def test_it_is_told(answers: dict[str, Any]) -> None:
    assert re.search(r"^  prefetch +two layers ahead$", answers["explain"], re.MULTILINE)
    assert "- prefetch: one layer ahead\n  + prefetch: two layers ahead" in answers["diff"]
    assert '| `prefetch` | `"one"`, `"two"` | how many layers ahead' in answers["page"]
