"""Workers and servers as processes of this machine, over its loopback address."""

from __future__ import annotations

import secrets
import time

from shardlib.launching.addresses import LOOPBACK
from shardlib.servers.asked import Asked
from shardlib.servers.crew import Crew, environment
from shardlib.servers.result import Trained
from shardlib.servers.server import process as server_process
from shardlib.servers.server.process import SECRET
from shardlib.servers.wire.connection import Connection, address_file, listed
from shardlib.servers.wire.messages import STARTER
from shardlib.servers.worker import process as worker_process


def run(request: Asked) -> Trained:
    """Runs it to its end."""
    secret, began, logs = secrets.token_hex(16), time.monotonic(), request.logs()
    servers, workers = range(request.exchange.servers), range(request.exchange.workers)
    for server in servers:
        address_file(request.folder, server).unlink(missing_ok=True)
    crew = Crew(
        folder=request.folder,
        servers=[_server(request, server, secret) for server in servers],
        workers=[_worker(request, worker, secret) for worker in workers],
        restarts=request.upkeep.restarts,
        say=request.say,
    )
    try:
        crew.run()
        links = [
            Connection(
                where=listed(request.folder, server),
                server=server,
                worker=STARTER,
                secret=secret,
                patience_s=request.upkeep.patience_s,
                meanwhile=crew.look_after_servers,
            )
            for server in servers
        ]
        trained = request.collected(links, logs, crew.events, time.monotonic() - began)
        for link in links:
            link.close()
        crew.end_servers()
        return trained
    except KeyboardInterrupt:
        crew.end_servers()  # which save first
        raise
    finally:
        crew.close()


def _server(request: Asked, server: int, secret: str) -> dict[str, str]:
    settings = request.server(server, LOOPBACK).to_json()
    return environment(None, {SECRET: secret, server_process.SETTINGS: settings})


def _worker(request: Asked, worker: int, secret: str) -> dict[str, str]:
    settings = request.worker(worker).to_json()
    return environment(request.devices, {SECRET: secret, worker_process.SETTINGS: settings})
