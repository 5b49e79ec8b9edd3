"""Differences between what is trained and what a run was begun with, from what `identity.py` has
traced; imports no JAX.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from shardlib.untrusted.json_types import JsonMapping

#: What can be another than before.
NAMES = ("loss", "optimizer", "lr", "data", "seed", "model", "batch", "exchange")
#: What allows to go on from checkpoints of which nobody has written down what they are of.
UNKNOWN = "identity"
#: Packages that write down what is traced.
PACKAGES = ("jax", "flax", "optax")
#: Differences of one kind that a message shows.
SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What another process of the run meant otherwise.

    Attributes:
        name: what it is called where it is allowed: "loss".
        text: what is different, in words.
    """

    name: str
    text: str


def unknown_names(allow: Sequence[str], identity: JsonMapping) -> list[str]:
    """What is wrong with the names of what may be another; nothing where nothing is."""
    words = dict.fromkeys((*NAMES, *identity, UNKNOWN))
    unknown = sorted({*allow} - {*words})
    if not unknown:
        return []
    return [f"allow_changes has {', '.join(map(repr, unknown))}; known are {', '.join(words)}"]


def versions() -> dict[str, str]:
    """Versions of what traces."""
    return {name: metadata.version(name) for name in PACKAGES}


def differences(
    known: JsonMapping,
    wanted: JsonMapping,
    before: JsonMapping,
    now: JsonMapping,
) -> list[Difference]:
    """What of a run is not as it was traced before."""
    others = [
        f"{name} {before.get(name, 'of an unknown version')} -> {version}"
        for name, version in now.items()
        if before.get(name) != version
    ]
    hint = (
        f"; it was traced by other versions ({', '.join(others)}), which may write the same down"
        " otherwise"
        if others
        else ""
    )
    found: list[Difference] = []
    for name, value in wanted.items():
        old = known.get(name, _BEFORE.get(name) if known else None)
        if (
            isinstance(old, Mapping)
            and _plain(old) != _plain(value)
            and not (name in _WORDS and old.get("digest") == value.get("digest"))
        ):
            found.append(
                Difference(
                    name=name,
                    text=_text(name, old, value)
                    + (hint if name in ("loss", "optimizer", "lr") else ""),
                )
            )
    return found


#: What runs are that were begun before it was written down.
_BEFORE = {"exchange": {"value": "exact"}}
_WORDS = {
    "loss": "the loss computes something else",
    "optimizer": "the optimizer is another, or has other guards",
    "lr": "numbers of the optimizer are others",
    "data": "the data are others",
    "model": "the model has other arrays",
}


def _text(name: str, old: JsonMapping, new: JsonMapping) -> str:
    if name not in _WORDS:
        return f"{name} is {_short(new)}, the run has {_short(old)}"
    more = _operations(old.get("operations"), new.get("operations")) or _numbers(
        old.get("constants"), new.get("constants")
    )
    return f"{name}: {_WORDS[name]}{f' ({more})' if more else ''}"


def _short(value: Mapping[str, Any]) -> str:
    text = ", ".join(map(str, value.values()))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _operations(old: Any, new: Any) -> str:
    """Which operations there are more or less of."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return ""
    counts = {
        name: _count(new.get(name)) - _count(old.get(name))
        for name in sorted({*old, *new}, key=str)
    }
    changed = [
        f"{abs(count)} {name} {'more' if count > 0 else 'less'}"
        for name, count in counts.items()
        if count
    ]
    return ", ".join(changed[:SHOWN]) + (
        f" and {len(changed) - SHOWN} more kinds" if len(changed) > SHOWN else ""
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _numbers(old: Any, new: Any) -> str:
    """Which numbers are others, where there are as many."""
    if not isinstance(old, list) or not isinstance(new, list) or len(old) != len(new):
        return ""
    changed = [
        f"{two!r} in place of {one!r}" for one, two in zip(old, new, strict=True) if one != two
    ]
    return ", ".join(dict.fromkeys(changed[:SHOWN])) + (
        f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    )


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
