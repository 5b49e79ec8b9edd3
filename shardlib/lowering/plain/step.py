"""A training step in plain JAX: what the files that `Plan.emit("jax")` writes have beside their
tables, `LOSSES` and `STEP`. Imports nothing of shardlib.
"""

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
#: Numbers of the devices in mesh order, TPU devices by coordinates, others in JAX's order; None for
#: 0, 1, 2, ...
DEVICE_ORDER: Sequence[int] | None = None
#: Of mesh axes: "explicit" for shardings in the types of all arrays that go in and come out, "auto"
#: for none.
MODE = "auto"


class Layouts(NamedTuple):
    """How the arrays of a loss, or of a step around its losses, are sharded.

    Attributes:
        parameters: path of a parameter -> its shape, and how it is sharded: stored, its gradient,
            its optimizer state and update; of a step, path of an array of the state -> its shape,
            and how it is stored.
        batch: path of an array of the batch -> how it is sharded.
        rows: path of an array of the batch -> dim of its rows; None for arrays without.
        microbatches: in how many the rows are computed.
        leaves: of a loss that a step marks, where its arrays belong: to its "params", its "frozen"
            params or its "batch", and their paths there.
        gathered: parameters that are gathered before they are used -> how they are sharded in use.
        layers: slice of a scan -> the stacked parameter of which it is one layer.
        activations: value -> its shape, and how it is sharded.
        contractions: matmul, convolution or lookup -> how its operands and its result are sharded
            while it runs, whether the result is constrained, how operands are sharded before they
            are gathered for it.
        cotangents: matmul -> how the gradient of its result is sharded when it arrives.
        remat: what layers save for the backward pass: "none" for all that it reads, "dots" for
            results of matmuls, "full" for nothing.
        blocks: layers that are written out one by one: first operation, operations of a layer,
            layers.
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


#: Of every loss; "loss" is the only one, those that a step marks are "loss.0" and so on.
LOSSES: Mapping[str, Layouts] = {}
#: Of the step around the losses that it marks; of none where `make_step` makes it.
STEP = Layouts()
#: What takes out of a loss the layouts that it was written with; None where it has none.
WITHOUT_LAYOUTS: Callable[[Any], Any] | None = None

_POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
_INLINED = ("jit", "pjit", "closed_call", "call", "core_call", "core_closed_call")
_CHECKPOINT = ("remat2", "remat", "checkpoint")
_MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of the plan, over the first devices that JAX sees or those that are given."""
    kind = AxisType.Explicit if MODE == "explicit" else AxisType.Auto
    every = list(jax.devices() if devices is None else devices)
    if hasattr(every[0], "coords"):
        every.sort(key=lambda one: (getattr(one, "slice_index", 0), *one.coords, one.core_on_chip))
    count = int(np.prod(list(MESH.values())))
    if len(every) < count:
        raise ValueError(f"the mesh {dict(MESH)} needs {count} devices, here are {len(every)}")
    order = range(count) if DEVICE_ORDER is None else DEVICE_ORDER
    grid = np.array([every[number] for number in order], dtype=object)
    return Mesh(grid.reshape(tuple(MESH.values())), tuple(MESH), axis_types=(kind,) * len(MESH))


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """The sharding of every stored parameter, as a tree like the parameters."""
    return _stored(params, LOSSES["loss"].parameters, "the parameters", mesh)


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """The sharding of every array of the state of a step, as a tree like the state."""
    return _stored(state, STEP.parameters, "the state", mesh)


def optimizer_shardings(opt_state: Any, mesh: Mesh) -> Any:
    """The sharding of every array of an optimizer's state: as the parameter whose path ends its
    path and whose shape it has; replicated otherwise.
    """
    planned = LOSSES["loss"].parameters

    def sharding(path: str, leaf: Any) -> NamedSharding:
        keys = path.split(".")
        owners = (".".join(keys[start:]) for start in range(len(keys)))
        owner = next((one for one in owners if planned.get(one, [None])[0] == leaf.shape), None)
        return NamedSharding(mesh, P() if owner is None else planned[owner][3])

    return _by_path(opt_state, sharding)


