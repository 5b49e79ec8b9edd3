"""Damaged and made-up files of every format that shardlib reads: mutations of a valid file.

    python -m benchmarks fuzz_files [--count 10000] [--seed 0] [--format NAME ...] [--out benchmarks/results/fuzz_files.json]

Half of the mutations are of bytes: bits flipped, stretches cut out, doubled, overwritten with
random bytes, or ends cut off. Half are of the structure of JSON and TOML: values replaced by
hostile ones (other types, huge numbers, NaN, empty, control characters, deep nesting, paths out of
the folder), keys removed, renamed, doubled.

A reader may take a file or raise a `ShardlibError`; anything else, more than `SECONDS` for one file
or more than `MEMORY` bytes above what the process had is a fault. The number that matters is
`faults`, of all formats together.
"""

from __future__ import annotations

import collections
import copy
import json
import random
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.environment import command_line, show, write
from benchmarks.fuzz_formats import FORMATS, Format
from shardlib.errors import ShardlibError

#: One file may take so long, on a loaded machine; reading all of them may add so much to the memory
#: of the process.
SECONDS, MEMORY = 20.0, 1 << 30
#: Characters of an error message, at most.
MESSAGE = 20_000
HOSTILE: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: 0,
    lambda: -1,
    lambda: 1.5,
    lambda: 10**25,
    lambda: 10**400,
    lambda: 1e308,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: "",
    lambda: "abc",
    lambda: "../../etc/passwd",
    lambda: "/dev/zero",
    lambda: "\x1b[2J\x07",
    lambda: "a\0b",
    lambda: "$(touch x)",
    lambda: "\ud800",
    lambda: "x" * 100_000,
    list,
    dict,
    lambda: [[]],
    lambda: {"a": {"b": [1]}},
    lambda: [None],
    lambda: "9" * 30,
    lambda: _deep(40),
    lambda: _deep(400),
    lambda: "<script>alert(1)</script>",
    lambda: "[red]x[/blue]",
    lambda: 2**31,
    lambda: 2**63 - 1,
    lambda: 10**12,
)


def _deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


