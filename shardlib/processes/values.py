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
import itertools
import json
import math
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from shardlib import _jax_compat, errors
from shardlib.errors import LaunchError, raise_all
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
    """Makes the owners of some devices do something, and the idle processes wait for them; to be
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


@cache
def _replicated(mesh: Mesh) -> Any:
    """A program that replicates an array over its mesh."""

    def replicate(array: jax.Array) -> jax.Array:
        return array

    return jax.jit(replicate, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _readable_by_owners(leaf: Any) -> bool:
    """Returns whether each owner of a device of a mesh has the whole array."""
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
        """True if this process owns a device of the mesh."""
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


# --------------------------------------------------------------------------------------------------
# Agreement of all processes of a job.
#
# Processes that run different programs do not fail: they hang in a collective, or compute
# nonsense. So they compare what they are about to do before they do it, through the store of keys
# and values of JAX's coordination service. Nothing of this touches a device, every wait is
# bounded, and whoever is missing is named.
#
# `agree` compares values: process 0 reads those of all, and writes down what is different.
# `of_first` gives all processes what process 0 has found: a measurement, which every one would
# make a little differently.

#: Seconds that processes wait for each other: one of them may have to measure, to read an index or
#: to plan on a slow host.
AGREE_SECONDS = 600.0
#: Seconds between two looks at the store.
LOOK_EVERY = 0.05
#: Keys of values that a process may leave out: nobody loads modules that it does not need.
OPTIONAL = "code of "


def _several() -> tuple[Any, int, int] | None:
    """The client of JAX's coordination service, the number of this process and how many there are;
    None where it is alone.
    """
    coordination = _jax_compat.coordination()
    return None if coordination is None or coordination[2] == 1 else coordination


_rounds: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
_first_values: dict[str, str] = {}


def agree(name: str, values: Mapping[str, str], *, seconds: float = AGREE_SECONDS) -> None:
    """Compares values with those of all other processes; to be called by all, in the same order.
    Alone it does nothing.
    """
    coordination = _several()
    if coordination is None:
        return
    client, process, processes = coordination
    folder = f"shardlib/agree/{name}/{next(_rounds[name])}"
    client.key_value_set(f"{folder}/said/{process}", json.dumps(dict(values)))
    if process == 0:
        answers = _collected(client, f"{folder}/said", processes, seconds)
        absent = [number for number in range(processes) if number not in answers]
        client.key_value_set(
            f"{folder}/verdict", json.dumps({"absent": absent, "different": differences(answers)})
        )
    verdict = json.loads(_waited(client, f"{folder}/verdict", seconds + 10, f"compare its {name}"))
    _require_present(verdict["absent"], processes, "come to compare", name, seconds)
    if verdict["different"]:
        raise_all(
            LaunchError,
            f"the processes do not fit each other: their {name} differs",
            verdict["different"],
            hint="start all of them with the same words, code and packages",
        )


def of_first(name: str, make: Callable[[], str], *, seconds: float = AGREE_SECONDS) -> str:
    """Returns what process 0 makes, in all processes; made once for each name. Alone, what this
    process makes.
    """
    coordination = _several()
    if coordination is None:
        return make()
    client, process, _ = coordination
    if name not in _first_values:
        key = f"shardlib/first/{name}"
        if process == 0:
            client.key_value_set(key, make())
        _first_values[name] = _waited(client, key, seconds, f"say its {name}")
    return _first_values[name]


def differences(answers: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Returns what the processes say differently, a line a key.

    >>> differences({0: {"plan": "a1"}, 1: {"plan": "b2"}, 2: {"plan": "a1"}})
    ['plan: a1 (processes 0 and 2), b2 (process 1)']
    """
    lines: list[str] = []
    for key in dict.fromkeys(key for values in answers.values() for key in values):
        by_value: defaultdict[str, list[int]] = defaultdict(list)
        for process, values in sorted(answers.items()):
            if key in values or not key.startswith(OPTIONAL):
                by_value[values.get(key, "nothing")].append(process)
        if len(by_value) > 1:
            lines.append(
                f"{key}: "
                + ", ".join(f"{value} ({processes_text(who)})" for value, who in by_value.items())
            )
    return lines


