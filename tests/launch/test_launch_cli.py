"""`shardlib launch` with an engine, from the outside."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

import shardlib
from shardlib.cli.inputs import inputs_of
from shardlib.errors import LaunchError
from shardlib.launch.clusters import KubernetesSettings, SlurmSettings
from shardlib.launch.commands import with_flags
from shardlib.launch.submission import settings_of


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that stands for sbatch, and the folder where it is called."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text(
        '#!/bin/bash\npwd > called\nif [ -f refuse ]; then echo "no such partition" >&2; exit 1;'
        " fi\necho 42\n"
    )
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "launches" / "llama"


def test_a_dry_run_writes_nothing(shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    words = "launch --slurm --topology 16*h100:8 --run runs/a --name llama -o partition=gpu"
    code, out, err = shell(*words.split(), "--dry-run", "--", "train", "--steps", "9")
    assert (code, err) == (0, "")
    assert "#SBATCH --partition=gpu" in out
    step = next(line for line in out.splitlines() if "srun" in line)
    wanted = "shardlib train --steps 9 --topology 16*h100:8 --run runs/a"
    assert shlex.split(step.removesuffix("&"))[-8:] == wanted.split()
    assert f"--chdir={tmp_path}" in step
    assert not list(tmp_path.iterdir())


def test_the_words_of_a_training_say_machine_and_run(shell):
    words = ("train", "-t", "16*h100:8", "--run=/runs/a")
    settings = "--image i -o volumes=runs:/runs --env A=b=c --restarts 7 --dry-run --json"
    code, out, _ = shell("launch", "--kubernetes", *settings.split(), "--", *words)
    assert code == 0
    found = yaml.safe_load(json.loads(out)["files"]["jobset.yaml"])["spec"]
    group = found["replicatedJobs"][0]["template"]["spec"]
    container = group["template"]["spec"]["containers"][0]
    assert (found["failurePolicy"]["maxRestarts"], group["completions"], container["command"]) == (
        7,
        16,
        ["python", "-m", "shardlib", *words],
    )
    assert {"name": "A", "value": "b=c"} in container["env"]


def test_other_programs_are_left_as_they_are(shell):
    words = "launch --skypilot -t h100:8 --dry-run --json -- python train.py --run x"
    code, out, _ = shell(*words.split())
    assert code == 0
    assert (
        yaml.safe_load(json.loads(out)["files"]["task.yaml"])["run"]
        == "exec python train.py --run x\n"
    )


def test_files_are_written_and_commands_run_beside_them(shell, sbatch: Path):
    code, out, _ = shell("launch", "--slurm", "-t", "2*h100:8", "--name", "llama", "--", "train")
    assert (code, out.splitlines()) == (
        0,
        ["42", "look: squeue --name=llama", "stop: scancel --name=llama"],
    )
    assert (sbatch / "called").read_text().strip() == str(sbatch)
    assert (sbatch / "job.sbatch").exists()


def test_what_the_scheduler_refuses_is_said(shell, sbatch: Path):
    sbatch.mkdir(parents=True)
    (sbatch / "refuse").touch()
    code, out, err = shell(
        "launch", "--slurm", "-t", "2*h100:8", "--name", "llama", "--json", "--", "train"
    )
    assert code == 2
    assert "no such partition" in json.loads(out)["error"]["message"]
    assert "no such partition" in err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("-- train", "nothing says who starts the processes"),
        ("-n 2 --image x -- train", "--image is for an engine: one of --slurm"),
        ("--slurm -t h100:8 -n 2 -- train", "--processes is for processes of this machine"),
        ("--slurm --ray -t h100:8 -- train", "--slurm and --ray exclude each other"),
        (
            "-n 2 --interface 192.0.2.77 -- train",
            "192.0.2.77 is not an address of this machine",
        ),
        ("-n 2 -- tran", "there is no program 'tran' here; did you mean 'train'? Try:"),
        ("-n 2 -- serve runs/a", "run in one process, without `launch`"),
        ("--slurm -- train", "a job needs to know its machine"),
        ("--slurm -t h100:8 -o partitoin=gpu -- train", "Did you mean partition?"),
        ("--slurm -t h100:8 --env HF_TOKEN=x -- train", "looks like a secret"),
        ("--slurm -t h100:8 --env A -- train", "--env 'A' is not NAME=VALUE"),
        ("--tpu-vm -t v5p:4x4x4 -- train", "zone is missing"),
        ("--ray -t h1000:8 -- train", "unknown chip"),
    ],
)
def test_mistakes_are_one_message(shell, words: str, fault: str):
    code, out, err = shell("launch", *words.split())
    assert (code, out) == (2, "")
    assert fault in " ".join(err.split())


def test_options_have_the_kinds_of_their_fields():
    found = settings_of(
        KubernetesSettings,
        [
            "host-network=true",
            "save_seconds=9",
            "volumes=a:/a",
            "volumes=b:/b",
            "node_selector=x=y",
        ],
        {"port": 7},
    )
    assert found == KubernetesSettings(
        host_network=True, save_seconds=9, volumes=("a:/a", "b:/b"), node_selector=("x=y",), port=7
    )
    assert settings_of(SlurmSettings, ["exclusive=false"]).exclusive is False


def test_all_faults_of_options_are_listed():
    with pytest.raises(LaunchError) as caught:
        settings_of(SlurmSettings, ["chain=many", "exclusive=1", "partition", "qos=a", "qos=b"])
    for fault in (
        "chain is 'many'",
        "exclusive is '1'",
        "'partition' is not KEY=VALUE",
        "qos is given twice",
    ):
        assert fault in str(caught.value)


NAME = "xla_gpu_all_gather_combine_threshold_bytes"


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan with a compiler flag."""
    pins = {"microbatches": 1, "remat": "full", "zero": 3, "mesh": {"fsdp": 64}}
    inputs = inputs_of("llama2-7b", 256, 2048)
    plan = shardlib.plan(**inputs, topology="8*h100:8", pin=pins)
    assert plan.compiler_options == {NAME: 128 << 20}
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(plan.to_json())
    return file


