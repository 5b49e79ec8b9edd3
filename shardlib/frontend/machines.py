"""The machine that is planned for: the one that the user names, that of a plan, or this host."""

from __future__ import annotations

import jax

from shardlib.errors import TopologyError, VerificationError
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as parse_topology
from shardlib.planning.plan import Plan
from shardlib.processes.devices import let_collectives_wait


def machine_of_plan(topology: str | Topology | None, plan: Plan | None) -> Topology:
    """The machine that is asked for; it must be the plan's own.

    Args:
        topology: what the user names; None for that of the plan.
        plan: None where there is none yet.

    Raises:
        VerificationError: the plan was made for another machine.
        TopologyError: as `machine_of`.
    """
    machine = machine_of(topology if topology is not None or plan is None else plan.topology)
    if plan is not None and machine.name != plan.topology:
        raise VerificationError(
            f"the plan was made for {plan.topology} and cannot be verified on {machine.name}\nTry:"
            f" plan for {machine.name}, or leave out `topology`"
        )
    return machine


def machine_of(spec: str | Topology | None) -> Topology:
    """The machine of a spelling; simulated CPU devices have the rates that are measured here.

    Args:
        spec: a spelling, a topology, or None for the devices of this host.

    Raises:
        TopologyError: the spelling does not parse; or None, and the devices here are accelerators.
        MissingFileError: the file of a topology is not there.
    """
    if spec is None:
        let_collectives_wait()
        return (
            _measured(jax.local_device_count())
            if jax.default_backend() == "cpu"
            else _local_accelerators()
        )
    parsed = parse_topology(spec)
    simulated = isinstance(spec, str) and parsed.name.startswith("cpu:")
    return _measured(parsed.devices) if simulated else parsed


def _measured(devices: int) -> Topology:
    from shardlib.calibration import measured_cpu  # no other machine needs what measures it

    return measured_cpu(devices)


def _local_accelerators() -> Topology:
    kinds = sorted({device.device_kind for device in jax.devices()})
    raise TopologyError(
        f"no topology was given, and the devices here are {len(jax.devices())} of"
        f' {", ".join(kinds)}\nTry: name it, e.g. topology="h100:8" or topology="v5e:2x4"'
    )
