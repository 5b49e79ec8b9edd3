"""What takes long is shown on a terminal and in a notebook, with the time that is left, and nowhere
else.
"""

from __future__ import annotations

import io
import json
import os
import pty
import time
from pathlib import Path

import pytest
from rich.console import Console

from shardlib.processes import progress
from shardlib.processes.progress import Progress
from shardlib.training.display import Display


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(progress, "LATE", 0.02)
    monkeypatch.setattr(progress, "EVERY", 0.02)
    monkeypatch.setenv("SHARDLIB_CACHE_DIR", str(tmp_path / "cache"))


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_what_runs_and_what_began_within() -> None:
    console = terminal()
    outer, inner = (
        Progress(text, of, console) for text, of in (("confirming plans", 4), ("compiling", 0))
    )
    with outer, inner:
        outer.to(1, "plan 2")
        time.sleep(0.3)
    text = shown(console)
    assert " left · confirming plans · 1 of 4 · plan 2 · compiling" in text
    assert "0:00:00 · compiling" not in text  # one line of both


def test_what_ends_soon_or_is_not_watched_is_not_shown() -> None:
    console, pipe = terminal(), Console(file=io.StringIO())
    with Progress("planning", console=console):
        pass
    with Progress("planning", console=pipe):
        time.sleep(0.1)
    with Progress("planning", console=Console(file=io.StringIO(), force_terminal=True, quiet=True)):
        time.sleep(0.1)
    assert shown(console) == shown(pipe) == ""
    assert not progress._file().exists()


def test_the_time_that_is_left_is_that_of_the_last_time() -> None:
    with Progress("compiling", console=terminal()):
        time.sleep(0.2)
    assert json.loads(progress._file().read_text()) == {"compiling": pytest.approx(0.2, abs=0.11)}
    progress._remember("compiling", 60.0)
    console = terminal()
    with Progress("compiling", console=console) as again:
        assert again.line() == "0:00:00, 0:01:00 left · compiling"
    for text in ("[]", "{", '{"compiling": "x"}'):
        progress._file().write_text(text)
        with Progress("compiling", console=console) as unknown:
            assert unknown.line() == "0:00:00 · compiling"


def test_as_many_lines_are_remembered_as_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REMEMBERED", 3)
    for name in "abcdb":
        progress._remember(name, 1.0)
    assert list(json.loads(progress._file().read_text())) == ["c", "d", "b"]


def test_what_fails_is_not_remembered_and_ends_the_line() -> None:
    with pytest.raises(ZeroDivisionError), Progress("compiling", console=terminal()):
        time.sleep(0.1)
        _ = 1 / 0
    assert not progress._file().exists() and progress._running == []


def test_a_notebook_has_a_line_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    console = Console(force_jupyter=True)
    InteractiveShell.instance(cache_size=0)
    with capture_output() as outputs, Progress("training", of=400, console=console) as bar:
        for step in (100, 400):
            bar.to(step, "loss <2.000>")
            time.sleep(0.2)
    InteractiveShell.clear_instance()
    html = [one.data["text/html"] for one in outputs.outputs]
    assert "100 of 400 · loss &lt;2.000&gt;" in html[1] and 'max="400" value="100"' in html[1]
    assert 'value="400"' in html[-1] and "0:00:00 left" in html[-1]


def test_a_run_shows_its_steps() -> None:
    console = terminal()
    display = Display(console, 10, 8)
    with display.progress:
        for step in (1, 2):
            display.step(step, 1.0, 0.1)
            time.sleep(0.2)
    assert " left · training · 2 of 10 · loss 1.000, 80 tokens/s" in shown(console)


def test_standard_error_is_used_where_it_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", stream)
        with Progress("planning"):
            time.sleep(0.2)
    assert b"planning" in os.read(ours, 4096)
    os.close(ours)
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    with Progress("planning"):
        time.sleep(0.1)
    assert pipe.getvalue() == ""


def test_a_loop_says_how_many_are_done_and_ends_its_line_when_it_fails() -> None:
    lines: list[str] = []
    with Progress("starting the server", console=terminal()) as outer:
        with pytest.raises(ZeroDivisionError):
            for number in progress.counted([2, 1, 0], "compiling"):
                lines.append(outer.line())
                _ = 1 // number
        assert progress._running == [outer]
    assert [line.split(" · ", 1)[1] for line in lines] == [
        f"starting the server · compiling · {done} of 3" for done in range(3)
    ]
