"""Parts shared by both forms of a pipeline: the partition of a loss, the chunks of a stage,
gathered weights, embedding and head.

A plan gives the number of rematerialised layers of the fullest stage, overall or by layer group. In
lockstep all chunks of all stages are one program and rematerialise equally many layers; with one
program per stage the stage's number is divided among its chunks, the first ones taking one more.

>>> half = StageRemat(policy="full", count=3, layers=4, virtual=2)
>>> half.of_every_chunk.count
2
>>> half.of_chunk(0, layers=2).count, half.of_chunk(1, layers=2).count
(2, 1)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib._jax_compat import scan_counts
from shardlib.annotation.trees import Tree
from shardlib.errors import PlanError
from shardlib.jax_types import Index, Leaf, Value
from shardlib.lowering.contractions import as_dtype
from shardlib.lowering.loss_layouts import LossLayouts
from shardlib.lowering.runtime import Arrays
from shardlib.lowering.weights import AFTER_PIPELINE, DeferredOp
from shardlib.tracing.folding import Split, split
from shardlib.tracing.program import Equation, Program, flatten, has_matmul
from shardlib.tracing.rewriting import (
    LAYER_INPUT,
    Labels,
    LayerRange,
    Walk,
    dependence,
    entry_of,
    evaluate_equations,
    evaluate_program,
    in_layer_ranges,
    needed,
    rematerialised,
    saving_intermediates,
    summing_gradient,
    with_entry,
)

# --------------------------------------------------------------------------------------------------
# The loop over layers of a traced loss, and the roles of its operands.
#
# The loop over layers is the scan that contains matmuls. If there are several: one that slices
# parameters before one that does not (as over time), then the one with the most layers, then the
# last. Every value of the loss is labelled with what it is computed from (parameters, frozen
# parameters, model state, batch), and every operand of the loop gets a role:
#
#     weights      from trained parameters, one slice per layer: sharded over the stages
#     layer_constants
#                  from frozen parameters or constants (flags and the like), one slice per layer:
#                  sharded over the stages
#     keys         from model state, or from keys of the batch, one slice per layer: random keys;
#                  different in every microbatch
#     shared       from trained parameters, the same for all layers
#     activations  the loop's carry, and values computed from the batch (masks, positions, encoder
#                  outputs): sent from stage to stage

PARAMETERS, FROZEN, STATE, BATCH, KEY = "parameters", "frozen parameters", "state", "batch", "key"


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Roles of the operands of the loop, by position.

    Attributes:
        weights, layer_constants, keys: positions among the scanned operands.
        shared, constant, activations: positions among the constant operands; `constant` operands
            are computed from frozen parameters or constants.
    """

    weights: tuple[int, ...]
    layer_constants: tuple[int, ...]
    keys: tuple[int, ...]
    shared: tuple[int, ...]
    constant: tuple[int, ...]
    activations: tuple[int, ...]


def loop_over_layers(program: Program, labels: Mapping[int, Labels]) -> Equation:
    """The scan over layers."""
    loops = [
        equation
        for equation in program.equations
        if equation.name == "scan" and has_matmul(equation.eqn)
    ]
    if not loops:
        names = (
            ", ".join(
                dict.fromkeys(
                    equation.name for equation in program.equations if has_matmul(equation.eqn)
                )
            )
            or "none"
        )
        raise PlanError(
            "a pipeline needs layers that repeat, and the loss has none at its top level;"
            f" operations that multiply matrices: {names}\nTry: layers under one jax.lax.scan"
            " (nnx.vmap over the constructor, or nn.scan in Linen), or equal layers one after"
            " another; or a plan without stages"
        )

    def rank(loop: Equation) -> tuple[bool, int]:
        sliced = [labels[number] for number in loop.inputs[sum(scan_counts(loop.params)) :]]
        over_layers = any(PARAMETERS in origins and BATCH not in origins for origins in sliced)
        return over_layers, loop.params["length"]

    return max(reversed(loops), key=rank)


def roles_of(loop: Equation, labels: Mapping[int, Labels], known: Collection[int]) -> Roles:
    """The roles of the operands of the loop over layers."""
    constants, carried = scan_counts(loop.params)
    scanned = {
        k: _role(number, labels[number], known, k, loop)
        for k, number in enumerate(loop.inputs[constants + carried :])
    }
    fixed = {
        k: "shared" if PARAMETERS in labels[number] else "constant"
        for k, number in enumerate(loop.inputs[:constants])
        if number in known
    }

    def with_role(roles: Mapping[int, str], role: str) -> tuple[int, ...]:
        return tuple(k for k, assigned in roles.items() if assigned == role)

    return Roles(
        weights=with_role(scanned, "weights"),
        layer_constants=with_role(scanned, "constant"),
        keys=with_role(scanned, "keys"),
        shared=with_role(fixed, "shared"),
        constant=with_role(fixed, "constant"),
        activations=tuple(k for k in range(constants) if k not in fixed),
    )


def _role(
    number: int, origins: Labels, known: Collection[int], position: int, loop: Equation
) -> str:
    if number not in known and not origins <= {STATE, KEY}:
        raise PlanError(
            f"the loop over layers at {loop.scope or loop.path} slices a value computed from"
            f" the batch for every layer (operand {position}); a pipeline gives the same values to"
            " all its stages\nTry: pass it to the layers whole, or a plan without stages"
        )
    if loop.params["reverse"]:
        raise PlanError(
            "the loop over layers runs from the last to the first, and stages take layers from the"
            " first to the last\nTry: reverse the stack of parameters instead"
        )
    return "keys" if number not in known else "weights" if PARAMETERS in origins else "constant"


# --------------------------------------------------------------------------------------------------
# Partition of a traced loss: before the layers, the layers, after the layers.
#
# Activations are sent from stage to stage. Stacked results of the layers that the rest of the loss
# reads are sent along, in a buffer into which every stage writes the slices of its layers.

#: Arrays by number of the value in the traced loss.
Values = dict[int, Any]


