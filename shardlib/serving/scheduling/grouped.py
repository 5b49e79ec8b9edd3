"""Pages of every cache group: layers that keep the same tokens have pages of their own.

    keeps all       a request has pages for all its tokens
    window W        it has those that hold the last W tokens, and gives the others back; pages of
                    what it is going to compute are taken as it computes it

A prefix is found where the first group has all its pages and each other one those that the next
token sees, as in vLLM's hybrid KV cache manager (docs.vllm.ai, design/hybrid_kv_cache_manager). As
in TensorRT-LLM the pages of a group are its own, so that none waits for another's.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlib.lowering.serving.cache_groups import CacheGroup
from shardlib.serving.scheduling.pool import Pool
from shardlib.serving.scheduling.windows import Held, behind, longest


class GroupedPool:
    """Pages of some cache groups.

    Args:
        groups: the one that keeps the most tokens first.
        size: tokens of a page.
    """

    def __init__(self, groups: Sequence[CacheGroup], size: int) -> None:
        self.groups, self.size = tuple(groups), size
        self.pools = [Pool(group.pages) for group in groups]

    @property
    def pages(self) -> int:
        """How many there are."""
        return sum(pool.pages for pool in self.pools)

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return sum(pool.available for pool in self.pools)

    @property
    def used(self) -> int:
        """Pages that requests use."""
        return sum(pool.used for pool in self.pools)

    def forget(self) -> None:
        """What pages hold is not found again; see `Pool.forget`."""
        for pool in self.pools:
            pool.forget()

    def known(self, digests: Sequence[bytes]) -> int:
        """Pages that a request need not compute."""
        count = len(digests)
        while True:
            before = count
            for group, pool in zip(self.groups, self.pools, strict=True):
                if group.window:
                    count = longest(group.window, self.size, pool.has(digests[:count]))
                else:
                    count = len(pool.held(digests[:count]))
            if count == before:
                return count

    def admits(self, digests: Sequence[bytes], tokens: int) -> bool:
        """Whether a request can be admitted: in the first group all its pages are reserved, in the
        others there are as many as all requests need.
        """
        gone = self._gone(0, len(digests))
        return self.pools[0].takes(
            self.pools[0].held(digests[gone:]), self._more(digests, tokens, gone)
        )

    def admit(self, digests: Sequence[bytes], tokens: int) -> tuple[Held, ...]:
        """The pages of a request that is admitted, by group."""
        pages_by_group: list[Held] = []
        for number, pool in enumerate(self.pools):
            gone = self._gone(number, len(digests))
            pages = pool.held(digests[gone:])
            for page in pages:
                pool.share(page)
            pages_by_group.append(Held(gone=gone, pages=pages))
        first = pages_by_group[0]
        more = self._more(digests, tokens, first.gone)
        first.pages += [self.pools[0].take() for _ in range(more)]
        return tuple(pages_by_group)

    def grow(self, pages: Sequence[Held], tokens: int) -> bool:
        """Takes pages for so many tokens of a request; whether there are enough."""
        for group, pool in zip(pages, self.pools, strict=True):
            while group.end * self.size < tokens:
                if not pool.available:
                    return False
                group.pages.append(pool.take())
        return True

    def room(self, pages: Sequence[Held]) -> int:
        """Tokens that the pages of a request have room for."""
        return min(group.end for group in pages) * self.size

    def keep(self, pages: Sequence[Held], first: int, digests: Sequence[bytes]) -> None:
        """Pages of a request are full, and can be found again."""
        for group, pool in zip(pages, self.pools, strict=True):
            for number in range(max(first, group.gone), len(digests)):
                pool.keep(group.at(number), digests[number])

    def leave(self, pages: Sequence[Held], computed: int) -> None:
        """A request gives pages back that no token to come sees."""
        for group, group_pages, pool in zip(self.groups, pages, self.pools, strict=True):
            gone = behind(window=group.window, computed=computed, size=self.size)
            count = max(gone - group_pages.gone, 0)
            for page in group_pages.pages[:count]:
                pool.drop(page)
            group_pages.gone, group_pages.pages = (
                group_pages.gone + count,
                group_pages.pages[count:],
            )

    def release(self, pages: Sequence[Held]) -> None:
        """A request gives all its pages back; the last one is taken by others first, since the
        others are of no use without the first.
        """
        for group, pool in zip(pages, self.pools, strict=False):
            for page in reversed(group.pages):
                pool.drop(page)

    def _gone(self, number: int, pages: int) -> int:
        window = self.groups[number].window
        return behind(window=window, computed=pages * self.size, size=self.size)

    def _more(self, digests: Sequence[bytes], tokens: int, gone: int) -> int:
        """Pages of the first group that a request takes at once."""
        limit = min(-(-tokens // self.size), gone + self.groups[0].table)
        return max(limit - len(digests), 0)
