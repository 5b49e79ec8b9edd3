"""What do the scripts of several engines have in common?

All text that comes from a user is quoted here or checked, so that no name or path can end a line or a word of a script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from shardlib.errors import LaunchError, raise_all
from shardlib.launching.job import Job

#: Exit code of a run that was stopped and has saved (`shardlib.training.supervisor`), which starts again without counting as a failure.
STOPPED = 75
#: Exit code for mistakes of the user, which no start repairs.
USAGE = 2
#: Values that stand in a line of a script or manifest as they are.
PLAIN = re.compile(r"[^\s\"'\\`$;&|<>#]+")


def exports(environment: Mapping[str, str]) -> list[str]:
    """Lines of shell that set variables.

    >>> exports({"XLA_FLAGS": "--a --b"})
    ["export XLA_FLAGS='--a --b'"]
    """
    return [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]


def inside(folder: str | None, path: str) -> str:
    """A path as a script sees it that runs elsewhere: relative ones begin in `folder`.

    >>> inside("/home/me", "runs/first"), inside("/home/me", "/runs/first"), inside("/home/me", "gs://bucket/run")
    ('/home/me/runs/first', '/runs/first', 'gs://bucket/run')
    """
    return path if folder is None or path.startswith("/") or "://" in path else f"{folder.rstrip('/')}/{path}"


def check_plain(settings: Any, names: Iterable[str]) -> list[str]:
    """What is wrong with fields that are text, or several texts, and stand in a script as they are."""
    failures: list[str] = []
    for name in names:
        value = getattr(settings, name)
        for text in (value,) if isinstance(value, str) else value or ():
            if not PLAIN.fullmatch(text):
                failures.append(f"{name} is {text!r}; it may hold no spaces, quotes or signs of the shell")
    return failures


def check_one_line(settings: Any) -> list[str]:
    """Which fields that are text have line breaks in them."""
    found = [(field.name, text) for field in fields(settings) for value in (getattr(settings, field.name),)
             for text in ((value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()) if isinstance(text, str)]
    return [f"{name} is {text!r}; it must be one line" for name, text in found if "\n" in text or "\r" in text]


def check_job(job: Job, engine: str, failures: Iterable[str], hint: str = "") -> None:
    """Refuses a job that an engine cannot run.

    Raises:
        LaunchError: there are failures.
    """
    found = list(failures)
    if found:
        raise_all(LaunchError, f"{engine} cannot run the job {job.name!r}", found, hint=hint)
