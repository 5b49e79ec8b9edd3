"""Files that commands write: what cannot be written is said before anything is done."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest
import typer.main

from shardlib.cli.commands import app
from shardlib.cli.output import writable, write
from shardlib.errors import ArgumentError, LaunchError, MissingFileError
from shardlib.launch.submission import Submission, submit

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


def test_a_file_that_exists_is_written_again(tmp_path: Path):
    for text in ("first", "second"):
        write(tmp_path / "file", text)
        assert (tmp_path / "file").read_text() == text


def test_a_submission_into_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    made = Submission(engine="slurm", files={"job.sh": ""}, commands=(("true",),))
    with pytest.raises(
        LaunchError, match=r"cannot be written into .*file: File exists\nTry: --out"
    ):
        submit(made, tmp_path / "file")


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
