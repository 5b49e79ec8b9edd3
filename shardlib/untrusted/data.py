r"""Plain data of strangers: documents read within limits, values typed by the annotations of their
dataclasses, arguments of public functions, and text that is safe to show.

Text is escaped where a terminal would obey it, and no longer than a reader can use:

>>> printable("a\x1b[2Jb")
'a\\x1b[2Jb'
>>> shown("x" * 100, 20)
"'xxxxxxxx...xxxxxxx'"
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import operator
import os
import stat
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, TypeGuard, TypeVar, cast

from shardlib.errors import ArgumentError, MissingFileError, ShardlibError, raise_all

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: Plain data, as JSON and TOML have it: None, booleans, numbers, strings, and lists and dicts of
#: plain data, with strings as keys.
Json: TypeAlias = Any
#: An object of plain data that whoever makes it may still change.
JsonObject: TypeAlias = dict[str, Json]
#: An object of plain data that is only read.
JsonMapping: TypeAlias = Mapping[str, Json]


# --------------------------------------------------------------------------------------------------
# Arguments of public functions: checks of their kind, and seeds.

#: Seeds are below it.
SEEDS = 2**31
#: Whether a value is of a kind, the kind in words ("a string"), and an example.
Kind = tuple[Callable[[Any], bool], str, str]


def require_kinds(
    function: str,
    kinds: Mapping[str, Kind],
    values: Mapping[str, object],
    *,
    needed: Collection[str],
    error: type[ShardlibError] = ArgumentError,
    more: Sequence[str] = (),
) -> None:
    """Refuses arguments of the wrong kind.

    Args:
        values: arguments by name; None where one is left out.
        more: failures of other checks, listed with these.
    """
    wrong = [
        name
        for name, value in values.items()
        if (value is not None or name in needed) and not kinds[name][0](value)
    ]
    if wrong or more:
        raise_all(
            error,
            f"shardlib.{function} cannot use its arguments",
            [*(f"{name} is {_shown(values[name])}, not {kinds[name][1]}" for name in wrong), *more],
            hint="; ".join(kinds[name][2] for name in wrong),
        )


def _reads_as(read: Callable[[Any], object]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        try:
            return not isinstance(value, bool | str | bytes) and read(value) is not None
        except (TypeError, ValueError, OverflowError):
            return False

    return check


#: Annotations of fields whose values are checked, and the values in words.
_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_reads_as(operator.index), "an integer"),
    "float": (_reads_as(float), "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (lambda value: isinstance(value, str), "a string"),
    "Path": (lambda value: isinstance(value, os.PathLike), "a path"),
    "None": (lambda value: value is None, "None"),
    "UserLoss": (callable, "a function"),
    "JsonMapping": (lambda value: isinstance(value, Mapping), "a mapping"),
    "tuple[int, int]": (
        lambda value: (
            isinstance(value, tuple | list)
            and len(value) == 2
            and all(map(_TYPES["int"][0], value))
        ),
        "two integers",
    ),
}


def require_types(settings: DataclassInstance, name: str, error: type[ShardlibError]) -> None:
    """Refuses fields of a dataclass whose values are of other types than their annotations, as far
    as those are in `_TYPES`.
    """
    failures: list[str] = []
    examples: list[str] = []
    for field_ in fields(settings):
        types, value = str(field_.type).split(" | "), getattr(settings, field_.name)
        if {*types} <= _TYPES.keys() and not any(_TYPES[word][0](value) for word in types):
            words = " or ".join(_TYPES[word][1] for word in types)
            failures.append(f"{field_.name} is {_shown(value)}, not {words}")
            examples.append(f"{field_.name}={field_.default!r}")
    if failures:
        raise_all(error, f"{name} cannot use its arguments", failures, hint="; ".join(examples))


def is_integer(value: object) -> TypeGuard[int]:
    """True for an integer; a boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """True for a finite number; a boolean is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_positive(value: object, read: Callable[[Any], float] = float) -> bool:
    """True for a finite number above 0, of NumPy or JAX as well; booleans and texts are none."""
    try:
        return not isinstance(value, bool | str | bytes) and 0 < read(value) < math.inf
    except (TypeError, ValueError, OverflowError):
        return False


def is_count(value: object) -> bool:
    """True for an integer of at least 1, of NumPy or JAX as well; a boolean is none."""
    return is_positive(value, operator.index)


def read_seed(seed: SupportsIndex) -> int:
    """A seed as an integer."""
    try:
        number = operator.index(seed)
    except TypeError:
        raise ArgumentError(
            f"seed is {_shown(seed)}, not an integer\nTry: an integer from 0 to {SEEDS - 1}"
        ) from None
    if not 0 <= number < SEEDS:
        raise ArgumentError(f"seed {number} is out of range\nTry: an integer from 0 to {SEEDS - 1}")
    return number


def _shown(value: Any) -> str:
    """A value in a few words."""
    plain = (bool, int, float, str, type(None))
    if isinstance(value, tuple) and all(isinstance(item, plain) for item in value[:40]):
        return shown(value, 40)
    if isinstance(value, plain):
        text = shown(value, 1000)
        return text if len(text) <= 40 else f"{text[:40]}..."
    if callable(value) and (name := getattr(value, "__name__", "")):
        return f"the {'class' if isinstance(value, type) else 'function'} {name}"
    shape = getattr(value, "shape", ())
    return (
        f"an array of shape {tuple(shape)}"
        if shape and isinstance(shape, tuple)
        else f"a {type(value).__name__}"
    )


#: Characters of a value in a message; failures in one message; characters of a line that tells one
#: failure.
VALUE, FAILURES, FAILURE = 80, 20, 400
#: What text for people may hold beside printable characters.
LAYOUT = frozenset("\n\t")


def printable(text: str, allowed: frozenset[str] = LAYOUT) -> str:
    """The text with everything escaped that a terminal takes as a command, or that hides or turns
    around what stands beside it.

    Letters and signs of all languages stay; control characters (ESC, backspace, carriage return),
    formatting characters (overrides of the direction, zero-width ones), private and unpaired code
    points become `\\x1b`, `\\u202e`.

    Args:
        allowed: control characters that stay, by default those of layout.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in allowed or character == "\u00a0"
        else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    code = ord(character)
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def shown(value: object, limit: int = VALUE) -> str:
    """A value in a message: its `repr`, with the middle left out where it is long."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > 4 * limit:  # rather than escape a gigabyte
        value = value[: 2 * limit] + value[-2 * limit :]
    elif isinstance(value, (list, tuple, dict, set)):
        count = len(cast("Sized", value))
        if count > limit:
            return f"{type(cast('object', value)).__name__} of {count} entries"
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} of many levels"
    return fit(printable(text), limit)


def fit(text: str, limit: int) -> str:
    """A text of at most so many characters; the middle is left out.

    >>> fit("abcdefghijkl", 9)
    'abc...jkl'
    """
    if len(text) <= limit:
        return text
    after = (limit - 3) // 2
    return f"{text[: limit - 3 - after]}...{text[len(text) - after :]}"


def bounded(failures: Sequence[str]) -> list[str]:
    """Failures as one message lists them: not too many, and none too long."""
    listed = [fit(failure, FAILURE) for failure in failures[:FAILURES]]
    return (
        listed if len(failures) <= FAILURES else [*listed, f"and {len(failures) - FAILURES} more"]
    )


# --------------------------------------------------------------------------------------------------
# Plain data from a stranger's JSON or TOML file.
#
# A document is read within limits that no honest one comes near, and what comes out is plain: text
# is UTF-8, numbers are finite, no key is there twice, nothing is nested deeper than
# `Limits.depth`. Whatever is wrong is one error of the kind that the caller names.


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the size of a document.

    Attributes:
        bytes: of its text.
        depth: objects and lists in each other.
        magnitude: of its numbers.
    """

    bytes: int = 1 << 28
    depth: int = 64
    magnitude: float = 1e300


