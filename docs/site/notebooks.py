"""Runs notebooks and stores their outputs: text, and pictures that are small.

    python docs/site/notebooks.py notebooks/02_annotate_and_plan.ipynb [...]

What differs from run to run, times and warnings of libraries, is what `plain` leaves out; the rest
of a stored notebook is that of a fresh run, which `tests/docs/test_notebooks.py` holds. Where a
notebook shows what a compiler made, it is that of a fresh run with the same versions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
#: Characters of the outputs of a notebook at most: GitHub shows them, and nobody scrolls.
MOST = 60_000
#: Metadata of a notebook that shows what a compiler made: packages, and their versions then.
STORED_WITH = "stored_with"
#: A time that was measured, as `shardlib.report.elements` writes it.
_TIME = re.compile(r"\b\d[\d.,]*( ?)(ns|µs|ms|s|min)\b")


def run(notebook: NotebookNode) -> NotebookNode:
    """The notebook with the outputs of a fresh run, of which what libraries warn of is not part."""
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = lasting(cell.outputs)
    if STORED_WITH in notebook.metadata:
        notebook.metadata[STORED_WITH] = versions(notebook)
    return notebook


def lasting(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs without what libraries warn of, and without the progress of what took long."""
    return [
        one
        for one in outputs
        if one.get("name") != "stderr"
        and one.get("data", {}).get("text/html", "-")[:18] not in ("", '<div role="status"')
    ]


def versions(notebook: NotebookNode) -> dict[str, str]:
    """The installed versions of the packages that a notebook's outputs depend on, by its metadata;
    "" for one that is not installed.
    """
    found: dict[str, str] = {}
    for name in notebook.metadata.get(STORED_WITH, {}):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def plain(notebook: NotebookNode) -> list[str]:
    """The text of all outputs, with measured times left out, by cell."""
    said: list[str] = []
    for cell in notebook.cells:
        outputs = cell.outputs if cell.cell_type == "code" else []
        text = "".join(
            one.get("text", "") or one.get("data", {}).get("text/plain", "") for one in outputs
        )
        said.append(re.sub(r" +", " ", _TIME.sub("TIME", text)))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", type=Path, nargs="+")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["SHARDLIB_CACHE_DIR"] = tempfile.mkdtemp()  # what was learned here is not shown
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for path in options.notebooks:
        found = run(nbformat.read(path, as_version=4))
        size = len(str([cell.get("outputs") for cell in found.cells]))
        if size > MOST:
            raise SystemExit(f"{path} would store {size:,} characters; at most {MOST:,}")
        nbformat.write(found, path)
        print(f"{path}: {size:,} characters of outputs")


if __name__ == "__main__":
    main()
