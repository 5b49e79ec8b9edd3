"""The command line, from the outside: what is on stdout, what on stderr, which exit code."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardlib
from shardlib.cli import main, parse_pins
from shardlib.errors import PinError
from shardlib.planning.plan import Plan
from shardlib.planning.text.diff import diff
from shardlib.planning.text.explain import explain
from tests.planning.fixture_plan import PLAN

CARD = """\
vocab_size = 256
layers = 2
embed = 64
heads = 4
kv_heads = 2
head_dim = 16
mlp = 128
max_seq = 64
"""


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]):
    """Runs a command; returns (exit code, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(words))
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    return path


@pytest.fixture
def card(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CARD)
    return path


def test_version(shell):
    assert shell("--version") == (0, f"shardlib {shardlib.__version__}\n", "")


def test_help_names_every_command(shell):
    code, out, _ = shell("--help")
    assert code == 0
    for command in (
        "plan",
        "explain",
        "timeline",
        "replan",
        "scale",
        "edge",
        "train",
        "launch",
        "models",
        "topologies",
    ):
        assert f"\n  {command} " in out


def test_models_and_topologies_as_json(shell):
    models = json.loads(shell("models", "--json")[1])
    assert {"gpt2-small", "llama3-405b", "mixtral-8x7b", "1t-moe"} <= {
        row["model"] for row in models
    }
    topologies = json.loads(shell("topologies", "--json")[1])
    assert all(shardlib.topology(row["example"]).devices >= 1 for row in topologies)


def test_models_as_a_table(shell):
    code, out, _ = shell("models")
    assert code == 0 and any(line.split()[:2] == ["llama3-8b", "8.03"] for line in out.splitlines())


def test_explain_prints_the_explanation(shell, plan_file: Path):
    assert shell("explain", str(plan_file)) == (0, explain(PLAN), "")


def test_explain_as_json_is_json_alone(shell, plan_file: Path):
    code, out, err = shell("explain", str(plan_file), "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data["explanation"] == explain(PLAN) and Plan.from_json(json.dumps(data["plan"])) == PLAN


def test_explain_writes_html(shell, plan_file: Path, tmp_path: Path):
    page = tmp_path / "report.html"
    assert shell("explain", str(plan_file), "--html", str(page))[0] == 0
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (
            ("explain", "nowhere.json"),
            "MissingFileError",
            (
                "there is no plan file nowhere.json\nTry: shardlib plan MODEL --topology T ..."
                " --out nowhere.json"
            ),
        ),
        (
            ("plan", "llama3-8b", "--topology", "h100:8"),
            "BatchError",
            (
                "the size of the batch of llama3-8b is open: --batch and --seq missing\nTry:"
                " --batch 256 --seq 4096"
            ),
        ),
        (
            ("plan", "llama3-8b", "--topology", "h100:8", "--pin", "mesh.tensr=8"),
            "PinError",
            (
                "pins are not usable: 'tensr' is no mesh axis; did you mean 'tensor'? mesh axes are"
                " stage, data, fsdp, expert, context, tensor"
            ),
        ),
        (
            (
                "plan",
                "llama3-8b",
                "--topology",
                "h100:8",
                "--pin",
                "zero",
                "--pin",
                "remat=full",
                "--pin",
                "remat=none",
            ),
            "PinError",
            (
                "pins are not usable:\n  - 'zero' is no KEY=VALUE\n  - 'remat' is given twice\nTry:"
                " for example --pin mesh.tensor=8 --pin remat=full"
            ),
        ),
    ],
)
def test_errors_are_one_message_and_a_json_object(
    shell, words: tuple[str, ...], kind: str, message: str
):
    code, out, err = shell(*words)
    assert (code, out, err) == (2, "", f"error: {message}\n")
    code, out, _ = shell(*words, "--json")
    assert code == 2 and json.loads(out) == {"error": {"kind": kind, "message": message}}


def test_traceback_shows_where(plan_file: Path):
    plan_file.write_text("{}")
    with pytest.raises(
        shardlib.PlanError,
        match=r"plan\.json holds no plan: this is no plan of format 1 \(found None\)",
    ):
        main(["explain", str(plan_file), "--traceback"])


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1}', '{"format": 1, "search": 3}', "no json"]
)
def test_a_file_that_is_no_plan(shell, plan_file: Path, text: str):
    plan_file.write_text(text)
    code, out, err = shell("explain", str(plan_file))
    assert (code, out) == (2, "") and err.startswith(f"error: {plan_file} holds no plan: ")


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


