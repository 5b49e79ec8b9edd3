"""The outer server's checkpoint: one file of safetensors, replaced as a whole. It has the outer
parameters by path, their momentum, and the round that has closed last, so that islands which have
not heard its mean hear it from a server that was started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as packed

from shardlib.errors import CheckpointError
from shardlib.servers.ownership import Flat
from shardlib.servers.rounds.holding import Held, Last, exchange_of
from shardlib.servers.rounds.outer import Outer
from shardlib.servers.rounds.outline import Outline
from shardlib.servers.server.stored import write
from shardlib.untrusted import construct, parse_json

#: Of this form of the file.
VERSION = 1
FILE = "outer.safetensors"


@dataclass(frozen=True, kw_only=True)
class About:
    """What a checkpoint says beside its arrays.

    Attributes:
        version: of the form of the file.
        exchange: as plain data, in one text.
        era: see `Held`.
        entries: pairs of an island and its newest entry.
        round: that is open.
        active: islands that have begun it.
        islands: in the mean of the round before.
        sent: who has sent in it.
    """

    version: int
    exchange: str
    era: str
    entries: tuple[tuple[int, int], ...]
    round: int
    active: tuple[int, ...]
    islands: tuple[int, ...]
    sent: tuple[int, ...]


@dataclass(kw_only=True)
class Checkpoint:
    """The file of a checkpoint. What is written outlives the server at once, and the machine a
    little later: islands do not wait for the disk.

    Attributes:
        path: of the file.
    """

    path: Path
    _syncing: threading.Lock = field(default_factory=threading.Lock)

    def save(self, held: Held, number: int, active: Sequence[int], *, synced: bool = False) -> None:
        """Writes it.

        Args:
            held: by the server.
            number: of the open round.
            active: islands that have begun it.
            synced: whether to wait for the disk.

        Raises:
            OSError: it cannot be written.
        """
        write(self.path, packed_state(held, number, active), synced=synced)
        if not synced and self._syncing.acquire(blocking=False):
            threading.Thread(target=self._synced, daemon=True).start()

    def _synced(self) -> None:
        try:
            with contextlib.suppress(OSError), self.path.open("rb") as stream:
                os.fsync(stream.fileno())
        finally:
            self._syncing.release()


def packed_state(held: Held, number: int, active: Sequence[int]) -> bytes:
    """The checkpoint of a server, all of it.

    Args:
        held: by the server.
        number: of the open round.
        active: islands that have begun it.
    """
    last = held.last
    about = {
        "version": VERSION,
        "exchange": json.dumps(held.exchange.to_json()),
        "era": held.era,
        "entries": [list(pair) for pair in held.entries.items()],
        "round": number,
        "active": list(active),
        "islands": [] if last is None else list(last.islands),
        "sent": [] if last is None else list(last.sent),
    }
    arrays = {f"outer:{p}": a for p, a in held.outline.arrays(held.outer.theta).items()}
    arrays |= {f"momentum:{p}": a for p, a in held.outline.arrays(held.outer.momentum).items()}
    if last is not None:
        arrays |= {f"mean:{name}": array for name, array in last.arrays.items()}
    return packed(arrays, {"about": json.dumps(about)})


def restored(path: Path) -> tuple[Held, int, tuple[int, ...]] | None:
    """What a checkpoint has: what is held, the open round, islands that have begun it; None where
    there is none.

    Args:
        path: of the file.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not path.exists():
        return None
    what = f"the checkpoint {path}"
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get("about", "null")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what} cannot be read: {error}") from error
    found = construct(About, parse_json(text, what, CheckpointError), what, CheckpointError)
    theta, momentum = _named(arrays, "outer:"), _named(arrays, "momentum:")
    outline = Outline.of({name: array.shape for name, array in theta.items()})
    if found.version != VERSION or theta.keys() != momentum.keys():
        raise CheckpointError(f"{what} has another form than version {VERSION}")
    try:
        exchange = exchange_of(found.exchange)
    except ValueError as error:
        raise CheckpointError(f"{what} cannot be used: {error}") from error
    held = Held(
        exchange=exchange,
        outline=outline,
        outer=Outer(theta=outline.vector(theta), momentum=outline.vector(momentum)),
        era=found.era,
        entries=dict(found.entries),
    )
    if found.sent:
        held.last = Last(
            number=found.round - 1,
            islands=found.islands,
            sent=found.sent,
            arrays=_named(arrays, "mean:"),
        )
    return held, found.round, found.active


def _named(arrays: dict[str, np.ndarray], kind: str) -> Flat:
    return {name[len(kind) :]: array for name, array in arrays.items() if name.startswith(kind)}
