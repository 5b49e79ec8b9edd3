"""What a user writes reaches the processes as it is, through every engine, and no shell on the way
carries it out: the scripts are really run.
"""

from __future__ import annotations

import base64
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
from shardlib.launch.job import Job
from shardlib.launch.kubernetes import MANIFEST, KubernetesSettings, kubernetes
from shardlib.launch.ray import RayHosts, RaySettings, ray
from shardlib.launch.skypilot import TASK, SkyPilotSettings, skypilot
from shardlib.launch.slurm import SCRIPT, SlurmSettings, slurm
from shardlib.launch.submission import Submission, submit
from shardlib.launch.tpu_vm import TpuVmSettings, host_text, tpu_vm
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
)
RUN = "/tmp/no such folder/$(touch x)`touch x`;touch x'\"\nx"
#: Writes what it was given.
TELL = (
    "import json, os, sys; open(os.environ.get('TELL', 'told.json'),"
    " 'w').write(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if"
    " k.startswith('HOSTILE')}]))"
)
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


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("processes", [1, 2])
def test_slurm(tmp_path: Path, processes: int):
    script = slurm(
        Job(
            name="odd",
            command=(sys.executable, "-c", TELL, *WORDS),
            topology="cpu:2",
            environment=VALUES,
            run=RUN,
            restarts=0,
            host_processes=processes,
        ),
        SlurmSettings(),
    ).files[SCRIPT]
    (tools := tmp_path / "tools").mkdir()
    program(
        tools,
        "srun",
        '#!/bin/bash\nwhile [ "$1" != bash ]; do shift; done\nSLURM_PROCID=0 SLURM_LOCALID=0 exec'
        ' "$@"\n',
    )
    program(tools, "squeue", "#!/bin/bash\necho RUNNING\n")
    program(tools, "scontrol", "#!/bin/bash\necho node1\n")
    (tmp_path / SCRIPT).write_text(script)
    run(
        tmp_path,
        ["bash", SCRIPT],
        {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node1",
        },
    )
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


def test_a_container_of_slurm_mounts_no_folder_of_a_strange_name():
    for name in ("/runs/a,/etc:/etc", "/runs/a:b"):
        with pytest.raises(LaunchError, match="list of its mounts"):
            slurm(
                Job(name="a", command=("train",), topology="h100:8", image="i", run=name),
                SlurmSettings(),
            )
        with pytest.raises(LaunchError, match="list of its mounts"):
            slurm(
                Job(name="a", command=("train",), topology="h100:8", image="i"),
                SlurmSettings(workdir=name),
            )
        slurm(
            Job(name="a", command=("train",), topology="h100:8", run=name), SlurmSettings()
        )  # without a container it is a name like others
    with pytest.raises(LaunchError, match="once for each"):
        SlurmSettings(mounts=("/a:/a,/etc:/etc",))


def test_docker_mounts_no_folder_of_a_strange_name():
    with pytest.raises(LaunchError, match="docker divides"):
        tpu_vm(
            Job(name="a", command=("train",), topology="v6e:4x4", image="i", run="/a:/etc"),
            TpuVmSettings(zone="z"),
        )


def test_cloud_tpu(tmp_path: Path):
    text = host_text(job("v6e:1x1"), TpuVmSettings(zone="z"))
    (tmp_path / "script.sh").write_text(text)
    run(tmp_path, ["bash", "script.sh"])
    check(tmp_path)


