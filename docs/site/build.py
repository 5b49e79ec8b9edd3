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
import contextlib
import importlib
import io
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

#: What comes first in a reference.
FIRST = ("plan", "compile", "fit", "compile_step", "why", "verify")
PACKAGES = {
    "shardlib": "shardlib",
    "booking": "shardlib.launch.booking",
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
    (folder / "reference").mkdir()
    for name, package in PACKAGES.items():
        (folder / "reference" / f"{name}.md").write_text(reference(package))
    (folder / "reference" / "commands.md").write_text(commands())


def reference(package: str) -> str:
    """A page of the public names of a package."""
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if not name.startswith("_")]
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    values = {name: getattr(module, name) for name in names}
    errors = [n for n, v in values.items() if isinstance(v, type) and issubclass(v, Exception)]
    classes = [n for n, v in values.items() if isinstance(v, type) and n not in errors]
    functions = [n for n, v in values.items() if callable(v) and n not in (*errors, *classes)]
    parts = [f"# `{package}`", ""]
    for title, kind, found in (
        ("Functions", "autofunction", functions),
        ("Values", "autoclass", classes),
        ("Errors", "autoexception", errors),
    ):
        if found:
            parts += [f"## {title}", "", *_directives(package, kind, found)]
    return "\n".join(parts) + "\n"


def _directives(package: str, kind: str, names: Iterable[str]) -> list[str]:
    lines = ["```{eval-rst}"]
    for name in names:
        lines += [f".. {kind}:: {package}.{name}", ""]
    return [*lines, "```", ""]


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
        return sphinx([*words, str(source), str(out)])


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
