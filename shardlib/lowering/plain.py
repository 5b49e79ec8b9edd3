"""The runtime of plain JAX files that carry out a plan without shardlib."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

#: Names and sizes of the mesh axes.
MESH: Mapping[str, int] = {}
#: Device numbers in mesh order, of TPU devices by coordinates, of others in JAX's order; None for
#: 0, 1, 2, ...
DEVICE_ORDER: Sequence[int] | None = None
#: Kind of the mesh axes: "explicit" if the types of arguments and results have shardings, or
#: "auto".
MODE = "auto"
#: Options that the compiler is given.
COMPILER_OPTIONS: Mapping[str, Any] = {}


#: Positions in a row of `Layouts.parameters`: the shape, and the shardings of the stored parameter,
#: of its gradient, of its optimizer state and update.
SHAPE, STORED, GRADIENT, STATE = range(4)


class Layouts(NamedTuple):
    """Shardings of the arrays of a loss, or of a step around its losses.

    Attributes:
        parameters: path of a parameter -> its shape and shardings, at `SHAPE`, `STORED`,
            `GRADIENT` and `STATE`; of a step, path of an array of the state -> its shape and
            stored sharding.
        batch: path of an array of the batch -> its sharding.
        rows: path of an array of the batch -> its dim of rows; None for arrays without.
        microbatches: number of microbatches.
        leaves: for a loss that a step marks, whether each array belongs to its "params", its
            "frozen" params or its "batch", and its path there.
        gathered: parameters that are gathered before they are used -> their compute shardings.
        layers: slice of a scan -> the stacked parameter of which it is one layer.
        activations: value -> its shape and sharding.
        contractions: matmul, convolution or lookup -> the shardings of its operands and its result
            while it runs, whether to constrain the result, and the shardings of operands before
            they are gathered for it.
        cotangents: matmul -> the sharding in which its backward pass gets its result's cotangent.
        remat: remat policy of the layers: "none" saves all residuals, "dots" the results of
            matmuls, "full" nothing.
        blocks: unrolled layers: first operation, operations per layer, number of layers.
    """

    parameters: Mapping[str, Sequence[Any]] = {}
    batch: Mapping[str, P] = {}
    rows: Mapping[str, int | None] = {}
    microbatches: int = 1
    leaves: Sequence[tuple[str, str]] = ()
    gathered: Mapping[str, P] = {}
    layers: Mapping[str, str] = {}
    activations: Mapping[str, tuple[tuple[int, ...], P]] = {}
    contractions: Mapping[str, tuple[tuple[P, ...], P, bool, tuple[P | None, ...]]] = {}
    cotangents: Mapping[str, P] = {}
    remat: str = "none"
    blocks: Sequence[tuple[str, int, int]] = ()


#: Layouts of each loss, by its name: "loss" if it is the only one; "loss.0", "loss.1" and so on if
#: a step marks them.
LOSSES: Mapping[str, Layouts] = {}
#: Layouts of the step around the losses that it marks; empty if `make_step` makes it.
STEP = Layouts()
#: Function that removes from a loss the layouts that it was written with; None if it has none.
WITHOUT_LAYOUTS: Callable[[Any], Any] | None = None

_POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
_INLINED = ("jit", "pjit", "closed_call", "call", "core_call", "core_closed_call")
_CHECKPOINT = ("remat2", "remat", "checkpoint")
_MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of the plan, over the given devices or the first ones that JAX sees."""
    kind = AxisType.Explicit if MODE == "explicit" else AxisType.Auto
    available = list(jax.devices() if devices is None else devices)
    if hasattr(available[0], "coords"):
        available.sort(
            key=lambda device: (
                getattr(device, "slice_index", 0),
                *device.coords,
                device.core_on_chip,
            )
        )
    count = int(np.prod(list(MESH.values())))
    if len(available) < count:
        raise ValueError(f"the mesh {dict(MESH)} needs {count} devices, there are {len(available)}")
    order = range(count) if DEVICE_ORDER is None else DEVICE_ORDER
    grid = np.array([available[number] for number in order], dtype=object)
    return Mesh(grid.reshape(tuple(MESH.values())), tuple(MESH), axis_types=(kind,) * len(MESH))


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """The sharding of every stored parameter, as a tree like the parameters."""
    return _tree_shardings(params, LOSSES["loss"].parameters, "the parameters", mesh)


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """The sharding of every array of the state of a step, as a tree like the state."""
    return _tree_shardings(state, STEP.parameters, "the state", mesh)


def optimizer_shardings(opt_state: Any, mesh: Mesh) -> Any:
    """The sharding of every array of an optimizer's state: that of the parameter's state whose path
    is a suffix of its path and whose shape it has; replicated otherwise.
    """
    planned = LOSSES["loss"].parameters

    def sharding(path: str, leaf: Any) -> NamedSharding:
        keys = path.split(".")
        suffixes = (".".join(keys[start:]) for start in range(len(keys)))
        owner = next(
            (suffix for suffix in suffixes if planned.get(suffix, [None])[SHAPE] == leaf.shape),
            None,
        )
        return NamedSharding(mesh, P() if owner is None else planned[owner][STATE])

    return _by_path(opt_state, sharding)


