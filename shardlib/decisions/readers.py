"""Readers of decisions: from what a user or a stored plan says to a value, or an error that says
what would be one.

>>> one_of(("none", "full"))("remat", "full")
'full'
>>> integer(1)("microbatches", 0)
Traceback (most recent call last):
shardlib.errors.PinError: microbatches is 0; it is an integer of at least 1
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

import numpy as np

from shardlib.axes import ISLAND, MeshShape, mesh_axis
from shardlib.errors import PinError
from shardlib.rules import Rules
from shardlib.untrusted.json_types import Json
from shardlib.untrusted.shown import VALUE, shown

#: What a decision is pinned to or decided as: a word, a number, a truth value, or a value such as
#: `MeshShape`; its entry in the table says which.
PinValue = Any
#: (layer group, remat policy, how many of its layers follow it; None: all).
GroupPolicies = tuple[tuple[str, str, int | None], ...]
#: Every layer group may have a policy and a number of layers of its own.
ANY_GROUP: GroupPolicies = (("any", "", None),)
#: What can be in host memory; the planner chooses among these.
HOSTED: tuple[str, ...] = ("optimizer", "activations")
#: What can be elsewhere than on the device: that, or optimizer state on disk.
OFFLOAD: tuple[str, ...] = (*HOSTED, "disk")
#: Remat policies of layers.
REMAT: tuple[str, ...] = ("none", "dots", "full")


def one_of(values: Collection[PinValue]) -> Callable[[str, PinValue], PinValue]:
    """A reader of listed values, as the list is when it reads."""

    def read(word: str, value: PinValue) -> PinValue:
        legal = tuple(values)
        plain = _plain(value)
        for candidate in legal:
            if type(candidate) is type(plain) and candidate == plain:
                return candidate
        near = _meant(plain, legal)
        raise PinError(
            f"{word} is {shown(value)}; it is one of {', '.join(map(repr, legal))}{near}"
        )

    return read


def _plain(value: object) -> object:
    """A whole number or truth value of NumPy as Python's own; anything else as it is."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return value


def _meant(value: object, legal: Sequence[object]) -> str:
    """The legal value that is spelt almost so, as a question; empty where none is."""
    spelt = {str(candidate).lower(): candidate for candidate in legal}
    near = difflib.get_close_matches(str(value).lower(), spelt, n=1)
    fits = isinstance(value, str) and len(value) <= VALUE and near
    return f"; did you mean {spelt[near[0]]!r}?" if fits else ""


def integer(minimum: int) -> Callable[[str, PinValue], int]:
    """A reader of integers from `minimum` on."""

    def read(word: str, value: PinValue) -> int:
        counts = isinstance(value, Integral) and not isinstance(value, bool)
        if not counts or (number := int(value)) < minimum:  # NumPy's are integers, too
            raise PinError(f"{word} is {value!r}; it is an integer of at least {minimum}")
        return number

    return read


def read_mesh(word: str, value: Json) -> MeshShape:
    """Sizes of all mesh axes."""
    if isinstance(value, MeshShape):
        return value
    if not isinstance(value, Mapping):
        raise PinError(f"{word} is {value!r}; it is a mapping such as {{'data': 2, 'tensor': 4}}")
    return MeshShape(cast("Mapping[str, int]", value))


def read_rules(word: str, value: Json) -> Rules:
    """Rules in Flax's or MaxText's spelling, see `Rules.parse`."""
    return Rules.parse(value)


def read_group_policies(word: str, value: Json) -> GroupPolicies:
    """Remat policies of layer groups, from a mapping to a policy or (policy, number of layers).

    Args:
        value: {"layers": "full", "dense_layers": ["dots", 4]}, or "any".
    """
    if value == "any":
        return ANY_GROUP
    if not isinstance(value, Mapping):
        raise PinError(
            f"{word} is {value!r}; it is a mapping such as {{'encoder': 'full', 'decoder':"
            " ['dots', 3]}, by the names that plans show"
        )
    read: list[tuple[str, str, int | None]] = []
    for name, entry in cast("Mapping[str, Any]", value).items():
        pair = (
            [entry, None]
            if isinstance(entry, str)
            else list(cast("list[Any]", entry))
            if isinstance(entry, list | tuple)
            else []
        )
        policy, layers = pair if len(pair) == 2 else (None, None)
        if policy not in REMAT or not (
            layers is None or (type(layers) is int and layers >= (policy != "none"))
        ):
            raise PinError(
                f"{word}.{name} is {entry!r}; it is one of {', '.join(map(repr, REMAT))}, or a"
                " list of one of them and how many layers follow it, such as ['full', 3]"
            )
        read.append((str(name), policy, None if policy == "none" else layers))
    return tuple(sorted(read))


def write_group_policies(value: GroupPolicies) -> Json:
    """Remat policies of layer groups as `read_group_policies` reads them.

    >>> write_group_policies((("decoder", "dots", 3), ("encoder", "full", None)))
    {'decoder': ['dots', 3], 'encoder': 'full'}

    Args:
        value: what is read.
    """
    if value == ANY_GROUP:
        return "any"
    return {name: policy if layers is None else [policy, layers] for name, policy, layers in value}


def read_offload(word: str, value: Json) -> tuple[str, ...]:
    """What is offloaded, in the order of `OFFLOAD`; "none" or [] for nothing."""
    words = cast(
        "list[Any]",
        (
            [value]
            if isinstance(value, str)
            else list(cast("list[Any]", value))
            if isinstance(value, list | tuple)
            else [None]
        ),
    )
    if any(part not in (*OFFLOAD, "none") for part in words):
        raise PinError(f"{word} is {value!r}; it is a list of {', '.join(map(repr, OFFLOAD))}")
    if "none" in words and len(set(words)) > 1:
        raise PinError(f"{word} is {value!r}; 'none' is for nothing at all\nTry: [], or no 'none'")
    if {"optimizer", "disk"}.issubset(words):
        raise PinError(
            f"{word} names 'optimizer' and 'disk': optimizer state rests in host memory or on"
            " disk\nTry: one of them"
        )
    return tuple(part for part in OFFLOAD if part in words)


def read_axis_order(word: str, value: Json) -> tuple[str, ...]:
    """Mesh axes, the one on the outermost links first."""
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise PinError(
            f"{word} is {value!r}; it is a list of mesh axes, the one on the outermost links first"
        )
    axes = tuple(mesh_axis(str(name)) for name in cast("list[Any]", value))
    if len(set(axes)) < len(axes):
        raise PinError(f"{word} names an axis twice: {', '.join(axes)}")
    if ISLAND.name in axes[1:]:
        raise PinError(
            f"{word} is {', '.join(axes)}; islands lie on the outermost links\nTry:"
            f" {ISLAND.name!r} first, or not at all"
        )
    return axes
