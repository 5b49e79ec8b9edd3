"""Runs a plan for a chain of unlike devices: stages are processes, here or on other hosts."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from shardlib._jax_compat import scan_counts
from shardlib.annotation.model import Init, read
from shardlib.annotation.names import Model
from shardlib.annotation.trees import Tree
from shardlib.errors import ArgumentError, LaunchError, MissingFileError, ModelError
from shardlib.jax_types import Function, Value
from shardlib.processes import kin
from shardlib.processes.wire import (
    GREETING_SECONDS,
    ClosedError,
    Door,
    Frame,
    FrameError,
    StrangerError,
    introduce,
    keep_alive,
    receive,
    send,
)
from shardlib.serve.edge_plan import EdgePlan
from shardlib.serve.step import both
from shardlib.tracing.program import Equation, Program, flatten
from shardlib.tracing.rewriting import bind
from shardlib.untrusted.data import JsonObject, construct

#: A place in the program: in front of this equation, after so many layers of it.
Place = tuple[int, int]
#: A value that is handed on: its number and "", or an equation's and "carry" or "stack" with which.
Key = tuple[int, str, int]


@dataclass(frozen=True, kw_only=True)
class TracedChain:
    """A traced forward pass.

    Attributes:
        program: over the leaves of weights and batch.
        leaves: arrays of the weights, by number in the program.
        batch: numbers of the leaves of the batch.
        shapes: of all values.
        made: numbers that are made of the batch.
        loops: equations that are loops over layers.
        maker: number -> the equation that makes it.
    """

    program: Program
    leaves: dict[int, np.ndarray]
    batch: tuple[int, ...]
    shapes: dict[int, jax.ShapeDtypeStruct]
    made: frozenset[int]
    loops: tuple[int, ...]
    maker: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Model, forward: Function, batch: Tree, weights: tuple[Tree, Tree]
    ) -> TracedChain:
        def run(params: Tree, state: Tree, batch: Tree) -> Tree:
            module = model.evaluating(model.rebuild(params, state))
            return jax.tree.leaves(forward(module, batch))

        program = flatten(jax.make_jaxpr(run)(*weights, batch))
        leaves = jax.tree.leaves(weights)
        numbers = program.inputs
        computed, maker = set(numbers[len(leaves) :]), dict[int, int]()
        for place, equation in enumerate(program.equations):
            maker.update(dict.fromkeys(equation.outputs, place))
            if computed.intersection(equation.inputs):
                computed.update(equation.outputs)
        loops = tuple(
            place
            for place, equation in enumerate(program.equations)
            if equation.name == "scan" and computed.intersection(equation.outputs)
        )
        if not loops:
            raise ModelError(
                "the model has no loop over its layers, so that it cannot be cut\nTry: jax.lax.scan"
                " over the layers"
            )
        return cls(
            program=program,
            leaves=dict(zip(numbers[: len(leaves)], leaves, strict=True)),
            batch=tuple(numbers[len(leaves) :]),
            shapes={
                number: jax.ShapeDtypeStruct(aval.shape, aval.dtype)
                for number, aval in enumerate(program.avals)
                if hasattr(aval, "shape")
            },
            made=frozenset(computed),
            loops=loops,
            maker=maker,
        )

    def places(self, pieces: int) -> list[Place]:
        """Lists the place where every piece begins, and where the last one ends."""
        equations, total = self.program.equations, len(self.program.equations)
        layers = sum(equations[loop].params["length"] for loop in self.loops)
        begins = [0, *(loop + 1 for loop in self.loops)]
        gaps = [*zip(begins, [*self.loops, total], strict=True)]
        full = [any(self.made.intersection(e.outputs) for e in equations[a:b]) for a, b in gaps]
        if pieces - layers == len(gaps):  # the plan counts what is made of weights alone, too
            full = [True] * len(gaps)
        places: list[Place] = []
        for number, (start, _) in enumerate(gaps):
            if full[number]:
                places.append((start, 0))
            if number < len(self.loops):
                loop = self.loops[number]
                places += [(loop, layer) for layer in range(equations[loop].params["length"])]
        if len(places) != pieces:
            raise ModelError(
                f"the plan has {pieces} pieces, and the loops of the model make {len(places)}: its"
                " layers are not all in loops\nTry: jax.lax.scan over the layers"
            )
        return [(0, 0), *places[1:], (total, 0)]

    def live(self, position: Place) -> list[Key]:
        """Lists the values that are handed on at a place, in order."""
        place, layer = position
        equations = self.program.equations
        before = set(self.batch).union(*(set(equation.outputs) for equation in equations[:place]))
        later = {
            number for equation in equations[place + bool(layer) :] for number in equation.inputs
        }
        later.update(self.program.outputs)
        keys: list[Key] = []
        if layer:
            loop = equations[place]
            constants, carried = scan_counts(loop.params)
            later.update(loop.inputs[:constants])
            later.update(loop.inputs[constants + carried :])
            keys += [(place, "carry", k) for k in range(carried)]
            after = {n for equation in equations[place + 1 :] for n in equation.inputs}
            keys += [
                (place, "stack", k)
                for k, number in enumerate(loop.outputs[carried:])
                if number in after or number in self.program.outputs
            ]
        return [(number, "", 0) for number in sorted(before & later & self.made)] + keys

    def weights(self, first: Place, last: Place) -> list[tuple[int, int, int]]:
        """(number, first row, last row + 1) of the leaves that a stage reads; 0, 0 for all rows."""
        rows_by_leaf: dict[int, tuple[int, int]] = {}

        def read(number: int, rows: tuple[int, int] = (0, 0)) -> None:
            if number in self.made:
                return
            if number in self.leaves:
                previous = rows_by_leaf.get(number, rows)
                rows_by_leaf[number] = rows if previous == rows else (0, 0)
            elif number in self.maker:
                for operand in self.program.equations[self.maker[number]].inputs:
                    read(operand)

        for place, start, stop in self.spans(first, last):
            equation = self.program.equations[place]
            if not self.made.intersection(equation.outputs):
                continue
            if place not in self.loops:
                for number in equation.inputs:
                    read(number)
                continue
            constants, carried = scan_counts(equation.params)
            for k, number in enumerate(equation.inputs):
                read(number, (start, stop) if k >= constants + carried else (0, 0))
        if last[0] == len(self.program.equations):
            for number in self.program.outputs:
                read(number)
        return [(number, *rows) for number, rows in sorted(rows_by_leaf.items())]

    def spans(self, first: Place, last: Place) -> list[tuple[int, int, int]]:
        """(equation, first layer, last layer + 1) of what lies between two places."""
        spans: list[tuple[int, int, int]] = []
        for place in range(first[0], min(last[0] + bool(last[1]), len(self.program.equations))):
            params = self.program.equations[place].params
            length = params["length"] if place in self.loops else 0
            start = first[1] if place == first[0] else 0
            stop = last[1] if place == last[0] else length
            spans.append((place, start, stop))
        return spans


# --------------------------------------------------------------------------------------------------
# The programs of stages. The traced forward pass is cut between pieces, as
# `shardlib.serve.edge_plan` names them: what comes before the layers, every layer, what comes
# between layer groups, and what comes after them.
#
# A cut stands in front of an equation, or within a loop over layers after some of them. What is
# made of the batch before it and read after it is handed on; what is made of weights and constants
# alone every stage makes for itself.


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """The program of one stage.

    Attributes:
        program: of `jax.export`: (weights, what is handed in) -> what is handed on, lists of
            arrays.
        weights: its part of them.
        taken: shapes and dtypes of what is handed in.
    """

    program: bytes
    weights: tuple[np.ndarray, ...]
    taken: tuple[jax.ShapeDtypeStruct, ...]


def cut(
    model: Model, forward: Function, batch: Tree, weights: tuple[Tree, Tree], plan: EdgePlan
) -> list[StageProgram]:
    """The stages of a plan, in order; the first takes the leaves of a batch, the last gives those
    of the results.
    """
    chain = TracedChain.of(model, forward, batch, weights)
    places = chain.places(plan.stages[-1].last + 1)
    inputs = tuple(chain.shapes[key[0]] for key in chain.live(places[0]))
    programs: list[StageProgram] = []
    for stage in plan.stages:
        cut_stage = _stage(chain, places[stage.first], places[stage.last + 1], inputs)
        programs.append(cut_stage[0])
        inputs = cut_stage[1]
    return programs


def _stage(
    chain: TracedChain, first: Place, last: Place, inputs: tuple[jax.ShapeDtypeStruct, ...]
) -> tuple[StageProgram, tuple[jax.ShapeDtypeStruct, ...]]:
    """A stage's program, and what it hands on."""
    parts = chain.weights(first, last)
    taken, handed = chain.live(first), chain.live(last)
    ends = last[0] == len(chain.program.equations)

    def run(weights: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        stage = _Stage(chain=chain, env=dict(zip(taken, arrays, strict=True)))
        for (number, start, stop), array in zip(parts, weights, strict=True):
            stage.weights[number] = array, start, stop
        stage.run(first, last)
        keys: list[Key] = [(n, "", 0) for n in chain.program.outputs] if ends else handed
        return [jnp.asarray(stage.handed(key)) for key in keys]

    leaves = tuple(
        np.asarray(chain.leaves[n][a:b] if b else chain.leaves[n], order="C") for n, a, b in parts
    )
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    exported = export.export(jax.jit(run), platforms=("cpu", "cuda", "tpu"))(shapes, [*inputs])
    program = StageProgram(program=bytes(exported.serialize()), weights=leaves, taken=inputs)
    return program, tuple(
        jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.out_avals
    )


@dataclass(kw_only=True)
class _Stage:
    """A stage while it is traced."""

    chain: TracedChain
    env: dict[Key, Value]
    weights: dict[int, tuple[jax.Array, int, int]] = field(default_factory=dict)

    def value(self, number: int) -> Value:
        """A value of the program."""
        if (number, "", 0) in self.env:
            return self.env[number, "", 0]
        if number in self.weights:
            return self.weights[number][0]
        program = self.chain.program
        if number in program.constants:
            return program.constants[number]
        equation = program.equations[self.chain.maker[number]]  # of weights and constants alone
        self._store(equation, bind(equation, [self.value(operand) for operand in equation.inputs]))
        return self.env[number, "", 0]

    def handed(self, key: Key) -> Value:
        """A value that is handed on."""
        return self.env[key] if key[1] else self.value(key[0])

    def _store(self, equation: Equation, results: Sequence[Value]) -> None:
        self.env.update(
            {(n, "", 0): result for n, result in zip(equation.outputs, results, strict=True)}
        )

    def run(self, first: Place, last: Place) -> None:
        """Computes what lies between two places."""
        for place, start, stop in self.chain.spans(first, last):
            equation = self.chain.program.equations[place]
            if place in self.chain.loops:
                self._layers(place, equation, start, stop)
            elif self.chain.made.intersection(equation.outputs):
                self._store(equation, bind(equation, [self.value(n) for n in equation.inputs]))

    def _layers(self, place: int, equation: Equation, start: int, stop: int) -> None:
        params, length = equation.params, equation.params["length"]
        constants, carried = scan_counts(params)
        if params["reverse"]:
            raise ModelError("a loop over layers that goes backwards cannot be cut")
        inputs = equation.inputs
        fixed = [self.value(number) for number in inputs[:constants]]
        begun = [
            self.env[place, "carry", k] if start else self.value(number)
            for k, number in enumerate(inputs[constants : constants + carried])
        ]
        rows = [self._rows(number, start, stop) for number in inputs[constants + carried :]]
        begun = [
            jnp.asarray(array, self.chain.shapes[number].dtype)
            for array, number in zip(begun, equation.outputs, strict=False)
        ]
        results = bind(equation, [*fixed, *begun, *rows], length=stop - start)
        stacks = results[carried:]
        if start:
            stacks = [
                jnp.concatenate([self.env[place, "stack", k], stack])
                if (place, "stack", k) in self.env
                else stack
                for k, stack in enumerate(stacks)
            ]
        if stop == length:
            self._store(equation, [*results[:carried], *stacks])
        self.env.update({(place, "carry", k): result for k, result in enumerate(results[:carried])})
        self.env.update({(place, "stack", k): stack for k, stack in enumerate(stacks)})

    def _rows(self, number: int, start: int, stop: int) -> Value:
        if number in self.weights:
            leaf, first, last = self.weights[number]
            return leaf[start - first : stop - first] if last else leaf[start:stop]
        return jnp.asarray(self.value(number))[start:stop]


#: Characters of a secret at most.
SECRET_LENGTH = 1 << 12


def read_address(text: str, option: str) -> tuple[str, int]:
    """Host and port of a text."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ArgumentError(f"{option} is {text!r}\nTry: 127.0.0.1:7000")
    return host, int(port)


def read_secret(path: Path) -> str:
    """Reads the secret that all stages of a chain share."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(SECRET_LENGTH)
    except (OSError, UnicodeDecodeError) as error:
        raise MissingFileError(f"the secret in {path} cannot be read: {error}") from error
    if len(text.strip()) < 16:
        raise ArgumentError(
            "the secret of a chain has at least 16 characters\nTry: --secret-file with what python"
            " -c 'import secrets; print(secrets.token_urlsafe(32))' prints"
        )
    return text.strip()


def listener(address: tuple[str, int]) -> socket.socket:
    """A socket that listens for a chain."""
    try:
        return socket.create_server(address)
    except OSError as error:
        raise LaunchError(
            f"{address[0]}:{address[1]} cannot be listened at ({error})\nTry: another port"
        ) from error


# --------------------------------------------------------------------------------------------------
# The process of a stage (`shardlib edge-stage`): it waits for its part, then for batches, and
# passes on what it computes.
#
# Every connection is of `shardlib.processes.wire`: both ends show that they know the secret,
# lengths are held against limits before anything is read, and what is sent is arrays and a program
# of `jax.export`, nothing that Python would run. A chain that breaks leaves the process as it was:
# it waits for the next part. What goes over the connection is not encrypted.

#: Number by which whoever drives the chain introduces itself; stages have theirs from 0 on.
DRIVER = 1 << 20
#: Seconds between signs of life, and after which a chain without any is broken.
ALIVE_SECONDS, SILENT_SECONDS = 0.5, 5.0
#: Bytes of arrays of a message, at most.
MOST_BYTES = 1 << 36
#: Connections that have shown the secret and wait for their turn.
MOST_WAITING = 64
#: Batches that wait on either side of the computation.
WAITING = 2
BROKEN = (OSError, FrameError, ClosedError, StrangerError)


@dataclass(kw_only=True)
class StagePart:
    """The part of a model that a stage was told to compute.

    Attributes:
        told: the driver's instructions.
        compute: arrays in -> arrays out.
    """

    told: Instructions
    compute: Callable[[Sequence[np.ndarray]], list[np.ndarray]]
    links: list[socket.socket] = field(default_factory=list)

    def close(self) -> None:
        """Ends what it is connected to, also for threads that wait."""
        for link in self.links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()


class Entrance:
    """The listener to which the driver and the stage before connect; strangers hold up nobody.

    Args:
        listener: a listening socket, which it owns.
        secret: of the chain.
    """

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, socket.socket]] = []
        self._door = Door(listener, secret, 0, enter=self._entered, note=_say)
        threading.Thread(target=self._door.serve, daemon=True).start()

    def accepted(self, number: int, seconds: float | None) -> socket.socket:
        """The first connection from whom it is wanted.

        Args:
            seconds: that it may take; None for as long as it takes.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._from(number), seconds):
                raise TimeoutError(f"nobody has connected within {seconds} s")
            first = self._from(number)[0]
            self._waiting.remove((number, first))
            return first

    def forget(self, but: int) -> None:
        """Connections that wait are of a chain that has broken."""
        with self._changed:
            for _, stream in [entry for entry in self._waiting if entry[0] != but]:
                stream.close()
            self._waiting = [entry for entry in self._waiting if entry[0] == but]

    def close(self) -> None:
        """Nobody can connect any more."""
        self._door.close()
        self.forget(-1)

    def _entered(self, stream: socket.socket, who: int) -> None:
        with self._changed:
            self._waiting.append((who, stream))
            if len(self._waiting) > MOST_WAITING:
                self._waiting.pop(0)[1].close()
            self._changed.notify_all()

    def _from(self, number: int) -> list[socket.socket]:
        """Connections of a number that wait and are not closed at the other end."""
        gone = [entry for entry in self._waiting if entry[0] == number and _is_closed(entry[1])]
        for _, stream in gone:
            stream.close()
        self._waiting = [entry for entry in self._waiting if entry not in gone]
        return [stream for who, stream in self._waiting if who == number]


def _is_closed(stream: socket.socket) -> bool:
    try:
        return not stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def serve(listener: socket.socket, secret: str) -> None:
    """Takes one part after the other."""
    entrance = Entrance(listener, secret)
    while True:
        with contextlib.suppress(*BROKEN):
            driver = entrance.accepted(DRIVER, None)
            entrance.forget(DRIVER)
            with contextlib.closing(driver):
                _one_chain(entrance, driver, secret)


def _one_chain(entrance: Entrance, driver: socket.socket, secret: str) -> None:
    part = _part(receive(driver, limit=MOST_BYTES))
    send(driver, {"ready": part.told.stage}, {})
    part.links.append(driver)
    receive(driver, limit=0)  # all are ready
    lives = threading.Event()
    watch = [
        threading.Thread(target=_sign, args=(driver, lives, part), daemon=True),
        threading.Thread(target=_watch, args=(driver, part), daemon=True),
    ]
    for thread in watch:
        thread.start()
    try:
        after = _connect(part, secret)
        before = part.told.stage - 1 if part.told.stage else DRIVER
        came = entrance.accepted(before, GREETING_SECONDS)
        part.links += [after, came]
        _batches(part, came, after)
    finally:
        for link in part.links[1:]:
            link.close()
        watch[1].join(1.0)  # whoever drives the chain should hear first of the stage that is gone
        lives.set()
        part.close()


def _connect(part: StagePart, secret: str) -> socket.socket:
    stream = socket.create_connection(part.told.after, GREETING_SECONDS)
    keep_alive(stream)
    introduce(stream, secret, 0, part.told.stage)
    stream.settimeout(None)
    return stream


def _sign(driver: socket.socket, ended: threading.Event, part: StagePart) -> None:
    """Says that this process lives, until the chain ends."""
    while not ended.wait(ALIVE_SECONDS):
        try:
            send(driver, {"alive": part.told.stage}, {})
        except OSError:
            return


def _watch(driver: socket.socket, part: StagePart) -> None:
    """Ends the chain when its driver is gone."""
    with contextlib.suppress(*BROKEN):
        receive(driver, limit=0)
    part.close()


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """The header of the frame by which a driver hands a stage its part.

    Attributes:
        stage: its number.
        after: address of the stage after it, or of whoever drives the chain.
        after_number: by which that one introduces itself.
        weights, taken: how many arrays of each the frame has.
        least_s: seconds that a batch takes at least: another device is simulated.
    """

    stage: int
    after: tuple[str, int]
    after_number: int
    weights: int
    taken: int
    least_s: float = 0.0


def _part(frame: Frame) -> StagePart:
    """Returns the part that a driver's frame describes."""
    instructions, arrays = (
        construct(Instructions, frame.header, "the part", FrameError),
        frame.arrays,
    )
    try:
        weights = [jax.device_put(arrays[f"weight{k}"]) for k in range(instructions.weights)]
        first = [arrays[f"taken{k}"] for k in range(instructions.taken)]
        program = jax.jit(export.deserialize(bytearray(arrays["program"].tobytes())).call)
    except (KeyError, ValueError) as error:
        raise FrameError(f"it is not a part of a chain: {error}") from error

    def compute(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(array) for array in program(weights, list(inputs))]

    compute(first)  # compiles
    return StagePart(told=instructions, compute=compute)