def batch_shardings(batch: Any, mesh: Mesh) -> Any:
    """The sharding of every array of the batch, as a tree like it."""
    rows = (LOSSES.get("loss") or STEP).batch
    return _by_path(batch, lambda path, _: NamedSharding(mesh, rows[path]))


def init_optimizer(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """The optimizer's state before the first step, made sharded."""
    shardings = optimizer_shardings(_state(optimizer, params), mesh)
    init = _automatic(optimizer.init, mesh, shardings)
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
        optimizer: an optax transformation.
        params: tree of parameters, arrays or abstract, with the paths of `LOSSES`.
        batch: arrays or abstract arrays of the whole batch.
        mesh: from `make_mesh`.
    """
    layouts = LOSSES["loss"]
    state = parameter_shardings(params, mesh), optimizer_shardings(_state(optimizer, params), mesh)
    results = *state, NamedSharding(mesh, P())
    inner = _inside(mesh)
    gradients = _gradients(
        lambda params, _, batch: loss(params, batch),
        (params, {}, _microbatch(batch, layouts)),
        layouts,
        inner,
    )
    constrain = partial(_constrained, layouts=layouts, mesh=inner)

    def moved(tree: Any, before: int, after: int) -> Any:
        return _by_path(
            tree,
            lambda path, leaf: (
                leaf
                if layouts.parameters[path][before] == layouts.parameters[path][after]
                else _constrain(leaf, layouts.parameters[path][after], inner)
            ),
        )

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        (value, metrics), slopes = gradients(params, {}, batch)
        local = moved(params, 1, 3)
        updates, opt_state = optax.with_extra_args_support(optimizer).update(
            slopes, opt_state, local, value=value
        )
        new = optax.apply_updates(local, constrain(updates, 3))
        return moved(new, 3, 1), opt_state, {"loss": value, **metrics}

    return jax.jit(
        _automatic(step, mesh, results),
        donate_argnums=(0, 1),
        in_shardings=(*state, batch_shardings(batch, mesh)),
        out_shardings=results,
    )


def shard_step(step: Callable[[Any, Any], Any], state: Any, batch: Any, mesh: Mesh) -> Any:
    """A step with the layouts of the plan, under `jax.jit`: (state, batch) -> what it returns; the
    state is donated.

    Args:
        step: (state, batch) -> (new state, metrics), or the new state alone. It marks its losses by
            `value_and_grad` of this file.
        state: arrays or abstract arrays with the shapes of `STEP`.
        batch: arrays or abstract arrays of the whole batch.
        mesh: from `make_mesh`.
    """
    stored = state_shardings(state, mesh)
    whole, out = _traced_step(step, state, batch)
    part = whole
    if any(one.microbatches > 1 for one in LOSSES.values()):
        part, _ = _traced_step(step, state, _microbatch(batch, STEP))
    marked = {name: equation for name, equation in named(part) if _is_marked(equation.eqn)}
    if marked.keys() != LOSSES.keys():
        raise ValueError(
            f"the step marks {', '.join(marked) or 'no loss'} by value_and_grad of this file; the"
            f" one that was planned marks {', '.join(LOSSES) or 'none'}"
        )
    kept, inner = jax.tree.leaves(stored), _inside(mesh)
    rest = None if inner is mesh else NamedSharding(mesh, P())
    results = out.unflatten([*kept, *[rest] * (out.num_leaves - len(kept))])
    losses = {
        name: _in_place(_MARKED[equation.eqn.params["name"]], LOSSES[name], inner)
        for name, equation in marked.items()
    }
    walk = _Walk(inner, names(whole), STEP, "none", inside=False, losses=losses)
    walk.check(whole)

    def placed(state: Any, batch: Any) -> Any:
        values = list(map(_array, walk.run(whole, jax.tree.leaves((state, batch)))))
        new = [_constrain(one, at.spec, inner) for one, at in zip(values, kept, strict=False)]
        return out.unflatten([*new, *values[len(new) :]])

    return jax.jit(
        _automatic(placed, mesh, results),
        donate_argnums=0,
        in_shardings=(stored, batch_shardings(batch, mesh)),
        out_shardings=results,
    )


def value_and_grad(
    loss: Callable[..., Any], argnums: Any = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`jax.value_and_grad` and `nnx.value_and_grad`, by which a step marks its loss: where
    `shardlib.value_and_grad` stood.

    Args:
        loss: trees of arrays, or NNX modules -> scalar, or (scalar, tree of arrays).
        argnums: what is differentiated: a position, an `nnx.DiffState`, or several of these.
        has_aux: whether the loss returns a pair.
    """
    several = isinstance(argnums, Sequence)

    def gradients(*args: Any, **kwargs: Any) -> Any:
        chosen = {
            getattr(one, "argnum", one) % len(args): getattr(one, "filter", None)
            for one in (argnums if several else (argnums,))
        }
        nnx = sys.modules.get("flax.nnx")
        call = _of_trees if nnx is None or not _has_modules((args, kwargs), nnx) else _of_modules
        flat, leaves, owners, finish = call(loss, args, kwargs, chosen, has_aux)
        trained = [owner is not None for owner in owners]
        value, aux, slopes = _marked(flat, leaves, trained)
        owned = [owner for owner in owners if owner is not None]
        aux, trees = finish(
            aux,
            {
                at: [slope for own, slope in zip(owned, slopes, strict=True) if own == at]
                for at in chosen
            },
        )
        return (value, aux) if has_aux else value, tuple(trees) if several else trees[0]

    return gradients


def _has_modules(tree: Any, nnx: Any) -> bool:
    def is_module(one: Any) -> bool:
        return isinstance(one, nnx.Pytree)

    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _of_trees(loss: Any, args: Any, kwargs: Any, chosen: Mapping[int, Any], has_aux: bool) -> Any:
    """A loss of trees over its arrays: (arrays -> (value, auxiliary results), arrays, for each the
    argument whose gradient it belongs to, what puts results and gradients together).
    """
    every, structure = jax.tree.flatten((args, kwargs))
    counts = [len(jax.tree.leaves(one)) for one in args]
    owners = [at if at in chosen else None for at, count in enumerate(counts) for _ in range(count)]
    owners += [None] * (len(every) - len(owners))
    arrays = (jax.Array, np.ndarray, np.generic)
    taken = [
        at for at, leaf in enumerate(every) if owners[at] is not None or isinstance(leaf, arrays)
    ]

    def flat(*leaves: Any) -> Any:
        whole = dict(enumerate(every)) | dict(zip(taken, leaves, strict=True))
        args, kwargs = structure.unflatten(whole.values())
        results = loss(*args, **kwargs)
        return results if has_aux else (results, None)

    def finish(aux: Any, slopes: Mapping[int, Any]) -> Any:
        return aux, [jax.tree.unflatten(jax.tree.structure(args[at]), slopes[at]) for at in chosen]

    return flat, [every[at] for at in taken], [owners[at] for at in taken], finish


def _of_modules(loss: Any, args: Any, kwargs: Any, chosen: Mapping[int, Any], has_aux: bool) -> Any:
    """The same of a loss of NNX modules; what it changes in them stays changed."""
    nnx = sys.modules["flax.nnx"]
    objects = list(args), dict(kwargs)
    kinds = {at: nnx.Param if kind is None else kind for at, kind in chosen.items()}
    graph, state = nnx.split(objects)
    leaves, structure = jax.tree.flatten(state)

    def owner(path: Any, variable: Any) -> int | None:
        place, at, *rest = path
        wanted = place == 0 and at in kinds
        return at if wanted and nnx.filterlib.to_predicate(kinds[at])(rest, variable) else None

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
        return value, (aux, {at: new for at, (old, new) in pairs if new is not old})

    def finish(results: Any, slopes: Mapping[int, Any]) -> Any:
        aux, changed = results
        if changed:
            nnx.update(objects, structure.unflatten((dict(enumerate(leaves)) | changed).values()))
        states = {at: nnx.state(args[at], kind) for at, kind in kinds.items()}
        return aux, [jax.tree.unflatten(jax.tree.structure(states[at]), slopes[at]) for at in kinds]

    return flat, leaves, owners, finish


class _Marked(NamedTuple):
    """A loss that a step marks: its jaxpr over all that it reads, and of what its gradient is
    wanted.
    """

    closed: Any
    trained: Sequence[bool]


#: The losses of all steps that were traced, by the names of their calls.
_MARKED: dict[str, _Marked] = {}
#: How these names begin, here and in the traces of shardlib.
_MARKS = ("sharded_loss_", "shardlib_markedloss_")


def _marked(flat: Any, leaves: Sequence[Any], trained: Sequence[bool]) -> tuple[Any, Any, Any]:
    """(value, auxiliary results, gradients) by a call that stays one operation of the step."""
    closed, (_, aux) = jax.make_jaxpr(flat, return_shape=True)(*map(_as_is, leaves))
    captured = [one for one in closed.consts if isinstance(one, Tracer)]

    def whole(*values: Any) -> Any:
        fresh = iter(values[len(leaves) :])
        given = [next(fresh) if isinstance(one, Tracer) else one for one in closed.consts]
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, given))(*values[: len(leaves)])

    form = _Marked(
        jax.make_jaxpr(whole)(*map(_as_is, (*leaves, *captured))),
        (*trained, *[False] * len(captured)),
    )

    def call(*values: Any) -> Any:
        chosen = [at for at, flag in enumerate(form.trained) if flag]

        def loss(trained: Any) -> Any:
            given = dict(enumerate(values)) | dict(zip(chosen, trained, strict=True))
            value, *aux = jaxpr_as_fun(form.closed)(*given.values())
            return value, aux

        (value, aux), slopes = jax.value_and_grad(loss, has_aux=True)([values[at] for at in chosen])
        return [value, *aux, *slopes]

    call.__name__ = call.__qualname__ = f"{_MARKS[0]}{len(_MARKED)}"
    _MARKED[call.__name__] = form
    value, *rest = jax.jit(call)(*leaves, *captured)
    structure = jax.tree.structure(aux)
    count = structure.num_leaves
    return value, structure.unflatten(rest[:count]), rest[count:]


