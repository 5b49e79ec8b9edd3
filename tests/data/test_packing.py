from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from shardlib.data import batches
from shardlib.data.batches import WRITTEN, best_fit, cut, first_fit, shuffled, shuffled_indices
from shardlib.data.open import read


def brute_first(lengths: list[int], room: int) -> list[int]:
    left, rows = [], []
    for length in lengths:
        row = next((n for n, free in enumerate(left) if free >= length), len(left))
        if row == len(left):
            left.append(room)
        left[row] -= length
        rows.append(row)
    return rows


def brute_best(lengths: list[int], room: int) -> list[int]:
    """How much room was left in the row that each piece was put into, in the order of placing; rows
    with equal room are alike.
    """
    left, taken = [], []
    for length in sorted(lengths, reverse=True):
        fitting = [n for n, free in enumerate(left) if free >= length]
        row = min(fitting, key=lambda n: left[n], default=len(left))
        if row == len(left):
            left.append(room)
        taken.append(left[row])
        left[row] -= length
    return taken


@pytest.mark.parametrize("seed", range(5))
def test_first_fit(seed: int):
    lengths = np.random.default_rng(seed).integers(1, 17, 200)
    assert first_fit(lengths, 16).tolist() == brute_first(lengths.tolist(), 16)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit(seed: int):
    lengths = np.random.default_rng(seed).integers(1, 17, 200)
    rows = best_fit(lengths, 16)
    left, taken = [16] * 200, []
    for number in np.argsort(-lengths, kind="stable"):
        taken.append(left[rows[number]])
        left[rows[number]] -= lengths[number]
    assert (
        taken == brute_best(lengths.tolist(), 16)
        and min(left) >= 0
        and sorted(set(rows.tolist())) == list(range(rows.max() + 1))
    )


def test_documents_are_cut_in_pieces_that_overlap_by_a_target():
    documents, starts, lengths = cut(np.array([0, 1, 2, 9, 10, 5]), 4)
    assert list(zip(documents.tolist(), starts.tolist(), lengths.tolist(), strict=True)) == [
        (2, 0, 1),
        (3, 0, 4),
        (3, 4, 4),
        (4, 0, 4),
        (4, 4, 4),
        (4, 8, 1),
        (5, 0, 4),
    ]


@pytest.mark.parametrize("count", [1, 2, 7, 1000, WRITTEN, WRITTEN + 1, 70_000])
def test_orders_are_permutations(count: int):
    found = shuffled_indices(np.arange(count), count, 3, 1).tolist()
    assert sorted(found) == sorted(shuffled(count, 3, 1).tolist()) == list(range(count))
    assert count < 7 or abs(np.corrcoef(found, np.arange(count))[0, 1]) < max(4 / count**0.5, 0.02)


def test_the_order_of_documents_is_that_of_their_hashes():
    def mixed(word: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = (word ^ word >> shift) * factor % 2**64
        return word ^ word >> 31

    begin = int.from_bytes(hashlib.blake2b(b"5 2", digest_size=8).digest(), "little")
    keys = [mixed((number * 0x9E3779B97F4A7C15 + begin) % 2**64) for number in range(50)]
    assert shuffled(50, 5, 2).tolist() == sorted(range(50), key=keys.__getitem__)
    assert (
        len({tuple(shuffled(20, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)})
        == 9
    )


def test_orders_of_very_many_numbers_stay_in_range():
    count = 3 * 2**40 + 5
    found = shuffled_indices(np.arange(2000), count, 0, 0).tolist()
    assert len(set(found)) == 2000 and max(found) < count and max(found) > count * 0.99


def test_rows_are_kept_and_made_again_where_they_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    np.save(tmp_path / "tokens.npy", np.arange(600, dtype=np.int32).reshape(60, 10))
    monkeypatch.setattr(batches, "KEPT", 10)
    packed = list[int]()
    monkeypatch.setattr(
        batches,
        "PACKERS",
        {
            **batches.PACKERS,
            "first-fit": lambda lengths, room: (packed.append(room), first_fit(lengths, room))[1],
        },
    )

    def rows() -> list[list[int]]:
        data = read(tmp_path / "tokens.npy", seq=16, packing="first-fit", cache=tmp_path / "cache")
        return data.batch(0, data.examples_per_epoch)["inputs"].tolist()

    first = rows()
    (path,) = (tmp_path / "cache").iterdir()
    assert rows() == first and len(packed) == 1
    data = path.read_bytes()
    path.write_bytes(data[:300] + bytes([data[300] ^ 1]) + data[301:])
    assert rows() == first and len(packed) == 2 and path.read_bytes() == data
    path.write_bytes(data[:300])
    assert rows() == first and len(packed) == 3
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("no folder")
    assert rows() == first and len(packed) == 4
