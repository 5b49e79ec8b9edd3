"""What the README and the page of a large plan show is what happens: outputs are compared line by
line, but for measured times.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LARGE = (ROOT / "docs" / "large_plan.md").read_text()
#: How long a search took: the one figure of these outputs that is measured.
MEASURED = re.compile(r"priced in [\d.]+ \w+;")


def lines_of(text: str) -> list[str]:
    """The lines of an output, measured times masked, and paragraphs that wrap around one as one
    line.
    """
    joined = re.sub(r"\n    (?=\S)", " ", text)
    return [MEASURED.sub("priced in T;", line).rstrip() for line in joined.splitlines()]


def compare(shown: str, printed: str) -> None:
    """Every line that is shown stands in what is printed, in order and without others between, but
    where "..." stands.
    """
    found, at, skipping = lines_of(printed), 0, False
    for line in lines_of(shown):
        if line == "...":
            skipping = True
            continue
        if skipping and line:
            assert line in found[at:], f"{line!r} is not printed after line {at}"
            at, skipping = found.index(line, at), False
        if skipping:
            continue
        assert at < len(found) and found[at] == line, (line, found[at : at + 1])
        at += 1
    assert skipping or not any(found[at:]), found[at:]


def block(page: str, after: str) -> str:
    """The fenced text of a page behind a mark."""
    return re.search(re.escape(after) + r"\n```\n(.*?)```", page, re.DOTALL).group(1)


def test_the_example_prints_what_follows_it():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    compare(block(README, "<!-- example -->"), printed.getvalue())


def test_the_program_on_simulated_devices_comes_with_what_simulates_them():
    section = README.split("## Train")[1].split("\n## ")[0]
    devices = re.search(r'shardlib.compile\(.*topology="cpu:(\d+)"', section).group(1)
    assert f"JAX_NUM_CPU_DEVICES={devices}" in section


@pytest.mark.long
def test_the_command_prints_what_follows_it_and_the_picture_is_of_its_plan(shell, tmp_path):
    command, shown = block(LARGE, "<!-- llama -->").split("\n", 1)
    assert command.startswith("$ shardlib ")
    words = shlex.split(command.removeprefix("$ shardlib "))
    code, out, _ = shell(*words, "--out", f"{tmp_path}/p.json")
    assert code == 0
    compare(shown, out)
    for command, name in (("explain", "llama3-405b"), ("timeline", "llama3-405b-timeline")):
        shell(command, f"{tmp_path}/p.json", "--svg", f"{tmp_path}/p.svg")
        stored = ROOT / "docs" / "pictures" / f"{name}.svg"
        again = f"shardlib {command} plan.json --svg docs/pictures/{name}.svg"
        assert (tmp_path / "p.svg").read_text() == stored.read_text(), f"old; make again: {again}"


def test_the_readme_is_short_and_its_code_narrow():
    assert len(README.splitlines()) <= 110
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert max(map(len, code.splitlines())) <= 70


def test_a_wrong_line_is_noticed():
    compare("a\n...\nd\n", "a\nc\nd\n")
    for shown in ("a\nb\nd\n", "a\n...\ne\n", "a\n", "a\nc\nd\ne\n"):
        with pytest.raises(AssertionError):
            compare(shown, "a\nc\nd\n")
