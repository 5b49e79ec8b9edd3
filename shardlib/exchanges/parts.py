"""Elements of one parameter, and how many bytes of them cross together.

>>> str(Part(path="layers.up", start=0, stop=512))
'layers.up[0:512]'
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.untrusted.shown import shown

#: Bytes of a bucket, where nobody says otherwise: tensors are partitioned by 4 MB in ByteScheduler
#: (Peng et al., SOSP 2019), which take 3 ms of a link of 10 Gbit/s.
BUCKET_BYTES = 4 << 20
#: The least: smaller messages are mostly what stands around them.
LEAST_BUCKET_BYTES = 1 << 12


def wrong_bucket_bytes(value: object) -> list[str]:
    """What is wrong with the bytes of a bucket, for an error that lists it."""
    if type(value) is int and value >= LEAST_BUCKET_BYTES:
        return []
    return [f"bucket_bytes is {shown(value)}; it is an integer of at least {LEAST_BUCKET_BYTES}"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements of one parameter.

    Attributes:
        path: dotted path of the parameter.
        start: the first of its elements.
        stop: the one behind the last.
    """

    path: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.path}[{self.start}:{self.stop}]"