def test_cloud_tpu_in_a_container(tmp_path: Path):
    (tools := tmp_path / "tools").mkdir()
    program(
        tools,
        "sudo",
        f"#!{sys.executable}\nimport json, sys\nopen('docker.json',"
        " 'w').write(json.dumps(sys.argv[1:]))\n",
    )
    (tmp_path / "script.sh").write_text(
        host_text(
            job("v6e:1x1", image="me/image:1", run="/runs/$(touch x)"), TpuVmSettings(zone="z")
        )
    )
    run(tmp_path, ["bash", "script.sh"], {"PATH": f"{tools}:{os.environ['PATH']}"})
    words = json.loads((tmp_path / "docker.json").read_text())
    assert (
        words[-len(WORDS) :] == list(WORDS)
        and "--volume=/runs/$(touch x):/runs/$(touch x)" in words
        and {f"--env={name}={value}" for name, value in VALUES.items()} <= set(words)
    )
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

    def expanded(
        text: str,
    ) -> str:  # Kubernetes: $(NAME) is the variable where there is one, $$ is a dollar sign
        return re.sub(
            r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else found[0], text
        )

    values = {one["name"]: expanded(one["value"]) for one in container["env"] if "value" in one}
    run(
        tmp_path,
        [expanded(word) for word in container["command"]],
        {**values, "JOB_COMPLETION_INDEX": "0"},
    )
    check(tmp_path)


@pytest.mark.parametrize("joined", [list2cmdline, shlex.join])
def test_ray_whose_entrypoint_goes_through_a_shell(tmp_path: Path, joined: Any):
    """Ray joins the words with the quoting of Windows (list2cmdline) and gives the line to /bin/sh
    of the head node.
    """
    one = job("2*h100:8", run=RUN)
    words = ray(one, RaySettings()).commands[0]
    (tools := tmp_path / "tools").mkdir()
    program(
        tools,
        "python",
        f"#!{sys.executable}\nimport json, sys\nopen('told.json',"
        " 'w').write(json.dumps(sys.argv[1:]))\n",
    )
    run(
        tmp_path,
        ["sh", "-c", joined(words[words.index("--") + 1 :])],
        {"PATH": f"{tools}:{os.environ['PATH']}"},
    )
    module, name, word = json.loads((tmp_path / "told.json").read_text())
    assert (module, name) == ("-m", "shardlib.launch.ray_driver") and not (tmp_path / "x").exists()
    found = RayHosts.from_word(word)
    assert (found.words, found.environment, found.run) == (one.words, VALUES, RUN)


@pytest.mark.parametrize(
    "word",
    [
        "",
        "x",
        "$(touch x)",
        base64.urlsafe_b64encode(b"{}").decode(),
        base64.urlsafe_b64encode(b"[" * 100_000).decode(),
    ],
)
def test_words_that_are_no_job_of_ray(word: str):
    with pytest.raises(LaunchError):
        RayHosts.from_word(word)


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


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"command": ("train", "a\0b")}, "no process can be given"),
        ({"run": "/a\0b"}, "no process can be given"),
        ({"image": "-v/:/host"}, "is not an image"),
        ({"image": "a b"}, "is not an image"),
        ({"image": "i,/etc:/etc"}, "is not an image"),
        ({"environment": {"HF_TOKEN": "x"}}, "looks like a secret"),
        ({"environment": {"DATABASE": "postgres://me:hunter2@db/x"}}, "value of DATABASE"),
        ({"environment": {"A": "hf_" + "a" * 30}}, "value of A"),
        ({"environment": {"A": "-----BEGIN RSA PRIVATE KEY-----"}}, "value of A"),
        ({"environment": {"A": "AKIA" + "B" * 16}}, "value of A"),
    ],
)
def test_jobs_that_no_engine_takes(fields: dict[str, Any], fault: str):
    with pytest.raises(LaunchError, match=fault) as caught:
        Job(**{"name": "a", "command": ("train",), "topology": "cpu:2", **fields})
    for value in fields.get("environment", {}).values():
        assert value not in str(caught.value) or len(value) < 3


