"""What a user should know of the devices that a program runs on."""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.axes import MeshShape
from shardlib.errors import ShardlibError
from shardlib.hardware.topology import topology as parse_topology
from shardlib.processes.agreement import processes_text
from shardlib.report import Finding, diagnostic

#: What JAX calls the devices of a chip's vendor.
PLATFORMS = {"google": ("tpu",), "nvidia": ("gpu", "cuda"), "cpu": ("cpu",)}


@diagnostic
def idle_devices(shape: MeshShape, seen: int, processes: Sequence[int] = ()) -> tuple[Finding, ...]:
    """A finding where JAX sees more devices than a mesh uses, or where whole processes own none of
    them.
    """
    idle = seen - shape.devices
    if not idle and not processes:
        return ()
    if not idle:
        return (
            Finding(
                code="idle-devices",
                severity="info",
                where=str(shape),
                message=(
                    f"{processes_text(processes)} own{'s' * (len(processes) == 1)} no device of the"
                    " mesh, and wait with the others in every step."
                ),
                hint="plan for a topology of all devices",
            ),
        )
    return (
        Finding(
            code="idle-devices",
            severity="warning",
            where=str(shape),
            message=(
                f"the plan uses {shape.devices} of the {seen} devices that JAX sees; {idle} stay"
                f" idle{', all of ' + processes_text(processes) if processes else ''}."
            ),
            hint="plan for a topology of all devices",
        ),
    )


@diagnostic
def other_machine(topology: str | None, platform: str) -> tuple[Finding, ...]:
    """A finding where a program runs on devices of another kind than it was planned for.

    Args:
        topology: spelling of the one that the plan was made for; None where that is not known.
    """
    try:
        chip = None if topology is None else parse_topology(topology).chip
    except ShardlibError:  # a topology of the user's
        return ()
    if chip is None or platform in PLATFORMS[chip.vendor]:
        return ()
    return (
        Finding(
            code="other-machine",
            severity="info",
            where=topology or "",
            message=(
                f"the plan is for {chip.name} and the program runs on {platform} devices: predicted"
                " times and memory are not those of this machine"
            ),
            hint="a topology of the devices that JAX sees, unless this is a rehearsal",
        ),
    )
