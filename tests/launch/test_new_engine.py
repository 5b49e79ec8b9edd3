"""A new engine is a value and a row: its option, its help and its settings follow from there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shardlib.errors import LaunchError
from shardlib.launch.commands import ENGINES, launch_command
from shardlib.launch.job import Job
from shardlib.launch.submission import Engine, Submission


@dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """What a job on paper needs: a desk, and who reads it."""

    desk: str | None = None
    readers: tuple[str, ...] = ()


def paper(job: Job, settings: PaperSettings) -> Submission:
    """Writes a job down, for somebody to start by hand."""
    words = " ".join([settings.desk or "", *settings.readers, *job.words])
    return Submission(engine="Paper", files={"job.txt": words}, commands=(("true",),))


PAPER = Engine(
    name="on-paper",
    help="Write the job down.",
    settings=PaperSettings,
    submission=paper,
    defaults=lambda: {"desk": "first"},
)


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    made = typer.Typer()
    made.command("launch", context_settings={"allow_interspersed_args": False})(
        launch_command((*ENGINES, PAPER))
    )
    return made


def test_its_option_its_settings_and_its_dry_run(app: typer.Typer):
    words = ["--on-paper", "-t", "2*h100:8", "-o", "readers=ann", "-o", "readers=bob"]
    found = CliRunner().invoke(app, [*words, "--dry-run", "--json", "--", "train"])
    assert found.exit_code == 0, found.output
    data = json.loads(found.output)
    assert data["files"] == {
        "job.txt": "first ann bob python -m shardlib train --topology 2*h100:8"
    }


def test_it_writes_its_files(app: typer.Typer, tmp_path: Path):
    words = ["--on-paper", "-t", "h100:8", "-o", "desk=last", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, [*words, "--", "train"]).exit_code == 0
    assert (tmp_path / "job.txt").read_text().startswith("last python")


def test_its_line_of_the_help(app: typer.Typer):
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    lines = [line for line in text.splitlines() if "--on-paper" in line]
    assert len(lines) == 1 and "Write the job down." in lines[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on-paper", "--slurm"], "--slurm and --on-paper exclude each other"),
        (["--on-paper", "--port", "1"], "--port is for processes of this machine, and --on-paper"),
        (["--on-paper", "-t", "h100:8", "-o", "dsk=1"], "Did you mean desk?"),
        ([], "--skypilot, --on-paper"),
    ],
)
def test_messages_know_it(app: typer.Typer, words: list[str], said: str):
    found = CliRunner().invoke(app, [*words, "--", "train"])
    assert isinstance(found.exception, LaunchError) and said in str(found.exception)
