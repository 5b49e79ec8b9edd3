"""The programs of one chunk, compiled for the devices of its stage.

Arguments and results are flat lists, in the order that the fields of `ChunkPrograms` say. Sums come
first among the results, so that the buffers that are donated for them become theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.lowering.mesh.memories import HOST
from shardlib.lowering.pipeline.per_stage.chunk_values import Held
from shardlib.lowering.pipeline.per_stage.chunk_work import Early, Late, Work, flat
from shardlib.lowering.pipeline.shared.linearised import is_floating
from shardlib.lowering.runtime.executable import Draft, Executable

Abstracts = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkPrograms:
    """The programs of one chunk.

    Attributes:
        gather: held -> operands of matmuls that are gathered before the first microbatch; None
            where nothing is.
        reduce: held, late sums -> the gradients in them, after the last microbatch; None where they
            are that already.
        forward: held, microbatch, what enters -> what leaves, what is stashed; None where `both`
            does it.
        backward: held, microbatch, what left (last chunk), what is stashed, cotangents (other
            chunks), sums -> sums, cotangents of what entered, what is passed on; None where `both`
            does it.
        both: held, microbatch, what enters, sums -> sums, cotangents of what entered, what is
            stashed for `weights`, what is passed on.
        weights: held, microbatch, what is stashed, what is passed on, sums -> sums; None where
            gradients of weights are not made apart.
        left: what leaves the chunk, with shardings.
        stashed: positions of what is stashed that `weights` reads.
        entered: how many cotangents are sent back.
    """

    gather: Executable | None = None
    reduce: Executable | None = None
    forward: Executable | None = None
    backward: Executable | None = None
    both: Executable | None = None
    weights: Executable | None = None
    left: Abstracts = ()
    stashed: tuple[int, ...] = ()
    entered: int = 0

    @property
    def all(self) -> tuple[Executable, ...]:
        """Those that there are."""
        return tuple(
            one
            for one in (
                self.gather,
                self.reduce,
                self.forward,
                self.backward,
                self.both,
                self.weights,
            )
            if one is not None
        )


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the programs of a chunk are given, abstract and with shardings.

    Attributes:
        held: see `Held`.
        micro: number of a microbatch.
        entering: what enters; empty for the first chunk.
        early, late: sums.
        gradients: of stacked parameters, as they are in the end.
    """

    held: Held
    micro: jax.ShapeDtypeStruct
    entering: Abstracts
    early: Early
    late: Late
    gradients: Abstracts


def chunk_programs(
    work: Work, given: Inputs, mesh: Mesh, name: str, *, apart: bool, at_once: bool
) -> ChunkPrograms:
    """Compiles the programs of a chunk.

    Args:
        work: what it does.
        given: what it is given.
        mesh: the devices of its stage.
        name: of the programs.
        apart: whether gradients of weights are made apart.
        at_once: whether it goes back at once after it has gone forward.
    """
    around, given = _around(work, given, mesh, name)
    start = (given.held, given.micro, list(given.entering))
    forward = Draft.of(flat(work.forward, start), jax.tree.leaves(start), mesh)
    hops = len(work.activations)
    saved = [
        _on_host(leaf, mesh) if away else leaf
        for leaf, away in zip(forward.results[hops:], forward.on_host[hops:], strict=True)
    ]
    late, stashed = _late(work, given, saved, mesh) if apart else (None, ())
    sent = [leaf.sharding for leaf in given.entering if is_floating(leaf)]
    if at_once:
        run, arguments, sums = _both(work, given, stashed, apart)
        draft = Draft.of(flat(run, arguments), jax.tree.leaves(arguments), mesh)
        both = _with_sums(draft, sums, sent, mesh, f"{name}_both")
        found = both.results[len(sums) + len(sent) :]
        saved, passed = found[: len(stashed)], found[len(stashed) :]
        made = replace(around, both=both, stashed=stashed, entered=len(sent))
    else:
        ahead = forward.compiled(f"{name}_forward", mesh)
        left, saved = ahead.results[:hops], ahead.results[hops:]
        draft, sums = _backward(work, given, left, saved, mesh, apart)
        back = _with_sums(draft, sums, sent, mesh, f"{name}_backward")
        saved, passed = [saved[k] for k in stashed], back.results[len(sums) + len(sent) :]
        made = replace(
            around,
            forward=ahead,
            backward=back,
            left=tuple(left),
            stashed=stashed,
            entered=len(sent),
        )
    if late is None:
        return made
    inputs = jax.tree.leaves((given.held, given.micro, list(saved), list(passed), given.late))
    return replace(
        made,
        weights=_with_sums(
            replace(late, inputs=tuple(inputs)),
            jax.tree.leaves(given.late),
            [],
            mesh,
            f"{name}_weights",
        ),
    )


