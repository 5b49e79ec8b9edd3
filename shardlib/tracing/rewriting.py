"""Traced programs evaluated again with a callback on every value: remat policies, split loops,
custom derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import linear_util, source_info_util
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding

from shardlib._jax_compat import scan_counts
from shardlib.annotation.trees import Tree
from shardlib.errors import TracingError
from shardlib.jax_types import Aval, EqnParam, EqnParams, Function, Index, Jaxpr, Value
from shardlib.tracing.program import (
    CUSTOM,
    REMAT,
    CustomCall,
    Equation,
    Program,
    find_repeats,
    flatten,
    has_matmul,
    result_path,
)

# --------------------------------------------------------------------------------------------------
# Data dependences of the values of a program.

#: Names of the inputs that a value depends on.
Labels = frozenset[str]


def dependence(program: Program, inputs: Sequence[Labels]) -> dict[int, Labels]:
    """The labels of every value, by number: the union of the labels of its operands.

    Results of a loop over layers are separate: a result computed from few operands of the body has
    only their labels. In inner programs other than scans, remat and custom derivatives each result
    depends on all operands. Constants have no labels.
    """
    labels: dict[int, Labels] = dict.fromkeys(program.constants, frozenset())
    labels.update(zip(program.inputs, inputs, strict=True))
    for equation in program.equations:
        labels.update(
            zip(
                equation.outputs,
                _results(equation, [labels[number] for number in equation.inputs]),
                strict=True,
            )
        )
    return labels


def needed(
    equations: Iterable[Equation], targets: Iterable[int], available: Collection[int] = ()
) -> tuple[list[Equation], set[int]]:
    """The equations that compute the targets from the available values, in order, and all values
    that these equations read or that are targets, except available ones.
    """
    reads, chosen = set(targets).difference(available), []
    for equation in reversed(list(equations)):
        if reads.intersection(equation.outputs):
            chosen.append(equation)
            reads.update(number for number in equation.inputs if number not in available)
    return chosen[::-1], reads


def _results(equation: Equation, operands: list[Labels]) -> list[Labels]:
    if equation.name == "scan":
        return _scan_labels(equation, operands)
    if equation.name in (*REMAT, *CUSTOM):
        inner = equation.inside()
        if len(inner.inputs) == len(operands):
            labels = dependence(inner, operands)
            return [labels[number] for number in inner.outputs]
    return [frozenset[str]().union(*operands)] * len(equation.outputs)


def _scan_labels(equation: Equation, operands: list[Labels]) -> list[Labels]:
    constants, carried = scan_counts(equation.params)
    body = equation.inside("body")
    while True:
        labels: Mapping[int, Labels] = dependence(body, operands)
        results = [labels[number] for number in body.outputs]
        grown = [
            before | after
            for before, after in zip(
                operands[constants : constants + carried], results, strict=False
            )
        ]
        if grown == operands[constants : constants + carried]:
            return results
        operands = [*operands[:constants], *grown, *operands[constants + carried :]]


# --------------------------------------------------------------------------------------------------
# Custom derivatives, one rule per mesh.
#
# JAX (0.10.2 and 0.12) caches the jaxpr of a derivative rule with the equation, keyed only by which
# tangents are zero. The equation of a jitted function such as `jax.nn.softplus` is one object for
# all programs of a process, and a rule traced under a mesh contains that mesh: a second program
# would get the mesh of the first. Here the flags that say which tangents are zero compare by mesh
# too, so that each mesh has its own rule.

#: The parameters of custom derivatives (`jax.custom_jvp`, `jax.custom_vjp`) that make a rule's
#: jaxpr from flags.
RULES: tuple[str, ...] = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk")


class Flag(int):
    """A flag that differs from all flags of other meshes."""

    mesh: Any

    def __new__(cls, value: Any, mesh: Any) -> Flag:
        flag = super().__new__(cls, bool(value))
        flag.mesh = mesh
        return flag

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flag) and int(self) == int(other) and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash((Flag, int(self), self.mesh))


def by_mesh(params: EqnParams) -> EqnParams:
    """The parameters of an equation, where rules of custom derivatives are cached per mesh."""
    return {name: _by_mesh(value) if name in RULES else value for name, value in params.items()}


def _by_mesh(rule: Any) -> Any:
    def by_flags(*flags: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        return rule.call_wrapped(*(Flag(flag, mesh) for flag in flags))

    return linear_util.wrap_init(by_flags, debug_info=rule.debug_info)


# --------------------------------------------------------------------------------------------------
# Evaluation of one equation.


def bind(equation: Equation, arguments: Sequence[Value], **changed: EqnParam) -> list[Value]:
    """Runs one equation, with some of its parameters changed."""
    primitive = equation.eqn.primitive
    try:
        results = primitive.bind(
            *arguments, **primitive.get_bind_params({**by_mesh(equation.params), **changed})
        )
    except Exception as error:
        location = f" in {equation.scope}" if equation.scope else ""
        raise TracingError(
            f"primitive {equation.name!r} at equation {equation.path}{location} cannot be evaluated"
            f" again: {error}\nTry: write the computation with other jax.lax operations, or keep it"
            " out of the loss"
        ) from error
    return list(results) if primitive.multiple_results else [results]


def typed(value: Value, aval: Aval) -> Value:
    """An initial carry as an array of the carry's dtype; literals are Python or NumPy scalars."""
    return (
        value
        if hasattr(value, "aval") or isinstance(value, jax.Array)
        else jnp.asarray(value, dtype=aval.dtype)
    )


