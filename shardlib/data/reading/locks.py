"""Locks on files, by which processes of a machine keep out of each other's way; they end with the
process that holds them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from shardlib.errors import DataError

try:
    import fcntl
except ImportError:  # not a Unix: whoever renames a folder first wins
    fcntl = None

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which is made where it is not there; waits for others."""
    lock = Lock(path)
    try:
        lock.take()
        yield
    finally:
        lock.release()


class Lock:
    """The lock of a file, held alone or with others, by one thread of one process at a time. File
    systems without locks give none.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666
        )

    def take(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Whether the lock is now held; changes a lock that is held already, which others may come
        before.
        """
        if fcntl is None:
            return True
        try:
            fcntl.flock(
                self._descriptor,
                (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB),
            )
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def release(self) -> None:
        """Lets go; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def unwritable(folder: Path, error: OSError, what: str, needed: int | None = None) -> DataError:
    """The error for a folder that cannot be written, in words.

    Args:
        needed: bytes of it, if known.
    """
    size = "" if needed is None else f" of about {needed / 2**20:,.1f} MiB"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DataError(
            f"the disk of {folder} is full: there is no room for {what}{size}; nothing was left"
            " there\nTry: free some space, or cache=... on another disk"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DataError(
            f"{folder} cannot be written, which {what}{size} needs: {error.strerror}\nTry:"
            " cache=... with a folder that can be written"
        )
    return DataError(
        f"{what}{size} cannot be written to {folder}: {error}\nTry: cache=... with another folder"
    )
