"""How many devices a host of a machine has, as clouds and vendors sell it."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.hardware.topology import Topology

#: Chips of a TPU host, of the generations whose slices have several hosts
#: [https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, read 2026-11].
TPU_HOST_CHIPS = 4
#: GPUs of a host where that is not 8 [nvidia GB200 NVL72: 18 trays of 4].
GPUS_PER_HOST: Mapping[str, int] = {"gb200": 4}
#: Generations with slices of eight chips on one host [docs.cloud.google.com/tpu/docs/{v5e,v6e}:
#: ct5lp-hightpu-8t, ct6e-standard-8t].
TPU_EIGHT = ("v5e", "v6e")


def devices_per_host(machine: Topology) -> int:
    """JAX devices of a host of this machine, by the kind of its chip."""
    chip = machine.chip
    domain = machine.devices // (
        machine.tiers[0].devices if machine.tiers[0].kind == "network" else 1
    )
    if chip.vendor == "google":
        chips = domain // chip.devices_per_chip
        return (
            chips
            if chips <= TPU_HOST_CHIPS or (chips == 8 and chip.name in TPU_EIGHT)
            else TPU_HOST_CHIPS
        ) * chip.devices_per_chip
    return min(domain, GPUS_PER_HOST.get(chip.name, 8)) if chip.vendor != "cpu" else domain
