"""The outer server's checkpoint: one file of safetensors, replaced as a whole. It has the outer
parameters by path, their momentum, and the round that has closed last, so that islands which have
not heard its mean hear it from a server that was started again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    """The file of a checkpoint, written in a thread: islands do not wait for the disk. A server
    that ends before is one round behind, and hears that round from an island.

    Attributes:
        path: of the file.
        failed: is told why it is not written.
    """

    path: Path
    failed: Callable[[str], None]
    _writing: threading.Thread | None = None

    def save(self, state: Held, number: int, active: Sequence[int]) -> None:
        """Begins to write what there is now, once the one before is written."""
        self.wait()
        outer = Outer(theta=state.outer.theta.copy(), momentum=state.outer.momentum.copy())
        frozen = replace(state, outer=outer, entries=dict(state.entries), gradients={})
        arguments = (frozen, number, tuple(active))
        self._writing = threading.Thread(target=self._write, args=arguments)
        self._writing.start()

    def wait(self) -> None:
        """Waits until it is on disk."""
        if self._writing is not None:
            self._writing.join()

    def _write(self, state: Held, number: int, active: Sequence[int]) -> None:
        try:
            write(self.path, packed_state(state, number, active))
        except OSError as error:
            self.failed(f"the checkpoint before round {number} is not written: {error}")


def packed_state(state: Held, number: int, active: Sequence[int]) -> bytes:
    """The checkpoint of a server, all of it."""
    last = state.last
    header = {
        "version": VERSION,
        "exchange": json.dumps(state.exchange.to_json()),
        "era": state.era,
        "entries": [list(pair) for pair in state.entries.items()],
        "round": number,
        "active": list(active),
        "islands": [] if last is None else list(last.islands),
        "sent": [] if last is None else list(last.sent),
    }
    arrays = {f"outer:{p}": a for p, a in state.outline.arrays(state.outer.theta).items()}
    arrays |= {f"momentum:{p}": a for p, a in state.outline.arrays(state.outer.momentum).items()}
    if last is not None:
        arrays |= {f"mean:{name}": array for name, array in last.arrays.items()}
    return packed(arrays, {"about": json.dumps(header)})


def restored(path: Path) -> tuple[Held, int, tuple[int, ...]] | None:
    """What a checkpoint has: what is held, the open round, islands that have begun it; None where
    there is none.
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
    header = construct(About, parse_json(text, what, CheckpointError), what, CheckpointError)
    theta, momentum = _named(arrays, "outer:"), _named(arrays, "momentum:")
    outline = Outline.of({name: array.shape for name, array in theta.items()})
    if header.version != VERSION or theta.keys() != momentum.keys():
        raise CheckpointError(f"{what} has another form than version {VERSION}")
    try:
        exchange = exchange_of(header.exchange)
    except ValueError as error:
        raise CheckpointError(f"{what} cannot be used: {error}") from error
    state = Held(
        exchange=exchange,
        outline=outline,
        outer=Outer(theta=outline.vector(theta), momentum=outline.vector(momentum)),
        era=header.era,
        entries=dict(header.entries),
    )
    if header.sent:
        state.last = Last(
            number=header.round - 1,
            islands=header.islands,
            sent=header.sent,
            arrays=_named(arrays, "mean:"),
        )
    return state, header.round, header.active


def _named(arrays: dict[str, np.ndarray], kind: str) -> Flat:
    return {name[len(kind) :]: array for name, array in arrays.items() if name.startswith(kind)}