SHOW = "import os, jax; print(jax.jit(abs)(-jax.device_count()), os.environ['XLA_FLAGS'])"


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--xla_dump_max_hlo_modules=7", f"--xla_dump_max_hlo_modules=7 --{NAME}=134217728"),
        (f"--{NAME}=1", f"--{NAME}=1"),
    ],
)
def test_processes_have_the_compiler_flags_of_the_plan(
    shell, plan_file: Path, monkeypatch: pytest.MonkeyPatch, given: str, expected: str
):
    """XLA takes them there, and what the user has set stays as it is."""
    monkeypatch.setenv("XLA_FLAGS", given)
    words = ["launch", "-n", "2", "--devices-per-process", "2", "--plan", str(plan_file)]
    code, out, err = shell(*words, "--", sys.executable, "-c", SHOW)
    assert code == 0, err
    assert (
        sorted(line.partition(f"2 {expected}")[1:] for line in out.splitlines())
        == [(f"2 {expected}", "")] * 2
    )


def test_scripts_have_the_compiler_flags_of_the_plan(shell, plan_file: Path):
    words = "launch --slurm -t 8*h100:8 --env XLA_FLAGS=--xla_gpu_autotune_level=0 --dry-run"
    code, out, err = shell(*words.split(), "--plan", str(plan_file), "--", "python", "train.py")
    assert code == 0, err
    assert f"export XLA_FLAGS='--xla_gpu_autotune_level=0 --{NAME}=134217728'" in out


def test_flags_of_tpus_have_a_variable_of_their_own():
    options = {"xla_a": True, "xla_b": 2}
    found = with_flags(options, "google", {"LIBTPU_INIT_ARGS": "--xla_b=3", "XLA_FLAGS": "--c"})
    assert found == {"LIBTPU_INIT_ARGS": "--xla_b=3 --xla_a=true"}
    assert with_flags({}, "nvidia", {"XLA_FLAGS": "--c"}) == {}