def carried_avals(program: Program, first: int) -> list[Aval]:
    """Abstract values of the carries of a loop's body."""
    return [program.avals[number] for number in program.inputs[first:]]


def as_array(program: Program, number: int, value: Value) -> Value:
    """A value of a program as an array; a constant, such as a metric 3.0, can be a Python
    number.
    """
    return (
        value
        if isinstance(value, jax.Array) or number not in program.constants
        else jnp.asarray(value, program.avals[number].dtype)
    )


def scope_of(call: CustomCall | None) -> AbstractContextManager[object]:
    """The name scope of a custom call whose form has one; other scopes are dropped."""
    name = getattr(call.form, "scope", "") if call is not None else ""
    return jax.named_scope(name) if name else nullcontext()


def last_reads(program: Program) -> dict[int, int]:
    """Position of the last reader of every value; results of the program are read at the end."""
    last = {
        number: position
        for position, equation in enumerate(program.equations)
        for number in equation.inputs
    }
    return {**last, **dict.fromkeys(program.outputs, len(program.equations))}


# --------------------------------------------------------------------------------------------------
# Operands that some results depend on.


def results_wanted(equations: Sequence[Equation], results: Iterable[int]) -> list[set[int]]:
    """For every equation, its results that the given values depend on."""
    reads, needed_results = set(results), list[set[int]]()
    for equation in reversed(equations):
        needed = reads.intersection(equation.outputs)
        needed_results.append(needed)
        if needed:
            reads.update(_operands(equation, needed))
    return needed_results[::-1]


def _operands(equation: Equation, results: set[int]) -> set[int]:
    """The operands that some results of an equation depend on."""
    if equation.name != "scan":
        return set(equation.inputs)
    body, positions = equation.inside("body", remat=True), positions_of(equation, results)
    _, reads = closure(equation, body, positions)
    return {
        number for number, inner in zip(equation.inputs, body.inputs, strict=True) if inner in reads
    }


def closure(equation: Equation, body: Program, positions: set[int]) -> tuple[set[int], set[int]]:
    """The positions of results together with those of the carries they depend on, and all values of
    the body that these read.
    """
    constants, carried = scan_counts(equation.params)
    while True:
        reads = _reads(body, positions)
        grown = positions | {k for k in range(carried) if body.inputs[constants + k] in reads}
        if grown == positions:
            return positions, reads
        positions = grown


def _reads(program: Program, positions: Collection[int]) -> set[int]:
    """All values that some results of a program depend on, including themselves."""
    results = [program.outputs[k] for k in positions]
    reads = set(results)
    for equation, needed in zip(
        program.equations, results_wanted(program.equations, results), strict=True
    ):
        if needed:
            reads |= _operands(equation, needed)
    return reads


def positions_of(equation: Equation, numbers: set[int]) -> set[int]:
    """Positions of the results of an equation whose numbers are given."""
    return {k for k, number in enumerate(equation.outputs) if number in numbers}


# --------------------------------------------------------------------------------------------------
# The mark of layers that are traced for rematerialisation.
#
# A function that saves little for its backward pass may save more in such a layer: the values are
# in memory for the backward pass of that layer only.

_RECOMPUTES: ContextVar[bool] = ContextVar("shardlib_recomputes", default=False)


def recomputes() -> bool:
    """True while a function that is rematerialised for its backward pass is traced."""
    return _RECOMPUTES.get()