def _traced_step(step: Any, state: Any, batch: Any) -> tuple[Program, Any]:
    """A step as a program, and the structure of its results."""
    step = step if WITHOUT_LAYOUTS is None else WITHOUT_LAYOUTS(step)
    with _no_mesh():
        closed, out = jax.make_jaxpr(step, return_shape=True)(_abstract(state), _abstract(batch))
    return flatten(closed), jax.tree.structure(out)


def _in_place(marked: _Marked, layouts: Layouts, mesh: Any) -> Callable[..., list[Any]]:
    """What computes a marked loss by the plan: arrays -> value, auxiliary results, gradients."""
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
        (value, aux), slopes = gradients(*arguments(values))
        results = zip((value, *aux.values()), marked.closed.out_avals, strict=True)
        return [
            *(one.astype(aval.dtype) for one, aval in results),
            *(slopes[path] for kind, path in layouts.leaves if kind == "params"),
        ]

    return run


def _gradients(loss: Any, abstract: tuple[Any, Any, Any], layouts: Layouts, mesh: Any) -> Any:
    """(params, frozen params, batch) -> ((value, metrics), gradients) with the layouts of the plan;
    the loss is traced for `abstract` arguments.
    """
    differentiate = jax.value_and_grad(_placed_loss(loss, abstract, layouts, mesh), has_aux=True)
    constrain = partial(_constrained, layouts=layouts, mesh=mesh)

    def zeros(one: Any) -> Any:
        return jnp.zeros(one.shape, jnp.promote_types(one.dtype, jnp.float32))

    def gradients(params: Any, frozen: Any, batch: Any) -> Any:
        if layouts.microbatches == 1:
            results, slopes = differentiate(params, frozen, batch)
            return results, constrain(slopes, 2)

        def body(sums: Any, rows: Any) -> Any:
            results, slopes = differentiate(params, frozen, _joined(batch, rows, layouts))
            added = jax.tree.map(jnp.add, sums, constrain(slopes, 2))
            return constrain(added, 2), results

        start = constrain(jax.tree.map(zeros, params), 2)
        sums, results = jax.lax.scan(body, start, _parts(batch, layouts, mesh))
        mean = jax.tree.map(lambda values: values.mean(0), results)
        slopes = jax.tree.map(
            lambda total, one: (total / layouts.microbatches).astype(one.dtype), sums, params
        )
        return mean, constrain(slopes, 2)

    return gradients


