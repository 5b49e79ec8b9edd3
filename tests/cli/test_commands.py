"""The command line, from the outside: what is on stdout, what on stderr, which exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import shardlib
from shardlib.cli import main
from shardlib.cli.commands import COMMANDS

SYNOPSES = Path(__file__).parents[2] / "docs" / "quickstart.md"


def test_version(shell):
    assert shell("--version") == (0, f"shardlib {shardlib.__version__}\n", "")


def test_help_names_every_command(shell):
    code, out, _ = shell("--help")
    assert code == 0
    for command in (
        "plan",
        "explain",
        "timeline",
        "diff",
        "replan",
        "scale",
        "edge",
        "train",
        "launch",
        "models",
        "topologies",
    ):
        assert f"\n  {command} " in out
    assert not any(line.endswith("...") and line[0] == " " for line in out.splitlines())


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
                "pins are not usable: 'tensr' is not a mesh axis; did you mean 'tensor'? mesh axes"
                " are stage, data, fsdp, expert, context, tensor"
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
                "--pin",
                "mesh.tensor=8,mesh.stage=4",
            ),
            "PinError",
            (
                "pins are not usable:\n  - 'zero' is not KEY=VALUE\n  - 'remat' is given twice\n"
                "  - 'mesh.tensor=8,mesh.stage=4' is several decisions; each has an option of its"
                " own\nTry: for example --pin mesh.tensor=8 --pin remat=full"
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


@pytest.mark.parametrize("words", [("-b", "1e99"), ("--batch", "1e99"), ("--batch=1e99",)])
def test_a_value_of_another_kind_is_shown(shell, words: tuple[str, ...]):
    code, out, err = shell("plan", "gpt2-small", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: --batch is '1e99': ") and err.endswith(
        "\nTry: shardlib plan -h\n"
    )


@pytest.mark.parametrize("words", [("plan", "--nope"), ("nope",), ("plan",), ("why", "a", "b")])
def test_what_is_wrong_with_a_command_line_begins_like_every_error(shell, words: tuple[str, ...]):
    code, _, err = shell(*words)
    assert code == 2 and err.startswith("error: ") and "\nTry: shardlib" in err


def test_every_command_has_a_synopsis():
    words = re.findall(
        r"^shardlib ([\w-]+)|; shardlib ([\w-]+)$", SYNOPSES.read_text(), re.MULTILINE
    )
    assert {first or second for first, second in words} == set(COMMANDS)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/dev/null", "plan file '/dev/null' cannot be read: it is not a file that can be read"),
        ("/dev/zero", "plan file '/dev/zero' cannot be read: it is not a file that can be read"),
        (".", ". is a folder, not a plan file\nTry: a file that is in it"),
        ("x" * 300, f"there is no plan file {'x' * 300}"),
    ],
)
def test_what_is_no_file_is_told_apart(shell, name: str, says: str):
    code, out, err = shell("explain", name)
    assert (code, out) == (2, "") and err.startswith(f"error: {says}\n")


def test_a_plan_that_is_cut_off_is_made_again(shell, plan_file: Path):
    plan_file.write_text(plan_file.read_text()[:300])
    code, out, err = shell("explain", str(plan_file))
    assert (code, out) == (2, "") and "holds no plan: the plan is not valid JSON: " in err
    assert err.endswith(f"\nTry: shardlib plan MODEL --topology T ... --out {plan_file}\n")


def test_a_plan_of_another_model_is_not_verified(shell, made: Path):
    assert shell("verify", "gpt2-small", "--plan", str(made)) == (
        2,
        "",
        "error: the plan was made for 'tests.cli.perceptron:make', and not for 'gpt2-small'\n"
        "Try: shardlib verify tests.cli.perceptron:make --plan ..., or a plan for gpt2-small\n",
    )


def test_traceback_shows_where(plan_file: Path):
    plan_file.write_text("{}")
    with pytest.raises(
        shardlib.PlanError,
        match=r"plan\.json holds no plan: this is not a plan of format 1 \(found None\)",
    ):
        main(["explain", str(plan_file), "--traceback"])
