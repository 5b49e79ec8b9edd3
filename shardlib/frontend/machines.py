"""The machine that is planned for: the one that the user names, that of a plan, or this host."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from shardlib.errors import VerificationError
from shardlib.hardware.devices import devices_of
from shardlib.hardware.topology import Topology, TopologyLike
from shardlib.hardware.topology import topology as parse_topology
from shardlib.planning.plan import Plan
from shardlib.processes.devices import let_collectives_wait


def machine_of_plan(topology: TopologyLike | None, plan: Plan | None) -> Topology:
    """The machine that is asked for; it must be the plan's own.

    Args:
        topology: what the user names; None for that of the plan.
        plan: None where there is none yet.
    """
    machine = machine_of(topology if topology is not None or plan is None else plan.topology)
    if plan is not None and machine.name != plan.topology:
        raise VerificationError(
            f"the plan was made for {plan.topology} and cannot be verified on {machine.name}\nTry:"
            f" plan for {machine.name}, or leave out `topology`"
        )
    return machine


def machine_of(spec: TopologyLike | None) -> Topology:
    """The machine of a spelling; simulated CPU devices have the rates that are measured here.

    Args:
        spec: a spelling, a topology, a mesh or a list of devices, or None for all devices that JAX
            sees, those of the other processes of a job included.
    """
    if spec is None:
        let_collectives_wait()
        if jax.default_backend() == "cpu":
            return _measured(jax.device_count())
        spec = jax.devices()
    parsed = parse_topology(spec)
    simulated = not isinstance(spec, Topology) and parsed.name.startswith("cpu:")
    return _measured(parsed.devices) if simulated else parsed


def _measured(devices: int) -> Topology:
    from shardlib.calibration import measured_cpu  # no other machine needs what measures it

    return measured_cpu(devices)


def first_devices(
    topology: TopologyLike | None, devices: Sequence[jax.Device] | None, count: int
) -> Sequence[jax.Device] | None:
    """The devices that a program uses: those that are given, or the first that the topology names;
    None for the first that JAX sees.

    Args:
        devices: exactly those to use; None for no such wish.
    """
    if devices is not None:
        return devices
    named = devices_of(topology)
    return None if named is None else named[:count]
