"""Workflows call what exists, a release names one version, and the project's pages are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardlib
from benchmarks import wheel

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_of_workflows_call_what_exists(path: Path):
    commands = re.findall(r"(?m)^    (\w+)\)$", (ROOT / "run").read_text())
    jobs = workflow(path.stem)["jobs"]
    for job in jobs.values():
        assert set(job.get("needs", "").split()) <= set(jobs)
        assert job["steps"][0].get("uses", "").startswith("actions/")
        for step in job["steps"]:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step.get("uses", "a/b@v1"))
            words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "", step.get("run", "")), comments=True)
            if words[:1] == ["./run"]:
                assert words[1] in commands
            elif words:
                assert words[0] == "python" and (ROOT / words[1]).is_file()
                options = {word for word in words if word.startswith("--")}
                assert options <= set(re.findall(r'"(--\w+)"', (ROOT / words[1]).read_text()))


def test_both_pythons_run_the_tests():
    assert workflow("tests")["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]


def test_only_a_tag_publishes_and_without_a_stored_token():
    release = workflow("release")
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    publish = release["jobs"]["publish"]
    assert publish["needs"] == "build" and publish["permissions"] == {"id-token": "write"}
    assert not re.search("secret|password|token:", str(publish))


def test_a_release_is_named_by_tag_version_and_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version = shardlib.__version__
    assert wheel.wrong_release(f"v{version}", version, changelog) == []
    wrong = wheel.wrong_release("v9.9", version, changelog)
    assert len(wrong) == 2 and version in wrong[0] and "9.9" in wrong[1]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_contributing_fits_a_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 40


@pytest.mark.long
@pytest.mark.processes
def test_a_wheel_has_the_package_and_what_it_reads(tmp_path: Path):
    pytest.importorskip("hatchling", reason="not installed: shardlib[dev]")
    import subprocess
    import sys
    import zipfile

    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(words, check=True, capture_output=True, cwd=ROOT)
    (made,) = tmp_path.glob("*.whl")
    named = set(zipfile.ZipFile(made).namelist())
    tracked = (path for path in (ROOT / "shardlib").rglob("*") if "__pycache__" not in path.parts)
    expected = {path.relative_to(ROOT).as_posix() for path in tracked if path.is_file()}
    assert expected <= named
    assert wheel.version_of(made) == shardlib.__version__