def recomputed(function: Function) -> Function:
    """A function inside which `recomputes()` is True."""

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        token = _RECOMPUTES.set(True)
        try:
            return function(*arguments)
        finally:
            _RECOMPUTES.reset(token)

    return run


# --------------------------------------------------------------------------------------------------
# Remat policies: the values that a layer saves for its backward pass; the others are recomputed.
#
#     "none"    all values that its gradient reads, as the layer is written
#     "full"    its inputs
#     "dots"    its inputs, and results of matmuls

#: Name of results of matmuls that are computed in several pieces.
SHARDED_MATMUL = "shardlib: a result of matmuls in shards"


_MATMULS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


_NAMED = jax.checkpoint_policies.save_only_these_names(SHARDED_MATMUL)


def results_of_matmuls(primitive: Primitive, *avals: Aval, **params: EqnParam) -> bool:
    """A policy of `jax.checkpoint` that saves results of matmuls; of those computed piecewise (in a
    region that is manual over tensor) only the assembled result.
    """
    return _NAMED(primitive, *avals, **params) or (
        _MATMULS(primitive, *avals, **params) and not any(map(_manual_over_tensor, avals))
    )


def _manual_over_tensor(aval: Any) -> bool:
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and any(
        name.partition("_")[0] == "tensor" and kind == AxisType.Manual
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )


#: Name of slices read from a stack by index in a loop: not saved, since the stack is still there.
STACK_SLICE = "shardlib: read from a stack"


#: Name of the input of a layer under a scan.
LAYER_INPUT = "layer_input"


#: Values saved for the backward pass, per remat policy; "none" leaves the program as written.
POLICIES: Mapping[str, Callable[..., Any] | None] = {"full": None, "dots": _MATMULS}


def check_policy(remat: str | None) -> str:
    """The validated name of a remat policy; "none" for None."""
    if remat is None or remat == "none" or remat in POLICIES:
        return remat or "none"
    raise TracingError(
        f"{remat!r} is not a remat policy\nTry: one of {', '.join(['none', *POLICIES])}"
    )


def rematerialised(
    function: Function,
    remat: str,
    *,
    prevent_cse: bool,
    in_pieces: bool = False,
    offloaded: bool = False,
) -> Function:
    """The function under a remat policy; unchanged for "none", unless saved values are offloaded.

    Args:
        function: arrays -> arrays.
    """
    if remat == "none" and not offloaded:
        return function
    if remat == "none":  # nothing is recomputed
        return jax.checkpoint(function, policy=_offloading(remat), prevent_cse=prevent_cse)
    policy = POLICIES.get(remat)
    saved = (
        _offloading(remat)
        if offloaded
        else results_of_matmuls
        if in_pieces and policy is _MATMULS
        else policy
    )
    return jax.checkpoint(recomputed(function), policy=saved, prevent_cse=prevent_cse)


def _offloading(remat: str) -> Callable[..., Any]:
    """A policy of `jax.checkpoint` that offloads to host memory the values that the named policy
    saves, and the input of a layer.
    """
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
    matmuls = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    if remat == "none":
        moved = matmuls(jax.lax.dot_general_p, dimension_numbers=(((), ()), ((), ())))
        return lambda primitive, *avals, **params: (
            moved if _saves(primitive, *avals, **params) else False
        )

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        return (matmuls if remat == "dots" and primitive.name == "dot_general" else named)(
            primitive, *avals, **params
        )

    return policy


# --------------------------------------------------------------------------------------------------
# A loop over layers split in two, of which only the first recomputes.
#
# The layers of a loop are slices of stacks. Splitting a stack would copy it, so both loops read
# their layers from the whole stack; the gradients of the slices are two stacks, concatenated after
# the backward pass, when the saved values of the layers have been freed.


@dataclass(frozen=True, kw_only=True)
class LayerRange:
    """A range of layers.

    Attributes:
        first, count: the first layer and the number of layers.
        wrap: layer -> the layer under its remat policy.
    """

    first: int
    count: int
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]


def saving_intermediates(body: Function) -> Function:
    """A layer that saves its intermediate values for the backward pass, but not the slices read
    from stacks.

    Of a value with a layout constraint, it saves the input of the constraint and applies the
    constraint again: JAX rounds saved values, and the rounded value has no layout of its own, so
    XLA's partitioner would take the layout of its only constrained reader, gathered for a matmul.
    """
    return jax.checkpoint(body, policy=_saves, prevent_cse=False)