def _inside(mesh: Mesh) -> Any:
    """The mesh that a step computes on: that of the plan with automatic axes."""
    abstract = mesh.abstract_mesh
    automatic = abstract.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    return mesh if abstract == automatic else automatic


def _automatic(function: Any, mesh: Mesh, results: Any) -> Any:
    """A function that computes on automatic axes; on explicit ones its results have types."""
    if _inside(mesh) is mesh:
        return function
    return jax.sharding.auto_axes(function, axes=mesh.axis_names, out_sharding=results)


def _state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    with _no_mesh():
        return jax.eval_shape(optimizer.init, _abstract(params))


def _no_mesh() -> Any:
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def _as_is(leaf: Any) -> Any:
    return jax.eval_shape(lambda leaf: leaf, leaf)


def _abstract(tree: Any) -> Any:
    """Abstract arrays, without shardings."""

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        one = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        typed_key = jnp.issubdtype(one.dtype, jax.dtypes.extended)
        dtype = one.dtype if typed_key else jax.dtypes.canonicalize_dtype(one.dtype)
        return jax.ShapeDtypeStruct(one.shape, dtype)

    return jax.tree.map(abstract, tree)


def _array(one: Any) -> Any:
    return one if isinstance(one, jax.Array) else jnp.asarray(one)


