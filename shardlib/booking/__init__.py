"""What should I book? Machines for a run, and runs for a machine.

    from shardlib import booking

    target = booking.Target(tokens=15e12, deadline=30 * booking.DAY, prices={"h100": 2.40})
    kinds = ["h100:8", "v5p"]
    print(booking.compare(init, loss, optimizer, batch, topologies=kinds, target=target))

target.py        what a run has to do, by when, and what its machines cost
sizes.py         the sizes in which a kind of machine is had
looking.py       which of them are planned
offers.py        the smallest and the cheapest, and what is proven of them
compared.py      kinds of machines side by side, as a table
picture.py       the same as a picture
page.py          the same as a page
comparison.py    with all of these
side_by_side.py  all of it
family.py        models of one shape and many sizes
fitted.py        the largest that ends in time, and what is proven of it
fitting.py       the search for it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlib.booking.comparison import Comparison
    from shardlib.booking.fitted import Fitted
    from shardlib.booking.fitting import Budget, fit_model
    from shardlib.booking.offers import Offer, Offers
    from shardlib.booking.side_by_side import compare
    from shardlib.booking.target import Failures, Target
    from shardlib.planning.answers.run_cost import DAY

_HOME = {
    "DAY": "shardlib.planning.answers.run_cost",
    "Budget": "shardlib.booking.fitting",
    "Comparison": "shardlib.booking.comparison",
    "Failures": "shardlib.booking.target",
    "Fitted": "shardlib.booking.fitted",
    "Offer": "shardlib.booking.offers",
    "Offers": "shardlib.booking.offers",
    "Target": "shardlib.booking.target",
    "compare": "shardlib.booking.side_by_side",
    "fit_model": "shardlib.booking.fitting",
}

__all__ = [
    "DAY",
    "Budget",
    "Comparison",
    "Failures",
    "Fitted",
    "Offer",
    "Offers",
    "Target",
    "compare",
    "fit_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardlib.booking' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
