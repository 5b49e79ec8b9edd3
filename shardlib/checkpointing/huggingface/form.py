"""How a parameter of a layer lies in a tensor of a file: dims are turned, joined, shared with other
parameters, or in pairs.

A form is written with a letter for each dim, ours first: "e h w -> h.w e" says that the file joins
heads and width of a head to one dim, and turns the matrix. Where a letter covers only a window of
the file's dim, `windows` has the size of the dim and where the window starts; a letter that is not
among ours is one place of the file's dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

#: First and last + 1 place of each of our dims.
Part = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Form:
    """How one parameter of one layer lies in a tensor.

    Attributes:
        dims: "ours -> theirs", a letter a dim, dims that the file joins with dots between.
        windows: letter -> (size of the dim in the file, where ours starts).
        paired: the letter of rotary dims whose pairs are neighbours in the file; ours are halves
            (arXiv:2104.09864).

    >>> Form(dims="e h w -> h.w e").file_shape((16, 4, 8))
    (32, 16)
    """

    dims: str
    windows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    paired: str = ""

    @cached_property
    def ours(self) -> list[str]:
        """Our letters, in order."""
        return self.dims.split("->")[0].split()

    @cached_property
    def theirs(self) -> list[list[str]]:
        """The letters of each dim of the file."""
        return [dim.split(".") for dim in self.dims.split("->")[1].split()]

    def file_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor in the file, from our shape."""
        full = self._full(shape)
        return tuple(math.prod(full[letter] for letter in dim) for dim in self.theirs)

    def places(self, shape: Sequence[int], part: Part) -> list[np.ndarray]:
        """Which places of each dim of the file a part of ours takes, in the order of the letters of
        the dim.
        """
        full, sizes, wanted = (
            self._full(shape),
            dict(zip(self.ours, shape, strict=True)),
            dict(zip(self.ours, part, strict=True)),
        )

        def of_letter(letter: str) -> np.ndarray:
            first = self.windows[letter][1] if letter in self.windows else 0
            start, stop = wanted.get(letter, (0, 1))
            return first + (
                _neighbours(sizes[letter])[start:stop]
                if letter == self.paired
                else np.arange(start, stop)
            )

        return [
            np.ravel_multi_index(
                np.ix_(*map(of_letter, dim)), [full[letter] for letter in dim]
            ).reshape(-1)
            for dim in self.theirs
        ]

    def ours_from(self, chosen: np.ndarray, part: Part) -> np.ndarray:
        """A part of ours out of the places of the file's tensor that `places` names."""
        sizes = {
            letter: stop - start for letter, (start, stop) in zip(self.ours, part, strict=True)
        }
        return np.transpose(
            chosen.reshape([sizes[letter] for letter in self._order]),
            [self._order.index(letter) for letter in self.ours],
        )

    def into(self, tensor: np.ndarray, whole: np.ndarray) -> None:
        """Writes a whole parameter of ours to its places in a tensor of the file's shape."""
        places = self.places(whole.shape, [(0, size) for size in whole.shape])
        turned = np.transpose(whole, [self.ours.index(letter) for letter in self._order])
        tensor[np.ix_(*places)] = turned.reshape([len(dim) for dim in places])

    @cached_property
    def _order(self) -> list[str]:
        """Our letters in the order of the file."""
        return [letter for dim in self.theirs for letter in dim if letter in self.ours]

    def _full(self, shape: Sequence[int]) -> dict[str, int]:
        """Size of every letter in the file, from our shape."""
        sizes = dict(zip(self.ours, shape, strict=True))
        return {
            letter: self.windows[letter][0] if letter in self.windows else sizes[letter]
            for dim in self.theirs
            for letter in dim
        }


def _neighbours(size: int) -> np.ndarray:
    """Where in neighbouring pairs the dims of two halves are: 0, 2, 4, ..., 1, 3, 5, ..."""
    return np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