def test_dtypes_are_searched_where_they_are_allowed(shell, card: Path):
    words = (
        "plan",
        str(card),
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


def test_why_not_a_plan_that_does_not_say_its_model(shell, plan_file: Path):
    code, _, err = shell("explain", str(plan_file), "--why-not", "mesh.tensor=1")
    assert code == 2 and err.startswith("error: the plan does not say which model it is for")


@pytest.fixture
def made(shell, card: Path, tmp_path: Path) -> Path:
    """A plan of the small model that the command line made."""
    file = tmp_path / "made.json"
    assert (
        shell(
            "plan",
            str(card),
            "--topology",
            "2*h100:2",
            "--batch",
            "16",
            "--seq",
            "64",
            "--pin",
            "mesh.stage=1",
            "--pin",
            "mesh.context=1",
            "--out",
            str(file),
        )[0]
        == 0
    )
    return file


def test_explain_alternatives_and_sensitivity(shell, made: Path):
    code, out, err = shell("explain", str(made), "--alternatives", "--sensitivity", "--json")
    assert (code, err) == (0, "")
    data, plan = json.loads(out), Plan.from_json(made.read_text())
    assert len(data["alternatives"]) == 10 and all(
        one["step_seconds"] > plan.estimate.step_seconds for one in data["alternatives"]
    )
    assert {price["resource"] for price in data["sensitivity"]["prices"]} == {
        "memory",
        "InfiniBand",
        "NVLink",
    }
    assert data["constraints"]["step_seconds"] == plan.estimate.step_seconds
    code, text, _ = shell("explain", str(made), "--alternatives")
    assert (
        code == 0
        and text.startswith("Alternatives, by predicted time\n")
        and "What holds the plan back" in text
    )


def test_replan_for_a_machine_that_lost_a_host(shell, made: Path, tmp_path: Path):
    out_file = tmp_path / "smaller.json"
    code, out, err = shell(
        "replan", str(made), "--topology", "h100:2", "--out", str(out_file), "--json"
    )
    assert (code, err) == (0, "")
    data, new = json.loads(out), Plan.from_json(out_file.read_text())
    assert (
        data["plan"]["digest"] == new.digest and new.topology == "h100:2" and new.mesh.devices <= 2
    )
    assert len(data["moved_bytes_per_device"]) == 2
    assert data["slowdown"] == pytest.approx(
        new.estimate.step_seconds / Plan.from_json(made.read_text()).estimate.step_seconds
    )
    assert dict(new.origin)["model"] == dict(Plan.from_json(made.read_text()).origin)["model"]
    code, text, _ = shell("replan", str(made), "--topology", "h100:2", "--lost", "0-1")
    assert code == 0 and "What moves" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--topology", "0*h100:8"), "has a size of 0"),
        (("--topology", "h100:4", "--lost", "x"), "--lost has 'x'"),
        (("--topology", "h100:4", "--lost", "99"), "the lost devices 99 are none of 2*h100:2"),
    ],
)
def test_replan_refuses_nonsense(shell, made: Path, words: tuple[str, ...], message: str):
    code, out, err = shell("replan", str(made), *words)
    assert (code, out) == (2, "") and message in err


def test_scale_strong_and_weak(shell, card: Path, tmp_path: Path):
    picture = tmp_path / "curve.svg"
    words = (
        "scale",
        str(card),
        "--topology",
        "h100:8",
        "--devices",
        "1..4",
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
    assert [point["devices"] for point in strong["points"]] == [1, 2, 4] and {
        point["tokens"] for point in strong["points"]
    } == {32 * 64}
    assert picture.read_text().startswith("<svg ")
    first, second = (
        json.loads(shell("plan", str(card), "--topology", f"h100:{n}", *words[6:], "--json")[1])
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
        128 * 64,
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "0"), "'0' says no numbers of devices"),
        (("--devices", "x", "--json"), "'x' says no numbers"),
        (("--devices", "8"), "the size of the batch of"),
    ],
)
def test_scale_refuses_nonsense(shell, card: Path, words: tuple[str, ...], message: str):
    code, out, err = shell("scale", str(card), "--topology", "h100:8", *words)
    assert code == 2 and message in err and (not out or "--json" in words)


def test_questions_about_a_plan_that_does_not_say_its_model(shell, plan_file: Path):
    code, _, err = shell("explain", str(plan_file), "--sensitivity")
    assert code == 2 and err.startswith("error: the plan does not say which model it is for")


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


def test_train_on_a_text_of_ones_own(tmp_path: Path, card: Path):
    text = tmp_path / "text"
    text.mkdir()
    for index in range(30):
        (text / f"{index}.txt").write_text("the cat sat on the mat and looked at the rat\n" * 60)
    words = [
        "train",
        "--data",
        str(text),
        "--model",
        str(card),
        "--steps",
        "3",
        "--batch",
        "8",
        "--seq",
        "32",
        "--sample-bytes",
        "4",
        "--pin",
        "mesh.fsdp=8",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "shardlib", *words],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=True,
    )
    data = json.loads(done.stdout)
    assert {"validation_loss", "bigram_loss", "tokens_per_second", "predicted", "measured"} <= set(
        data
    )
    assert (
        Plan.from_json(json.dumps(data["plan"])).mesh["fsdp"] == 8
        and data["plan"]["topology"] == "cpu:8"
    )


