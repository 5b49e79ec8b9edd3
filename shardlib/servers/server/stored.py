"""A server's checkpoint: one file of safetensors, replaced as a whole."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from shardlib.errors import CheckpointError
from shardlib.exchanges.asynchronous import Asynchronous
from shardlib.servers.ownership import Flat
from shardlib.servers.server.gate import Gate
from shardlib.servers.server.shard import Shard
from shardlib.untrusted import construct, parse_json

#: Of this form of the file.
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class About:
    """What a checkpoint says beside its arrays.

    Attributes:
        version: of the form of the file.
        server: whose it is.
        servers: among how many the parameters are divided.
        rule: with which gradients were applied.
        clock: updates.
        staleness: pairs of staleness and how many gradients had it.
        serials: of each worker its number, start and last push.
        places: of each worker at the gate its number, offset and step.
    """

    version: int
    server: int
    servers: int
    rule: str
    clock: int
    staleness: tuple[tuple[int, int], ...]
    serials: tuple[tuple[int, str, int], ...]
    places: tuple[tuple[int, int, int], ...]


def checkpoint_file(folder: Path, server: int) -> Path:
    """Where the checkpoint of a server is."""
    return folder / f"server-{server}.safetensors"


def packed(shard: Shard, gate: Gate, server: int) -> bytes:
    """The checkpoint of a shard that has parameters."""
    header = {
        "version": VERSION,
        "server": server,
        "servers": shard.exchange.servers,
        "rule": shard.exchange.rule,
        "clock": shard.clock,
        "staleness": [[s, count] for s, count in shard.staleness.items()],
        "serials": [[worker, *last] for worker, last in shard.serials.items()],
        "places": [[member, gate.offsets[member], gate.steps[member]] for member in gate.offsets],
    }
    arrays = {f"value:{path}": array for path, array in (shard.values or {}).items()}
    arrays |= {f"squares:{path}": array for path, array in shard.squares.items()}
    return save(arrays, {"about": json.dumps(header)})


def write(path: Path, data: bytes) -> None:
    """Puts a file in its place, as a whole, on disk."""
    draft = path.with_name(f"{path.name}.draft")
    with draft.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def restore(path: Path, shard: Shard, gate: Gate, server: int) -> bool:
    """Goes on at a checkpoint, where there is one."""
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get("about", "null")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error
    header = construct(About, _plain(text), f"the checkpoint {path}", CheckpointError)
    _require_same(header, shard.exchange, server, path)
    shard.values = _named(arrays, "value:")
    shard.squares = _named(arrays, "squares:")
    shard.clock, shard.staleness = header.clock, Counter(dict(header.staleness))
    shard.serials = {worker: (start, serial) for worker, start, serial in header.serials}
    for worker, offset, step in header.places:
        gate.offsets[worker], gate.steps[worker], gate.heard[worker] = offset, step, gate.now()
    return True


def _plain(text: str) -> object:
    return parse_json(text, "what a checkpoint says", CheckpointError)


def _named(arrays: Mapping[str, np.ndarray], kind: str) -> Flat:
    return {
        name.removeprefix(kind): array
        for name, array in arrays.items()
        if name[: len(kind)] == kind
    }


def _require_same(header: About, exchange: Asynchronous, server: int, path: Path) -> None:
    expected = (VERSION, server, exchange.servers, exchange.rule)
    if (header.version, header.server, header.servers, header.rule) != expected:
        raise CheckpointError(
            f"the checkpoint {path} is that of server {header.server} of {header.servers} with"
            f" {header.rule}, and this is server {server} of {exchange.servers} with"
            f" {exchange.rule}\nTry: another folder, or the same servers and rule"
        )
