"""The programs of all stages of a pipeline, and the order in which one process calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.lowering.pipeline.per_stage.around import Made, Update
from shardlib.lowering.pipeline.per_stage.chunk_work import Early, First, Held, Late, Work, flat
from shardlib.lowering.pipeline.per_stage.compiling import (
    ChunkPrograms,
    Inputs,
    chunk_programs,
    on_stage,
)
from shardlib.lowering.pipeline.per_stage.dispatch import (
    Dispatch,
    Stage,
    Turns,
)
from shardlib.lowering.pipeline.per_stage.prologue import Opened, Opening, Summed
from shardlib.lowering.pipeline.shared.linearised import is_floating
from shardlib.lowering.pipeline.shared.partition import Arrays
from shardlib.lowering.runtime.executable import Draft
from shardlib.planning.plan import Plan
from shardlib.schedules.orders import BACKWARD, FORWARD, WEIGHTS, Order
from shardlib.schedules.simulation import Durations, simulate


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePrograms:
    """A pipeline whose stages are programs of their own, before it is compiled.

    Attributes:
        plan: the decisions.
        opening: what is done over all devices.
        works: the work of every chunk.
        order: what every stage does.
    """

    plan: Plan
    opening: Opening
    works: tuple[Work, ...]
    order: tuple[Order, ...]

    def _kept(self, chunk: int) -> tuple[int, ...]:
        """Values made from parameters that a chunk reads beside its layers."""
        work = self.works[chunk]
        return tuple(sorted({*work.outside, *work.shared, *work.frozen}))

    def _held(self, chunk: int, opened: Opened) -> Held:
        """What a chunk works with, abstract."""
        places = self.opening.places
        turn, stage = divmod(chunk, len(places.stages))
        return Held(
            stacks=[places.like(parts[turn], stage) for parts in opened.stacks],
            kept={number: places.like(opened.kept[number], stage) for number in self._kept(chunk)},
            states=[places.like(leaf, stage) for leaf in opened.states],
            parts=[places.like(leaf, stage) for leaf in opened.parts],
            ready=[],
        )

    def _sums(self, chunk: int) -> dict[str, Any]:
        """The sums of a chunk, abstract."""
        work = self.works[chunk]
        outside = {
            number: self._sum(number, chunk) for number in work.outside if self._floating(number)
        }
        return {
            "early": Early(outside=outside, totals=self._totals(chunk) if work.last else []),
            "late": Late(
                weights=[self._gradients(chunk)[k] for k in work.chunk.own],
                shared=[self._sum(number, chunk) for number in work.shared],
                sums=self._partial(chunk),
            ),
        }

    def _gradients(self, chunk: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Gradients of stacked parameters, abstract."""
        return tuple(self._sum(number, chunk, layers=True) for number in self.opening.stacks)

    def _partial(self, chunk: int) -> Arrays:
        """Partial sums of every device for what is gathered beforehand, abstract."""
        chunk_layers = self.works[chunk].chunk
        uses = chunk_layers.known.uses.values() if chunk_layers.known else ()
        return [
            self._like(
                (chunk_layers.layers, *use.sums.shape),
                self._in(use.sums.dtype),
                PartitionSpec(None, *use.cuts),
                chunk,
            )
            for use in uses
        ]

    def _totals(self, chunk: int) -> Arrays:
        avals = [self.works[0].cut.program.avals[number] for number in self.works[0].cut.results]
        return [
            self._like(
                (1, *aval.shape),
                jnp.promote_types(aval.dtype, jnp.float32),
                PartitionSpec(self.opening.places.axis),
                chunk,
            )
            for aval in avals
        ]

    def _sum(self, number: int, chunk: int, *, layers: bool = False) -> jax.ShapeDtypeStruct:
        """Where a gradient is summed."""
        aval = self.works[0].cut.program.avals[number]
        shape = (self.opening.dealing.room, *aval.shape[1:]) if layers else (1, *aval.shape)
        return self._like(
            shape, self._in(aval.dtype), self.opening.gradient(number, layers=layers).spec, chunk
        )

    def _like(
        self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec, chunk: int
    ) -> jax.ShapeDtypeStruct:
        places = self.opening.places
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(places.stages[chunk % len(places.stages)], spec)
        )

    def _in(self, dtype: Any) -> Any:
        """The dtype in which gradients of a dtype are summed."""
        return self.opening.pipeline.placing.reductions.accumulator(dtype)

    def _floating(self, number: int) -> bool:
        return is_floating(self.works[0].cut.program.avals[number])

    @property
    def apart(self) -> bool:
        """Whether gradients of weights are made apart."""
        return any(task.kind == WEIGHTS for task in self.order[0])

    @property
    def at_once(self) -> bool:
        """Whether the last chunk goes back with every microbatch as soon as it has gone forward."""
        last = [
            task
            for task in self.order[-1]
            if task.chunk == self.plan.virtual_stages - 1 and task.kind != WEIGHTS
        ]
        pairs = zip(self.order[-1], self.order[-1][1:], strict=False)
        return sum(
            task.kind == FORWARD and following == replace(task, kind=BACKWARD) and task in last
            for task, following in pairs
        ) * 2 == len(last)

    def compiled(
        self,
        state: Tree,
        batch: Tree,
        update: Callable[[Made], Update],
        name: str,
    ) -> Dispatch:
        """Compiles all programs."""
        opening, places = self.opening, self.opening.places
        arguments = (state.params, state.inputs, batch)
        structure = jax.tree.structure(jax.eval_shape(opening.opened, *arguments))
        first = Draft.of(
            flat(opening.opened, arguments), jax.tree.leaves(arguments), places.mesh
        ).compiled(f"{name}_opening", places.mesh)
        opened: Opened = jax.tree.unflatten(structure, on_stage(first.results, places.mesh))
        count, last, chunks = len(places.stages), len(self.works) - 1, list[ChunkPrograms]()
        entering = list[tuple[jax.ShapeDtypeStruct, ...]]([()])
        for number, work in enumerate(self.works):
            mesh = places.stages[number % count]
            inputs = Inputs(
                held=self._held(number, opened),
                micro=_index(mesh),
                entering=entering[-1],
                gradients=self._gradients(number),
                **self._sums(number),
            )
            chunks.append(
                chunk_programs(
                    work,
                    inputs,
                    mesh,
                    f"{name}_chunk{number}",
                    split=self.apart,
                    at_once=self.at_once and number == last,
                )
            )
            if number < last:
                entering.append(on_stage(chunks[-1].left, places.stages[(number + 1) % count]))
        return Dispatch(
            places=places,
            opening=first,
            opened=structure,
            stacks=len(opening.stacks),
            kept=tuple(self._kept(number) for number in range(last + 1)),
            outside=tuple(
                tuple(sorted(self._sums(number)["early"].outside)) for number in range(last + 1)
            ),
            chunks=tuple(chunks),
            stages=tuple(map(self._stage, range(count))),
            entering=tuple([leaf.sharding for leaf in leaves] for leaves in entering),
            back=tuple(
                [
                    NamedSharding(places.stages[number % count], leaf.sharding.spec)
                    for leaf in leaves
                    if is_floating(leaf)
                ]
                for number, leaves in enumerate(entering[1:])
            ),
            turns=_turns(self.order),
            update=update((opened.after, self._summed())),
        )

    def _stage(self, stage: int) -> Stage:
        """What a stage needs beside the programs of its chunks."""
        mesh, count, last = self.opening.places.stages[stage], len(self.order), len(self.works) - 1
        chunks = [tuple(self._sums(number).values()) for number in range(stage, last + 1, count)]
        summed_here = {number for early, _ in chunks for number in early.outside}
        everywhere = {number for end in (0, last) for number in self._sums(end)["early"].outside}
        first = First(
            chunks=chunks,
            outside={number: self._sum(number, stage) for number in everywhere - summed_here},
            totals=[] if stage == count - 1 else self._totals(stage),
        )
        zeros = (
            jax.jit(
                lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first),
                out_shardings=jax.tree.map(lambda leaf: leaf.sharding, first),
            )
            .lower()
            .compile()
        )
        return Stage(
            zeros=zeros,
            indices=tuple(
                jax.device_put(np.int32(micro), NamedSharding(mesh, PartitionSpec()))
                for micro in range(self.plan.microbatches)
            ),
        )

    def _summed(self) -> Summed:
        """What the stages have summed after the last microbatch, abstract."""
        opening, places, count = self.opening, self.opening.places, len(self.order)

        def whole(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                (leaf.shape[0] * count, *leaf.shape[1:]),
                leaf.dtype,
                sharding=NamedSharding(places.mesh, leaf.sharding.spec),
            )

        late = [
            Late(
                weights=[whole(leaf) for leaf in self._gradients(number)],
                shared=[whole(leaf) for leaf in self._sums(number)["late"].shared],
                sums=[],
            )
            for number in range(0, len(self.works), count)
        ]
        ends = [self._sums(number)["early"] for number in (0, len(self.works) - 1)]
        return Summed(
            stacks=[[sums.weights[k] for sums in late] for k in range(len(opening.stacks))],
            shared=[[sums.shared[k] for sums in late] for k in range(len(late[0].shared))],
            outside=jax.tree.map(whole, {**ends[0].outside, **ends[1].outside}),
            totals=[whole(leaf) for leaf in ends[1].totals],
        )


def _turns(order: tuple[Order, ...]) -> Turns:
    """All tasks in the order in which they would begin if forward work took half as long as
    backward work.
    """
    split = any(task.kind == WEIGHTS for task in order[0])
    spans = simulate(order, Durations(forward=1.0, backward=1.0 if split else 2.0, weights=1.0))
    return tuple(
        (span.stage, span.task)
        for span in sorted(spans, key=lambda span: (span.start, span.end, -span.stage))
    )


def _index(mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, PartitionSpec()))
