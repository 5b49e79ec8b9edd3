"""`read`: one function from a path to batches."""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardlib.data.batches import PACKERS, Bins, Examples, TokenDataset, Windows
from shardlib.data.sources import FileInfo, Files, JsonLines, PathFiles, Records, Source, TextFiles
from shardlib.data.tokens import (
    AnyTokenizer,
    ByteTokenizer,
    Documents,
    adapted,
    open_store,
    read_arrays,
)
from shardlib.errors import DataError
from shardlib.findings import Finding
from shardlib.processes.machine import user_cache

#: Kinds of files by the ends of their names; all others are text.
KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".arrayrecord": "arrayrecord",
    ".array_record": "arrayrecord",
    ".npy": "tokens",
}
#: Ways to make examples of documents.
PACKINGS = ("concatenate", *PACKERS)


def read(
    path: str | Path | Files | None = None,
    *,
    seq: int,
    tokenizer: AnyTokenizer = None,
    packing: str = "concatenate",
    seed: int = 0,
    field: str | None = None,
    cache: str | Path | None = None,
    split: str = "training",
    segments: bool = False,
    format: str | None = None,
    dtype: np.typing.DTypeLike | None = None,
    vocabulary: int | None = None,
) -> TokenDataset:
    """Opens data; text is tokenised where that has not been done.

    Args:
        path: file, folder or address; or what `cached` returns; None for the Python standard
            library.
        tokenizer: see `shardlib.data.tokens.adapted`; bytes by default, and for files of
            tokens none.
        field: of JSON lines and records, the name of the one that holds the text; "text" for lines
            by default.
        cache: folder for tokens; by default one of the user's.
        format: "text", "jsonl", "arrayrecord" or "tokens"; by default what the names of the files
            say.
        dtype: of a token, where files are nothing but tokens.
        vocabulary: tokens that the model has; by default those that the tokenizer has.
    """
    _check_options(seq=seq, packing=packing, seed=seed, split=split)
    files, name = _files(path)
    listed = files.listing()
    kind, listed = _kind(
        files, listed, "tokens" if dtype is not None and format is None else format
    )
    if kind == "tokens":
        adapter = None if tokenizer is None else adapted(tokenizer)
        splits = read_arrays(
            files,
            listed,
            dtype=None if dtype is None else np.dtype(dtype),
            end=getattr(adapter, "end", None),
            name=name,
            vocabulary=adapter.vocab_size
            if vocabulary is None and adapter is not None
            else vocabulary,
        )
        training, validation, findings = *splits, ()
    else:
        adapter = ByteTokenizer() if tokenizer is None else adapted(tokenizer)
        store = open_store(
            _source(files, listed, kind, field),
            adapter,
            cache_folder(cache),
            name=name,
            vocabulary=vocabulary,
        )
        training, validation, findings = store.training, store.validation, store.findings
    documents = training if split == "training" else validation
    examples = _examples(documents, seq, packing, seed, segments, cache_folder(cache))
    _check_length(name, split, documents, examples, seq)
    return TokenDataset(
        name=name,
        examples=examples,
        seq=seq,
        about=f"{documents.digest} {packing} {seed}",
        findings=(*findings, *_findings(files), *_padded(examples, name)),
    )


def cache_folder(folder: str | Path | None) -> Path:
    """The folder for what is kept between runs: the given one, or that of the user (environment
    variable SHARDLIB_CACHE_DIR).
    """
    return user_cache() / "data" if folder is None else Path(folder)


def _check_options(*, seq: int, packing: str, seed: int, split: str) -> None:
    if seq < 1:
        raise DataError(f"seq is {seq}; it must be at least 1")
    if packing not in PACKINGS:
        raise DataError(f"there is no packing {packing!r}\nTry: {', '.join(PACKINGS)}")
    if split not in ("training", "validation"):
        raise DataError(f"there is no split {split!r}\nTry: training, validation")
    if seed < 0:
        raise DataError(f"seed is {seed}; it must not be negative")


def _files(path: str | Path | Files | None) -> tuple[Files, str]:
    if path is None:
        return (
            PathFiles(root=sysconfig.get_path("stdlib"), pattern="*.py"),
            "the Python standard library",
        )
    if isinstance(path, (str, Path)):
        root = str(path) if "://" in str(path) else str(Path(path).absolute())
        return PathFiles(root=root), str(path)
    return path, path.root


def _kind(
    files: Files, listed: Sequence[FileInfo], format_name: str | None
) -> tuple[str, tuple[FileInfo, ...]]:
    """Returns what the files are, and which of them: all, or with an asked kind those whose names
    are of it.
    """
    kinds = {info: KINDS.get(Path(info.name).suffix.lower(), "text") for info in listed}
    counts = Counter(kinds.values())
    if format_name is not None and format_name not in {"text", *KINDS.values()}:
        raise DataError(
            f"there is no format {format_name!r}\nTry: text,"
            f" {', '.join(dict.fromkeys(KINDS.values()))}"
        )
    if format_name is None:
        if len(counts) > 1:
            kinds_text = " and ".join(
                f"{count} of {kind}" for kind, count in sorted(counts.items())
            )
            raise DataError(
                f"{files.root} holds files of several formats: {kinds_text}\nTry:"
                f" format='{counts.most_common(1)[0][0]}' for those, or a folder of one format"
            )
        return next(iter(counts), "text"), tuple(listed)
    chosen = tuple(info for info in listed if kinds[info] == format_name)
    return format_name, chosen if chosen and format_name != "text" else tuple(listed)


def _source(files: Files, listed: tuple[FileInfo, ...], kind: str, field: str | None) -> Source:
    if kind == "jsonl":
        return JsonLines(files=files, listed=listed, field=field or "text")
    return (
        Records(files=files, listed=listed, field=field)
        if kind == "arrayrecord"
        else TextFiles(files=files, listed=listed)
    )


def _examples(
    documents: Documents, seq: int, packing: str, seed: int, segments: bool, folder: Path
) -> Examples:
    if packing == "concatenate":
        return Windows(documents=documents, seq=seq, seed=seed, segments=segments)
    return Bins(documents=documents, seq=seq, seed=seed, packing=packing, folder=folder)


def _check_length(
    name: str, split: str, documents: Documents, examples: Examples, seq: int
) -> None:
    if documents.tokens < 2 or examples.count < 1:
        raise DataError(
            f"{name} is too short for sequences of {seq} tokens: {split} has {documents.tokens:,}"
            " tokens\nTry: more text, or a smaller seq"
        )


def _findings(files: Files) -> tuple[Finding, ...]:
    return tuple(getattr(files, "findings", ()))


def _padded(examples: Examples, name: str) -> list[Finding]:
    if not isinstance(examples, Bins) or examples.padding < 0.1:
        return []
    return [
        Finding(
            code="padded",
            severity="info",
            where=examples.packing,
            message=(
                f"{examples.padding:.0%} of the tokens of {name} are padding, on which no model"
                " learns"
            ),
            hint="packing='concatenate', 'best-fit', or a longer seq",
        )
    ]
