"""The code and the packages that this process runs.

Short digests and versions, to be compared between processes: a host with an older checkout, or with
another JAX, computes something else or hangs.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import site
import sys
import sysconfig
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from shardlib.processes.values import OPTIONAL

#: Packages whose versions decide what is computed.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")


def versions() -> dict[str, str]:
    """Versions of Python and of what computes, and a digest of shardlib's own sources. Imports none
    of them.
    """
    installed = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed | {"code of shardlib": package_digest(Path(__file__).parents[1])}


def user_code() -> dict[str, str]:
    """A digest of every source file that has been loaded and that no installer has put there: the
    user's own modules, by name.
    """
    theirs = {
        _word(name, module): path
        for name, module in [*sys.modules.items()]
        if (path := _source(module)) is not None
    }
    return {
        f"{OPTIONAL}{word}": _digest(path.read_bytes()) for word, path in sorted(theirs.items())
    }


@functools.cache
def package_digest(folder: Path) -> str:
    """Twelve hexadecimal digits of the names and texts of all Python files under a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        total.update(path.read_bytes())
        total.update(b"\0")
    return total.hexdigest()[:12]


def _word(name: str, module: object) -> str:
    """The module's name; of the main one that of its file, which differs where processes run
    different scripts.
    """
    return Path(str(getattr(module, "__file__", name))).name if name == "__main__" else name


def _source(module: object) -> Path | None:
    """The file of a module that belongs to the user."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    return (
        None
        if any(path.is_relative_to(folder) for folder in _installed()) or not path.is_file()
        else path
    )


@functools.cache
def _installed() -> tuple[Path, ...]:
    """Folders whose files belong to Python, to installed packages or to shardlib."""
    paths: Mapping[str, str] = sysconfig.get_paths()
    folders = [
        paths["stdlib"],
        paths["platstdlib"],
        paths["purelib"],
        paths["platlib"],
        *site.getsitepackages(),
        site.getusersitepackages(),
        str(Path(__file__).parents[1]),
    ]
    return tuple(Path(folder).resolve() for folder in folders)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
