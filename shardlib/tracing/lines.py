"""The user's lines: those of the source that are no library's."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable

from shardlib.jax_types import Eqn

#: Where packages are installed: lines of source in there are not the user's.
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: The package itself; a user's folder may well have its name, too.
_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def user_line(eqn: Eqn) -> str:
    """ "file.py:12" of the innermost line of source around an equation that is no library's; empty
    where there is none.
    """
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return _users((frame.file_name, frame.line_num) for frame in frames)


def raising_line(error: Exception) -> str:
    """The user's innermost line that an error came through, as `user_line` says it."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _users((frame.filename, frame.lineno or 0) for frame in frames)


def _users(lines: Iterable[tuple[str, int]]) -> str:
    """The first of some lines of source, (file, number), that is no library's."""
    return next(
        (
            f"{os.path.basename(name)}:{number}"
            for name, number in lines
            if not name.startswith("<")
            and not any(part in name for part in _INSTALLED)
            and not name.startswith(_OWN)
            and "importlib" not in name
        ),
        "",
    )
