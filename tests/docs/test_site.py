"""The pages lead to what exists, and the site has all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import shardlib
from docs.site import build

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them of headings outside of code."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    titles = re.findall(r"(?m)^#+ +(.+?) *$", text)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in plain}


def prose(page: Path) -> str:
    """A page without its code; of a notebook the cells of text."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(one["source"]) for one in cells if one["cell_type"] != "code")
    return re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", text)


@pytest.mark.parametrize("page", PAGES + NOTEBOOKS, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path):
    wrong: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"", prose(page)):
        link = "".join(link)
        where, _, anchor = link.partition("#")
        if re.match(r"\w+:", where):
            continue
        target = page.parent / where if where else page
        known = not anchor or (target.suffix == ".md" and anchor in headings(target))
        if not target.exists() or not known:
            wrong.append(link)
    assert not wrong


def test_the_front_page_leads_to_every_page(tmp_path: Path):
    build.lay_out(tmp_path)
    front = (tmp_path / "index.md").read_text()
    named = {line for line in front.splitlines() if (tmp_path / f"{line}.md").is_file()}
    named |= {line for line in front.splitlines() if (tmp_path / f"{line}.ipynb").is_file()}
    pages = [p for p in tmp_path.rglob("*") if p.suffix in (".md", ".ipynb")]
    made = {p.relative_to(tmp_path).with_suffix("").as_posix() for p in pages} - {"index"}
    assert named == made
    written = (tmp_path / "reference" / "shardlib.md").read_text()
    assert ".. autofunction:: shardlib.compile\n" in written
    assert "## `shardlib compare`" in (tmp_path / "reference" / "commands.md").read_text()


def test_public_names_are_all_that_dir_shows():
    assert dir(shardlib) == sorted(shardlib.__all__)


@pytest.mark.long
@pytest.mark.processes
def test_examples_of_the_reference_run():
    names: dict[str, object] = {}
    exec("import jax, jax.numpy as jnp, numpy as np, optax, shardlib", names)
    for name, code in build.examples().items():
        assert f"shardlib.{name}(" in code
        exec(code, names)
    assert {"plan", "compile", "fit", "compile_step", "why"} <= build.examples().keys()


@pytest.mark.long
@pytest.mark.processes
def test_the_site_is_built_without_warnings(tmp_path: Path):
    pytest.importorskip("sphinx", reason="not installed: shardlib[docs]")
    pytest.importorskip("myst_nb", reason="not installed: shardlib[docs]")
    import subprocess
    import sys

    words = [sys.executable, str(ROOT / "docs" / "site" / "build.py"), "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "docs" / "booking.html").is_file()
