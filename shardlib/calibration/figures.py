"""What is measured of simulated devices, by name, and the cache that keeps it.

Figures are per device, with all devices at work.

>>> [name for name in figure_names(4) if name.startswith("all-reduce")]
['all-reduce.2.s', 'all-reduce.2.s_per_byte', 'all-reduce.4.s', 'all-reduce.4.s_per_byte']
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import platformdirs

from shardlib.calibration.stopwatch import cores
from shardlib.collective import KINDS
from shardlib.errors import MissingFileError, TopologyError
from shardlib.hardware.chip import LARGEST
from shardlib.untrusted import Limits, read_json

#: Version of the cached figures; a change of the method makes old files stale.
FORMAT = 5
#: Files of the cache are short.
CACHED = Limits(bytes=1 << 16, depth=4)
#: Rates and times of kernels: what large matmuls and convolutions reach, forward and backward, and
#: the depth of a matmul that takes as long as starting one of its blocks; the share of the former
#: that many small matmuls of one kernel reach; how many times as fast as one core a device is;
#: bytes that element-wise ops move, elements that they compute; bytes of memory that nobody has
#: touched before, of an optimizer's update, and of gathers and scatters of rows; fixed seconds of
#: an op and of a program; and how many times as fast a device is while the others idle.
KERNELS: tuple[str, ...] = (
    "float32_flops_per_s",
    "bfloat16_flops_per_s",
    "matmul_start",
    "batched",
    "cores",
    "convolution_flops_per_s",
    "memory_bytes_per_s",
    "elements_per_s",
    "transcendental_per_s",
    "fresh_bytes_per_s",
    "optimizer_bytes_per_s",
    "gather_bytes_per_s",
    "launch_s",
    "step_s",
    "alone",
)


def measured_ways(devices: int) -> tuple[int, ...]:
    """Participants of the collectives that are measured: two and all; those between lie between.

    >>> measured_ways(1), measured_ways(2), measured_ways(8), measured_ways(6), measured_ways(3)
    ((), (2,), (2, 8), (2, 6), (3,))
    """
    return tuple(dict.fromkeys(n for n in (2, devices) if n > 1 and devices % n == 0))


def exchange_names(kind: str, degree: int) -> tuple[str, str]:
    """Names of the figures of a collective: seconds of the smallest, and of each byte of the full
    array.

    >>> exchange_names("all-gather", 8)
    ('all-gather.8.s', 'all-gather.8.s_per_byte')
    """
    return f"{kind}.{degree}.s", f"{kind}.{degree}.s_per_byte"


def figure_names(local: int) -> tuple[str, ...]:
    """Names of all figures of so many devices."""
    return KERNELS + tuple(
        name
        for kind in KINDS
        for degree in measured_ways(local)
        for name in exchange_names(kind, degree)
    )


def cache_path(devices: int, local: int) -> Path:
    """The file that keeps the figures of `devices` devices measured on `local` ones."""
    folder = os.environ.get("SHARDLIB_CACHE_DIR") or platformdirs.user_cache_dir(
        "shardlib", appauthor=False
    )
    key = [FORMAT, cpu_model(), cores(), jax.__version__, devices, local]
    return Path(folder) / f"cpu-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"


def cpu_model() -> str:
    """The processor, as the system names it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def read_figures(path: Path, local: int) -> dict[str, float] | None:
    """The figures of a cache file; None when there is none, or none that a run could have
    written.
    """
    try:
        figures = read_json(path, "measured figures", TopologyError, limits=CACHED)
    except (MissingFileError, TopologyError):
        return None
    if not isinstance(figures, dict):
        return None
    stored, names = cast("dict[str, Any]", figures), figure_names(local)
    values = {
        name: float(value)
        for name in names
        if isinstance(value := stored.get(name), int | float)
        and not isinstance(value, bool)
        and 0 < value < LARGEST
    }
    return values if len(values) == len(names) else None


def write_figures(path: Path, figures: Mapping[str, float]) -> None:
    """Writes a cache file; where that is not possible, nothing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(
            json.dumps({**figures, "cpu": cpu_model(), "jax": jax.__version__}, indent=1),
            encoding="utf-8",
        )
        draft.replace(path)  # another process never reads half a file
