"""What benchmarks share: their command line, versions and hardware, and the folder of results."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the text at the beginning of a script."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def simulate_devices(count: int) -> None:
    """Makes JAX see `count` CPU devices; call before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    os.environ.pop("XLA_FLAGS", None)


def environment() -> dict[str, Any]:
    """Versions and hardware as plain data."""
    return {
        "versions": (
            {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
            | {"python": platform.python_version()}
        ),
        "hardware": {
            "cpu": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": platform.platform(),
        },
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def source_digest(*rooms: str) -> str:
    """Twelve hexadecimal digits that change with the code of some rooms of the package."""
    package = Path(__file__).resolve().parents[1] / "shardlib"
    files = sorted(path for room in rooms for path in (package / room).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def write(path: Path, data: dict[str, Any], *, quiet: bool = False) -> None:
    """Writes a result as JSON with the environment beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment(), **data}, indent=1) + "\n")
    if not quiet:
        print(f"wrote {path}")
