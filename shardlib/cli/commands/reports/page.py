"""Options of `shardlib explain` that write a page, and what stands there beside the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from shardlib.cli.output import read_text, writable, write
from shardlib.errors import PlanError, RunError, VerificationError
from shardlib.untrusted import parse_json

if TYPE_CHECKING:
    from shardlib.planning.answers.answers import Answers
    from shardlib.planning.pictures.report.evidence import Evidence
    from shardlib.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page for the browser."""

    html: Annotated[
        Path | None,
        typer.Option("--html", callback=writable, help="Write a report for the browser here."),
    ] = None
    svg: Annotated[
        Path | None,
        typer.Option("--svg", callback=writable, help="Draw the plan on its machine here."),
    ] = None
    verified: Annotated[
        Path | None,
        typer.Option(
            "--verified",
            metavar="REPORT",
            help="With --html: what `shardlib verify --out` wrote, beside the prediction.",
        ),
    ] = None
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="FOLDER", help="With --html: a run whose steps were measured."
        ),
    ] = None

    def write(self, plan: Plan, answers: Answers | None) -> None:
        """Writes the page, where one was asked for."""
        if self.svg is not None:
            from shardlib.hardware.topology import topology
            from shardlib.planning.pictures.overview import plan_svg

            write(self.svg, plan_svg(plan, topology(plan.topology)))
        if self.html is None:
            if self.verified is not None or self.run is not None:
                raise PlanError("--verified and --run belong to a page\nTry: --html report.html")
            return
        from shardlib.planning.pictures.html import html_report

        evidence = [*self._compiled(plan), *self._measured(plan)]
        write(self.html, html_report(plan, answers=answers, evidence=evidence))

    def _compiled(self, plan: Plan) -> list[Evidence]:
        if self.verified is None:
            return []
        from shardlib.planning.pictures.report.evidence import Evidence
        from shardlib.verification.report import read_baseline

        again = "make it with `shardlib verify ... --out report.json`"
        text = read_text(self.verified, "report", again, VerificationError)
        collectives = read_baseline(text, str(self.verified))
        data = cast("Mapping[str, Any]", parse_json(text, "the report", VerificationError))
        _held_to(plan, cast("Mapping[str, Any]", data.get("plan") or {}), self.verified)
        peak = data["compiled"].get("device_bytes", {}).get("peak")
        size = peak if isinstance(peak, int) and not isinstance(peak, bool) else None
        return [Evidence(source="compiled", peak_bytes=size, collectives=collectives)]

    def _measured(self, plan: Plan) -> list[Evidence]:
        if self.run is None:
            return []
        from shardlib.planning.pictures.report.evidence import Evidence
        from shardlib.training.run.status import status

        state = status(self.run)
        stored = parse_json(
            read_text(self.run / "plan.json", "plan", "a run that has begun", RunError),
            "the plan of the run",
            RunError,
        )
        _held_to(plan, cast("Mapping[str, Any]", stored), self.run)
        pace = state.pace
        return [Evidence(source="measured", step_seconds=pace.step_seconds or None)]


def _held_to(plan: Plan, stored: Mapping[str, Any], source: Path) -> None:
    """What stands beside a prediction has to be of the same plan."""
    digest = str(stored.get("digest", ""))
    if digest != plan.digest:
        raise PlanError(
            f"{source} is of plan {digest or 'unknown'}, and the page is of plan"
            f" {plan.digest}\nTry: the plan.json of the run, or the plan that was verified"
        )
