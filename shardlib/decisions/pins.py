"""Pins: the decisions that a user has made.

Pins use the words of a plan's JSON. A pinned `mesh` fixes every axis (those left out are 1); a
dotted `mesh.tensor` fixes that one axis and leaves the others to the planner.

>>> pins = Pins.parse({"mesh.tensor": 8, "remat": "full"})
>>> pins.axes, pins.mesh is None, pins.remat
((('tensor', 8),), True, 'full')
>>> str(pins.but(zero=3))
"mesh.tensor=8, zero=3, remat='full'"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from shardlib.axes import MeshShape, mesh_axis
from shardlib.decisions.contradictions import contradictions
from shardlib.decisions.dtypes import (
    DTYPES,
    Allowed,
    Dtypes,
    ordered,
    read_dtype,
)
from shardlib.decisions.pin_words import ENTRIES, pin_words, unknown, word_of
from shardlib.decisions.readers import GroupPolicies, PinValue
from shardlib.decisions.table import TABLE, Decisions
from shardlib.errors import HINT, PinError, ShardlibError, hoisted, raise_all
from shardlib.exchanges.values import EXACT, Exchange
from shardlib.rules import Rules
from shardlib.schedules.table import named
from shardlib.untrusted.json_types import JsonObject
from shardlib.untrusted.shown import shown

#: Decisions fixed by hand, by the words of a plan's JSON: plain data, or the values that it stands
#: for.
PinMapping = Mapping[str, PinValue]
T = TypeVar("T")
#: Pins in their order; `axes` are single mesh axes, (name, size).
_ORDER: tuple[str, ...] = ("mesh", "axes", *(word for word in TABLE if word != "mesh"), "allow")
#: What is pinned to nothing is left to the planner; of other pins () is a value like any other.
_COLLECTED = ("axes", "remat_classes", "dtypes", "allow")


class _Pinned(Generic[T]):
    """The pinned value of the decision that it is named for, or what stands for none.

    Args:
        absent: where the decision is left to the planner.
    """

    def __init__(self, absent: T) -> None:
        self._absent = absent

    def __set_name__(self, owner: type[Pins], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, pins: None, owner: type[Pins]) -> _Pinned[T]: ...
    @overload
    def __get__(self, pins: Pins, owner: type[Pins]) -> T: ...
    def __get__(self, pins: Pins | None, owner: type[Pins]) -> T | _Pinned[T]:
        return self if pins is None else dict(pins.given).get(self._name, self._absent)


@dataclass(frozen=True)
class Pins:
    """Decisions fixed by hand; None (or empty) leaves a decision to the planner.

    The attributes are views of `given` with the types that the planner reads. A decision that it
    does not read has none.

    Attributes:
        given: (word, value) of what is fixed; `axes` are single mesh axes, (name, size), `allow`
            is (what, dtypes) that the planner may choose beside those of the traced model.
    """

    given: tuple[tuple[str, Any], ...] = ()

    mesh = _Pinned[MeshShape | None](None)
    axes = _Pinned[tuple[tuple[str, int], ...]](())
    rules = _Pinned[Rules | None](None)
    sequence_parallel = _Pinned[bool | None](None)
    zero = _Pinned[int | None](None)
    remat = _Pinned[str | None](None)
    remat_layers = _Pinned[int | None](None)
    remat_classes = _Pinned[GroupPolicies](())
    microbatches = _Pinned[int | None](None)
    accumulation = _Pinned[int | None](None)
    schedule = _Pinned[str | None](None)
    virtual_stages = _Pinned[int | None](None)
    gather = _Pinned[str | None](None)
    pipeline = _Pinned[str | None](None)
    context = _Pinned[str | None](None)
    attention = _Pinned[str | None](None)
    experts = _Pinned[str | None](None)
    collective_matmul = _Pinned[str | None](None)
    offload = _Pinned[tuple[str, ...] | None](None)
    axis_order = _Pinned[tuple[str, ...] | None](None)
    exchange = _Pinned[Exchange](EXACT)
    dtypes = _Pinned[Dtypes](())
    allow = _Pinned[Allowed](())

    @classmethod
    def of(cls, **values: PinValue) -> Pins:
        """Pins of values that have been read; None leaves a decision to the planner."""
        return cls(
            tuple(
                (word, values[word])
                for word in _ORDER
                if values.get(word) is not None and not (word in _COLLECTED and not values[word])
            )
        )

    @classmethod
    def parse(cls, pin: PinMapping | Pins | None) -> Pins:
        """Reads pins."""
        if isinstance(pin, Pins):
            return pin
        if not isinstance(pin, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PinError(f"pins are a mapping such as {{'zero': 3}}; these are {shown(pin)}")
        failures: list[str] = []
        read: dict[str, Any] = {}
        axes: dict[str, int] = {}
        dtypes: dict[str, str] = {}
        for word, value in (pin or {}).items():
            try:
                if not isinstance(word, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                    failures.append(f"{word!r} is no decision; a decision is a word such as 'zero'")
                    continue
                word = word_of(word, value)
                if word.startswith("mesh."):
                    axis = mesh_axis(word.removeprefix("mesh."))
                    size = MeshShape({axis: value})[axis]
                    if axes.setdefault(axis, size) != size:
                        failures.append(
                            f"{word}={size} contradicts mesh.{axis}={axes[axis]}"
                            f"{HINT}mesh.{axis} once"
                        )
                elif word in DTYPES:
                    dtypes[word] = read_dtype(word, value)
                elif word in ENTRIES:
                    read[word] = ENTRIES[word].read(word, value)
                else:
                    failures.append(unknown(word))
            except ShardlibError as error:
                failures += _told(word, error)
        failures += contradictions(read, axes)
        failures += [
            f"{word}={dtypes[word]!r} contradicts dtypes={{{word!r}: {dtype!r}}}{HINT}{word} once"
            for word, dtype in read.get("dtypes", ())
            if dtypes.get(word, dtype) != dtype
        ]
        if failures:
            says, hint = hoisted(failures)
            raise_all(PinError, "pins are not usable", says, hint=hint)
        read["axes"] = () if "mesh" in read else tuple(sorted(axes.items()))
        read["dtypes"] = ordered({**dict(read.get("dtypes", ())), **dtypes})
        return cls.of(**read)

    def get(self, word: str) -> PinValue:
        """What a decision is pinned to; None where it is left to the planner."""
        return dict(self.given).get(word)

    def but(self, **changes: PinValue) -> Pins:
        """These pins with others; None, or () of a collection, leaves a decision to the planner."""
        return Pins.of(**{**dict(self.given), **changes})

    def changed(self, other: Pins) -> Pins:
        """These pins with those that the others set; a mesh or an axis of the others takes the
        place of all axes.
        """
        sizes = {"mesh", "axes"}
        freed = other._set.keys() | (sizes if other._set.keys() & sizes else set())
        remaining = Pins.of(**{word: value for word, value in self.given if word not in freed})
        both = remaining.but(**other._set)
        if failures := contradictions(both._set, dict(both.axes)):
            says, hint = hoisted(failures)
            raise_all(PinError, f"{other} is not usable beside {remaining}", says, hint=hint)
        return both

    @property
    def _set(self) -> dict[str, Any]:
        """What is pinned; () is a value, such as nothing that is offloaded."""
        return dict(self.given)

    @property
    def unsearched(self) -> Decisions:
        """The decisions that the planner does not make: as pinned, or their defaults; and all
        others by default.
        """
        return Decisions(
            **{
                word: value
                for word, value in self.given
                if word in TABLE and not TABLE[word].searched
            }
        )

    @property
    def unstaged(self) -> bool:
        """Whether a schedule is pinned that has no stages."""
        return self.schedule is not None and not named(self.schedule).staged

    @property
    def staged(self) -> bool:
        """Whether all plans under the pins have stages."""
        sizes = dict(self.mesh or self.axes)
        return (
            sizes.get("stage", 1) > 1
            or (self.schedule is not None and named(self.schedule).staged)
            or (self.accumulation or 1) > 1
            or (self.virtual_stages or 1) > 1
            or self.pipeline == "programs"
            or self.gather == "once"
        )

    def without(self) -> dict[str, Pins]:
        """For every pin, in the user's words, the other pins alone; used to find which pin to
        relax. Single mesh axes are relaxed together.
        """
        return {
            " and ".join(pin_words(word, value)): Pins(
                tuple(pin for pin in self.given if pin[0] != word)
            )
            for word, value in self.given
        }

    def to_json(self) -> JsonObject:
        """The pins as plain data in the user's words, which `parse` reads."""
        return {word: plain for pin in self.given for word, plain in pin_words(*pin).items()}

    def __str__(self) -> str:
        words = (f"{word}={shown(value)}" for word, value in self.to_json().items())
        return ", ".join(words) or "nothing"


def _told(word: str, error: ShardlibError) -> list[str]:
    """What is wrong with the value of a pin, with the decision that it is about."""
    if not error.failures:
        return [str(error)]
    decision = word.partition(".")[0]
    return [
        failure if decision in failure else f"{decision}: {failure}" for failure in error.failures
    ]
