"""The process of the outer server: started, watched, started again at its checkpoint."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardlib.errors import ArgumentError, LaunchError, raise_all
from shardlib.exchanges.checks import whole
from shardlib.launching.addresses import LOOPBACK, free_port
from shardlib.processes.lifetime.kin import Guard, finish, start
from shardlib.servers.crew import END_SECONDS, ended, environment
from shardlib.servers.islands.place import LEAST_TOKEN, MeetingPlace
from shardlib.servers.rounds.process import SETTINGS, TOKEN, ServerSettings
from shardlib.servers.rounds.settings import Rounds
from shardlib.servers.wire.connection import Connection
from shardlib.servers.wire.messages import STARTER, Ask
from shardlib.untrusted import printable
from shardlib.untrusted.json_types import JsonObject

#: Of this module, in a process.
MODULE = "shardlib.servers.rounds.process"


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
        if self.port is not None and whole("port", self.port, 1) + (
            [] if self.port < 1 << 16 else ["x"]
        ):
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
        """Where an island meets the others."""
        assert self.port is not None
        return MeetingPlace(host=self.host, port=self.port, island=island, token=self._token)

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def report(self) -> JsonObject:
        """What the server has to tell: the open round, islands in it, events."""
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
        """Has the server save and end."""
        self._ending.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        self._watch.join(END_SECONDS)
        self._stack.close()

    def _watched(self) -> None:
        """Starts the server as often as it may be: in one thread, with which it would end."""
        assert self.run is not None and self.port is not None
        settings = ServerSettings(
            islands=self.islands, rounds=self.rounds, host=self.host, port=self.port
        )
        variables = environment(None, {SETTINGS: settings.to_json(), TOKEN: self._token})
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
            [sys.executable, "-m", MODULE, str(self.run)],
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
