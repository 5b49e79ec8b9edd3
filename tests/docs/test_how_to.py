"""What the how-to pages show runs, prints what follows it, and maps words to what they mean."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import shardlib
from shardlib import models
from tests.docs.test_readme import compare

DOCS = Path(__file__).parents[2] / "docs"
#: Beside tables, which framework and machine they are about.
TABLES = re.compile(r"<!-- ([\w-]+) on (\S+) -->\n((?:\|.*\n)+)")


def told(page: str) -> list[tuple[str, str]]:
    """Every program of a page with the output that follows it, or ""."""
    text = (DOCS / page).read_text()
    return re.findall(r"```python\n(.*?)```\n(?:\n```\n(.*?)```)?", text, re.DOTALL)


@pytest.mark.long
@pytest.mark.parametrize("page", ["does_not_fit.md", "it_is_slow.md"])
def test_the_page_prints_what_it_shows(page: str):
    scope: dict[str, Any] = {"__name__": "page"}
    for code, shown in told(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), scope)
        if shown:
            compare(shown, printed.getvalue())
    assert sum(bool(shown) for _, shown in told(page)) >= 3


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Framework, machine, the words there, and the pin here, of every line of the tables."""
    for framework, machine, table in TABLES.findall((DOCS / "coming_from.md").read_text()):
        for line in table.splitlines()[2:]:
            there, here, *_ = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:])
            yield framework, machine, there, here


ROWS = list(rows())


@functools.cache
def small() -> tuple[Any, Any, Any]:
    config = models.TransformerConfig(
        name="small", vocab_size=512, layers=4, embed=64, heads=8, kv_heads=4, head_dim=8, mlp=128,
        max_seq=64,
    )  # fmt: skip
    return (*models.build(config), models.example_batch(config, 64, 64))


def planned(machine: str, pin: Any, framework: str | None) -> shardlib.Plan:
    init, loss, batch = small()
    return shardlib.plan(
        init, loss, optax.adamw(1e-3), batch, topology=machine, pin=pin, framework=framework
    )


def keeps(plan: shardlib.Plan, pin: dict[str, Any]) -> bool:
    """Whether a plan decides what is pinned."""
    found = plan.decisions
    for word, value in pin.items():
        if word == "mesh":
            if plan.mesh != shardlib.MeshShape(**value):
                return False
        elif word.startswith("mesh."):
            if plan.mesh.ways((word.removeprefix("mesh."),)) != value:
                return False
        elif word != "rules" and list(np.atleast_1d(found[word])) != list(np.atleast_1d(value)):
            return False
    return True


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace('"', "").replace(",", " "))


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}-{row[2][:40]}" for row in ROWS])
def test_what_another_framework_calls_it_is_planned(row: tuple[str, str, str, str]):
    framework, machine, there, here = row
    pin = ast.literal_eval(here.strip("`"))
    written = "†" not in there
    plan = planned(machine, pin, framework if written else None)
    assert keeps(plan, pin)
    if written:
        emitted = squeezed(plan.emit())
        for words in re.findall(r"`([^`]+)`", there):
            wanted = "activation_checkpointing" if "activation" in words else squeezed(words)
            assert re.search(rf"(?<![\w-]){re.escape(wanted)}(?!\w)", emitted), (words, emitted)


def test_there_are_lines_of_all_frameworks():
    assert {row[0] for row in ROWS} == {
        "megatron-core",
        "maxtext",
        "deepspeed",
        "torchtitan",
        "alpa",
    }
    assert sum("†" not in row[2] for row in ROWS) > 20


def test_shardings_by_hand_are_those_of_the_plan():
    ((code, _),) = told("coming_from.md")
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "page", "exec"), scope)
    np.testing.assert_allclose(scope["planned"], scope["by_hand"], rtol=1e-5)
    assert scope["planned"][-1] < scope["planned"][0]
    for name, array in scope["params"].items():
        ours = scope["state"].params[name]
        ours_by_device = {one.device: one.index for one in ours.addressable_shards}
        assert ours_by_device == {one.device: one.index for one in array.addressable_shards}
