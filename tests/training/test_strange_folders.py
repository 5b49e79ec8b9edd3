"""Whatever stands in the folder of a run: a clear message, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardlib.checkpointing.folder import Folder, claim, described
from shardlib.checkpointing.huggingface import Files
from shardlib.checkpointing.store import Checkpoints, DamagedError, epath, read_about, try_about
from shardlib.errors import CheckpointError, MissingFileError, RunError, ShardlibError
from shardlib.processes.place import read_heartbeat, write_whole
from shardlib.training.measures import JsonLines, by_step, read_lines, read_records
from shardlib.training.run import Opened, RunFolder, status
from tests.processes import python

BOUNDED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "step",
                    "loss",
                    "seconds",
                    "event",
                    "data_seconds",
                    "tokens_per_second",
                    "format",
                    "run",
                    "traced",
                    "versions",
                    "changes",
                    "names",
                    "time",
                    "steps",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
#: Lines that somebody, or nobody's hand, has left: half ones, wrong ones, and such as readers choke
#: on.
LINES = st.one_of(
    JSON.map(json.dumps),
    st.text(max_size=40),
    st.sampled_from(
        [
            "[" * 100_000,
            '{"step": ' * 50_000,
            '{"step": 1, "lo',
            '{"step": 2, "loss": NaN, "seconds": "x"}',
            '{"step": 3, "loss": 1e999}',
            '{"step": true, "loss": 1}',
            '{"step": 4, "loss": null}',
            f'{{"step": 5, "loss": 1{"0" * 400}}}',
            f'{{"step": 1{"0" * 5000}}}',
            '{"step": -1, "loss": 1}',
            '{"event": ["resumed"], "step": 1}',
            '{"step": 1, "event": null}',
            "\x00\x00",
            "\ufeff{}",
        ]
    ),
)
GOOD = '{"step": 6, "loss": 0.5, "seconds": 0.1, "data_seconds": 0.0, "tokens_per_second": 3.0}'


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.open({"model": "none", "steps": 10})
    return found


@pytest.mark.long
@BOUNDED
@given(lines=st.lists(LINES, max_size=6), at=st.integers(0, 6))
def test_any_line_of_the_metrics(folder: RunFolder, lines: list[str], at: int):
    lines = [line.replace("\n", " ") for line in lines]
    text = "\n".join([*lines[:at], GOOD, *lines[at:]])
    folder.metrics.write_text(text, encoding="utf-8", errors="surrogatepass")
    before = folder.metrics.read_bytes()
    found = read_lines(folder.metrics)
    assert len(found.records) + found.unread == sum(bool(line.strip()) for line in text.split("\n"))
    assert any(record["step"] == 6 and record.get("loss") == 0.5 for record in found.records)
    for record in by_step(found.records).values():
        assert isinstance(record["loss"], float) and isinstance(record["step"], int)
    assert str(status(folder.path)).startswith(str(folder.path)) and json.dumps(
        status(folder.path).to_json()
    )
    JsonLines(folder.metrics).close()
    assert folder.metrics.read_bytes().startswith(before)
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 7, "loss": 1.5}\n')
    assert read_records(folder.metrics)[-1] == {"step": 7, "loss": 1.5}


@BOUNDED
@given(
    text=LINES
    | JSON.map(lambda value: json.dumps({"format": 1, "run": value}))
    | JSON.map(
        lambda value: json.dumps({"format": 1, "run": {}, "traced": value, "changes": value})
    )
)
def test_any_text_of_the_description(folder: RunFolder, text: str):
    folder.manifest.write_text(text, encoding="utf-8", errors="surrogatepass")
    before = folder.manifest.read_bytes()
    for ask in (
        lambda: folder.check({"model": "none"}, {"seed": {"value": 1}}),
        folder.identity,
        folder.changed,
        lambda: status(folder.path),
    ):
        try:
            ask()
        except ShardlibError as error:
            assert str(folder.path) in str(error)
    assert folder.manifest.read_bytes() == before


#: Names that are not steps, however much they look like one.
NAMES = st.one_of(
    st.sampled_from(
        [
            "²",
            "checkpoint_¹",
            "٣",
            "007",
            "-1",
            "+1",
            "1_0",
            "99999999999",
            "1" * 200,
            "1.5",
            " 1",
            "0x1",
            "12.damaged",
            "12.discarded.x",
            "metrics.jsonl",
            "五",
        ]
    ),
    st.text(
        st.characters(blacklist_characters="/\x00", blacklist_categories=["Cs"]),
        min_size=1,
        max_size=20,
    ),
)


@BOUNDED
@given(names=st.lists(NAMES, max_size=6), kind=st.sampled_from(["folder", "file", "link", "loop"]))
def test_any_name_among_the_checkpoints(tmp_path: Path, names: list[str], kind: str):
    place = tmp_path / "checkpoints"
    shutil.rmtree(place, ignore_errors=True)
    (place / "3").mkdir(parents=True)
    made: list[str] = []
    for name in {*names} - {"owner"}:
        try:
            if kind == "folder":
                (place / name).mkdir()
            elif kind == "file":
                (place / name).write_text("text")
            else:
                (place / name).symlink_to(tmp_path if kind == "link" else name)
            made.append(name)
        except OSError:
            continue  # a name that the file system refuses, or that is there
    steps = Folder(path=epath.Path(place)).steps()
    assert 3 in steps and all(str(step) in {"3", *made} for step in steps)
    with Checkpoints(place) as checkpoints:
        assert checkpoints.steps() == steps
    assert all(
        os.path.lexists(place / name)
        for name in made
        if not name.endswith(".discarded") and "orbax-checkpoint-tmp" not in name
    )


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_else_in_the_place_of_the_owner(tmp_path: Path, kind: str):
    place = tmp_path / "checkpoints"
    place.mkdir()
    (tmp_path / "somewhere").mkdir()
    (
        (place / "owner").write_text("text")
        if kind == "file"
        else (place / "owner").symlink_to(tmp_path / "somewhere")
    )
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written to .*owner"):
        Checkpoints(place)
    assert [*(tmp_path / "somewhere").iterdir()] == [] and os.path.lexists(place / "owner")


def test_a_link_in_the_place_of_a_temporary_folder(tmp_path: Path):
    """What it points to is somebody's."""
    treasure = tmp_path / "somewhere"
    treasure.mkdir()
    (treasure / "file").write_text("precious")
    place = tmp_path / "checkpoints"
    place.mkdir()
    for name in ("5.orbax-checkpoint-tmp", "4.discarded"):
        (place / name).symlink_to(treasure)
    (place / "6.orbax-checkpoint-tmp").write_text("a file")
    Checkpoints(place).close()
    assert (treasure / "file").read_text() == "precious" and {
        path.name for path in place.iterdir()
    } == {"owner"}
    (tmp_path / "run.json.part").symlink_to(treasure / "file")
    write_whole(tmp_path / "run.json", "new")
    assert (treasure / "file").read_text() == "precious" and (
        tmp_path / "run.json"
    ).read_text() == "new"