#: Of JSON: plans and indexes of large models have tens of megabytes.
LIMITS = Limits()
#: Of TOML, which people write by hand, and whose reader in Python is slow.
TOML_LIMITS = Limits(bytes=1 << 18)
#: Dots in a line of TOML: what the reader of the standard library takes in time and memory grows
#: with the square of the parts of a key.
TOML_DOTS = 200


class _Refused(ValueError):
    """A fault of a document, as the end of a message."""


def read_regular(path: str | Path, limit: int = -1) -> bytes:
    """The bytes of a regular file, as many as `limit` says; of a pipe, a device or a socket, which
    may have no end or nothing at all, nothing is read.

    Args:
        limit: bytes; -1 for all.
    """
    with open(
        path, "rb", opener=lambda file, flags: os.open(file, flags | getattr(os, "O_NONBLOCK", 0))
    ) as stream:  # a pipe must not stop us
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a file that can be read", str(path))
        return stream.read(limit)


def read_bytes(
    path: str | Path, what: str, error: type[ShardlibError], *, limit: int, hint: str = ""
) -> bytes:
    """The bytes of a file."""
    name, after = shown(str(path), 300), f"\nTry: {hint}" if hint else ""
    try:
        data = read_regular(path, limit + 1)
    except (FileNotFoundError, NotADirectoryError) as missing:
        raise MissingFileError(
            f"{what} {name} is not there (looked in {Path.cwd()}){after}"
        ) from missing
    except (OSError, ValueError) as failure:  # a name that no file can have is a ValueError
        reason = (
            failure.strerror if isinstance(failure, OSError) and failure.strerror else str(failure)
        )
        raise error(f"{what} {name} cannot be read: {reason}{after}") from failure
    if len(data) > limit:
        raise error(f"{what} {name} has more than {limit:,} bytes, which none can have")
    return data


