"""`shardlib plan`: pins, dtypes, batches, models of one's own."""

from __future__ import annotations

import json
import re
import time
import tomllib
import typing
from pathlib import Path

import pytest
import typer.main

from shardlib.cli.commands import app
from shardlib.cli.inputs import parse_pins
from shardlib.cli.output import writable, write
from shardlib.errors import ArgumentError, MissingFileError, PinError
from shardlib.planner.plan import Plan
from shardlib.report.changes import diff


def test_pins_are_json_or_words():
    assert parse_pins(
        [
            "mesh.tensor=8",
            "remat=full",
            "mesh.data= 2",
            "sequence_parallel=true",
            'rules=[["mlp", "tensor"]]',
        ]
    ) == {
        "mesh.tensor": 8,
        "remat": "full",
        "mesh.data": 2,
        "sequence_parallel": True,
        "rules": [["mlp", "tensor"]],
    }
    with pytest.raises(PinError, match="did you mean 'remat'"):
        parse_pins(["remt=full"])


def test_rules_that_are_no_list(shell):
    code, _, err = shell("plan", "llama3-8b", "--topology", "h100:8", "--pin", "rules=3")
    assert (code, err) == (
        2,
        (
            "error: pins are not usable: sharding rules are 3; they are a list of pairs (logical"
            " axis, mesh axes)\n"
        ),
    )


@pytest.mark.long
def test_dtypes_are_searched_where_they_are_allowed(shell, shallow: Path):
    words = (
        f"plan {shallow} --topology 4*h100:1 --batch 16 --seq 64 --pin mesh.data=4 --json".split()
    )
    plans = [
        json.loads(shell(*words, *more)[1])
        for more in ((), ("--allow", "moment_dtype=bfloat16,float16"))
    ]
    assert [plan["dtypes"] for plan in plans] == [{}, {"moment_dtype": "bfloat16"}]
    assert (
        plans[1]["estimate"]["device_bytes"]["optimizer"] * 2
        == plans[0]["estimate"]["device_bytes"]["optimizer"]
    )
    for wrong, message in (
        ("moment_dtype", "--allow 'moment_dtype' is not WHAT=DTYPE"),
        ("moments=bfloat16", "allow names 'moments'"),
        ("moment_dtype=half", "allow.moment_dtype is 'half'"),
    ):
        code, _, err = shell(*words[:-1], "--allow", wrong)
        assert code == 2 and message in err


@pytest.mark.long
def test_plan_why_not_and_back(shell, card: Path, tmp_path: Path):
    file = tmp_path / "out.json"
    words = ("plan", str(card), "--topology", "h100:8", "--batch", "16", "--seq", "64")
    code, out, err = shell(*words, "--pin", "mesh.tensor=2", "--out", str(file), "--json")
    assert (code, err) == (0, "")
    data, stored = json.loads(out), Plan.from_json(file.read_text())
    assert data["mesh"]["tensor"] == 2 and stored.mesh["tensor"] == 2
    for field in ("mesh", "microbatches", "schedule", "remat", "zero"):
        assert field in data
    for field in ("step_seconds", "mfu", "tokens_per_second", "device_bytes", "collectives"):
        assert field in data["estimate"]
    assert "peak" in data["estimate"]["device_bytes"] and {"gap", "seconds"} <= set(data["search"])
    code, out, err = shell("explain", str(file), "--why-not", "mesh.tensor=1", "--json")
    assert (code, err) == (0, "")
    why = json.loads(out)["why_not"]
    other = Plan.from_json(json.dumps(why["plan"]))
    head = "- this plan, + the best with mesh.tensor=1\n\n"
    assert other.mesh["tensor"] == 1 and why["text"] == head + diff(stored, other)


def test_a_function_brings_its_own_batch(shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_own_model.py").write_text(
        "import jax, jax.numpy as jnp, shardlib\ndef make():\n    print('noise from the model')\n  "
        "  init = shardlib.tree(lambda key: {'w': jax.random.normal(key, (32, 64))}, {'w':"
        " ('embed', 'mlp')})\n    def loss(params, batch): return jnp.mean((batch @ params['w']) **"
        " 2)\n    return dict(init=init, loss=loss, batch=jax.ShapeDtypeStruct((16, 32),"
        " jnp.float32), name='mine')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = shell("plan", "my_own_model:make", "--topology", "h100:2", "--json")
    assert (code, err) == (0, "noise from the model\n")
    assert json.loads(out)["model"] == "mine"
    code, _, err = shell("plan", "my_own_model:make", "--topology", "h100:2", "--batch", "4")
    assert (code, err.splitlines()[-2]) == (
        2,
        "error: my_own_model:make brings its own batch; --batch cannot change it",
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            10**12,
            r"does not fit on cpu:2: .*\nTry: a batch or sequence at most \de-\d+ of this one",
        ),
        (10**14 + 31, "does not fit on cpu:2"),
        (
            10**17,
            (
                r"arrays have 2\^63 elements or more, which nothing can count:\n.*shape"
                r" \(100000000000000000, 64, "
            ),
        ),
        (10**30, r"arrays have 2\^63 elements or more, .*:\n  - batch\.inputs: shape "),
    ],
    ids=str,
)
def test_a_batch_of_any_size_is_answered(shell, shallow: Path, batch: int, message: str):
    """And soon: nothing goes through all numbers up to it, or to its root."""
    begin = time.monotonic()
    code, out, err = shell(
        "plan", str(shallow), "--topology", "cpu:2", "--batch", str(batch), "--seq", "64"
    )
    assert code == 2
    assert out == ""
    assert re.search(message, err)
    assert "Warning" not in err
    assert time.monotonic() - begin < 60


