"""The words of pins: decisions, and what can be pinned beside them, as users write them.

>>> alias("tp"), alias("zero")
('mesh.tensor', 'zero')
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from shardlib.axes import MESH_AXES, MESH_AXIS_ALIASES, MeshShape
from shardlib.decisions.dtypes import DTYPES, read_allowed, read_dtype
from shardlib.decisions.entry import Entry
from shardlib.decisions.readers import PinValue
from shardlib.decisions.table import TABLE
from shardlib.errors import HINT, PinError
from shardlib.untrusted.json_types import JsonObject

#: Everything that can be pinned: decisions, and beside them dtypes one by one and dtypes that the
#: planner may choose.
ENTRIES: Mapping[str, Entry] = {
    **TABLE,
    **{
        word: Entry(default=None, meaning="one of `dtypes`", choices={}, read=read_dtype)
        for word in DTYPES
    },
    "allow": Entry(
        default=(),
        meaning="dtypes that the planner may choose",
        choices={},
        read=read_allowed,
        write=lambda value, mesh: {what: list(dtypes) for what, dtypes in value},
    ),
}


def pin_words(word: str, value: PinValue) -> JsonObject:
    """What is pinned, by the words that a user writes, as plain data.

    >>> pin_words("axes", (("tensor", 8),)), pin_words("offload", ())
    ({'mesh.tensor': 8}, {'offload': []})

    Args:
        word: of a decision, or "axes" for single mesh axes.
        value: as it was read.
    """
    if word == "axes":
        return {f"mesh.{axis}": size for axis, size in value}
    return {word: ENTRIES[word].write(value, MeshShape())}


def unknown(word: str) -> str:
    """That a word is no decision, and which one may be meant."""
    near = difflib.get_close_matches(word, [*ENTRIES, *(f"mesh.{axis}" for axis in MESH_AXES)], n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{word!r} is no decision{meant} (decisions are {', '.join(ENTRIES)} and mesh.AXIS)"


def aliased(pin: Mapping[str, PinValue]) -> dict[str, PinValue]:
    """Pins by their words, of keywords such as `tensor` or `tp`. A keyword that is a decision and a
    mesh axis, too, such as `context` or `pipeline`, is the axis where its value is a size.

    >>> aliased({"tp": 2, "context": 4}), aliased({"context": "ring"})
    ({'mesh.tensor': 2, 'mesh.context': 4}, {'context': 'ring'})

    Raises:
        PinError: two keywords that stand for the same word have different values.
    """
    pins: dict[str, PinValue] = {}
    for keyword, value in pin.items():
        word = word_of(keyword, value)
        if str(pins.setdefault(word, value)) != str(value):
            raise PinError(
                f"{keyword}={value!r} contradicts {word}={pins[word]!r}{HINT}{word} once"
            )
    return pins


def word_of(word: str, value: PinValue) -> str:
    """The pin word that a keyword stands for beside its value: a mesh axis becomes "mesh.tensor",
    unless it is a decision as well and the value is no size.

    >>> word_of("tensor", 8), word_of("context", 4), word_of("context", "ring")
    ('mesh.tensor', 'mesh.context', 'context')

    Args:
        word: as a user writes it.
        value: beside it.
    """
    return word if word in ENTRIES and isinstance(value, str) else alias(word)


def alias(word: str) -> str:
    """The pin word for a keyword such as `tensor` or `tp`: mesh axes become "mesh.tensor"."""
    return (
        f"mesh.{MESH_AXIS_ALIASES.get(word, word)}"
        if word in MESH_AXES or word in MESH_AXIS_ALIASES
        else word
    )
