"""A plan that shows itself as a web page."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path

from shardlib.errors import ArgumentError, MissingFileError, PlanError, TopologyError
from shardlib.hardware.topology import topology as find_topology
from shardlib.planning.answers.answers import Answers
from shardlib.planning.pictures.html import html_report
from shardlib.planning.pictures.overview import plan_svg
from shardlib.planning.text.told_plan import ToldPlan


class ShownPlan(ToldPlan):
    """A plan in words and pictures."""

    def show(self, path: str | Path | None = None, *, browser: bool = True) -> Path:
        """Writes the plan as a web page, one file that fetches nothing, and opens it.

        Args:
            path: of the file; None for a new one in a temporary folder.
            browser: whether to open it in the browser of this machine.

        Returns:
            Where the page is.

        Raises:
            ArgumentError: the file cannot be written.
        """
        where = Path(path) if path is not None else Path(tempfile.mkdtemp()) / "plan.html"
        try:
            where.write_text(html_report(self, answers=self._asked()), encoding="utf-8")
        except OSError as error:
            raise ArgumentError(
                f"the page cannot be written to {where}: {error.strerror or error}\nTry: a file in"
                " a folder that is there and can be written"
            ) from error
        if browser:
            webbrowser.open(where.resolve().as_uri())
        return where

    def svg(self) -> str:
        """The plan on its machine as one picture, an SVG document that fetches nothing.

        It has the figures, the links with the mesh axes along them, and the step with its
        collectives.

        Raises:
            PlanError: the mesh has no place on the machine.
            TopologyError, MissingFileError: the plan's topology is a file that is not here.
        """
        return plan_svg(self, find_topology(self.topology))

    def _repr_svg_(self) -> str | None:
        try:
            return self.svg()
        except (PlanError, TopologyError, MissingFileError):  # the words are shown, and no picture
            return None

    def _asked(self) -> Answers:
        """What the page answers beside the plan."""
        return Answers()
