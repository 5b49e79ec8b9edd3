"""`shardlib plan --framework NAME --emit FILE`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--framework", "megatron", "--emit", "flags.txt"),
            "error: framework 'megatron' is unknown; did you mean 'megatron-core'?",
        ),
        (
            ("--framework", "alpa", "--emit", "alpa.yaml"),
            "error: no configuration of alpa is written\nTry: one of deepspeed, levanter, maxtext,"
            " megatron-core, torchtitan\n",
        ),
        (
            ("--emit", "flags.txt"),
            "error: the plan is made for programs of shardlib, which need no configuration\n"
            "Try: 'jax', for a file of plain JAX, or a framework, one of deepspeed, levanter, maxtext,"
            " megatron-core, torchtitan\n",
        ),
        (
            ("--framework", "torchtitan", "--refine", "2"),
            "error: refine is about programs that shardlib makes, and torchtitan runs its own\n",
        ),
    ],
)
def test_bad_input(
    shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    card: Path,
    more: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("plan", str(card), "-t", "h100:8", "--batch", "16", "--seq", "64")
    code, out, err = shell(*words, *more)
    assert (code, out) == (2, "") and err.startswith(message)
    assert {file.name for file in tmp_path.iterdir()} == {card.name}


def test_framework_on_other_chips(shell, card: Path) -> None:
    words = ("plan", str(card), "-t", "v5e:2x2", "--batch", "16", "--seq", "64")
    assert shell(*words, "--framework", "deepspeed") == (
        2,
        "",
        "error: framework 'deepspeed' runs on chips of nvidia, and these are of google\n"
        "Try: levanter or maxtext\n",
    )


def test_chips_without_a_framework(shell, card: Path) -> None:
    words = ("plan", str(card), "-t", "cpu:8", "--batch", "16", "--seq", "64")
    assert shell(*words, "--framework", "maxtext") == (
        2,
        "",
        "error: framework 'maxtext' runs on chips of google and nvidia, and these are of cpu\n"
        "Try: a machine with chips that it runs on, or no framework for programs of shardlib\n",
    )


@pytest.mark.long
def test_configuration_is_written(shell, card: Path, tmp_path: Path) -> None:
    emitted, stored = tmp_path / "titan.toml", tmp_path / "plan.json"
    words = ("plan", str(card), "-t", "h100:8", "--batch", "16", "--seq", "64", "--json")
    one = [word for axis in ("tensor", "context", "stage") for word in ("--pin", f"mesh.{axis}=1")]
    written = ("--emit", str(emitted), "--out", str(stored))
    code, out, _ = shell(*words, *one, "--framework", "torchtitan", *written)
    assert code == 0
    plan, found = json.loads(out), tomllib.loads(emitted.read_text())
    assert plan["framework"]["name"] == "torchtitan"
    sizes = found["parallelism"]
    assert sizes["data_parallel_shard_degree"] == plan["mesh"].get("fsdp", 1)
    assert found["training"]["global_batch_size"] == 16 and found["training"]["seq_len"] == 64
    code, out, err = shell("explain", str(stored), "--why-not", "zero=0")
    assert code == 0, err
    code, _, err = shell("explain", str(stored), "--why-not", "zero=1")
    assert code == 2 and "framework 'torchtitan' cannot do what is pinned: zero=1" in err


@pytest.mark.parametrize(
    ("emit", "name"), [("jax", "sharded_step.py"), ("jax-explicit:own.py", "own.py")]
)
def test_a_plan_as_plain_jax(
    shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emit: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("plan", "tests.cli.perceptron:make", "-t", "cpu:8", "--pin", "mesh.tensor=8")
    code, _, err = shell(*words, "--emit", emit)
    assert code == 0 and f"plain JAX: {name}\n" in err
    text = (tmp_path / name).read_text()
    compile(text, name, "exec")
    assert "MESH: Mapping[str, int] = {'tensor': 8}" in text
    assert f"MODE = {'explicit' if 'explicit' in emit else 'auto'!r}" in text
    assert "    'up': ((1024, 4096), P(None, 'tensor')," in text


def test_a_reference_model_is_not_written_as_plain_jax(
    shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("plan", str(card), "-t", "cpu:8", "--batch", "16", "--seq", "64", "--emit", "jax")
    code, out, err = shell(*words)
    assert (code, out) == (2, "") and not (tmp_path / "sharded_step.py").exists()
    assert err == (
        "error: plain JAX cannot express the plan of small:\n"
        "  - a kernel of attention (attention=blocks)\n"
        "  - calls of shardlib.attention or shardlib.functions\n"
        "Try: pin decisions away (what the model itself calls stays); or run the plan with shardlib.compile\n"
    )