@dataclass(frozen=True, kw_only=True)
class SplitLoss:
    """A loss partitioned around its loop over layers. Values are numbers of `program`.

    Attributes:
        program: the loss over the leaves of (params, state, batch).
        loop: the scan over layers.
        labels: what each value is computed from.
        exits: positions among the stacked results of the loop that are read after it.
        per_step_equations: equations that depend on parameters alone, run once per step.
        per_step: values computed from parameters or constants that the rest of the loss reads.
        before: equations of a microbatch that the loop needs.
        after: equations of a microbatch that loss and metrics need, including those of `before`
            that they read; the loop is in neither.
        results: values of loss and metrics.
        state: values of the model state after the step.
    """

    program: Program
    loop: Equation
    layers: int
    labels: Mapping[int, Labels]
    roles: Roles
    exits: tuple[int, ...]
    per_step_equations: tuple[Equation, ...]
    per_step: tuple[int, ...]
    before: tuple[Equation, ...]
    after: tuple[Equation, ...]
    results: tuple[int, ...]
    state: tuple[int, ...]

    @property
    def frozen_layer_constants(self) -> tuple[int, ...]:
        """The `Roles.layer_constants` that are computed from frozen parameters."""
        return tuple(k for k in self.roles.layer_constants if self.labels[self.scanned[k]])

    @property
    def constants(self) -> tuple[int, ...]:
        """Constant operands of the loop."""
        return self.loop.inputs[: scan_counts(self.loop.params)[0]]

    @property
    def carry(self) -> tuple[int, ...]:
        """Initial carry of the loop."""
        constants, carried = scan_counts(self.loop.params)
        return self.loop.inputs[constants : constants + carried]

    @property
    def scanned(self) -> tuple[int, ...]:
        """Scanned operands of the loop."""
        return self.loop.inputs[sum(scan_counts(self.loop.params)) :]

    @property
    def entering(self) -> tuple[int, ...]:
        """Values that enter the first stage: the carry, then what travels with it."""
        return (*self.carry, *(self.constants[k] for k in self.roles.activations))

    @property
    def final(self) -> tuple[int, ...]:
        """Results of the loop that are the carry after the last layer."""
        return self.loop.outputs[: len(self.carry)]

    @property
    def stacked(self) -> tuple[int, ...]:
        """Results of the loop that stack the layers' outputs and are read after it."""
        return tuple(self.loop.outputs[len(self.carry) + k] for k in self.exits)

    @cached_property
    def read_outside(self) -> frozenset[int]:
        """Values read before or after the loop, including those that enter the first stage or are
        results.
        """
        return frozenset(
            number for equation in (*self.before, *self.after) for number in equation.inputs
        ) | {*self.entering, *self.results}

    @cached_property
    def owners(self) -> Mapping[int, int]:
        """Value -> position of the parameter that it is, or is a cast of."""
        positions = {
            number: position
            for position, number in enumerate(self.program.inputs)
            if self.labels[number] in (frozenset({PARAMETERS}), frozenset({FROZEN}))
        }
        for equation in self.per_step_equations:
            if equation.name == "convert_element_type" and equation.inputs[0] in positions:
                positions[equation.outputs[0]] = positions[equation.inputs[0]]
        return positions

    def of_microbatch(self, state: Arrays, batch: Arrays) -> Values:
        """Model state and batch of a microbatch, by value."""
        inputs, arrays = self.program.inputs, [*state, *batch]
        return dict(zip(inputs[len(inputs) - len(arrays) :], arrays, strict=True))

    def keys(self, inputs: Values, walk: Walk) -> Arrays:
        """Per-layer slices of model state and of random keys in the batch, [layers, ...].

        Args:
            inputs: see `of_microbatch`.
        """
        env = {**self.program.constants, **inputs}
        numbers = [self.scanned[k] for k in self.roles.keys]
        evaluate_equations(needed(self.program.equations, numbers)[0], env, walk)
        return [env[number] for number in numbers]


def results_and_gradients(
    results_of: Callable[..., Arrays], loss_position: int, outputs: Arrays, *values: Tree
) -> tuple[Arrays, tuple[Any, ...]]:
    """(loss and metrics, gradients of the loss): those of each of the values, then those of the
    differentiable outputs of the last chunk.

    Args:
        results_of: (*values, outputs of the last chunk) -> loss and metrics.
        loss_position: position of the loss among these.
        outputs: those of the last chunk.
    """

    def run(*arguments: Any) -> tuple[Any, Arrays]:
        remaining = iter(arguments[-1])
        results = results_of(
            *arguments[:-1],
            [next(remaining) if is_differentiable(leaf) else leaf for leaf in outputs],
        )
        return results[loss_position], results

    differentiable = [leaf for leaf in outputs if is_differentiable(leaf)]
    _, pull, results = jax.vjp(run, *values, differentiable, has_aux=True)
    return results, pull(jnp.ones((), results[loss_position].dtype))


def split_loss(
    program: Program,
    num_parameters: int,
    num_state: int,
    num_results: int,
    keys: Collection[int] = (),
    frozen: Collection[int] = (),
) -> SplitLoss:
    """Splits a loss around its loop over layers.

    Args:
        num_parameters, num_state, num_results: number of parameters, of arrays of model state, and
            of the loss and metrics.
        keys, frozen: positions of random keys and of frozen parameters among the inputs.
    """
    labels = dependence(
        program, _input_labels(len(program.inputs), num_parameters, num_state, keys, frozen)
    )
    loop = loop_over_layers(program, labels)
    constants, carried = scan_counts(loop.params)
    outputs, after_state = program.outputs[:num_results], program.outputs[num_results:]
    _require_independent_state(labels, after_state)
    per_step_equations, known = _per_step_equations(program, loop, num_parameters)
    excluded = {loop.path, *(equation.path for equation in per_step_equations)}
    others = [equation for equation in program.equations if equation.path not in excluded]
    roles = roles_of(loop, labels, known)
    entering = [
        *loop.inputs[constants : constants + carried],
        *(loop.inputs[k] for k in roles.activations),
    ]
    before, reads_before = needed(others, entering)
    after, reads_after = needed(others, outputs)
    reads = {*reads_before, *reads_after, *loop.inputs}
    return SplitLoss(
        program=program,
        loop=loop,
        layers=loop.params["length"],
        labels=labels,
        roles=roles,
        exits=tuple(k for k, number in enumerate(loop.outputs[carried:]) if number in reads_after),
        per_step_equations=tuple(per_step_equations),
        per_step=tuple(
            sorted(
                number for number in reads if number in known and number not in program.constants
            )
        ),
        before=tuple(before),
        after=tuple(after),
        results=outputs,
        state=after_state,
    )


