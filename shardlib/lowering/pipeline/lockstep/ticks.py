"""All ticks of a step, or of one of its groups of microbatches.

Scans of ticks, one for each run of ticks with the same kinds of work: forward only, both ways,
backward only. In every tick what comes before the layers is done for the microbatch that enters the
first stage, and what comes after them, with its gradient, for the one that leaves the last
(`around_layers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.lowering.mesh.memories import to_host_memory
from shardlib.lowering.pipeline.lockstep.around_layers import AroundLayers, Edges
from shardlib.lowering.pipeline.lockstep.gradient_sums import SUMMED, Carry, plus
from shardlib.lowering.pipeline.lockstep.stage_values import Held, Hop
from shardlib.lowering.pipeline.shared.chunk import Gradients
from shardlib.lowering.pipeline.shared.partition import Arrays, Values


class Ticks(AroundLayers):
    """The scans over the ticks of a step."""

    def run(self, sums: Carry) -> Carry:
        """Adds up gradients, loss and metrics."""
        carry, work = (
            {**self._start(), **sums},
            {
                "forward": self._forward,
                "backward": self._backward,
                "weights": self._weights,
            },
        )
        for start, stop, kinds in self.table.phases:
            if "forward" not in kinds:
                carry.pop("hop", None)  # nothing goes forward any more

            def tick(
                carry: Carry,
                tick: Any,
                resident: Held,
                edges: Edges,
                kinds: tuple[str, ...] = kinds,
            ) -> Carry:
                for kind in kinds:
                    carry = work[kind](carry, tick, resident, edges)
                return carry

            carry = self._ticks(tick, carry, start, stop, going="backward" not in kinds)
        return {name: carry[name] for name in SUMMED}

    def look(self, totals: Arrays) -> Arrays:
        """Adds up loss and metrics, with no gradients."""

        def tick(carry: Carry, tick: Any, resident: Held, edges: Edges) -> Carry:
            hop, _, left = self.stages.forward(
                tick, resident, carry["hop"], self._entering(tick, edges), []
            )
            if not edges.closing:
                return {**carry, "hop": hop}
            micro, chunk, works = self.table.forward(tick, self.table.stages - 1)
            results = self._only(
                (chunk == self.table.last_chunk) & works,
                lambda: self._results(self.made.outside, micro, self._left(left)),
            )
            return {**carry, "hop": hop, "totals": plus(carry["totals"], results)}

        start = {
            "hop": self._activations(range(len(self.stages.activations))),
            "totals": totals,
            "ready": self._unready(),
        }
        return self._ticks(tick, start, 0, self.table.forward_ticks, going=True)["totals"]

    def _ticks(
        self,
        tick: Callable[[Carry, Any, Held, Edges], Carry],
        carry: Carry,
        start: int,
        stop: int,
        *,
        going: bool,
    ) -> Carry:
        """Runs equal ticks; in rounds, where every round gathers the chunk that its ticks begin,
        and reduces the gradients of the one that the last round has done.

        Args:
            tick: one tick.
            carry: what ticks hand on.
            start, stop: the first, and the one after the last.
            going: whether they are forward ticks.
        """

        def run(carry: Carry, start: Any, count: int, edges: Edges) -> Carry:
            resident = replace(self.held, ready=carry["ready"]) if self.rounds else self.held
            return jax.lax.scan(
                lambda carry, number: (tick(carry, number, resident, edges), None),
                carry,
                start + jnp.arange(count),
            )[0]

        if not self.rounds:
            return run(carry, start, stop - start, Edges(opening=True, closing=True))

        def turn(carry: Carry, number: Any, edges: Edges) -> Carry:
            chunk = number if going else self.table.last_chunk - number
            slot = chunk % self.stages.window
            carry = (
                carry
                if going or edges.opening
                else self._reduced(
                    carry, jnp.minimum(chunk + self.stages.window, self.table.last_chunk), slot
                )
            )
            ready = self.stages.gather_over(
                self.held,
                carry["ready"],
                _not_before(
                    chunk, carry["totals"] if going else (carry["left"], carry["back"].next)
                ),
            )
            return run(
                {**carry, "ready": ready},
                start + number * self.table.microbatches,
                self.table.microbatches,
                edges,
            )

        last = self.table.rounds - 1
        carry = turn(carry, jnp.int32(0), Edges(opening=True, closing=False))
        if last > 1:
            carry, _ = jax.lax.scan(
                lambda carry, number: (
                    turn(carry, number, Edges(opening=False, closing=False)),
                    None,
                ),
                carry,
                jnp.arange(1, last),
            )
        carry = turn(carry, jnp.int32(last), Edges(opening=False, closing=True))
        done = self.table.rounds * self.table.microbatches
        carry = run(carry, start + done, stop - start - done, Edges(opening=False, closing=True))
        for chunk in () if going else reversed(range(self.stages.window)):
            carry = self._reduced(carry, jnp.int32(chunk), jnp.int32(chunk))
        return carry

    def _reduced(self, carry: Carry, chunk: Any, slot: Any) -> Carry:
        """Adds what one slot has of partial sums to the gradients of a chunk, and empties it."""
        sums: Gradients = carry["sums"]
        gradients, empty = self.stages.reduce_out(self.held, sums.sums, slot)
        done = [
            jax.lax.dynamic_update_index_in_dim(
                total,
                jax.lax.dynamic_index_in_dim(total, chunk, 1, keepdims=False) + more,
                chunk,
                1,
            )
            for total, more in zip(carry["done"], gradients, strict=True)
        ]
        return {**carry, "done": done, "sums": replace(sums, sums=empty)}

    def _unready(self) -> Arrays:
        """Room for the operands that a round gathers, [stages, chunks, layers, ...]."""
        if not self.rounds:
            return []
        shapes = jax.eval_shape(lambda: self.stages.gather(self.held))
        return [
            self.stages.over_stages(
                jnp.zeros((leaf.shape[0], self.stages.window, *leaf.shape[2:]), leaf.dtype)
            )
            for leaf in shapes
        ]

    def _activations(self, positions: Sequence[int]) -> Hop:
        """Zeros for what is on its way, of some of what travels."""
        leaves, count, lag = (
            [self.stages.activations[k] for k in positions],
            self.table.stages,
            self.table.lag,
        )
        return Hop(
            next=[
                self.stages.over_stages(jnp.zeros((count, *leaf.shape), leaf.dtype))
                for leaf in leaves
            ],
            waiting=(
                [
                    self.stages.over_stages(jnp.zeros((count, lag, *leaf.shape), leaf.dtype))
                    for leaf in leaves
                ]
                if lag
                else []
            ),
        )

    def _start(self) -> Carry:
        """What ticks hand on, sums apart."""
        stages, count = self.stages, self.table.stages
        like = replace(self.held, ready=self._unready()) if self.rounds else self.held

        def room(slots: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            return stages.over_stages(jnp.zeros((count, slots, *leaf.shape[1:]), leaf.dtype))

        ring = [
            to_host_memory(room(self.table.slots, leaf)) if away else room(self.table.slots, leaf)
            for leaf, away in zip(stages.stashed(like), stages.in_host_memory(like), strict=True)
        ]
        passed = [room(count, leaf) for leaf in stages.passed_on(like)]
        leaves = [stages.activations[k] for k in stages.leaving]
        if self.table.forward_first:
            leaving = [
                jnp.zeros((self.table.microbatches, *leaf.shape), leaf.dtype) for leaf in leaves
            ]
        else:
            leaving = [
                self.stages.over_stages(jnp.zeros((count, *leaf.shape), leaf.dtype))
                for leaf in leaves
            ]
        return {
            "hop": self._activations(range(len(stages.activations))),
            "back": self._activations(stages.moving),
            "ring": ring,
            "passed": passed,
            "left": leaving,
            "ready": self._unready(),
        }

    def _forward(self, carry: Carry, tick: Any, resident: Held, edges: Edges) -> Carry:
        hop, ring, left = self.stages.forward(
            tick, resident, carry["hop"], self._entering(tick, edges), carry["ring"]
        )
        if self.table.forward_first:
            left = self._collected(tick, carry["left"], left) if edges.closing else carry["left"]
        return {**carry, "hop": hop, "ring": ring, "left": left}

    def _collected(self, tick: Any, collected: Arrays, left: Arrays) -> Arrays:
        """What has left the last stage, [microbatches, ...], after a tick."""
        micro, chunk, works = self.table.forward(tick, self.table.stages - 1)

        def more(collected: Arrays, left: Arrays) -> Arrays:
            return [
                jax.lax.dynamic_update_index_in_dim(all_, leaf, micro, 0)
                for all_, leaf in zip(collected, self._left(left), strict=True)
            ]

        return jax.lax.cond(
            (chunk == self.table.last_chunk) & works,
            more,
            lambda collected, _: collected,
            collected,
            left,
        )

    def _backward(self, carry: Carry, tick: Any, resident: Held, edges: Edges) -> Carry:
        carry, leaving = self._after(carry, tick, edges)
        done = self.stages.backward(
            tick, resident, carry["back"], leaving, carry["ring"], carry["sums"], carry["passed"]
        )
        carry = {**carry, "back": done.hop, "sums": done.sums, "passed": done.passed}
        if not edges.closing:
            return carry
        micro, chunk, works = self.table.backward(tick, 0)

        def before() -> tuple[Values, Arrays]:
            def run(outside: Values, sums: Arrays) -> Arrays:
                return [
                    leaf
                    for k, leaf in enumerate(self._before(outside, micro, sums))
                    if k in self.stages.moving
                ]

            entered = [
                self.stages.handed_out(leaf, k)
                for leaf, k in zip(done.entered, self.stages.moving, strict=False)
            ]
            outside, sums = jax.vjp(run, self.unreduced, self.pipeline.ends.zeros())[1](entered)
            return self.sums.as_gradients(outside), sums

        return {**carry, **self._outside(carry, *self._only((chunk == 0) & works, before))}

    def _weights(self, carry: Carry, tick: Any, resident: Held, _: Edges) -> Carry:
        return {
            **carry,
            "sums": self.stages.weights(
                tick, resident, carry["ring"], carry["sums"], carry["passed"]
            ),
        }


def _not_before(number: Any, arrays: Any) -> Any:
    """A number that is known when other arrays are made.

    A chunk is gathered by it, lest the compiler takes what it gathered going forward, or in the
    group of microbatches before, and keeps it until then.
    """
    return jax.lax.optimization_barrier((number, arrays))[0]
