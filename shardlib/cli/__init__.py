"""The command line: `shardlib plan | explain | diff | timeline | replan | scale | compare |
fit-model | edge | edge-stage | verify | train | status | launch | generate | export | serve |
bench-serve | doctor | measure | models | topologies`. Those of a wing are there where its package
is (`shardlib.wings`).

Text for people goes to stdout, progress and errors to stderr. With `--json` stdout holds JSON and
nothing else, and an error is a JSON object there, too. Whatever shardlib refuses is one message and
exit code 2; `--traceback` shows where it came from. JAX is imported by the commands that trace a
model, never for `--help`.

app.py       the application, its options and the types of arguments that commands share
commands.py  the commands of the core and of the wings, and errors as messages
inputs.py    from the words of a command line to models and plans
output.py    what commands print, and the files that they read and write
planning.py  pages and comparisons of plans
running.py   `shardlib train | status | measure`
"""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> None:
    """The console script: runs a command and turns errors of shardlib into messages."""
    from shardlib.cli import commands

    commands.run(arguments)
