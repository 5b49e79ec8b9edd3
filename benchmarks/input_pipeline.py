"""Share of a step's time that it waits for data, and tokens a second that can be read.

    python -m benchmarks input_pipeline [--tokens 200000000] [--step 0.25] [--steps 40] [--out FILE]

Tokens of random documents (uint16, lengths geometric with a mean of 600) are written to a folder
that is removed afterwards. Measured are reading batches on the host, on eight simulated devices
with nothing else to do, and beside steps that take `--step` seconds each and leave the host alone,
as those of an accelerator do; the last also for a source that answers every read of a batch after
`--latency` seconds. First batches, which nothing can be done beside, are reported apart. Text is
tokenised to bytes, and files are read through a cache.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import command_line, simulate_devices, write

simulate_devices(8)

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.data.batches import Loader, TokenDataset
from shardlib.data.open import read
from shardlib.data.sources import cached
from shardlib.data.tokens import ByteTokenizer

#: Token that ends a document.
END = 0


class Slow:
    """A dataset that is as far away as some latency."""

    def __init__(self, data: TokenDataset, latency: float) -> None:
        self.fields, self.seq, self._data, self._latency = data.fields, data.seq, data, latency

    def rows(self, position: int, rows: Sequence[int] | np.ndarray) -> Mapping[str, np.ndarray]:
        """See `TokenDataset`."""
        time.sleep(self._latency)
        return self._data.rows(position, rows)


def write_tokens(folder: Path, count: int) -> None:
    """Four files of tokens, documents ended by `END`."""
    generator = np.random.default_rng(0)
    for number in range(4):
        tokens = generator.integers(1, 50_000, count // 4).astype(np.uint16)
        tokens[np.cumsum(generator.geometric(1 / 600, count // 2400)) % len(tokens)] = END
        np.save(folder / f"{number}.npy", tokens)


def abstract(batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch cut by sequences and by tokens."""
    sharding = NamedSharding(
        Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "context")),
        PartitionSpec("data", "context"),
    )
    return {
        name: jax.ShapeDtypeStruct((batch, seq), np.int32, sharding=sharding)
        for name in ("inputs", "targets")
    }


def on_host(data: TokenDataset, batch: int, batches: int = 8) -> dict[str, float]:
    """Tokens a second of one thread that does nothing else."""
    begin = time.perf_counter()
    first = time.perf_counter() - begin if data.batch(0, 1) else 0.0
    begin = time.perf_counter()
    for step in range(batches):
        data.batch(step * batch, batch)
    return {
        "first_row_seconds": first,
        "tokens_per_second": batches * batch * data.seq / (time.perf_counter() - begin),
    }


def beside_steps(
    data: Any, args: argparse.Namespace, step_seconds: float, ahead: int
) -> dict[str, float]:
    """What steps wait, and tokens a second of all that happens."""
    with Loader(data, abstract(args.batch, args.seq), stop=args.steps, ahead=ahead) as loader:
        next(loader)
        first, begin = loader.waited_seconds, time.perf_counter()
        for _ in loader:
            time.sleep(step_seconds)
        seconds = time.perf_counter() - begin
    waited = loader.waited_seconds - first
    return {
        "ahead": ahead,
        "step_seconds": step_seconds,
        "first_batch_seconds": first,
        "waited_seconds_a_step": waited / (args.steps - 1),
        "waited_share": waited / seconds,
        "tokens_per_second": (args.steps - 1) * args.batch * args.seq / seconds,
    }


def tokenising(cache: Path) -> dict[str, float]:
    """Bytes of text a second, written to a store and found again."""
    begin = time.perf_counter()
    data = read(seq=512, cache=cache)
    built, begin = time.perf_counter() - begin, time.perf_counter()
    read(seq=512, cache=cache)
    size = data.examples_per_epoch * 512
    return {
        "megabytes": size / 1e6,
        "megabytes_per_second": size / 1e6 / built,
        "opening_seconds": time.perf_counter() - begin,
    }


def through_cache(folder: Path, cache: Path) -> dict[str, float]:
    """Seconds of fetching all files, and of opening them again."""
    seconds = list[float]()
    for _ in range(2):
        begin, files = time.perf_counter(), cached(folder, cache, limit_bytes=10**12)
        size = sum(files.path(info.name).stat().st_size for info in files.listing())
        seconds.append(time.perf_counter() - begin)
    return {
        "megabytes": size / 1e6,
        "fetching_megabytes_per_second": size / 1e6 / seconds[0],
        "checking_megabytes_per_second": size / 1e6 / seconds[1],
    }


def main() -> None:
    parser = command_line(__doc__, "input_pipeline.json")
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--step", type=float, default=0.25)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--latency", type=float, default=0.4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens, cache = Path(folder) / "tokens", Path(folder) / "cache"
        tokens.mkdir()
        write_tokens(tokens, args.tokens)
        begin = time.perf_counter()
        tokenizer = ByteTokenizer(vocab_size=50_000, end=END)
        opened = functools.partial(read, tokens, seq=args.seq, tokenizer=tokenizer)
        data = opened()
        opening = time.perf_counter() - begin
        segments = opened(segments=True)
        begin = time.perf_counter()
        packed = opened(packing="best-fit", cache=cache)
        packing = time.perf_counter() - begin
        found = {
            "tokens": args.tokens,
            "batch": [args.batch, args.seq],
            "opening_seconds": opening,
            "best_fit_opening_seconds": packing,
            "host": {
                "concatenate": on_host(data, args.batch),
                "concatenate, segments": on_host(segments, args.batch),
                "best-fit": on_host(packed, args.batch),
            },
            "nothing else to do": beside_steps(data, args, 0.0, 2),
            "beside steps": beside_steps(data, args, args.step, 2),
            "beside steps, slow source": {
                "latency_seconds": args.latency,
                **beside_steps(Slow(data, args.latency), args, args.step, 4),
            },
            "tokenising": tokenising(cache),
            "cache": through_cache(tokens, Path(folder) / "copies"),
        }
    write(args.out, found)
