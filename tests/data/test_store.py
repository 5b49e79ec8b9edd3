"""Text becomes tokens once, and what goes wrong on the way is said."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardlib.data import sources
from shardlib.data.open import read
from shardlib.data.tokens import ByteTokenizer, adapted
from shardlib.errors import DataError, MissingFileError


@dataclass(kw_only=True)
class Words:
    """A token for every word by its first letter, from a to z; z is the unknown one."""

    vocab_size: int = 26
    identity: str = "words"
    unknown: int = 25
    seen: list[str] = field(default_factory=list)

    def encode(self, text: str) -> list[int]:
        self.seen.append(text)
        return [max(ord(word[0]) - 97, 0) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(chr(token + 97) for token in tokens)


def texts_of(root: Path, count: int = 30) -> Path:
    root.mkdir(exist_ok=True)
    for number in range(count):
        (root / f"{number:02}.txt").write_text(
            f"text number {number} " + "and so on " * (number % 5)
        )
    return root


def only(cache: Path) -> Path:
    """The one store of a folder."""
    (found,) = [path for path in cache.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return found


def test_it_is_tokenised_once(tmp_path: Path):
    words = Words(vocab_size=200)
    first = read(
        texts_of(tmp_path / "texts"), seq=4, tokenizer=adapted(words), cache=tmp_path / "cache"
    )
    assert len(words.seen) == 30
    again = read(
        tmp_path / "texts", seq=4, tokenizer=words, cache=tmp_path / "cache", split="validation"
    )
    assert len(words.seen) == 30 and again.digest != first.digest and not again.findings
    read(
        tmp_path / "texts",
        seq=4,
        tokenizer=Words(identity="other words", vocab_size=200),
        cache=tmp_path / "cache",
    )
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def test_files_that_change_are_tokenised_again_and_it_is_said(tmp_path: Path):
    texts, cache = texts_of(tmp_path / "texts"), tmp_path / "cache"
    first = read(texts, seq=4, cache=cache)
    os.utime(texts / "03.txt", (1, 1))
    touched = read(texts, seq=4, cache=cache)
    assert touched.digest == first.digest and [finding.code for finding in touched.findings] == [
        "source-changed"
    ]
    (texts / "03.txt").write_text("a shorter text")
    changed = read(texts, seq=4, cache=cache)
    assert changed.digest != first.digest and changed.findings[0].code == "source-changed"
    assert (first.batch(0, 8)["inputs"] == touched.batch(0, 8)["inputs"]).all()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokens.bin", lambda data: data[:-1]),
        ("tokens.bin", lambda data: data[:9] + b"!" + data[10:]),
        ("documents.bin", lambda data: data[:5] + b"!" + data[6:]),
        ("manifest.json", lambda data: data[:20]),
        ("documents.bin", None),
    ],
)
def test_damaged_stores_are_made_again_and_it_is_said(tmp_path: Path, name: str, damage: Any):
    texts, cache = texts_of(tmp_path / "texts"), tmp_path / "cache"
    first = read(texts, seq=4, cache=cache)
    whole = first.batch(0, 30)["inputs"]
    path = only(cache) / name
    path.unlink() if damage is None else path.write_bytes(damage(path.read_bytes()))
    again = read(texts, seq=4, cache=cache)
    (finding,) = again.findings
    assert finding.code == "store-damaged"
    assert name in finding.message
    assert again.digest == first.digest
    assert (again.batch(0, 30)["inputs"] == whole).all()
    assert not read(texts, seq=4, cache=cache).findings


def test_a_store_that_shrinks_in_use(tmp_path: Path):
    data = read(texts_of(tmp_path / "texts"), seq=4, cache=tmp_path / "cache")
    os.truncate(only(tmp_path / "cache") / "tokens.bin", 40)
    with pytest.raises(DataError, match=r"tokens.bin shrank to 40 bytes"):
        data.batch(0, data.examples_per_epoch)


def test_documents_are_held_out_by_their_names(tmp_path: Path):
    texts = texts_of(tmp_path / "texts", 60)
    held = {
        path.name
        for path in texts.iterdir()
        if int(hashlib.sha256(path.name.encode()).hexdigest(), 16) % 20 == 0
    }
    assert held
    for split in ("training", "validation"):
        data = read(texts, seq=80, cache=tmp_path / "cache", split=split, packing="best-fit")
        numbers = re.findall(
            r"text number (\d+) ",
            "".join(
                bytes(row.tolist()).decode()
                for row in data.batch(0, data.examples_per_epoch)["inputs"]
            ),
        )
        assert {f"{int(number):02}.txt" for number in numbers} == (
            held if split == "validation" else {path.name for path in texts.iterdir()} - held
        )


def test_unknown_tokens_say_where_they_are(tmp_path: Path):
    texts, cache = texts_of(tmp_path / "texts"), tmp_path / "cache"
    for count in range(30):
        end = "{brackets}" if count == 17 else ""
        (texts / f"{count:02}.txt").write_text("some words " * count + end)
    where = r"token 26 at position 34 of 17.txt is unknown: the vocabulary has tokens 0 to "
    with pytest.raises(DataError, match=where + "25\nTry: the tokenizer of the model"):
        read(texts, seq=4, tokenizer=Words(), cache=cache)
    with pytest.raises(DataError, match=where + "23"):
        read(texts, seq=4, tokenizer=Words(vocab_size=27), vocabulary=24, cache=cache)
    (texts / "18.txt").write_text("zones are unknown")
    other = read(texts, seq=4, tokenizer=Words(vocab_size=27), cache=tmp_path / "other")
    (finding,) = other.findings
    assert finding.code == "unknown-tokens"
    assert finding.message.startswith("1 of ")


def test_what_is_not_text_is_left_out_and_said(tmp_path: Path):
    texts = texts_of(tmp_path / "texts")
    (texts / "picture").write_bytes(b"\x89PNG\0\0")
    (texts / ".hidden").write_text("hidden")
    (finding,) = read(texts, seq=4, cache=tmp_path / "cache").findings
    assert finding.message == f"1 of 31 files of {texts} are not UTF-8 text and are left out"
    with pytest.raises(DataError, match=r"holds no documents \(1 files looked at, read as text\)"):
        read(texts / "picture", seq=4, cache=tmp_path / "cache")
    with pytest.raises(MissingFileError, match="there is no training data at "):
        read(tmp_path / "nothing", seq=4)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            errno.ENOSPC,
            (
                "the disk of {cache} is full: there is no room for the tokens of {texts} of about"
                " 0.0 MiB; nothing was left there\nTry: free some space, or cache=... on another"
                " disk"
            ),
        ),
        (
            errno.EROFS,
            (
                "{cache} cannot be written, which the tokens of {texts} of about 0.0 MiB needs:"
                " Read-only file system\nTry: cache=... with a folder that can be written"
            ),
        ),
    ],
)
def test_full_disks_and_folders_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
):
    texts, cache = texts_of(tmp_path / "texts"), tmp_path / "cache"

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DataError) as caught:
        read(texts, seq=4, cache=cache)
    assert str(caught.value) == message.format(cache=cache, texts=texts)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    monkeypatch.undo()
    assert not read(texts, seq=4, cache=cache).findings


def test_a_cache_that_is_no_folder(tmp_path: Path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(DataError, match="cannot be written to"):
        read(texts_of(tmp_path / "texts"), seq=4, cache=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


_COUNTING = """
import sys, os
from shardlib.data.open import read
class Tokens:
    vocab_size, identity = 256, "counted"
    def encode(self, text):
        with open(sys.argv[3], "a") as stream: stream.write("x")
        return list(text.encode())
    def decode(self, tokens): return bytes(tokens).decode()
