"""What comes before and after the layers, for the microbatches that enter and leave the stages.

Both are done outside of the manual region, where the stages are one more axis that shards arrays.
Going back, what comes before the layers is done again rather than stashed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.annotation.trees.paths import Tree
from shardlib.lowering.pipeline.lockstep.gradient_sums import Carry, Fixed, Made, plus
from shardlib.lowering.pipeline.lockstep.stage_values import Held
from shardlib.lowering.pipeline.lockstep.staged_loss import StagedLoss
from shardlib.lowering.pipeline.shared.linearised import is_floating
from shardlib.lowering.pipeline.shared.partition import Arrays, Values
from shardlib.tracing.rewriting.binding import as_array
from shardlib.tracing.rewriting.dependence import needed
from shardlib.tracing.rewriting.interpreter import evaluate_equations
from shardlib.tracing.rewriting.walk import Walk


@dataclass(frozen=True, kw_only=True)
class Edges:
    """What may happen at the ends of a pipeline in some ticks.

    Attributes:
        opening: microbatches begin: they enter the first stage, or backward, come back to the last
            one.
        closing: microbatches end: they leave the last stage, or backward, the first one.
    """

    opening: bool
    closing: bool


class AroundLayers:
    """What a step does outside of the layers."""

    def __init__(
        self,
        pipeline: StagedLoss,
        resident: Held,
        derived: Made,
        fixed: Fixed,
        states: Arrays,
        parts: Arrays,
        join: Callable[[Arrays], Tree],
    ) -> None:
        self.pipeline, self.cut, self.stages, self.table = (
            pipeline,
            pipeline.cut,
            pipeline.stages,
            pipeline.stages.table,
        )
        self.made, self.fixed, self.states, self.parts, self.join = (
            derived,
            fixed,
            states,
            parts,
            join,
        )
        self.held, self.rounds = replace(resident, drawn=self._drawn()), self.stages.in_rounds
        self.sums, self.unreduced = pipeline.sums, pipeline.sums.unreduced(derived.outside)

    def _left(self, left: Arrays) -> Arrays:
        """What left the last stage, as it is cut outside of the layers."""
        return [
            self.stages.handed_out(leaf, k)
            for leaf, k in zip(left, self.stages.leaving, strict=True)
        ]

    def _outside(self, carry: Carry, more: Values, sums: Arrays) -> Carry:
        """Gradients of what is read outside of the layers, and partial sums of such, with those of
        one microbatch.
        """
        return {
            "outside": self.sums.as_gradients(plus(carry["outside"], more)),
            "ends": plus(carry["ends"], sums),
        }

    def _after(self, carry: Carry, tick: Any, edges: Edges) -> tuple[Carry, Arrays]:
        """Loss and metrics of the microbatch that leaves the last stage, and the cotangents of what
        it left with.
        """
        micro, chunk, works = self.table.backward(tick, self.table.stages - 1)
        positions = [k for k in self.stages.leaving if k in self.stages.moving]
        if not edges.opening:
            return carry, [
                jnp.zeros(self.stages.activations[k].shape, self.stages.activations[k].dtype)
                for k in positions
            ]

        def after() -> tuple[Arrays, tuple[Values, Arrays], Arrays]:
            left = carry["left"]
            if self.table.forward_first:
                left = [
                    jax.lax.dynamic_index_in_dim(leaf, micro, 0, keepdims=False) for leaf in left
                ]
            else:
                left = self._left(left)

            def run(outside: Values, sums: Arrays, moving: Arrays) -> tuple[Any, Arrays]:
                floating = iter(moving)
                results = self._results(
                    outside,
                    micro,
                    [next(floating) if is_floating(leaf) else leaf for leaf in left],
                    sums,
                )
                return results[self.pipeline.loss_position], results

            moving = [leaf for leaf in left if is_floating(leaf)]
            _, pull, results = jax.vjp(
                run, self.unreduced, self.pipeline.ends.zeros(), moving, has_aux=True
            )
            outside, sums, moved = pull(jnp.ones((), results[self.pipeline.loss_position].dtype))
            return (
                results,
                (self.sums.as_gradients(outside), sums),
                [self.stages.whole(leaf, k) for leaf, k in zip(moved, positions, strict=True)],
            )

        results, outside, moved = self._only((chunk == self.table.last_chunk) & works, after)
        return {
            **carry,
            "totals": plus(carry["totals"], results),
            **self._outside(carry, *outside),
        }, moved

    def _entering(self, tick: Any, edges: Edges) -> Arrays:
        """What enters the first stage at a tick, whole on every stage; zeros where that goes on
        with an older microbatch.
        """
        if not edges.opening:
            return [
                jnp.zeros(leaf.shape, leaf.dtype)
                for leaf in self.stages.activations[: self.stages.entering]
            ]
        micro, chunk, works = self.table.forward(tick, 0)
        return self._only(
            (chunk == 0) & works,
            lambda: [
                self.stages.whole(leaf, k)
                for k, leaf in enumerate(self._before(self.made.outside, micro))
            ],
        )

    def _before(self, outside: Values, micro: Any, sums: Arrays | None = None) -> Arrays:
        """What enters the first stage for a microbatch; by default nobody wants partial sums."""
        env = self._env(outside, micro)
        evaluate_equations(self.cut.before, env, self._walk(sums))
        return [
            self.stages.spread_out(jnp.asarray(env[number]), k)
            for k, number in enumerate(self.cut.entering)
        ]

    def _walk(self, sums: Arrays | None) -> Walk:
        """A walk outside of the layers, whose operations leave gradients to `sums`."""
        ends = self.pipeline.ends
        return ends.walk(
            self.pipeline.outside(), self.fixed.ready, ends.zeros() if sums is None else sums
        )

    def _results(
        self, outside: Values, micro: Any, left: Arrays, sums: Arrays | None = None
    ) -> Arrays:
        """Loss and metrics, for what left the last stage; by default nobody wants partial sums."""
        cut, env = self.cut, self._env(outside, micro)
        values = [
            self.stages.spread_out(leaf, k)
            for leaf, k in zip(left, self.stages.leaving, strict=True)
        ]
        env.update(zip(cut.final, values, strict=False))
        env.update(
            zip(cut.stacked, (leaf[: cut.layers] for leaf in values[len(cut.final) :]), strict=True)
        )
        evaluate_equations(cut.after, env, self._walk(sums))
        return [as_array(cut.program, number, env[number]) for number in cut.results]

    def _env(self, outside: Values, micro: Any) -> Values:
        program = self.cut.program
        state, batch = (
            self._slices(self.states, micro),
            jax.tree.leaves(self.join(self._slices(self.parts, micro))),
        )
        inputs = program.inputs[len(program.inputs) - len(state) - len(batch) :]
        return {
            **program.constants,
            **self.fixed.values,
            **self.made.outside,
            **outside,
            **dict(zip(inputs, [*state, *batch], strict=True)),
        }

    def _slices(self, arrays: Sequence[Any], micro: Any) -> Arrays:
        return [jax.lax.dynamic_index_in_dim(leaf, micro, 0, keepdims=False) for leaf in arrays]

    def _drawn(self) -> Arrays:
        """Slices of model state, and of keys of the batch, for the layers, [microbatches, stages,
        chunks, layers, ...].
        """
        cut = self.cut
        if not cut.roles.drawn:
            return []

        def of(microbatch: tuple[Arrays, Arrays]) -> Arrays:
            state, batch = microbatch[0], jax.tree.leaves(self.join(microbatch[1]))
            env = {
                **cut.program.constants,
                **dict(
                    zip(
                        cut.program.inputs[len(cut.program.inputs) - len(state) - len(batch) :],
                        [*state, *batch],
                        strict=True,
                    )
                ),
            }
            numbers = [cut.scanned[k] for k in cut.roles.drawn]
            evaluate_equations(
                needed(cut.program.equations, numbers)[0], env, self.pipeline.outside()
            )
            return [env[number] for number in numbers]

        return [
            jax.vmap(self.pipeline.dealt)(leaf)
            for leaf in jax.lax.map(of, (self.states, self.parts))
        ]

    def _only(self, condition: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, or zeros where it is not wanted; all devices agree on which."""
        shapes = jax.eval_shape(make)
        return jax.lax.cond(
            condition,
            make,
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
        )
