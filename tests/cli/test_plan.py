"""`shardlib plan`: pins, dtypes, batches, models of one's own."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from shardlib.cli.inputs import parse_pins
from shardlib.errors import PinError
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
        "plan",
        str(shallow),
        "--topology",
        "4*h100:1",
        "--batch",
        "16",
        "--seq",
        "64",
        "--pin",
        "mesh.data=4",
        "--json",
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
        ("moment_dtype", "--allow 'moment_dtype' is no WHAT=DTYPE"),
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
    assert other.mesh["tensor"] == 1 and why["text"] == diff(stored, other)


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
    assert (
        code == 2
        and out == ""
        and re.search(message, err)
        and "Warning" not in err
        and time.monotonic() - begin < 60
    )


def test_the_cost_of_a_run_is_told(shell):
    words = ("plan", "gpt2-small", "-t", "h100:8", "-b", "64", "-s", "1024")
    code, out, _ = shell(*words, "--tokens", "300B", "--price", "2", "--mtbf", "2d", "--json")
    found = json.loads(out)
    run = found["run"]
    assert code == 0 and run["tokens"] == 3e11 and run["mtbf_seconds"] == 2 * 86400
    assert run["work_seconds"] == pytest.approx(3e11 / found["estimate"]["tokens_per_second"])
    assert run["money"] == pytest.approx(2 * run["device_hours"]) and run["every_seconds"] >= 300
    for wrong, said in ((("--price", "2"), "--tokens"), (("--tokens", "many"), "no number")):
        code, _, err = shell(*words, *wrong)
        assert code == 2 and said in err
