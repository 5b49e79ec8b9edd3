"""The examples of docs/launching.md print what it says."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from shardlib.cli import main
from shardlib.launch.clouds import SkyPilotSettings, TpuVmSettings
from shardlib.launch.clusters import KubernetesSettings, RaySettings, SlurmSettings

TEXT = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
EXAMPLES = re.findall(
    r"```sh\n(shardlib launch [^\n]*--dry-run[^\n]*)\n```\n\n```\n(.*?)```", TEXT, re.DOTALL
)


@pytest.mark.parametrize(
    ("command", "excerpt"),
    EXAMPLES,
    ids=[re.search(r"--(\S+)", command)[1] for command, _ in EXAMPLES],
)
def test_examples_print_their_excerpts_in_this_order(
    command: str, excerpt: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(command)[1:])
    assert not stop.value.code
    printed = capsys.readouterr().out
    place = 0
    for line in excerpt.splitlines():
        assert line in printed[place:], line
        place = printed.index(line, place) + len(line)


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Slurm", SlurmSettings),
        ("Kubernetes", KubernetesSettings),
        ("Cloud TPU VMs", TpuVmSettings),
        ("Ray", RaySettings),
        ("SkyPilot", SkyPilotSettings),
    ],
)
def test_all_settings_are_named(heading: str, kind: type):
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`(\\\*)?", section.rpartition("Settings:")[2])
    assert {field.name for field in fields(kind)} <= {name for name, _ in named}
    assert {name for name, star in named if star} == {
        field.name for field in fields(kind) if field.type == "tuple[str, ...]"
    }


def test_every_engine_has_an_example():
    assert {re.search(r"launch --(\S+)", command)[1] for command, _ in EXAMPLES} == {
        "slurm",
        "kubernetes",
        "tpu-vm",
        "ray",
        "skypilot",
    }
