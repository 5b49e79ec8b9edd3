"""Decisions as plain data, for JSON, and what of them tells plans apart.

>>> from shardlib.axes import MeshShape
>>> one = Decisions(mesh=MeshShape(fsdp=8), zero=3)
>>> plain(one)["mesh"], plain(one)["axis_order"], plain(one)["dtypes"]
({'fsdp': 8}, ['fsdp'], {})
>>> sorted(identity(one).keys() & {"zero", "dtypes"})  # dtypes are those of the traced model
['zero']
"""

from __future__ import annotations

from shardlib.decisions.entry import ANY
from shardlib.decisions.readers import PinValue
from shardlib.decisions.table import TABLE, Decisions
from shardlib.errors import ShardlibError
from shardlib.untrusted.json_types import JsonMapping, JsonObject


def plain(decisions: Decisions) -> JsonObject:
    """All decisions as plain data, in the words of pins."""
    return {
        word: entry.write(getattr(decisions, word), decisions.mesh) for word, entry in TABLE.items()
    }


def identity(decisions: Decisions) -> JsonObject:
    """The decisions that tell plans apart, as plain data: without those that plans of older
    versions do not have, where they are what those did.
    """
    return {
        word: value
        for word, value in plain(decisions).items()
        if not (TABLE[word].late and getattr(decisions, word) == TABLE[word].default)
    }


def values_of(decisions: Decisions) -> dict[str, PinValue]:
    """All decisions by name, to make another value of them: `Plan(**values_of(one), ...)`."""
    return {word: getattr(decisions, word) for word in TABLE}


def illegal(decisions: JsonMapping) -> list[str]:
    """Which decisions of a plan, as plain data, have values that none can have; "any" is a word of
    pins alone.
    """
    failures: list[str] = []
    for word, value in decisions.items():
        if word not in TABLE:
            continue
        if value == ANY:
            failures.append(f"{word} is 'any', which is no decision")
            continue
        try:
            TABLE[word].read(word, value)
        except (ShardlibError, TypeError) as error:
            failures.append(str(error))
    return failures