_SAVEABLE = jax.checkpoint_policies.save_anything_except_these_names(STACK_SLICE)


def _saves(primitive: Any, *avals: Any, **params: Any) -> Any:
    """True if a layer without recomputation saves the result of an operation: not a slice read from
    a stack, nor the result of a layout constraint, whose input is saved
    (`saving_intermediates`).
    """
    return primitive.name != "sharding_constraint" and _SAVEABLE(primitive, *avals, **params)


def in_layer_ranges(
    parts: Sequence[LayerRange],
    body: Function,
    init: Tree,
    stacks: Tree,
    loop: Callable[[Function, Tree, Tree, int], tuple[Tree, Tree]],
    around: Callable[[Function], Function] = lambda layer: layer,
) -> Tree:
    """Runs all parts of a loop.

    Args:
        body: (carry, slices) -> (carry, results) of one layer.
        loop: (body, carry, slices, number of layers) -> (carry, stacked results).
        around: changes a layer that has its remat policy; `init` and `stacks` are those of the
            changed layer.
    """
    leaves, structure = jax.tree.flatten(stacks)
    fixed = [jax.lax.stop_gradient(leaf) if _differentiable(leaf) else None for leaf in leaves]
    carry, results = init, {}
    for part in parts:

        def layer(carry: Any, sliced: tuple[Any, list[Any]]) -> Any:
            number, slices = sliced
            read = [
                (
                    own_slice
                    if stack is None
                    else _with_gradient_of_slice(
                        own_slice, jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
                    )
                )
                for own_slice, stack in zip(slices, fixed, strict=True)
            ]
            return body(carry, structure.unflatten(read))

        def run_changed(
            carry: Any, numbered: tuple[Any, list[Any]], wrapped: Function
        ) -> tuple[Any, Any]:
            number, slices = numbered
            run = around(lambda carry, sliced: wrapped(carry, (number, jax.tree.leaves(sliced))))
            return run(carry, structure.unflatten(slices))

        part_slices = [
            jax.lax.slice_in_dim(leaf, part.first, part.first + part.count) for leaf in leaves
        ]
        carry, results[part.first] = loop(
            partial(run_changed, wrapped=part.wrap(layer)),
            carry,
            (jnp.arange(part.first, part.first + part.count), part_slices),
            part.count,
        )
    ordered = [results[first] for first in sorted(results)]
    return carry, jax.tree.map(lambda *stacked: jnp.concatenate(stacked), *ordered)


