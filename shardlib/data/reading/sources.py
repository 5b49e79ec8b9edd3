"""Documents in files of text, of lines of JSON, or of records.

A source is cut into parts, which can be read in any order and by several threads: a file of text, a
megabyte of lines, some hundred records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from shardlib.data.reading.files import FileInfo, Files, changed, read_whole
from shardlib.errors import DataError
from shardlib.untrusted import parse_json, shown

#: Bytes of the lines that are a part.
CHUNK = 1 << 20
#: Records that are a part.
RECORDS = 256


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text.

    Attributes:
        name: where it is, for people.
        text: the whole of it.
        key: what decides whether it is held out: the path of a file, or what a record says.
    """

    name: str
    text: str
    key: bytes


class Source(Protocol):
    """Documents in parts, with random access.

    Attributes:
        files: where they are.
        listed: their files.
        reading: how documents are found in them, as text.
    """

    @property
    def files(self) -> Files: ...

    @property
    def listed(self) -> tuple[FileInfo, ...]: ...

    @property
    def reading(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sequence[Document]: ...


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """Every file is a document; those that are not UTF-8 text are none."""

    files: Files
    listed: tuple[FileInfo, ...]
    reading: str = "text"

    def __len__(self) -> int:
        return len(self.listed)

    def __getitem__(self, index: int) -> Sequence[Document]:
        info = self.listed[index]
        text = text_of(read_whole(self.files, info))
        return [] if text is None else [Document(name=info.name, text=text, key=info.name.encode())]


def text_of(data: bytes) -> str | None:
    """The text of a file; None where it is no UTF-8 text."""
    try:
        return None if b"\0" in data else data.decode("utf-8")
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """Every line is an object, one field of which is a document. Parts begin with the first line
    that begins in a stretch of `CHUNK` bytes.

    Attributes:
        field: name of the field.
    """

    files: Files
    listed: tuple[FileInfo, ...]
    field: str

    @property
    def reading(self) -> str:
        """See `Source`."""
        return f"lines, field {self.field!r}"

    @cached_property
    def _parts(self) -> list[tuple[FileInfo, int]]:
        return [(info, begin) for info in self.listed for begin in range(0, info.size, CHUNK)]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Sequence[Document]:
        info, begin = self._parts[index]
        return [
            self._document(info, offset, line)
            for offset, line in self._lines(info, begin)
            if line.strip()
        ]

    def _lines(self, info: FileInfo, begin: int) -> Iterator[tuple[int, bytes]]:
        with self.files.open(info.name) as stream:
            size = stream.seek(0, 2)
            if size != info.size:
                raise changed(self.files, info, size)
            offset = stream.seek(max(begin - 1, 0))
            if begin:
                offset += len(stream.readline())
            while offset < min(begin + CHUNK, info.size):
                line = stream.readline()
                if not line:
                    raise changed(self.files, info, offset)
                yield offset, line
                offset += len(line)

    def _document(self, info: FileInfo, offset: int, line: bytes) -> Document:
        name = f"{info.name}, byte {offset:,}"
        try:
            value = parse_json(line, "the line", DataError)
        except DataError as error:
            raise DataError(
                f"{self._place(info, offset)}{str(error).removeprefix('the line')}"
            ) from error
        return Document(
            name=name, text=_field(value, self.field, lambda: self._place(info, offset)), key=line
        )

    def _place(self, info: FileInfo, offset: int) -> str:
        with self.files.open(info.name) as stream:
            number = stream.read(offset).count(b"\n") + 1
        return f"line {number:,} of {info.name} in {self.files.root}"


def _field(value: Any, field: str, place: Any) -> str:
    if not isinstance(value, dict) or field not in value:
        has = (
            f"the fields {', '.join(map(shown, sorted(value)[:20]))}"
            if isinstance(value, dict)
            else "no fields"
        )
        raise DataError(
            f"{place()} has no field {field!r}; it has {has}\nTry: field=... with the name of the"
            " one that holds the text"
        )
    text = value[field]
    if not isinstance(text, str):
        raise DataError(
            f"the field {field!r} of {place()} is {type(text).__name__}, not text\nTry: field=..."
            " with the name of the one that holds the text"
        )
    return text


@dataclass(frozen=True, kw_only=True)
class Records:
    """Records of ArrayRecord files: UTF-8 text, or with a field objects in JSON.

    Attributes:
        field: name of the field; None where a record is the text itself.
    """

    files: Files
    listed: tuple[FileInfo, ...]
    field: str | None

    @property
    def reading(self) -> str:
        """See `Source`."""
        return f"records, field {self.field!r}"

    @cached_property
    def _reader(self) -> Any:
        from grain.sources import ArrayRecordDataSource  # Grain is slow to import

        try:
            return ArrayRecordDataSource([str(self.files.path(info.name)) for info in self.listed])
        except (RuntimeError, ValueError, OSError) as error:
            raise DataError(
                f"the ArrayRecord files of {self.files.root} cannot be read: {error}\nTry: check"
                " that they are whole"
            ) from error

    def __len__(self) -> int:
        return math.ceil(len(self._reader) / RECORDS)

    def __getitem__(self, index: int) -> Sequence[Document]:
        numbers = range(index * RECORDS, min((index + 1) * RECORDS, len(self._reader)))
        try:
            records = self._reader.__getitems__(list(numbers))
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise DataError(
                f"records {numbers.start} to {numbers.stop - 1} of {self.files.root} cannot be"
                f" read: {error}\nTry: check that the files are whole"
            ) from error
        return [self._document(number, data) for number, data in zip(numbers, records, strict=True)]

    def _document(self, number: int, data: bytes) -> Document:
        name = f"record {number:,} of {self.files.root}"
        try:
            if self.field is None:
                return Document(name=name, text=data.decode("utf-8"), key=data)
            return Document(
                name=name,
                text=_field(parse_json(data, name, DataError), self.field, lambda: name),
                key=data,
            )
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{name} is no UTF-8 text: {error}\nTry: records of UTF-8 text, or of JSON with"
                " field=..."
            ) from error
