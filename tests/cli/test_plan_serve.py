"""`shardlib plan MODEL --serve`, as docs/serving_plans.md shows it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "serving_plans.md").read_text()
CASE = ["plan", "llama3-8b", "--serve", "--topology", "v5e:4x4"]


def masked(text: str) -> list[str]:
    joined = re.sub(r"in [\d.]+ \w+: every", "in T: every", " ".join(text.split()))
    return joined.split()


def test_the_page_shows_what_is_printed(shell):
    shown = re.search(r"```\n\$ shardlib (plan .*)\n((?:.|\n)*?)```", PAGE)
    assert shown is not None
    code, out, _ = shell(*shlex.split(shown[1]))
    assert code == 0 and masked(out) == masked(shown[2])


def test_a_plan_is_written_and_explained(tmp_path: Path, shell):
    file = tmp_path / "plan.json"
    _, told, _ = shell(*CASE, "--out", str(file), "--pin", "mesh.tensor=4", "--weights", "int8")
    assert "4 groups of 4 devices each serve" in told
    assert shell("explain", str(file))[1] == told
    assert json.loads(shell("explain", str(file), "--json")[1])["mesh"] == {"tensor": 4}
    data = json.loads(shell(*CASE, "--json", "--curve")[1])
    assert data["pareto"] and data["two_meshes"]["prefill"]["mesh"]
    code, _, err = shell("explain", str(file), "--why-not", "tensor=2")
    assert code == 2 and "carries no model" in err
    code, _, err = shell("replan", str(file), "--topology", "v5e:2x4")
    assert code == 2 and "plans a server" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ttft", "soon"], "not a duration"),
        (["--ttft", "0ms"], "not a duration"),
        (["--pin", "tensor=big"], "KEY=NUMBER"),
        (["--pin", "tensor=2", "--pin", "mesh.tensor=4"], "given twice"),
        (["--batch", "8"], "belong to training"),
        (["--objective", "fast"], "throughput, latency"),
        (["--tpot", "1us"], "can be reached"),
        (["--rate", "-1"], "requests a second"),
    ],
)
def test_wrong_words_are_told(words: list[str], said: str, shell):
    code, _, err = shell(*CASE, *words)
    assert code == 2 and said in err


def test_words_of_a_server_belong_to_one(shell):
    code, _, err = shell(
        "plan", "llama3-8b", "-t", "v5e:4x4", "-b", "8", "-s", "128", "--prompt", "7"
    )
    assert code == 2 and "belong to a server" in err


def test_a_plan_of_another_model_is_not_served(tmp_path: Path, shell):
    file = tmp_path / "plan.json"
    words = ("plan", "gpt2-small", "--serve", "-t", "h100:1", "--out", str(file))
    code, _, err = shell(*words)
    assert code == 2 and "2,304 tokens, and gpt2-small looks at 1,024" in err
    assert shell(*words, "--prompt", "64", "--output", "32")[0] == 0
    code, _, err = shell("serve", "demo", "--port", "0", "--plan", str(file))
    assert code == 2 and "the plan is for gpt2-small" in err and "and demo has" in err


def test_a_plan_of_longer_requests_is_not_made_and_of_smaller_weights_not_served(
    tmp_path: Path, shell
):
    file, words = tmp_path / "plan.json", ("--prompt", "64", "--output", "32")
    plan = ("plan", "demo", "--serve", "-t", "cpu:1", "--out", str(file))
    code, _, err = shell(*plan)
    assert code == 2 and "demo looks at 256" in err and "--prompt 192 --output 64" in err
    assert shell(*plan, *words)[0] == 0
    code, _, err = shell("serve", "demo", "--port", "0", "--plan", str(file))
    assert code == 2 and "the plan stores bf16, and demo is float32" in err