def _constrained(tree: Any, which: int, layouts: Layouts, mesh: Any) -> Any:
    """A tree of parameters, or what is like them, sharded as the table says."""
    return _by_path(
        tree, lambda path, leaf: _constrain(leaf, layouts.parameters[path][which], mesh)
    )


def _placed_loss(
    loss: Any, abstract: tuple[Any, Any, Any], layouts: Layouts, mesh: Any
) -> Callable[[Any, Any, Any], Any]:
    """(params, frozen params, batch) -> (scalar, metrics), with the layouts of the plan."""

    def value(*given: Any) -> Any:
        results = loss(*given)
        return results if isinstance(results, tuple) else (results, {})

    value = value if WITHOUT_LAYOUTS is None else WITHOUT_LAYOUTS(value)
    with _no_mesh():
        closed, out = jax.make_jaxpr(value, return_shape=True)(*_abstract(abstract))
    program = flatten(closed)
    walk = _Walk(mesh, names(program), layouts, layouts.remat, inside=False)
    walk.check(program)

    def placed(params: Any, frozen: Any, batch: Any) -> Any:
        leaves = [
            leaf if path in layouts.layers.values() else walk.parameter(path, leaf, 0)
            for path, leaf in (*paths(params), *paths(frozen))
        ]
        results = walk.run(program, [*leaves, *jax.tree.leaves(batch)], layouts.blocks)
        return jax.tree.unflatten(jax.tree.structure(out), map(_array, results))

    return placed


