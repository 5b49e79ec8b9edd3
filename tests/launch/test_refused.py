"""Jobs and settings that cannot be run: refused before anything is written, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardlib.errors import LaunchError
from shardlib.launch.clouds import SkyPilotSettings, TpuVmSettings, skypilot, tpu_vm
from shardlib.launch.clusters import (
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

pytestmark = pytest.mark.unit
VOLUME = KubernetesSettings(volumes=("runs:/runs", "data:/data"))
ZONE = TpuVmSettings(zone="z")


def job(topology: str = "h100:8", **more: Any) -> Job:
    return Job(**{"name": "a", "command": ("train",), "topology": topology, **more})


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        (lambda: job(command=("train", "a\0b")), "no process can be given"),
        (lambda: job(run="/a\0b"), "no process can be given"),
        (lambda: job(image="-v/:/host"), "is not an image"),
        (lambda: job(image="a b"), "is not an image"),
        (lambda: job(image="i,/etc:/etc"), "is not an image"),
        (
            lambda: job(plain=("OTHER",)),
            "plain has 'OTHER', which is not a variable of environment",
        ),
        (lambda: kubernetes(job(), VOLUME), "no container image"),
        (lambda: kubernetes(job(image="i", run="/elsewhere/a"), VOLUME), "in no volume"),
        (lambda: kubernetes(job("2*v5e:2x4", image="i"), VOLUME), "have one host"),
        (
            lambda: kubernetes(job("v5p:4x4x8", image="i", host_processes=2), VOLUME),
            "one process on a TPU host",
        ),
        (lambda: KubernetesSettings(secrets=("hub token",)), "secrets has"),
        (lambda: KubernetesSettings(volumes=("runs",)), "CLAIM:PATH"),
        (lambda: KubernetesSettings(node_selector=("pool",)), "NAME=VALUE"),
        (lambda: KubernetesSettings(port=0), "port is 0"),
        (lambda: KubernetesSettings(shared_memory="much"), "shared_memory"),
        (lambda: ray(job("v5p:4x4x4"), RaySettings()), "TPUs"),
        (lambda: ray(job(run="runs/a"), RaySettings()), "relative"),
        (lambda: ray(job(), RaySettings(cpus=0)), "cpus is 0"),
        (lambda: ray(job(), RaySettings(upload="/a", workdir="/b")), "exclude each other"),
        (lambda: ray(job(image="i"), RaySettings(upload="/a")), "exclude each other"),
        (lambda: RayHosts.from_word(""), ""),
        (lambda: RayHosts.from_word("$(touch x)"), ""),
        (lambda: RayHosts.from_word("e30="), ""),  # an empty object
        (lambda: RayHosts.from_word("W1tb" * 33_000), ""),  # nested lists
        (lambda: skypilot(job("2*v5e:4x8")), "several slices"),
        (lambda: skypilot(job("tpu7x:4x4x4")), "no accelerator type"),
        (lambda: SkyPilotSettings(network_tier="fast"), "network_tier"),
        (lambda: SkyPilotSettings(file_mounts=("/runs",)), "REMOTE=SOURCE"),
        (lambda: slurm(job("v5p:4x4x4")), "TPUs"),
        (lambda: slurm(job("cpu:2", seconds=60)), "notice of 120 s"),
        (lambda: SlurmSettings(partition="a b"), "settings of Slurm.*partition is 'a b'"),
        (lambda: SlurmSettings(interface="ib0;reboot"), "interface is 'ib0;reboot'"),
        (lambda: SlurmSettings(setup=("a\nb",)), "must be one line"),
        (lambda: SlurmSettings(gpus="all"), "gpus is 'all'"),
        (lambda: SlurmSettings(options=("-n4",)), "does not begin with --"),
        (lambda: SlurmSettings(chain=0), "chain is 0"),
        (lambda: SlurmSettings(workdir="here"), "workdir is 'here'"),
        (lambda: SlurmSettings(constraint="a\n#SBATCH --x"), "constraint is"),
        # A folder whose name could not be told from a list of mounts.
        (lambda: slurm(job(image="i", run="/runs/a,/etc:/etc")), "list of its mounts"),
        (lambda: slurm(job(image="i", run="/runs/a:b")), "list of its mounts"),
        (lambda: slurm(job(image="i"), SlurmSettings(workdir="/runs/a:b")), "list of its mounts"),
        (lambda: SlurmSettings(mounts=("/a:/a,/etc:/etc",)), "once for each"),
        (lambda: tpu_vm(job("v6e:4x4", image="i", run="/a:/etc"), ZONE), "docker divides"),
        (lambda: tpu_vm(job(), ZONE), "no TPUs"),
        (lambda: tpu_vm(job("tpu7x:4x4x4"), ZONE), "no accelerator type"),
        (lambda: tpu_vm(job("v6e:4x4", host_processes=2), ZONE), "one process on a TPU host"),
        (lambda: tpu_vm(job("v6e:4x4", run="runs/a"), ZONE), "relative"),
        (lambda: tpu_vm(job("v6e:4x4", run="gs://b/a"), ZONE), "mount it"),
        (lambda: tpu_vm(job("v6e:4x4"), TpuVmSettings(zone="")), "zone is missing"),
        (lambda: TpuVmSettings(zone="z", provisioning="cheap"), "provisioning is 'cheap'"),
    ],
)
def test_what_cannot_be_run_is_refused(made: Callable[[], Any], fault: str):
    with pytest.raises(LaunchError, match=f"(?s){fault}"):
        made()


def test_without_a_container_a_folder_has_any_name():
    for name in ("/runs/a,/etc:/etc", "/runs/a:b"):
        slurm(job(run=name))


@pytest.mark.parametrize("value", ["a\0b", "a\udcffb", "\ud800"])
@pytest.mark.parametrize(
    "option", ["partition", "account", "qos", "reservation", "gpu_type", "interface"]
)
def test_options_that_no_script_can_have_are_refused(option: str, value: str):
    with pytest.raises(LaunchError, match=r"Slurm cannot be given NUL(.|\n)*job\.sbatch would"):
        slurm(job("2*h100:8", run="/r"), SlurmSettings(**{option: value}))


SECRETS = """
OPENAI_KEY=a WANDB_KEY=0123456789abcdef0123456789abcdef01234567 MYPASS=hunter2 CRED=x COOKIE=abc
HF_TOKEN=x apiToken=x DB_PWD=x AWS_SECRET_ACCESS_KEY=x AWS_ACCESS_KEY_ID=x PGPASSWORD=x KEY=x
GOOGLE_APPLICATION_CREDENTIALS=x SIGNING_KEY_2=x REGISTRY_AUTH=x GITHUB_PAT=x HFTOKEN=x
SESSION_COOKIES=x DATABASE=postgres://me:hunter2@db/x A=AKIABBBBBBBBBBBBBBBB
A=hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
"""
PLAIN = """
XLA_FLAGS=--xla_gpu_autotune_level=0 KEYBOARD_LAYOUT=de JAX_COMPILATION_CACHE_KEY_INCLUDE=x
SORT_KEY=name MAX_TOKENS=4096 TOKENIZERS_PARALLELISM=false HF_TOKEN_PATH=/run/token PWD=/home/me
SSH_AUTH_SOCK=/tmp/agent GIT_AUTHOR_NAME=me OLDPWD=/home BYPASS=lo COMPASS=n MONKEY=1x PATTERN=x
HF_HUB_DISABLE_IMPLICIT_TOKEN=1 AUTH_TYPE=oidc PATH=/bin XLA_PASSES=a,b NCCL_SOCKET_IFNAME=ib0
GIT_SHA=0123456789abcdef0123456789abcdef01234567
"""


@pytest.mark.parametrize(
    "variable",
    [
        *SECRETS.split(),
        "AUTH=Bearer abc.def",
        "HTTP_HEADER=Bearer abc.def",
        "A=-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_variables_that_look_like_secrets(variable: str):
    name, value = variable.split("=", 1)
    with pytest.raises(LaunchError, match=rf"{name}.*(?s:.*)--plain {name}") as caught:
        job(environment={name: value})
    assert len(value) < 4 or value not in str(caught.value)
    assert job(environment={name: value}, plain=(name,)).environment == {name: value}


@pytest.mark.parametrize("variable", PLAIN.split())
def test_variables_that_look_like_none(variable: str):
    name, value = variable.split("=", 1)
    job(environment={name: value})


def test_a_submission_into_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    made = Submission(engine="slurm", files={"job.sh": ""}, commands=(("true",),))
    with pytest.raises(
        LaunchError, match=r"cannot be written into .*file: File exists\nTry: --out"
    ):
        submit(made, tmp_path / "file")
