"""The value that plain data describes: the annotations of its dataclass say what may be in it.

What plain data looks like follows from the type, so that a field that a dataclass gets tomorrow is
read and checked like the others:

- `int`, `float`, `str`, `bool`, `None`: themselves. A bool is no number, a number is finite, an
  integer fits into 63 bits.
- a tuple of any length, a sequence: a list. A tuple of one length: a list of that length.
- pairs, `tuple[tuple[str, V], ...]`, and a mapping: an object from the first to the second, or a
  list of pairs; of triples, (first, rest as a list).
- a dataclass: an object with its fields, of which those with a default may be missing, or a list of
  all of them in order. Keys that it does not have are totals, and passed over.
- other types: as the caller says in a `Form`.

All failures are found, each with its place: "estimate.seconds.compute is 'fast'; it is a number".
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar, cast

from shardlib.errors import ShardlibError, raise_all
from shardlib.untrusted.json_types import Json
from shardlib.untrusted.shown import bounded, fit, printable, shown

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
    """How a type that is no dataclass is written.

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
            self.failures.append(
                f"{printable(fit(path, 120))} is not usable:"
                f" {fit(printable(str(error)), 240) or type(error).__name__}"
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


#: Of types that are no dataclasses, how each is read.
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


@contextlib.contextmanager
def guarded(what: str, error: type[ShardlibError]) -> Iterator[None]:
    """Says a failure of what is made inside, of a stranger's data and nothing else, as an error of
    one kind. Errors of shardlib stay what they are.
    """
    try:
        yield
    except ShardlibError:
        raise
    except WRONG as wrong:
        raise error(
            f"{what} is not usable: {type(wrong).__name__}: {fit(printable(str(wrong)), 240)}"
        ) from wrong
