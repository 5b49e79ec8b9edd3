"""The notebooks run from top to bottom, use public names only, and what they store is true."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import shardlib
from docs.site.notebooks import MOST, STORED_WITH, lasting, plain, versions

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the Jupyter libraries
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import json

    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    spec = tmp_path / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        json.dumps(
            {
                "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                "display_name": "Python 3",
                "language": "python",
            }
        )
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_manager_class=AsyncKernelManager).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = lasting(cell.outputs)
    assert all(
        cell.outputs
        for cell in notebook.cells
        if cell.cell_type == "code" and "print(" in cell.source
    )
    stored = nbformat.read(path, as_version=4)
    if versions(stored) == stored.metadata.get(STORED_WITH, {}):
        assert plain(notebook) == plain(stored), f"python docs/site/notebooks.py {path}"


def test_progress_does_not_last():
    from nbformat import NotebookNode

    html = [
        {"data": {"text/html": text}} for text in ("", '<div role="status">1 of 2</div>', "<p>")
    ]
    outputs = [NotebookNode(one) for one in [*html, {"name": "stderr"}, {"name": "stdout"}]]
    assert lasting(outputs) == outputs[2:3] + outputs[4:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebook_is_clean(path: Path):
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    assert f"/blob/main/notebooks/{path.name})" in notebook.cells[0].source  # opens in Colab
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {kind for cell in cells for one in cell.outputs for kind in one.get("data", {})}
    assert kinds & {"image/svg+xml", "text/html"}  # a picture, or a card
    shown = str([cell.outputs for cell in cells])
    assert not re.search(r"/(home|root|tmp|Users|var|work)/", shown)  # of the machine it ran on
    assert sum(len(str(cell.outputs)) for cell in cells) <= MOST
    assert not any(one.get("name") == "stderr" for cell in cells for one in cell.outputs)
    used = {
        name for cell in cells for name in re.findall(r"(?<!from )\bshardlib\.(\w+)", cell.source)
    }
    assert used and used <= {*shardlib.__all__, "islands"}
    assert re.match(r'TOPOLOGY = "cpu:\d"  # ', cells[0].source)  # the switch to real devices
    assert "%pip install -q shardlib" in cells[0].source
    # packages of their own
    hidden = r"from shardlib(?! import (models|servers)\b|\.training\b)|import shardlib\."
    assert not any(re.search(hidden, cell.source) for cell in cells)
