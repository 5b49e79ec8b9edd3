"""Words behind `shardlib launch`: a training with its machine and its run, and variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardlib.errors import LaunchError

if TYPE_CHECKING:
    pass


def completed(command: Sequence[str], topology: str | None, run: str | None) -> tuple[str, ...]:
    """The words of a training with the machine and the folder of the run, where they do not name
    them; other words as they are.

    >>> completed(["train", "--steps", "9"], "16*h100:8", "/runs/a")
    ('train', '--steps', '9', '--topology', '16*h100:8', '--run', '/runs/a')
    """
    if not command or command[0] != "train":
        return tuple(command)
    missing = [
        (long, value)
        for long, short, value in (("--topology", "-t", topology), ("--run", "-r", run))
        if value is not None and option_of(command, (long, short)) is None
    ]
    return (*command, *(word for pair in missing for word in pair))


def option_of(command: Sequence[str], names: tuple[str, str]) -> str | None:
    """The value of an option of a training; None for other commands.

    >>> [option_of(["train", *words], ("--run", "-r")) for words in (["--run=a"], ["-r", "b"])]
    ['a', 'b']

    Args:
        command: words of a `shardlib` command.
        names: of the option, long and short.
    """
    if not command or command[0] != "train":
        return None
    for word, after in zip(command, [*command[1:], None], strict=True):
        if word in names:
            return after
        if word.startswith(f"{names[0]}="):
            return word.partition("=")[2]
    return None


def environment_of(words: Sequence[str]) -> dict[str, str]:
    """Variables from NAME=VALUE."""
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise LaunchError(
            f"--env {wrong[0]!r} is no NAME=VALUE\nTry: --env"
            " XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true"
        )
    return dict(word.split("=", 1) for word in words)
