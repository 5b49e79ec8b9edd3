"""A checkpoint written with Orbax, and older ones that nothing keeps deleted."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Iterator

import jax
import orbax.checkpoint as ocp

from shardlib.checkpointing import reading
from shardlib.checkpointing.about import About
from shardlib.checkpointing.folder import Folder
from shardlib.checkpointing.keep import Keep
from shardlib.checkpointing.snapshot import Snapshot
from shardlib.checkpointing.tree import (
    said,
)
from shardlib.errors import CheckpointError
from shardlib.processes import shards
from shardlib.processes import together as processes
from shardlib.processes.values import by_owners, owners_of


def write_checkpoint(folder: Folder, step: int, snapshot: Snapshot, about: About) -> None:
    """Writes a checkpoint; what a failure has left is cleared away."""
    arrays = {**snapshot.arrays, **snapshot.stored}
    owners = owners_of(arrays.values())
    options = shards.options(owners)

    def write() -> None:
        with (
            _said_once(),
            ocp.Checkpointer(
                reading.handler(
                    options, own=bool(snapshot.stored) or len(owners) < jax.process_count()
                ),
                multiprocessing_options=options,
            ) as checkpointer,
        ):
            checkpointer.save(
                folder.checkpoint(step),
                ocp.args.Composite(
                    state=ocp.args.PyTreeSave(arrays),
                    about=ocp.args.JsonSave(about.to_json()),
                ),
            )

    try:
        by_owners(f"checkpoints in {folder.path}", owners, write)
    except Exception as error:
        raise _not_written(folder, step, error) from error


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """Orbax and asyncio log a failure in each of their threads; it is raised here, too.

    Orbax raises the first failure while its other threads may still be about to log theirs.
    """

    def without_errors(record: logging.LogRecord) -> bool:
        return record.exc_info is None and "raised an exception" not in record.getMessage()

    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    earlier = set(threading.enumerate())
    for logger in loggers:
        logger.addFilter(without_errors)
    try:
        yield
    except Exception:
        deadline = time.monotonic() + 10
        for thread in set(threading.enumerate()) - earlier:
            if type(thread).__module__.startswith("orbax."):
                thread.join(max(0.0, deadline - time.monotonic()))
        raise
    finally:
        for logger in loggers:
            logger.removeFilter(without_errors)


def delete_superfluous(folder: Folder, keep: Keep, step: int) -> None:
    """Deletes checkpoints that nothing keeps; in the first process."""
    try:
        found = [
            about
            for saved in folder.steps()
            if (about := reading.try_about(folder.checkpoint(saved), saved))
        ]
        for superfluous in keep.superfluous(found):
            folder.discard(superfluous)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} is written, and older ones in"
            f" {folder.path} could not be deleted ({said(error)})\nTry: delete them"
            ' by hand; those that have "discarded" in their names are not used any more'
        ) from error


def _not_written(folder: Folder, step: int, error: Exception) -> CheckpointError:
    """Clears away what was written, since it may fill the disk, and says what was wrong."""
    if processes.is_first():
        with contextlib.suppress(OSError):  # the next run deletes it
            folder.clear(step)
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(
        text in str(error) for text in ("No space left", "Disk quota", "File too large")
    )
    why = "the disk is full, or files may not be so large" if full else said(error)
    hint = (
        "make room, or keep fewer checkpoints; the state is as before"
        if full
        else "another folder; the state is as before"
    )
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {folder.path}"
        f" ({why}); earlier ones are as before\nTry: {hint}"
    )
