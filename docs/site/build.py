"""Builds the site: `./run docs`, or

    python docs/site/build.py [--execute] [--out FOLDER]

The pages are those of the repository; this lays them out in a folder of their own, with
a front page (`index.md`, with the example of the README) and a reference from docstrings, and has
Sphinx build them. A warning is an error:
a link to a page or a heading that does not exist, a page that nothing leads to, a docstring that
does not parse.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

#: Functions of a reference by what they are for; the others stand at the end.
GROUPS = {
    "Plan, compile, run": ("plan", "compile", "fit", "compile_step", "verify", "why"),
    "Machines": ("topology", "scale", "plan_edge", "join"),
    "In a model": (
        *("tree", "linen", "parallelize", "attention", "route", "visit", "balance_loss"),
        "value_and_grad",
    ),
    "Serving": ("plan_serving", "verify_serving"),
}
PACKAGES = {
    "shardlib": "shardlib",
    "booking": "shardlib.launch.booking",
    "islands": "shardlib.islands",
    "serving": "shardlib.serve",
}


def lay_out(folder: Path) -> None:
    """Copies the pages, and writes the front page and the reference."""
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("site"))
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    for name in (
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CITATION.cff",
        "LICENSE",
    ):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
    shutil.copytree(HERE / "static", folder / "static")
    shutil.copy(HERE / "conf.py", folder)
    # files that pages lead to, and that are not pages
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        links = r"\]\((?:\.\./)?((?:benchmarks|examples)/[^)#]+)\)"
        for name in re.findall(links, page.read_text()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    readme = (ROOT / "README.md").read_text()
    code, output = re.search(
        r"(```python\n.*?```)\n\n<!-- example -->\n(```\n.*?```)", readme, re.DOTALL
    ).groups()
    front = (HERE / "index.md").read_text()
    (folder / "index.md").write_text(front.replace("@CODE@", code).replace("@OUTPUT@", output))
    (folder / "gallery").mkdir()
    (folder / "gallery.md").write_text(gallery(folder / "gallery"))
    (folder / "reference").mkdir()
    for name, package in PACKAGES.items():
        (folder / "reference" / f"{name}.md").write_text(reference(package))
    (folder / "reference" / "commands.md").write_text(commands())


def reference(package: str) -> str:
    """A page of the public names of a package, functions with the examples of `examples.md`."""
    module = importlib.import_module(package)
    values = {n: getattr(module, n) for n in module.__all__ if not n.startswith("_")}
    errors = [n for n, v in values.items() if isinstance(v, type) and issubclass(v, Exception)]
    classes = [n for n, v in values.items() if isinstance(v, type) and n not in errors]
    listed = [n for names in GROUPS.values() for n in names if n in values]
    sections = {
        title: ("autofunction", [n for n in names if n in values])
        for title, names in GROUPS.items()
    }
    functions = [n for n, v in values.items() if callable(v) and n not in (*errors, *classes)]
    sections |= {
        "More functions": ("autofunction", [n for n in functions if n not in listed]),
        "Values": ("autoclass", classes),
        "Errors": ("autoexception", errors),
    }
    parts = [f"# `{package}`", ""]
    for title, (kind, names) in sections.items():
        if names:
            parts += [f"## {title}", "", *_directives(package, kind, names)]
    return "\n".join(parts) + "\n"


def examples() -> dict[str, str]:
    """The example of each function of `shardlib`, by name; they run in this order, one after the
    other.
    """
    text = (HERE / "examples.md").read_text()
    return dict(re.findall(r"(?ms)^## (\w+)\n+```python\n(.*?)^```", text))


def gallery(folder: Path) -> str:
    """A page with the first picture of each notebook, which goes to `folder`, and the examples."""
    parts = ["# Gallery", "", "## Notebooks", "", "::::{grid} 1 2 2 2", ":gutter: 2", ""]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        heading, _, text = "".join(cells[0]["source"]).split("\n\n", 2)
        outputs = [out.get("data", {}) for cell in cells for out in cell.get("outputs", ())]
        drawn = next(("".join(o["image/svg+xml"]) for o in outputs if "image/svg+xml" in o), "")
        parts += [f":::{{grid-item-card}} {heading[2:]}", f":link: notebooks/{path.stem}"]
        parts.append(":link-type: doc")
        if drawn:
            (folder / f"{path.stem}.svg").write_text(drawn)
            parts += [f":img-bottom: {folder.name}/{path.stem}.svg", f":img-alt: {heading[2:]}"]
        parts += [f"{' '.join(text.split('. ')[0].split())}.", ":::"]
    parts += ["::::", "", "## Programs", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        lines = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
        parts.append(
            f"- {{download}}`{path.stem} <examples/{path.name}>`: {' '.join(lines.split())}"
        )
    return "\n".join(parts) + "\n"


def _directives(package: str, kind: str, names: Iterable[str]) -> list[str]:
    shown, lines = examples() if package == "shardlib" else {}, []
    for name in names:
        lines += ["```{eval-rst}", f".. {kind}:: {package}.{name}", "```", ""]
        if name in shown:
            lines += ["```python", shown[name].rstrip(), "```", ""]
    return lines


def commands() -> str:
    """A page of the commands, each with its own help."""
    from shardlib.cli.commands import COMMANDS, app

    os.environ["COLUMNS"] = "110"
    parts = ["# Commands", ""]
    for name in COMMANDS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            app([name, "--help"], prog_name="shardlib")
        parts += [f"## `shardlib {name}`", "", "```text", said.getvalue().strip(), "```", ""]
    return "\n".join(parts)


def build(out: Path, *, execute: bool) -> int:
    """Builds the site; returns the exit status of Sphinx."""
    from sphinx.cmd.build import main as sphinx

    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "site"
        source.mkdir()
        lay_out(source)
        words = ["-b", "html", "-W", "--keep-going", "-q"]
        if execute:
            words += ["-D", "nb_execution_mode=force"]
        status = sphinx([*words, str(source), str(out)])
    if not status:
        lighten(out)
    return status


def lighten(out: Path) -> None:
    """Takes out what pages load and do not need: the icons of the theme as a script of 1.5 MB,
    which its fonts have, too; and what only debuggers read.
    """
    for page in out.rglob("*.html"):
        page.write_text(re.sub(r".*scripts/fontawesome\.js.*\n", "", page.read_text()))
    for file in (out / "_static").rglob("*"):
        if file.suffix == ".map" or file.name == "fontawesome.js":
            file.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs")
    parser.add_argument("--execute", action="store_true", help="run the notebooks")
    options = parser.parse_args()
    status = build(options.out, execute=options.execute)
    if not status:
        print(f"open {options.out / 'index.html'}")
    sys.exit(status)


if __name__ == "__main__":
    main()