def _differentiable(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


@jax.custom_vjp
def _with_gradient_of_slice(own_slice: jax.Array, read: jax.Array) -> jax.Array:
    """The array read from the stack, with the gradient of the slice; the values of the slice are
    unused.
    """
    return checkpoint_name(read, STACK_SLICE)


_with_gradient_of_slice.defvjp(
    lambda values, read: (checkpoint_name(read, STACK_SLICE), None),
    lambda _, cotangent: (cotangent, jnp.zeros_like(cotangent)),
)


# --------------------------------------------------------------------------------------------------
# Sums of gradients over several runs of a loop over layers.
#
# The backward pass of a loop stacks the gradients of its layers, and all of them live until they
# are added to the sums of earlier runs. Here the loop carries the sums, as cotangents of arrays
# that it returns unchanged, and every layer adds its own gradients to its entry, in place.


def entry_of(stack: Value, index: Sequence[Index]) -> Value:
    """The entry of a stack, one index for each of its leading dims."""
    shape = stack.shape[len(index) :]
    start, size = (*index, *(0 for _ in shape)), (*(1 for _ in index), *shape)
    return jax.lax.dynamic_slice(stack, start, size).reshape(shape)


def with_entry(stack: Value, entry: Value, index: Sequence[Index]) -> Value:
    """A stack with one entry replaced."""
    start = (*index, *(0 for _ in entry.shape))
    return jax.lax.dynamic_update_slice(stack, entry[(None,) * len(index)], start)


def summing_gradient(
    leaf: Value,
    total: Value,
    index: tuple[Index, ...],
    active: Value | bool = True,
    sharding: NamedSharding | None = None,
) -> tuple[Value, Value]:
    """(leaf, total), where the cotangent of `total` is a stack of sums, to one entry of which that
    of `leaf` is added in place of being returned.

    Args:
        active: whether it is added.
        sharding: of the sums.
    """
    pair: Any = _leaf_and_total(leaf, total, index, active, sharding)
    return pair


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _leaf_and_total(
    leaf: Value, total: Value, index: Any, active: Any, _: NamedSharding | None
) -> tuple[Value, Value]:
    return leaf, total


def _summing_forward(
    leaf: Value, total: Value, index: Any, active: Any, _: Any
) -> tuple[tuple[Value, Value], tuple[Any, Value]]:
    return (leaf, total), (index, active)


def _summing_backward(
    sharding: NamedSharding | None, place: tuple[Any, Value], cotangents: tuple[Value, Value]
) -> tuple[Any, ...]:
    (index, active), (gradient, total) = place, cotangents
    more = jnp.where(active, gradient, 0).astype(total.dtype)
    total = with_entry(total, entry_of(total, index) + more, index)
    if sharding is not None:
        total = jax.lax.with_sharding_constraint(total, sharding)
    return None, total, None, None


_leaf_and_total.defvjp(_summing_forward, _summing_backward)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoopSums:
    """Sums of gradients that the loops of a program carry.

    Attributes:
        arrays: arrays [layers, ...] whose cotangents are the sums, by path of what a loop slices
            (`"12/enter/0"`), or of an operation in its body that takes an extra array.
        shardings: of the sums, by path.
        returned: the arrays as the loops return them, by path; filled by the evaluation.
    """

    arrays: Mapping[str, Value] = field(default_factory=dict)
    shardings: Mapping[str, NamedSharding] = field(default_factory=dict)
    returned: dict[str, Value] = field(default_factory=dict)

    def of_loop(self, path: str) -> dict[str, Value]:
        """The arrays of one loop."""
        return {key: array for key, array in self.arrays.items() if key.startswith(f"{path}/")}

    def around(self, path: str, layer: Callable[..., Any]) -> Callable[..., Any]:
        """A layer of the loop at a path that carries its arrays:
        ((carry, arrays), (slices, extra arrays, number)) -> ((carry, arrays), results).
        """

        def run(carry: tuple[Any, dict[str, Value]], sliced: tuple[Any, Any, Any]) -> Any:
            (carry, arrays), (slices, extra, number) = carry, sliced
            slices, extra, totals = list(slices), dict(extra), dict[str, Value]()
            for key, array in arrays.items():
                kind, _, position = key.removeprefix(f"{path}/").partition("/")
                entered = kind == "enter"
                leaf = slices[int(position)] if entered else jnp.zeros(array.shape[1:], array.dtype)
                leaf, totals[key] = summing_gradient(
                    leaf, array, (number,), True, self.shardings[key]
                )
                if entered:
                    slices[int(position)] = leaf
                else:
                    extra[key] = leaf
            carry, results = layer(carry, (tuple(slices), extra, number))
            return (carry, totals), results

        return run


# --------------------------------------------------------------------------------------------------
# Callbacks of a re-evaluation.
#
#     Walk(on_value=lambda path, index, value: constrain(value))   # every value, by (path, index)
#     Walk(run=lambda equation, operands: [...])                   # in place of an equation

#: (path of an op of the graph, index of its result, value) -> the value to continue with.
ValueCallback = Callable[[str, int, Any], Any]


#: (equation, its operands) -> its results, or None to run it unchanged.
EquationCallback = Callable[[Equation, Sequence[Any]], "list[Any] | None"]


@dataclass(frozen=True, kw_only=True)
class EquationGroup:
    """Equations that run as one, at the place of the first of them; their operands must not depend
    on any of them.

    Attributes:
        paths: their paths, in order.
        run: the operands of each -> the one result of each.
    """

    paths: tuple[str, ...]
    run: Callable[[Sequence[Sequence[Value]]], Sequence[Value]]

    def members(
        self, equations: Sequence[Equation], available: Collection[int]
    ) -> tuple[list[Equation], dict[str, Equation]]:
        """The equations themselves, and by path those that compute their other operands."""
        members = [equation for equation in equations if equation.path in self.paths]
        if len(members) < len(self.paths):
            raise TracingError(
                f"equations {', '.join(self.paths)} run as one and do not stand in one program"
            )
        makers = {number: equation for equation in equations for number in equation.outputs}
        early: dict[str, Equation] = {}
        waiting = [number for member in members for number in member.inputs]
        while waiting:
            number = waiting.pop()
            if number not in available and makers[number].path not in early:
                early[makers[number].path] = makers[number]
                waiting += makers[number].inputs
        return members, early


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Callbacks on the values of a program that is evaluated again.

    Attributes:
        on_value: called on every value that an op of the graph makes; None for no callback.
        run: called before every equation that is not a loop, branch or remat; its results replace
            the equation, None runs it unchanged.
        calls: replacements of custom calls, by path: operands -> results.
        groups: equations that run as one, by the path of each.
        extra: by path, (operands, array) -> result of an equation that takes an extra array.
        arrays: the extra arrays, by path, with a leading dim for every scan around the equation,
            the outermost first.
        sums: sums of gradients that loops outside of other loops and of rematerialised layers add
            to.
        remat: policy for repeated layers; "none" leaves the program as written.
        layer_policies: by path of a scan, or of the first equation of unrolled layers: the policy
            and the number of layers it applies to, from the first; the others save everything.
        offloaded: whether saved values of layers under a scan are offloaded to host memory.
        inside: whether the walk is inside a rematerialised layer, where the program's own remat is
            dropped.
    """

    on_value: ValueCallback | None = None
    run: EquationCallback | None = None
    calls: Mapping[str, Callable[..., Sequence[Value]]] = field(default_factory=dict)
    groups: Mapping[str, EquationGroup] = field(default_factory=dict)
    extra: Mapping[str, Callable[[Sequence[Value], Value], Value]] = field(default_factory=dict)
    arrays: Mapping[str, Value] = field(default_factory=dict)
    sums: LoopSums | None = None
    remat: str = "none"
    layer_policies: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    offloaded: bool = False
    inside: bool = False

    def policy(self, path: str, layers: int) -> tuple[str, int]:
        """The policy of the repeated layers at a path, and the number of layers it applies to."""
        policy, count = self.layer_policies.get(path, (self.remat, layers))
        return (policy, count) if count else ("none", layers)

    def apply(self, path: str, index: int, value: Value) -> Value:
        """The value after the `on_value` callback."""
        return value if self.on_value is None else self.on_value(path, index, value)

    def apply_to_results(self, equation: Equation, results: Sequence[Value]) -> Sequence[Value]:
        """The results of an equation after the `on_value` callback; loops, branches and remat
        excluded.
        """
        if self.on_value is None:
            return results
        paths = [
            result_path(equation, index) if equation.name in CUSTOM else (equation.path, index)
            for index in range(len(results))
        ]
        return [
            value if path is None else self.apply(*path, value)
            for path, value in zip(paths, results, strict=True)
        ]

    def layer(self) -> Walk:
        """The walk inside a layer that is rematerialised as a whole."""
        return replace(self, remat="none", layer_policies={}, offloaded=False, inside=True)

    def as_written(self) -> Walk:
        """The walk inside an inner loop of a layer."""
        return replace(self, remat="none", layer_policies={}, offloaded=False, inside=False)


# --------------------------------------------------------------------------------------------------
# Re-evaluation of a traced program.
#
# The lowering evaluates the user's loss again to place sharding constraints and to choose what is
# rematerialised. A value reaches `on_value` under the path that its op has in the `Graph`. Calls of
# jit are inlined; loops, branches and remat are rebuilt around their re-evaluated bodies; custom
# derivatives are kept whole, so that gradients are the user's own, and only their results reach
# `on_value`.


def evaluate(
    closed_jaxpr: Jaxpr,
    args: Sequence[Value],
    *,
    on_value: ValueCallback | None = None,
    run: EquationCallback | None = None,
    remat: str | None = None,
) -> list[Value]:
    """Evaluates a closed jaxpr with callbacks, see `Walk`."""
    return evaluate_program(
        flatten(closed_jaxpr), args, Walk(on_value=on_value, run=run, remat=check_policy(remat))
    )


def evaluate_program(program: Program, args: Sequence[Value], walk: Walk) -> list[Value]:
    """Evaluates a program with callbacks."""
    env: dict[int, Any] = dict(program.constants)
    env.update(zip(program.inputs, args, strict=True))
    runs = find_repeats(program) if walk.remat != "none" or walk.layer_policies else ()
    last = last_reads(program) if runs else {}
    start = 0
    for run in runs:
        policy, count = walk.policy(program.equations[run.start].path, run.count)
        evaluate_equations(program.equations[start : run.start], env, walk)
        for repetition in range(run.count):
            _block(
                program,
                run.start + repetition * run.period,
                run.period,
                last,
                env,
                replace(walk, remat=policy if repetition < count else "none"),
            )
        start = run.stop
    evaluate_equations(program.equations[start:], env, walk)
    return [env[number] for number in program.outputs]


def _block(
    program: Program,
    first: int,
    length: int,
    last: Mapping[int, int],
    env: dict[int, Any],
    walk: Walk,
) -> None:
    """Runs one repetition of an unrolled layer under the remat policy."""
    equations = program.equations[first : first + length]
    if walk.remat == "none":
        evaluate_equations(equations, env, replace(walk, layer_policies={}))
        return
    produced = {number for equation in equations for number in equation.outputs}
    read = sorted(
        {n for equation in equations for n in equation.inputs} - produced - program.constants.keys()
    )
    live_out = sorted(number for number in produced if last.get(number, -1) >= first + length)

    def block(*values: Any) -> list[Any]:
        inner = {**program.constants, **dict(zip(read, values, strict=True))}
        evaluate_equations(equations, inner, walk.layer())
        return [inner[number] for number in live_out]

    outputs = rematerialised(block, walk.remat, prevent_cse=True, in_pieces=bool(walk.groups))(
        *(env[number] for number in read)
    )
    env.update(zip(live_out, outputs, strict=True))


def evaluate_equations(equations: Sequence[Equation], env: dict[int, Value], walk: Walk) -> None:
    """Runs equations in order; reads values by number from `env` and adds the results to it."""
    done: CustomCall | None = None
    ready: set[str] = set()
    for position, equation in enumerate(equations):
        if equation.path in ready:
            continue
        if equation.path in walk.groups:
            ready |= _run_group(walk.groups[equation.path], equations[position:], env, walk)
            continue
        call = equation.call
        if call is not None and call.path in walk.calls:
            if call is not done:
                env.update(
                    zip(
                        call.outputs,
                        walk.calls[call.path](*(env[number] for number in call.inputs)),
                        strict=True,
                    )
                )
            done = call
            continue
        arguments = [env[number] for number in equation.inputs]
        with scope_of(call), _line_of(equation):
            results = _equation(equation, arguments, walk)
        env.update(zip(equation.outputs, results, strict=True))


@contextmanager
def _line_of(equation: Equation) -> Iterator[None]:
    """A context in which what is traced has the user's line of an equation, which compiled programs
    and profiles then name; of one within a function of JAX's, the line that calls that.
    """
    eqns = (equation.eqn, *equation.within)
    tracebacks = [t for eqn in eqns if (t := eqn.source_info.traceback) is not None]
    (folder,) = jax.__path__
    outside = (t for t in tracebacks if any(folder not in f.file_name for f in t.frames))
    context = source_info_util.user_context(next(outside, None))
    context.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)  # errors keep the causes that they have


def _run_group(
    group: EquationGroup, equations: Sequence[Equation], env: dict[int, Any], walk: Walk
) -> set[str]:
    """Runs a group as one, and first the equations that compute its other operands; returns the
    paths of all equations that ran.
    """
    members, early = group.members(equations, env)
    evaluate_equations([equation for equation in equations if equation.path in early], env, walk)
    results = group.run([[env[number] for number in member.inputs] for member in members])
    env.update(
        {
            member.outputs[0]: walk.apply(member.path, 0, value)
            for member, value in zip(members, results, strict=True)
        }
    )
    return {*group.paths, *early}


def _equation(equation: Equation, arguments: list[Any], walk: Walk) -> Sequence[Any]:
    if equation.name == "scan":
        return _scan(equation, arguments, walk)
    if equation.name == "while":
        return _while(equation, arguments, walk)
    if equation.name == "cond":
        return _cond(equation, arguments, walk)
    if equation.name in REMAT:
        return _remat(equation, arguments, walk)
    if equation.path in walk.arrays:
        results = [walk.extra[equation.path](arguments, walk.arrays[equation.path])]
    else:
        results = walk.run(equation, arguments) if walk.run is not None else None
    if results is None:
        results = bind(equation, arguments)
    return walk.apply_to_results(equation, results)


def _remat(equation: Equation, arguments: list[Any], walk: Walk) -> Sequence[Any]:
    program = equation.inside()
    if walk.inside:
        return evaluate_program(program, arguments, walk)
    body = walk.as_written()
    return jax.checkpoint(
        recomputed(lambda *values: evaluate_program(program, values, body)),
        policy=equation.params["policy"],
        prevent_cse=equation.params["prevent_cse"],
    )(*arguments)


def _scan(equation: Equation, arguments: list[Any], walk: Walk) -> Sequence[Any]:
    params, path = equation.params, equation.path
    constants, carried = scan_counts(params)
    program = equation.inside("body")
    repeated = has_matmul(equation.eqn)
    policy, count = walk.policy(path, params["length"]) if repeated else ("none", 0)
    layer, offloaded = policy != "none", walk.offloaded and repeated
    inner = walk.layer() if layer else walk.as_written()
    arrays = {
        array_path: array
        for array_path, array in walk.arrays.items()
        if array_path.startswith(f"{path}/body/")
    }

    def items(kind: str, values: Sequence[Any]) -> list[Any]:
        return [walk.apply(f"{path}/{kind}/{k}", 0, value) for k, value in enumerate(values)]

    def body(
        carry: tuple[Any, ...], sliced: tuple[tuple[Any, ...], dict[str, Any], Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        carry = (
            tuple(checkpoint_name(value, LAYER_INPUT) for value in carry) if offloaded else carry
        )
        values = [*arguments[:constants], *items("carry", carry), *items("enter", sliced[0])]
        outputs = evaluate_program(program, values, replace(inner, arrays=sliced[1], sums=None))
        return tuple(outputs[:carried]), tuple(outputs[carried:])

    def scan_layers(
        function: Callable[..., Any], carry: tuple[Any, ...], sliced: Any, length: int
    ) -> Any:
        return jax.lax.scan(
            function,
            carry,
            sliced,
            length=length,
            reverse=params["reverse"],
            unroll=params["unroll"],
        )

    options = {"in_pieces": bool(walk.groups), "offloaded": offloaded}
    wrap = partial(rematerialised, remat=policy, prevent_cse=False, **options)

    init: Any = tuple(
        typed(value, number)
        for value, number in zip(
            arguments[constants : constants + carried],
            carried_avals(program, constants),
            strict=False,
        )
    )
    carried_sums = walk.sums or LoopSums()
    sums = carried_sums.of_loop(path)
    init = (init, sums) if sums else init

    def around(layer: Function) -> Function:
        return carried_sums.around(path, layer) if sums else layer

    numbers = jnp.arange(params["length"]) if sums else None
    sliced = tuple(arguments[constants + carried :]), arrays, numbers
    if layer and count < params["length"]:
        wrap_others = partial(wrap, remat="none") if offloaded else saving_intermediates
        parts = [
            LayerRange(first=0, count=count, wrap=wrap),
            LayerRange(first=count, count=params["length"] - count, wrap=wrap_others),
        ]
        final, stacked = in_layer_ranges(
            parts[::-1] if params["reverse"] else parts, body, init, sliced, scan_layers, around
        )
    else:
        final, stacked = scan_layers(around(wrap(body)), init, sliced, params["length"])
    if sums:
        final, totals = final
        carried_sums.returned.update(totals)
    return [*items("final", final), *items("exit", stacked)]


def _while(equation: Equation, arguments: list[Any], walk: Walk) -> Sequence[Any]:
    params, path = equation.params, equation.path
    conds, constants = params["cond_nconsts"], params["body_nconsts"]
    test = equation.inside("cond")
    program = equation.inside("body")
    inner = walk.as_written()
    condition = replace(inner, on_value=None, run=None)

    def continues(state: tuple[Any, ...]) -> Any:
        return evaluate_program(test, [*arguments[:conds], *state], condition)[0]

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        carry = [walk.apply(f"{path}/carry/{k}", 0, value) for k, value in enumerate(state)]
        return tuple(
            evaluate_program(program, [*arguments[conds : conds + constants], *carry], inner)
        )

    init = tuple(
        typed(value, aval)
        for value, aval in zip(
            arguments[conds + constants :], carried_avals(program, constants), strict=True
        )
    )
    final = jax.lax.while_loop(continues, body, init)
    return [walk.apply(f"{path}/final/{k}", 0, value) for k, value in enumerate(final)]


def _cond(equation: Equation, arguments: list[Any], walk: Walk) -> Sequence[Any]:
    index, *operands = arguments
    inner = walk.as_written()
    programs = [
        flatten(branch, f"{equation.path}/branch{k}/", equation.scope)
        for k, branch in enumerate(equation.params["branches"])
    ]
    branches = [
        lambda *values, program=program: tuple(evaluate_program(program, values, inner))
        for program in programs
    ]
    results = jax.lax.switch(index, branches, *operands)
    return [walk.apply(f"{equation.path}/join/{k}", 0, value) for k, value in enumerate(results)]
