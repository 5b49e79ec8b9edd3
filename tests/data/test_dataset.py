"""Examples by position, seen through tokens that occur once."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shardlib.data import batches
from shardlib.data.batches import (
    WRITTEN,
    TokenDataset,
    best_fit,
    cut,
    first_fit,
    shuffled,
    shuffled_indices,
)
from shardlib.data.open import read
from shardlib.errors import DataError

SEQ = 8
#: Lengths of documents; a twentieth of each, rounded down, is held out.
LENGTHS = [3, 17, 40, 1, 9, 26, 8, 5, 60, 15]


def folder_of(root: Path) -> Path:
    """Documents as files; no token is there twice."""
    starts = np.cumsum(LENGTHS) - LENGTHS
    for number, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
        np.save(root / f"{number:02}.npy", np.arange(start, start + length, dtype=np.int32))
    return root


def kept() -> list[list[int]]:
    """Training documents, computed apart from the library."""
    documents, start = [], 0
    for length in LENGTHS:
        documents.append(list(range(start, start + length - length // 20)))
        start += length
    return documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_token_is_an_input_once_an_epoch_for_any_number_of_processes(
    folder: Path, processes: int
):
    data, total = read(folder, seq=SEQ), sum(map(len, kept()))
    assert total % SEQ  # windows run over the ends of epochs
    size, epochs, seen = 12, 8, Counter[int]()
    for position in range(0, epochs * data.examples_per_epoch, size):
        for rows in np.array_split(
            np.arange(size), processes
        ):  # every process reads its own part and nothing else
            seen.update(
                data.rows(position, rows[rows + position < epochs * data.examples_per_epoch])[
                    "inputs"
                ]
                .reshape(-1)
                .tolist()
            )
    inputs = epochs * data.examples_per_epoch * SEQ
    assert seen.total() == inputs and set(seen) == {
        token for document in kept() for token in document
    }
    assert set(seen.values()) <= {inputs // total, inputs // total + 1}


def test_windows_follow_each_other_in_a_concatenation_of_whole_documents(folder: Path):
    data, documents = read(folder, seq=SEQ), kept()
    found = data.batch(0, 3 * data.examples_per_epoch)
    windows = np.hstack([found["inputs"], found["targets"][:, -1:]]).tolist()
    assert all(
        found["inputs"][n, 1:].tolist() == found["targets"][n, :-1].tolist()
        for n in range(len(windows))
    )
    for turn in range(3):
        of_turn = windows[turn * data.examples_per_epoch : (turn + 1) * data.examples_per_epoch]
        assert len({tuple(window) for window in of_turn}) == data.examples_per_epoch
    after = {
        documents[n][i]: documents[n][i + 1]
        for n in range(len(documents))
        for i in range(len(documents[n]) - 1)
    }
    firsts = {document[0] for document in documents if document}
    for window in windows:
        for token, following in itertools.pairwise(window):
            assert following == after[token] if token in after else following in firsts


def test_epochs_and_seeds_have_orders_of_their_own(folder: Path):
    data, other = read(folder, seq=SEQ, seed=0), read(folder, seq=SEQ, seed=1)
    count = data.examples_per_epoch
    orders = [
        tuple(found.batch(epoch * count, count)["inputs"][:, 0].tolist())
        for found, epoch in ((data, 0), (data, 1), (other, 0), (other, 1))
    ]
    assert len(set(orders)) == 4 and data.digest != other.digest
    assert (
        data.digest
        == read(folder, seq=SEQ, seed=0).digest
        != read(folder, seq=SEQ + 1, seed=0).digest
    )


@pytest.mark.parametrize("packing", ["concatenate", "first-fit", "best-fit"])
def test_a_batch_is_a_function_of_its_position(folder: Path, packing: str):
    data, again = read(folder, seq=SEQ, packing=packing), read(folder, seq=SEQ, packing=packing)
    whole = data.batch(0, 90)
    for position, size in (
        (37, 11),
        (4, 1),
        (60, 30),
    ):  # other batch sizes, other beginnings, in another order
        part = again.batch(position, size)
        assert all((part[name] == whole[name][position : position + size]).all() for name in whole)


def test_segments_say_where_documents_begin(folder: Path):
    found, documents = read(folder, seq=SEQ, segments=True).batch(0, 40), kept()
    number = {token: n for n, document in enumerate(documents) for token in document}
    for row in range(40):
        inputs, segments = found["inputs"][row].tolist(), found["segments"][row].tolist()
        changes = [False] + [
            number[a] != number[b] or b != a + 1 for a, b in itertools.pairwise(inputs)
        ]
        assert segments == (np.cumsum(changes) + 1).tolist()
        starts = [
            max(
                i
                for i in range(at + 1)
                if segments[i] == segments[at] and (i == 0 or segments[i - 1] != segments[i])
            )
            for at in range(SEQ)
        ]
        assert found["positions"][row].tolist() == [at - start for at, start in enumerate(starts)]
        assert found["weights"][row].tolist() == [
            float(target == token + 1 and number[target] == number[token])
            for token, target in zip(inputs, found["targets"][row].tolist(), strict=True)
        ]
    assert found["weights"].dtype == np.float32 and {
        found[name].dtype for name in ("inputs", "targets", "segments", "positions")
    } == {np.dtype(np.int32)}


def pairs_of(data: TokenDataset, size: int) -> Counter[tuple[int, int]]:
    """Neighbours that a number of examples learns."""
    found = data.batch(0, size)
    learned = found["weights"] > 0
    return Counter(
        zip(found["inputs"][learned].tolist(), found["targets"][learned].tolist(), strict=True)
    )


@pytest.mark.parametrize("packing", ["first-fit", "best-fit"])
def test_packed_rows_have_every_pair_of_neighbours_once(folder: Path, packing: str):
    data = read(folder, seq=SEQ, packing=packing)
    expected = Counter({(a, b): 1 for document in kept() for a, b in itertools.pairwise(document)})
    assert pairs_of(data, data.examples_per_epoch) == expected
    found = data.batch(0, data.examples_per_epoch)
    padding = found["segments"] == 0
    assert (found["weights"][padding] == 0).all()
    assert (found["inputs"][padding] == 0).all()
    assert (found["weights"][~padding] == 1).all()


def test_validation_and_training_have_nothing_in_common(folder: Path):
    documents = [
        set(read(folder, seq=2, split=split).batch(0, 200)["inputs"].reshape(-1).tolist())
        for split in ("training", "validation")
    ]
    assert not documents[0] & documents[1] and documents[1] == set(range(*_held(2))) | set(
        range(*_held(5))
    ) | set(range(*_held(8)))


def _held(number: int) -> tuple[int, int]:
    end = sum(LENGTHS[: number + 1])
    return end - LENGTHS[number] // 20, end


@pytest.mark.long
def test_grain_goes_on_from_examples(folder: Path):
    data = read(folder, seq=SEQ)
    elements, batch = data.grain(), data.batch(5, 3)
    assert all((elements[5 + n][name] == batch[name][n]).all() for n in range(3) for name in batch)


def test_rows_of_an_array_are_documents_and_ends_cut_bare_tokens(tmp_path: Path):
    class Tokens:
        vocab_size, identity, end = 100, "numbers", 7

        def encode(self, text: str) -> list[int]:
            return [int(part) for part in text.split()]

        def decode(self, tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    np.save(tmp_path / "rows.npy", np.arange(40, dtype=np.uint16).reshape(4, 10))
    found = read(tmp_path / "rows.npy", seq=9, packing="best-fit").batch(0, 4)
    assert sorted(found["inputs"][:, 0].tolist()) == [0, 10, 20, 30]
    assert (found["weights"] == 1).all()
    (tmp_path / "bare.bin").write_bytes(np.array([1, 2, 7, 3, 4, 5, 7, 6], np.uint16).tobytes())
    data = read(
        tmp_path / "bare.bin", seq=4, dtype="uint16", tokenizer=Tokens(), packing="first-fit"
    )
    assert set(pairs_of(data, data.examples_per_epoch)) == {(1, 2), (2, 7), (3, 4), (4, 5), (5, 7)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq": 0}, "seq is 0; it must be at least 1"),
        (
            {"seq": 4, "packing": "best"},
            "there is no packing 'best'\nTry: concatenate, first-fit, best-fit",
        ),
        ({"seq": 4, "split": "test"}, "there is no split 'test'\nTry: training, validation"),
        (
            {"seq": 4, "format": "csv"},
            "there is no format 'csv'\nTry: text, jsonl, arrayrecord, tokens",
        ),
        ({"seq": 4, "seed": -1}, "seed is -1; it must not be negative"),
    ],
)
def test_options_that_do_not_exist(folder: Path, options: dict, message: str):
    with pytest.raises(DataError) as caught:
        read(folder, **options)
    assert str(caught.value) == message


def test_too_little_text_and_positions_before_the_first(folder: Path):
    with pytest.raises(
        DataError,
        match=(
            "is too short for sequences of 500 tokens: training has 178 tokens\nTry: more text, or"
            " a smaller seq"
        ),
    ):
        read(folder, seq=500)
    with pytest.raises(
        DataError, match="there are no examples before the first one, and position -1 was asked for"
    ):
        read(folder, seq=4).batch(-1, 2)


@pytest.mark.parametrize(
    ("dtype", "token", "message"),
    [
        (
            np.int32,
            99,
            (
                "token 99 at position 4 of document 0 of tokens.npy is unknown: the vocabulary has"
                " tokens 0 to 49"
            ),
        ),
        (np.int32, -3, "token -3 at position 4 of document 0 of tokens.npy is unknown"),
        (np.float32, 0, "holds float32\\[60\\], not tokens\nTry: integers"),
    ],
)
def test_arrays_that_are_not_tokens_of_the_model(
    tmp_path: Path, dtype: type, token: int, message: str
):
    tokens = np.arange(60).astype(dtype) % 50
    tokens[4] = token
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "tokens.npy", seq=5, vocabulary=50).batch(0, 12)


def test_arrays_that_shrink(tmp_path: Path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(6000, dtype=np.int32))
    data = read(path, seq=10)
    before = data.batch(0, 4)
    whole = path.read_bytes()
    path.write_bytes(whole[:4000])
    with pytest.raises(
        DataError,
        match=(
            r"tokens.npy shrank to 4,000 bytes; 24,128 were there before\nTry: put the file back as"
            r" it was; training can go on at the step where it stopped"
        ),
    ):
        data.batch(0, 500)
    with pytest.raises(DataError, match=r"is not a whole .npy file"):
        read(path, seq=10)
    path.write_bytes(whole)
    assert (data.batch(0, 4)["inputs"] == before["inputs"]).all()


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
    assert taken == brute_best(lengths.tolist(), 16)
    assert min(left) >= 0
    assert sorted(set(rows.tolist())) == list(range(rows.max() + 1))


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
    orders = [
        tuple(shuffled_indices(np.arange(20), count, seed, epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(orders)) == 9


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
