"""Shared by benchmarks: command line, tables of cases, stored results, alternating calls.

A benchmark is run from the root of the repository, `python -m benchmarks.NAME`; `--help` prints what
it measures, and its result is JSON in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = ROOT / "benchmarks" / "tables"


def command_line(
    doc: str | None, out: str = "", *, optional: bool = False
) -> argparse.ArgumentParser:
    """A parser whose help is the text at the beginning of a script, with `--out` for the JSON where
    `out` names its file in `RESULTS`; `*` in it becomes the version of JAX. Optional results are
    stored where `--out` is given.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if out:
        path = RESULTS / out.replace("*", metadata.version("jax"))
        default = {"nargs": "?", "const": path} if optional else {"default": path}
        parser.add_argument("--out", type=Path, help="the JSON", **default)
    return parser


def table(name: str) -> Any:
    """The data of `tables/NAME.yaml`."""
    import yaml

    return yaml.safe_load((TABLES / f"{name}.yaml").read_text())


def card(name: str) -> Any:
    """The configuration of `models/NAME.toml`."""
    from shardlib.models import presets

    return presets.read(ROOT / "benchmarks" / "models" / f"{name}.toml")


def stored(path: Path, key: str = "", default: Any = None) -> Any:
    """An entry of a result, or all of it; `default`, or {}, where there is no file."""
    if not path.exists():
        return {} if default is None else default
    result = json.loads(path.read_text())
    return result[key] if key else result


def simulate_devices(count: int) -> None:
    """Makes JAX see `count` CPU devices; call before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    os.environ.pop("XLA_FLAGS", None)


def missing(
    cases: Iterable[tuple[str, Any]],
    rows: Mapping[str, Mapping[str, Any]],
    source: str,
    *,
    redo: bool = False,
    seconds: float = float("inf"),
) -> Iterator[tuple[str, Any]]:
    """The cases, by name, without a row that was made from this source, as long as there is time."""
    begin = time.monotonic()
    for name, case in cases:
        if redo or rows.get(name, {}).get("source") != source:
            if time.monotonic() - begin > seconds:
                print("out of time", flush=True)
                return
            yield name, case


@contextlib.contextmanager
def serving(*words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and the process of `shardlib serve`, which is ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardlib", "serve", *words, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"].removesuffix("/v1"), process
    finally:
        process.terminate()
        process.wait(120)


class Answering:
    """A process that answers each line of its standard input with one of its standard output."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes, **options)
        self.lines = self.process.stdout or iter(())

    def ask(self, line: str = "") -> str:
        """The answer to a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return next(self.lines)

    def close(self) -> None:
        """Ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@dataclass(frozen=True)
class Timings:
    """Seconds of each call of one program, by the clock and of processors, and what it returned."""

    seconds: list[float] = field(default_factory=list[float])
    processor: list[float] = field(default_factory=list[float])
    results: list[Any] = field(default_factory=list[Any])

    def call(self, program: Callable[[], Any]) -> None:
        """Calls a program and notes how long it takes."""
        start, worked = time.perf_counter(), time.process_time()
        result = program()
        self.seconds.append(time.perf_counter() - start)
        self.processor.append(time.process_time() - worked)
        self.results.append(result)

    def summary(self) -> dict[str, float]:
        """The median and least seconds, the median seconds of processors, which other work on the
        machine changes little, and the cores that the calls kept busy.
        """
        return {
            "median_s": statistics.median(self.seconds),
            "least_s": min(self.seconds),
            "processor_s": statistics.median(self.processor),
            "cores": sum(self.processor) / sum(self.seconds),
        }


def alternate(
    programs: Mapping[str, Callable[[], Any]], repeats: int, *, warm_up: bool = True
) -> dict[str, Timings]:
    """Calls programs in turn, forth and back, so that a busy machine slows all alike; a first call
    of each, to warm up, is not counted.
    """
    if warm_up:
        for program in programs.values():
            program()
    timings = {name: Timings() for name in programs}
    for repeat in range(repeats):
        for name in list(programs) if repeat % 2 == 0 else list(programs)[::-1]:
            timings[name].call(programs[name])
    return timings


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of neighbours in time."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


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


def _figures(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _figures(inner, f"{path} {key}".strip())
    elif isinstance(value, float):
        yield f"{path} {value:.4g}"
    elif not isinstance(value, list | tuple):
        yield f"{path} {str(value)[:200]}"


def show(name: str, row: Mapping[str, Any], *keys: str) -> None:
    """Prints the figures of a row, or of some of its keys, nested ones with their path."""
    chosen = {key: row[key] for key in keys or row if key in row}
    print(f"{name}: {', '.join(_figures(chosen))}", flush=True)


def source_digest(*parts: str) -> str:
    """Twelve hexadecimal digits that change with the code of modules and folders of the package."""
    paths = [ROOT / "shardlib" / part for part in parts]
    files = sorted(
        file
        for path in paths
        for file in (path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")])
    )
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def write(path: Path, data: dict[str, Any], *, quiet: bool = False) -> None:
    """Writes a result as JSON with the environment beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment(), **data}, indent=1) + "\n")
    if not quiet:
        print(f"wrote {path}")
