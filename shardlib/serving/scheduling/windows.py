"""Which pages does a request need where every layer looks back a few tokens alone?

>>> needed(window=8, budget=4, size=4), behind(window=8, computed=17, size=4)
(4, 2)
"""

from __future__ import annotations

from collections.abc import Sequence

#: In place of a page that a request has given back.
GONE = -1


def needed(*, window: int, budget: int, size: int) -> int:
    """Pages of a request at a time at most.

    Args:
        window: tokens that a token sees, itself included.
        budget: tokens of a step.
        size: tokens of a page.
    """
    return max(window + budget - 3, 0) // size + 2


def behind(*, window: int, computed: int, size: int) -> int:
    """Pages, from the first on, that no token to come sees.

    Args:
        window: tokens that a token sees, itself included; 0 for all.
        computed: tokens whose keys and values there are.
        size: tokens of a page.
    """
    return max(computed - window + 1, 0) // size if window else 0


def held(pages: Sequence[int]) -> list[int]:
    """The pages that a request has.

    Args:
        pages: of it, with `GONE` for those that it has given back.
    """
    return [page for page in pages if page != GONE]
