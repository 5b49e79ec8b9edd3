"""What Cloud TPU has to know beyond the job: zone, project, provisioning."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardlib.errors import LaunchError, raise_all
from shardlib.launching.engines.shared.shell import (
    check_one_line,
    check_plain,
)

PROVISIONING = ("on-demand", "spot", "reserved")


@dataclass(frozen=True, kw_only=True)
class TpuVmSettings:
    """What Cloud TPU has to know beyond the job.

    Attributes:
        zone: of the slices, "us-east5-a".
        project: Google Cloud project; None for that of gcloud's configuration.
        create: whether to ask for the slices; otherwise they are there, named like the job, with
            "-0", "-1", ... at the end where there are several.
        provisioning: one of `PROVISIONING`.
        runtime_version: software of the VMs; None for what Google names for the generation.
        network, service_account: of the VMs; None for the project's defaults.
        setup: lines of shell on every host before the processes start.
        workdir: folder on every host in which the processes start.
        options: further options of `gcloud compute tpus queued-resources create`.

    Raises:
        LaunchError: fields that no command can have, all of them listed.
    """

    zone: str = ""
    project: str | None = None
    create: bool = True
    provisioning: str = "on-demand"
    runtime_version: str | None = None
    network: str | None = None
    service_account: str | None = None
    setup: tuple[str, ...] = ()
    workdir: str | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = tuple(
            field.name
            for field in fields(self)
            if field.name not in ("zone", "setup", "workdir", "options", "create")
        )
        failures = check_plain(self, names) + check_one_line(self)
        failures += (
            [] if self.zone else ["zone is missing; it says where the slices are, e.g. us-east5-a"]
        )
        failures += (
            []
            if self.provisioning in PROVISIONING
            else [
                f"provisioning is {self.provisioning!r}; it must be one of"
                f" {', '.join(PROVISIONING)}"
            ]
        )
        failures += [
            f"options has {text!r}, which does not begin with --"
            for text in self.options
            if not text.startswith("--")
        ]
        if failures:
            raise_all(LaunchError, "settings of Cloud TPU are not usable", failures)