def _input_labels(
    num_inputs: int,
    num_parameters: int,
    num_state: int,
    keys: Collection[int],
    frozen: Collection[int],
) -> list[Labels]:
    """The label of each input of a loss; arguments as those of `split_loss`."""

    def label(position: int) -> str:
        if position in frozen:
            return FROZEN
        if position < num_parameters:
            return PARAMETERS
        if position < num_parameters + num_state:
            return STATE
        return KEY if position in keys else BATCH

    return [frozenset({label(position)}) for position in range(num_inputs)]


def _require_independent_state(labels: Mapping[int, Labels], state: Sequence[int]) -> None:
    """Raises if the model state after a step depends on more than the state before it."""
    origins = frozenset[str]().union(*(labels[number] for number in state))
    if not origins <= {STATE}:
        raise PlanError(
            f"the model state after a step depends on {' and '.join(sorted(origins - {STATE}))},"
            " and microbatches of a pipeline are in flight at the same time\nTry: a plan without"
            " stages (mesh axis stage=1), or a model whose state depends on nothing but itself,"
            " random streams for example"
        )


def _per_step_equations(
    program: Program, loop: Equation, num_parameters: int
) -> tuple[list[Equation], set[int]]:
    """The equations that depend on parameters alone, and all values known after them."""
    values = {*program.constants, *program.inputs[:num_parameters]}
    equations: list[Equation] = []
    for equation in program.equations:
        if equation is not loop and values.issuperset(equation.inputs):
            equations.append(equation)
            values.update(equation.outputs)
    return equations, values


# --------------------------------------------------------------------------------------------------
# The layers of a chunk in sequence, and the values that each saves for its backward pass.
#
# The first layers of a chunk may follow a remat policy while the others save all residuals: in a
# chunk of 4 layers, with LayerRemat(policy="full", count=2), layers 0 and 1 save only inputs.

#: The carry of the loop over layers, and its slices per layer: trees of arrays.
Carry = Tree
#: (carry, slices) -> (carry, results) of one layer.
Body = Callable[[Carry, Tree], tuple[Carry, Arrays]]


@dataclass(frozen=True, kw_only=True)
class LayerRemat:
    """The remat policy of the layers of a chunk.

    Attributes:
        count: number of layers that follow the policy, counted from the first; None for all.
        offloaded: whether saved values are offloaded to host memory.
    """

    policy: str
    count: int | None = None
    offloaded: bool = False

    def followed(self, layers: int) -> int:
        """Number of layers that follow the policy, out of `layers`."""
        if self.policy == "none":
            return 0
        return layers if self.count is None else min(layers, self.count)

    def wraps(self, *, prevent_cse: bool) -> tuple[Callable[[Body], Body], Callable[[Body], Body]]:
        """Transformations of a layer that follows the policy, and of one that does not."""
        following, saving_all = (
            partial(rematerialised, remat=policy, prevent_cse=prevent_cse, offloaded=self.offloaded)
            for policy in (self.policy, "none")
        )
        return following, saving_all


def _with_named_input(body: Body) -> Body:
    """A layer whose input has a name, so that the remat policy can offload it."""

    def named(carry: Carry, sliced: Tree) -> tuple[Carry, Arrays]:
        return body(tuple(checkpoint_name(leaf, LAYER_INPUT) for leaf in carry), sliced)

    return named


def as_loop(
    body: Body,
    remat: LayerRemat,
    layers: int,
    carry: Carry,
    scanned: Tree,
    around: Callable[[Body], Body] = lambda layer: layer,
) -> tuple[Carry, Arrays]:
    """Runs the layers as a loop, or as two if only the first of them follow the policy.

    Args:
        scanned: tree of arrays [layers, ...].
        around: changes a layer that has its remat policy; `carry` and `scanned` are those of the
            changed layer.

    Returns:
        The final carry, and stacked results [layers, ...].
    """
    body = _with_named_input(body) if remat.offloaded else body
    following, saving_all = remat.wraps(prevent_cse=False)
    count = remat.followed(layers)
    if count in (0, layers):
        layer = around((following if count else saving_all)(body))
        return jax.lax.scan(layer, carry, scanned, length=layers)
    rest = saving_all if remat.offloaded else saving_intermediates
    parts = [
        LayerRange(first=0, count=count, wrap=following),
        LayerRange(first=count, count=layers - count, wrap=rest),
    ]
    return in_layer_ranges(
        parts,
        body,
        carry,
        scanned,
        lambda layer, carry, slices, length: jax.lax.scan(layer, carry, slices, length=length),
        around,
    )


def as_unrolled(
    body: Body, remat: LayerRemat, layers: int, carry: Carry, scanned: Sequence[Tree]
) -> tuple[Carry, Arrays]:
    """Unrolled form of `as_loop`; `scanned` may be a list of one tree per layer."""
    body = _with_named_input(body) if remat.offloaded else body
    following, saving_all = (wrap(body) for wrap in remat.wraps(prevent_cse=True))
    count, exits = remat.followed(layers), list[Arrays]()
    for layer in range(layers):
        carry, results = (following if layer < count else saving_all)(
            carry,
            tuple(
                leaves[layer] if hasattr(leaves, "dtype") else [leaf[layer] for leaf in leaves]
                for leaves in scanned
            ),
        )
        exits.append(results)
    return carry, [jnp.stack(rows) for rows in zip(*exits, strict=True)]


# --------------------------------------------------------------------------------------------------
# A chunk of layers on one microbatch: its results, and the residuals of its backward pass.


