"""Pages of the cache: free, in use by so many requests, or kept for the prefix that they hold.

A page that no request uses any more is kept while nobody needs the room; the one that has been kept
the longest goes first. A page is in use by several requests only where it is full and all of them
begin with the tokens that it holds.

>>> pool = Pool(pages=2)
>>> page = pool.take(); pool.keep(page, b"digest"); pool.drop(page)
>>> pool.available, pool.held([b"digest", b"other"])
(2, [0])
"""

from __future__ import annotations

from collections.abc import Sequence


class Pool:
    """So many pages.

    Args:
        pages: how many, at least 1.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages))[::-1]
        self._users = [0] * pages
        self._digest: dict[int, bytes] = {}
        self._page: dict[bytes, int] = {}
        self._kept: dict[int, None] = {}

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._kept)

    @property
    def used(self) -> int:
        """Pages that requests use."""
        return self.pages - self.available

    def users(self, page: int) -> int:
        """Requests that use a page."""
        return self._users[page]

    def take(self) -> int:
        """A page for one request, whatever it held before."""
        if self._free:
            page = self._free.pop()
        else:
            if not self._kept:
                raise IndexError("no page is free")
            page = next(iter(self._kept))
            del self._kept[page]
            del self._page[self._digest.pop(page)]
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more request uses a page that `held` has found."""
        assert page in self._digest, f"page {page} holds no known prefix"
        self._kept.pop(page, None)
        self._users[page] += 1

    def drop(self, page: int) -> None:
        """A request uses a page no longer."""
        assert self._users[page] > 0, f"nobody uses page {page}"
        self._users[page] -= 1
        if self._users[page]:
            return
        if page in self._digest:
            self._kept[page] = None
        else:
            self._free.append(page)

    def keep(self, page: int, digest: bytes) -> None:
        """A page in use is full; the first of each digest can be found again."""
        assert self._users[page] > 0, f"nobody uses page {page}"
        if digest not in self._page and page not in self._digest:
            self._page[digest], self._digest[page] = page, digest

    def forget(self) -> None:
        """No page can be found again; those that were kept are free."""
        self._free += list(self._kept)
        self._kept, self._digest, self._page = {}, {}, {}

    def held(self, digests: Sequence[bytes]) -> list[int]:
        """Pages that hold a prefix, up to the first that is not there."""
        pages: list[int] = []
        for digest in digests:
            if digest not in self._page:
                break
            pages.append(self._page[digest])
        return pages

    def has(self, digests: Sequence[bytes]) -> list[bool]:
        """Whether there is a page for each of some digests."""
        return [digest in self._page for digest in digests]

    def takes(self, pages: Sequence[int], more: int) -> bool:
        """Whether so many more pages are there beside some that are shared."""
        return more <= self.available - sum(page in self._kept for page in pages)
