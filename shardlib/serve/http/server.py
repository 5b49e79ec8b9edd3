"""The process that serves: connections, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardlib.errors import LaunchError
from shardlib.serve.http.settings import Settings

#: Bytes that wait in the system for the reader of a connection, about.
SEND_BYTES = 1 << 17
#: Open files of the process that are not connections, at most.
OTHER_FILES = 512


class _Connections:
    """Connections of a server: strangers, and those that have shown a token.

    Strangers have places of their own. Where they are taken, in all or for one address, the first
    stranger of the address that has the most is cut off.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._strangers: dict[H11Protocol, str] = {}  # address by connection, the first in front
        self._known: set[H11Protocol] = set()

    def came(self, connection: H11Protocol) -> None:
        """A connection is there."""
        address = connection.client[0] if connection.client else ""
        self._strangers[connection] = address
        counts = Counter(self._strangers.values())
        if counts[address] > self._settings.strangers_per_address:
            self._cut_off(address)
        elif len(self._strangers) > self._settings.strangers:
            self._cut_off(counts.most_common(1)[0][0])

    def shown(self, connection: H11Protocol) -> bool:
        """A connection has shown a token; whether there is a place for it."""
        if connection not in self._known and len(self._known) >= self._settings.connections:
            return False
        self._strangers.pop(connection, None)
        self._known.add(connection)
        return True

    def gone(self, connection: H11Protocol) -> None:
        """A connection has ended."""
        self._strangers.pop(connection, None)
        self._known.discard(connection)

    def _cut_off(self, address: str) -> None:
        first = next(connection for connection, peer in self._strangers.items() if peer == address)
        del self._strangers[first]
        first.transport.abort()


def protocol(settings: Settings) -> type[H11Protocol]:
    """Returns the protocol class that handles connections: as uvicorn does, within limits; who
    sends no head in time is cut off.
    """
    connections = _Connections(settings)

    class Limited(H11Protocol):
        def __init__(self, config: uvicorn.Config, *arguments: object, **named: object) -> None:
            super().__init__(config, *arguments, **named)  # type: ignore[arg-type]
            self.app_state = {
                **self.app_state,
                "abort": lambda: self.transport.abort(),
                "shown": lambda: connections.shown(self),
            }
            self._seen = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            connections.came(self)
            self._expect(0)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.gone(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._seen += 1
            elif before is not None and before.response_complete:
                self._expect(self._seen)  # the head of the next request has begun

        def _expect(self, seen: int) -> None:
            def check() -> None:
                if self._seen == seen:
                    self.transport.abort()

            self.loop.call_later(settings.head_seconds, check)

    return Limited


class _Server(uvicorn.Server):
    """One that ends in order when it is asked to, rather than of the signal that asked."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, number)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        listening.bind(address)
    except (OSError, OverflowError) as error:
        raise LaunchError(
            f"{host}:{port} cannot be listened at ({error})\nTry: --port 0 for any that is free"
        ) from error
    return listening


def run(
    app: FastAPI,
    settings: Settings,
    listening: socket.socket,
    *,
    ready: Callable[[], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; answers that have begun may end then, and no others begin. A
    second SIGINT ends it at once.
    """
    files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = settings.connections + settings.strangers + OTHER_FILES
    if files < required:
        files = required if hard_limit == resource.RLIM_INFINITY else min(required, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard_limit))
    _server(app, settings, ready or (lambda: None)).run(sockets=[listening])


@contextlib.contextmanager
def serving(
    app: FastAPI, settings: Settings | None = None, *, host: str = "127.0.0.1", port: int = 0
) -> Iterator[str]:
    """Serves in a thread until the end of the block, and gives the address."""
    started = threading.Event()
    with listen(host, port) as listening:
        server = _server(app, settings or Settings(), started.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]), name="server")
        thread.start()
        while not started.wait(0.1):
            if not thread.is_alive():
                raise LaunchError("the server has not started")
        try:
            yield f"http://{host}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def _server(app: FastAPI, settings: Settings, ready: Callable[[], None]) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=protocol(settings),
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(max(1, settings.drain_seconds)),
    )
    server = _Server(config)
    startup = server.startup

    async def started(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets)
        if server.started:
            ready()

    server.startup = started
    return server