print(read(sys.argv[1], seq=4, tokenizer=Tokens(), cache=sys.argv[2]).digest)
"""


@pytest.mark.long
def test_processes_wait_for_the_one_that_tokenises(tmp_path: Path):
    texts = texts_of(tmp_path / "texts")
    command = [
        sys.executable,
        "-c",
        _COUNTING,
        str(texts),
        str(tmp_path / "cache"),
        str(tmp_path / "log"),
    ]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        for _ in range(3)
    ]
    digests = {process.communicate()[0] for process in running}
    assert len(digests) == 1 and "" not in digests and (tmp_path / "log").read_text() == "x" * 30


def lines_of(path: Path, count: int) -> list[str]:
    texts = [f"line {number} " * (number % 7) for number in range(count)]
    path.write_text(
        "".join(
            json.dumps({"body": text, "number": number}) + "\n" for number, text in enumerate(texts)
        )
    )
    return texts


@pytest.mark.parametrize("chunk", [1, 50, 64, 1000, 1 << 20])
def test_lines_are_read_once_however_files_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
):
    monkeypatch.setattr(sources, "CHUNK", chunk)
    texts, words = lines_of(tmp_path / "a.jsonl", 40), Words(vocab_size=200)
    texts += lines_of(tmp_path / "b.jsonl", 3)
    source = sources.JsonLines(
        files=(files := sources_files(tmp_path)), listed=files.listing(), field="body"
    )
    assert [document.text for part in range(len(source)) for document in source[part]] == texts
    data = read(
        tmp_path,
        seq=4,
        tokenizer=words,
        field="body",
        cache=tmp_path.with_name(tmp_path.name + "-cache"),
    )
    assert sorted(words.seen) == sorted(texts) and data.examples_per_epoch > 0


def sources_files(path: Path) -> Any:
    from shardlib.data.sources import PathFiles

    return PathFiles(root=str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"text": 1}',
            "the field 'text' of line 3 of a.jsonl in .* is int, not text\nTry: field=...",
        ),
        (
            '{"body": "x"}',
            "line 3 of a.jsonl in .* has no field 'text'; it has the fields 'body'\nTry: field=...",
        ),
        ('{"text": ', "line 3 of a.jsonl in .* is not valid JSON: Expecting value"),
        ("[1]", "line 3 of a.jsonl in .* has no field 'text'; it has no fields"),
    ],
)
def test_lines_that_are_not_what_they_should_be(tmp_path: Path, line: str, message: str):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.jsonl", seq=1, cache=tmp_path / "cache")


def test_records_of_array_record_files(tmp_path: Path):
    from array_record.python.array_record_module import ArrayRecordWriter

    texts, words = [f"record {number}" for number in range(300)], Words(vocab_size=200)
    for name, part in (("a", texts[:100]), ("b", texts[100:])):
        writer = ArrayRecordWriter(str(tmp_path / f"{name}.arrayrecord"), "group_size:1")
        for text in part:
            writer.write(json.dumps({"text": text}).encode())
        writer.close()
    data = read(
        tmp_path,
        seq=2,
        tokenizer=words,
        field="text",
        cache=tmp_path.with_name(tmp_path.name + "-cache"),
    )
    assert sorted(words.seen) == sorted(texts) and data.examples_per_epoch > 100
    with pytest.raises(DataError, match=r"record 0 of .* has no field 'body'"):
        read(tmp_path, seq=2, field="body", cache=tmp_path.with_name(tmp_path.name + "-cache"))
    (tmp_path / "b.arrayrecord").write_bytes((tmp_path / "b.arrayrecord").read_bytes()[:500])
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path, seq=2, field="text", cache=tmp_path.with_name(tmp_path.name + "-cache"))


def test_files_of_several_formats_need_a_word(tmp_path: Path):
    lines_of(tmp_path / "a.jsonl", 40)
    (tmp_path / "read.me").write_text("text about lines")
    with pytest.raises(
        DataError, match=r"holds files of several formats: 1 of jsonl and 1 of text\nTry: format="
    ):
        read(tmp_path, seq=4)
    words = Words(vocab_size=200)
    read(
        tmp_path,
        seq=2,
        tokenizer=words,
        format="jsonl",
        field="body",
        cache=tmp_path.with_name(tmp_path.name + "-cache"),
    )
    assert len(words.seen) == 40


class Library:
    """What `tokenizers.Tokenizer` has, as far as it is used."""

    model = SimpleNamespace(unk_token="[UNK]")
    words = ["text", "number", "and", "[UNK]"]

    def to_str(self) -> str:
        return json.dumps(self.words)

    def get_vocab_size(self) -> int:
        return len(self.words)

    def token_to_id(self, token: str) -> int:
        return self.words.index(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(
            ids=[0] * add_special_tokens
            + [self.words.index(word) if word in self.words else 3 for word in text.split()]
        )

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in tokens)


def test_tokenizers_of_other_libraries(tmp_path: Path):
    found = adapted(Library(), end=2)
    assert list(found.encode("text number x")) == [0, 1, 3]
    assert found.vocab_size == 4
    assert found.decode(np.array([1, 2])) == "number and"
    assert (
        found.identity
        != adapted(Library()).identity
        == adapted(SimpleNamespace(backend_tokenizer=Library(), eos_token_id=None)).identity
    )
    data = read(
        texts_of(tmp_path / "texts"),
        seq=2,
        tokenizer=found,
        cache=tmp_path / "cache",
        packing="best-fit",
    )
    assert {finding.code for finding in data.findings} >= {"unknown-tokens"} and 2 in data.batch(
        0, 1
    )["targets"]
    with pytest.raises(
        DataError, match="has no encode and no decode and no vocab_size and no identity"
    ):
        adapted(object())


def test_bytes_there_and_back():
    text = "größer"
    assert ByteTokenizer().decode(ByteTokenizer().encode(text).tolist()) == text
    assert np.asarray(ByteTokenizer().encode("ab")).tolist() == [97, 98]


def test_sources_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = texts_of(tmp_path / "texts")
    (tmp_path / "lines.jsonl").write_text('{"text": "one"}\n')

    def broken(self: object, name: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    monkeypatch.setattr("shardlib.data.sources.PathFiles.open", broken)
    with pytest.raises(DataError, match=r"00.txt of .* cannot be read: .*Permission denied"):
        read(texts, seq=4, cache=tmp_path / "cache")
    with pytest.raises(
        DataError, match=r"the files of .*lines.jsonl cannot be read: .*Permission denied"
    ):
        read(tmp_path / "lines.jsonl", seq=4, cache=tmp_path / "cache")


def test_what_a_stopped_process_left_is_removed_after_a_day(tmp_path: Path):
    texts, cache = texts_of(tmp_path / "texts"), tmp_path / "cache"
    read(texts, seq=4, cache=cache)
    name = only(cache).name
    for number, age in ((1, 10**6), (2, 10)):
        left = cache / f".{name}.{number}.part"
        left.mkdir()
        (left / "tokens.bin").write_bytes(b"unfinished")
        os.utime(left / "tokens.bin", (time.time() - age,) * 2)
    (only(cache) / "tokens.bin").unlink()
    read(texts, seq=4, cache=cache)
    assert [path.name for path in cache.iterdir() if path.name.endswith(".part")] == [
        f".{name}.2.part"
    ]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda texts: os.truncate(texts / "29.txt", 3),
            r"29.txt of .* shrank from 55 to 3 bytes while it was in use\nTry: put the file back",
        ),
        (
            lambda texts: os.utime(texts / "00.txt", (1, 1)),
            "changed while they were read\nTry: again, when nobody writes them",
        ),
    ],
    ids=["shrinks", "is written"],
)
def test_a_text_that_changes_while_it_is_read(tmp_path: Path, harm: Any, message: str):
    texts = texts_of(tmp_path / "texts")

    class Harming(Words):
        def encode(self, text: str) -> list[int]:
            harm(texts)
            return super().encode(text)

    with pytest.raises(DataError, match=message):
        read(texts, seq=4, tokenizer=Harming(vocab_size=200), cache=tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
