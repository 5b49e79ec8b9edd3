"""What does a stage do with one microbatch?

A chunk is a run of consecutive layers. Forward, it is run with `jax.vjp`, and what the backward
pass wants of the forward one is told apart: arrays that can be had again from the weights alone
(the weights themselves, casts of them, masks that depend on nothing) are made again in the backward
tick; the others, which depend on the microbatch, are stashed. What there is to stash follows
the remat policy, as in a program without stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from shardlib._jax_compat import scan_counts
from shardlib.lowering.pipeline.shared.gathered_weights import Gathered
from shardlib.lowering.pipeline.shared.layers_in_turn import Saved, as_loop, written_out
from shardlib.lowering.pipeline.shared.linearised import Linearised, is_floating
from shardlib.lowering.pipeline.shared.partition import Arrays, Cut
from shardlib.tracing.program import flatten
from shardlib.tracing.rewriting.dependence import dependence
from shardlib.tracing.rewriting.interpreter import evaluate_equations, evaluate_program
from shardlib.tracing.rewriting.walk import Walk


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Operands:
    """What a chunk works with, on one stage.

    Attributes:
        weights: of each stacked parameter the chunk's layers, [layers, ...].
        tables: of each constant table the same.
        drawn: of each array of model state with a slice a layer the same, for one microbatch.
        shared: parameters that all layers use.
        constant: arrays made from nothing that all layers use.
        ready: operands of matmuls that are gathered beforehand, [layers, ...]; see `Gathered`.
        first: number of the chunk's first layer.
    """

    weights: Arrays
    tables: Arrays
    drawn: Arrays
    shared: Arrays
    constant: Arrays
    ready: Arrays
    first: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients of what does not travel.

    Attributes:
        weights: of stacked parameters, in the order of `Chunk.own`.
        shared: of parameters that all layers use.
        sums: partial sums of each device for the operands that are gathered beforehand.
    """

    weights: Arrays
    shared: Arrays
    sums: Arrays


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some layers as a function.

    Attributes:
        cut: the loss around its loop.
        layers: layers of a chunk.
        padded: whether all chunks together have room for more layers than there are; what comes
            after the last layer then does nothing.
        saved: what the layers save for their backward passes.
        walk: how values are placed, made anew in every trace, since it belongs to the mesh around
            it.
        known: what is gathered beforehand; None where nothing is.
        unrolled: whether layers are written out one after the other; weights may then be given, and
            their gradients come, layer by layer.
    """

    cut: Cut
    layers: int
    padded: bool
    saved: Saved
    walk: Callable[[], Walk]
    known: Gathered | None = None
    unrolled: bool = False

    @property
    def own(self) -> tuple[int, ...]:
        """Which weights get a gradient in every tick, as positions among those of `Operands`."""
        return tuple(
            k
            for k, position in enumerate(self.cut.roles.weights)
            if self.known is None or position not in self.known.complete
        )

    def run(self, operands: Operands, activations: Arrays, sums: Arrays | None = None) -> Arrays:
        """What leaves the chunk, for what enters it: the carry, what travels with it, and buffers
        of the layers' own results, [all layers, ...].

        Args:
            sums: arrays whose gradients are the partial sums for what is gathered beforehand,
                [layers, ...]; by default those are lost.
        """
        cut, roles, walk, gathered = self.cut, self.cut.roles, self.walk(), self.known
        sums = self._no_sums() if sums is None else sums
        constants, carried = scan_counts(cut.loop.params)
        path = cut.loop.path
        body_program = flatten(cut.loop.params["jaxpr"], f"{path}/body/", cut.loop.scope)
        inner = walk.layer() if self.saved.policy != "none" else walk.as_written()
        fixed = dict(
            zip(
                (*roles.shared, *roles.constant),
                (*operands.shared, *operands.constant),
                strict=True,
            )
        ) | dict(zip(roles.activations, activations[carried:], strict=False))

        def placed(kind: str, values: Sequence[Any]) -> Arrays:
            return [walk.put(f"{path}/{kind}/{k}", 0, value) for k, value in enumerate(values)]

        def body(
            carry: tuple[Any, ...], sliced: tuple[Arrays, Arrays, Arrays, Any, Arrays, Arrays]
        ) -> tuple[tuple[Any, ...], Arrays]:
            weights, tables, drawn, number, ready, partial_sums = sliced
            scanned = (
                dict(zip(roles.weights, weights, strict=True))
                | dict(zip(roles.tables, tables, strict=True))
                | dict(zip(roles.drawn, drawn, strict=True))
            )
            values = [
                *(fixed[k] for k in range(constants)),
                *placed("carry", carry),
                *placed("enter", [scanned[k] for k in range(len(scanned))]),
            ]
            outputs = (
                evaluate_program(body_program, values, inner)
                if gathered is None
                else _given(gathered, values, ready, gathered.walk(inner, partial_sums))
            )
            after = outputs[:carried]
            if self.padded:
                after = [
                    jnp.where(number < cut.layers, new, old)
                    for new, old in zip(after, carry, strict=True)
                ]
            return tuple(after), [outputs[carried + k] for k in cut.exits]

        numbers = operands.first + jnp.arange(self.layers)
        scanned = (operands.weights, operands.tables, operands.drawn, numbers, operands.ready, sums)
        final, exits = (written_out if self.unrolled else as_loop)(
            body, self.saved, self.layers, tuple(activations[:carried]), scanned
        )
        buffers = [
            jax.lax.dynamic_update_slice_in_dim(
                buffer, part.astype(buffer.dtype), operands.first, 0
            )
            for buffer, part in zip(
                activations[carried + len(roles.activations) :], exits, strict=True
            )
        ]
        return [*final, *activations[carried : carried + len(roles.activations)], *buffers]

    def _wanted(self, operands: Operands) -> Gradients:
        """What gradients are taken of."""
        return Gradients(
            weights=[operands.weights[k] for k in self.own],
            shared=operands.shared,
            sums=self._no_sums(),
        )

    def _no_sums(self) -> Arrays:
        """Where partial sums of one microbatch go, [layers, ...] or layer by layer."""
        if self.known is None:
            return []
        return (
            [[leaf] * self.layers for leaf in self.known.zeros(())]
            if self.unrolled
            else self.known.zeros((self.layers,))
        )

    def forward(self, operands: Operands, activations: Arrays) -> tuple[Arrays, Arrays]:
        """(what leaves the chunk, what its backward pass has to remember)."""
        line = self._linearised(operands, activations)
        return line.left, line.stashed

    def backward(
        self, operands: Operands, activations: Arrays, stashed: Arrays, cotangents: Arrays
    ) -> tuple[Gradients, Arrays]:
        """Gradients, and those of the floating-point part of what entered."""
        return self._linearised(operands, activations).pull(stashed)(cotangents)

    def backward_inputs(
        self, operands: Operands, activations: Arrays, stashed: Arrays, cotangents: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The part of `backward` that the stage before waits for."""
        return self._linearised(operands, activations).early(stashed, cotangents)

    def backward_weights(
        self, operands: Operands, activations: Arrays, stashed: Arrays, passed: Arrays
    ) -> Gradients:
        """The part of `backward` that nothing waits for."""
        return jax.tree.unflatten(
            jax.tree.structure(self._wanted(operands)),
            self._linearised(operands, activations).late(stashed, passed),
        )

    def _linearised(self, operands: Operands, activations: Arrays) -> Linearised:
        """The chunk around one microbatch."""
        floating = [is_floating(leaf) for leaf in activations]
        shape: dict[str, Any] = {}

        def all_of(operands: Operands, activations: Arrays) -> tuple[Arrays, Arrays]:
            def run(variables: Gradients, moving: Arrays) -> tuple[Arrays, Arrays]:
                remaining = iter(moving)
                entering = [
                    next(remaining) if float_ else leaf
                    for leaf, float_ in zip(activations, floating, strict=True)
                ]
                weights = list(operands.weights)
                for k, leaf in zip(self.own, variables.weights, strict=True):
                    weights[k] = leaf
                left = self.run(
                    replace(operands, weights=weights, shared=variables.shared),
                    entering,
                    variables.sums,
                )
                return [leaf for leaf, float_ in zip(left, floating, strict=True) if float_], left

            moving = [leaf for leaf, float_ in zip(activations, floating, strict=True) if float_]
            _, pull, left = jax.vjp(run, self._wanted(operands), moving, has_aux=True)
            leaves, shape["tree"] = jax.tree.flatten(pull)
            return left, leaves

        traced = jax.make_jaxpr(all_of)(operands, activations)
        count, operand_count = len(activations), len(jax.tree.leaves(operands))
        program = flatten(traced)
        labels = dependence(
            program, [frozenset()] * operand_count + [frozenset({"microbatch"})] * count
        )
        values = jex.jaxpr_as_fun(traced)(*jax.tree.leaves(operands), *activations)
        saved = tuple(program.outputs[count:])
        return Linearised(
            left=values[:count],
            saved=dict(zip(saved, values[count:], strict=True)),
            order=saved,
            tree=shape["tree"],
            kept=tuple(dict.fromkeys(number for number in saved if labels[number])),
            entered=sum(floating),
        )


def _given(gathered: Gathered, values: Arrays, ready: Arrays, walk: Walk) -> Arrays:
    """Results of a layer whose operands of matmuls are ready."""
    env = {
        **gathered.body.constants,
        **dict(zip(gathered.body.inputs, values, strict=True)),
        **dict(zip(gathered.operands, ready, strict=True)),
    }
    evaluate_equations(gathered.rest, env, walk)
    return [env[number] for number in gathered.body.outputs]