def test_train_refuses_nonsense(shell):
    code, out, err = shell("train", "--lr=-1", "--steps", "0")
    assert (code, out) == (2, "")
    assert (
        err
        == "error: the training run is not usable:\n  - steps is 0; it must be at least 1\n  - lr"
        " is -1.0; it must be positive\n"
    )


@pytest.mark.parametrize("seed", ["2147483648", "99999999999999999999"])
def test_train_refuses_a_seed_that_is_too_large_before_it_makes_a_folder(
    shell, tmp_path: Path, seed: str
):
    code, out, err = shell(
        "train", f"--seed={seed}", "--steps", "1", "--run", str(tmp_path / "run")
    )
    assert (code, out, err) == (
        2,
        "",
        f"error: the training run is not usable: seed is {seed}; it must be below 2147483648\n",
    )
    assert not (tmp_path / "run").exists()


def test_rules_that_are_no_list(shell):
    code, _, err = shell("plan", "llama3-8b", "--topology", "h100:8", "--pin", "rules=3")
    assert (code, err) == (
        2,
        (
            "error: pins are not usable: sharding rules are 3; they are a list of pairs (logical"
            " axis, mesh axes)\n"
        ),
    )


def test_timeline_draws_a_plan_with_stages(shell, tmp_path: Path, plan_file: Path):
    plan, picture, trace = tmp_path / "staged.json", tmp_path / "t.svg", tmp_path / "t.json"
    words = (
        "plan",
        "gpt2-small",
        "-t",
        "h100:4",
        "-b",
        "8",
        "-s",
        "64",
        "--pin",
        "mesh.stage=4",
        "--pin",
        "microbatches=8",
        "--pin",
        "schedule=1f1b",
        "--pin",
        "remat=full",
    )
    assert shell(*words, "--out", str(plan))[0] == 0
    code, out, _ = shell("timeline", str(plan), "--svg", str(picture), "--perfetto", str(trace))
    assert code == 0 and "4 stages, 1f1b, 8 microbatches, in lockstep" in out and "0>>" in out
    assert (
        picture.read_text().startswith("<svg ")
        and len(json.loads(trace.read_text())["traceEvents"]) > 64
    )
    data = json.loads(shell("timeline", str(plan), "--json")[1])
    assert len(data["slices"]) == 64 and data["step_seconds"] == pytest.approx(
        json.loads(plan.read_text())["estimate"]["step_seconds"]
    )
    code, _, err = shell("timeline", str(plan_file))
    assert code == 2 and "no pipeline stages to draw" in err


def test_edge_spreads_a_model_over_devices_of_a_file(shell, card: Path, tmp_path: Path):
    devices = tmp_path / "devices.toml"
    devices.write_text(
        '[[devices]]\nname = "board"\ncount = 3\nlink_bytes_per_s = 1e9\n[devices.chip]\nname ='
        ' "board"\nvendor = "cpu"\nflops_per_s = { float32 = 1e9 }\nhbm_bytes ='
        " 100_000_000\nhbm_bytes_per_s = 1e9\n"
    )
    words = ("edge", str(card), "--devices", str(devices), "-b", "2", "-s", "16")
    code, out, _ = shell(*words)
    assert code == 0 and "stage  device" in out and "before the layers" in out
    data = json.loads(shell(*words, "--json")[1])
    assert (
        data["examples"] == 2
        and data["throughput"] == pytest.approx(2 / data["seconds"])
        and data["stages"][0]["first"] == 0
    )
    code, out, _ = shell(
        "edge", str(card), "--devices", str(tmp_path / "none.toml"), "-b", "2", "-s", "16", "--json"
    )
    assert code == 2 and json.loads(out)["error"]["kind"] == "MissingFileError"


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            10**12,
            r"does not fit on cpu:8: .*\nTry: a batch or sequence at most \de-\d+ of this one",
        ),
        (10**14 + 31, "does not fit on cpu:8"),
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
def test_a_batch_of_any_size_is_answered(shell, card: Path, batch: int, message: str):
    """And soon: nothing goes through all numbers up to it, or to its root."""
    begin = time.monotonic()
    code, out, err = shell(
        "plan", str(card), "--topology", "cpu:8", "--batch", str(batch), "--seq", "64"
    )
    assert (
        code == 2
        and out == ""
        and re.search(message, err)
        and "Warning" not in err
        and time.monotonic() - begin < 60
    )
