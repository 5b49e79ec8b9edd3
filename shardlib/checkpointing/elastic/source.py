"""A checkpoint whose arrays are read for another number of islands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
from etils import epath

from shardlib.annotation.trees.paths import Tree
from shardlib.checkpointing import from_disk, reading
from shardlib.checkpointing.about import About
from shardlib.checkpointing.elastic.origins import stored_leaf
from shardlib.checkpointing.islands.form import islands_in, keeps_outer
from shardlib.checkpointing.snapshot import Camera


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint that is read.

    Attributes:
        path: of the checkpoint.
        about: its description.
        camera: has the programs that compute sums.
    """

    path: epath.Path
    about: About
    camera: Camera

    @property
    def islands(self) -> int:
        """Number of islands that were saved."""
        return islands_in(self.about.arrays)

    @property
    def keeps(self) -> bool:
        """Whether parameters are outer in it."""
        return keeps_outer(self.about.arrays)

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"the checkpoint of step {self.about.step}"

    def read(
        self, paths: Mapping[str, str], target: Mapping[str, Tree]
    ) -> Iterator[tuple[str, jax.Array]]:
        """Arrays as they are stored, a few at a time, by their paths in the target."""
        leaves = {
            path: stored_leaf(target[path], self.about.arrays[stored])
            for path, stored in paths.items()
        }
        for portion in from_disk.portions(leaves):
            named = {paths[path]: leaf for path, leaf in portion.items()}
            arrays = reading.read_arrays(self.path, self.about, named, self.camera)
            for path in portion:
                yield path, arrays.pop(paths[path])