@pytest.mark.long
def test_the_cost_of_a_run_is_told(shell):
    words = ("plan", "gpt2-small", "-t", "h100:8", "-b", "64", "-s", "1024")
    code, out, _ = shell(*words, "--tokens", "300B", "--price", "2", "--mtbf", "2d", "--json")
    found = json.loads(out)
    run = found["run"]
    assert code == 0 and run["tokens"] == 3e11 and run["mtbf_seconds"] == 2 * 86400
    assert run["work_seconds"] == pytest.approx(3e11 / found["estimate"]["tokens_per_second"])
    assert run["money"] == pytest.approx(2 * run["device_hours"]) and run["every_seconds"] >= 300
    for wrong, said in ((("--price", "2"), "--tokens"), (("--tokens", "many"), "not a number")):
        code, _, err = shell(*words, *wrong)
        assert code == 2 and said in err


# `shardlib plan --framework NAME --emit FILE`.


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


@pytest.mark.parametrize(
    ("machine", "framework", "message"),
    [
        (
            "v5e:2x2",
            "deepspeed",
            "error: framework 'deepspeed' runs on chips of nvidia, and these are of google\n"
            "Try: levanter or maxtext\n",
        ),
        (
            "cpu:8",
            "maxtext",
            "error: framework 'maxtext' runs on chips of google and nvidia, and these are of cpu\n"
            "Try: a machine with chips that it runs on, or no framework for programs of shardlib\n",
        ),
    ],
)
def test_framework_on_other_chips(
    shell, card: Path, machine: str, framework: str, message: str
) -> None:
    words = ("plan", str(card), "-t", machine, "--batch", "16", "--seq", "64")
    assert shell(*words, "--framework", framework) == (2, "", message)


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


@pytest.mark.long
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


# Files that commands write: what cannot be written is said before anything is done.

COMPARE = ("compare", "nowhere", "--tokens", "15T", "--deadline", "30d", "-t", "h100:8")
#: Every command and option that writes a file. What else the commands are told is not there, so
#: that they say that if the file does not come first.
WRITING = (
    ("plan", "nowhere", "-t", "h100:8", "--out"),
    ("plan", "nowhere", "-t", "h100:8", "--emit"),
    ("explain", "nowhere.json", "--html"),
    ("explain", "nowhere.json", "--svg"),
    ("diff", "nowhere.json", "--html"),
    (*COMPARE, "--svg"),
    (*COMPARE, "--html"),
    ("fit-model", "-t", "h100:8", "--deadline", "30d", "--out"),
    ("timeline", "nowhere.json", "--svg"),
    ("timeline", "nowhere.json", "--perfetto"),
    ("replan", "nowhere.json", "-t", "h100:8", "--out"),
    ("scale", "nowhere", "-t", "h100:8", "--svg"),
    ("verify", "nowhere", "--out"),
    ("doctor", "-t", "nowhere", "--out"),
)


@pytest.mark.parametrize("words", WRITING, ids=" ".join)
def test_a_folder_is_refused_before_the_work(shell, tmp_path: Path, words: tuple[str, ...]):
    assert shell(*words, str(tmp_path)) == (
        2,
        "",
        f"error: {tmp_path} is a folder, and a file is written there\nTry: {tmp_path}/NAME\n",
    )
    code, out, err = shell(*words, str(tmp_path / "gone" / "file"))
    assert (code, out) == (2, "") and "gone for file does not exist" in err


def test_no_option_that_writes_is_left_out():
    commands = typing.cast("typing.Any", typer.main.get_command(app)).commands
    found = {
        (name, option.opts[0])
        for name, command in commands.items()
        for option in command.params
        if any(word in (option.help or "") for word in ("rite the", "rite a", "raw "))
        and "here" in option.help
    }
    assert found == {(words[0], words[-1]) for words in WRITING}


@pytest.mark.parametrize("name", ["x" * 300, "nul\0byte", "file/below"])
def test_names_that_no_file_can_have_are_refused(tmp_path: Path, name: str):
    (tmp_path / "file").write_text("")
    with pytest.raises((ArgumentError, MissingFileError)):
        writable(tmp_path / name)


def test_a_full_disk_is_one_sentence():
    with pytest.raises(ArgumentError, match=r"^'/dev/full' cannot be written: No space left"):
        write(Path("/dev/full"), "text")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("plan", "gpt2-small", "--batch", "8", "--seq", "64"),
            "plan needs --topology / -t: For example 16*h100:8, v5e:16x16, or a .toml file\nTry:"
            " shardlib plan -h",
        ),
        (
            ("plan", "-t", "h100:8"),
            "plan needs MODEL: A preset, a Hugging Face config.json, a .toml card, or"
            " package.module:function\nTry: shardlib plan -h",
        ),
        (
            ("compare", "gpt2-small", "--tokens", "15T", "-t", "h100:8"),
            "compare needs --deadline: For the whole run\nTry: shardlib compare -h",
        ),
        (
            ("serve", "no/such/folder", "--port", "0"),
            "there is no model file or folder no/such/folder\nTry: a preset (`shardlib models`), a"
            " folder that `shardlib train --run` or Hugging Face wrote, or a config.json",
        ),
        (
            ("generate", "no/such/folder", "--prompt", "Once"),
            "there is no model file or folder no/such/folder\nTry: a preset (`shardlib models`), a"
            " folder that `shardlib train --run` or Hugging Face wrote, or a config.json",
        ),
    ],
)
def test_what_is_missing_is_named(shell, words: tuple[str, ...], message: str):
    assert shell(*words) == (2, "", f"error: {message}\n")
    if words[0] in ("plan", "compare"):
        code, out, _ = shell(*words, "--json")
        assert code == 2 and json.loads(out)["error"]["message"] == message
