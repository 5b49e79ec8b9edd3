"""What a user writes reaches the processes as it is, through every engine, and no shell on the way
carries it out: the scripts are really run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from subprocess import list2cmdline
from typing import Any

import pytest
import yaml

from shardlib.errors import LaunchError
from shardlib.launch.clouds import TASK, SkyPilotSettings, TpuVmSettings, host_text, skypilot
from shardlib.launch.clusters import (
    MANIFEST,
    SCRIPT,
    KubernetesSettings,
    RayHosts,
    RaySettings,
    SlurmSettings,
    kubernetes,
    ray,
    slurm,
)
from shardlib.launch.job import Job
from shardlib.launch.submission import Submission, submit
from shardlib.processes.console import Processes

WORDS = (
    "a b",
    "it's",
    'say "x"',
    "$(touch x)",
    "`touch x`",
    "line\nbreak; touch x",
    "; touch x #",
    "-rf",
    "--",
    "",
    "naïve 漢字 ✓",
    "$HOME",
    "${PATH}",
    "*",
    "~",
    "a\\b",
    "!!",
    "&& touch x",
    "| touch x",
    "> x",
    "%s",
    "$$(x)",
    "\t",
    "'\"'\"'$(touch x)'\"'\"'",
    "$(HOSTILE_0) $$(HOSTILE_0) $$",
)
RUN = "/tmp/no such folder/$(touch x)`touch x`;touch x'\"\nx"
#: Writes what it was given.
TELL = (
    "import json, os, sys; open(os.environ.get('TELL', 'told.json'),"
    " 'w').write(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if"
    " k.startswith('HOSTILE')}]))"
)
#: The same of a program that is given words alone.
TELL_WORDS = "import json, sys; open('told.json', 'w').write(json.dumps(sys.argv[1:]))\n"
VALUES = {f"HOSTILE_{i}": word for i, word in enumerate(WORDS)}


def job(topology: str = "cpu:2", **more: Any) -> Job:
    return Job(
        name="odd",
        command=(sys.executable, "-c", TELL, *WORDS),
        topology=topology,
        environment=VALUES,
        **more,
    )


def run(folder: Path, words: list[str], environ: dict[str, str] | None = None) -> None:
    subprocess.run(
        words,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **(environ or {})},
        timeout=60,
        check=True,
        stdin=subprocess.DEVNULL,
    )


def check(folder: Path, values: dict[str, str] | None = None) -> None:
    """The program was given the words and values as they were written, and nothing else was
    done.
    """
    words, environ = json.loads((folder / "told.json").read_text())
    assert words == list(WORDS) and environ == (VALUES if values is None else values)
    assert not (folder / "x").exists()


def tools(folder: Path, **programs: str) -> dict[str, str]:
    """A PATH where scripts stand for programs."""
    (folder / "tools").mkdir()
    for name, text in programs.items():
        (folder / "tools" / name).write_text(text)
        (folder / "tools" / name).chmod(0o755)
    return {"PATH": f"{folder / 'tools'}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("processes", "more"), [(1, False), (2, False), (2, True)])
def test_slurm(tmp_path: Path, processes: int, more: bool):
    settings = SlurmSettings()
    if more:
        (place := tmp_path / "a b").mkdir()
        settings = SlurmSettings(setup=("export ONE=1",), workdir=str(place), chain=2)
    made = slurm(job(run=RUN, restarts=0, host_processes=processes), settings)
    (tmp_path / SCRIPT).write_text(made.files[SCRIPT])
    path = tools(
        tmp_path,
        srun='#!/bin/bash\nwhile [ "$1" != bash ]; do shift; done\nSLURM_PROCID=0 SLURM_LOCALID=0'
        ' exec "$@"\n',
        squeue="#!/bin/bash\necho RUNNING\n",
        scontrol="#!/bin/bash\necho node1\n",
    )
    run(tmp_path, ["bash", SCRIPT], {**path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"})
    check(tmp_path)


def test_slurm_makes_a_secret_of_its_own_at_every_start(tmp_path: Path):
    script = slurm(Job(name="a", command=("true",), topology="2*cpu:1"), SlurmSettings()).files[
        SCRIPT
    ]
    line = next(line.strip() for line in script.splitlines() if "SHARDLIB_SECRET" in line)
    found = {
        subprocess.run(
            ["bash", "-c", f'{line}\nprintf %s "$SHARDLIB_SECRET"'],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(found) == 2 and all(re.fullmatch("[0-9a-f]{32}", one) for one in found)


def test_cloud_tpu(tmp_path: Path):
    text = host_text(job("v6e:4x4", seconds=60), TpuVmSettings(zone="z", setup=("true",)))
    assert "SHARDLIB_PROCESSES=auto" in text
    run(tmp_path, ["bash", "-c", text])
    check(tmp_path)


def test_cloud_tpu_in_a_container(tmp_path: Path):
    path = tools(tmp_path, sudo=f"#!{sys.executable}\n{TELL_WORDS}")
    one = job("v6e:4x4", image="me/image:1", run="/runs/$(touch x)", seconds=60)
    run(tmp_path, ["bash", "-c", host_text(one, TpuVmSettings(zone="z"))], path)
    words = json.loads((tmp_path / "told.json").read_text())
    assert words[-len(WORDS) :] == list(WORDS) and {
        "me/image:1",
        "--kill-after=120",
        "--volume=/runs/$(touch x):/runs/$(touch x)",
        "--env=SHARDLIB_PROCESSES=auto",
        *(f"--env={name}={value}" for name, value in VALUES.items()),
    } <= set(words)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_skypilot(tmp_path: Path, processes: int):
    one = job("cpu:2", host_processes=processes)
    task = yaml.safe_load(skypilot(one, SkyPilotSettings()).files[TASK])
    assert task["envs"] == VALUES
    run(
        tmp_path,
        ["bash", "-c", task["run"]],
        {**VALUES, "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NODE_RANK": "0"},
    )
    check(tmp_path)


@pytest.mark.parametrize("processes", [1, 2])
def test_kubernetes(tmp_path: Path, processes: int):
    manifest = yaml.safe_load(
        kubernetes(job("cpu:2", image="i", host_processes=processes), KubernetesSettings()).files[
            MANIFEST
        ]
    )
    container = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ][0]

    def expanded(text: str, names: dict[str, str]) -> str:
        """Kubernetes: $(NAME) is the variable where there is one, $$ is a dollar sign."""
        return re.sub(
            r"\$\$|\$\(([^)]*)\)",
            lambda found: "$" if found[0] == "$$" else names.get(found[1], found[0]),
            text,
        )

    values: dict[str, str] = {}
    for entry in container["env"]:
        if "value" in entry:
            values[entry["name"]] = expanded(entry["value"], values)
    words = [expanded(word, values) for word in container["command"]]
    run(tmp_path, words, {**values, "JOB_COMPLETION_INDEX": "0"})
    check(tmp_path)


@pytest.mark.parametrize("joined", [list2cmdline, shlex.join])
def test_ray_whose_entrypoint_goes_through_a_shell(tmp_path: Path, joined: Any):
    """Ray joins the words with the quoting of Windows (list2cmdline) and gives the line to /bin/sh
    of the head node.
    """
    one = job("2*h100:8", run=RUN)
    words = ray(one, RaySettings()).commands[0]
    path = tools(tmp_path, python=f"#!{sys.executable}\n{TELL_WORDS}")
    run(tmp_path, ["sh", "-c", joined(words[words.index("--") + 1 :])], path)
    module, name, word = json.loads((tmp_path / "told.json").read_text())
    assert (module, name) == ("-m", "shardlib.launch.ray_driver") and not (tmp_path / "x").exists()
    found = RayHosts.from_word(word)
    assert (found.words, found.environment, found.run) == (one.words, VALUES, RUN)


def test_this_machine(tmp_path: Path):
    from shardlib.processes.console import Lines

    processes = Processes(
        (sys.executable, "-c", TELL, *WORDS),
        [{**os.environ, **VALUES, "TELL": str(tmp_path / "told.json")}],
        Lines(1),
    )
    try:
        while processes.alive:
            processes.next_end(0.1)
    finally:
        processes.close()
    check(tmp_path)


def test_files_of_a_submission_are_private_and_its_secrets_in_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    told = TELL_WORDS.replace("sys.argv[1:]", "[sys.argv, os.environ['SHARDLIB_SECRET']]")
    path = tools(tmp_path, sky=f"#!{sys.executable}\nimport os; {told}")
    monkeypatch.setenv("PATH", path["PATH"])
    made: Submission = skypilot(
        Job(name="a", command=("train",), topology="2*h100:8"), SkyPilotSettings()
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / TASK).write_text("an older one that all may read")
    submit(made, tmp_path / "out")
    words, secret = json.loads((tmp_path / "out" / "told.json").read_text())
    assert (
        len(secret) == 32
        and "--secret=SHARDLIB_SECRET" in words
        and secret not in str(words) + str(made) + (tmp_path / "out" / TASK).read_text()
    )
    assert stat.S_IMODE((tmp_path / "out" / TASK).stat().st_mode) == 0o600


def test_a_folder_of_a_submission_may_have_any_name(tmp_path: Path):
    made = Submission(engine="Test", files={"a": "text"}, commands=(("false",),))
    strange = tmp_path / os.fsdecode(b"a\xffb")
    with pytest.raises(LaunchError, match=r"did not take the job(.|\n)*a\\udcffb; mend it there"):
        submit(made, strange)
    assert (strange / "a").read_text() == "text"
    with pytest.raises(LaunchError, match=r"cannot be written into .*null byte"):
        submit(made, tmp_path / "a\0b")