def read_json(
    path: str | Path,
    what: str,
    error: type[ShardlibError],
    *,
    limits: Limits = LIMITS,
    hint: str = "",
) -> Json:
    """The plain data of a JSON file; see `read_bytes` and `parse_json`."""
    data = read_bytes(path, what, error, limit=limits.bytes, hint=hint)
    return parse_json(data, _file(what, path), error, limits=limits)


def read_toml(
    path: str | Path,
    what: str,
    error: type[ShardlibError],
    *,
    limits: Limits = TOML_LIMITS,
    hint: str = "",
) -> JsonObject:
    """The plain data of a TOML file; arguments and errors as those of `read_json`."""
    data = read_bytes(path, what, error, limit=limits.bytes, hint=hint)
    return parse_toml(data, _file(what, path), error, limits=limits)


def _file(what: str, path: str | Path) -> str:
    """Names a file in messages."""
    return f"{what} {shown(str(path), 300)}"


def parse_json(
    text: str | bytes,
    what: str,
    error: type[ShardlibError],
    *,
    limits: Limits = LIMITS,
    hint: str = "",
) -> Json:
    """The plain data of a JSON text.

    Args:
        text: as text, or as bytes of UTF-8.
    """
    after = f"\nTry: {hint}" if hint else ""
    if not isinstance(text, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise error(f"{what} is not valid JSON: it is {type(text).__name__} and no text{after}")
    return _parsed(text, f"{what} is not valid JSON", error, limits, _json, after)


def parse_toml(
    text: str | bytes, what: str, error: type[ShardlibError], *, limits: Limits = TOML_LIMITS
) -> JsonObject:
    """The plain data of a TOML text; arguments and errors as those of `parse_json`. Dates and times
    are not plain.
    """
    return _parsed(text, f"{what} is not valid TOML", error, limits, _toml)


def _toml(text: str) -> JsonObject:
    if any(line.count(".") > TOML_DOTS for line in text.split("\n")):
        raise _Refused(f"a line has more than {TOML_DOTS} dots")
    return tomllib.loads(text)


def _parsed(
    text: str | bytes,
    failed: str,
    error: type[ShardlibError],
    limits: Limits,
    parse: Callable[[str], Any],
    after: str = "",
) -> Any:
    try:
        if len(text) > limits.bytes:
            raise _Refused(f"it has more than {limits.bytes:,} bytes")
        value = parse(text.decode("utf-8") if isinstance(text, bytes) else text)
        _check(value, limits)
    except UnicodeDecodeError as wrong:
        raise error(
            f"{failed}: its bytes are not UTF-8 ({wrong.reason} at byte {wrong.start}){after}"
        ) from wrong
    except RecursionError as wrong:
        raise error(f"{failed}: it is nested deeper than {limits.depth} levels{after}") from wrong
    except ValueError as wrong:
        raise error(f"{failed}: {fit(printable(str(wrong)), 300)}{after}") from wrong
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as wrong:
        remainder = text[wrong.pos : wrong.pos + 24]
        raise _Refused(
            f"{wrong.msg.removesuffix(' at')} at line {wrong.lineno}, column {wrong.colno}, where"
            f" {f'{remainder!r} stands' if remainder else 'the text ends'}"
        ) from wrong


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Refused(f"the key {shown(twice)} is there twice")
    return table


def _constant(word: str) -> Any:
    raise _Refused(f"{word} is not a finite number")


def _check(root: Any, limits: Limits) -> None:
    """Looks at every value, without recursion."""
    waiting: list[tuple[Any, int]] = [(root, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, str):
            _check_text(value)
        elif isinstance(value, dict | list):
            if depth >= limits.depth:
                raise _Refused(f"it is nested deeper than {limits.depth} levels")
            if isinstance(value, dict):
                table = cast("dict[str, Any]", value)
                for key in table:
                    _check_text(key)
                waiting += [(item, depth + 1) for item in table.values()]
            else:
                waiting += [(item, depth + 1) for item in cast("list[Any]", value)]
        elif isinstance(value, int | float) and not -limits.magnitude <= value <= limits.magnitude:
            raise _Refused(
                f"{shown(value)} is "
                + (
                    "not a finite number"
                    if isinstance(value, float) and not math.isfinite(value)
                    else "too large a number"
                )
            )
        elif value is not None and not isinstance(value, int | float):
            raise _Refused(f"{shown(value)} is a {type(value).__name__}, which nothing here takes")


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise _Refused(f"{shown(text)} is half of a character, and no text") from None


# --------------------------------------------------------------------------------------------------
# The value that plain data describes: the annotations of its dataclass say what may be in it.
#
# What plain data looks like follows from the type, so that a field that a dataclass gets tomorrow
# is read and checked like the others:
#
# - `int`, `float`, `str`, `bool`, `None`: themselves. A bool is not a number, a number is finite,
#   an integer fits into 63 bits.
# - a tuple of any length, a sequence: a list. A tuple of one length: a list of that length.
# - pairs, `tuple[tuple[str, V], ...]`, and a mapping: an object from the first to the second, or a
#   list of pairs; of triples, (first, rest as a list).
# - a dataclass: an object with its fields, of which those with a default may be missing, or a list
#   of all of them in order. Keys that it does not have are totals, and passed over.
# - other types: as the caller says in a `Form`.
#
# All failures are found, each with its place: "estimate.seconds.compute is 'fast'; it is a
# number".

#: Integers are below this: sizes, counts and bytes of any machine are.
INTEGER = 1 << 63
#: What a failed construction of a value from plain data raises, whatever the value.
WRONG = (
    AssertionError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
)

#: Characters of an error of a value's own that is passed on as it is.
MESSAGE = 4000

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Form:
    """The written form of a type that is not a dataclass.

    Attributes:
        plain: annotation of the plain data.
        build: makes the value of it.
    """

    plain: Any
    build: Callable[[Any], Any]


@dataclass(kw_only=True)
class _Reader:
    forms: Mapping[Any, Form]
    least: float | None
    most: float
    failures: list[str] = field(default_factory=list[str])
    raised: ShardlibError | None = None

    def fail(self, path: str, value: object, expected: str) -> None:
        self.failures.append(f"{printable(fit(path, 120))} is {shown(value)}; it is {expected}")

    def read(self, kind: Any, value: Any, path: str) -> Any:
        """The value of a kind; where it fails, the failure is noted and something else comes
        back.
        """
        if kind is Any:
            return value
        if kind in self.forms:
            return self._built(self.forms[kind], value, path)
        origin = typing.get_origin(kind)
        if origin in (types.UnionType, typing.Union):
            return self._either(typing.get_args(kind), value, path)
        if origin is tuple:
            return self._tuple(typing.get_args(kind), value, path)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return dict(self._pairs(typing.get_args(kind), value, path))
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return self._tuple((typing.get_args(kind)[0], ...), value, path)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(cast("type[Any]", kind), value, path)
        return self._scalar(kind, value, path)

    def _built(self, form: Form, value: Any, path: str) -> Any:
        before = len(self.failures)
        plain = self.read(form.plain, value, path)
        return None if len(self.failures) > before else self._made(lambda: form.build(plain), path)

    def _made(self, make: Callable[[], Any], path: str) -> Any:
        try:
            return make()
        except (ShardlibError, *WRONG) as error:
            self.raised = error if isinstance(error, ShardlibError) else self.raised
            reason = str(error).removeprefix(f"the {path} is not usable:").lstrip()
            self.failures.append(
                f"{printable(fit(path, 120))} is not usable:"
                f" {fit(printable(reason), 240) or type(error).__name__}"
            )
            return None

    def _scalar(self, kind: Any, value: Any, path: str) -> Any:
        if kind is bool and not isinstance(value, bool):
            self.fail(path, value, "true or false")
        elif kind is str and not isinstance(value, str):
            self.fail(path, value, "a text")
        elif kind is type(None) and value is not None:
            self.fail(path, value, "null")
        elif kind in (int, float):
            self._number(kind, value, path)
        elif kind not in (bool, str, int, float, type(None)):
            raise AssertionError(f"{kind} of {path} has no plain form")
        return value

    def _number(self, kind: Any, value: Any, path: str) -> None:
        word = "an integer" if kind is int else "a number"
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or (kind is int and value != value // 1)
        ):
            self.fail(path, value, word)
        elif not -self.most <= value <= self.most or (kind is int and abs(value) >= INTEGER):
            self.fail(path, value, f"{word} of a size that there is")
        elif self.least is not None and value < self.least:
            self.fail(path, value, f"{word} of at least {self.least:g}")

    def _either(self, kinds: tuple[Any, ...], value: Any, path: str) -> Any:
        if value is None and type(None) in kinds:
            return None
        before = list(self.failures)
        for option in (options := [kind for kind in kinds if kind is not type(None)]):
            result, fresh = self.read(option, value, path), len(self.failures) > len(before)
            if not fresh:
                return result
            if option is not options[-1]:
                self.failures = list(before)
        return None

    def _tuple(self, kinds: tuple[Any, ...], value: Any, path: str) -> Any:
        many = len(kinds) == 2 and kinds[1] is Ellipsis
        if many and isinstance(value, Mapping):
            inner = typing.get_args(kinds[0])
            if (
                typing.get_origin(kinds[0]) is tuple
                and len(inner) >= 2
                and inner[0] is str
                and inner[1] is not Ellipsis
            ):
                return tuple(self._pairs(inner, value, path))
        if not isinstance(value, list | tuple):
            self.fail(path, value, "a list")
            return ()
        items = cast("Sequence[Any]", value)
        if not many and len(items) != len(kinds):
            self.fail(path, value, f"a list of {len(kinds)}")
            return ()
        return tuple(
            self.read(kinds[0] if many else kinds[i], item, f"{path}[{i}]")
            for i, item in enumerate(items)
        )

    def _pairs(self, kinds: tuple[Any, ...], value: Any, path: str) -> Iterator[tuple[Any, ...]]:
        if not isinstance(value, Mapping):
            self.fail(path, value, "an object")
            return
        for key, item in cast("Mapping[Any, Any]", value).items():
            place = f"{path}.{fit(str(key), 60)}"
            self.read(kinds[0], key, f"a key of {path}")
            if len(kinds) == 2:
                yield key, self.read(kinds[1], item, place)
            else:
                values = self._tuple(kinds[1:], item, place)
                yield key, *values

    def _dataclass(self, kind: type[Any], value: Any, path: str) -> Any:
        hints, before = _hints(kind), len(self.failures)
        init_fields = [entry for entry in dataclasses.fields(kind) if entry.init]
        if isinstance(value, list) and len(cast("list[Any]", value)) == len(init_fields):
            value = {
                entry.name: item
                for entry, item in zip(init_fields, cast("list[Any]", value), strict=True)
            }
        if isinstance(value, kind):
            value = {entry.name: getattr(value, entry.name) for entry in init_fields}
        if not isinstance(value, Mapping):
            self.fail(path, value, "an object")
            return None
        table, read = cast("Mapping[str, Any]", value), dict[str, Any]()
        for entry in init_fields:
            place = f"{path}.{entry.name}" if path else entry.name
            if entry.name in table:
                read[entry.name] = self.read(hints[entry.name], table[entry.name], place)
            elif (
                entry.default is dataclasses.MISSING
                and entry.default_factory is dataclasses.MISSING
            ):
                self.failures.append(f"{place} is missing")
        return (
            None
            if len(self.failures) > before
            else self._made(lambda: kind(**read), path or kind.__name__)
        )


#: Of types that are not dataclasses, how each is read.
Forms = Mapping[Any, Form]


@lru_cache(maxsize=256)
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def construct(
    kind: type[T],
    data: Json,
    what: str,
    error: type[ShardlibError],
    *,
    forms: Forms | None = None,
    least: float | None = None,
    most: float = 1e300,
    hint: str = "",
) -> T:
    """Reads plain data as a value.

    Args:
        least: smallest number anywhere in it; None for any.
    """
    reader = _Reader(forms=forms or {}, least=least, most=most)
    result = reader.read(kind, data, "")
    if (
        len(reader.failures) == 1
        and isinstance(reader.raised, error)
        and len(str(reader.raised)) < MESSAGE
    ):
        raise reader.raised  # it says itself what it is about
    if reader.failures:
        raise_all(error, f"{what} is not usable", bounded(reader.failures), hint=hint)
    return result