@dataclass(kw_only=True)
class Tally:
    """What became of the files of one format."""

    files: int = 0
    taken: int = 0
    refused: int = 0
    slowest_seconds: float = 0.0
    faults: list[str] = field(default_factory=list[str])
    errors: collections.Counter[str] = field(default_factory=collections.Counter[str])

    def to_json(self) -> dict[str, Any]:
        """The tally as plain data."""
        return {
            "files": self.files,
            "taken": self.taken,
            "refused": self.refused,
            "slowest_seconds": round(self.slowest_seconds, 3),
            "faults": len(self.faults),
            "first_faults": self.faults[:5],
            "errors": dict(self.errors),
        }


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """A file with one to four wounds."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(found) + 1)
        span = rng.choice((1, 1, 1, 2, 4, 8, 64, 1024))
        kind = rng.randrange(7)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at : at + span]
        elif kind == 2:
            found[at:at] = found[at : at + span]
        elif kind == 3:
            found[at : at + span] = rng.randbytes(min(span, 64))
        elif kind == 4:
            del found[at:]
        elif kind == 5:
            found[at : at + 8] = rng.choice(
                (
                    b"\xff" * 8,
                    b"\0" * 8,
                    (1 << 62).to_bytes(8, "little"),
                    b"[" * 5000,
                    b"9" * 5000,
                    b'{"a":' * 2000,
                    b"\x1b[2J",
                )
            )
        else:
            start = min(len(found), 200)  # headers are at the beginning
            found[rng.randrange(start + 1) : start] = rng.randbytes(rng.randrange(16))
    return bytes(found)


def mutated_data(data: Any, rng: random.Random) -> Any:
    """Plain data with one to three hostile values, or keys that are missing, new or renamed."""
    found = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(found))
        if not places:
            return rng.choice(HOSTILE)()
        parent, key = rng.choice(places)
        kind = rng.randrange(10)
        if kind < 6:
            parent[key] = rng.choice(HOSTILE)()
        elif kind == 6:
            del parent[key]
        elif kind == 7 and isinstance(parent, dict):
            parent[rng.choice(("", "abc", str(key) + "s", "\x1b[31m"))] = parent.pop(key)
        elif kind == 8 and isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
        else:
            parent[key] = copy.deepcopy(_value(*rng.choice(places)))
    return found


def _value(parent: Any, key: Any) -> Any:
    try:
        return parent[key]
    except (KeyError, IndexError):
        return None


def _places(data: Any, depth: int = 20) -> Iterator[tuple[Any, Any]]:
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, one in list(items):
        yield data, key
        if depth:
            yield from _places(one, depth - 1)


def encoded(form: Format, data: Any) -> bytes | None:
    """Plain data as a file of a format; None where no such file can hold it."""
    try:
        if form.text == "toml":
            return tomli_w.dumps(data).encode("utf-8", "surrogatepass")
        return json.dumps(data).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def files(form: Format, valids: Sequence[bytes], count: int, rng: random.Random) -> Iterator[bytes]:
    """Mutations of valid files."""
    for number in range(count):
        found, valid = None, valids[number // 2 % len(valids)]
        plain = form.plain(valid) if form.plain else None
        if plain is not None and number % 2:
            found = encoded(form, mutated_data(plain, rng))
            found = form.framed(found) if found is not None and form.framed else found
        yield mutated_bytes(valid, rng) if found is None else found


def judge(read: Callable[[bytes], object], data: bytes, tally: Tally) -> None:
    """Has one file read, and writes down what became of it."""
    begin = time.monotonic()
    tally.files += 1
    try:
        read(data)
        tally.taken += 1
    except ShardlibError as error:
        tally.refused += 1
        tally.errors[type(error).__name__] += 1
        if len(str(error)) > MESSAGE:
            tally.faults.append(f"a message of {len(str(error)):,} characters: {str(error)[:100]}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        tally.faults.append(
            f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}:"
            f" {str(error)[:120]} of {data[:60]!r}..."
        )
    took = time.monotonic() - begin
    tally.slowest_seconds = max(tally.slowest_seconds, took)
    if took > SECONDS:
        tally.faults.append(f"{took:.1f} s for a file of {len(data):,} bytes")


def run(form: Format, count: int, seed: int) -> Tally:
    """Fuzzes one format."""
    rng, tally = random.Random(f"{form.name} {seed}"), Tally()
    with tempfile.TemporaryDirectory() as folder:
        valids, read = form.prepare(Path(folder))
        for valid in valids:
            read(valid)  # the valid ones are taken
        for data in files(form, valids, count, rng):
            judge(read, data, tally)
    return tally


def main() -> None:
    parser = command_line(__doc__, "fuzz_files.json")
    parser.add_argument("--count", type=int, default=10_000, help="files, of all formats together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--format",
        action="append",
        help="only this one; repeatable",
        choices=[form.name for form in FORMATS],
    )
    arguments = parser.parse_args()
    chosen = [form for form in FORMATS if not arguments.format or form.name in arguments.format]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tallies: dict[str, Tally] = {}
    for form in chosen:
        tallies[form.name] = run(form, -(-arguments.count // len(chosen)), arguments.seed)
        show(form.name, tallies[form.name].to_json())
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    write(arguments.out, summary(tallies, grown, arguments.seed))


def summary(tallies: Mapping[str, Tally], grown: int, seed: int) -> dict[str, Any]:
    """The result as plain data."""
    faults = sum(len(one.faults) for one in tallies.values()) + (grown > MEMORY)
    print(
        f"{sum(one.files for one in tallies.values()):,} files, {faults} faults,"
        f" {grown / 2**20:.0f} MiB more memory at the peak"
    )
    return {
        "faults": faults,
        "files": sum(one.files for one in tallies.values()),
        "seed": seed,
        "grown_bytes": grown,
        "formats": {name: one.to_json() for name, one in tallies.items()},
    }