class Equation(NamedTuple):
    """An operation of the traced loss: where it stands, and numbers of the values it reads and
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
        at = next(number)
        constants[at] = value
        return at

    def walk(jaxpr: Any, arguments: Sequence[int], prefix: str) -> list[int]:
        inner, values = (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())
        env = dict(zip(inner.invars, arguments, strict=True))
        env.update(zip(inner.constvars, map(constant, values), strict=True))

        def read(atom: Any) -> int:
            return constant(atom.val) if isinstance(atom, Literal) else env[atom]

        for index, eqn in enumerate(inner.eqns):
            inputs = list(map(read, eqn.invars))
            if str(eqn.params.get("name", "")).startswith("shardlib-layout-"):
                outputs = inputs  # a mark where a layout stood
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
    """Path of every operation -> its name: the primitive, and how many of them stand before it.
    Layers under a scan and under rematerialisation are counted where their loop stands.
    """
    return {equation.path: name for name, equation in named(program)}


def named(program: Program) -> Iterator[tuple[str, Equation]]:
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
    return str(eqn.params.get("name", "")).startswith(_MARKS)


class _Walk:
    """The traced loss or step is run again, with a constraint on every value that the plan has a
    layout for; `losses` are computed as the plan says.
    """

    def __init__(
        self,
        mesh: Any,
        names: Mapping[str, str],
        layouts: Layouts,
        remat: str,
        *,
        inside: bool,
        losses: Mapping[str, Callable[..., list[Any]]] | None = None,
    ) -> None:
        self.mesh, self.names, self.layouts, self.losses = mesh, names, layouts, losses or {}
        self.remat, self.inside = remat, inside

    def _inner(self, *, inside: bool) -> _Walk:
        """The walk inside of a layer."""
        return _Walk(self.mesh, self.names, self.layouts, "none", inside=inside, losses=self.losses)

    def check(self, program: Program) -> None:
        """Raises where the loss is not the one that was planned."""
        known, layouts = set(self.names.values()), self.layouts
        asked = [
            name.partition(" ")[0]
            for name in (*layouts.activations, *layouts.contractions, *layouts.layers)
        ]
        missing = dict.fromkeys(name for name in asked if name not in known)
        if missing:
            raise ValueError(
                f"the loss has no {', '.join(missing)}: it is not the one that was planned, or JAX"
                f" {jax.__version__} traces it otherwise. Write this file again with shardlib."
            )

    def run(
        self, program: Program, values: Sequence[Any], blocks: Sequence[tuple[str, int, int]] = ()
    ) -> list[Any]:
        env = dict(program.constants)
        env.update(zip(program.inputs, values, strict=True))
        at = 0
        places = {self.names[one.path]: i for i, one in enumerate(program.equations)}
        for first, length, count in blocks if self.remat != "none" else ():
            self._equations(program.equations[at : places[first]], env)
            at = places[first]
            for _ in range(count):
                self._layer(program, at, length, env)
                at += length
        self._equations(program.equations[at:], env)
        return [env[number] for number in program.outputs]

    def _layer(self, program: Program, first: int, length: int, env: dict[int, Any]) -> None:
        """One layer that is written out, under the remat policy."""
        equations = program.equations[first : first + length]
        made = {number for one in equations for number in one.outputs}
        read = sorted({n for one in equations for n in one.inputs} - made - set(program.constants))
        after = {n for one in program.equations[first + length :] for n in one.inputs}
        left = sorted(made & (after | set(program.outputs)))
        inner = self._inner(inside=True)

        def layer(*values: Any) -> list[Any]:
            local = {**program.constants, **dict(zip(read, values, strict=True))}
            inner._equations(equations, local)
            return [local[number] for number in left]

        found = jax.checkpoint(layer, policy=_POLICIES[self.remat])(*(env[n] for n in read))
        env.update(zip(left, found, strict=True))

    def _equations(self, equations: Sequence[Equation], env: dict[int, Any]) -> None:
        for equation in equations:
            found = self._equation(equation, [env[number] for number in equation.inputs])
            env.update(zip(equation.outputs, found, strict=True))

    def _equation(self, equation: Equation, values: list[Any]) -> Sequence[Any]:
        eqn, path = equation.eqn, equation.path
        if eqn.primitive.name == "scan":
            return self._scan(equation, values)
        if eqn.primitive.name in _CHECKPOINT:
            program = flatten(_callee(eqn), f"{path}/")
            if self.inside:
                return self.run(program, values)
            inner = self._inner(inside=False)
            return jax.checkpoint(
                lambda *values: inner.run(program, values),
                policy=eqn.params["policy"],
                prevent_cse=eqn.params["prevent_cse"],
            )(*values)
        name = self.names.get(path, "")
        if name in self.losses:
            return self.losses[name](*values)
        found = (
            [self._contraction(eqn, name, values)]
            if name in self.layouts.contractions
            else _bind(eqn, values)
        )
        return [self._put(f"{name} {k}" if k else name, one) for k, one in enumerate(found)]

    def _put(self, name: str, value: Any) -> Any:
        if name not in self.layouts.activations:
            return value
        shape, spec = self.layouts.activations[name]
        if shape != jnp.shape(value):
            raise ValueError(
                f"{name} has shape {jnp.shape(value)} here and {shape} in the plan: the loss or the"
                " batch is another one. Write this file again with shardlib."
            )
        placed = _constrain(value, spec, self.mesh)
        back = self.layouts.cotangents.get(name)
        return placed if back is None else _returning(NamedSharding(self.mesh, back))(placed)

    def parameter(self, path: str, leaf: Any, dim: int) -> Any:
        """A parameter, or one layer of it, whose gradient comes back as the optimizer reads it."""
        gradient, whole = self.layouts.parameters[path][2], self.layouts.gathered.get(path)
        same = _returning(NamedSharding(self.mesh, P(*gradient[dim:])))(leaf)
        return same if whole is None else _constrain(same, P(*whole[dim:]), self.mesh)

    def _contraction(self, eqn: Any, name: str, values: list[Any]) -> Any:
        """A contraction in the layouts of the plan, forward and backward: what the backward pass
        finds saved are the operands as they come, so that it gathers a weight again.
        """
        operands, result, settles, arriving = self.layouts.contractions[name]
        like = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in values]

        def read(at: int, value: Any) -> Any:
            return _constrain(value, operands[at], self.mesh)

        def made(*values: Any) -> Any:
            found = _bind(eqn, [read(at, value) for at, value in enumerate(values)])[0]
            return _constrain(found, result, self.mesh) if settles else found

        if not all(jnp.issubdtype(one.dtype, jnp.inexact) for one in like):
            return made(*values)

        def gradient(wanted: int, values: Sequence[Any], cotangent: Any) -> Any:
            one, before = like[wanted], arriving[wanted] if wanted < len(arriving) else None
            wide = before is not None and cotangent.dtype.itemsize > one.dtype.itemsize
            into = jax.ShapeDtypeStruct(one.shape, cotangent.dtype if wide else one.dtype)

            def linear(value: Any) -> Any:
                given = [value if at == wanted else other for at, other in enumerate(values)]
                return _bind(eqn, given)[0]

            found = read(wanted, jax.linear_transpose(linear, into)(cotangent)[0])
            if wide and before is not None:
                found = _constrain(found, before, self.mesh)
            return found.astype(one.dtype)

        def backward(saved: Sequence[Any], cotangent: Any) -> Any:
            reads = [read(at, value) for at, value in enumerate(saved)]
            cotangent = _constrain(cotangent, result, self.mesh)
            return tuple(gradient(wanted, reads, cotangent) for wanted in range(len(reads)))

        run = jax.custom_vjp(made)
        run.defvjp(lambda *values: (made(*values), values), backward)
        return run(*values)

    def _scan(self, equation: Equation, values: list[Any]) -> Sequence[Any]:
        eqn, path, name = equation.eqn, equation.path, self.names.get(equation.path, "")
        params = eqn.params
        constants, carried = _scan_counts(params)
        program = flatten(params["jaxpr"], f"{path}/body/")
        remat = self.remat if _has_matmul(eqn) else "none"
        inner = self._inner(inside=remat != "none")

        def body(carry: Any, sliced: Any) -> Any:
            held = [self._put(f"{name} carry {k}", one) for k, one in enumerate(carry)]
            layer = [self._entered(f"{name} enter {k}", one) for k, one in enumerate(sliced)]
            found = inner.run(program, [*values[:constants], *held, *layer])
            return tuple(found[:carried]), tuple(found[carried:])

        if remat != "none":
            body = jax.checkpoint(body, policy=_POLICIES[remat], prevent_cse=False)
        avals = [var.aval for var in getattr(params["jaxpr"], "jaxpr", params["jaxpr"]).invars]
        first = tuple(
            one if isinstance(one, jax.Array) else jnp.asarray(one, aval.dtype)
            for one, aval in zip(
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
            *(self._put(f"{name} final {k}", one) for k, one in enumerate(final)),
            *(self._put(f"{name} exit {k}", one) for k, one in enumerate(stacked)),
        ]

    def _entered(self, name: str, value: Any) -> Any:
        return (
            self.parameter(self.layouts.layers[name], value, 1)
            if name in self.layouts.layers
            else self._put(name, value)
        )


def _returning(sharding: NamedSharding) -> Callable[[Any], Any]:
    """The identity, whose gradient comes back with this sharding."""

    @jax.custom_vjp
    def same(value: Any) -> Any:
        return value

    same.defvjp(
        lambda value: (value, None),
        lambda _, cotangent: (jax.lax.with_sharding_constraint(cotangent, sharding),),
    )
    return same


def _constrain(value: Any, spec: P, mesh: Mesh) -> Any:
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def _bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(found) if eqn.primitive.multiple_results else [found]


def _callee(eqn: Any) -> Any:
    keys = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
    return next(eqn.params[key] for key in keys if key in eqn.params)


def _scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Constants and carries of a scan: JAX 0.10 has numbers of them, 0.12 a structure."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def _has_matmul(eqn: Any) -> bool:
    if eqn.primitive.name in _MATMULS:
        return True
    inner = [
        getattr(one, "jaxpr", one)
        for value in eqn.params.values()
        for one in (value if isinstance(value, tuple | list) else [value])
        if hasattr(one, "eqns") or hasattr(one, "jaxpr")
    ]
    return any(_has_matmul(one) for jaxpr in inner for one in getattr(jaxpr, "eqns", ()))


def paths(tree: Any) -> list[tuple[str, Any]]:
    """Dotted path and array of every leaf; the variables of NNX are their arrays."""

    def key(one: Any) -> str:
        return str(getattr(one, "key", getattr(one, "idx", getattr(one, "name", one))))

    def inside(path: Sequence[Any]) -> bool:
        """Whether a path ends with the array of a variable of NNX."""
        return bool(path) and str(path[-1]) in (".value", ".raw_value")

    return [
        (".".join(map(key, path[:-1] if inside(path) else path)), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _by_path(tree: Any, function: Callable[[str, Any], Any]) -> Any:
    leaves = [function(path, leaf) for path, leaf in paths(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _stored(tree: Any, planned: Mapping[str, Sequence[Any]], what: str, mesh: Mesh) -> Any:
    """The shardings of a tree of arrays that are stored.

    Raises:
        ValueError: its arrays are others than those of the plan.
    """
    shapes = {path: tuple(np.shape(leaf)) for path, leaf in paths(tree)}
    wrong = [
        f"{path} is {shapes.get(path, 'missing')} here,"
        f" {planned[path][0] if path in planned else 'missing'} in the plan"
        for path in sorted({*shapes, *planned})
        if path not in planned or shapes.get(path) != planned[path][0]
    ]
    if wrong:
        raise ValueError(f"these are not {what} that were planned: {'; '.join(wrong)}")
    return _by_path(tree, lambda path, _: NamedSharding(mesh, planned[path][1]))


def _microbatch(batch: Any, layouts: Layouts) -> Any:
    def part(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        shape, dim = list(leaf.shape), layouts.rows[path]
        if dim is not None:
            shape[dim] //= layouts.microbatches
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return _by_path(batch, part)


def _parts(batch: Any, layouts: Layouts, mesh: Any) -> list[Any]:
    """The microbatches, stacked: every device takes each from its own rows."""
    found: list[Any] = []
    for path, leaf in paths(batch):
        dim, count = layouts.rows[path], layouts.microbatches
        if dim is None:
            continue
        split = leaf.reshape(*leaf.shape[:dim], -1, count, *leaf.shape[dim + 1 :])
        spec = P(None, *layouts.batch[path])
        found.append(_constrain(jnp.moveaxis(split, dim + 1, 0), spec, mesh))
    return found


def _joined(batch: Any, rows: Sequence[Any], layouts: Layouts) -> Any:
    rest = iter(rows)
    return _by_path(batch, lambda path, leaf: leaf if layouts.rows[path] is None else next(rest))