@pytest.mark.parametrize(
    "variable",
    [
        "OPENAI_KEY=a",
        "WANDB_KEY=0123456789abcdef0123456789abcdef01234567",
        "MYPASS=hunter2",
        "AUTH=Bearer abc.def",
        "CRED=x",
        "COOKIE=abc",
        "HF_TOKEN=x",
        "apiToken=x",
        "DB_PWD=x",
        "AWS_SECRET_ACCESS_KEY=x",
        "AWS_ACCESS_KEY_ID=x",
        "PGPASSWORD=x",
        "GOOGLE_APPLICATION_CREDENTIALS=x",
        "SIGNING_KEY_2=x",
        "REGISTRY_AUTH=x",
        "HTTP_HEADER=Bearer abc.def",
        "GITHUB_PAT=x",
        "KEY=x",
        "HFTOKEN=x",
        "SESSION_COOKIES=x",
    ],
)
def test_variables_that_look_like_secrets(variable: str):
    name, value = variable.split("=", 1)
    with pytest.raises(LaunchError, match=rf"{name}.* looks like a secret, .*--plain {name}"):
        Job(name="a", command=("train",), topology="cpu:2", environment={name: value})
    assert Job(
        name="a", command=("train",), topology="cpu:2", environment={name: value}, plain=(name,)
    ).environment == {name: value}
    with pytest.raises(
        LaunchError, match="plain has 'OTHER', which is not a variable of environment"
    ):
        Job(name="a", command=("train",), topology="cpu:2", plain=("OTHER",))


@pytest.mark.parametrize(
    "variable",
    [
        "XLA_FLAGS=--xla_gpu_autotune_level=0",
        "KEYBOARD_LAYOUT=de",
        "JAX_COMPILATION_CACHE_KEY_INCLUDE=x",
        "SORT_KEY=name",
        "MAX_TOKENS=4096",
        "TOKENIZERS_PARALLELISM=false",
        "HF_TOKEN_PATH=/run/token",
        "SSH_AUTH_SOCK=/tmp/agent",
        "GIT_AUTHOR_NAME=me",
        "PWD=/home/me",
        "OLDPWD=/home",
        "BYPASS=lo",
        "COMPASS=n",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN=1",
        "AUTH_TYPE=oidc",
        "PATH=/bin",
        "XLA_PASSES=a,b",
        "MONKEY=1x",
        "NCCL_SOCKET_IFNAME=ib0",
        "PATTERN=x",
        "GIT_SHA=0123456789abcdef0123456789abcdef01234567",
    ],
)
def test_variables_that_look_like_none(variable: str):
    name, value = variable.split("=", 1)
    Job(name="a", command=("train",), topology="cpu:2", environment={name: value})


def test_files_of_a_submission_are_private_and_its_secrets_in_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tools := tmp_path / "tools").mkdir()
    program(
        tools,
        "sky",
        f"#!{sys.executable}\nimport json, os, sys\nopen('told.json',"
        " 'w').write(json.dumps([sys.argv, os.environ['SHARDLIB_SECRET']]))\n",
    )
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
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


@pytest.mark.parametrize("value", ["a\0b", "a\udcffb", "\ud800"])
@pytest.mark.parametrize(
    "option", ["partition", "account", "qos", "reservation", "gpu_type", "interface"]
)
def test_options_that_no_script_can_have_are_refused(option: str, value: str):
    job = Job(name="a", command=("train",), topology="2*h100:8", run="/r")
    with pytest.raises(LaunchError, match=r"Slurm cannot be given NUL(.|\n)*job\.sbatch would"):
        slurm(job, SlurmSettings(**{option: value}))


def test_a_folder_of_a_submission_may_have_any_name(tmp_path: Path):
    made = Submission(engine="Test", files={"a": "text"}, commands=(("false",),))
    strange = tmp_path / os.fsdecode(b"a\xffb")
    with pytest.raises(LaunchError, match=r"did not take the job(.|\n)*a\\udcffb; mend it there"):
        submit(made, strange)
    assert (strange / "a").read_text() == "text"
    with pytest.raises(LaunchError, match=r"cannot be written into .*null byte"):
        submit(made, tmp_path / "a\0b")
