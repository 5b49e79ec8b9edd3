"""A folder of tokens: found again in the next run, checked, and made anew where its sources changed
or it is damaged.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardlib.data.reading.locks import locked, unwritable
from shardlib.data.reading.sources import Source
from shardlib.data.reading.tokenizer import Tokenizer
from shardlib.data.tokens.building import build
from shardlib.data.tokens.documents import Documents, TokenFile, check_tokens
from shardlib.data.tokens.manifest import checked, rows_of
from shardlib.errors import DataError, ShardlibError
from shardlib.report import Finding
from shardlib.untrusted.json_types import JsonMapping

#: Changes when stores are written otherwise.
FORMAT = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Store:
    """An open store.

    Attributes:
        training, validation: documents of the two splits.
        findings: what was noticed when it was opened.
    """

    training: Documents
    validation: Documents
    findings: tuple[Finding, ...]


def open_store(
    source: Source, tokenizer: Tokenizer, cache: Path, *, name: str, vocabulary: int | None = None
) -> Store:
    """The tokens of a source: those of the folder that has them, or else new ones, made by one
    process while others wait.

    Args:
        vocabulary: tokens that the model has; by default those of the tokenizer.
    """
    origin, key = _keys(source, tokenizer)
    folder, findings = cache / f"tokens-{origin}-{key}", list[Finding]()
    state = checked(folder)
    if isinstance(state, str):
        needed = sum(info.size for info in source.listed)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache / f"tokens-{origin}.lock"):
                state = checked(folder)
                if isinstance(state, str):
                    findings += _why(cache, origin, folder, state, name)
                    if folder.exists():
                        shutil.rmtree(folder)
                    build(
                        source,
                        tokenizer,
                        folder,
                        {
                            "format": FORMAT,
                            "source": source.files.root,
                            "reading": source.reading,
                            "tokenizer": tokenizer.identity,
                        },
                    )
        except ShardlibError:
            raise
        except OSError as error:
            raise unwritable(cache, error, f"the tokens of {name}", needed) from error
        state = checked(folder)
        if isinstance(state, str):
            raise DataError(
                f"the tokens of {name} in {folder} are damaged as soon as they are written:"
                f" {state}\nTry: cache=... on another disk"
            )
    if state["largest"] >= (limit := tokenizer.vocab_size if vocabulary is None else vocabulary):
        _raise_unknown(folder, state, source, limit)
    return _opened(folder, state, source, tokenizer, name, tuple(findings))


def _keys(source: Source, tokenizer: Tokenizer) -> tuple[str, str]:
    """What the store is of, and the same with sizes and times of all files."""
    origin = [FORMAT, source.files.root, source.reading, tokenizer.identity, tokenizer.vocab_size]
    files = [[info.name, info.size, info.modified] for info in source.listed]
    return tuple(
        hashlib.sha256(json.dumps(what).encode()).hexdigest()[:digits]
        for what, digits in ((origin, 8), ([origin, files], 16))
    )  # type: ignore[return-value]


def _why(cache: Path, origin: str, folder: Path, damage: str, name: str) -> list[Finding]:
    """Why a store is made where there is one already."""
    if folder.exists():
        return [
            Finding(
                code="store-damaged",
                severity="warning",
                where=str(folder),
                message=f"the tokens of {name} are damaged and made anew: {damage}",
                hint="look after the disk; the text itself was not touched",
            )
        ]
    others = sorted(path.name for path in cache.glob(f"tokens-{origin}-*") if path.is_dir())
    if others:
        return [
            Finding(
                code="source-changed",
                severity="warning",
                where=str(cache),
                message=(
                    f"the files of {name} changed since they were tokenised; tokens are made anew,"
                    f" in {folder.name} beside {', '.join(others)}"
                ),
                hint=(
                    "remove stores that no run needs any more; runs on the old text cannot go on"
                    " with the new one"
                ),
            )
        ]
    return []


def _opened(
    folder: Path,
    manifest: JsonMapping,
    source: Source,
    tokenizer: Tokenizer,
    name: str,
    findings: tuple[Finding, ...],
) -> Store:
    file, rows = _file(folder, manifest), rows_of(folder)

    def split(held_out: bool) -> Documents:
        selected = rows[(rows["held"] == held_out) & (rows["length"] > 0)]
        return Documents(
            name=name,
            files=(file,),
            starts=selected["start"].copy(),
            lengths=selected["length"].copy(),
            place=_placed(source, selected),
            vocabulary=tokenizer.vocab_size,
            digest=hashlib.sha256(
                f"{manifest['tokens_sha256']} {manifest['documents_sha256']} {held_out}".encode()
            ).hexdigest(),
        )

    return Store(
        training=split(False),
        validation=split(True),
        findings=(*findings, *_noticed(manifest, source, tokenizer, name)),
    )


def _raise_unknown(folder: Path, manifest: JsonMapping, source: Source, vocabulary: int) -> None:
    """Finds the first token that is not below the vocabulary, and says where it is."""
    rows, file = rows_of(folder), _file(folder, manifest)
    boundaries = np.flatnonzero(
        np.r_[
            True,
            (rows["part"][1:] != rows["part"][:-1]) | (rows["number"][1:] != rows["number"][:-1]),
        ]
    )
    for first, after in zip(boundaries, np.r_[boundaries[1:], len(rows)], strict=True):
        start, place = int(rows["start"][first]), _placed(source, rows)
        stop = int(rows["start"][after - 1] + rows["length"][after - 1])
        check_tokens(
            file.read(start, stop), vocabulary, lambda first=first, place=place: place(int(first))
        )


def _file(folder: Path, manifest: JsonMapping) -> TokenFile:
    return TokenFile(
        path=folder / "tokens.bin",
        dtype=np.dtype(manifest["dtype"]),
        begin=0,
        count=manifest["tokens"],
    )


def _placed(source: Source, rows: np.ndarray) -> Callable[[int], str]:
    def place(document: int) -> str:
        part, number = int(rows["part"][document]), int(rows["number"][document])
        try:
            return source[part][number].name
        except (DataError, OSError, IndexError):
            return f"document {number} of part {part} of {source.files.root}"

    return place


def _noticed(
    manifest: JsonMapping, source: Source, tokenizer: Tokenizer, name: str
) -> list[Finding]:
    findings = list[Finding]()
    if source.reading == "text" and manifest["empty_parts"]:
        findings.append(
            Finding(
                code="files-left-out",
                severity="info",
                where=source.files.root,
                message=(
                    f"{manifest['empty_parts']:,} of {len(source.listed):,} files of {name} are no"
                    " UTF-8 text and are left out"
                ),
            )
        )
    if manifest["unknown"]:
        share = manifest["unknown"] / max(manifest["tokens"], 1)
        findings.append(
            Finding(
                code="unknown-tokens",
                severity="warning",
                where=source.files.root,
                hint="a tokenizer that was made for this text",
                message=(
                    f"{manifest['unknown']:,} of {manifest['tokens']:,} tokens ({share:.2%}) stand"
                    " for text outside of the tokenizer's vocabulary"
                ),
            )
        )
    return findings
