"""The programs of a step whose optimizer state is on disk, and of its first state."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from shardlib import _jax_compat
from shardlib.annotation.activations import no_mesh
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.jax_types import Function
from shardlib.lowering.host_memory.disk.calls import Call, Calls
from shardlib.lowering.host_memory.disk.parts import Piece, pieces
from shardlib.lowering.mesh.owners import owned, shapes_of
from shardlib.lowering.runtime.checksums import sums
from shardlib.lowering.runtime.executable import Draft
from shardlib.lowering.runtime.state import TrainState
from shardlib.tracing.program import Program, flatten

#: Name of what goes to disk.
STORED = "shardlib: stored on disk"


def on_disk(state: TrainState) -> dict[int, str]:
    """What of a state rests on disk, arrays of the optimizer's state that have a parameter's shape:
    positions among its leaves, and paths.
    """
    shapes = shapes_of(state.params)
    owners = jax.tree_util.tree_map_with_path(
        lambda path, leaf: owned(path, leaf, shapes) is not None, state.opt_state
    )
    marked = replace(jax.tree.map(lambda _: False, state), opt_state=owners)
    return {
        place: path_text(path)
        for place, (path, chosen) in enumerate(jax.tree_util.tree_leaves_with_path(marked))
        if chosen
    }


@dataclass(frozen=True, kw_only=True)
class Where:
    """What the programs are compiled for.

    Attributes:
        mesh: of the devices.
        state: abstract, with shardings.
        whole: sharding of what every device has whole.
        digest: of the plan, for the names of the programs.
    """

    mesh: Mesh
    state: TrainState
    whole: NamedSharding
    digest: str

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """Positions of the leaves of the state that rest on disk."""
        return tuple(on_disk(self.state))

    def traced(
        self,
        context: AbstractContextManager[object],
        function: Function,
        *inputs: Tree,
        summed: bool,
    ) -> tuple[Program, jax.tree_util.PyTreeDef]:
        """A function to a state, or to a tuple of which that is the first, over leaves of its
        inputs; and the structure of its results.

        What goes to disk is no other value of the function too. Behind the results are its sums,
        where they are asked for.
        """
        leaves, structure = jax.tree.flatten(inputs)
        treedefs: list[Any] = []
        cuts = [leaf.sharding for leaf in jax.tree.leaves(self.state)]

        def flat(*arguments: Any) -> list[Any]:
            results, treedef = jax.tree.flatten(function(*jax.tree.unflatten(structure, arguments)))
            treedefs.append(treedef)
            for k in self.stored:
                results[k] = checkpoint_name(results[k], STORED)
            return [
                *results,
                *(sums({"": results[k]}, {"": cuts[k]})[0] for k in self.stored if summed),
            ]

        with context:
            program = flatten(jax.make_jaxpr(flat)(*leaves))
        return program, treedefs[0]

    def shardings(self, program: Program) -> dict[int, NamedSharding]:
        """Of all outputs, the leaves of the state first."""
        cuts = [leaf.sharding for leaf in jax.tree.leaves(self.state)]
        return {
            number: cuts[k] if k < len(cuts) else self.whole
            for k, number in reversed(list(enumerate(program.outputs)))
        }


def total(array: jax.Array, replicated: NamedSharding) -> jax.Array:
    """The sums of an array, see `shardlib.lowering.runtime.checksums`."""
    return _total(array.sharding, replicated)(array)


@functools.cache
def _total(sharding: NamedSharding, replicated: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: sums({"": array}, {"": sharding})[0], out_shardings=replicated)


def step_calls(target: Where, step: Callable[[TrainState, Tree], Tree], batch: Tree) -> Calls:
    """Compiles (state, batch) -> (state, metrics): first what needs nothing from disk, then the
    pieces of the update.
    """
    program, results = target.traced(
        _jax_compat.in_mesh(target.mesh), step, target.state, batch, summed=True
    )
    leaves, count = jax.tree.leaves((target.state, batch)), len(jax.tree.leaves(target.state))
    stored = [program.inputs[k] for k in target.stored]
    cut = pieces(program, stored)
    avals: dict[int, Any] = dict(zip(program.inputs, leaves, strict=True))
    readers = Counter(number for piece in cut.rest for number in piece.given)
    state = set(program.inputs[:count])

    def compiled(piece: Piece, name: str, last: set[int]) -> Call:
        reads = (*piece.stored, *piece.given)
        draft = Draft.of_program(
            replace(program, inputs=reads, outputs=piece.made, equations=piece.equations),
            [avals[number] for number in reads],
        )
        cuts = target.shardings(program)
        built = draft.compiled(
            f"shardlib_{name}_{target.digest}",
            target.mesh,
            shardings=[cuts.get(number) for number in piece.made],
            donated=_taken_over(program, reads, last & state, piece.made),
        )
        return Call(
            program=built,
            reads=reads,
            made=piece.made,
            stored=piece.stored,
            last=tuple(sorted(last.intersection(reads))),
        )

    def spent(piece: Piece) -> set[int]:
        return {
            *piece.stored,
            *(number for number in piece.given if readers[number] == 1),
        }.difference(program.outputs)

    first = compiled(cut.first, "step", state.difference(program.outputs, readers, stored))
    avals.update(zip(first.made, first.program.results, strict=True))
    calls, resting = (
        [first],
        state.union(readers).difference(stored),
    )  # what a piece makes of parameters takes their place
    for k, piece in enumerate(cut.rest):
        call = compiled(piece, f"update_{k}", spent(piece))
        calls.append(
            replace(
                call, beside=sum(_bytes(avals[number]) for number in resting.difference(call.reads))
            )
        )
        resting = resting.difference(set(call.last).difference(state))
    return Calls(
        inputs=program.inputs,
        outputs=program.outputs,
        results=results,
        calls=tuple(calls),
        sums=dict(
            zip(
                (program.outputs[k] for k in target.stored),
                program.outputs[results.num_leaves :],
                strict=True,
            )
        ),
    )


def _taken_over(
    program: Program, reads: Sequence[int], spare: Collection[int], results: Sequence[int]
) -> list[int]:
    """Positions of what is read whose buffers results can have: those that nothing else reads, as
    far as there are results of their shape.
    """

    def kind(number: int) -> tuple[Any, ...]:
        return program.avals[number].shape, program.avals[number].dtype

    spare_results, positions = Counter(kind(number) for number in results), list[int]()
    for k, number in enumerate(reads):
        if number in spare and spare_results[kind(number)] > 0:
            spare_results[kind(number)] -= 1
            positions.append(k)
    return positions


def init_calls(
    target: Where, init: Callable[[jax.Array], TrainState], seed: jax.ShapeDtypeStruct
) -> Calls:
    """Compiles seed -> state: first what is not on disk, then what is, one array at a time.

    Sums are not made with them: XLA would add up zeros, of which optimizers' first states are made,
    while it compiles.

    Args:
        init: seed -> state.
    """
    program, results = target.traced(no_mesh(), init, seed, summed=False)
    stored, cuts = [program.outputs[k] for k in target.stored], target.shardings(program)

    def compiled(numbers: Sequence[int], name: str) -> Call:
        draft = Draft.of_program(replace(program, outputs=tuple(numbers)), [seed])
        built = draft.compiled(
            f"shardlib_{name}_{target.digest}",
            target.mesh,
            shardings=[cuts[number] for number in numbers],
        )
        return Call(program=built, reads=program.inputs, made=tuple(numbers), stored=())

    resting = tuple(dict.fromkeys(number for number in program.outputs if number not in stored))
    calls = [
        compiled(resting, "init"),
        *(compiled((number,), f"init_{k}") for k, number in enumerate(stored)),
    ]
    return Calls(
        inputs=program.inputs,
        outputs=program.outputs,
        results=results,
        calls=tuple(calls),
        sums=dict.fromkeys(stored),
    )


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of an abstract array on each device."""
    shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
    return int(np.prod(shape, dtype=np.int64)) * leaf.dtype.itemsize