def processes_text(numbers: Sequence[int]) -> str:
    """Processes in words.

    >>> processes_text([3]), processes_text([0, 2]), processes_text([0, 1, 2, 3, 7])
    ('process 3', 'processes 0 and 2', 'processes 0 to 3 and 7')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [
        part
        for run in runs
        for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    ]
    text = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"process {text}" if len(numbers) == 1 else f"processes {text}"


def _collected(
    client: Any, folder: str, processes: int, seconds: float
) -> dict[int, dict[str, str]]:
    """Returns what all processes have said, or those that did in time."""
    end = time.monotonic() + seconds
    while True:
        answers = {
            int(key.rpartition("/")[2]): json.loads(value)
            for key, value in client.key_value_dir_get(folder)
        }
        if len(answers) == processes or time.monotonic() > end:
            return answers
        time.sleep(LOOK_EVERY)


def _require_present(
    absent: Sequence[int], processes: int, verb: str, name: str, seconds: float
) -> None:
    """Raises if processes are absent."""
    if absent:
        raise LaunchError(
            f"{processes_text(absent)} of {processes} did not {verb}"
            f" {'its' if len(absent) == 1 else 'their'} {name} within {seconds:g} s\nTry: look at"
            " what they wrote last, and start all of them again",
            again=True,
        )


def _waited(client: Any, key: str, seconds: float, what: str) -> str:
    try:
        return client.blocking_key_value_get(key, int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise LaunchError(
            f"process 0 did not {what} within {seconds:g} s"
            f" ({str(error).partition(chr(10))[0]})\nTry: look at what it wrote last, and start all"
            " of them again",
            again=True,
        ) from error


def all_say(name: str, text: str, *, seconds: float = AGREE_SECONDS) -> dict[int, str]:
    """Returns what every process says, by its number, in all processes; to be called by all, in the
    same order. Alone, what this one says.
    """
    coordination = _several()
    if coordination is None:
        return {0: text}
    client, process, processes = coordination
    folder = f"shardlib/say/{name}/{next(_rounds[name])}"
    client.key_value_set(f"{folder}/{process}", json.dumps({"said": text}))
    answers = _collected(client, folder, processes, seconds)
    absent = [number for number in range(processes) if number not in answers]
    _require_present(absent, processes, "say", name, seconds)
    return {number: answer["said"] for number, answer in answers.items()}


def meet(name: str, *, seconds: float = AGREE_SECONDS) -> None:
    """Waits until all processes are at this point; to be called by all, in the same order. Alone it
    does nothing.
    """
    coordination = _several()
    if coordination is None:
        return
    try:
        coordination[0].wait_at_barrier(
            f"shardlib/meet/{name}/{next(_rounds[name])}", int(seconds * 1000)
        )
    except jax.errors.JaxRuntimeError as error:
        raise LaunchError(
            f"not all processes came to {name!r} within {seconds:g} s"
            f" ({str(error).partition(chr(10))[0]})\nTry: look at what they wrote last, and start"
            " all of them again",
            again=True,
        ) from error


#: Steps between two times that processes ask each other whether one of them wants to stop.
ASK_EVERY = 10


def is_first() -> bool:
    """Returns whether this process is the one that speaks for all; asking does not start JAX's
    devices.
    """
    coordination = _jax_compat.coordination()
    return coordination is None or coordination[1] == 0


def is_alone() -> bool:
    """Returns whether this process is the only one of its job; asking does not start JAX's
    devices.
    """
    return _several() is None


def anywhere(condition: bool, *, needed: bool, step: int = 0) -> bool:
    """Returns whether this holds in any process; all of them get the same answer, at the same
    step.
    """
    if jax.process_count() == 1:
        return condition
    if not needed or step % ASK_EVERY:
        return False
    return bool(np.any(multihost_utils.process_allgather(np.asarray(condition))))


# --------------------------------------------------------------------------------------------------
# Shards of arrays in folders of Orbax, written and read by the processes that own them.
#
# Orbax refuses arrays of which a process has no shard, and of a job of several processes those of
# a mesh inside of one. So owners alone write and read; idle processes wait for them, and get
# arrays without shards.


def options(owners: frozenset[int]) -> ocp.options.MultiprocessingOptions:
    """Returns how Orbax waits for other processes: by JAX's coordination service.

    Its default are collectives on the devices, which must not run in a thread beside those of the
    training loop.
    """
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(
        primary_host=min(owners), active_processes=set(owners)
    )


class ArrayHandler(ocp.type_handlers.ArrayHandler):
    """Writes arrays, also those of a mesh inside of one of several processes.

    Args:
        first: number of the first process that writes.
    """

    def __init__(self, first: int | None) -> None:
        super().__init__(
            primary_host=first, array_metadata_store=None, enable_write_sharding_file=False
        )

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """See Orbax."""
        return await super().serialize([_of_job(value) for value in values], infos, args)


class _OfJob:
    """An array of a mesh inside of one process, as Orbax takes it: it refuses a `jax.Array` that is
    in one of several processes, since each could have one of its own.
    """

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


def _of_job(array: Any) -> Any:
    inside = isinstance(array, jax.Array) and array.is_fully_addressable
    return _OfJob(array) if jax.process_count() > 1 and inside else array


def shapes_stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays that `read` gives, by name."""
    stored: Any = ocp.handlers.PyTreeCheckpointHandler().metadata(epath.Path(folder))
    return {name: leaf.shape for name, leaf in stored.items()}


def read(
    folder: str | Path | epath.Path, leaves: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads arrays, every device's part alone; no process waits for another.

    The handler is used without a `Checkpointer`, which would wait at a barrier for processes that
    have failed.
    """
    if jax.process_index() not in owners_of(leaves.values()):
        return {name: without_shards(leaf) for name, leaf in leaves.items()}
    return ocp.handlers.PyTreeCheckpointHandler().restore(
        epath.Path(folder),
        args=ocp.args.PyTreeRestore(
            item=dict(leaves),
            restore_args={
                name: ocp.ArrayRestoreArgs(
                    sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True
                )
                for name, leaf in leaves.items()
            },
            partial_restore=True,
        ),
    )


def without_shards(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array as a process has it that owns none of its devices."""
    sharding = leaf.sharding
    assert isinstance(sharding, jax.sharding.Sharding)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [], dtype=leaf.dtype)


def is_process_zero() -> bool:
    """Returns whether this process is the one that deletes and renames."""
    return jax.process_index() == 0


def first_decides(name: str, decide: Callable[[], T]) -> T | None:
    """Returns what the first process comes to; nothing in the others, or the error that the first
    has come to; to be called by all.
    """
    if jax.process_count() == 1:
        return decide()
    if not is_process_zero():
        _raise_alike(all_say(name, "")[0])
        return None
    try:
        decision = decide()
    except errors.ShardlibError as error:
        all_say(name, json.dumps({"kind": type(error).__name__, "message": str(error)}))
        raise
    all_say(name, "")
    return decision


def _raise_alike(message: str) -> None:
    if message:
        data: dict[str, Any] = json.loads(message)
        raise getattr(errors, data["kind"], errors.ShardlibError)(data["message"])
