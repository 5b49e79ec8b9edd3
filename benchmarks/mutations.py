"""Faults put into the package on purpose, one at a time, and whether the tests notice them.

    python -m benchmarks mutations [--only NAME] [--changed]

Each row of `tables/mutations.yaml` changes one piece of text in one file of a temporary copy of the tree and
runs the tests that are responsible for it there, up to the first failure, which has to pass in the
unchanged tree. A mutation that the tests
pass is a gap in them: the script ends with 1 and names it. Results are kept, so that `--only` and
`--changed` (rows whose text has changed, or that have no result) run a part again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT, command_line, stored, table, write


@dataclass(frozen=True)
class Mutation:
    """A fault: in `file` of the package `before`, which stands there once, becomes `after`."""

    name: str
    file: str
    before: str
    after: str
    breaks: str
    tests: str


MUTATIONS = tuple(Mutation(**row) for row in table("mutations"))


def copied(folder: Path) -> Path:
    """The tree in a folder, without its history."""
    tree = folder / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build")
    shutil.copytree(ROOT, tree, ignore=ignored)
    return tree


def ran(tree: Path, tests: Sequence[str], seconds: float) -> tuple[int, str]:
    """The exit status and output of tests in a tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--draw", "mutations", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout


def tested(tree: Path, mutation: Mutation, seconds: float) -> dict[str, Any]:
    """What the responsible tests say of a mutation."""
    path = tree / "shardlib" / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise SystemExit(
            f"{mutation.name}: {mutation.before!r} stands {text.count(mutation.before)} times in"
            f" {mutation.file}; it has to stand there once"
        )
    start = time.monotonic()
    try:
        path.write_text(text.replace(mutation.before, mutation.after))
        status, output = ran(tree, mutation.tests.split(), seconds)
    except subprocess.TimeoutExpired:
        status, output = 0, ""
    finally:
        path.write_text(text)
    if status not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest ended with {status}: {output[-2000:]}")
    failure = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", output, re.MULTILINE)
    if status and (failure is None or "::" not in failure[1]):
        raise RuntimeError(f"{mutation.name}: the tests do not run: {output[-2000:]}")
    if failure and (unmutated := ran(tree, [failure[1]], seconds))[0]:
        raise RuntimeError(f"{failure[1]} fails without {mutation.name!r}: {unmutated[1][-2000:]}")
    return {
        **asdict(mutation),
        "caught": status == 1,
        "by": failure[1] if failure else "",
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> int:
    """Tries mutations, keeps what came of them, and returns 1 where tests pass one."""
    parser = command_line(__doc__, "mutations.json")
    parser.add_argument("--only", action="append", help="mutations to try; all when left out")
    parser.add_argument("--changed", action="store_true", help="those without a result")
    parser.add_argument("--seconds", type=float, default=550.0, help="for the tests of a mutation")
    options = parser.parse_args()
    results = {row["name"]: row for row in stored(options.out, "mutations", [])}
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for mutation in MUTATIONS:
            before = results.get(mutation.name, {})
            if (options.only and mutation.name not in options.only) or (
                options.changed and asdict(mutation).items() <= before.items()
            ):
                continue
            row = results[mutation.name] = tested(tree, mutation, options.seconds)
            print(f"{'caught' if row['caught'] else 'PASSED'}  {mutation.name}  {row['by']}")
            # Written each time: a run that is ended early keeps what it has.
            rows = [results[one.name] for one in MUTATIONS if one.name in results]
            write(options.out, {"benchmark": "mutations", "mutations": rows}, quiet=True)
    return int(not all(results[one.name]["caught"] for one in MUTATIONS if one.name in results))


if __name__ == "__main__":
    sys.exit(main())
