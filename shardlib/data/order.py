"""In which order do examples and documents come? Permutations that depend on the seed and the epoch alone."""

from __future__ import annotations

import hashlib

import numpy as np

#: Examples that an epoch can have; Grain's shuffle knows no larger numbers.
MOST = 2**32


def shuffled_index(index: int, count: int, seed: int, epoch: int) -> int:
    """Where position `index` of an epoch leads, in a permutation of `count` numbers that is never written down.

    The permutation is Grain's: a block cipher of 32 bits, walked until it is in range.
    """
    from grain.experimental import index_shuffle  # Grain is slow to import

    assert count <= MOST, count
    return index_shuffle(index, max_index=count - 1, seed=_mixed(seed, epoch), rounds=4)


def _mixed(seed: int, epoch: int) -> int:
    """A seed of 32 bits; those of Grain's own pipelines, seed + epoch, are the same for seed 0 in epoch 1 and for seed 1 in epoch 0."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest(), "little")


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `count` numbers as an array, int64 [count].

    Numbers are sorted by a hash of them (SplitMix64's), which does not change with versions of NumPy.
    """
    begin = int.from_bytes(hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        keys = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(begin)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            keys = (keys ^ (keys >> np.uint64(shift))) * np.uint64(factor)
        keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable")


def fingerprint() -> str:
    """Changes where another version of Grain shuffles otherwise: a run could not go on as it began."""
    return ",".join(str(shuffled_index(index, 1 << 20, 0, 0)) for index in range(4))