def _batches(part: StagePart, came: socket.socket, after: socket.socket) -> None:
    """Computes batches until one end is gone; messages go beside the computation."""
    received: queue.Queue[Frame | None] = queue.Queue(WAITING)
    done: queue.Queue[tuple[dict[str, int], dict[str, np.ndarray]] | None] = queue.Queue(WAITING)

    def receiving() -> None:
        with contextlib.suppress(*BROKEN):
            while True:
                received.put(receive(came, limit=MOST_BYTES))
        received.put(None)

    def sending() -> None:
        while (message := done.get()) is not None:
            try:
                send(after, message[0], message[1])
            except BROKEN:
                part.close()

    threads = [threading.Thread(target=loop, daemon=True) for loop in (receiving, sending)]
    for thread in threads:
        thread.start()
    while (frame := received.get()) is not None:
        start = time.perf_counter()
        number = frame.header.get("batch")
        if not isinstance(number, int):
            break
        arrays = [frame.arrays[str(k)] for k in range(len(frame.arrays))]
        results = part.compute(arrays)
        time.sleep(max(0.0, part.told.least_s - (time.perf_counter() - start)))
        done.put(({"batch": number}, {str(k): array for k, array in enumerate(results)}))
    done.put(None)
    threads[1].join(SILENT_SECONDS)


