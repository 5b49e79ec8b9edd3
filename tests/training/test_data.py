from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardlib.errors import DataError, MissingFileError
from shardlib.training import bigram, data


def folder_of(root: Path, files: int, size: int = 200) -> Path:
    for index in range(files):
        path = root / f"d{index % 3}" / f"f{index:03}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{index:03} " * (size // 4))
    return root


def test_whole_files_are_held_out(tmp_path: Path):
    corpus = data.read(folder_of(tmp_path, 100), seq=16)
    held = {corpus.validation.tobytes()[i:i + 3] for i in range(0, len(corpus.validation), 201)}
    trained = {corpus.training.tobytes()[i:i + 3] for i in range(0, len(corpus.training), 201)}
    assert len(held) + len(trained) == corpus.files == 100 and not held & trained and 1 <= len(held) <= 15


def test_the_split_stays_when_files_come(tmp_path: Path):
    before = data.read(folder_of(tmp_path, 60), seq=16).validation.tobytes()
    after = data.read(folder_of(tmp_path, 100), seq=16).validation.tobytes()
    assert all(part in after for part in before.split(b"\n"))


def test_a_single_file_gives_its_end(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(97, 117)) * 50)
    corpus = data.read(path, seq=16)
    assert (len(corpus.training), len(corpus.validation)) == (950, 50)
    assert (corpus.training.tobytes() + corpus.validation.tobytes()) == path.read_bytes()


def test_batches_are_crops_and_depend_on_seed_and_step_alone(tmp_path: Path):
    path = tmp_path / "text.bin"
    path.write_bytes(np.random.default_rng(0).integers(32, 127, 5000).astype(np.uint8).tobytes())
    corpus, again = data.read(path, seq=8), data.read(path, seq=8)
    text = corpus.training.tobytes()
    for seed, step in ((0, 0), (0, 1), (1, 0)):
        one, other = corpus.batch(seed=seed, step=step, batch=4, seq=8), again.batch(seed=seed, step=step, batch=4, seq=8)
        assert all((one[name] == other[name]).all() and one[name].dtype == np.int32 for name in one)
        for inputs, targets in zip(one["inputs"], one["targets"], strict=True):
            assert bytes([*inputs, targets[-1]]) in text and (inputs[1:] == targets[:-1]).all()
    firsts = [corpus.batch(seed=seed, step=step, batch=4, seq=8)["inputs"].tobytes() for seed, step in ((0, 0), (0, 1), (1, 0))]
    assert len(set(firsts)) == 3


def test_validation_covers_the_whole_held_out_text(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(i % 90 + 32 for i in range(4000)))
    corpus = data.read(path, seq=8)
    batches = corpus.validation_batches(count=3, batch=4, seq=8)
    assert [batch["inputs"].shape for batch in batches] == [(4, 8)] * 3
    assert (batches[0]["inputs"][0] == corpus.validation[:8]).all()
    assert batches[-1]["targets"][-1][-1] == corpus.validation[-1]


def test_other_files_are_left_out(tmp_path: Path):
    folder_of(tmp_path, 3)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "zeros.bin").write_bytes(b"\0" * 100)
    (tmp_path / ".hidden").write_text("hidden " * 100)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a.txt").write_text("package " * 100)
    assert data.read(tmp_path, seq=8).files == 3


def test_the_standard_library_is_there():
    corpus = data.read(seq=128)
    assert len(corpus.training) > 5e6 and 0.01 < len(corpus.validation) / len(corpus.training) < 0.2
    assert b"import " in corpus.validation.tobytes()


def test_missing_empty_and_short(tmp_path: Path):
    with pytest.raises(MissingFileError, match="there is no training text at "):
        data.read(tmp_path / "no", seq=8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        data.read(tmp_path / "empty", seq=8)
    assert str(caught.value) == f"{tmp_path / 'empty'} holds no text (0 files looked at)\nTry: a UTF-8 text file, or a folder that holds some"
    (tmp_path / "short.txt").write_text("abc" * 8)
    with pytest.raises(DataError) as caught:
        data.read(tmp_path / "short.txt", seq=64)
    assert str(caught.value) == (f"{tmp_path / 'short.txt'} is too short for sequences of 64 tokens: training has 23 bytes and validation has 1 bytes\n"
                                 "Try: more text, or a smaller --seq")


def test_bigram_counts_by_hand():
    text = np.frombuffer(b"aab", np.uint8)
    table = bigram.fit(text)
    a, b = ord("a"), ord("b")
    np.testing.assert_allclose(np.exp(table[a, [a, b, 0]]), [2 / 258, 2 / 258, 1 / 258])
    np.testing.assert_allclose(np.exp(table).sum(1), 1)
    expected = -np.mean([np.log(2 / 258), np.log(2 / 258)])
    np.testing.assert_allclose(bigram.cross_entropy(table, text), expected)
    batch = {"inputs": np.array([[a, a]]), "targets": np.array([[a, b]])}
    np.testing.assert_allclose(bigram.batches_cross_entropy(table, [batch]), expected)
