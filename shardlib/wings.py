"""Wings: packages that the core does not import, and uses where their folder is there.

A wing may have a module `commands`: its `COMMANDS` maps names of commands to functions, and its
`EXTENSIONS` maps a command of another package to the options that the wing adds to it. Of `launch`
the core also uses `joining` (the public name `shardlib.join`, and `leave`) and `doctor`
(`host_findings`); of `islands`, where a plan or a checkpoint has several, the modules that
`islands` gives; of `frameworks`, for plans and prices of another training framework, its facts and
`configurations`.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from shardlib.errors import MissingPackageError

WINGS = ("launch", "serve", "islands", "frameworks", "diagnosis")
#: The commands of wings, and the options that they add to commands of others, for the message where
#: the package of one is missing.
COMMANDS_OF = {
    "launch": ("doctor", "launch", "compare", "fit-model"),
    "diagnosis": ("why",),
    "serve": ("edge", "edge-stage", "generate", "export", "serve", "bench-serve"),
}


OPTIONS_OF = {"serve": ("plan", "--serve"), "islands": ("launch", "--islands")}


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a command that no wing extends."""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Options that a wing adds to a command of another package.

    Attributes:
        options: a dataclass of options.
        run: handles the command in place of its package; what it is called with and what it returns
            is said where the command calls it. By default it returns False: not handled.
        help: of the command with these options; "" for the text that the command has anyway.
    """

    options: type = NoOptions
    run: Callable[..., Any] = lambda *_, **__: False
    help: str = ""


def is_missing(module: str) -> bool:
    """Returns whether a module is of a wing whose package is missing.

    >>> is_missing("shardlib.api")
    False
    """
    package = ".".join(module.split(".")[:2])
    return package in {f"shardlib.{wing}" for wing in WINGS} and find_spec(package) is None


def wing_module(name: str) -> ModuleType | None:
    """A module such as "shardlib.launch.doctor"; None where the package of its wing is missing."""
    return None if is_missing(name) else importlib.import_module(name)


def leave(code: int) -> None:
    """Ends this process with an exit code where it is one of several that `launch` has joined."""
    joining = sys.modules.get("shardlib.launch.joining")
    if joining is not None:
        joining.leave(code)


def host_findings(*, run: str | None, seconds: float) -> tuple[Any, ...]:
    """Findings of `launch`'s doctor about the hosts of this job, which every process asks for; none
    where that wing is missing.

    Args:
        run: folder of the run, which every host must be able to write.
        seconds: that it may take.
    """
    doctor = wing_module("shardlib.launch.doctor")
    if doctor is None:
        return ()
    return doctor.examine(run=run, seconds=seconds, measure=False).require().findings


def required(name: str, what: str) -> ModuleType:
    """A module of a wing.

    Args:
        what: what is part of the wing, for the error where its package is missing.
    """
    module = wing_module(name)
    if module is None:
        raise MissingPackageError(
            f"{what} is part of {'.'.join(name.split('.')[:2])}, and that package is missing"
            " here\nTry: install shardlib whole: pip install --force-reinstall, from where it came"
        )
    return module


def islands(module: str, what: str = "an exchange between islands") -> Any:
    """A module of `shardlib.islands`, for a plan or a checkpoint of several islands."""
    return required(f"shardlib.islands.{module}", what)


def names_of(file: str) -> dict[str, str]:
    """Public name -> the module that defines it, as the stub of a package (`__init__.pyi`, which
    type checkers read) imports them; packages of `shardlib` are none.

    Args:
        file: `__file__` of the package.
    """
    tree = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module != "shardlib"]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def face(file: str, package: str) -> tuple[list[str], Callable[[str], Any]]:
    """`__all__` and `__getattr__` of a package whose names are imported when they are first used.

    Args:
        file: `__file__` of the package, beside which its stub stands, see `names_of`.
        package: its name in messages.
    """
    home = names_of(file)

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return sorted(name for name in home if not is_missing(home[name])), get


def commands() -> dict[str, Callable[..., None]]:
    """The commands of all wings, by name."""
    return {name: command for module in _modules() for name, command in module.COMMANDS.items()}


def require_command(words: Sequence[str]) -> None:
    """Does nothing for a command line without a command or an option of a wing, or with its wing.

    Raises:
        MissingPackageError: the package of the wing is missing.
    """
    for wing, names in COMMANDS_OF.items():
        if words and words[0] in names:
            required(f"shardlib.{wing}.commands", f"the command {words[0]}")
    for wing, (command, option) in OPTIONS_OF.items():
        if words and words[0] == command and option in words:
            required(f"shardlib.{wing}.commands", f"{command} {option}")


def extension(command: str) -> Extension:
    """Returns what a wing adds to a command; an extension without options where none does."""
    # A wing that calls this while it is imported has no table yet; its own commands need none.
    tables = [getattr(module, "EXTENSIONS", {}) for module in _modules()]
    return next((table[command] for table in tables if command in table), Extension())


def _modules() -> Iterator[ModuleType]:
    """The modules `commands` of the wings that are there and have one."""
    for wing in WINGS:
        name = f"shardlib.{wing}.commands"
        if not is_missing(name) and find_spec(name) is not None:
            yield importlib.import_module(name)
