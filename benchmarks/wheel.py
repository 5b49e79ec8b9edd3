"""Builds wheel and sdist of the last commit, installs the wheel into a fresh environment, and plans
and trains there, without the repository.

    python benchmarks/wheel.py [--limits] [--release v0.1.0] [--dist FOLDER] [--out JSON]

It needs Python and git alone. Times begin before `pip install`: a newcomer should have the first plan
after two minutes and the first trained step after four, which `--limits` holds. `--release` compares
the tag with the version of the wheel and with the changelog.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"first plan": 120, "first trained step": 240}
PLAN = ("plan", "llama3-8b", "--topology", "v5e:16x16", "--batch", "256", "--seq", "4096")
TRAIN = ("demo", "--steps", "1")


def run(*words: object, cwd: Path) -> str:
    """What a command prints; its environment has nothing of the repository."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME", "JAX_NUM_CPU_DEVICES")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env["SHARDLIB_CACHE_DIR"] = str(cwd / "cache")
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def environment(folder: Path) -> Path:
    """The interpreter of a new environment."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def build(folder: Path, dist: Path) -> tuple[Path, Path]:
    """Builds wheel and sdist from what git has of the last commit."""
    packed, source = folder / "source.tar", folder / "source"
    run("git", "-C", ROOT, "archive", "--output", packed, "HEAD", cwd=folder)
    with tarfile.open(packed) as files:
        files.extractall(source, filter="data")
    python = environment(folder / "builder")
    run(python, "-m", "pip", "install", "-q", "build", cwd=folder)
    run(python, "-m", "build", "-q", "--outdir", dist, source, cwd=folder)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return wheel, sdist


def tried(wheel: Path, folder: Path) -> dict[str, float]:
    """Seconds from before `pip install` to each of the first successes."""
    began, seconds = time.monotonic(), dict[str, float]()
    python = environment(folder / "fresh")
    run(python, "-m", "pip", "install", "-q", wheel, cwd=folder)
    seconds["installed"] = time.monotonic() - began
    command = folder / "fresh" / "bin" / "shardlib"
    planned = run(command, *PLAN, cwd=folder)
    seconds["first plan"] = time.monotonic() - began
    assert "256 devices" in planned, planned
    trained = run(command, *TRAIN, cwd=folder)
    seconds["first trained step"] = time.monotonic() - began
    assert re.search(r"loss +\d|step +1", trained), trained
    where = run(python, "-c", "import shardlib; print(shardlib.__file__)", cwd=folder)
    assert str(folder / "fresh") in where, f"not the installed package: {where}"
    return seconds


def version_of(wheel: Path) -> str:
    """The version of a wheel, as its metadata has it."""
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return re.search(r"(?m)^Version: (\S+)", files.read(name).decode()).group(1)


def wrong_release(tag: str, version: str, changelog: str) -> list[str]:
    """What does not name the release of a tag."""
    wrong = [] if tag == f"v{version}" else [f"the tag is {tag}, and the wheel is {version}"]
    if not re.search(rf"(?m)^## {re.escape(tag.removeprefix('v'))}\b", changelog):
        wrong.append(f"CHANGELOG.md has no heading of {tag.removeprefix('v')}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limits", action="store_true", help="fail where a limit is exceeded")
    parser.add_argument("--release", metavar="TAG", help="fail where it names another release")
    parser.add_argument("--dist", type=Path, help="a folder for wheel and sdist")
    parser.add_argument("--out", type=Path, help="a file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist = (options.dist or folder / "dist").resolve()
        wheel, sdist = build(folder, dist)
        if options.release:
            changelog = (ROOT / "CHANGELOG.md").read_text()
            if wrong := wrong_release(options.release, version_of(wheel), changelog):
                sys.exit("\n".join(wrong))
        result = {
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "bytes": {path.name: path.stat().st_size for path in (wheel, sdist)},
            "seconds": {what: round(s, 1) for what, s in tried(wheel, folder).items()},
        }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    slow = [
        f"{w}: {result['seconds'][w]} s, over {s}"
        for w, s in LIMITS.items()
        if result["seconds"][w] > s
    ]
    if options.limits and slow:
        sys.exit("\n".join(slow))


if __name__ == "__main__":
    main()