@dataclass(kw_only=True)
class Workers:
    """Processes that stages run in.

    Attributes:
        addresses: where each listens.
        secret: that all know.
        names: device of each; none where each may be any.
        processes: those that were started here, and end with this one.
    """

    addresses: list[tuple[str, int]]
    secret: str
    names: list[str] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _guard: kin.Guard | None = None

    @classmethod
    def here(cls, count: int) -> Workers:
        """Starts processes on this machine."""
        workers = cls(addresses=[], secret=secrets.token_hex(32), _guard=(guard := kin.Guard()))
        words = [sys.executable, "-m", "shardlib", "edge-stage", "--json"]
        with tempfile.TemporaryDirectory(prefix="shardlib-edge-") as folder:
            file = Path(folder) / "secret"
            file.write_text(workers.secret)
            words += ["--listen", "127.0.0.1:0", "--secret-file", str(file)]
            for _ in range(count):
                workers.processes.append(
                    kin.start(words, guard, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
                )
            for process in workers.processes:
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    workers.close()
                    raise LaunchError(
                        "a process of a stage has not started; see what it says above"
                    )
                workers.addresses.append(("127.0.0.1", json.loads(line)["port"]))
        return workers

    def of(self, devices: Sequence[str]) -> list[tuple[str, int]]:
        """Addresses of the processes of some stages."""
        left = list(range(len(self.addresses)))
        indices = list[int]()
        for device in devices:
            matches = [k for k in left if not self.names or self.names[k] == device]
            if not matches:
                there = f" among {', '.join(self.names)}" if self.names else ""
                raise ArgumentError(
                    f"the plan needs another {device}, and there is no process of one{there}"
                )
            left.remove(matches[0])
            indices.append(matches[0])
        return [self.addresses[k] for k in indices]

    def lose(self, address: tuple[str, int]) -> None:
        """A process is not used again."""
        index = self.addresses.index(address)
        del self.addresses[index]
        del self.names[index : index + 1]
        if self.processes:
            self._end(self.processes.pop(index))

    def close(self) -> None:
        """Ends the processes that were started here."""
        for process in self.processes:
            self._end(process)
        if self._guard is not None:
            self._guard.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert self._guard is not None and process.stdout is not None
        kin.finish(process, self._guard)
        process.stdout.close()


#: Seconds that a stage has to load and compile its part.
READY_SECONDS = 300.0


class StageError(LaunchError):
    """A stage is gone."""

    def __init__(self, stage: int, address: tuple[str, int], why: str) -> None:
        super().__init__(f"stage {stage} of the chain, at {address[0]}:{address[1]}, {why}")
        self.stage, self.address = stage, address


@dataclass(kw_only=True)
class ConnectedChain:
    """Connected stages; to be closed.

    Attributes:
        addresses: of the process of each stage.
        drivers: a connection to each stage.
        first: to the first stage, for batches.
        last: from the last stage, for results.
        heard: when each stage has last given a sign of life.
        gone: of the first stage that was lost, with why.
    """

    addresses: Sequence[tuple[str, int]]
    drivers: list[socket.socket]
    first: socket.socket
    last: socket.socket
    heard: list[float]
    gone: list[tuple[int, str]] = field(default_factory=list)

    def close(self) -> None:
        """Ends all connections: every stage waits for its next part then."""
        for connection in (*self.drivers, self.first, self.last):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def through(
        self, batches: Mapping[int, Sequence[np.ndarray]]
    ) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Sends batches, and gives results with their numbers as they come."""
        results: queue.Queue[tuple[int, list[np.ndarray]] | None] = queue.Queue()

        def sending() -> None:
            with contextlib.suppress(*BROKEN):
                for number, arrays in batches.items():
                    named = {str(k): array for k, array in enumerate(arrays)}
                    send(self.first, {"batch": number}, named)

        def receiving() -> None:
            with contextlib.suppress(*BROKEN):
                while True:
                    frame = receive(self.last, limit=MOST_BYTES)
                    number = frame.header.get("batch")
                    assert isinstance(number, int)
                    arrays = [frame.arrays[str(k)] for k in range(len(frame.arrays))]
                    results.put((number, arrays))
            results.put(None)

        for loop in (sending, receiving):
            threading.Thread(target=loop, daemon=True).start()
        left = len(batches)
        while left:
            self._check()
            try:
                result = results.get(timeout=0.2)
            except queue.Empty:
                continue
            if result is None:
                self._lost()
            assert result is not None
            left -= 1
            yield result

    def _check(self) -> None:
        if self.gone:
            self._lost()
        now = time.monotonic()
        for stage, last in enumerate(self.heard):
            if now - last > SILENT_SECONDS:
                reason = f"has given no sign of life for {SILENT_SECONDS:g} s"
                raise StageError(stage, self.addresses[stage], reason)

    def _lost(self) -> None:
        """Says which stage is gone: that whose own connection has closed first."""
        until = time.monotonic() + SILENT_SECONDS
        while not self.gone and time.monotonic() < until:
            time.sleep(0.05)
        stage, why = self.gone[0] if self.gone else (len(self.drivers) - 1, "says nothing more")
        raise StageError(stage, self.addresses[stage], why)


def connected(
    workers: Workers,
    addresses: Sequence[tuple[str, int]],
    stages: Sequence[StageProgram],
    least_s: Sequence[float],
) -> ConnectedChain:
    """Hands every stage its part, and connects them.

    Args:
        least_s: seconds that a batch takes at least on each; 0 for no device that is simulated.
    """
    count, stage = len(stages), 0
    with contextlib.ExitStack() as opened:
        try:
            drivers = list[socket.socket]()
            for stage in range(count):
                drivers.append(opened.enter_context(_to(workers, addresses[stage])))
            # Where the first stage sees this process: loopback for processes of this machine.
            host = drivers[0].getsockname()[0]
            listener = socket.create_server((host, 0))
            with contextlib.closing(Entrance(listener, workers.secret)) as entrance:
                after = [*addresses[1:], (host, listener.getsockname()[1])]
                for stage, program in enumerate(stages):
                    header, arrays = _instructions(program, stage, after[stage], least_s[stage])
                    drivers[stage].settimeout(READY_SECONDS)
                    send(drivers[stage], header, arrays)
                for stage in range(count):
                    receive(drivers[stage], limit=0)
                for stage in range(count):
                    send(drivers[stage], {"go": True}, {})
                stage = count - 1  # a stage is let in once the next one is
                last = entrance.accepted(stage, GREETING_SECONDS)
                opened.enter_context(last)
            stage = 0
            first = opened.enter_context(_to(workers, addresses[0]))
        except BROKEN as error:
            reason = f"does not answer ({error})"
            raise StageError(stage, addresses[stage], reason) from error
        opened.pop_all()
    chain = ConnectedChain(
        addresses=list(addresses),
        drivers=drivers,
        first=first,
        last=last,
        heard=[time.monotonic()] * count,
    )
    for number in range(count):
        threading.Thread(target=_listen, args=(chain, number), daemon=True).start()
    return chain


def _to(workers: Workers, address: tuple[str, int]) -> socket.socket:
    stream = socket.create_connection(address, GREETING_SECONDS)
    try:
        keep_alive(stream)
        introduce(stream, workers.secret, 0, DRIVER)
    except BROKEN as error:
        stream.close()
        raise ConnectionError(f"{error}; a stage with another secret does that, too") from error
    except BaseException:
        stream.close()
        raise
    stream.settimeout(None)
    return stream


def _instructions(
    program: StageProgram, number: int, after: tuple[str, int], least_s: float
) -> tuple[JsonObject, dict[str, np.ndarray]]:
    arrays = {"program": np.frombuffer(program.program, np.uint8)}
    arrays |= {f"weight{k}": array for k, array in enumerate(program.weights)}
    arrays |= {f"taken{k}": np.zeros(a.shape, a.dtype) for k, a in enumerate(program.taken)}
    instructions = Instructions(
        stage=number,
        after=after,
        after_number=number + 1,
        weights=len(program.weights),
        taken=len(program.taken),
        least_s=least_s,
    )
    return asdict(instructions), arrays


def _listen(chain: ConnectedChain, number: int) -> None:
    """Hears signs of life, and when a stage is gone."""
    stream = chain.drivers[number]
    try:
        stream.settimeout(None)
        while True:
            receive(stream, limit=0)
            chain.heard[number] = time.monotonic()
    except BROKEN as error:
        chain.gone.append((number, f"is gone ({error})"))


#: Results in front of those that are timed: the chain fills.
FILLING = 4


@dataclass(frozen=True, kw_only=True)
class EdgeRun:
    """Results and times of batches that went through a chain.

    Attributes:
        results: leaves of what the forward pass gives, for each batch in order.
        batches_per_s: measured between results, once the chain was full; None of too few.
        plans: one, and another for every stage that was lost.
        lost: devices of these stages.
    """

    results: list[list[np.ndarray]]
    batches_per_s: float | None
    plans: tuple[EdgePlan, ...]
    lost: tuple[str, ...]


def run_edge(
    plan: EdgePlan,
    init: Init,
    forward: Function,
    batches: Sequence[Tree],
    *,
    weights: Tree | int = 0,
    workers: Workers | None = None,
    again: Callable[[str], EdgePlan] | None = None,
    simulated: bool = False,
) -> EdgeRun:
    """Runs batches through the stages of a plan.

    Args:
        forward: (model, batch) -> any arrays, as the plan was made for.
        workers: processes of `shardlib edge-stage`, which are left as they are; by default
            some are started on this machine, and ended.
        again: device that was lost -> another plan, without it; None where that is an error.
    """
    if not batches:
        raise ArgumentError("there are no batches")
    model = read(init)
    arrays = both(model, weights)
    flat = {n: [np.asarray(leaf) for leaf in jax.tree.leaves(b)] for n, b in enumerate(batches)}
    shape = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batches[0])
    done: dict[int, list[np.ndarray]] = {}
    plans, lost = [plan], list[str]()
    used = Workers.here(len(plan.stages)) if workers is None else workers
    times = list[float]()
    try:
        while True:
            stages = cut(model, forward, shape, arrays, plan)
            minimum_seconds = [stage.seconds if simulated else 0.0 for stage in plan.stages]
            addresses = used.of([stage.device for stage in plan.stages])
            times.clear()
            try:
                chain = connected(used, addresses, stages, minimum_seconds)
                try:
                    left = {n: leaves for n, leaves in flat.items() if n not in done}
                    for number, results in chain.through(left):
                        done[number] = results
                        times.append(time.perf_counter())
                finally:
                    chain.close()
                break
            except StageError as error:
                if again is None:
                    raise
                device = plan.stages[error.stage].device
                used.lose(addresses[error.stage])
                lost.append(device)
                plan = again(device)
                plans.append(plan)
    finally:
        if workers is None:
            used.close()
    rate = None
    if len(times) > FILLING + 1:
        rate = (len(times) - 1 - FILLING) / (times[-1] - times[FILLING])
    return EdgeRun(
        results=[done[n] for n in sorted(done)],
        batches_per_s=rate,
        plans=tuple(plans),
        lost=tuple(lost),
    )
