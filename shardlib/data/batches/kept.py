"""Arrays that take long to compute, kept in a folder for the next process."""

from __future__ import annotations

import contextlib
import os
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardlib.untrusted.typed import WRONG

#: What reading a damaged file raises, by NumPy, its parser of headers, `zipfile` and `zlib`.
DAMAGED = (
    *WRONG,
    OSError,
    EOFError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def kept(path: Path, compute: Callable[[], Mapping[str, np.ndarray]]) -> Mapping[str, np.ndarray]:
    """The arrays of a file, or else computed and written there; where that is not possible they are
    just computed.
    """
    with (
        contextlib.suppress(*DAMAGED),
        open(path, "rb") as stream,
        np.load(stream, allow_pickle=False) as archive,
    ):
        return {name: archive[name] for name in archive.files}
    arrays, temporary = compute(), path.with_name(f".{path.stem}.{os.getpid()}.part.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as stream:
            np.savez(stream, **cast(Any, arrays))
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return arrays
