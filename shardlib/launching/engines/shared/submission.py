"""What an engine makes of a job.

Files to write and commands to run, as plain values: `--dry-run` prints them, tests read them, and
submitting is the same for all engines.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardlib.errors import LaunchError, MissingPackageError, raise_all
from shardlib.untrusted.shown import bounded, printable, shown

#: What no script and no command can have: NUL, and bytes that are no UTF-8, as Python reads them.
NO_TEXT = re.compile("[\\0\\ud800-\\udfff]")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What hands a job to a scheduler.

    Attributes:
        engine: its name, for messages.
        files: name of each file, in the folder of the submission, and its text.
        commands: words of each command, in order, run in that folder; the next only if the one
            before succeeded.
        secrets: names of variables that `submit` sets to random words for the commands, which pass
            them on by name; they stand in no file and no command line.
        notes: what people should know that the words do not show.
        later: (what for, words) of commands that the user will want afterwards: to look, and to
            stop.
    """

    engine: str
    files: Mapping[str, str]
    commands: tuple[tuple[str, ...], ...]
    later: tuple[tuple[str, tuple[str, ...]], ...] = ()
    secrets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        texts = [(name, text) for name, text in self.files.items()]
        texts += [("a command", shlex.join(words)) for words in self.commands]
        failures = [
            f"{name} would have the line {shown(line, 200)}"
            for name, text in texts
            for line in text.split("\n")
            if NO_TEXT.search(line)
        ]
        if failures:
            raise_all(
                LaunchError,
                f"{self.engine} cannot be given NUL, or what is no UTF-8",
                bounded(failures),
                hint="other options",
            )

    def __str__(self) -> str:
        parts = [f"# {name}\n{text.rstrip()}\n" for name, text in self.files.items()]
        parts += ["\n".join(f"# {note}" for note in self.notes)] if self.notes else []
        parts += ["\n".join(["# commands", *(shlex.join(words) for words in self.commands)])]
        parts += (
            ["\n".join(f"# {what}: {shlex.join(words)}" for what, words in self.later)]
            if self.later
            else []
        )
        return "\n".join(parts)


def _write(path: Path, text: str) -> None:
    """Writes a file that nobody but the user reads: what variables hold is nobody else's."""
    path.unlink(missing_ok=True)
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as stream:
        stream.write(text)


def _write_all(files: Mapping[str, str], folder: Path) -> None:
    """Writes the files of a submission into its folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            _write(folder / name, text)
    except (OSError, ValueError) as failure:  # a name that no file can have is a ValueError
        why = (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
        raise LaunchError(
            f"the files of the submission cannot be written into {printable(str(folder))}: {why}"
            "\nTry: --out with another folder"
        ) from failure


def submit(submission: Submission, folder: Path) -> str:
    """Writes the files into `folder`, runs the commands there, and gives what they printed."""
    missing = sorted({words[0] for words in submission.commands if shutil.which(words[0]) is None})
    if missing:
        raise MissingPackageError(
            f"{submission.engine} is driven with {', '.join(missing)}, which is not on the"
            " PATH\nTry: run this where it is installed, or --dry-run to see what would be"
            " submitted"
        )
    _write_all(submission.files, folder)
    outputs, environ = (
        list[str](),
        {
            **os.environ,
            **{name: secrets.token_hex(16) for name in submission.secrets},
        },
    )
    for words in submission.commands:
        done = subprocess.run(
            words,
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise LaunchError(
                f"{submission.engine} did not take the job: {shlex.join(words)} ended with code"
                f" {done.returncode}\n{(done.stderr or done.stdout).strip()}\nTry: what was written"
                f" is in {printable(str(folder))}; mend it there, or see it with --dry-run"
            )
        outputs.append(done.stdout.strip())
    return "\n".join(filter(None, outputs))
