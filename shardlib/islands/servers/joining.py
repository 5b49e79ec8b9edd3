"""`join`: this process as one of the islands; what cannot be is refused before anything starts.

Variables of the environment say where islands meet, and which of them this process is:

    SHARDLIB_MEETING             HOST:PORT of the outer server
    SHARDLIB_ISLAND              number of this island, from 0 on
    SHARDLIB_MEETING_TOKEN       a word that all islands and the server know and nobody else, or
    SHARDLIB_MEETING_TOKEN_FILE  a file with it

>>> found = {"SHARDLIB_MEETING": "10.0.0.1:4711", "SHARDLIB_ISLAND": "1"}
>>> place = read_place({**found, "SHARDLIB_MEETING_TOKEN": "a secret word"})
>>> place.host, place.port, place.island
('10.0.0.1', 4711, 1)
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import jax

from shardlib.errors import ArgumentError, LaunchError, PinError, raise_all
from shardlib.exchanges import Exchange
from shardlib.findings import Finding
from shardlib.islands.exchanges import (
    BUCKET_BYTES,
    DiLoCo,
    between,
    read_exchange,
    whole,
    wrong_bucket_bytes,
)
from shardlib.islands.planning import updated_by_steps
from shardlib.islands.program import not_in_float32, parts_in_order, trained
from shardlib.islands.servers.crew import END_SECONDS, ended, environment
from shardlib.islands.servers.island import Exchanging, Island, SeveralProcesses
from shardlib.islands.servers.processes import OUTER_SETTINGS, OuterServerSettings
from shardlib.islands.servers.processes import TOKEN as OUTER_TOKEN
from shardlib.islands.servers.relay import Link, Relay, meeting_bytes, read_link
from shardlib.islands.servers.rounds import HOLD_SECONDS, Outline, Rounds
from shardlib.islands.servers.wire import STARTER, Ask, Connection
from shardlib.lowering.program import Program
from shardlib.lowering.training_program import is_program
from shardlib.processes.console import LOOPBACK, Lines, Processes, free_port
from shardlib.processes.kin import Guard, finish, start
from shardlib.processes.place import STOPPED, StopRequest, stop_requests
from shardlib.report.elements import bytes_text, seconds_text
from shardlib.tracing.trace import describe_batch
from shardlib.untrusted.data import JsonObject, printable, shown

#: Variables of the environment.
MEETING, ISLAND = "SHARDLIB_MEETING", "SHARDLIB_ISLAND"
TOKEN, TOKEN_FILE = "SHARDLIB_MEETING_TOKEN", "SHARDLIB_MEETING_TOKEN_FILE"
#: Letters of a token, at least.
LEAST_TOKEN = 8


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """The address and secret by which an island meets the others.

    Attributes:
        host: address of the outer server.
        port: of it.
        island: number of this island.
        token: that all of them know.
    """

    host: str
    port: int
    island: int
    token: str = field(repr=False)

    def environment(self) -> dict[str, str]:
        """The variables that say so."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return {MEETING: f"{host}:{self.port}", ISLAND: str(self.island), TOKEN: self.token}


