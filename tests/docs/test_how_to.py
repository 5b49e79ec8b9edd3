"""What the how-to pages show runs, prints what follows it, and maps words to what they mean."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import shardlib
from shardlib import models
from shardlib.checkpointing import huggingface
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


def write_llama(folder: Path) -> Path:
    """A folder with the configuration of a small Llama."""
    folder.mkdir()
    values = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


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
    code = told("coming_from.md")[1][0]
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "page", "exec"), scope)
    np.testing.assert_allclose(scope["planned"], scope["by_hand"], rtol=1e-5)
    assert scope["planned"][-1] < scope["planned"][0]
    for name, array in scope["params"].items():
        ours = scope["state"].params[name]
        ours_by_device = {one.device: one.index for one in ours.addressable_shards}
        assert ours_by_device == {one.device: one.index for one in array.addressable_shards}


def test_the_job_that_comes_from_megatron_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Callable[..., tuple[int, str, str]]
):
    code = told("coming_from.md")[0][0]
    sizes = '"Llama-3.1-70B", "64*h100:8", 1024, 8192'
    assert code.count(sizes) == code.count('"/runs/llama"') == 1
    code = code.replace(sizes, '"folder", "cpu:8", 32, 16').replace("/runs/llama", "run")
    monkeypatch.chdir(tmp_path)
    config = models.load(write_llama(tmp_path / "config"))
    init, loss = models.build(config)
    batch = models.example_batch(config, 32, 16)
    program = shardlib.compile(init, loss, optax.adamw(1e-3), batch, topology="cpu:1")
    huggingface.save(program, program.init(seed=3), "folder", config="config/config.json")
    pins = ["--pin", "mesh.tensor=2", "--pin", "mesh.stage=2", "--pin", "mesh.fsdp=2"]
    sized = ["-t", "cpu:8", "-b", "32", "-s", "16"]
    status, _, err = shell("plan", "folder", *sized, *pins, "--out", "plan.json")
    assert status == 0, err
    np.random.default_rng(0).integers(0, 512, 10_000, np.uint16).tofile("corpus_text_document.bin")
    fit = shardlib.fit
    monkeypatch.setattr(shardlib, "fit", lambda *args, steps, **more: fit(*args, steps=2, **more))
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "page", "exec"), scope)
    assert scope["program"].plan.mesh == shardlib.MeshShape(stage=2, fsdp=2, tensor=2)
    given, trained = (tensors(tmp_path / name) for name in ("folder", "out"))
    assert given.keys() == trained.keys()
    for name, tensor in given.items():  # two steps at the beginning of the warm-up
        np.testing.assert_allclose(trained[name].astype(np.float32), tensor, atol=2e-2)