@dataclass(frozen=True, kw_only=True)
class LinearisedChunk:
    """A chunk with the residuals of its backward pass.

    Attributes:
        outputs: those of the chunk.
        saved: residuals, by number of the value.
        order: these numbers, in the order in which the backward pass takes them.
        of_microbatch: those of them that depend on the microbatch, without duplicates.
        tree: tree structure of the backward pass (a pytree of its residuals).
        input_count: number of gradients of the chunk's inputs, the last results of the backward
            pass.
        sums: zeros like the sums that the backward pass adds to, which follow the cotangents.
    """

    outputs: Arrays
    saved: dict[int, Any]
    order: tuple[int, ...]
    of_microbatch: tuple[int, ...]
    tree: Any
    input_count: int
    sums: Arrays

    @property
    def stash(self) -> Arrays:
        """The residuals that depend on the microbatch."""
        return [self.saved[number] for number in self.of_microbatch]

    def pull(self, stash: Arrays) -> Callable[[Arrays], Tree]:
        """The backward pass, with the stash in place of the residuals that depend on the
        microbatch.
        """
        return jax.tree.unflatten(self.tree, self._residuals(stash))

    def input_gradients(self, stash: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        """The input-gradient half of the backward pass: (gradients of the chunk's inputs, residuals
        for `weight_gradients`).
        """
        inputs = [*self._residuals(stash), *cotangents, *self.sums]
        return self._halves(cotangents).run_first(inputs)

    def weight_gradients(self, stash: Arrays, residuals: Arrays, sums: Arrays) -> Arrays:
        """The weight-gradient half of the backward pass."""
        # Placeholders: the second half does not read the cotangents.
        cotangents = [leaf for leaf in self.outputs if is_differentiable(leaf)]
        inputs = [*self._residuals(stash), *cotangents, *sums]
        return self._halves(cotangents).run_second(inputs, residuals)

    def _residuals(self, stash: Arrays) -> Arrays:
        """All residuals of the backward pass, in its order."""
        values = {**self.saved, **dict(zip(self.of_microbatch, stash, strict=True))}
        return [values[number] for number in self.order]

    def _halves(self, cotangents: Arrays) -> Split:
        """The backward pass, split into input gradients and weight gradients."""
        count, of_sums = len(self.order), len(self.order) + len(cotangents)
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for leaf in [*(self.saved[number] for number in self.order), *cotangents, *self.sums]
        ]
        traced = jax.make_jaxpr(
            lambda *leaves: jax.tree.leaves(
                jax.tree.unflatten(self.tree, leaves[:count])(list(leaves[count:]))
            )
        )(*shapes)
        program = flatten(traced, remat=True)
        others = len(program.outputs) - self.input_count
        available = [*program.inputs[:count], *program.inputs[of_sums:]]
        return split(program, program.outputs[others:], program.outputs[:others], available)


