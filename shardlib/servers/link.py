"""How long a meeting takes over a link: an island sends its outer gradient, and gets the mean.

    seconds = (bytes sent + bytes received) / bytes_per_s + 2 latency_s

The latency is that of one message. Nothing is said of the wait for islands that are slower.

>>> link = read_link("50mbit-20ms")
>>> link.bytes_per_s, link.latency_s
(6250000.0, 0.02)
>>> round(link.seconds(625_000, 625_000), 3)
0.24
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shardlib.errors import ArgumentError
from shardlib.exchanges.diloco import DiLoCo
from shardlib.planning.units.quantity import bytes_text, seconds_text
from shardlib.report import Finding
from shardlib.servers.rounds.outline import Outline
from shardlib.servers.rounds.packing import packed_bytes
from shardlib.untrusted.shown import shown

#: Bytes of a message beside its numbers: lengths, header, names of arrays.
AROUND = 512


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between an island and the outer server, as fast in both directions.

    Attributes:
        bytes_per_s: its rate.
        latency_s: of one message.
    """

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        numbers = (self.bytes_per_s, self.latency_s)
        if not all(map(math.isfinite, numbers)) or self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ArgumentError(
                f"Link has bytes_per_s={self.bytes_per_s} and latency_s={self.latency_s}; a link"
                " has a rate of more than 0"
            )

    def seconds(self, sent: float, received: float) -> float:
        """Seconds of a question and its answer.

        Args:
            sent: bytes of the question.
            received: bytes of the answer.
        """
        return (sent + received) / self.bytes_per_s + 2 * self.latency_s


def read_link(text: str) -> Link:
    """A link as topologies spell it: "10gbit-50ms", "200mbit"."""
    number = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
    match = re.fullmatch(rf"{number}([gm])bit(?:-{number}ms)?", text)
    if match is None or not float(match[1]):
        raise ArgumentError(f"link is {shown(text)}\nTry: '10gbit-50ms' or '200mbit-20ms'")
    scale = 1e9 if match[2] == "g" else 1e6
    return Link(bytes_per_s=float(match[1]) * scale / 8, latency_s=float(match[3] or 0) / 1e3)


def meeting_bytes(exchange: DiLoCo, outline: Outline) -> int:
    """Bytes that an island sends at the largest of its meetings; it receives as many."""
    each = [
        [part.stop - part.start for part in outline.parts(fragment, exchange.fragments)]
        for fragment in range(exchange.fragments)
    ]
    return AROUND + max(packed_bytes(sizes, exchange.wire) for sizes in each)


def meeting_seconds(exchange: DiLoCo, outline: Outline, link: Link) -> float:
    """Seconds of the largest meeting of an island, where the others have sent as early."""
    size = meeting_bytes(exchange, outline)
    return link.seconds(size, size)


def meeting_finding(exchange: DiLoCo, outline: Outline, link: Link | None) -> Finding:
    """What an island moves at a meeting, and how long that takes.

    Args:
        link: between island and server; None where it is not known.
    """
    size = meeting_bytes(exchange, outline)
    message = (
        f"{exchange.islands} islands meet every {exchange.between} steps over a server. Each sends"
        f" {bytes_text(size)} at a meeting and receives as much; the server carries"
        f" {exchange.islands} times that in either direction."
    )
    hint = ""
    if link is not None:
        seconds = meeting_seconds(exchange, outline, link)
        message += f" Over its link that takes {seconds_text(seconds)}"
        if exchange.delay:
            each = seconds_text(seconds / exchange.delay)
            message += f", which {exchange.delay} steps of at least {each} hide"
        else:
            hint = "delay=, so that it crosses beside the next steps"
        message += "."
    return Finding(
        code="remote-meeting", severity="info", where=str(exchange), message=message, hint=hint
    )
