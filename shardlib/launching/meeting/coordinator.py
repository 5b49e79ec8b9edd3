"""The address of the coordinator: a numeric one of this host, and whether anybody listens there."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time

from shardlib.errors import LaunchError
from shardlib.processes.place import Place, split_address

#: Seconds that somebody who has connected may take to say a line.
SPEAK_SECONDS = 10.0


def address_here(place: Place) -> str:
    """The numeric address of the coordinator, which is to be on this host."""
    host, _ = split_address(place.coordinator)
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise LaunchError(
            f"the host of the coordinator {place.coordinator} is not known here:"
            f" {error.strerror or error}\nTry: the numeric address of the host of process 0"
        ) from error
    if place.hosts_differ and ipaddress.ip_address(str(resolved).partition("%")[0]).is_loopback:
        raise LaunchError(
            f"the coordinator is to listen at {place.coordinator}, which is {resolved}: only"
            f" processes of its own host reach it, and {place.processes - place.host_processes} of"
            f" {place.processes} are on others\nTry: SHARDLIB_COORDINATOR=HOST:PORT with an address"
            " of the network that the hosts share"
        )
    return str(resolved)


def wait_for_listener(place: Place, seconds: float = SPEAK_SECONDS) -> None:
    """Waits until somebody listens at the address of the coordinator, or the time is over. Who
    comes to JAX's service before it listens waits for a whole second before it tries again.

    Args:
        seconds: how long to wait at most.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(split_address(place.coordinator), timeout=seconds),
        ):
            return
        time.sleep(0.01)