def test_entries_that_cannot_be_read(folder: RunFolder):
    folder.metrics.mkdir()
    with pytest.raises(RunError, match=r"metrics\.jsonl, cannot be read: "):
        read_records(folder.metrics)
    folder.metrics.rmdir()
    (folder.path / "plan.json").write_text("[" * 100_000)
    (folder.path / "heartbeat" / "rank-0.json").mkdir()
    for number, text in enumerate(
        (
            "[" * 100_000,
            '{"rank": "x"}',
            (
                '{"rank": "x", "host": 1, "pid": "y", "step": [], "phase": 3, "lasts": "z",'
                ' "number": null, "boot": 1, "clock": {}}'
            ),
        ),
        1,
    ):
        (folder.path / "heartbeat" / f"rank-{number}.json").write_text(text)
        assert read_heartbeat(folder.path / "heartbeat" / f"rank-{number}.json") is None
    assert status(folder.path).state == "new" and status(folder.path).processes == ()


#: What stands in place of a file of a run, and what is said of it.
KINDS = {
    "folder": "it is a folder",
    "pipe": "it is not a file that can be read",
    "socket": "",
    "loop": "Too many levels of symbolic links",
    "device": "it is not a file that can be read",
}


def put(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.path.relpath(path))  # the names of sockets are short
    else:
        path.symlink_to(path.name if kind == "loop" else "/dev/zero")


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(folder: RunFolder, kind: str, monkeypatch: pytest.MonkeyPatch):
    """What has no end, or waits for somebody who writes, stops nobody."""
    monkeypatch.chdir(folder.path)
    beat = folder.path / "heartbeat" / "rank-0.json"
    for path in (beat, folder.plan):
        put(path, kind)
    assert read_heartbeat(beat) is None and status(folder.path).state == "new"
    put(folder.metrics, kind)
    with pytest.raises(
        RunError,
        match=r"metrics\.jsonl, cannot be read: .*" + KINDS[kind].removeprefix("it is a folder"),
    ):
        read_records(folder.metrics)
    folder.manifest.unlink()
    put(folder.manifest, kind)
    for ask in (lambda: folder.check({}), folder.identity, lambda: folder.open({})):
        with pytest.raises(
            RunError,
            match=(
                r"run\.json is not a description of a run: it cannot be read:"
                rf" .*{KINDS[kind]}(.|\n)*Try: a copy of that file"
            ),
        ):
            ask()


