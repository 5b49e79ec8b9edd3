"""Slow links between machines that stand apart: clusters, sites.

A link is one for all devices of a machine, so that each has its part of the rate. Of what crosses,
1,448 bytes in 1,538 are payload: a frame of 1,500 bytes with the headers of IPv4 and TCP with
timestamps (RFC 9293, RFC 7323), and 38 bytes around it (IEEE 802.3).

For comparison: many TCP connections at once reach 45 Gbit/s across Europe and 25 Gbit/s between
Europe and America (PCCL, arXiv:2505.14065); light needs 5 ms for 1,000 km of fibre.
"""

from __future__ import annotations

from shardlib.hardware.products import Link

#: Part of the rate that is payload.
PAYLOAD = 1448 / 1538
#: Latency where none is said, milliseconds: 2,000 km of fibre.
USUAL_MS = 10


def wide(gbit: float, ms: float, devices: int) -> Link:
    """A link between machines.

    Args:
        ms: latency in one direction, milliseconds.
    """
    return Link(
        name=f"{gbit:g} Gbit/s, {ms:g} ms",
        kind="network",
        bytes_per_s=gbit * 1e9 / 8 / devices,
        latency_s=ms / 1e3,
        efficiency=PAYLOAD,
        sources=("as spelled", "RFC 9293, RFC 7323, IEEE 802.3: payload of a frame"),
    )
