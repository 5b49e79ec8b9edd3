"""What does one stage do in one tick?

Functions of what one stage holds, for `jax.shard_map` over the stage axis alone; the other mesh
axes stay automatic inside. What a stage holds is a slice of a global array with a leading dim of
stages. Arrays that come from before the layers, or go to what comes after them, are cut over the
stages along one of their own dims there, so that the work is spread over all stages; they are
gathered and handed out outside of the manual region, since inside of it XLA's partitioner keeps the
layout over the automatic axes through a collective-permute, and gathers everything for an
all-gather or all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.layout import Layout
from shardlib.lowering.mesh.device_mesh import parts_of
from shardlib.lowering.pipeline.shared.chunk import Chunk, Gradients, Operands, is_floating
from shardlib.lowering.pipeline.shared.partition import Arrays
from shardlib.schedules.timetable import Timetable

#: Names that messages between stages have in a compiled program, by direction.
HOPS = {"forward": "shardlib-hop-forward", "backward": "shardlib-hop-backward"}
#: Of one stage: its own part of an array with a leading dim of stages.
OWN = "own"


@dataclass(frozen=True, kw_only=True)
class Held:
    """What every stage holds through all ticks.

    Attributes:
        weights: [stages, chunks, layers, ...] of each stacked parameter; cut over the stages.
        tables: the same of each constant table.
        drawn: [microbatches, stages, chunks, layers, ...] of each array of model state with a slice
            a layer.
        shared, constant: see `Operands`.
        ready: [stages, chunks, layers, ...] of each operand that is gathered beforehand; of two
            chunks where a chunk is gathered when its round begins.
    """

    weights: Arrays
    tables: Arrays
    drawn: Arrays
    shared: Arrays
    constant: Arrays
    ready: Arrays


jax.tree_util.register_dataclass(
    Held, data_fields=["weights", "tables", "drawn", "shared", "constant", "ready"], meta_fields=[]
)


@dataclass(frozen=True, kw_only=True)
class Hop:
    """What is on its way between stages.

    Attributes:
        next: [stages, ...], what came from the neighbour.
        waiting: [stages, ticks, ...], what waits before the first stage (backward: the last one)
            until that goes on to the next chunk; empty where nothing waits.
    """

    next: Arrays
    waiting: Arrays


jax.tree_util.register_dataclass(Hop, data_fields=["next", "waiting"], meta_fields=[])


@dataclass(frozen=True, kw_only=True)
class Backward:
    """What a tick backward leaves.

    Attributes:
        hop, sums, passed: see `Stages.backward`.
        entered: cotangents of what entered the first stage, in the order of `Stages.moving`, for
            `handed_out`.
    """

    hop: Hop
    sums: Gradients
    passed: Arrays
    entered: Arrays


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of a pipeline.

    Attributes:
        table: the schedule.
        chunk: some layers.
        mesh: the mesh of the program.
        axis: names of the stage axis in it.
        travelling: shape and dtype of all that hops from stage to stage: the carry, what travels
            with it, and buffers of the layers' own results.
        entering: how many of these come from before the layers; the buffers start as zeros.
        leaving: positions of those that go to what comes after the layers.
        spread: for each, the dim that is cut over the stages outside of the pipeline; None where it
            is whole.
        layouts: for each, the layout that the plan gives it over the other axes; None where that is
            left to the compiler.
        outside: for each, the layout that it has outside of the pipeline, where that is known as a
            whole.
    """

    table: Timetable
    chunk: Chunk
    mesh: Mesh | AbstractMesh
    axis: tuple[str, ...]
    travelling: tuple[jax.ShapeDtypeStruct, ...]
    entering: int
    leaving: tuple[int, ...]
    spread: tuple[int | None, ...]
    layouts: tuple[Layout | None, ...]
    outside: tuple[Layout | None, ...]

    @property
    def moving(self) -> tuple[int, ...]:
        """Positions of what gradients flow through."""
        return tuple(k for k, leaf in enumerate(self.travelling) if is_floating(leaf))

    def over_stages(self, array: Any) -> Any:
        """An array of every stage, [stages, ...], each at its stage."""
        free = PartitionSpec.UNCONSTRAINED
        return jax.lax.with_sharding_constraint(
            array, NamedSharding(self.mesh, PartitionSpec(self.axis, *[free] * (array.ndim - 1)))
        )

    def spread_out(self, array: Any, position: int) -> Any:
        """An array of `travelling` as it is cut outside of the pipeline."""
        dim, known = self.spread[position], self.outside[position]
        if known is not None:
            return jax.lax.with_sharding_constraint(
                array,
                NamedSharding(
                    self.mesh,
                    PartitionSpec(*(parts_of(self.mesh, known[k]) for k in range(array.ndim))),
                ),
            )
        if self.layouts[position] is None and dim is None:
            return array
        cuts = self._cuts(position, array.ndim)
        if dim is not None:
            cuts[dim] = self.axis
        return jax.lax.with_sharding_constraint(
            array, NamedSharding(self.mesh, PartitionSpec(*cuts))
        )

    def handed_out(self, arrays: Any, position: int) -> Any:
        """What one stage holds of [stages, ...], the others holding zeros, as it is cut outside of
        the pipeline.
        """
        return self.spread_out(
            jax.lax.reduce(arrays, np.zeros((), arrays.dtype), jax.lax.add, (0,)), position
        )

    def whole(self, array: Any, position: int) -> Any:
        """The same as every stage needs it: no longer cut over the stages."""
        dim = self.spread[position]
        if dim is None:
            return array
        cuts = self._cuts(position, array.ndim)
        if self.outside[position] is None:
            cuts[dim] = None  # there, a dim that the stages cut is one that the plan leaves whole
        return jax.lax.with_sharding_constraint(
            array, NamedSharding(self.mesh, PartitionSpec(*cuts))
        )

    def _cuts(self, position: int, rank: int) -> list[Any]:
        """What the plan cuts an array of `travelling` over, by dim; nothing is said where it has no
        layout for it.
        """
        layout = self.layouts[position]
        return [
            PartitionSpec.UNCONSTRAINED if layout is None else parts_of(self.mesh, layout[k])
            for k in range(rank)
        ]

    def _inside(self, array: Any, position: int) -> Any:
        """The same inside of a stage."""
        layout, mesh = self.layouts[position], jax.sharding.get_abstract_mesh()
        if layout is None:
            return array
        return jax.lax.with_sharding_constraint(
            array,
            NamedSharding(
                mesh, PartitionSpec(*(parts_of(mesh, layout[k]) for k in range(array.ndim)))
            ),
        )

    @property
    def window(self) -> int:
        """Chunks whose operands are gathered at a time: while stages go over from one chunk to the
        next, two.
        """
        return 2 if self.in_rounds else self.table.virtual

    @property
    def in_rounds(self) -> bool:
        """Whether chunks are gathered when their rounds begin."""
        known = self.chunk.known
        return bool(self.table.rounds and known and known.operands)

    def gather(self, held: Held, chunk: Any = None) -> Arrays:
        """The operands that are gathered beforehand, of one chunk [stages, layers, ...] or of all
        [stages, chunks, layers, ...].
        """
        known = self.chunk.known
        if known is None:
            return []
        return self._manual(self._gather, (self._held(), PartitionSpec()), OWN)(held, chunk)

    def reduce(self, held: Held, sums: Arrays, slot: Any = None) -> Arrays:
        """Gradients of weights for the partial sums of what is gathered beforehand, in one slot
        [stages, layers, ...] or in all [stages, chunks, layers, ...].
        """
        known = self.chunk.known
        if known is None:
            return []
        return self._manual(self._reduce, (self._held(), OWN, PartitionSpec()), OWN)(
            held, sums, slot
        )

    def no_sums(self) -> Arrays:
        """Where the partial sums go, [stages, chunks, layers, ...] in float32 at least."""

        def zeros() -> Arrays:
            known = self.chunk.known
            found = known.zeros((1, self.window, self.chunk.layers)) if known else []
            return [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in found]

        return self._manual(zeros, (), OWN)()

    def forward(
        self, tick: Any, held: Held, hop: Hop, entering: Arrays, ring: Arrays
    ) -> tuple[Hop, Arrays, Arrays]:
        """One tick forward.

        Args:
            tick: its number.
            held: see `Held`.
            hop: what came from the stage before.
            entering: of the microbatch that enters the first stage.
            ring: [stages, slots, ...], what the stages remember; empty where nothing goes back.

        Returns:
            `hop` and `ring` after the tick, and what left the last stage, in the order of
            `leaving`, for `handed_out`.
        """
        every = PartitionSpec()
        run = self._manual(
            self._forward, (OWN, every, self._held(), OWN, every, OWN), (OWN, OWN, OWN)
        )
        return run(self._numbers(), tick, held, hop, entering, ring)

    def backward(
        self,
        tick: Any,
        held: Held,
        hop: Hop,
        leaving: Arrays,
        ring: Arrays,
        sums: Gradients,
        passed: Arrays,
    ) -> Backward:
        """One tick backward.

        Args:
            tick, held, ring: as for the forward tick.
            hop: cotangents from the stage after, in the order of `moving`.
            leaving: cotangents of what left the last stage, in the order of those of `leaving` that
                gradients flow through.
            sums: gradients summed up so far: of weights [stages, chunks, layers, ...], of shared
                parameters [stages, ...], and the partial sums [stages, chunks, layers, ...].
            passed: [stages, stages, ...], what waits for the making of gradients of weights; empty
                where these are made at once.
        """
        every = PartitionSpec()
        run = self._manual(
            self._backward,
            (OWN, every, self._held(), OWN, every, OWN, OWN, OWN),
            (OWN, OWN, OWN, OWN),
        )
        hop, sums, passed, entered = run(
            self._numbers(), tick, held, hop, leaving, ring, sums, passed
        )
        return Backward(hop=hop, sums=sums, passed=passed, entered=entered)

    def weights(
        self, tick: Any, held: Held, ring: Arrays, sums: Gradients, passed: Arrays
    ) -> Gradients:
        """Gradients of weights of one tick, where they are made on their own; arguments as those of
        `backward`, results as its `sums`.
        """
        run = self._manual(self._weights, (OWN, PartitionSpec(), self._held(), OWN, OWN, OWN), OWN)
        return run(self._numbers(), tick, held, ring, sums, passed)

    def remembered(self, held: Held) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of what is remembered of one unit, [stages, ...]."""
        return self._shapes(lambda operands, zeros: self.chunk.forward(operands, zeros)[1], held)

    def passed_on(self, held: Held) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of what waits for the making of gradients of weights of one unit,
        [stages, ...].
        """

        def one(operands: Operands, zeros: Arrays) -> Arrays:
            return self.chunk.backward_inputs(
                operands,
                zeros,
                self.chunk.forward(operands, zeros)[1],
                [zeros[k] for k in self.moving],
            )[1]

        return self._shapes(one, held) if self.table.split else []

    def _shapes(
        self, function: Callable[[Operands, Arrays], Arrays], held: Held
    ) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of what a function of a chunk's operands and of what enters it gives on
        every stage.
        """

        def one(held: Held) -> Arrays:
            return [leaf[None] for leaf in function(self._operands(held, 0, 0, 0), self._like())]

        return jax.eval_shape(self._manual(one, (self._held(),), OWN), held)

    def _gather(self, held: Held, chunk: Any) -> Arrays:
        known = self.chunk.known
        assert known is not None
        weights = [
            held.weights[self.chunk.cut.weights.index(position)][0] for position in known.sources
        ]
        if chunk is not None:
            return [
                leaf[None]
                for leaf in known.gather(
                    [
                        jax.lax.dynamic_index_in_dim(leaf, chunk, 0, keepdims=False)
                        for leaf in weights
                    ]
                )
            ]
        found = known.gather([leaf.reshape(-1, *leaf.shape[2:]) for leaf in weights])
        return [leaf.reshape(1, self.table.virtual, -1, *leaf.shape[1:]) for leaf in found]

    def _reduce(self, held: Held, sums: Arrays, slot: Any) -> Arrays:
        known = self.chunk.known
        assert known is not None
        weights = [
            held.weights[self.chunk.cut.weights.index(position)][0, 0] for position in known.sources
        ]
        if slot is not None:
            return [
                leaf[None]
                for leaf in known.reduce(
                    weights,
                    [
                        jax.lax.dynamic_index_in_dim(leaf[0], slot, 0, keepdims=False)
                        for leaf in sums
                    ],
                )
            ]
        found = known.reduce(weights, [leaf[0].reshape(-1, *leaf.shape[3:]) for leaf in sums])
        return [leaf.reshape(1, self.table.virtual, -1, *leaf.shape[1:]) for leaf in found]

    def _forward(
        self, numbers: Any, tick: Any, held: Held, hop: Hop, entering: Arrays, ring: Arrays
    ) -> tuple[Hop, Arrays, Arrays]:
        stage = numbers[0]
        micro, chunk, works = self.table.forward(tick, stage)
        first = (stage == 0) & (chunk == 0)
        fresh = [
            *entering,
            *(jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.travelling[self.entering :]),
        ]
        arrived, waiting = self._arrived(tick, hop, stage == 0)
        arriving = [
            self._inside(jnp.where(first, new, old), k)
            for k, (new, old) in enumerate(zip(fresh, arrived, strict=True))
        ]
        operands = self._operands(held, stage, micro, chunk)
        left, saved = self._worked(
            works,
            lambda: (
                self.chunk.forward(operands, arriving)
                if ring
                else (self.chunk.run(operands, arriving), [])
            ),
        )
        ring = _with_slot(ring, saved, self.table.forward_slot(tick, stage))
        out = [_if(stage == self.table.stages - 1, left[k])[None] for k in self.leaving]
        return Hop(next=self._hop(left, 1), waiting=waiting), ring, out

    def _arrived(self, tick: Any, hop: Hop, end: Any) -> tuple[Arrays, Arrays]:
        """(what a stage goes on with, what waits after that): what has just come, and at the end
        where the next chunk begins, what came `lag` ticks ago.
        """
        came = [leaf[0] for leaf in hop.next]
        if not hop.waiting:
            return came, []
        slot = tick % self.table.lag
        return [
            jnp.where(end, old, new)
            for old, new in zip(_slot(hop.waiting, slot), came, strict=True)
        ], _with_slot(hop.waiting, came, slot)

    def _backward(
        self,
        numbers: Any,
        tick: Any,
        held: Held,
        hop: Hop,
        leaving: Arrays,
        ring: Arrays,
        sums: Gradients,
        passed: Arrays,
    ) -> tuple[Hop, Gradients, Arrays, Arrays]:
        stage = numbers[0]
        micro, chunk, works = self.table.backward(tick, stage)
        last = (stage == self.table.stages - 1) & (chunk == self.table.last_chunk)
        given = dict(zip([k for k in self.leaving if k in self.moving], leaving, strict=True))
        arrived, waiting = self._arrived(tick, hop, stage == self.table.stages - 1)
        cotangents = [
            self._inside(jnp.where(last, given[k] if k in given else jnp.zeros_like(old), old), k)
            for k, old in zip(self.moving, arrived, strict=True)
        ]
        operands, saved = (
            self._operands(held, stage, micro, chunk),
            _slot(ring, self.table.backward_slot(tick, stage)),
        )
        if self.table.split:
            entered, passing = self._worked(
                works, lambda: self.chunk.backward_inputs(operands, self._like(), saved, cotangents)
            )
            passed = _with_slot(passed, passing, self.table.passing_slot(tick, stage))
        else:
            found, entered = self._worked(
                works, lambda: self.chunk.backward(operands, self._like(), saved, cotangents)
            )
            sums = self._summed(sums, found, chunk, works)
        out = [
            _if((stage == 0) & (chunk == 0) & works, leaf)[None]
            for k, leaf in zip(self.moving, entered, strict=True)
            if k < self.entering
        ]
        return Hop(next=self._hop(entered, -1), waiting=waiting), sums, passed, out

    def _weights(
        self, numbers: Any, tick: Any, held: Held, ring: Arrays, sums: Gradients, passed: Arrays
    ) -> Gradients:
        micro, chunk, works = self.table.weights(tick)
        operands = self._operands(held, numbers[0], micro, chunk)
        found = self.chunk.backward_weights(
            operands,
            self._like(),
            _slot(ring, self.table.weights_slot(tick)),
            _slot(passed, self.table.passed_slot(tick)),
        )
        return self._summed(sums, found, chunk, works)

    def _worked(self, works: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes; where there is no work zeros, without making them if no other device
        takes part in the making.

        A stage that waits could as well compute, but simulated devices share their cores, and real
        ones their power.
        """
        if any(size > 1 for axis, size in self.mesh.shape.items() if axis not in self.axis):
            return make()
        return jax.lax.cond(
            works,
            make,
            lambda: jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(make)
            ),
        )

    def _summed(self, sums: Gradients, more: Gradients, chunk: Any, works: Any) -> Gradients:
        """The sums of gradients, with those of one unit."""

        def added(totals: Arrays, gradients: Arrays, slot: Any) -> Arrays:
            return [
                _add(total[0], gradient, slot, works)[None]
                for total, gradient in zip(totals, gradients, strict=True)
            ]

        return Gradients(
            weights=added(sums.weights, more.weights, chunk),
            sums=added(sums.sums, more.sums, chunk % self.window),
            shared=[
                total + jnp.where(works, gradient, 0).astype(total.dtype)[None]
                for total, gradient in zip(sums.shared, more.shared, strict=True)
            ],
        )

    def _numbers(self) -> Any:
        """The number of every stage, [stages]: an operand of what a stage does.

        `axis_index` would be a manual region of its own without operands, since other axes are
        automatic around it; XLA moves its PartitionId out of there, and then refuses it (JAX 0.10.2
        with TPUs).
        """
        return self.over_stages(jnp.arange(self.table.stages, dtype=jnp.int32))

    def _like(self) -> Arrays:
        """Arrays like those that hop."""
        return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.travelling]

    def _operands(self, held: Held, stage: Any, micro: Any, chunk: Any) -> Operands:
        """What one stage works with in one chunk."""
        of_chunk = partial(jax.lax.dynamic_index_in_dim, index=chunk, axis=0, keepdims=False)
        drawn = [
            of_chunk(jax.lax.dynamic_index_in_dim(leaf, micro, 0, keepdims=False)[0])
            for leaf in held.drawn
        ]
        ready = [
            jax.lax.dynamic_index_in_dim(leaf[0], chunk % self.window, 0, keepdims=False)
            for leaf in held.ready
        ]
        return Operands(
            weights=[of_chunk(leaf[0]) for leaf in held.weights],
            tables=[of_chunk(leaf[0]) for leaf in held.tables],
            drawn=drawn,
            shared=held.shared,
            constant=held.constant,
            ready=ready,
            first=(chunk * self.table.stages + stage) * self.chunk.layers,
        )

    def _hop(self, arrays: Arrays, direction: int) -> Arrays:
        """Sends arrays to the next stage (1), or the one before (-1)."""
        ways = self.table.stages
        with jax.named_scope(HOPS["forward" if direction > 0 else "backward"]):
            return [
                jax.lax.ppermute(
                    leaf, self.axis, [(i, (i + direction) % ways) for i in range(ways)]
                )[None]
                for leaf in arrays
            ]

    def _held(self) -> Held:
        own, every = PartitionSpec(self.axis), PartitionSpec()
        return Held(
            weights=own,  # pyright: ignore[reportArgumentType]
            tables=own,  # pyright: ignore[reportArgumentType]
            drawn=PartitionSpec(None, self.axis),  # pyright: ignore[reportArgumentType]
            shared=every,  # pyright: ignore[reportArgumentType]
            constant=every,  # pyright: ignore[reportArgumentType]
            ready=own,  # pyright: ignore[reportArgumentType]
        )

    def _manual(
        self, function: Callable[..., Any], arguments: Sequence[Any], results: Any
    ) -> Callable[..., Any]:
        def spec(word: Any) -> Any:
            return PartitionSpec(self.axis) if word is OWN else word

        specs = (
            tuple(spec(word) for word in arguments),
            (tuple(map(spec, results)) if isinstance(results, tuple) else spec(results)),
        )
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=specs[0],
            out_specs=specs[1],
            axis_names=set(self.axis),
            check_vma=False,
        )


def _slot(ring: Arrays, slot: Any) -> Arrays:
    """What a stage keeps in one of its slots, of arrays [its stage, slots, ...]."""
    return [jax.lax.dynamic_index_in_dim(kept[0], slot, 0, keepdims=False) for kept in ring]


def _with_slot(ring: Arrays, arrays: Arrays, slot: Any) -> Arrays:
    """The same with something else in that slot."""
    return [
        jax.lax.dynamic_update_index_in_dim(kept[0], leaf, slot, 0)[None]
        for kept, leaf in zip(ring, arrays, strict=True)
    ]


def _if(wanted: Any, array: Any) -> Any:
    return jnp.where(wanted, array, jnp.zeros_like(array))


def _add(total: Any, gradient: Any, chunk: Any, works: Any) -> Any:
    """Adds a chunk's gradient to the sums of all chunks [chunks, ...]."""
    before = jax.lax.dynamic_index_in_dim(total, chunk, 0, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(
        total, before + jnp.where(works, gradient, 0).astype(total.dtype), chunk, 0
    )
