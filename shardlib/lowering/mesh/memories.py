"""Memories of host and device, of values inside of a program."""

from __future__ import annotations

import jax

from shardlib.jax_types import Value

#: Memory of the host that devices read and write by themselves.
HOST = "pinned_host"


def in_host_memory(value: Value) -> bool:
    """Whether a value is in memory of the host."""
    return jax.typeof(value).memory_space == jax.memory.Space.Host


def to_host_memory(value: Value) -> Value:
    """The same value in memory of the host."""
    return jax.device_put(value, jax.memory.Space.Host)
