"""Whether a plan has what was pinned: asked of every answer, of every decision with listed values.

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

from shardlib.decisions.entry import ANY
from shardlib.decisions.pins import Pins
from shardlib.decisions.table import TABLE, Decisions
from shardlib.errors import PlanError, raise_all


def require_obeyed(pins: Pins, plan: Decisions) -> None:
    """Raises where a plan decides otherwise than its pins; values that are not listed, such as
    rules, are not compared.

    Args:
        pins: the user's decisions.
        plan: what was made under them.

    Raises:
        PlanError: it does, all of it listed: a mistake of the search.
    """
    missed = [
        f"{word} is pinned to {value!r}, and the plan has {getattr(plan, word)!r}"
        for word, value in pins.given
        if word in TABLE and TABLE[word].choices and value not in (ANY, getattr(plan, word))
    ]
    if missed:
        raise_all(
            PlanError,
            "the search did not obey its pins",
            missed,
            hint="no such pin, and tell us; a decision that is not searched needs searched=False in"
            " the table",
        )
