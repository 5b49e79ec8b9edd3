"""Whether the folder of a run can be written, and what helps where it cannot."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from shardlib.errors import RunError


def probe(path: Path) -> None:
    """Looks whether the folder can be made, or written to, before anything takes time; what
    this makes for it is gone afterwards.
    """
    place = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    trial = place / f".shardlib-{secrets.token_hex(8)}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        error.filename = str(place)
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> RunError:
    """The error where something of the folder could not be written: what stands in the way, and
    what helps.
    """
    what = [
        str(name) for name in (error.filename2, error.filename) if name and str(name) != str(path)
    ][:1]
    where = f" ({what[0]})" if what else ""
    return RunError(
        f"the folder of the run, {path}, cannot be written:"
        f" {error.strerror or error}{where}\nTry:"
        f" {_remedy(error, what[0] if what else str(path))}"
    )


def _remedy(error: OSError, what: str) -> str:
    """What helps where something cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or another folder"
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP):
        return (
            f"move {what} away, which is something else than what a run has there; or another"
            " folder"
        )
    return "another folder, or other permissions"