def test_an_owner_that_is_a_pipe_stops_nobody(tmp_path: Path):
    Checkpoints(tmp_path).close()
    for path in (tmp_path / "owner").iterdir():
        put(path, "pipe")
    assert described(tmp_path) is None
    os.mkfifo(tmp_path / "owner" / "000002.beat")
    claim(tmp_path, silent_seconds=0.5).release()


def test_pipes_among_checkpoints_and_safetensors(tmp_path: Path):
    (tmp_path / "3" / "about").mkdir(parents=True)
    os.mkfifo(tmp_path / "3" / "about" / "metadata")
    assert try_about(epath.Path(tmp_path / "3"), 3) is None
    with pytest.raises(
        DamagedError, match="its description has metadata, which is not a file that can be read"
    ):
        read_about(epath.Path(tmp_path / "3"), 3)
    os.mkfifo(tmp_path / "model.safetensors")
    with (
        pytest.raises(CheckpointError, match=r"model\.safetensors is not a file that can be read"),
        Files(folder=tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty, cut off, or something else than JSON"),
        ('{"format": 1, "ru', "it is empty, cut off"),
        ("[]", "it is JSON, but not an object"),
        ("null", "it is JSON, but not an object"),
        ('{"format": 1}', "it does not say its run"),
        ("{}", "it does not say its format and run"),
        ('{"format": 1, "run": null, "traced": 5}', "its run and traced are not objects"),
        ("[" * 100_000, "it is nested too deeply"),
        (b"\xff\xfe", "its bytes are not text"),
    ],
)
def test_a_damaged_description_is_told_in_plain_words(
    folder: RunFolder, text: str | bytes, why: str
):
    folder.manifest.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RunError) as caught:
        folder.check({})
    assert f"is not a description of a run: {why}" in str(caught.value)
    assert "Error" not in str(caught.value)
    assert "--allow-changes identity" in str(caught.value)


def checkpoint(folder: RunFolder, step: int) -> None:
    """As whole as anybody can see from outside."""
    (folder.checkpoints / str(step)).mkdir(parents=True)


@pytest.mark.parametrize("gone", ["deleted", "link to nothing"])
def test_checkpoints_of_nobody_knows_what(folder: RunFolder, gone: str):
    checkpoint(folder, 40)
    folder.manifest.unlink()
    if gone == "link to nothing":
        folder.manifest.symlink_to("nothing")
    for ask in (folder.check, folder.open):
        for allow in ((), ("lr", "loss")):
            with pytest.raises(
                RunError,
                match=(
                    r"has checkpoints, the newest of step 40, and no run\.json: nobody knows of"
                    r" what run they are\nTry: .*--allow-changes identity"
                ),
            ):
                ask({"lr": 1}, {"seed": {"value": 1}}, allow)
    assert not folder.manifest.exists()
    folder.check({"lr": 1}, None, ("identity",))
    found = folder.open({"lr": 1}, {"seed": {"value": 1}}, ("identity", "optimizer"))
    assert not found.known
    assert [one.name for one in found.changes] == ["identity"]
    assert folder.changed() == {"identity", "optimizer"}
    (entry,) = json.loads(folder.manifest.read_text())["changes"]
    assert entry["after_step"] == 40
    assert "nobody knows of what run they are" in entry["differences"][0]
    assert folder.open({"lr": 1}, {"seed": {"value": 1}}) == Opened(known=True)
    with pytest.raises(RunError, match="lr is 2, the run has 1"):
        folder.open({"lr": 2}, None, ("identity",))


