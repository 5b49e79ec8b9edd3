"""A step that a peer has compiled, and its figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A step, compiled.

    Attributes:
        text: the optimised program; empty where `facts` has its figures already.
        run: does a step and gives its loss; None where the devices are not here.
        facts: plain data: seconds, sizes, FLOPs.
    """

    text: str
    run: Callable[[], float] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def built(lower: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The program of what is lowered, and the seconds that both took."""
    started = time.perf_counter()
    lowered = lower()
    middle = time.perf_counter()
    made = lowered.compile()
    return made, {
        "trace_seconds": middle - started,
        "compile_seconds": time.perf_counter() - middle,
    }


def memory_of(program: Any) -> dict[str, int]:
    """Bytes that a device needs, as the compiler says."""
    said = program.memory_analysis()
    return {
        "peak_bytes": said.peak_memory_in_bytes,
        "temporary_bytes": said.temp_size_in_bytes,
        "argument_bytes": said.argument_size_in_bytes,
    }


def tpu_devices(topology: str) -> Any:
    """Devices of a TPU that is not here, by a name such as "v5e:2x4"."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def versions(*packages: str) -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found = dict[str, str]()
    for name in ("jax", "libtpu", *packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
