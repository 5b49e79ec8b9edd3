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
from shardlib.lowering.pipeline.per_stage.chunk_work import Early, Held, Late, Work, flat
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
            program
            for program in (
                self.gather,
                self.reduce,
                self.forward,
                self.backward,
                self.both,
                self.weights,
            )
            if program is not None
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
    work: Work, arguments_in: Inputs, mesh: Mesh, name: str, *, split: bool, at_once: bool
) -> ChunkPrograms:
    """Compiles the programs of a chunk."""
    around, arguments_in = _around(work, arguments_in, mesh, name)
    start = (arguments_in.held, arguments_in.micro, list(arguments_in.entering))
    forward = Draft.of(flat(work.forward, start), jax.tree.leaves(start), mesh)
    hops = len(work.activations)
    saved = [
        _on_host(leaf, mesh) if away else leaf
        for leaf, away in zip(forward.results[hops:], forward.on_host[hops:], strict=True)
    ]
    late, stashed = _late(work, arguments_in, saved, mesh) if split else (None, ())
    sent = [leaf.sharding for leaf in arguments_in.entering if is_floating(leaf)]
    if at_once:
        run, arguments, sums = _both(work, arguments_in, stashed, split)
        draft = Draft.of(flat(run, arguments), jax.tree.leaves(arguments), mesh)
        both = _with_sums(draft, sums, sent, mesh, f"{name}_both")
        results = both.results[len(sums) + len(sent) :]
        saved, passed = results[: len(stashed)], results[len(stashed) :]
        programs = replace(around, both=both, stashed=stashed, entered=len(sent))
    else:
        ahead = forward.compiled(f"{name}_forward", mesh)
        left, saved = ahead.results[:hops], ahead.results[hops:]
        draft, sums = _backward(work, arguments_in, left, saved, mesh, split)
        back = _with_sums(draft, sums, sent, mesh, f"{name}_backward")
        saved, passed = [saved[k] for k in stashed], back.results[len(sums) + len(sent) :]
        programs = replace(
            around,
            forward=ahead,
            backward=back,
            left=tuple(left),
            stashed=stashed,
            entered=len(sent),
        )
    if late is None:
        return programs
    inputs = jax.tree.leaves(
        (arguments_in.held, arguments_in.micro, list(saved), list(passed), arguments_in.late)
    )
    return replace(
        programs,
        weights=_with_sums(
            replace(late, inputs=tuple(inputs)),
            jax.tree.leaves(arguments_in.late),
            [],
            mesh,
            f"{name}_weights",
        ),
    )


def _on_host(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An abstract array in host memory, of no sharding in particular."""
    sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=HOST)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _around(work: Work, inputs: Inputs, mesh: Mesh, name: str) -> tuple[ChunkPrograms, Inputs]:
    """The programs before the first and after the last microbatch, and what the others are
    given.
    """
    if work.chunk.known is None:
        return ChunkPrograms(), inputs
    draft = Draft.of(flat(work.gather, (inputs.held,)), jax.tree.leaves(inputs.held), mesh)
    gather = draft.compiled(f"{name}_gather", mesh) if draft.sources else None
    inputs = replace(
        inputs,
        held=replace(inputs.held, ready=list(on_stage(gather.results, mesh)) if gather else []),
    )
    arguments = (inputs.held, inputs.late)
    last = Draft.of(flat(work.reduced, arguments), jax.tree.leaves(arguments), mesh)
    return (
        ChunkPrograms(
            gather=gather,
            reduce=last.compiled(
                f"{name}_reduce",
                mesh,
                shardings=[
                    *(leaf.sharding for leaf in inputs.gradients),
                    *(leaf.sharding for leaf in inputs.late.shared),
                ],
            ),
        ),
        inputs,
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
    work: Work, inputs: Inputs, saved: Sequence[jax.ShapeDtypeStruct], mesh: Mesh
) -> tuple[Draft, tuple[int, ...]]:
    """Gradients of weights apart, and the positions of what they read of what is stashed; there
    are no shardings yet for that, nor for what is passed on.
    """

    def passed(resident: Held, micro: Any, left: Any, stashed: Any, back: Any, early: Early) -> Any:
        return work.backward_inputs(resident, micro, left, stashed, back, early)[2]

    left, back = _ends(work, work.activations)
    shapes = jax.eval_shape(
        passed, inputs.held, inputs.micro, left, list(saved), back, inputs.early
    )
    arguments = (inputs.held, inputs.micro, list(saved), shapes, inputs.late)
    draft, first = (
        Draft.of(flat(work.backward_weights, arguments), jax.tree.leaves(arguments), mesh),
        len(jax.tree.leaves(inputs.held)) + 1,
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
    inputs: Inputs,
    left: Sequence[jax.ShapeDtypeStruct],
    saved: Sequence[jax.ShapeDtypeStruct],
    mesh: Mesh,
    split: bool,
) -> tuple[Draft, list[Any]]:
    """The backward pass, or what of it is not made apart, and its sums."""
    ends = _ends(work, left)
    if split:
        arguments = (inputs.held, inputs.micro, *ends[:1], list(saved), *ends[1:], inputs.early)
        return Draft.of(
            flat(work.backward_inputs, arguments), jax.tree.leaves(arguments), mesh
        ), jax.tree.leaves(inputs.early)
    arguments = (
        inputs.held,
        inputs.micro,
        *ends[:1],
        list(saved),
        *ends[1:],
        inputs.early,
        inputs.late,
    )
    return Draft.of(
        flat(work.backward, arguments), jax.tree.leaves(arguments), mesh
    ), jax.tree.leaves((inputs.early, inputs.late))


def _both(
    work: Work, arguments: Inputs, stashed: Sequence[int], split: bool
) -> tuple[Callable[..., Any], Any, list[Any]]:
    """Forward and backward in one, its arguments, and its sums."""

    def run(resident: Held, micro: Any, entering: Any, early: Early, late: Late) -> Any:
        left, saved = work.forward(resident, micro, entering)
        return work.backward(resident, micro, left, saved, [], early, late)

    def inputs(resident: Held, micro: Any, entering: Any, early: Early) -> Any:
        left, saved = work.forward(resident, micro, entering)
        early, entered, passed = work.backward_inputs(resident, micro, left, saved, [], early)
        return early, entered, [saved[k] for k in stashed], passed

    sums = (arguments.early,) if split else (arguments.early, arguments.late)
    return (
        inputs if split else run,
        (arguments.held, arguments.micro, list(arguments.entering), *sums),
        jax.tree.leaves(sums),
    )


def on_stage(leaves: Sequence[jax.ShapeDtypeStruct], mesh: Mesh) -> Abstracts:
    """What leaves one stage as it enters another."""
    specs = [
        leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        for leaf in leaves
    ]
    return tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, specs, strict=True)
    )
