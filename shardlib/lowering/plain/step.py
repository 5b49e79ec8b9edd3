"""The training step of a plan in plain JAX: the second half of the files that `Plan.emit("jax")`
writes, whose first half are the tables below. Imports nothing of shardlib.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal
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
#: Path of a parameter -> its shape, and how it is sharded: stored, its gradient, its optimizer
#: state and update.
PARAMETERS: Mapping[str, Sequence[Any]] = {}
#: Path of an array of the batch -> how it is sharded.
BATCH: Mapping[str, P] = {}
#: Microbatches, and the dim of the rows of each array of the batch; None for arrays without.
MICROBATCHES = 1
ROWS: Mapping[str, int | None] = {}
#: Parameters that are gathered before they are used, and how they are sharded in use.
GATHERED: Mapping[str, P] = {}
#: Slice of a scan -> the stacked parameter of which it is one layer.
LAYERS: Mapping[str, str] = {}
#: Value of the loss -> its shape, and how it is sharded.
ACTIVATIONS: Mapping[str, tuple[tuple[int, ...], P]] = {}
#: Matmul, convolution or lookup -> how its operands and its result are sharded while it runs,
#: whether the result is constrained, how operands are sharded before they are gathered for it.
CONTRACTIONS: Mapping[str, tuple[tuple[P, ...], P, bool, tuple[P | None, ...]]] = {}
#: Matmul -> how the gradient of its result is sharded when it arrives.
COTANGENTS: Mapping[str, P] = {}
#: What layers save for the backward pass: "none" for all that it reads, "dots" for results of
#: matmuls, "full" for nothing.
REMAT = "none"
#: Layers that are written out one by one: first operation, operations of a layer, layers.
BLOCKS: Sequence[tuple[str, int, int]] = ()
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
    _check_parameters(params)
    return _by_path(params, lambda path, _: NamedSharding(mesh, PARAMETERS[path][1]))


def optimizer_shardings(opt_state: Any, mesh: Mesh) -> Any:
    """The sharding of every array of an optimizer's state: as the parameter whose path ends its
    path and whose shape it has; replicated otherwise.
    """

    def sharding(path: str, leaf: Any) -> NamedSharding:
        keys = path.split(".")
        owners = (".".join(keys[start:]) for start in range(len(keys)))
        owner = next(
            (one for one in owners if PARAMETERS.get(one, [None])[0] == tuple(leaf.shape)), None
        )
        return NamedSharding(mesh, P() if owner is None else PARAMETERS[owner][3])

    return _by_path(opt_state, sharding)


def batch_shardings(batch: Any, mesh: Mesh) -> Any:
    """The sharding of every array of the batch, as a tree like it."""
    return _by_path(batch, lambda path, _: NamedSharding(mesh, BATCH[path]))


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
        params: tree of parameters, arrays or abstract, with the paths of `PARAMETERS`.
        batch: arrays or abstract arrays of the whole batch.
        mesh: from `make_mesh`.
    """
    _check_parameters(params)
    state = parameter_shardings(params, mesh), optimizer_shardings(_state(optimizer, params), mesh)
    results = *state, NamedSharding(mesh, P())
    ins = *state, batch_shardings(batch, mesh)
    outer, mesh = mesh, _inside(mesh)
    placed = _placed_loss(loss, params, _microbatch(batch), mesh)
    differentiate = jax.value_and_grad(placed, has_aux=True)

    def held(tree: Any, which: int) -> Any:
        return _by_path(tree, lambda path, leaf: _constrain(leaf, PARAMETERS[path][which], mesh))

    def moved(tree: Any, before: int, after: int) -> Any:
        return _by_path(
            tree,
            lambda path, leaf: (
                leaf
                if PARAMETERS[path][before] == PARAMETERS[path][after]
                else _constrain(leaf, PARAMETERS[path][after], mesh)
            ),
        )

    def gradients(params: Any, batch: Any) -> Any:
        if MICROBATCHES == 1:
            return differentiate(params, batch)

        def body(sums: Any, rows: Any) -> Any:
            results, found = differentiate(params, _joined(batch, rows))
            added = jax.tree.map(lambda total, one: total + one, sums, held(found, 2))
            return held(added, 2), results

        def zeros(one: Any) -> Any:
            return jnp.zeros(one.shape, jnp.promote_types(one.dtype, jnp.float32))

        start = held(jax.tree.map(zeros, params), 2)
        sums, results = jax.lax.scan(body, start, _parts(batch, mesh))
        mean = jax.tree.map(lambda values: values.mean(0), results)
        return mean, jax.tree.map(
            lambda total, one: (total / MICROBATCHES).astype(one.dtype), sums, params
        )

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        (value, metrics), found = gradients(params, batch)
        local = moved(params, 1, 3)
        updates, opt_state = optax.with_extra_args_support(optimizer).update(
            held(found, 2), opt_state, local, value=value
        )
        new = optax.apply_updates(local, held(updates, 3))
        return moved(new, 3, 1), opt_state, {"loss": value, **metrics}

    return jax.jit(
        _automatic(step, outer, results),
        donate_argnums=(0, 1),
        in_shardings=ins,
        out_shardings=results,
    )


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


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _placed_loss(loss: Any, params: Any, batch: Any, mesh: Mesh) -> Callable[[Any, Any], Any]:
    """The loss with the layouts of the plan: (params, batch) -> (scalar, metrics)."""

    def value(params: Any, batch: Any) -> Any:
        found = loss(params, batch)
        return found if isinstance(found, tuple) else (found, {})

    value = value if WITHOUT_LAYOUTS is None else WITHOUT_LAYOUTS(value)
    with _no_mesh():
        closed, out = jax.make_jaxpr(value, return_shape=True)(_abstract(params), batch)
    program = flatten(closed)
    walk = _Walk(mesh, names(program), REMAT, inside=False)
    walk.check(program)
    paths = [path for path, _ in _paths(params)]

    def placed(params: Any, batch: Any) -> Any:
        leaves = [
            leaf if path in LAYERS.values() else walk.parameter(path, leaf, 0)
            for path, leaf in zip(paths, jax.tree.leaves(params), strict=True)
        ]
        results = walk.run(program, [*leaves, *jax.tree.leaves(batch)], BLOCKS)
        return jax.tree.unflatten(jax.tree.structure(out), map(jnp.asarray, results))

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
            elif eqn.primitive.name in _INLINED:
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
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()

    def walk(program: Program) -> None:
        for equation in program.equations:
            name = equation.eqn.primitive.name
            found[equation.path] = f"{name}.{counts[name]}"
            counts[name] += 1
            if name == "scan":
                walk(flatten(equation.eqn.params["jaxpr"], f"{equation.path}/body/"))
            elif name in _CHECKPOINT:
                walk(flatten(_callee(equation.eqn), f"{equation.path}/"))

    walk(program)
    return found


