"""What does a page hold? A digest of every token up to its end.

Pages of equal digests hold equal keys and values, so that a request whose prompt begins as another
one did takes its pages over. SHA-256, since two prompts of one digest would be served each other's
keys and values; with a salt, requests of different tenants share nothing, and cannot tell from how
quickly they are answered what others asked.

>>> digests([1, 2, 3, 4, 5], size=2) == digests([1, 2, 3, 4], size=2)
True
>>> digests([1, 2], size=2) == digests([1, 2], size=2, salt="other")
False
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def digests(
    tokens: Sequence[int], *, size: int, salt: str = "", before: Sequence[bytes] = ()
) -> list[bytes]:
    """Digests of the pages that tokens fill, the first in front."""
    listed = list(before)
    for page in range(len(listed), len(tokens) // size):
        last = listed[-1] if listed else hashlib.sha256(salt.encode()).digest()
        part = np.asarray(tokens[page * size : (page + 1) * size], np.int64).tobytes()
        listed.append(hashlib.sha256(last + part).digest())
    return listed
