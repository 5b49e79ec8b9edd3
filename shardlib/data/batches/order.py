"""The order in which examples and documents come: permutations that depend on the seed and the
epoch alone.

Grain's own shuffle of indices (0.2.18) is not used: of 65,537 numbers, and of every other 4**k + 1
from there on, it gives one twice and one never; it knows no numbers beyond 32 bits; and its seed +
epoch makes epoch 1 of seed 0 the same as epoch 0 of seed 1.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

#: Orders of at most so many numbers are written down.
WRITTEN = 1 << 16
_ROUNDS = 6
#: SplitMix64: the step of its counter, and shifts and factors of its hash.
_STEP, _MIX, _LAST = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31


def shuffled_indices(indices: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where some positions of an epoch lead, in a permutation of `count` numbers: int64, of the
    same shape.

    That of many numbers is never written down: a Feistel network permutes the next power of four,
    and is walked until it is back in range (Black and Rogaway, "Ciphers with arbitrary finite
    domains").
    """
    if count <= WRITTEN:
        return _written(count, seed, epoch)[indices]
    half = np.uint64((count - 1).bit_length() + 1 >> 1)
    permuted = np.asarray(indices).astype(np.uint64)
    walking = np.ones(permuted.shape, bool)
    while walking.any():
        permuted[walking] = _permuted(permuted[walking], half, _keys(seed, epoch))
        walking = permuted >= count
    return permuted.astype(np.int64)


def _permuted(words: np.ndarray, half: np.uint64, keys: tuple[int, ...]) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = words >> half, words & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right * np.uint64(_STEP) + np.uint64(key)) & mask)
    return left << half | right


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `count` numbers as an array, int64 [count]: they are sorted by a hash of
    them, which does not change with versions of NumPy.
    """
    return np.argsort(
        _mixed(
            np.arange(count, dtype=np.uint64) * np.uint64(_STEP)
            + np.uint64(_begin(f"{seed} {epoch}"))
        ),
        kind="stable",
    )


@functools.lru_cache(maxsize=16)
def _written(count: int, seed: int, epoch: int) -> np.ndarray:
    return shuffled(count, seed, epoch)


@functools.lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(_begin(f"{seed} {epoch} {number}") for number in range(_ROUNDS))


def _begin(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(words: np.ndarray) -> np.ndarray:
    """SplitMix64's hash of words, uint64."""
    for shift, factor in _MIX:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(_LAST))
