"""The pages lead to what exists, and the site has all of them."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import shardlib
from docs.site import build

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: Bytes that a page may load, uncompressed.
MOST = 1_700_000


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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("sphinx", reason="not installed: shardlib[docs]")
    pytest.importorskip("myst_nb", reason="not installed: shardlib[docs]")
    import subprocess
    import sys

    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, str(ROOT / "docs" / "site" / "build.py"), "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # warnings are errors
    return out


def pages_of(site: Path) -> list[Path]:
    """Pages that are read, without listings of source and files of the theme."""
    beside = {site / name for name in ("_modules", "_static")}
    return [page for page in sorted(site.rglob("*.html")) if not beside & set(page.parents)]


def links(page: Path) -> set[tuple[Path, str]]:
    """The files that a page leads to, with anchors."""
    found = re.findall(r'href="([^":]+)"', page.read_text())
    parts = (link.partition("#") for link in found)
    return {((page.parent / where).resolve() if where else page, name) for where, _, name in parts}


@pytest.mark.long
@pytest.mark.processes
def test_every_page_is_two_clicks_away(site: Path):
    first = {where for where, _ in links(site / "index.html") if where.suffix == ".html"}
    second = {where for page in first if page.exists() for where, _ in links(page)}
    assert set(pages_of(site)) - {site / "search.html"} <= first | second


@pytest.mark.long
@pytest.mark.processes
def test_words_of_the_glossary_lead_to_it_once_a_page(site: Path):
    glossary, linked = site / "docs" / "glossary.html", 0
    anchors = set(re.findall(r'id="(term-[^"]+)"', glossary.read_text()))
    assert len(anchors) > 40 and 'class="term' not in glossary.read_text()
    for page in pages_of(site):
        words = re.findall(r'<a class="term[^>]*#(term-[^"]+)"[^>]*>([^<]*)<', page.read_text())
        assert {name for name, _ in words} <= anchors, page
        assert len({word.lower() for _, word in words}) == len(words), page
        linked += bool(words)
    assert linked > 50


@pytest.mark.long
@pytest.mark.processes
def test_the_reference_shows_types(site: Path):
    text = unescape(re.sub(r"<[^>]+>", "", (site / "reference" / "shardlib.html").read_text()))
    assert "topology: TopologyLike | None = None" in text and ") → Plan" in text


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_their_window_weigh_little_and_axe_finds_nothing(
    site: Path, width: int, scheme: str
):
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser on this machine")
    rules = {"runOnly": ["color-contrast"]} if scheme == "dark" else {}  # the rest is the same
    faults: dict[str, object] = {}
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, offline=True, color_scheme=scheme)
        for file in pages_of(site):
            page, loaded = context.new_page(), set[str]()
            page.on("request", lambda request, loaded=loaded: loaded.add(request.url))
            page.goto(file.as_uri())
            assert page.evaluate("document.documentElement.dataset.theme") == scheme
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            code = page.evaluate(
                "[...document.querySelectorAll('pre')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
            )
            found = axe.Axe().run(page, options=rules).response["violations"]
            weight = sum(size_of(url) for url in loaded)
            if wide > 0 or code or found or weight > MOST:
                nodes = [(v["id"], v["nodes"][0]["html"]) for v in found]
                faults[file.name] = (wide, code, weight, nodes)
            page.close()
        browser.close()
    assert not faults


def size_of(url: str) -> int:
    """Bytes of a file that a page loads."""
    file = Path(unquote(urlsplit(url).path))
    return file.stat().st_size if url.startswith("file:") and file.is_file() else 0


@pytest.mark.long
@pytest.mark.processes
def test_pages_are_light(site: Path):
    heavy = {page.name: page.stat().st_size for page in pages_of(site)}
    assert max(heavy.values()) < 700_000, max(heavy, key=heavy.__getitem__)
    pictures = {file: file.stat().st_size for file in (site / "_images").iterdir()}
    assert max(pictures.values()) < 200_000, max(pictures, key=pictures.__getitem__)
    assert not [page for page in pages_of(site) if "fontawesome.js" in page.read_text()]
