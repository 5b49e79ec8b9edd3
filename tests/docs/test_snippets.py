"""Every command and every program in the pages is one that this version takes.

Commands are parsed by the command line, options and all; those that plan, or show a job without
submitting it, are carried out. Of programs all imports are made, and names, methods of modules and
keyword arguments of what they import from shardlib are looked up. Pages whose programs and commands
run have tests of their own (`tests/docs/test_pages_run.py`, `tests/docs/test_how_to.py`,
`tests/docs/test_readme.py` and others).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from shardlib.cli.commands import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: A fence with its language, or a paragraph of indented lines.
CODE = re.compile(r"(?m)^```(\w*)\n((?:.*\n)*?)```$|((?:^(?: {4}.*)\n)+)")
#: What a command of shardlib begins with.
BEGIN = re.compile(r"^(?:\$ )?(?:\./run |shardlib )(?=[a-z])")
#: Packages that a page says how to install, or modules that it writes, and that tests do without.
OPTIONAL = {"flwr", "mlflow", "peft", "penzai", "ray", "sharded_step", "torch", "wandb"}


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of every block of code; indented ones have none."""
    for language, fenced, indented in CODE.findall(page.read_text()):
        yield language, fenced or inspect.cleandoc(indented)


def commands(page: Path) -> list[str]:
    """Commands of shardlib in the blocks of a page; of a synopsis, which has brackets and dots for
    what is left out, nothing.
    """
    found: list[str] = []
    for language, text in blocks(page):
        if language in ("python", "json", "toml", "yaml"):
            continue
        for line in text.replace("\\\n", " ").splitlines():
            command = re.split(r";|\s+(?:#|\||>|&&?)(?:\s|$)", line.strip())[0]
            if BEGIN.match(command) and not re.search(r"\.\.\.|\[[\w-]|[a-z]\||\b[A-Z]+$", command):
                found.append(command)
    return found


COMMANDS = [(page.stem, command) for page in PAGES for command in commands(page)]
PROGRAMS = [
    (page.stem, text) for page in PAGES for language, text in blocks(page) if language == "python"
]
#: What a page says that each command takes.
SYNOPSES = [
    line
    for line in (ROOT / "docs" / "quickstart.md").read_text().splitlines()
    if re.match(r"shardlib [a-z-]+ .*[A-Z\[]", line)
]


def test_pages_have_commands_and_programs():
    assert len(COMMANDS) > 60
    assert len(PROGRAMS) > 80
    assert len(SYNOPSES) >= 15


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda word: word[:50])
def test_the_command_line_takes_the_command(page: str, command: str):
    words = shlex.split(BEGIN.sub("", command))
    if words[0] in ("check", "compilers", "docs", "test"):  # of `./run` alone
        assert f"{words[0]})" in (ROOT / "run").read_text()
        return
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    with group.make_context("shardlib", [], resilient_parsing=True) as context:
        name, found, rest = group.resolve_command(context, words)
        assert found is not None
        found.make_context(name, rest, parent=context)


def searches(command: str) -> bool:
    """Whether a command needs no device, no compiler and no folder: a plan, or a job that is shown
    and not submitted.
    """
    words = shlex.split(BEGIN.sub("", command))
    return (
        words[0] == "models"
        or (words[0] == "plan" and "--refine" not in words)
        or ("--dry-run" in words)
    )


#: Plans of models of which a search takes a second and more.
LARGE = re.compile(r"-(70|405)b|deepseek|1t-moe")
SEARCHES = [
    pytest.param(page, command, marks=[pytest.mark.long] if LARGE.search(command) else [])
    for page, command in COMMANDS
    if searches(command)
]


@pytest.mark.parametrize(("page", "command"), SEARCHES, ids=lambda word: word[:50])
def test_commands_that_need_no_machine_run(
    page: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shell: Callable[..., tuple[int, str, str]],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_training.py").touch()
    own = (ROOT / "docs/your_model.md").read_text()
    (tmp_path / "my_model.py").write_text(
        re.findall(r"<!-- command -->\n```python\n(.*?)```", own, re.DOTALL)[0]
    )
    code, out, err = shell(*shlex.split(BEGIN.sub("", command)))
    assert code == 0, err
    assert out.strip()


@pytest.mark.parametrize("line", SYNOPSES, ids=lambda line: line[:40])
def test_the_synopsis_has_options_that_the_command_takes(line: str):
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    own = line.partition(" -- ")[0]
    taken = {
        word for one in group.commands[line.split()[1]].params for word in (*one.opts, "--json")
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", own)) <= taken


@pytest.mark.parametrize(
    ("page", "program"),
    PROGRAMS,
    ids=[f"{page}-{number}" for number, (page, _) in enumerate(PROGRAMS)],
)
def test_what_a_program_imports_and_calls_exists(page: str, program: str):
    tree = ast.parse(program)
    scope: dict[str, Any] = {"shardlib": importlib.import_module("shardlib")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported(node, scope)
    wrong = [said for node in ast.walk(tree) if (said := complaint(node, scope))]
    assert not wrong


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import shardlib\nshardlib.nothing", "has no attribute 'nothing'"),
        ("from shardlib.cli import app\nimport shardlib\nshardlib.plan(a, spells=1)", "no spells"),
    ],
)
def test_what_is_not_there_is_found(program: str, said: str):
    with pytest.raises(AssertionError, match=said):
        test_what_a_program_imports_and_calls_exists("", program)


def test_an_option_that_is_not_there_is_found():
    with pytest.raises(Exception, match="No such option"):
        test_the_command_line_takes_the_command("", "shardlib plan demo --spells 1")


def imported(node: ast.Import | ast.ImportFrom, scope: dict[str, Any]) -> None:
    """Makes an import, and keeps what is shardlib's under its name."""
    for alias in node.names:
        where = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
        root = where.partition(".")[0]
        if root in OPTIONAL or root in ("my", "mine", "your", "model", "train"):
            continue
        module = importlib.import_module(where)
        name = alias.asname or alias.name.partition(".")[0]
        if isinstance(node, ast.Import):
            scope.setdefault(name, module if alias.asname else importlib.import_module(root))
        elif not hasattr(module, alias.name):
            scope[name] = importlib.import_module(f"{where}.{alias.name}")
        else:
            scope[name] = getattr(module, alias.name)
    for name in [n for n, one in scope.items() if not of_shardlib(one)]:
        del scope[name]


def of_shardlib(value: Any) -> bool:
    where = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return isinstance(where, str) and where.partition(".")[0] == "shardlib"


def resolved(node: ast.expr, scope: dict[str, Any]) -> Any:
    """What a dotted name is, as far as it goes through modules and classes; else None.

    Raises:
        AttributeError: a module has no such name.
    """
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        found = resolved(node.value, scope)
        if isinstance(found, ModuleType | type):
            return getattr(found, node.attr)
    return None


def complaint(node: ast.AST, scope: dict[str, Any]) -> str:
    """What is wrong with a name or a call; "" for nothing."""
    try:
        if isinstance(node, ast.Attribute):
            resolved(node, scope)
        if not isinstance(node, ast.Call):
            return ""
        found = resolved(node.func, scope)
    except AttributeError as error:
        return str(error)
    if not callable(found) or not of_shardlib(found):
        return ""
    taken = inspect.signature(found).parameters
    if any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        return ""
    unknown = [word.arg for word in node.keywords if word.arg and word.arg not in taken]
    return f"{ast.unparse(node.func)} takes no {', '.join(unknown)}" if unknown else ""
