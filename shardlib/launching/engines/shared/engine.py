"""What an engine is: a name, its settings, and what it makes of a job.

    class Local:
        name, help, settings = "local", "Print the command.", LocalSettings

        def defaults(self):
            return {}

        def submission(self, job, settings):
            return Submission(engine="Local", files={}, commands=(("echo", *job.words),))

A row in `shardlib.launching.engines.table` makes it an engine of `shardlib launch`: the option
`--local`, its line of the help, `-o KEY=VALUE` for the fields of its settings, and `--dry-run` all
come from here.
"""

from __future__ import annotations

from typing import Any, Protocol

from shardlib.launching.engines.shared.submission import Submission
from shardlib.launching.job import Job
from shardlib.untrusted.json_types import JsonMapping

#: What an engine has to know beyond the job: a value of its own class of settings.
EngineSettings = Any


class Engine(Protocol):
    """What starts the processes of a job on its hosts.

    Attributes:
        name: of its option: "slurm" for `--slurm`.
        help: of its option, one line.
        settings: frozen dataclass of what it has to know beyond the job; a command line sets its
            fields as KEY=VALUE (`shardlib.launching.engines.shared.options`).
    """

    name: str
    help: str
    settings: type[Any]

    def defaults(self) -> JsonMapping:
        """Fields of the settings that a command line knows, where no word names them."""
        ...

    def submission(self, job: Job, settings: EngineSettings) -> Submission:
        """Files and commands that hand a job over."""
        ...