def is_differentiable(leaf: Leaf) -> bool:
    """True if gradients flow through an array."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SumPlace:
    """Where the gradients of a tick are added.

    Attributes:
        chunk, slot: indices into the sums of weights, and into partial sums.
        active: whether the stage has work; otherwise nothing is added.
    """

    chunk: Index
    slot: Index
    active: Value


# --------------------------------------------------------------------------------------------------
# Weights of layers that are gathered before the ticks that use them, and their gradients.
#
# A weight that is stored sharded over fsdp is normally all-gathered by every operation that uses
# it, forward and backward, for every microbatch, and its gradient is reduce-scattered as often.
# Where the plan gathers once, the operands that matmuls make of weights (casts, transpositions and
# reshapes of them) are computed and all-gathered once (pregathered) and used by all ticks; each
# device sums its partial gradients, and the sums are reduced after the backward pass of the last
# microbatch. Traffic falls by the number of microbatches, at the cost of memory for gathered
# weights and unreduced gradients.
#
# Gradients that are stored replicated (ZeRO 0 and 1) are summed and reduced in the same way, with
# nothing to gather.
#
# Everything else that layers read (scales of norms, biases, weights of experts) is left to the
# operations that use it.


@dataclass(frozen=True, kw_only=True)
class PregatheredWeights:
    """Weights of one layer that are gathered before all ticks and whose gradients are reduced after
    them. Values are numbers of the loop's body.

    Attributes:
        body: the program of one layer.
        sources: position among the loop's scanned operands -> number of the value, for weights
            from which operands are computed.
        fully_deferred: positions of weights that nothing else reads.
        all_operands: the operands.
        operands: those that are gathered.
        uses: path of an operation -> its replacement.
        operand_equations: the equations that compute operands from weights.
        other_equations: the equations of a layer, given the gathered operands.
    """

    mesh: Mesh | AbstractMesh
    body: Program
    sources: Mapping[int, int]
    fully_deferred: frozenset[int]
    all_operands: tuple[int, ...]
    operands: tuple[int, ...]
    uses: Mapping[str, DeferredOp]
    operand_equations: tuple[Equation, ...]
    other_equations: tuple[Equation, ...]

    def operands_of(self, weights: Sequence[Value]) -> Arrays:
        """The operands of one layer in their stored sharding, in the order of `all_operands`,
        from its weights in the order of `sources`.
        """
        traced = [
            as_dtype(weight, self.body.avals[number].dtype)
            for number, weight in zip(self.sources.values(), weights, strict=True)
        ]
        env = {**self.body.constants, **dict(zip(self.sources.values(), traced, strict=True))}
        evaluate_equations(self.operand_equations, env, Walk())
        return [env[number] for number in self.all_operands]

    def gather(self, weights: Sequence[Value]) -> Arrays:
        """The gathered operands, from stacks of weights [layers, ...]."""
        if not self.operands:
            return []
        return jax.lax.scan(
            lambda _, weights: (None, self._layer_gathered(weights)), None, list(weights)
        )[1]

    def gather_into_slot(self, weights: Sequence[Value], slots: Arrays, slot: Index) -> Arrays:
        """Gathers operands in place into one slot of `slots`, layer by layer: the zeros that a loop
        stacks its results into would be live from the first to the last loop.

        Args:
            weights: stacks [layers, ...], in the order of `sources`.
            slots: arrays [slots, layers, ...], in the order of `operands`.
        """

        def layer(index: Index, slots: Arrays) -> Arrays:
            fresh = self._layer_gathered(
                [jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False) for leaf in weights]
            )
            return [
                with_entry(stack, leaf, (slot, index))
                for stack, leaf in zip(slots, fresh, strict=True)
            ]

        return jax.lax.fori_loop(0, weights[0].shape[0], layer, list(slots))

    def _layer_gathered(self, weights: Sequence[Value]) -> Arrays:
        """The gathered operands of one layer, in the order of `operands`."""
        gathers = {weight_operand(use): use.gather for use in self.uses.values()}
        operands = dict(zip(self.all_operands, self.operands_of(weights), strict=True))
        return [gathers[number](operands[number]) for number in self.operands]

    def reduce(self, weights: Sequence[Value], sums: Sequence[Value]) -> Arrays:
        """Gradients of weights [layers, ...] in the order of `sources`, from partial sums
        [layers, ...] in the order of `uses`.
        """
        return jax.lax.scan(
            lambda _, sums: (None, self._layer_reduced(weights, sums)), None, list(sums)
        )[1]

    def reduce_slot(
        self, weights: Sequence[Value], sums: Arrays, slot: Index
    ) -> tuple[Arrays, Arrays]:
        """(gradients of weights [layers, ...] from the partial sums in one slot, sums with that
        slot zeroed); each layer is zeroed after it is read, or XLA would copy all slots.

        Args:
            weights: stacks [layers, ...], in the order of `sources`.
            sums: arrays [slots, layers, ...], in the order of `uses`.
        """

        def layer(sums: Arrays, index: Value) -> tuple[Arrays, Arrays]:
            sent = [
                entry_of(leaf, (slot, index)).astype(use.sums_aval.dtype)
                for use, leaf in zip(self.uses.values(), sums, strict=True)
            ]
            partial_sums, sums = jax.lax.optimization_barrier((sent, sums))
            zeroed = [
                with_entry(leaf, jnp.zeros(leaf.shape[2:], leaf.dtype), (slot, index))
                for leaf in sums
            ]
            return zeroed, self._layer_reduced(weights, partial_sums)

        zeroed, gradients = jax.lax.scan(layer, list(sums), jnp.arange(weights[0].shape[0]))
        return gradients, zeroed

    def _layer_reduced(self, weights: Sequence[Value], sums: Sequence[Value]) -> Arrays:
        """Gradients of the weights of one layer, in the order of `sources`."""
        shapes = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in weights]
        gradients = by_operand(self.uses, sums, lambda gradient, _: gradient)
        return jax.linear_transpose(self.operands_of, shapes)(
            [gradients[number] for number in self.all_operands]
        )[0]

    def zeros(self, lead: tuple[int, ...]) -> Arrays:
        """Zeros for the partial sums, [*lead, ...], sharded so that each device has its own."""
        return zero_sums(self.uses, self.mesh, lead)

    def walk(self, walk: Walk, sums: Sequence[Value]) -> Walk:
        """A walk through one layer whose operations pass the gradients of these weights to `sums`
        (`with_partial_sums`).
        """
        return with_partial_sums(self.uses, walk, sums)


def zero_sums(
    uses: Mapping[str, DeferredOp], mesh: Mesh | AbstractMesh, lead: tuple[int, ...] = ()
) -> Arrays:
    """Zeros for the partial sums, [*lead, ...], sharded so that each device has its own."""
    zeros = [
        (jnp.zeros((*lead, *use.sums_aval.shape), use.sums_aval.dtype), use.sums_spec)
        for use in uses.values()
    ]
    return [
        jax.lax.with_sharding_constraint(
            leaf, NamedSharding(mesh, PartitionSpec(*(None for _ in lead), *spec))
        )
        for leaf, spec in zeros
    ]


def with_partial_sums(
    uses: Mapping[str, DeferredOp],
    walk: Walk,
    sums: Sequence[Value],
    gathered: Mapping[str, Value] | None = None,
) -> Walk:
    """A walk whose operations give partial sums as the gradients of `sums`, not of their weights;
    `gathered` replaces weights by gathered ones, by path of the operation.
    """
    sums_by_path, gathered_by_path = dict(zip(uses, sums, strict=True)), gathered or {}

    def run(equation: Equation, operands: Sequence[Any]) -> list[Any] | None:
        if equation.path in sums_by_path:
            use, path = uses[equation.path], equation.path
            weight = use.use.position
            return [
                use.run(
                    [
                        gathered_by_path.get(path, operand_value) if k == weight else operand_value
                        for k, operand_value in enumerate(operands)
                    ],
                    sums_by_path[path],
                )
            ]
        return walk.run(equation, operands) if walk.run is not None else None

    return replace(walk, run=run)


def by_operand(
    uses: Mapping[str, DeferredOp], sums: Sequence[Value], cast: Callable[[Value, Value], Value]
) -> Values:
    """Gradients of the weight operands of operations, from partial sums in the order of `uses`.

    Args:
        cast: (gradient, partial sums) -> the gradient in the dtype of the sum.
    """
    gradients: Values = {}
    for use, total in zip(uses.values(), sums, strict=True):
        gradient = cast(use.reduce(total.astype(use.sums_aval.dtype)), total)
        number = weight_operand(use)
        gradients[number] = gradients[number] + gradient if number in gradients else gradient
    return gradients


def weight_operand(use: DeferredOp) -> int:
    """The value that an operation reads as its weight."""
    return use.use.equation.inputs[use.use.position]


def pregathered_weights(
    layouts: LossLayouts, sections: SplitLoss, mesh: Mesh | AbstractMesh
) -> PregatheredWeights | None:
    """The weights that can be pregathered; None if there are none, or if gradients are not
    reduced at the end of the step.
    """
    if layouts.reductions.when != AFTER_PIPELINE:
        return None
    loop = sections.loop
    body = loop.inside("body")
    body_paths = {equation.path for equation in body.equations}
    first = sum(scan_counts(loop.params))
    scanned = {body.inputs[first + k]: k for k in sections.roles.weights}
    uses: dict[str, DeferredOp] = {}
    for path, use in layouts.uses.items():
        if path in body_paths and (deferral := layouts.deferred(path, mesh)) is not None:
            operand_equations, reads = needed(body.equations, [use.equation.inputs[use.position]])
            computed = {number for equation in operand_equations for number in equation.outputs}
            if reads - computed <= {*scanned, *body.constants}:
                uses[path] = deferral
    if not uses:
        return None
    all_operands = tuple(dict.fromkeys(weight_operand(use) for use in uses.values()))
    operands = tuple(dict.fromkeys(weight_operand(use) for use in uses.values() if use.gathers))
    operand_equations, reads = needed(body.equations, all_operands)
    sources = {
        scanned[number]: number
        for number in sorted(reads & scanned.keys(), key=lambda number: scanned[number])
    }
    return PregatheredWeights(
        mesh=mesh,
        body=body,
        sources=sources,
        all_operands=all_operands,
        operands=operands,
        uses=uses,
        operand_equations=tuple(operand_equations),
        other_equations=tuple(needed(body.equations, body.outputs, operands)[0]),
        fully_deferred=frozenset(
            position
            for position, number in sources.items()
            if _only_read_by(number, body, operand_equations, uses)
        ),
    )


def _only_read_by(
    weight: int, body: Program, computing: Sequence[Equation], uses: Mapping[str, DeferredOp]
) -> bool:
    """True if a layer uses a weight only as an operand of given operations."""
    derived, views = {weight}, {equation.path for equation in computing}
    for equation in body.equations:
        if derived.intersection(equation.inputs):
            if equation.path in uses:
                continue
            if equation.path not in views:
                return False
            derived.update(equation.outputs)
    return not derived.intersection(body.outputs)


# --------------------------------------------------------------------------------------------------
# The work of a stage on one microbatch.
#
# A chunk is a run of consecutive layers. Its forward pass is `jax.vjp`, and the residuals are
# divided: those that depend on weights alone (weights, casts of them, constant masks) are
# recomputed in the backward tick; those that depend on the microbatch are stashed. The remat policy
# decides which residuals there are, as in a program without stages.


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ChunkOperands:
    """Operands of a chunk, on one stage.

    Attributes:
        weights: the chunk's layers of each stacked parameter, [layers, ...].
        layer_constants: the same of each constant with a slice per layer.
        keys: the same of each array of model state with a slice per layer, for one microbatch.
        shared: parameters that all layers use.
        constant: arrays computed from constants that all layers use.
        gathered: pregathered matmul operands (`PregatheredWeights`), [layers, ...].
        first_layer: index of the chunk's first layer.
        place: where its gradients are added; None if they are returned.
    """

    weights: Arrays
    layer_constants: Arrays
    keys: Arrays
    shared: Arrays
    constant: Arrays
    gathered: Arrays
    first_layer: Any
    place: SumPlace | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ChunkGrads:
    """Gradients of everything but the activations, or sums of them.

    Attributes:
        weights: of stacked parameters, in the order of `Chunk.per_tick_weights`.
        shared: of parameters that all layers use.
        partial_sums: per-device partial sums for pregathered operands.
    """

    weights: Arrays
    shared: Arrays
    partial_sums: Arrays


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A run of consecutive layers as a function.

    Attributes:
        layers: layers per chunk.
        padded: whether the layers do not fill all chunks; those after the last layer are then
            identities.
        walk: makes the walk of a trace, which belongs to the mesh of that trace.
        pregathered: weights that are pregathered; None if there are none.
        unrolled: whether layers are unrolled; weights and their gradients may then be lists by
            layer.
        sums: chunks that have sums of gradients to which the backward pass adds, slots of partial
            sums, and the dtype of a sum given that of a weight; None if gradients are returned.
    """

    sections: SplitLoss
    layers: int
    padded: bool
    remat: LayerRemat
    walk: Callable[[], Walk]
    pregathered: PregatheredWeights | None = None
    unrolled: bool = False
    sums: tuple[int, int, Callable[[Any], Any]] | None = None

    @property
    def per_tick_weights(self) -> tuple[int, ...]:
        """Weights that get a gradient in every tick, as positions in `ChunkOperands.weights`."""
        return tuple(
            k
            for k, position in enumerate(self.sections.roles.weights)
            if self.pregathered is None or position not in self.pregathered.fully_deferred
        )

    def run(self, operands: ChunkOperands, activations: Arrays) -> Arrays:
        """The outputs of the chunk for its inputs: the carry, the values sent along with it, and
        buffers of the layers' stacked results, [all layers, ...].
        """
        return self._run(operands, activations, self._zero_sums(), [])[0]

    def _run(
        self, operands: ChunkOperands, activations: Arrays, partial_sums: Arrays, sums: Arrays
    ) -> tuple[Arrays, Arrays]:
        """(outputs as of `run`, `sums`).

        Args:
            partial_sums: arrays whose gradients are the partial sums for pregathered operands,
                [layers, ...].
            sums: arrays whose cotangents are sums of gradients, of weights and then partial ones,
                if the backward pass adds to such.
        """
        sections, roles, walk = self.sections, self.sections.roles, self.walk()
        pregathered = self.pregathered
        constants, carried = scan_counts(sections.loop.params)
        path = sections.loop.path
        body_program = sections.loop.inside("body")
        inner = walk.layer() if self.remat.policy != "none" else walk.as_written()
        fixed = dict(
            zip(
                (*roles.shared, *roles.constant),
                (*operands.shared, *operands.constant),
                strict=True,
            )
        ) | dict(zip(roles.activations, activations[carried:], strict=False))

        def in_layouts(kind: str, values: Sequence[Any]) -> Arrays:
            return [walk.apply(f"{path}/{kind}/{k}", 0, value) for k, value in enumerate(values)]

        def body(
            carry: tuple[Any, ...], sliced: tuple[Arrays, Arrays, Arrays, Any, Arrays, Arrays]
        ) -> tuple[tuple[Any, ...], Arrays]:
            weights, layer_constants, keys, number, gathered, partial_sums = sliced
            scanned = (
                dict(zip(roles.weights, weights, strict=True))
                | dict(zip(roles.layer_constants, layer_constants, strict=True))
                | dict(zip(roles.keys, keys, strict=True))
            )
            values = [
                *(fixed[k] for k in range(constants)),
                *in_layouts("carry", carry),
                *in_layouts("enter", [scanned[k] for k in range(len(scanned))]),
            ]
            outputs = (
                evaluate_program(body_program, values, inner)
                if pregathered is None
                else _layer_results(
                    pregathered, values, gathered, pregathered.walk(inner, partial_sums)
                )
            )
            after = outputs[:carried]
            if self.padded:
                after = [
                    jnp.where(number < sections.layers, new, old)
                    for new, old in zip(after, carry, strict=True)
                ]
            return tuple(after), [outputs[carried + k] for k in sections.exits]

        def summing(layer: Any) -> Any:
            """A layer that carries sums, to which its backward pass adds its gradients."""

            def run(carry: tuple[Any, Arrays], sliced: Any) -> tuple[tuple[Any, Arrays], Arrays]:
                activations, totals = carry
                weights, layer_constants, keys, number, gathered, partial_sums = sliced
                place, index = operands.place, number - operands.first_layer
                assert place is not None
                count, read = len(self.per_tick_weights), dict(enumerate(weights))
                leaves = [*(weights[k] for k in self.per_tick_weights), *partial_sums]
                slots = [place.chunk] * count + [place.slot] * len(partial_sums)
                pairs = [
                    summing_gradient(leaf, total, (slot, index), place.active)
                    for leaf, total, slot in zip(leaves, totals, slots, strict=True)
                ]
                leaves = [leaf for leaf, _ in pairs]
                read.update(zip(self.per_tick_weights, leaves[:count], strict=True))
                weights = list(read.values())
                sliced = weights, layer_constants, keys, number, gathered, leaves[count:]
                activations, exits = layer(activations, sliced)
                return (activations, [total for _, total in pairs]), exits

            return run

        numbers = operands.first_layer + jnp.arange(self.layers)
        stacks = (operands.weights, operands.layer_constants, operands.keys)
        scanned = (*stacks, numbers, operands.gathered, partial_sums)
        carry: Any = tuple(activations[:carried])
        if sums:
            (final, sums), exits = as_loop(
                body, self.remat, self.layers, (carry, sums), scanned, summing
            )
        else:
            run_layers = as_unrolled if self.unrolled else as_loop
            final, exits = run_layers(body, self.remat, self.layers, carry, scanned)
        buffers = [
            jax.lax.dynamic_update_slice_in_dim(
                buffer, part.astype(buffer.dtype), operands.first_layer, 0
            )
            for buffer, part in zip(
                activations[carried + len(roles.activations) :], exits, strict=True
            )
        ]
        return [*final, *activations[carried : carried + len(roles.activations)], *buffers], sums

    def _differentiated(self, operands: ChunkOperands) -> ChunkGrads:
        """The arrays that gradients are taken with respect to: the operands, or in place of weights
        and partial sums those that the layers carry as sums.
        """
        if self.sums is not None:
            chunks, slots, accumulator = self.sums
            weights = [operands.weights[k] for k in self.per_tick_weights]
            return ChunkGrads(
                weights=[jnp.zeros((chunks, *w.shape), accumulator(w.dtype)) for w in weights],
                shared=operands.shared,
                partial_sums=self.zero_partial_sums((slots,)),
            )
        return ChunkGrads(
            weights=[operands.weights[k] for k in self.per_tick_weights],
            shared=operands.shared,
            partial_sums=self._zero_sums(),
        )

    def zero_partial_sums(self, lead: tuple[int, ...]) -> Arrays:
        """Zeros for the sums of partial sums, [*lead, layers, ...], float32 at least."""
        zeros = self.pregathered.zeros((*lead, self.layers)) if self.pregathered else []
        return [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in zeros]

    def _zero_sums(self) -> Arrays:
        """Zeros for the partial sums of one microbatch, [layers, ...] or a list by layer."""
        if self.pregathered is None:
            return []
        return (
            [[leaf] * self.layers for leaf in self.pregathered.zeros(())]
            if self.unrolled
            else self.pregathered.zeros((self.layers,))
        )

    def forward(self, operands: ChunkOperands, activations: Arrays) -> tuple[Arrays, Arrays]:
        """(outputs of the chunk, its stash for the backward pass)."""
        linearised = self._linearised(operands, activations)
        return linearised.outputs, linearised.stash

    def backward(
        self,
        operands: ChunkOperands,
        activations: Arrays,
        stash: Arrays,
        cotangents: Arrays,
        sums: ChunkGrads | None = None,
    ) -> tuple[ChunkGrads, Arrays]:
        """Gradients of the operands, and of the differentiable inputs.

        Args:
            sums: what the gradients of weights and the partial sums are added to, if `self.sums`.
        """
        pull = self._linearised(operands, activations).pull(stash)
        return pull([*cotangents, *_summed_by_layers(sums)])

    def backward_inputs(
        self, operands: ChunkOperands, activations: Arrays, stash: Arrays, cotangents: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The input-gradient half of `backward`, which the previous stage waits for."""
        return self._linearised(operands, activations).input_gradients(stash, cotangents)

    def backward_weights(
        self,
        operands: ChunkOperands,
        activations: Arrays,
        stash: Arrays,
        residuals: Arrays,
        sums: ChunkGrads | None = None,
    ) -> ChunkGrads:
        """The weight-gradient half of `backward`, which no stage waits for."""
        return jax.tree.unflatten(
            jax.tree.structure(self._differentiated(operands)),
            self._linearised(operands, activations).weight_gradients(
                stash, residuals, _summed_by_layers(sums)
            ),
        )

    def _linearised(self, operands: ChunkOperands, activations: Arrays) -> LinearisedChunk:
        """The chunk linearised at one microbatch."""
        flags = [is_differentiable(leaf) for leaf in activations]
        pull_tree: list[Any] = []

        def linearise(operands: ChunkOperands, activations: Arrays) -> tuple[Arrays, Arrays]:
            def run(variables: ChunkGrads, differentiable: Arrays) -> tuple[Arrays, Arrays]:
                remaining = iter(differentiable)
                entering = [
                    next(remaining) if flag else leaf
                    for leaf, flag in zip(activations, flags, strict=True)
                ]
                weights, partial_sums = list(operands.weights), variables.partial_sums
                sums = list[Value]()
                if self.sums is None:
                    for k, leaf in zip(self.per_tick_weights, variables.weights, strict=True):
                        weights[k] = leaf
                else:
                    sums, partial_sums = _summed_by_layers(variables), self._zero_sums()
                outputs, sums = self._run(
                    replace(operands, weights=weights, shared=variables.shared),
                    entering,
                    partial_sums,
                    sums,
                )
                results = [leaf for leaf, flag in zip(outputs, flags, strict=True) if flag]
                return [*results, *sums], outputs

            differentiable = [leaf for leaf, flag in zip(activations, flags, strict=True) if flag]
            primals = self._differentiated(operands), differentiable
            _, pull, outputs = jax.vjp(run, *primals, has_aux=True)
            leaves, treedef = jax.tree.flatten(pull)
            pull_tree.append(treedef)
            return outputs, leaves

        traced = jax.make_jaxpr(linearise)(operands, activations)
        count, operand_count = len(activations), len(jax.tree.leaves(operands))
        program = flatten(traced)
        labels = dependence(
            program, [frozenset()] * operand_count + [frozenset({"microbatch"})] * count
        )
        values = jex.jaxpr_as_fun(traced)(*jax.tree.leaves(operands), *activations)
        saved = tuple(program.outputs[count:])
        return LinearisedChunk(
            outputs=values[:count],
            saved=dict(zip(saved, values[count:], strict=True)),
            order=saved,
            tree=pull_tree[-1],
            of_microbatch=tuple(dict.fromkeys(number for number in saved if labels[number])),
            input_count=sum(flags),
            sums=[] if self.sums is None else _summed_by_layers(self._differentiated(operands)),
        )


def _summed_by_layers(sums: ChunkGrads | None) -> Arrays:
    """The sums that layers add to: those of weights, and partial ones."""
    return [] if sums is None else [*sums.weights, *sums.partial_sums]


def _layer_results(
    pregathered: PregatheredWeights, values: Arrays, gathered: Arrays, walk: Walk
) -> Arrays:
    """Results of a layer, given its gathered operands."""
    env = {
        **pregathered.body.constants,
        **dict(zip(pregathered.body.inputs, values, strict=True)),
        **dict(zip(pregathered.operands, gathered, strict=True)),
    }
    evaluate_equations(pregathered.other_equations, env, walk)
    return [env[number] for number in pregathered.body.outputs]


# --------------------------------------------------------------------------------------------------
# Weights outside of the layers (embedding, head) that are gathered before the ticks and whose
# gradients are reduced after them: those of matmuls and lookups, if the plan also reduces gradients
# of layers once per step. See `PregatheredWeights`, which does the same for layers.


@dataclass(frozen=True, kw_only=True)
class OutsideGrads:
    """Operations outside of the layers whose weight gradients are reduced after all ticks.

    Attributes:
        uses: path of an operation -> its replacement.
        fully_deferred: values computed from parameters that nothing else reads.
    """

    mesh: Mesh | AbstractMesh
    uses: Mapping[str, DeferredOp]
    fully_deferred: frozenset[int]

    @staticmethod
    def of(layouts: LossLayouts, sections: SplitLoss, mesh: Mesh | AbstractMesh) -> OutsideGrads:
        """The operations outside of the layers whose gradients can be reduced after all ticks."""
        per_step = set(sections.per_step)
        equations = {equation.path: equation for equation in (*sections.before, *sections.after)}
        uses: dict[str, DeferredOp] = {}
        for path, use in layouts.uses.items():
            if (
                path in equations
                and use.equation.inputs[use.position] in per_step
                and (deferral := layouts.deferred(path, mesh, lookups=True)) is not None
            ):
                uses[path] = deferral
        others = (
            {
                number
                for path, equation in equations.items()
                if path not in uses
                for number in equation.inputs
            }
            | set(sections.entering)
            | set(sections.results)
        )
        return OutsideGrads(
            mesh=mesh,
            uses=uses,
            fully_deferred=frozenset(weight_operand(use) for use in uses.values()) - others,
        )

    def gathered(self, outside: Values) -> dict[str, Value]:
        """The pregathered operands, by path of the operation."""
        return {
            path: use.gather(outside[weight_operand(use)])
            for path, use in self.uses.items()
            if use.gathers
        }

    def zeros(self) -> Arrays:
        """Zeros for the partial sums, sharded so that each device has its own."""
        return zero_sums(self.uses, self.mesh)

    def walk(self, walk: Walk, gathered: Mapping[str, Value], sums: Sequence[Value]) -> Walk:
        """A walk whose operations use gathered operands and pass gradients to `sums`."""
        return with_partial_sums(self.uses, walk, sums, gathered)

    def reduce(self, sums: Sequence[Value]) -> Values:
        """Gradients of weight operands, from partial sums in the order of `uses`."""
        return by_operand(self.uses, sums, lambda gradient, total: gradient.astype(total.dtype))


@dataclass(frozen=True, kw_only=True)
class StageRemat:
    """Rematerialisation of the layers of the fullest stage.

    Attributes:
        count: number of layers that follow the policy; the others save all residuals.
        layers: number of layers of the stage, all chunks together.
        virtual: chunks of the stage.
        offloaded: whether saved values are offloaded to host memory.
        loops: path of a loop that is not divided over stages -> (policy, number of its layers
            that follow it).
    """

    policy: str
    count: int
    layers: int
    virtual: int
    offloaded: bool = False
    loops: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def of_every_chunk(self) -> LayerRemat:
        """The remat policy of every chunk, if all chunks are one program."""
        return self._layer_remat(math.ceil(self.count / self.virtual))

    def of_chunk(self, number: int, layers: int) -> LayerRemat:
        """The remat policy of one chunk that has its own program."""
        count = self.count // self.virtual + (number < self.count % self.virtual)
        missing_layers = self.layers // self.virtual - layers
        return self._layer_remat(max(0, count - missing_layers))

    def _layer_remat(self, count: int) -> LayerRemat:
        return LayerRemat(policy=self.policy, count=count, offloaded=self.offloaded)
