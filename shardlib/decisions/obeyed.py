"""Whether a plan has what was pinned: asked of every answer, of every decision but those that
plans say in other words than pins.

A pin of a decision that the search does not know is obeyed only where its entry of the table says
`searched=False`; a search that passes over a pin in silence would lie to whoever reads the plan.

>>> from shardlib.decisions.table import Decisions
>>> require_obeyed(Pins.parse({"zero": 3, "remat": "full"}), Decisions(zero=3, remat="full"))
>>> require_obeyed(Pins.parse({"zero": 3}), Decisions(zero=2))
Traceback (most recent call last):
    ...
shardlib.errors.PlanError: the search did not obey its pins: zero is pinned to 3, and the plan has 2
Try: no such pin, and tell us; a decision that is not searched needs searched=False in the table
"""

from __future__ import annotations

from collections.abc import Iterator

from shardlib.axes import MeshShape
from shardlib.decisions.entry import ANY
from shardlib.decisions.pins import Pins
from shardlib.decisions.readers import PinValue
from shardlib.decisions.table import TABLE, Decisions
from shardlib.errors import PlanError, raise_all
from shardlib.untrusted.json_types import Json

#: What plans say in other words than pins: rules are completed, layers are counted in the fullest
#: stage, dtypes of the traced model are not said.
RETOLD: tuple[str, ...] = ("rules", "remat_layers", "remat_classes", "dtypes")


def require_obeyed(pins: Pins, plan: Decisions) -> None:
    """Raises where a plan decides otherwise than its pins; those of `RETOLD` are not compared."""
    missed = [
        f"{word} is pinned to {_plain(word, value)!r}, and the plan has {_plain(word, planned)!r}"
        for word, value, planned in _compared(pins, plan)
        if value not in (ANY, planned)
    ]
    if missed:
        raise_all(
            PlanError,
            "the search did not obey its pins",
            missed,
            hint="no such pin, and tell us; a decision that is not searched needs searched=False in"
            " the table",
        )


def _compared(pins: Pins, plan: Decisions) -> Iterator[tuple[str, PinValue, PinValue]]:
    """(pin, its value, that of the plan) of all that can be compared."""
    for word, value in pins.given:
        if word == "axes":
            yield from ((f"mesh.{axis}", size, plan.mesh[axis]) for axis, size in value)
        elif word == "axis_order":
            yield word, plan.mesh.in_order(value), plan.axis_order or tuple(plan.mesh)
        elif word in TABLE and word not in RETOLD:
            yield word, value, getattr(plan, word)


def _plain(word: str, value: PinValue) -> Json:
    """A value as a user writes it; the size of a single mesh axis as it is."""
    return TABLE[word].write(value, MeshShape()) if word in TABLE else value
