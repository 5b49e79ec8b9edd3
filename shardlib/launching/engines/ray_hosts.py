"""What the driver on a Ray cluster is told: hosts, processes and resources, as one word."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardlib.errors import LaunchError
from shardlib.untrusted import construct, parse_json, shown


@dataclass(frozen=True, kw_only=True)
class RayHosts:
    """What the driver is told, in one word.

    Attributes:
        words: the command of every process.
        hosts: number of nodes.
        host_processes: processes on each.
        place: variables by which processes find each other, as far as they are the same for all.
        resources: of each host, as Ray names them: "GPU", "CPU".
        environment: variables of every process.
        workdir: folder of the processes; None for that of the actor, which Ray sets to the working
            directory of the Ray job.
        run: folder of the run, or None.
        restarts: starts in a row without a new checkpoint, after the first.
        seconds: time limit of one start, or None.
        wait_seconds: for the nodes.
    """

    words: tuple[str, ...]
    hosts: int
    host_processes: int = 1
    place: Mapping[str, str]
    resources: Mapping[str, float]
    environment: Mapping[str, str]
    workdir: str | None = None
    run: str | None = None
    restarts: int = 3
    seconds: int | None = None
    wait_seconds: int = 3600

    def to_json(self) -> str:
        """All fields."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RayHosts:
        """The opposite of `to_json`."""
        return construct(cls, parse_json(text, "the job", LaunchError), "the job", LaunchError)

    def to_word(self) -> str:
        """All fields as one word of letters, digits, "-" and "_": Ray puts the words of an
        entrypoint together with the quoting of Windows, and gives them to a shell of the head node,
        which would carry out what stands in them.
        """
        return base64.urlsafe_b64encode(self.to_json().encode()).decode().rstrip("=")

    @classmethod
    def from_word(cls, word: str) -> RayHosts:
        """The opposite of `to_word`."""
        try:
            text = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
        except ValueError as error:
            raise LaunchError(
                f"the driver was given {shown(word)}, which is no job\nTry: shardlib launch --ray,"
                " which starts it"
            ) from error
        return cls.from_json(text)
