"""Pinned rules in the colours of a model."""

from __future__ import annotations

import difflib

from shardlib.decisions.pins import Pins
from shardlib.errors import PinError, raise_all
from shardlib.propagation.assignment import Choice
from shardlib.propagation.colours import Colouring
from shardlib.rules import Rules


def check_rules(rules: Rules, colouring: Colouring) -> Rules:
    """Translates pinned rules to colours.

    Args:
        rules: logical axis or colour -> mesh axes.
    """
    failures: list[str] = []
    entries: list[tuple[str, tuple[str, ...]]] = []
    known = sorted(
        {
            *colouring.colours,
            *(alias for colour in colouring.colours.values() for alias in colour.aliases),
        }
    )
    for logical, axes in rules.entries:
        name = colouring.canonical(logical)
        if name is None:
            near = difflib.get_close_matches(logical, known, n=1)
            failures.append(
                f"no dim is named {logical!r}{f'; did you mean {near[0]!r}?' if near else ''}"
                f" (names are {', '.join(known)})"
            )
        else:
            entries.append((name, axes))
    if failures:
        raise_all(PinError, "pinned rules do not fit the model", failures)
    return Rules(tuple(entries))


def fixed_choice(rules: Rules, colouring: Colouring, pins: Pins) -> Choice:
    """The choice that pinned rules stand for.

    Args:
        rules: colour -> mesh axes.
    """
    batch, sequence = colouring.batch_colour, colouring.sequence_colour
    ways = pins.mesh["tensor"] if pins.mesh is not None else dict(pins.axes).get("tensor", 1)
    optional = {
        name for name, axes in rules.entries if "tensor" not in axes
    }  # MaxText's fallbacks: a second rule for the same name
    cut = tuple(
        name
        for name, axes in rules.entries
        if "tensor" in axes
        and not (name in optional and name != sequence and colouring.colours[name].divisor % ways)
    )
    used = set(pins.mesh or ()) | {axis for axis, size in pins.axes if size > 1}
    lacking = [
        axis for axis in ("data", "fsdp") if axis in used and axis not in rules.axes_of(batch or "")
    ]
    if lacking:
        raise PinError(
            f"the pinned rules shard {batch!r} over {rules.axes_of(batch or '') or 'nothing'}, and"
            f" the pinned mesh also has {', '.join(lacking)}\nTry: the rule ({batch!r}, ('data',"
            " 'fsdp'))"
        )
    return Choice(
        tensor=tuple(dict.fromkeys(name for name in cut if name != sequence)),
        batch=batch,
        sequence=sequence if sequence in cut else None,
    )
