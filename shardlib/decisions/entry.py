"""One decision in words and functions: how it is read, checked, written and told.

A field of `shardlib.decisions.table.Decisions` carries its `Entry`:

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True, kw_only=True)
... class Few:
...     gather: str = decision(
...         "use",
...         choices={"use": "for every operation", "once": "once a step"},
...         meaning="when weights are gathered",
...     )
>>> entries(Few)["gather"].read("gather", "once")
'once'
>>> Few()
Few(gather='use')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

from shardlib.axes import MeshShape
from shardlib.decisions.readers import PinValue, one_of

T = TypeVar("T")
#: Reads a value that a user gave, or plain data of a stored plan, under the name of its decision;
#: raises a `ShardlibError` where it is none.
Reader = Callable[[str, Any], Any]
#: Writes a value as plain data, for a plan with some mesh.
Writer = Callable[[Any, MeshShape], Any]
#: The word with which a pin leaves a decision to the planner that it would not take up by itself.
ANY = "any"


def _as_it_is(value: Any, mesh: MeshShape) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A decision: everything about it but its use.

    Attributes:
        default: its value in a plan that says nothing of it.
        meaning: what it decides, one line for people.
        choices: legal values and what each of them means; empty where values are not listed.
        read: reads a value.
        write: its plain data.
        values: how pins spell it, in Markdown; by default `choices`.
        label: the line of `Plan.explain` that tells it; by default its name.
        late: whether plans of older versions do not have it: it is part of a plan's identity only
            where it is not the default.
        searched: whether the planner decides it; otherwise it is as pinned, or the default.
        left_open: whether pins may leave it open with the word "any".
        also: further rows of the page of pins: (pin, values, meaning).
    """

    default: Any
    meaning: str
    choices: Mapping[Any, str]
    read: Reader
    write: Writer = _as_it_is
    values: str = ""
    label: str = ""
    late: bool = False
    searched: bool = True
    left_open: bool = False
    also: tuple[tuple[str, str, str], ...] = ()


class _Others(TypedDict, total=False):
    """What else an `Entry` says of a decision."""

    write: Writer
    values: str
    label: str
    late: bool
    searched: bool
    left_open: bool
    also: tuple[tuple[str, str, str], ...]


def decision(
    default: T,
    *,
    meaning: str,
    choices: Mapping[PinValue, str] | None = None,
    read: Reader | None = None,
    **others: Unpack[_Others],
) -> T:
    """A field of a dataclass with its entry."""
    assert choices or read, "something says which values are legal"
    left_open = (ANY,) if others.get("left_open") else ()
    entry = Entry(
        default=default,
        meaning=meaning,
        choices=choices or {},
        read=read or one_of((*(choices or ()), *left_open)),
        **others,
    )
    return field(default=default, metadata={"decision": entry})


def entries(kind: type[DataclassInstance]) -> dict[str, Entry]:
    """The entries of a dataclass by name, in order; fields without one are left out."""
    return {
        field.name: field.metadata["decision"]
        for field in fields(kind)
        if "decision" in field.metadata
    }