def batch_shardings(batch: Any, mesh: Mesh) -> Any:
    """The sharding of every array of the batch, as a tree like it."""
    planned = (LOSSES.get("loss") or STEP).batch
    return _by_path(batch, lambda path, _: NamedSharding(mesh, planned[path]))


def init_optimizer(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """The optimizer's state before the first step, created sharded."""
    shardings = optimizer_shardings(_abstract_opt_state(optimizer, params), mesh)
    init = _with_automatic_axes(optimizer.init, mesh, shardings)
    return jax.jit(init, out_shardings=shardings)(params)


def make_step(
    loss: Callable[[Any, Any], Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
    mesh: Mesh,
) -> Any:
    """The training step, under `jax.jit`: (params, optimizer state, batch) -> (params, optimizer
    state, metrics); the first two are donated.

    Args:
        loss: (params, batch) -> scalar, or (scalar, dict of metrics).
    """
    layouts = LOSSES["loss"]
    opt_state = optimizer_shardings(_abstract_opt_state(optimizer, params), mesh)
    state = parameter_shardings(params, mesh), opt_state
    results = *state, NamedSharding(mesh, P())
    inner = _automatic_mesh(mesh)
    gradients = _gradients(
        lambda params, _, batch: loss(params, batch),
        (params, {}, _abstract_batch(batch, layouts)),
        layouts,
        inner,
    )
    constrain = partial(_constrain_tree, layouts=layouts, mesh=inner)

    def resharded(tree: Any, before: int, after: int) -> Any:
        return _by_path(
            tree,
            lambda path, leaf: (
                leaf
                if layouts.parameters[path][before] == layouts.parameters[path][after]
                else _constrain(leaf, layouts.parameters[path][after], inner)
            ),
        )

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        (value, metrics), grads = gradients(params, {}, batch)
        sharded = resharded(params, STORED, STATE)
        updates, opt_state = optax.with_extra_args_support(optimizer).update(
            grads, opt_state, sharded, value=value
        )
        new = optax.apply_updates(sharded, constrain(updates, STATE))
        return resharded(new, STATE, STORED), opt_state, {"loss": value, **metrics}

    return jax.jit(
        _with_automatic_axes(step, mesh, results),
        donate_argnums=(0, 1),
        in_shardings=(*state, batch_shardings(batch, mesh)),
        out_shardings=results,
        compiler_options=dict(COMPILER_OPTIONS),
    )


def shard_step(step: Callable[[Any, Any], Any], state: Any, batch: Any, mesh: Mesh) -> Any:
    """A step with the layouts of the plan, under `jax.jit`: (state, batch) -> its results; the
    state is donated.

    Args:
        step: (state, batch) -> (new state, metrics), or the new state alone. It marks its losses by
            `value_and_grad` of this file.
    """
    stored = state_shardings(state, mesh)
    program, out = _traced_step(step, state, batch)
    per_microbatch = program
    if any(loss.microbatches > 1 for loss in LOSSES.values()):
        per_microbatch, _ = _traced_step(step, state, _abstract_batch(batch, STEP))
    marked = {
        name: equation for name, equation in named(per_microbatch) if _is_marked(equation.eqn)
    }
    if marked.keys() != LOSSES.keys():
        raise ValueError(
            f"the step marks {', '.join(marked) or 'no loss'} by value_and_grad of this file; the"
            f" one that was planned marks {', '.join(LOSSES) or 'none'}"
        )
    shardings, inner = jax.tree.leaves(stored), _automatic_mesh(mesh)
    replicated = None if inner is mesh else NamedSharding(mesh, P())
    results = out.unflatten([*shardings, *[replicated] * (out.num_leaves - len(shardings))])
    losses = {
        name: _planned_loss(_MARKED_LOSSES[equation.eqn.params["name"]], LOSSES[name], inner)
        for name, equation in marked.items()
    }
    walk = _Walk(inner, names(program), STEP, "none", in_remat=False, losses=losses)
    walk.check(program)

    def planned_step(state: Any, batch: Any) -> Any:
        values = list(map(_array, walk.run(program, jax.tree.leaves((state, batch)))))
        new = [
            _constrain(value, sharding.spec, inner)
            for value, sharding in zip(values, shardings, strict=False)
        ]
        return out.unflatten([*new, *values[len(new) :]])

    return jax.jit(
        _with_automatic_axes(planned_step, mesh, results),
        donate_argnums=0,
        in_shardings=(stored, batch_shardings(batch, mesh)),
        out_shardings=results,
        compiler_options=dict(COMPILER_OPTIONS),
    )


def value_and_grad(
    loss: Callable[..., Any], argnums: Any = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`jax.value_and_grad` and `nnx.value_and_grad` for the losses of a step, in place of
    `shardlib.value_and_grad`.

    Args:
        loss: trees of arrays, or NNX modules -> scalar, or (scalar, tree of arrays).
        argnums: differentiated arguments: a position, an `nnx.DiffState`, or several of these.
        has_aux: whether the loss returns a pair.
    """
    several = isinstance(argnums, Sequence)

    def gradients(*args: Any, **kwargs: Any) -> Any:
        chosen = {
            getattr(argument, "argnum", argument) % len(args): getattr(argument, "filter", None)
            for argument in (argnums if several else (argnums,))
        }
        nnx = sys.modules.get("flax.nnx")
        has_modules = nnx is not None and _has_modules((args, kwargs), nnx)
        flat_loss = _nnx_loss if has_modules else _tree_loss
        flat, leaves, owners, finish = flat_loss(loss, args, kwargs, chosen, has_aux)
        trained = [owner is not None for owner in owners]
        value, aux, grads = _as_one_call(flat, leaves, trained)
        grad_owners = [owner for owner in owners if owner is not None]
        aux, trees = finish(
            aux,
            {
                position: [
                    g for owner, g in zip(grad_owners, grads, strict=True) if owner == position
                ]
                for position in chosen
            },
        )
        return (value, aux) if has_aux else value, tuple(trees) if several else trees[0]

    return gradients


def _has_modules(tree: Any, nnx: Any) -> bool:
    def is_module(node: Any) -> bool:
        return isinstance(node, nnx.Pytree)

    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _tree_loss(loss: Any, args: Any, kwargs: Any, chosen: Mapping[int, Any], has_aux: bool) -> Any:
    """A loss of trees as a function of its arrays: (arrays -> (value, auxiliary results), arrays,
    for each the argument whose gradient it belongs to, a function that assembles results and
    gradients).
    """
    all_leaves, structure = jax.tree.flatten((args, kwargs))
    counts = [len(jax.tree.leaves(argument)) for argument in args]
    owners = [
        index if index in chosen else None
        for index, count in enumerate(counts)
        for _ in range(count)
    ]
    owners += [None] * (len(all_leaves) - len(owners))
    arrays = (jax.Array, np.ndarray, np.generic)
    array_indices = [
        index
        for index, leaf in enumerate(all_leaves)
        if owners[index] is not None or isinstance(leaf, arrays)
    ]

    def flat(*leaves: Any) -> Any:
        values = dict(enumerate(all_leaves)) | dict(zip(array_indices, leaves, strict=True))
        args, kwargs = structure.unflatten(values.values())
        results = loss(*args, **kwargs)
        return results if has_aux else (results, None)

    def finish(aux: Any, grads: Mapping[int, Any]) -> Any:
        return aux, [
            jax.tree.unflatten(jax.tree.structure(args[position]), grads[position])
            for position in chosen
        ]

    return flat, [all_leaves[i] for i in array_indices], [owners[i] for i in array_indices], finish


def _nnx_loss(loss: Any, args: Any, kwargs: Any, chosen: Mapping[int, Any], has_aux: bool) -> Any:
    """`_tree_loss` for a loss of NNX modules, whose mutations are kept."""
    nnx = sys.modules["flax.nnx"]
    objects = list(args), dict(kwargs)
    kinds = {position: nnx.Param if kind is None else kind for position, kind in chosen.items()}
    graph, state = nnx.split(objects)
    leaves, structure = jax.tree.flatten(state)

    def owner(path: Any, variable: Any) -> int | None:
        place, position, *inner_path = path
        is_chosen = place == 0 and position in kinds
        return (
            position
            if is_chosen and nnx.filterlib.to_predicate(kinds[position])(inner_path, variable)
            else None
        )

    owners = [
        owner(path, variable)
        for path, variable in nnx.to_flat_state(state)
        for _ in jax.tree.leaves(variable)
    ]

    def flat(*leaves: Any) -> Any:
        positional, named = nnx.merge(graph, structure.unflatten(leaves))
        results = loss(*positional, **named)
        value, aux = results if has_aux else (results, None)
        after = jax.tree.leaves(nnx.split((positional, named))[1])
        pairs = enumerate(zip(leaves, after, strict=True))
        return value, (aux, {index: new for index, (old, new) in pairs if new is not old})

    def finish(results: Any, grads: Mapping[int, Any]) -> Any:
        aux, changed = results
        if changed:
            nnx.update(objects, structure.unflatten((dict(enumerate(leaves)) | changed).values()))
        states = {position: nnx.state(args[position], kind) for position, kind in kinds.items()}
        return aux, [
            jax.tree.unflatten(jax.tree.structure(states[position]), grads[position])
            for position in kinds
        ]

    return flat, leaves, owners, finish


class _MarkedLoss(NamedTuple):
    """A loss that a step marks: its jaxpr over all that it reads, and which inputs it is
    differentiated by.
    """

    closed: Any
    trained: Sequence[bool]


#: The losses of all traced steps, by the names of their calls.
_MARKED_LOSSES: dict[str, _MarkedLoss] = {}
#: Prefix of these names, here and in the traces of shardlib.
_MARK_PREFIXES = ("sharded_loss_", "shardlib_markedloss_")


def _as_one_call(flat: Any, leaves: Sequence[Any], trained: Sequence[bool]) -> tuple[Any, Any, Any]:
    """(value, auxiliary results, gradients) from a call that stays one operation of the step."""
    closed, (_, aux) = jax.make_jaxpr(flat, return_shape=True)(*map(_aval, leaves))
    captured = [constant for constant in closed.consts if isinstance(constant, Tracer)]

    def with_captured(*values: Any) -> Any:
        tracers = iter(values[len(leaves) :])
        constants = [
            next(tracers) if isinstance(const, Tracer) else const for const in closed.consts
        ]
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, constants))(*values[: len(leaves)])

    marked = _MarkedLoss(
        jax.make_jaxpr(with_captured)(*map(_aval, (*leaves, *captured))),
        (*trained, *[False] * len(captured)),
    )

    def call(*values: Any) -> Any:
        differentiated = [index for index, flag in enumerate(marked.trained) if flag]

        def loss(trained: Any) -> Any:
            arguments = dict(enumerate(values)) | dict(zip(differentiated, trained, strict=True))
            value, *aux = jaxpr_as_fun(marked.closed)(*arguments.values())
            return value, aux

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(
            [values[index] for index in differentiated]
        )
        return [value, *aux, *grads]

    call.__name__ = call.__qualname__ = f"{_MARK_PREFIXES[0]}{len(_MARKED_LOSSES)}"
    _MARKED_LOSSES[call.__name__] = marked
    value, *outputs = jax.jit(call)(*leaves, *captured)
    structure = jax.tree.structure(aux)
    count = structure.num_leaves
    return value, structure.unflatten(outputs[:count]), outputs[count:]


def _traced_step(step: Any, state: Any, batch: Any) -> tuple[Program, Any]:
    """A step as a program, and the tree structure of its results."""
    step = step if WITHOUT_LAYOUTS is None else WITHOUT_LAYOUTS(step)
    with _no_mesh():
        closed, out = jax.make_jaxpr(step, return_shape=True)(_abstract(state), _abstract(batch))
    return flatten(closed), jax.tree.structure(out)


def _planned_loss(marked: _MarkedLoss, layouts: Layouts, mesh: Any) -> Callable[..., list[Any]]:
    """The computation of a marked loss under the plan: arrays -> value, auxiliary results,
    gradients.
    """
    trained = [kind == "params" for kind, _ in layouts.leaves]
    if trained != list(marked.trained):
        raise ValueError(
            f"a loss of the step has {len(marked.trained)} arrays, and gradients of"
            f" {sum(marked.trained)}; the one that was planned has {len(trained)} and"
            f" {sum(trained)}. Mark it by value_and_grad of this file, as it was marked by that of"
            " shardlib."
        )

    def arguments(values: Sequence[Any]) -> tuple[Any, Any, Any]:
        trees: dict[str, dict[str, Any]] = {"params": {}, "frozen": {}, "batch": {}}
        leaves = values[-len(layouts.leaves) :]
        for (kind, path), value in zip(layouts.leaves, leaves, strict=True):
            trees[kind][path] = value
        return trees["params"], trees["frozen"], trees["batch"]

    def loss(params: Any, frozen: Any, batch: Any) -> Any:
        trees = {"params": params, "frozen": frozen, "batch": batch}
        leaves = [trees[kind][path] for kind, path in layouts.leaves]
        value, *aux = jaxpr_as_fun(marked.closed)(*leaves)
        return value, dict(enumerate(aux))

    gradients = _gradients(loss, arguments(marked.closed.in_avals), layouts, mesh)

    def run(*values: Any) -> list[Any]:
        (value, aux), grads = gradients(*arguments(values))
        results = zip((value, *aux.values()), marked.closed.out_avals, strict=True)
        return [
            *(result.astype(aval.dtype) for result, aval in results),
            *(grads[path] for kind, path in layouts.leaves if kind == "params"),
        ]

    return run


def _gradients(loss: Any, abstract: tuple[Any, Any, Any], layouts: Layouts, mesh: Any) -> Any:
    """(params, frozen params, batch) -> ((value, metrics), gradients) with the layouts of the plan;
    the loss is traced for `abstract` arguments.
    """
    differentiate = jax.value_and_grad(_with_layouts(loss, abstract, layouts, mesh), has_aux=True)
    constrain = partial(_constrain_tree, layouts=layouts, mesh=mesh)

    def zeros(leaf: Any) -> Any:
        return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))

    def gradients(params: Any, frozen: Any, batch: Any) -> Any:
        if layouts.microbatches == 1:
            results, grads = differentiate(params, frozen, batch)
            return results, constrain(grads, GRADIENT)

        def body(sums: Any, rows: Any) -> Any:
            results, grads = differentiate(params, frozen, _microbatch_batch(batch, rows, layouts))
            sums = jax.tree.map(jnp.add, sums, constrain(grads, GRADIENT))
            return constrain(sums, GRADIENT), results

        start = constrain(jax.tree.map(zeros, params), GRADIENT)
        sums, results = jax.lax.scan(body, start, _stacked_microbatches(batch, layouts, mesh))
        mean = jax.tree.map(lambda values: values.mean(0), results)
        grads = jax.tree.map(
            lambda total, leaf: (total / layouts.microbatches).astype(leaf.dtype), sums, params
        )
        return mean, constrain(grads, GRADIENT)

    return gradients


def _automatic_mesh(mesh: Mesh) -> Any:
    """The mesh that a step computes on: that of the plan, with automatic axes."""
    abstract = mesh.abstract_mesh
    automatic = abstract.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    return mesh if abstract == automatic else automatic


def _with_automatic_axes(function: Any, mesh: Mesh, results: Any) -> Any:
    """A function evaluated with automatic axes; with explicit ones outside, its results are
    typed.
    """
    if _automatic_mesh(mesh) is mesh:
        return function
    return jax.sharding.auto_axes(function, axes=mesh.axis_names, out_sharding=results)


def _abstract_opt_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """The optimizer's state before the first step, abstract."""
    with _no_mesh():
        return jax.eval_shape(optimizer.init, _abstract(params))


def _no_mesh() -> Any:
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _aval(leaf: Any) -> Any:
    """The abstract array."""
    return jax.eval_shape(lambda leaf: leaf, leaf)


def _abstract(tree: Any) -> Any:
    """Abstract arrays, without shardings."""

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        array = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        typed_key = jnp.issubdtype(array.dtype, jax.dtypes.extended)
        dtype = array.dtype if typed_key else jax.dtypes.canonicalize_dtype(array.dtype)
        return jax.ShapeDtypeStruct(array.shape, dtype)

    return jax.tree.map(abstract, tree)


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _constrain_tree(tree: Any, column: int, layouts: Layouts, mesh: Any) -> Any:
    """Constrains a tree of parameters, or of arrays like them, to their shardings.

    Args:
        column: `STORED`, `GRADIENT` or `STATE`.
    """
    return _by_path(
        tree, lambda path, leaf: _constrain(leaf, layouts.parameters[path][column], mesh)
    )


def _with_layouts(
    loss: Any, abstract: tuple[Any, Any, Any], layouts: Layouts, mesh: Any
) -> Callable[[Any, Any, Any], Any]:
    """(params, frozen params, batch) -> (scalar, metrics), with the layouts of the plan."""

    def with_metrics(*arguments: Any) -> Any:
        results = loss(*arguments)
        return results if isinstance(results, tuple) else (results, {})

    traced = with_metrics if WITHOUT_LAYOUTS is None else WITHOUT_LAYOUTS(with_metrics)
    with _no_mesh():
        closed, out = jax.make_jaxpr(traced, return_shape=True)(*_abstract(abstract))
    program = flatten(closed)
    walk = _Walk(mesh, names(program), layouts, layouts.remat, in_remat=False)
    walk.check(program)

    def in_layouts(params: Any, frozen: Any, batch: Any) -> Any:
        leaves = [
            leaf if path in layouts.layers.values() else walk.parameter(path, leaf, 0)
            for path, leaf in (*paths(params), *paths(frozen))
        ]
        results = walk.run(program, [*leaves, *jax.tree.leaves(batch)], layouts.blocks)
        return jax.tree.unflatten(jax.tree.structure(out), map(_array, results))

    return in_layouts


class Equation(NamedTuple):
    """An operation of the traced loss: its path, and the numbers of the values that it reads and
    makes.
    """

    path: str
    eqn: Any
    inputs: list[int]
    outputs: list[int]


class Program(NamedTuple):
    """A jaxpr with the calls of jit inlined and its values numbered."""

    equations: list[Equation]
    constants: dict[int, Any]
    inputs: list[int]
    outputs: list[int]


def flatten(jaxpr: Any, prefix: str = "") -> Program:
    """Inlines the calls of jit of a jaxpr, closed or not."""
    constants: dict[int, Any] = {}
    equations: list[Equation] = []
    number = itertools.count()

    def constant(value: Any) -> int:
        index = next(number)
        constants[index] = value
        return index

    def walk(jaxpr: Any, arguments: Sequence[int], prefix: str) -> list[int]:
        inner, values = (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())
        env = dict(zip(inner.invars, arguments, strict=True))
        env.update(zip(inner.constvars, map(constant, values), strict=True))

        def read(atom: Any) -> int:
            return constant(atom.val) if isinstance(atom, Literal) else env[atom]

        for index, eqn in enumerate(inner.eqns):
            inputs = list(map(read, eqn.invars))
            if str(eqn.params.get("name", "")).startswith("shardlib-layout-"):
                outputs = inputs  # the marker of a removed layout
            elif eqn.primitive.name in _INLINED and not _is_marked(eqn):
                outputs = walk(_callee(eqn), inputs, f"{prefix}{index}/")
            else:
                outputs = [next(number) for _ in eqn.outvars]
                equations.append(Equation(f"{prefix}{index}", eqn, inputs, outputs))
            env.update(zip(eqn.outvars, outputs, strict=True))
        return list(map(read, inner.outvars))

    arguments = [next(number) for _ in getattr(jaxpr, "jaxpr", jaxpr).invars]
    return Program(equations, constants, arguments, walk(jaxpr, arguments, prefix))


def names(program: Program) -> dict[str, str]:
    """Path of every operation -> its name: the primitive, and the number of these before it. Layers
    under a scan and under rematerialisation are counted at the position of their loop.
    """
    return {equation.path: name for name, equation in named(program)}


def named(program: Program) -> Iterator[tuple[str, Equation]]:
    """(name, operation) of every operation, see `names`."""
    counts: Counter[str] = Counter()

    def walk(program: Program) -> Iterator[tuple[str, Equation]]:
        for equation in program.equations:
            name = "loss" if _is_marked(equation.eqn) else equation.eqn.primitive.name
            yield f"{name}.{counts[name]}", equation
            counts[name] += 1
            if name == "scan":
                yield from walk(flatten(equation.eqn.params["jaxpr"], f"{equation.path}/body/"))
            elif name in _CHECKPOINT:
                yield from walk(flatten(_callee(equation.eqn), f"{equation.path}/"))

    return walk(program)


def _is_marked(eqn: Any) -> bool:
    return str(eqn.params.get("name", "")).startswith(_MARK_PREFIXES)


class _Walk:
    """Evaluation of a traced loss or step with sharding constraints on the values that have a
    layout in the plan.

    Attributes:
        names: path of every operation -> its name in the tables.
        remat: remat policy of the layers.
        in_remat: whether the operations are inside of a rematerialised layer.
        losses: name of a marked loss -> (its arrays) -> value, auxiliary results, gradients.
    """

    def __init__(
        self,
        mesh: Any,
        names: Mapping[str, str],
        layouts: Layouts,
        remat: str,
        *,
        in_remat: bool,
        losses: Mapping[str, Callable[..., list[Any]]] | None = None,
    ) -> None:
        self.mesh, self.names, self.layouts, self.losses = mesh, names, layouts, losses or {}
        self.remat, self.in_remat = remat, in_remat

    def _inner(self, *, in_remat: bool) -> _Walk:
        """The walk through a layer."""
        return _Walk(
            self.mesh, self.names, self.layouts, "none", in_remat=in_remat, losses=self.losses
        )

    def check(self, program: Program) -> None:
        """Raises if the loss is not the planned one."""
        traced_names, layouts = set(self.names.values()), self.layouts
        planned = [
            name.partition(" ")[0]
            for name in (*layouts.activations, *layouts.contractions, *layouts.layers)
        ]
        missing = dict.fromkeys(name for name in planned if name not in traced_names)
        if missing:
            raise ValueError(
                f"the loss has no {', '.join(missing)}: it is not the one that was planned, or JAX"
                f" {jax.__version__} traces it differently. Write this file again with shardlib."
            )

    def run(
        self, program: Program, values: Sequence[Any], blocks: Sequence[tuple[str, int, int]] = ()
    ) -> list[Any]:
        """The results of a program.

        Args:
            blocks: see `Layouts`.
        """
        env = dict(program.constants)
        env.update(zip(program.inputs, values, strict=True))
        start = 0
        positions = {self.names[equation.path]: i for i, equation in enumerate(program.equations)}
        for first, length, count in blocks if self.remat != "none" else ():
            self._equations(program.equations[start : positions[first]], env)
            start = positions[first]
            for _ in range(count):
                self._layer(program, start, length, env)
                start += length
        self._equations(program.equations[start:], env)
        return [env[number] for number in program.outputs]

    def _layer(self, program: Program, first: int, length: int, env: dict[int, Any]) -> None:
        """One unrolled layer, under the remat policy."""
        equations = program.equations[first : first + length]
        produced = {number for equation in equations for number in equation.outputs}
        read = sorted(
            {n for equation in equations for n in equation.inputs}
            - produced
            - set(program.constants)
        )
        after = {n for equation in program.equations[first + length :] for n in equation.inputs}
        results = sorted(produced & (after | set(program.outputs)))
        inner = self._inner(in_remat=True)

        def layer(*values: Any) -> list[Any]:
            local = {**program.constants, **dict(zip(read, values, strict=True))}
            inner._equations(equations, local)
            return [local[number] for number in results]

        run = jax.checkpoint(layer, policy=_POLICIES[self.remat])
        env.update(zip(results, run(*(env[n] for n in read)), strict=True))

    def _equations(self, equations: Sequence[Equation], env: dict[int, Any]) -> None:
        for equation in equations:
            results = self._equation(equation, [env[number] for number in equation.inputs])
            env.update(zip(equation.outputs, results, strict=True))

    def _equation(self, equation: Equation, values: list[Any]) -> Sequence[Any]:
        eqn, path = equation.eqn, equation.path
        if eqn.primitive.name == "scan":
            return self._scan(equation, values)
        if eqn.primitive.name in _CHECKPOINT:
            program = flatten(_callee(eqn), f"{path}/")
            if self.in_remat:
                return self.run(program, values)
            inner = self._inner(in_remat=False)
            return jax.checkpoint(
                lambda *values: inner.run(program, values),
                policy=eqn.params["policy"],
                prevent_cse=eqn.params["prevent_cse"],
            )(*values)
        name = self.names.get(path, "")
        if name in self.losses:
            return self.losses[name](*values)
        results = (
            [self._contraction(eqn, name, values)]
            if name in self.layouts.contractions
            else _bind(eqn, values)
        )
        keys = [f"{name} {k}" if k else name for k in range(len(results))]
        return list(map(self._in_layout, keys, results))

    def _in_layout(self, name: str, value: Any) -> Any:
        """A value, constrained to its layout in the plan if it has one."""
        if name not in self.layouts.activations:
            return value
        shape, spec = self.layouts.activations[name]
        if shape != jnp.shape(value):
            raise ValueError(
                f"{name} has shape {jnp.shape(value)} here and {shape} in the plan: the loss or the"
                " batch has changed. Write this file again with shardlib."
            )
        value = _constrain(value, spec, self.mesh)
        cotangent = self.layouts.cotangents.get(name)
        return value if cotangent is None else _with_cotangent(value, cotangent, self.mesh)

    def parameter(self, path: str, leaf: Any, dim: int) -> Any:
        """A parameter, gathered if the plan gathers it before its use; its gradient gets its own
        sharding.

        Args:
            dim: the first dim of the parameter that `leaf` has: 1 for one layer of a stack.
        """
        gradient = P(*self.layouts.parameters[path][GRADIENT][dim:])
        leaf, gathered = _with_cotangent(leaf, gradient, self.mesh), self.layouts.gathered.get(path)
        return leaf if gathered is None else _constrain(leaf, P(*gathered[dim:]), self.mesh)

    def _contraction(self, eqn: Any, name: str, values: list[Any]) -> Any:
        """A contraction in the layouts of the plan, forward and backward; operands are saved before
        they are gathered, so that the backward pass gathers a weight again.
        """
        operands, result, constrain_result, ungathered = self.layouts.contractions[name]
        avals = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]

        def in_layout(position: int, value: Any) -> Any:
            return _constrain(value, operands[position], self.mesh)

        def forward(*values: Any) -> Any:
            product = _bind(eqn, [in_layout(i, value) for i, value in enumerate(values)])[0]
            return _constrain(product, result, self.mesh) if constrain_result else product

        if not all(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals):
            return forward(*values)

        def gradient(position: int, values: Sequence[Any], cotangent: Any) -> Any:
            aval = avals[position]
            before = ungathered[position] if position < len(ungathered) else None
            wide = before is not None and cotangent.dtype.itemsize > aval.dtype.itemsize
            operand_aval = jax.ShapeDtypeStruct(aval.shape, cotangent.dtype if wide else aval.dtype)

            def linear(value: Any) -> Any:
                operands = [
                    value if index == position else operand for index, operand in enumerate(values)
                ]
                return _bind(eqn, operands)[0]

            grad = in_layout(position, jax.linear_transpose(linear, operand_aval)(cotangent)[0])
            if wide and before is not None:  # it is reduced in the wider dtype
                grad = _constrain(grad, before, self.mesh)
            return grad.astype(aval.dtype)

        def backward(saved: Sequence[Any], cotangent: Any) -> Any:
            gathered = [in_layout(position, value) for position, value in enumerate(saved)]
            cotangent = _constrain(cotangent, result, self.mesh)
            return tuple(gradient(i, gathered, cotangent) for i in range(len(gathered)))

        contraction = jax.custom_vjp(forward)
        contraction.defvjp(lambda *values: (forward(*values), values), backward)
        return contraction(*values)

    def _scan(self, equation: Equation, values: list[Any]) -> Sequence[Any]:
        eqn, path, name = equation.eqn, equation.path, self.names.get(equation.path, "")
        params = eqn.params
        constants, carried = _scan_counts(params)
        program = flatten(params["jaxpr"], f"{path}/body/")
        remat = self.remat if _has_matmul(eqn) else "none"
        inner = self._inner(in_remat=remat != "none")

        def body(carry: Any, sliced: Any) -> Any:
            carry_in = [self._in_layout(f"{name} carry {k}", leaf) for k, leaf in enumerate(carry)]
            layer = [self._layer_input(f"{name} enter {k}", leaf) for k, leaf in enumerate(sliced)]
            results = inner.run(program, [*values[:constants], *carry_in, *layer])
            return tuple(results[:carried]), tuple(results[carried:])

        if remat != "none":
            body = jax.checkpoint(body, policy=_POLICIES[remat], prevent_cse=False)
        avals = [var.aval for var in getattr(params["jaxpr"], "jaxpr", params["jaxpr"]).invars]
        first = tuple(
            leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf, aval.dtype)
            for leaf, aval in zip(
                values[constants : constants + carried], avals[constants:], strict=False
            )
        )
        final, stacked = jax.lax.scan(
            body,
            first,
            tuple(values[constants + carried :]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [
            *(self._in_layout(f"{name} final {k}", leaf) for k, leaf in enumerate(final)),
            *(self._in_layout(f"{name} exit {k}", leaf) for k, leaf in enumerate(stacked)),
        ]

    def _layer_input(self, name: str, value: Any) -> Any:
        return (
            self.parameter(self.layouts.layers[name], value, 1)
            if name in self.layouts.layers
            else self._in_layout(name, value)
        )


def _with_cotangent(value: Any, spec: P, mesh: Any) -> Any:
    """The same value, with a sharding for its cotangent."""

    @jax.custom_vjp
    def identity(value: Any) -> Any:
        return value

    identity.defvjp(
        lambda value: (value, None), lambda _, cotangent: (_constrain(cotangent, spec, mesh),)
    )
    return identity(value)


def _constrain(value: Any, spec: P, mesh: Mesh) -> Any:
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def _bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _callee(eqn: Any) -> Any:
    keys = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
    return next(eqn.params[key] for key in keys if key in eqn.params)


def _scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Number of constants and carries of a scan: integers in JAX 0.10, a structure in 0.12."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def _has_matmul(eqn: Any) -> bool:
    if eqn.primitive.name in _MATMULS:
        return True
    inner = [
        getattr(param, "jaxpr", param)
        for value in eqn.params.values()
        for param in (value if isinstance(value, tuple | list) else [value])
        if hasattr(param, "eqns") or hasattr(param, "jaxpr")
    ]
    return any(_has_matmul(equation) for jaxpr in inner for equation in getattr(jaxpr, "eqns", ()))


def paths(tree: Any) -> list[tuple[str, Any]]:
    """Dotted path and array of every leaf; the variables of NNX are their arrays."""

    def key(entry: Any) -> str:
        return str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))))

    def is_variable(path: Sequence[Any]) -> bool:
        """True if a path ends with the array of an NNX variable."""
        return bool(path) and str(path[-1]) in (".value", ".raw_value")

    return [
        (".".join(map(key, path[:-1] if is_variable(path) else path)), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _by_path(tree: Any, function: Callable[[str, Any], Any]) -> Any:
    """The tree of the results of a function of (path, array)."""
    leaves = [function(path, leaf) for path, leaf in paths(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _tree_shardings(tree: Any, planned: Mapping[str, Sequence[Any]], what: str, mesh: Mesh) -> Any:
    """The stored shardings of a tree of arrays."""
    shapes = {path: tuple(np.shape(leaf)) for path, leaf in paths(tree)}
    wrong = [
        f"{path} is {shapes.get(path, 'missing')} here,"
        f" {planned[path][SHAPE] if path in planned else 'missing'} in the plan"
        for path in sorted({*shapes, *planned})
        if path not in planned or shapes.get(path) != planned[path][SHAPE]
    ]
    if wrong:
        raise ValueError(f"these are not {what} that were planned: {'; '.join(wrong)}")
    return _by_path(tree, lambda path, _: NamedSharding(mesh, planned[path][STORED]))


def _abstract_batch(batch: Any, layouts: Layouts) -> Any:
    """The batch of one microbatch, abstract."""

    def microbatch(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        shape, dim = list(leaf.shape), layouts.rows[path]
        if dim is not None:
            shape[dim] //= layouts.microbatches
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return _by_path(batch, microbatch)


def _stacked_microbatches(batch: Any, layouts: Layouts, mesh: Any) -> list[Any]:
    """The microbatches, stacked: each device takes each microbatch from its own rows."""
    stacked: list[Any] = []
    for path, leaf in paths(batch):
        dim, count = layouts.rows[path], layouts.microbatches
        if dim is None:
            continue
        split = leaf.reshape(*leaf.shape[:dim], -1, count, *leaf.shape[dim + 1 :])
        spec = P(None, *layouts.batch[path])
        stacked.append(_constrain(jnp.moveaxis(split, dim + 1, 0), spec, mesh))
    return stacked


def _microbatch_batch(batch: Any, rows: Sequence[Any], layouts: Layouts) -> Any:
    """The batch of one microbatch, from slices of `_stacked_microbatches`."""
    remaining = iter(rows)
    return _by_path(
        batch, lambda path, leaf: leaf if layouts.rows[path] is None else next(remaining)
    )
