"""The topology with the links as they were measured, to plan for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tomli_w

from shardlib.doctor.links import Measured
from shardlib.hardware.catalog import CATALOG
from shardlib.hardware.tier import Tier
from shardlib.hardware.topology import Topology


def corrected(machine: Topology, measured: Sequence[Measured], when: str) -> Topology:
    """A topology in which every tier that was measured has the rate that its collectives reached."""
    by_index = {link.index: link for link in measured}
    return replace(
        machine,
        tiers=tuple(
            _tier(tier, by_index[i], when) if i in by_index else tier
            for i, tier in enumerate(machine.tiers)
        ),
    )


def _tier(tier: Tier, link: Measured, when: str) -> Tier:
    """The tier with the rate at which the collective takes the seconds that were measured; where
    that is more than the peak, the peak rises. Latency stays, but for more than half of these
    seconds.
    """
    share = min(1.0, link.seconds / 2 / link.latency) if link.latency else 1.0
    rate = (
        tier.reached_bytes_per_s
        * (link.predicted - link.latency)
        / (link.seconds - share * link.latency)
    )
    source = (
        f"shardlib doctor, {when}: all-reduce of {link.bytes} bytes over {link.ways} devices in"
        f" {link.seconds:.3g} s"
    )
    return replace(
        tier,
        bytes_per_s=max(tier.bytes_per_s, rate),
        efficiency=min(1.0, rate / max(tier.bytes_per_s, rate)),
        latency_s=tier.latency_s * share,
        sources=(*tier.sources, source),
    )


def to_toml(machine: Topology) -> str:
    """The text of a topology file, which `shardlib.hardware.topology.topology` reads."""
    data = machine.to_json()
    name = machine.chip.name
    chip = name if name in CATALOG and CATALOG[name].chip == machine.chip else data["chip"]
    tiers = [
        {key: value for key, value in tier.items() if not (key == "wrap" and not any(value))}
        for tier in data["tiers"]
    ]
    return tomli_w.dumps(
        {
            "chip": chip,
            "tiers": tiers,
            **{key: data[key] for key in ("corrections", "efficiency") if key in data},
        }
    )
