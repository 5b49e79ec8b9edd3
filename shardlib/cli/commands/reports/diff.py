"""`shardlib diff`: what a change of a model or of its plan costs, and whether that is too much."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from shardlib.cli.app import AsJson, Changed, PlanFile
from shardlib.cli.groups import spread
from shardlib.cli.inputs import read_plan, replanned
from shardlib.cli.output import echo, quiet_stdout, writable, write
from shardlib.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may be added."""

    max_seconds: Annotated[
        str | None,
        typer.Option("--max-seconds", metavar="2%", help="Exit code 1 beyond so much more time."),
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option("--max-memory", metavar="2%", help="The same for bytes of a device."),
    ] = None
    max_traffic: Annotated[
        str | None,
        typer.Option("--max-traffic", metavar="2%", help="The same for bytes of collectives."),
    ] = None
    max_collectives: Annotated[
        str | None,
        typer.Option(
            "--max-collectives", metavar="0%", help="The same for the number of collectives."
        ),
    ] = None

    def parts(self) -> dict[str, float]:
        """The part of each figure that may be added, by its word."""
        limits: dict[str, float] = {}
        for field in fields(self):
            text = getattr(self, field.name)
            if text is None:
                continue
            word = field.name.removeprefix("max_")
            match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
            if match is None:
                raise PlanError(f"--max-{word} is {text!r}; it is a percentage\nTry: 2%")
            limits[word] = float(match[1]) / 100
        return limits


@spread
def diff_command(
    file: PlanFile,
    limits: Limits,
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="OTHER", help="The plan after the change. [the model planned again, now]"
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown, for a pull request.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", callback=writable, help="Write a page here.")
    ] = None,
    changed: Changed = False,
    as_json: AsJson = False,
) -> None:
    """Compare two plans: decisions, seconds, memory, collectives. Exit code 1: beyond a limit."""
    from shardlib.planning.text.change import change
    from shardlib.planning.text.diff import diff

    parts, before = limits.parts(), read_plan(file, changed=changed)
    if other is not None:
        after = read_plan(other, changed=changed)
    else:
        with quiet_stdout(as_json or markdown):
            after = replanned(before, {})
        if isinstance(after, str):
            raise PlanError(f"nothing fits any more: {after}")
    difference = change(before, after)
    beyond = difference.beyond(parts)
    if html is not None:
        from shardlib.planning.pictures.compared import compared_page

        write(html, compared_page(before, after))
    if as_json:
        echo(json.dumps({**difference.to_json(), "beyond": list(beyond), "ok": not beyond}))
    elif markdown:
        echo(difference.markdown(beyond), nl=False)
    else:
        sections = [
            diff(before, after),
            difference.collectives_text(),
            *(f"too much: {excess}" for excess in beyond),
        ]
        echo("\n\n".join(text.rstrip("\n") for text in sections if text))
    if beyond:
        raise typer.Exit(1)
