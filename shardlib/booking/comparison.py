"""Machines side by side: which size of each ends a run in time, and what it takes."""

from __future__ import annotations

from shardlib.booking.compared import Compared
from shardlib.booking.page import comparison_html
from shardlib.booking.picture import comparison_svg


class Comparison(Compared):
    """Families of machines for one run; `print` shows a table, a notebook the picture."""

    def svg(self) -> str:
        """The comparison as a picture: days over devices, one line a family, with the deadline."""
        return comparison_svg(self)

    def html(self) -> str:
        """The comparison as one page without scripts or anything to fetch."""
        return comparison_html(self)

    def _repr_html_(self) -> str:
        return self.svg()
