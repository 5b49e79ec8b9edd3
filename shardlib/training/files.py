"""How is a file of a run written?"""

from __future__ import annotations

import contextlib
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all, also after a loss of power; what stands in the place of the draft, a link to somewhere perhaps, is not written to.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f"{path.name}.part")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    with draft.open("x", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)