def read_place(environ: Mapping[str, str]) -> MeetingPlace:
    """The place that variables name."""
    failures: list[str] = []
    host, _, port = environ.get(MEETING, "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        failures.append(f"{MEETING} is {shown(environ.get(MEETING))}; it is HOST:PORT")
    island = environ.get(ISLAND, "")
    if not island.isdigit() or len(island) > 6:
        failures.append(f"{ISLAND} is {shown(environ.get(ISLAND))}; it is a number from 0 on")
    token, wrong = _token(environ)
    failures += wrong
    if failures:
        raise_all(
            LaunchError,
            "nothing says where islands meet",
            failures,
            hint="shardlib launch --islands 2 --devices-per-process 2 -- python train.py",
        )
    return MeetingPlace(host=host.strip("[]"), port=int(port), island=int(island), token=token)


def _token(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """The token, and what is wrong with it."""
    name, token = TOKEN, environ.get(TOKEN, "")
    if not token and TOKEN_FILE in environ:
        name = TOKEN_FILE
        try:
            token = Path(environ[TOKEN_FILE]).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            return "", [f"{TOKEN_FILE} cannot be read: {error}"]
    if len(token) < LEAST_TOKEN:
        return "", [f"{name} has no token of at least {LEAST_TOKEN} letters"]
    return token, []


#: Seconds that a server may be gone, at least: it holds questions of islands that wait for half of
#: that.
LEAST_PATIENCE = 2 * HOLD_SECONDS


def meeting_finding(exchange: DiLoCo, outline: Outline, link: Link | None) -> Finding:
    """Finding about the traffic of an island at a meeting, and its time."""
    size = meeting_bytes(exchange, outline)
    message = (
        f"{exchange.islands} islands meet every {exchange.between} steps over a server. Each sends"
        f" {bytes_text(size)} at a meeting and receives as much; the server carries"
        f" {exchange.islands} times that in either direction."
    )
    hint = ""
    if link is not None:
        seconds = link.seconds(size, size)
        message += f" Over its link that takes {seconds_text(seconds)}"
        if exchange.delay:
            each = seconds_text(seconds / exchange.delay)
            message += f", which {exchange.delay} steps of at least {each} hide"
        else:
            hint = "delay=, so that it crosses beside the next steps"
        message += "."
    return Finding(
        code="remote-meeting", severity="info", where=str(exchange), message=message, hint=hint
    )


def join(
    program: Program,
    *,
    exchange: DiLoCo | str,
    place: MeetingPlace | None = None,
    weight: float | None = None,
    link: Link | str | None = None,
    patience_s: float = 60.0,
    bucket_bytes: int = BUCKET_BYTES,
) -> Island:
    """Makes this process one of the islands of a run. Nothing is sent before `Island.start`.

    Args:
        program: of this island, as `shardlib.compile` gives it without an exchange.
        exchange: how islands meet, alike on all: `shardlib.islands.DiLoCo`, or "diloco:2:100".
        place: where they meet; by default as the environment says it, see
            `shardlib.islands.servers.joining`.
        weight: of this island in the mean of outer gradients; by default the rows of a step.
        link: between this island and the server, "50mbit-20ms", for what `Island.findings` say of
            meetings.
        patience_s: how long a server may be gone, at least 20.
        bucket_bytes: a mean comes in the order in which the loss first uses parameters, in buckets
            of so many bytes.

    Raises:
        PinError: the exchange, or the program, cannot be that of an island; all reasons are listed.
        ArgumentError: arguments out of range; all of them are listed.
        LaunchError: nothing says where islands meet.
    """
    meets = read_exchange("exchange", exchange)
    _require_numbers(weight, patience_s, bucket_bytes)
    outline = _require_island(program, meets)
    assert isinstance(meets, DiLoCo)
    place = read_place(os.environ) if place is None else place
    if place.island >= meets.islands:
        raise ArgumentError(
            f"island {place.island} is not one of {meets.islands}, which are numbered from 0 on\n"
            f"Try: exchange={meets.kind}:{place.island + 1}:{meets.every}"
        )
    connection = Connection(
        where=lambda: (place.host, place.port),
        server=0,
        worker=place.island,
        secret=place.token,
        patience_s=patience_s,
    )
    link_figures = read_link(link) if isinstance(link, str) else link
    return Island(
        program=program,
        exchanging=(Exchanging if jax.process_count() == 1 else SeveralProcesses)(
            link=connection,
            number=place.island,
            exchange=meets,
            outline=outline,
            weight=float(rows_of(program) if weight is None else weight),
            uses=parts_in_order(program),
            bucket_bytes=bucket_bytes,
        ),
        findings=(meeting_finding(meets, outline, link_figures),),
    )


def rows_of(program: Program) -> int:
    """Rows of a step, by the convention of batch axes; 1 where nothing has rows."""
    described = describe_batch(program.batch, None)
    return max(
        (s[axes.index("batch")] for _, s, _, axes in described if "batch" in axes), default=1
    )


def _require_numbers(weight: object, patience_s: object, bucket_bytes: object) -> None:
    failures = wrong_bucket_bytes(bucket_bytes)
    if weight is not None:
        failures += between("weight", weight, most=math.inf, above=True)
    wrong = between("patience_s", patience_s, most=math.inf, above=True)
    if wrong or float(cast("float", patience_s)) < LEAST_PATIENCE:
        failures.append(
            f"patience_s is {shown(patience_s)}; it is a number of at least {LEAST_PATIENCE}"
        )
    if failures:
        raise_all(ArgumentError, "shardlib.islands.servers.join cannot use its arguments", failures)


def _require_island(program: Program, exchange: Exchange) -> Outline:
    """The outline of the parameters that meet."""
    if not is_program(program) or program.loss_program is not program:
        raise PinError(
            "the program has an exchange of its own, whose islands are in this process\nTry:"
            " shardlib.compile without pin={'exchange': ...}, and servers.join(program,"
            " exchange=...)"
        )
    failures: list[str] = []
    if not isinstance(exchange, DiLoCo):
        failures.append(f"exchange is {exchange}; islands that are processes meet as DiLoCo")
    if program.disk is not None:
        failures.append("its optimizer state is on disk (offload=['disk'])")
    if updated := updated_by_steps(program.plan.parameters):
        failures.append(f"steps update {updated}, which are not parameters")
    parameters = trained(program)
    failures += [f"{text}, and what is outer is float32" for text in not_in_float32(parameters)]
    outline = Outline.of({path: tuple(leaf.shape) for path, leaf in parameters.items()})
    if isinstance(exchange, DiLoCo) and exchange.fragments > outline.total:
        failures.append(f"there are {exchange.fragments} fragments of {outline.total} elements")
    if failures:
        raise_all(PinError, "this program cannot be that of an island", failures)
    return outline


# --------------------------------------------------------------------------------------------------
# The process of the outer server: started, watched, started again at its checkpoint.

#: Of this module, in a process.
MODULE = ("shardlib.islands.servers.processes", "outer")


@dataclass(kw_only=True, eq=False)
class OuterServer:
    """The outer server of islands, as a process of this machine, for as long as its block.

        with OuterServer(islands=2, run="runs/a") as server:
            place = server.place(island=0)

    Attributes:
        islands: how many there may be.
        rounds: how long rounds wait, for how many, and checkpoints.
        run: folder of the checkpoint and of logs; by default one that is deleted.
        host: address to listen at, one of this machine that all islands reach.
        port: of it; None for a free one.
        token_file: file of the token, for islands elsewhere; made where it is not there.
        say: is told what happens.
        failed: why the server was not started again; empty where it runs.

    Raises:
        ArgumentError: values out of range; all of them are listed.
        LaunchError: the address is not this machine's.
    """

    islands: int
    rounds: Rounds = field(default_factory=Rounds)
    run: str | Path | None = None
    host: str = LOOPBACK
    port: int | None = None
    token_file: str | Path | None = None
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    failed: str = ""

    def __post_init__(self) -> None:
        failures = [*whole("islands", self.islands, 2)]
        if (
            not failures
            and isinstance(self.rounds.quorum, int)
            and self.rounds.quorum > self.islands
        ):
            failures.append(f"quorum is {self.rounds.quorum}, and there are {self.islands} islands")
        if self.port is not None and whole("port", self.port, 1, (1 << 16) - 1):
            failures.append(f"port is {self.port}; ports go from 1 to 65535")
        if failures:
            raise_all(ArgumentError, "OuterServer is not usable", failures)
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> OuterServer:
        self.port = self.port or free_port(self.host)
        _require_free(self.host, self.port)
        self._token = self._read_token()
        if self.run is None:
            temporary = tempfile.TemporaryDirectory(prefix="shardlib-islands-")
            self.run = self._stack.enter_context(temporary)
        Path(self.run).mkdir(parents=True, exist_ok=True)
        self._watch = threading.Thread(target=self._watched, name="shardlib-outer-server")
        self._watch.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def place(self, island: int) -> MeetingPlace:
        """Returns the meeting place of an island."""
        assert self.port is not None
        return MeetingPlace(host=self.host, port=self.port, island=island, token=self._token)

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def report(self) -> JsonObject:
        """Returns the server's report: the open round, islands in it, events."""
        place = self.place(0)
        link = Connection(
            where=lambda: (place.host, place.port),
            server=0,
            worker=STARTER,
            secret=self._token,
            patience_s=20.0,
        )
        answer, _ = link.ask(Ask(kind="report", worker=STARTER))
        link.close()
        assert isinstance(answer.report, dict)
        return answer.report

    def close(self) -> None:
        """Makes the server save and end."""
        self._ending.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        self._watch.join(END_SECONDS)
        self._stack.close()

    def _watched(self) -> None:
        """Starts the server as often as it may be: in one thread, with which it would end."""
        assert self.run is not None and self.port is not None
        settings = OuterServerSettings(
            islands=self.islands, rounds=self.rounds, host=self.host, port=self.port
        )
        variables = environment(
            None, {OUTER_SETTINGS: settings.to_json(), OUTER_TOKEN: self._token}
        )
        with Guard() as guard:
            for left in range(self.rounds.restarts, -1, -1):
                code = self._once(guard, variables)
                if self._ending.is_set():
                    return
                if code == 2 or not left:
                    self.failed = f"the outer server {ended(code)}"
                    self.say(self.failed)
                    return
                self.say(f"the outer server {ended(code)}; it is started again from its checkpoint")

    def _once(self, guard: Guard, variables: dict[str, str]) -> int:
        process = start(
            [sys.executable, "-m", *MODULE, str(self.run)],
            guard,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._process = process
        if self._ending.is_set():
            process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.say(f"outer server: {printable(line.decode(errors='replace').rstrip())}")
        code = process.wait()
        finish(process, guard)
        return code

    def _read_token(self) -> str:
        if self.token_file is None:
            return secrets.token_hex(16)
        path = Path(self.token_file)
        if not path.exists():
            draft = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(draft, "w") as stream:
                stream.write(secrets.token_hex(16) + "\n")
        token = path.read_text().strip()
        if len(token) < LEAST_TOKEN:
            raise ArgumentError(f"token_file {path} has no token of at least {LEAST_TOKEN} letters")
        return token


def _require_free(host: str, port: int) -> None:
    """Refuses an address at which the server cannot listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise LaunchError(
            f"the outer server cannot listen at {host}:{port}: {error.strerror or error}"
        ) from error


# --------------------------------------------------------------------------------------------------
# Islands as processes of this machine, with their outer server: one command.
#
# Each island is a job of its own, started again by itself; the others go on. Islands elsewhere
# come by hand, with the variables of `shardlib.islands.servers.joining`.

#: Seconds between two looks, and seconds that islands have to end.
LOOK_SECONDS, STOP_SECONDS = 0.05, 120.0


@dataclass(frozen=True, kw_only=True)
class LocalIslands:
    """Islands of this machine.

    Attributes:
        command: words of the program of each.
        here: how many of the islands are on this machine: those with the first numbers.
        devices: CPU devices that each simulates; None for the devices that there are.
        restarts: how often each may be started again.
        variables: of each process, beside those of this one.
        link: that is emulated between each island and the server; None for none.

    Raises:
        LaunchError: what cannot be launched, all of it listed.
    """

    command: tuple[str, ...]
    here: int
    devices: int | None = None
    restarts: int = 0
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    link: Link | None = None

    def __post_init__(self) -> None:
        failures: list[str] = []
        if not self.command:
            failures.append("there is no command; after -- stands what to run: -- python train.py")
        if self.here < 1:
            failures.append(f"islands here are {self.here}; they are at least 1")
        if self.here > 1 and self.devices is None:
            failures.append(
                f"{self.here} islands of this machine would share its devices; let each simulate"
                " some (--devices-per-process 2), or one be here (--islands-here 1) and the others"
                " elsewhere"
            )
        if failures:
            raise_all(LaunchError, "these islands cannot be launched", failures)


def launch_islands(local: LocalIslands, server: OuterServer, lines: Lines | None = None) -> int:
    """Runs islands until they are done, and gives one exit code."""
    if local.here > server.islands:
        raise LaunchError(f"{local.here} islands are to be here, and there are {server.islands}")
    shown = lines or Lines(local.here)
    server.say = shown.say
    with contextlib.ExitStack() as stack, stop_requests() as stop, server:
        if server.islands > local.here or server.token_file is not None:
            shown.say(_by_hand(local, server))
        ports: list[int] = []
        for _ in range(local.here):
            assert server.port is not None
            relay = None if local.link is None else Relay(port=server.port, link=local.link)
            ports.append(server.port if relay is None else stack.enter_context(relay).at)
        return _Running(local, server, shown, ports).run(stop)


class _Running:
    """Processes of islands, until the last has ended."""

    def __init__(
        self, local: LocalIslands, server: OuterServer, lines: Lines, ports: Sequence[int]
    ) -> None:
        self.local, self.server, self.lines, self.ports = local, server, lines, ports
        self.left = [local.restarts] * local.here
        self.code = 0

    def run(self, stop: StopRequest) -> int:
        """Starts all, and waits."""
        self.running = {number: self._started(number) for number in range(self.local.here)}
        until: float | None = None
        try:
            while self.running:
                for number in list(self.running):
                    self._look(number, bool(stop))
                if stop and until is None:
                    self.lines.say(f"{stop.reason}: islands are asked to stop")
                    until = time.monotonic() + STOP_SECONDS
                    for island in self.running.values():
                        island.send(signal.SIGTERM)
                if until is not None and time.monotonic() > until:
                    break
        finally:
            for island in self.running.values():
                island.close()
        return STOPPED if stop else self.code

    def _look(self, number: int, stopping: bool) -> None:
        end = self.running[number].next_end(LOOK_SECONDS / self.local.here)
        if end is None:
            return
        self.running.pop(number).close()
        if end.code == 0 or stopping:
            return
        message = f"island {number} {ended(end.code)}"
        if self.left[number]:
            self.left[number] -= 1
            self.lines.say(f"{message}; it is started again")
            self.running[number] = self._started(number)
            return
        self.lines.say(f"{message}; the others go on")
        self.code = self.code or (end.code if end.code > 0 else 128 - end.code)

    def _started(self, number: int) -> Processes:
        place = replace(self.server.place(number), port=self.ports[number]).environment()
        variables = environment(self.local.devices, {**self.local.variables, **place})
        return Processes(self.local.command, [variables], self.lines, first=number)


def _by_hand(local: LocalIslands, server: OuterServer) -> str:
    """Describes the start of islands elsewhere; the token is in a file."""
    place = server.place(local.here).environment()
    words = [f"{name}={place[name]}" for name in place if name != "SHARDLIB_MEETING_TOKEN"]
    words = [word if not word.startswith(ISLAND) else f"{ISLAND}=N" for word in words]
    file = server.token_file or "FILE"
    return f"islands elsewhere: {' '.join(words)} SHARDLIB_MEETING_TOKEN_FILE={file}"
