"""Addresses and free ports of this machine."""

from __future__ import annotations

import socket

from shardlib.errors import LaunchError

LOOPBACK = "127.0.0.1"


def free_port(address: str) -> int:
    """A port of an address of this machine at which nobody listens."""
    try:
        info = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(info[0], socket.SOCK_STREAM) as listener:
            listener.bind(info[4])
            return listener.getsockname()[1]
    except OSError as error:
        raise LaunchError(
            f"{address} is no address of this machine: {error.strerror or error}\nTry: 127.0.0.1,"
            f" or the name of an interface: {', '.join(name for _, name in socket.if_nameindex())}"
        ) from error


def address_of(interface: str) -> str:
    """The IPv4 address of an interface of this machine; an address or a host's name is passed on."""
    if interface not in [name for _, name in socket.if_nameindex()]:
        return interface
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(
                probe.fileno(), 0x8915, struct.pack("256s", interface.encode())
            )  # SIOCGIFADDR, netdevice(7)
        except OSError as error:
            raise LaunchError(
                f"the interface {interface} has no IPv4 address: {error.strerror}\nTry: --interface"
                " ADDRESS"
            ) from error
    return socket.inet_ntoa(answer[20:24])
