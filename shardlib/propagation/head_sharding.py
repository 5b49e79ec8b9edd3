"""How the heads of attention are shared out over devices that have parts of something else.

A kernel of attention needs the whole sequence and the whole width of the heads that it works on.
Where neither queries nor keys come sharded by heads, the devices that shard their sequence or width
exchange these for heads (arXiv:2309.14509): of queries one share each, and of keys and values as
well where there are enough of them. With fewer groups of keys than devices, every device gathers
all groups and works on the one of its queries.

>>> shared(heads=32, groups=8, ways=4), shared(heads=128, groups=8, ways=16)
('all', 'queries')
>>> shared(heads=12, groups=12, ways=8)
'none'
"""

from __future__ import annotations

from typing import Literal

#: Which heads are shared out: those of queries, keys and values, those of queries alone, or none.
Shared = Literal["all", "queries", "none"]


def shared(*, heads: int, groups: int, devices: int) -> Shared:
    """Which heads devices can share out."""
    if heads % devices:
        return "none"
    if groups % devices == 0:
        return "all"
    return "queries" if (heads // groups) % (heads // devices) == 0 else "none"
