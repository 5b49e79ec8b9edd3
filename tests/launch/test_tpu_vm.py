"""Jobs for Cloud TPU VMs: which slices are asked for, and what the script does on a host."""

from __future__ import annotations

import pytest

from shardlib.launch.clouds import TpuVmSettings, tpu_vm
from shardlib.launch.job import Job

HERE = TpuVmSettings(zone="us-east5-a", project="p")


def job(topology: str, **fields: object) -> Job:
    return Job(
        **{
            "name": "llama",
            "command": ("train", "--run", "/mnt/llama"),
            "topology": topology,
            "run": "/mnt/llama",
            **fields,
        }
    )


def flags(words: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value
        for name, _, value in (word.partition("=") for word in words if word.startswith("--"))
    }


@pytest.mark.parametrize(
    ("topology", "wanted"),
    [
        (
            "v6e:4x4",
            {
                "--accelerator-type": "v6e-16",
                "--node-id": "llama",
                "--runtime-version": "v2-alpha-tpuv6e",
            },
        ),
        (
            "4*v5e:16x16",
            {
                "--accelerator-type": "v5litepod-256",
                "--node-count": "4",
                "--node-prefix": "llama",
                "--runtime-version": "v2-alpha-tpuv5-lite",
            },
        ),
        (
            "v5p:4x4x8",
            {
                "--type": "v5p",
                "--topology": "4x4x8",
                "--node-id": "llama",
                "--runtime-version": "v2-alpha-tpuv5",
            },
        ),
        (
            "2*v4:2x2x4",
            {
                "--type": "v4",
                "--topology": "2x2x4",
                "--node-count": "2",
                "--node-prefix": "llama",
                "--runtime-version": "tpu-ubuntu2204-base",
            },
        ),
    ],
)
def test_slices_are_those_of_the_topology(topology: str, wanted: dict[str, str]):
    command = tpu_vm(job(topology), HERE).commands[0]
    words = "compute tpus queued-resources create llama"
    assert command[command.index("compute") :][:5] == tuple(words.split())
    assert flags(command) == {
        "--zone": "us-east5-a",
        "--project": "p",
        "--metadata-from-file": "startup-script=llama.sh",
        **wanted,
    }


def test_settings_reach_the_command():
    command = tpu_vm(
        job("v6e:4x4"),
        TpuVmSettings(
            zone="z",
            provisioning="spot",
            runtime_version="v9",
            network="n",
            service_account="a@b.com",
            options=("--tags=x",),
        ),
    ).commands[0]
    assert (
        flags(command).items()
        >= {
            "--spot": "",
            "--runtime-version": "v9",
            "--network": "n",
            "--service-account": "a@b.com",
            "--tags": "x",
        }.items()
    )


def test_every_host_of_slices_that_are_there_is_started():
    commands = tpu_vm(job("2*v6e:4x4"), TpuVmSettings(zone="z", create=False)).commands
    assert [(words[4], words[5]) for words in commands] == [
        ("scp", "llama.sh"),
        ("scp", "llama.sh"),
        ("ssh", "llama-0"),
        ("ssh", "llama-1"),
    ]
    assert all("--worker=all" in words for words in commands)


def test_one_host_needs_nobody():
    assert "SHARDLIB" not in tpu_vm(job("v6e:2x4"), HERE).files["llama.sh"]
