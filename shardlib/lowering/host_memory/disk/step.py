"""A step whose optimizer state is on disk: one program for what comes before the update, and one
for every piece of the update.

    gradients        | piece 1 | piece 2 | piece 3 | ...
    read 1, read 2   |         | read 3  | read 4  |
                               | write 1 | write 2 | write 3

Reading is ahead by some pieces and writing behind by some arrays: so much of the state is in memory
of the host at a time, and one piece of it in that of the devices.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.lowering.host_memory.disk.arrays import DiskArray, Writer
from shardlib.lowering.host_memory.disk.calls import Call, Calls
from shardlib.lowering.host_memory.disk.compiling import (
    Where,
    init_calls,
    on_disk,
    step_calls,
    total,
)
from shardlib.lowering.host_memory.disk.files import VARIABLE, folder, in_memory
from shardlib.lowering.runtime.state import TrainState
from shardlib.report import Finding

#: Pieces that are read before they are needed.
AHEAD = 2


def writer(parent: str | os.PathLike[str] | None) -> tuple[Writer, tuple[Finding, ...]]:
    """What puts arrays on disk, in a new folder below another one, and what is to be said of that."""
    created = folder(parent)
    kind = in_memory(created.path)
    finding = Finding(
        code="disk-in-memory",
        severity="warning",
        where=str(created.path.parent),
        message=(
            f"the folder for state on disk is memory of the host ({kind}): nothing is saved there"
        ),
        hint=f"a folder on a disk: {VARIABLE}=/path or compile(..., disk='/path')",
    )
    return Writer(folder=created), (finding,) if kind else ()


@dataclass(frozen=True, kw_only=True, eq=False)
class DiskStep:
    """All programs of a training step, and of the first state.

    Attributes:
        where: what they are compiled for.
        batch: abstract, with shardings.
        function: (state, batch) -> (state, metrics), as a whole.
        first: seed -> state, as a whole.
        writer: puts arrays on disk.
    """

    where: Where
    batch: Tree
    function: Callable[[TrainState, Tree], Tree]
    first: Callable[[jax.Array], TrainState]
    writer: Writer
    _inits: dict[tuple[int, ...], Calls] = field(default_factory=dict[tuple[int, ...], Calls])
    _reader: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="state-from-disk")
    )

    @cached_property
    def _step(self) -> Calls:
        return step_calls(self.where, self.function, self.batch)

    def prepare(self) -> None:
        """Compiles the step."""
        _ = self._step

    def init(self, seed: np.ndarray | np.int32) -> TrainState:
        """The state before the first step, of a seed or of the data of a key."""
        shape = np.shape(seed)
        if shape not in self._inits:
            abstract = jax.ShapeDtypeStruct(shape, seed.dtype)
            self._inits[shape] = init_calls(self.where, self.first, abstract)
        calls = self._inits[shape]
        values: dict[int, Any] = {calls.inputs[0]: seed}
        for call in calls.calls:
            values.update(self._to_host(calls, call(values)))
        return calls.tree(values)

    def fresh(self, init: Callable[[Tree], Tree], params: Tree) -> Tree:
        """The optimizer's state before the first step for parameters that are there, one array at a
        time where it goes to disk.

        Args:
            init: parameters -> optimizer state.
        """
        abstract, structure = jax.tree.flatten(self.where.state.opt_state)
        first = len(
            jax.tree.leaves(
                (self.where.state.step, self.where.state.params, self.where.state.model_state)
            )
        )
        stored = {place - first for place in on_disk(self.where.state)}
        leaves: list[Any] = []
        for k, leaf in enumerate(abstract):
            array = jax.jit(
                lambda params, k=k: jax.tree.leaves(init(params))[k], out_shardings=leaf.sharding
            )(params)
            leaves.append(self._put(array) if k in stored else array)
        return structure.unflatten(leaves)

    def step(self, state: TrainState, batch: Tree) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step; deletes the state that it is given."""
        calls = self._step.calls
        values: dict[int, Any] = dict(
            zip(self._step.inputs, jax.tree.leaves((state, batch)), strict=True)
        )
        waiting = deque(calls[1:])
        reading = deque(
            self._read(waiting.popleft(), values) for _ in range(min(AHEAD, len(waiting)))
        )
        values.update(self._to_host(self._step, calls[0](values)))
        for call in calls[1:]:
            read = reading.popleft().result()
            if waiting:
                reading.append(self._read(waiting.popleft(), values))
            results = call(
                {
                    **values,
                    **{number: values[number].placed(pieces) for number, pieces in read.items()},
                }
            )
            for number in read:
                values[number].delete()
            for number in call.last:
                del values[number]
            values.update(self._to_host(self._step, results))
        return self._step.tree(values)

    def memory(self) -> dict[str, int]:
        """Bytes per device of the program that needs the most, with parameters and gradients that
        lie beside it.
        """
        return max((call.memory() for call in self._step.calls), key=lambda sizes: sizes["peak"])

    def _read(self, call: Call, values: Mapping[int, Any]) -> Future[dict[int, Any]]:
        """Begins to read the arrays of a piece that are on disk; a state that comes from elsewhere
        may have them in memory.
        """
        on_disk = {
            number: values[number]
            for number in call.stored
            if isinstance(values[number], DiskArray)
        }
        return self._reader.submit(
            lambda: {number: leaf.read() for number, leaf in on_disk.items()}
        )

    def _to_host(self, calls: Calls, results: Mapping[int, Any]) -> dict[int, Any]:
        """Results, with those on disk that rest there."""

        def put(number: int, leaf: Any) -> Any:
            if number not in calls.sums:
                return leaf
            sums_number = calls.sums[number]
            return (
                self._put(leaf)
                if sums_number is None
                else self.writer.put(leaf, results[sums_number])
            )

        return {number: put(number, leaf) for number, leaf in results.items()}

    def _put(self, array: jax.Array) -> DiskArray:
        """An array on disk, summed first."""
        return self.writer.put(array, total(array, self.where.whole))