def test_what_stands_in_the_way_is_named(folder: RunFolder, tmp_path: Path):
    (folder.path / "plan.json").mkdir()
    with pytest.raises(
        RunError,
        match=(
            r"cannot be written: Is a directory \(.*/plan\.json\)\nTry: move .*/plan\.json away,"
            r" which is something else"
        ),
    ):
        folder.write_plan("{}")
    (tmp_path / "file").write_text("text")
    with pytest.raises(
        RunError, match=r"cannot be written: Not a directory \(.*/file\)\nTry: move .*/file away"
    ):
        RunFolder(tmp_path / "file" / "run").probe()
    full = OSError(errno.ENOSPC, "No space left on device", str(folder.metrics))
    assert "Try: free some space" in str(
        folder.unwritable(full)
    ) and "Try: another folder, or other permissions" in str(
        folder.unwritable(OSError(errno.EACCES, "Permission denied", "x"))
    )
    RunFolder(tmp_path / "new" / "run").probe()
    assert not (tmp_path / "new").exists() and len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_something_else_in_the_place_of_a_checkpoint(tmp_path: Path, kind: str):
    place = tmp_path / "80"
    (tmp_path / "somewhere").mkdir()
    (
        place.write_text("text")
        if kind == "file"
        else place.mkdir()
        if kind == "folder"
        else place.symlink_to("somewhere")
    )
    (tmp_path / "80" / "state").mkdir() if kind == "folder" else None
    folder = Folder(path=epath.Path(tmp_path))
    if kind != "folder":  # an empty folder has all the marks of a checkpoint on a file system
        assert folder.steps() == () and re.search(
            rf"80, where the checkpoint of step 80 belongs, is a {kind}; it is not"
            r" overwritten\nTry: move it away",
            folder.taken(80),
        )
    else:
        assert folder.taken(80).startswith("there is a checkpoint of step 80")
    assert folder.taken(81) == ""


def test_the_folder_of_a_run_is_not_that_of_its_checkpoints(folder: RunFolder):
    for read_only in (True, False):
        with pytest.raises(
            CheckpointError,
            match=(
                rf"{folder.path} is the folder of a run; its checkpoints are in"
                rf" {folder.checkpoints}\n"
            ),
        ):
            Checkpoints(folder.path, read_only=read_only)
    assert not (folder.path / "owner").exists()
    Checkpoints(folder.checkpoints).close()


@pytest.mark.parametrize("kind", ["link", "name", "pipe"])
def test_metrics_are_not_added_to_what_belongs_to_somebody_else(tmp_path: Path, kind: str):
    other, place = tmp_path / "other", tmp_path / "metrics.jsonl"
    other.write_text("theirs\n")
    if kind == "link":
        place.symlink_to(other)
    elif kind == "name":
        place.hardlink_to(other)
    else:
        os.mkfifo(place)
    with pytest.raises(OSError, match=r"metrics\.jsonl|No such device"):
        JsonLines(place, own=True)
    assert other.read_text() == "theirs\n"
    if kind == "link":
        JsonLines(place).close()  # a file that the user names is the user's


def test_the_same_run_is_opened_again(tmp_path: Path):
    folder = RunFolder(tmp_path / "a" / "run")
    identity = {"model": "demo", "lr": 4e-3, "data": None, "batch": 16}
    folder.check({"model": "any"})
    assert not folder.open(identity).known
    assert folder.open(identity).known
    assert folder.require() == identity
    folder.check({"model": "demo", "batch": 16})
    with pytest.raises(RunError, match='model is "large", the run has "demo"'):
        folder.check({"model": "large"})
    assert folder.saved() == () and folder.heartbeats() == []


def test_another_run_is_refused_and_nothing_is_touched(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.open({"model": "demo", "seed": 0, "batch": 16})
    before = folder.manifest.read_bytes()
    with pytest.raises(RunError) as caught:
        folder.open({"model": "demo", "seed": 1, "seq": 64})
    assert (
        str(caught.value)
        == f"{folder.path} holds another run:\n  - seed is 1, the run has 0\n  - batch is nothing,"
        " the run has 16\n  - seq is 64, the run has nothing\nTry: another folder, or what the"
        " run was begun with; to go on with these changes on purpose, --allow-changes"
        " seed,batch,seq, or Settings(allow_changes=...). Nothing was changed"
    )
    assert folder.manifest.read_bytes() == before


@pytest.mark.processes
def test_who_only_watches_does_not_load_jax():
    """Neither the supervisor nor `shardlib status`; and whoever owns a folder is known without."""
    code = (
        "import sys, shardlib.training.supervisor, shardlib.training.run,"
        " shardlib.checkpointing.folder; print(sorted({'jax', 'flax', 'optax'} & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "[]"


def test_folders_without_a_run_of_this_format(tmp_path: Path):
    with pytest.raises(MissingFileError, match="there is no run in "):
        RunFolder(tmp_path / "none").require()
    (tmp_path / "run.json").write_text('{"format": 7, "run": {}}')
    with pytest.raises(RunError, match="is of format 7; this version reads 1"):
        RunFolder(tmp_path).require()