class _Walk:
    """The traced loss is run again, with a constraint on every value that the plan has a layout
    for.
    """

    def __init__(self, mesh: Mesh, names: Mapping[str, str], remat: str, *, inside: bool) -> None:
        self.mesh, self.names, self.remat, self.inside = mesh, names, remat, inside

    def check(self, program: Program) -> None:
        """Raises where the loss is not the one that was planned."""
        known = set(self.names.values())
        asked = [name.partition(" ")[0] for name in (*ACTIVATIONS, *CONTRACTIONS, *LAYERS)]
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
        inner = _Walk(self.mesh, self.names, "none", inside=True)

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
            inner = _Walk(self.mesh, self.names, "none", inside=False)
            return jax.checkpoint(
                lambda *values: inner.run(program, values),
                policy=eqn.params["policy"],
                prevent_cse=eqn.params["prevent_cse"],
            )(*values)
        name = self.names.get(path, "")
        found = (
            [self._contraction(eqn, name, values)] if name in CONTRACTIONS else _bind(eqn, values)
        )
        return [self._put(f"{name} {k}" if k else name, one) for k, one in enumerate(found)]

    def _put(self, name: str, value: Any) -> Any:
        if name not in ACTIVATIONS:
            return value
        shape, spec = ACTIVATIONS[name]
        if shape != jnp.shape(value):
            raise ValueError(
                f"{name} has shape {jnp.shape(value)} here and {shape} in the plan: the loss or the"
                " batch is another one. Write this file again with shardlib."
            )
        placed = _constrain(value, spec, self.mesh)
        back = COTANGENTS.get(name)
        return placed if back is None else _returning(NamedSharding(self.mesh, back))(placed)

    def parameter(self, path: str, leaf: Any, dim: int) -> Any:
        """A parameter, or one layer of it, whose gradient comes back as the optimizer reads it."""
        gradient, whole = PARAMETERS[path][2], GATHERED.get(path)
        same = _returning(NamedSharding(self.mesh, P(*gradient[dim:])))(leaf)
        return same if whole is None else _constrain(same, P(*whole[dim:]), self.mesh)

    def _contraction(self, eqn: Any, name: str, values: list[Any]) -> Any:
        """A contraction in the layouts of the plan, forward and backward: what the backward pass
        finds saved are the operands as they come, so that it gathers a weight again.
        """
        operands, result, settles, arriving = CONTRACTIONS[name]
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
        inner = _Walk(self.mesh, self.names, "none", inside=remat != "none")

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
        return self.parameter(LAYERS[name], value, 1) if name in LAYERS else self._put(name, value)


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


def _paths(tree: Any) -> list[tuple[str, Any]]:
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
    leaves = [function(path, leaf) for path, leaf in _paths(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _check_parameters(params: Any) -> None:
    found = {path: tuple(leaf.shape) for path, leaf in _paths(params)}
    planned = {path: row[0] for path, row in PARAMETERS.items()}
    wrong = [
        f"{path} is {found.get(path, 'missing')} here, {planned.get(path, 'missing')} in the plan"
        for path in sorted({*found, *planned})
        if found.get(path) != planned.get(path)
    ]
    if wrong:
        raise ValueError("these are not the parameters that were planned: " + "; ".join(wrong))


def _microbatch(batch: Any) -> Any:
    def part(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        shape, dim = list(leaf.shape), ROWS[path]
        if dim is not None:
            shape[dim] //= MICROBATCHES
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return _by_path(batch, part)


def _parts(batch: Any, mesh: Mesh) -> list[Any]:
    """The microbatches, stacked: every device takes each from its own rows."""
    found: list[Any] = []
    for path, leaf in _paths(batch):
        dim = ROWS[path]
        if dim is None:
            continue
        rows = leaf.shape[dim] // MICROBATCHES
        split = leaf.reshape(*leaf.shape[:dim], rows, MICROBATCHES, *leaf.shape[dim + 1 :])
        found.append(_constrain(jnp.moveaxis(split, dim + 1, 0), P(None, *BATCH[path]), mesh))
    return found


def _joined(batch: Any, rows: Sequence[Any]) -> Any:
    rest = iter(rows)
    return _by_path(batch, lambda path, leaf: leaf if ROWS[path] is None else next(rest))
