"""A function of arrays as compiled programs that are called one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from shardlib import _jax_compat
from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Value
from shardlib.lowering.runtime.executable import Executable


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A piece that is compiled. Values are numbers of what was traced.

    Attributes:
        program: from the values of `reads` to those of `made`.
        reads, made: values.
        stored: those of `reads` that are on disk.
        last: those of `reads` that nothing reads after it.
        beside: bytes per device of arrays that it does not read and that are there while it runs.
    """

    program: Executable
    reads: tuple[int, ...]
    made: tuple[int, ...]
    stored: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    beside: int = 0

    def __call__(self, values: Mapping[int, Value]) -> dict[int, Value]:
        """Its results."""
        return dict(
            zip(self.made, self.program([values[number] for number in self.reads]), strict=True)
        )

    def memory(self) -> dict[str, int]:
        """Bytes per device, see `Program.memory`; the peak has what lies beside it."""
        sizes = _jax_compat.compiled_memory(self.program.call)
        return {**sizes, "peak": sizes["peak"] + self.beside}


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """A function of arrays in shards.

    Attributes:
        inputs, outputs: values.
        results: structure of the outputs, but for the sums at their end.
        calls: in order; what the first makes, the others read.
        sums: of every output that goes to disk, the value of its sums; None where the function
            makes none.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    results: jax.tree_util.PyTreeDef
    calls: tuple[Call, ...]
    sums: Mapping[int, int | None]

    def tree(self, values: Mapping[int, Value]) -> Tree:
        """The outputs as the function returns them; each is an array of its own, since a step
        deletes them one by one.
        """
        seen: set[int] = set()
        leaves: list[Any] = []
        for number in self.outputs[: self.results.num_leaves]:
            leaf = values[number]
            leaves.append(leaf.copy() if number in seen else leaf)
            seen.add(number)
        return jax.tree.unflatten(self.results, leaves)