def _on_host(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An abstract array in host memory, of no sharding in particular."""
    sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=HOST)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _around(work: Work, given: Inputs, mesh: Mesh, name: str) -> tuple[ChunkPrograms, Inputs]:
    """The programs before the first and after the last microbatch, and what the others are
    given.
    """
    if work.chunk.known is None:
        return ChunkPrograms(), given
    draft = Draft.of(flat(work.gather, (given.held,)), jax.tree.leaves(given.held), mesh)
    gather = draft.compiled(f"{name}_gather", mesh) if draft.sources else None
    given = replace(
        given,
        held=replace(given.held, ready=list(on_stage(gather.results, mesh)) if gather else []),
    )
    arguments = (given.held, given.late)
    last = Draft.of(flat(work.reduced, arguments), jax.tree.leaves(arguments), mesh)
    return (
        ChunkPrograms(
            gather=gather,
            reduce=last.compiled(
                f"{name}_reduce",
                mesh,
                shardings=[
                    *(leaf.sharding for leaf in given.gradients),
                    *(leaf.sharding for leaf in given.late.shared),
                ],
            ),
        ),
        given,
    )


def _with_sums(
    draft: Draft, sums: Sequence[jax.ShapeDtypeStruct], sent: Sequence[Any], mesh: Mesh, name: str
) -> Executable:
    """A program whose last inputs and first results are sums."""
    return draft.compiled(
        name,
        mesh,
        shardings=[*(leaf.sharding for leaf in sums), *sent],
        donated=range(len(draft.inputs) - len(sums), len(draft.inputs)),
    )


def _late(
    work: Work, given: Inputs, saved: Sequence[jax.ShapeDtypeStruct], mesh: Mesh
) -> tuple[Draft, tuple[int, ...]]:
    """Gradients of weights apart, and the positions of what they read of what is stashed; there
    are no shardings yet for that, nor for what is passed on.
    """

    def passed(held: Held, micro: Any, left: Any, stashed: Any, back: Any, early: Early) -> Any:
        return work.backward_inputs(held, micro, left, stashed, back, early)[2]

    left, back = _ends(work, work.activations)
    shapes = jax.eval_shape(passed, given.held, given.micro, left, list(saved), back, given.early)
    arguments = (given.held, given.micro, list(saved), shapes, given.late)
    draft, first = (
        Draft.of(flat(work.backward_weights, arguments), jax.tree.leaves(arguments), mesh),
        len(jax.tree.leaves(given.held)) + 1,
    )
    dropped = [k for k in range(first, first + len(saved)) if k not in draft.reads]
    return draft.without(dropped), tuple(k for k in range(len(saved)) if first + k not in dropped)


def _ends(work: Work, left: Sequence[jax.ShapeDtypeStruct]) -> tuple[list[Any], list[Any]]:
    """(what left, cotangents of it) as a backward pass is given them: the last chunk makes the one
    from the other.
    """
    return (list(left), []) if work.last else ([], [leaf for leaf in left if is_floating(leaf)])


def _backward(
    work: Work,
    given: Inputs,
    left: Sequence[jax.ShapeDtypeStruct],
    saved: Sequence[jax.ShapeDtypeStruct],
    mesh: Mesh,
    apart: bool,
) -> tuple[Draft, list[Any]]:
    """The backward pass, or what of it is not made apart, and its sums."""
    ends = _ends(work, left)
    if apart:
        arguments = (given.held, given.micro, *ends[:1], list(saved), *ends[1:], given.early)
        return Draft.of(
            flat(work.backward_inputs, arguments), jax.tree.leaves(arguments), mesh
        ), jax.tree.leaves(given.early)
    arguments = (
        given.held,
        given.micro,
        *ends[:1],
        list(saved),
        *ends[1:],
        given.early,
        given.late,
    )
    return Draft.of(
        flat(work.backward, arguments), jax.tree.leaves(arguments), mesh
    ), jax.tree.leaves((given.early, given.late))


def _both(
    work: Work, given: Inputs, stashed: Sequence[int], apart: bool
) -> tuple[Callable[..., Any], Any, list[Any]]:
    """Forward and backward in one, its arguments, and its sums."""

    def run(held: Held, micro: Any, entering: Any, early: Early, late: Late) -> Any:
        left, saved = work.forward(held, micro, entering)
        return work.backward(held, micro, left, saved, [], early, late)

    def inputs(held: Held, micro: Any, entering: Any, early: Early) -> Any:
        left, saved = work.forward(held, micro, entering)
        early, entered, passed = work.backward_inputs(held, micro, left, saved, [], early)
        return early, entered, [saved[k] for k in stashed], passed

    sums = (given.early,) if apart else (given.early, given.late)
    return (
        inputs if apart else run,
        (given.held, given.micro, list(given.entering), *sums),
        jax.tree.leaves(sums),
    )


def on_stage(leaves: Sequence[jax.ShapeDtypeStruct], mesh: Mesh) -> Abstracts:
    """What leaves one stage as it enters another.

    Args:
        leaves: abstract arrays of the stage before.
        mesh: of the stage after.
    """
    specs = [
        leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        for leaf in leaves
    ]
    return tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, specs, strict=True)
    )
