"""Which text is trained on, and which bytes make up a batch?

By default the Python standard library of the running interpreter: about 30 MB of text that every machine with Python has.
Tokens are bytes. Whole files are held out for validation, chosen by a hash of their path, so the split does not move when
other files come and go. A batch is a function of (seed, step) alone, so a resumed run sees the same batches.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardlib.data.documents import HOLD_OUT
from shardlib.data.files import PathFiles, read_whole
from shardlib.data.sources import text_of
from shardlib.errors import DataError, MissingFileError


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Bytes to train on and bytes held out.

    Attributes:
        name: for people.
        training: uint8 [bytes].
        validation: uint8 [bytes].
        files: number of files read.
    """

    name: str
    training: np.ndarray
    validation: np.ndarray
    files: int

    def batch(self, *, seed: int, step: int, batch: int, seq: int) -> dict[str, np.ndarray]:
        """Random crops of the training bytes: "inputs" and "targets" [batch, seq], int32; targets are one byte ahead."""
        generator = np.random.default_rng((seed, step))
        return _crops(self.training, generator.integers(0, len(self.training) - seq, batch), seq)

    def validation_batches(self, *, count: int, batch: int, seq: int) -> list[dict[str, np.ndarray]]:
        """`count` batches of crops at even distances over the validation bytes; the same for every seed."""
        starts = np.linspace(0, len(self.validation) - seq - 1, count * batch).astype(np.int64)
        return [_crops(self.validation, part, seq) for part in np.split(starts, count)]


def _crops(tokens: np.ndarray, starts: np.ndarray, seq: int) -> dict[str, np.ndarray]:
    windows = tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def read(path: str | Path | None = None, *, seq: int) -> Corpus:
    """Reads the text below a file or folder, or the standard library of the running interpreter.

    A single file is split into two pieces, the last twentieth being held out. Files that are not UTF-8 text are left out.

    Args:
        path: file or folder; None for the standard library.
        seq: tokens of a sequence; both splits must be longer.

    Raises:
        MissingFileError: there is nothing at `path`.
        DataError: no text there, or too little for `seq`.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else Path(path)
    if not root.exists():
        raise MissingFileError(f"there is no training text at {root}")
    name = "the Python standard library" if path is None else str(path)
    source = PathFiles(root=str(root), pattern="*.py" if path is None else "*")
    files = source.listing()
    texts = [(info.name, data) for info in files if (data := read_whole(source, info)) and text_of(data) is not None]
    if not texts:
        raise DataError(f"{name} holds no text ({len(files)} files looked at)\nTry: a UTF-8 text file, or a folder that holds some")
    training, validation = _split(texts)
    short = [f"{split} has {len(data)} bytes" for split, data in (("training", training), ("validation", validation)) if len(data) < seq + 2]
    if short:
        raise DataError(f"{name} is too short for sequences of {seq} tokens: {' and '.join(short)}\nTry: more text, or a smaller --seq")
    return Corpus(name=name, training=training, validation=validation, files=len(texts))


def _split(texts: Sequence[tuple[str, bytes]]) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation bytes; with few files, each file gives its last part."""
    held = {name for name, _ in texts if int(hashlib.sha256(name.encode()).hexdigest(), 16) % HOLD_OUT == 0}
    if len(texts) < HOLD_OUT or not held:
        cuts = [len(text) - len(text) // HOLD_OUT for _, text in texts]
        parts = [[text[:cut] for (_, text), cut in zip(texts, cuts, strict=True)], [text[cut:] for (_, text), cut in zip(texts, cuts, strict=True)]]
    else:
        parts = [[text for name, text in texts if name not in held], [text for name, text in texts if name in held]]
    training, validation = (np.frombuffer(b"\n".join(part), np.uint8) for part in parts)
    return training, validation
