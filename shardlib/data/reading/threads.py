"""Work that threads of a Grain pipeline do ahead, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Failed:
    """What a thread raised; Grain would write a remark of its own into the message."""

    error: Exception


class Ahead(Generic[T]):
    """An iterator over a function's results for every item, some of which are computed before they
    are asked for.
    """

    def __init__(
        self, function: Callable[[Any], T], items: Sequence[Any], *, threads: int, ahead: int
    ) -> None:
        """Begins to work."""
        import grain  # slow to import

        def attempt(item: Any) -> T | _Failed:
            try:
                return function(item)
            except Exception as error:
                return _Failed(error=error)

        self._results: Any = iter(
            grain.MapDataset.source(items)
            .map(attempt)
            .to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead))
        )
        self._results.start_prefetch()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next result."""
        result = next(self._results)
        if isinstance(result, _Failed):
            self.close()
            raise result.error
        return result

    def close(self) -> None:
        """Begins nothing more; a second time does nothing."""
        self._results.close()
