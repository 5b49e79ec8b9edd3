"""Values of a mesh in every process of a job, those that own no device of the mesh included.

A plan may use fewer devices than a job has, so that whole processes own none of its mesh. JAX lets
such an *idle* process call the same programs; what it gets are arrays without any shard, which
cannot be read. So what a program returns to be read (metrics, sums of a checkpoint) goes through
`in_every_process`: the first process that owns a device publishes replicated arrays in the store of
JAX's coordination service, from a thread, and idle processes take them from there. Nothing of it
touches a device, the owners wait for nobody, and an idle process waits in the call of a step for as
long as the step takes. Where no process is idle, it does nothing; where each process runs programs
of its own devices, nobody reads what is published, and it stops.

`whole` is for arrays that are sharded: all processes call it, and all get the whole array. What
only owners can do, as writing their shards, idle processes leave to them by `by_owners`, and learn
whether it went well.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardlib import _jax_compat
from shardlib.errors import LaunchError
from shardlib.jax_types import Constant

T = TypeVar("T")

#: Bytes of one value in the store: below the limit of its transport.
CHUNK_BYTES = 1 << 20
#: Messages or bytes that make a block; a block is deleted from the store during the next but one.
BLOCK_MESSAGES, BLOCK_BYTES = 64, 64 << 20
#: Messages that wait, and seconds that pass, while no idle process has read a block: then there is
#: none, since each process runs programs of its own devices, and nothing is published any more.
MOST_WAITING, UNREAD_SECONDS = 1024, 120.0
#: Milliseconds of one wait for a value; in between, signals are handled.
WAIT_MS = 1000


def owners_of(arrays: Iterable[Any]) -> frozenset[int]:
    """Numbers of the processes that own devices of some arrays."""
    return frozenset(
        device.process_index for array in arrays for device in array.sharding.device_set
    )


def by_owners(name: str, owners: frozenset[int], do: Callable[[], T]) -> T | None:
    """Has the owners of some devices do something, and the idle processes wait for them; to be
    called by all, in the same order for each name.

    Returns:
        What it gives; None in an idle process.
    """
    if len(owners) == jax.process_count():
        return do()
    channel = _channel(owners, name)
    if not channel.is_owner:
        if failed := channel.receive():
            raise LaunchError(failed.decode(), again=True)
        return None
    try:
        result = do()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        channel.send(text.encode)
        raise
    channel.send(bytes)
    return result


def idle_processes(devices: Iterable[jax.Device]) -> tuple[int, ...]:
    """Numbers of the processes of this job that own none of some devices."""
    owners = {device.process_index for device in devices}
    return tuple(number for number in range(jax.process_count()) if number not in owners)


def in_every_process(tree: T) -> T:
    """A tree whose replicated arrays can be read in every process; to be called by all, in the same
    order. Returns at once in a process that owns one of their devices, and elsewhere when their
    values are there.
    """
    if jax.process_count() == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    shared = [number for number, leaf in enumerate(leaves) if _readable_by_owners(leaf)]
    by_channel: dict[Channel, list[int]] = {}
    for number in shared:
        owners = owners_of([leaves[number]])
        if len(owners) < jax.process_count():
            by_channel.setdefault(_channel(owners, "values"), []).append(number)
    for channel, numbers in by_channel.items():
        arrays = [leaves[number] for number in numbers]
        channel.send(lambda arrays=arrays: _packed(arrays))
        values = arrays if channel.is_owner else _unpacked(channel.receive())
        for number, value in zip(numbers, values, strict=True):
            leaves[number] = value
    return structure.unflatten(leaves)


def whole(array: Constant) -> np.ndarray:
    """All of an array on the host, in every process; to be called by all."""
    if not isinstance(array, jax.Array) or jax.process_count() == 1:
        return np.asarray(array)
    if not isinstance(array.sharding, NamedSharding):
        local = array.is_fully_addressable or array.is_fully_replicated
        return np.asarray(array if local else multihost_utils.process_allgather(array, tiled=True))
    owners = owners_of([array])
    if not array.is_fully_replicated:
        array = _replicated(array.sharding.mesh)(array)
    if len(owners) == jax.process_count():
        return np.asarray(array)
    channel = _channel(owners, "values")
    if not channel.is_owner:
        return np.asarray(_unpacked(channel.receive())[0])
    value = np.asarray(array)  # now: the next step may take the array over
    channel.send(lambda: _packed([value]))
    return value


def in_first_process(array: jax.Array) -> np.ndarray | None:
    """A replicated array on the host in process 0, None in the others; to be called by all."""
    if 0 not in owners_of([array]):
        host_array = whole(array)
        return host_array if jax.process_index() == 0 else None
    return np.asarray(array) if jax.process_index() == 0 else None


@cache
def _replicated(mesh: Mesh) -> Any:
    """A program that replicates an array over its mesh."""

    def replicate(array: jax.Array) -> jax.Array:
        return array

    return jax.jit(replicate, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _readable_by_owners(leaf: Any) -> bool:
    """Whether each owner of a device of a mesh has the whole array."""
    return (
        isinstance(leaf, jax.Array)
        and isinstance(leaf.sharding, NamedSharding)
        and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        and leaf.is_fully_replicated
    )


@cache
def _channel(owners: frozenset[int], name: str) -> Channel:
    return Channel(owners=owners, name=name)


@dataclass(eq=False)
class Channel:
    """Messages from the first owner of a mesh to the idle processes, in order.

    Attributes:
        owners: processes that own a device of the mesh.
        name: of what is sent; each is used from one thread.
    """

    owners: frozenset[int]
    name: str
    _waiting: SimpleQueue[Callable[[], bytes]] = field(default_factory=SimpleQueue)
    _thread: threading.Thread | None = None
    _begun: float = 0.0
    _unread: bool = False
    _block: int = 0
    _number: int = 0
    _bytes: int = 0

    @property
    def is_owner(self) -> bool:
        """Whether this process owns a device of the mesh."""
        return jax.process_index() in self.owners

    def send(self, make: Callable[[], bytes]) -> None:
        """Sends a message, in the first owner; what makes it runs in a thread, which no process
        waits for at its end: idle processes have read all when they come to the end of the job.
        """
        if jax.process_index() != min(self.owners) or self._unread:
            return
        if (
            self._block < 2
            and self._waiting.qsize() >= MOST_WAITING
            and time.monotonic() - self._begun > UNREAD_SECONDS
        ):
            self._unread = True
            self._client.key_value_set(self._stopped, "")
            while not self._waiting.empty():
                self._waiting.get()
            return
        if self._thread is None:
            self._begun = time.monotonic()
            self._thread = threading.Thread(
                target=self._publish_all, name="shardlib-values", daemon=True
            )
            self._thread.start()
        self._waiting.put(make)

    def receive(self) -> bytes:
        """The next message, in an idle process; waits for it as long as the job lives."""
        first = self._waited(self._part(0))
        parts, left = [first[8:]], int.from_bytes(first[:8], "little") - len(first) + 8
        while left:
            parts.append(self._waited(self._part(len(parts))))
            left -= len(parts[-1])
        data = b"".join(parts)
        self._advance(len(data), publishing=False)
        return data

    def _publish_all(self) -> None:
        with contextlib.suppress(Exception):  # the job has ended
            while True:
                self._publish(self._waiting.get())

    def _publish(self, make: Callable[[], bytes]) -> None:
        data = make()
        framed = len(data).to_bytes(8, "little") + data
        for number, begin in enumerate(range(0, len(framed), CHUNK_BYTES)):
            self._client.key_value_set_bytes(
                self._part(number), framed[begin : begin + CHUNK_BYTES]
            )
        self._advance(len(data), publishing=True)

    def _part(self, number: int) -> str:
        return f"{self._key('sent')}/{self._number}/{number}"

    def _advance(self, size: int, *, publishing: bool) -> None:
        """Counts a message. At the end of a block idle processes say that they have read it, and
        the publisher deletes the block before it once all have.
        """
        self._number, self._bytes = self._number + 1, self._bytes + size
        if self._number < BLOCK_MESSAGES and self._bytes < BLOCK_BYTES:
            return
        client = self._client
        if not publishing:
            client.key_value_set(f"{self._key('read')}/{jax.process_index()}", "read")
        elif self._block > 0:
            for process in range(jax.process_count()):
                if process not in self.owners:
                    self._waited(f"{self._key('read', self._block - 1)}/{process}")
            for what in ("sent", "read"):
                client.key_value_delete(f"{self._key(what, self._block - 1)}/")
        self._block, self._number, self._bytes = self._block + 1, 0, 0

    def _key(self, what: str, block: int | None = None) -> str:
        folder = zlib.crc32(f"{self.name} {sorted(self.owners)}".encode())
        return f"shardlib/values/{folder:08x}/{what}/{self._block if block is None else block}"

    def _waited(self, key: str) -> bytes:
        """The value of a key, waited for as long as the job lives."""
        while True:
            with contextlib.suppress(_NotYet):
                return self._looked(key, WAIT_MS)
            if not self.is_owner:
                with contextlib.suppress(_NotYet):
                    self._looked(self._stopped, 1)
                    raise LaunchError(
                        f"process {min(self.owners)} has published what its programs return for"
                        f" {UNREAD_SECONDS:.0f} s, and this process, which owns none of their"
                        " devices, has read nothing of it\nTry: call every program in all"
                        " processes, in the same order"
                    )

    @property
    def _stopped(self) -> str:
        return self._key("sent", 0).removesuffix("sent/0") + "stopped"

    def _looked(self, key: str, milliseconds: int) -> bytes:
        try:
            return self._client.blocking_key_value_get_bytes(key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise _NotYet from None
            raise LaunchError(
                f"process {min(self.owners)} did not say what it has computed"
                f" ({str(error).partition(chr(10))[0]})\nTry: look at what it wrote last, and start"
                " all processes again",
                again=True,
            ) from error

    @property
    def _client(self) -> Any:
        joined = _jax_compat.coordination()
        assert joined is not None  # there are several processes
        return joined[0]


class _NotYet(Exception):
    """A value is not in the store yet."""


def _packed(arrays: Sequence[Constant]) -> bytes:
    """Arrays as bytes: the length of a header, the header with dtypes and shapes, the elements; or
    a header that says why they cannot be had.
    """
    try:
        values = [np.asarray(array) for array in arrays]
        header: dict[str, Any] = {"arrays": [[value.dtype.name, value.shape] for value in values]}
    except Exception as error:  # the owner itself fails where it reads them
        values, header = [], {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
    text = json.dumps(header).encode()
    elements = [np.ascontiguousarray(value).tobytes() for value in values]
    return b"".join([len(text).to_bytes(8, "little"), text, *elements])


def _unpacked(data: bytes) -> list[jax.Array]:
    """The arrays that were packed, on the first device of this process."""
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    if "failed" in header:
        raise LaunchError(
            "the process that owns the values of a step could not compute them"
            f" ({header['failed']})\nTry: look at what it wrote last, and start all processes"
            " again",
            again=True,
        )
    here = SingleDeviceSharding(jax.local_devices()[0])
    arrays: list[jax.Array] = []
    for name, shape in header["arrays"]:
        dtype = jnp.dtype(name)
        value = np.frombuffer(data, dtype, math.prod(shape), begin).reshape(shape)
        begin += value.nbytes
        arrays.append(jax.device_put(value.copy(), here))
    return arrays
