"""Layouts written in the user's program: recorded while it is traced, then removed.

`with_sharding_constraint`, `reshard`, `einsum(..., out_sharding=...)`, jitted functions with
shardings and `jax.shard_map` over the user's mesh say how a program was sharded before. A plan
shards it anew. So the function is traced under a *planning mesh*: the mesh axes that it names, each
of size 1 and of the type that it expects (Auto or Explicit), under which every layout is legal and
has no effect. The traced program is then evaluated again without layouts; each becomes a mark on
its value:

    h = reshard(x @ w, P("data", "model"))      ->      h = x @ w       marked ("data", "model")

A mark is JAX's identity with a name (`checkpoint_name`); `program.flatten` reads it as the layout
of a value, not as an operation, so a program plans and runs as if no layout had been written.

The body of a `shard_map` over a planning mesh already has global shapes. One that closes over a
mesh of devices has the shapes of a shard: it is evaluated for all shards at once by `jax.vmap` with
the names of the mesh axes, which gives collectives their global meaning.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import itertools
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType, ModuleType
from typing import Any

import jax
import jax.custom_batching
import numpy as np
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.extend import core as jex
from jax.extend import linear_util, source_info_util
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib._jax_compat import open_jaxpr
from shardlib.errors import ShardlibError, TracingError
from shardlib.functions.attention import form_of
from shardlib.functions.losses import MarkedLoss, remarked
from shardlib.jax_types import Eqn, EqnParams, Function, Jaxpr, Value
from shardlib.layout import INNER_AXES

# --------------------------------------------------------------------------------------------------
# The user's source lines, as opposed to lines of libraries.

#: Folders of installed packages: source lines under them are not the user's.
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: The folder of this package; matched whole, because a user's folder may have the same name.
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def user_line(eqn: Eqn) -> str:
    """The innermost source line of an equation that is not a library's, "file.py:12"; "" if there
    is none.
    """
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return _first_user_line((frame.file_name, frame.line_num) for frame in frames)


def raising_line(error: Exception) -> str:
    """The user's innermost line in the traceback of an error, as `user_line` formats it."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return _first_user_line((frame.filename, frame.lineno or 0) for frame in frames)


def _first_user_line(lines: Iterable[tuple[str, int]]) -> str:
    """The first source line, of (file, number) pairs, that is not a library's."""
    return next(
        (
            f"{os.path.basename(name)}:{number}"
            for name, number in lines
            if not name.startswith("<")
            and not any(part in name for part in _INSTALLED)
            and not name.startswith(_PACKAGE)
            and "importlib" not in name
        ),
        "",
    )


#: Mesh axes per dim, the major one first; None where a dim is left open.
Spec = tuple[tuple[str, ...] | None, ...]

_MARK = "shardlib-layout-"
_MARKED: dict[str, UserLayout] = {}
#: Parameters of primitives that contain the layout of a result.
_PARAMETERS = ("out_sharding", "sharding")
#: Primitives whose result layout the user chose; others propagate the layout of their operands.
_SETS_LAYOUT = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated", "gather"})
#: Casts between types of mesh axes, which are not layouts.
_CASTS = frozenset(
    {
        "mesh_cast",
        "pvary",
        "pcast",
        "pbroadcast",
        "vary_unreduced_cast",
        "reduced_vary_cast",
        "core_pvary",
    }
)
_CALLS = frozenset({"jit", "pjit", "closed_call", "call", "core_call", "core_closed_call"})
#: A `PartitionSpec` axis that the current mesh lacks, in JAX's words (0.10 and 0.12 alike).
_MISSING_AXIS = re.compile(r"Resource axis: (\S+) of ")
#: The layout and type that a `shard_map` expects of an operand sharded differently, in JAX's words.
_OTHER_LAYOUT = re.compile(
    r"in_specs passed to shard_map: P(\(.*?\)) does not match .* for arg: (\S+\])"
)
#: Matches JAX's errors about meshes and layouts; any other error has another cause.
_MESH_ERROR = re.compile(r"mesh|PartitionSpec|[Ss]harding|shard_map")
#: Maximum number of retries: each adds a mesh axis, or a layout required of an input.
_MAX_RETRIES = 32
#: Depth and number of objects searched for meshes that a function refers to.
_MAX_DEPTH, _MAX_OBJECTS = 8, 5000


@dataclass(frozen=True, kw_only=True)
class UserLayout:
    """A layout that the user's program requests.

    Attributes:
        spec: the user's mesh axes for each dim of the value; () for a replicated dim, None for one
            that is left open.
        mesh: sizes of all axes of the user's mesh; empty if the program only names axes.
        requested_by: the function that requests it, such as "with_sharding_constraint".
        line: the user's line, "model.py:12"; "" if unknown.
    """

    spec: Spec
    mesh: tuple[tuple[str, int], ...]
    requested_by: str
    line: str

    @property
    def names(self) -> frozenset[str]:
        """The mesh axes that it shards over."""
        return frozenset(axis for axes in self.spec for axis in axes or ())

    def __str__(self) -> str:
        spec = ", ".join(
            "UNCONSTRAINED"
            if axes is None
            else "None"
            if not axes
            else repr(axes[0])
            if len(axes) == 1
            else repr(axes)
            for axes in self.spec
        )
        return f"{self.requested_by} P({spec})"


def layout_of(eqn: Eqn) -> UserLayout | None:
    """The layout that a marking equation gives its operand; None for any other equation."""
    return _MARKED.get(eqn.params["name"]) if eqn.primitive.name == "name" else None


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """The mesh and the rules that a user's function is traced under.

    Attributes:
        mesh: the current abstract mesh.
        sizes: sizes of the user's mesh axes where they are known, since `mesh` has size 1.
        inputs: layouts of inputs, by dtype and shape; a `shard_map` over Explicit axes requires
            them.
    """

    mesh: AbstractMesh
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    inputs: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec])

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enters the setting, with size-1 axes left out of types. The empty mesh comes first
        because JAX only changes between meshes of different sizes through it.
        """
        with (
            jax.sharding.use_abstract_mesh(NO_MESH),
            jax.sharding.use_abstract_mesh(self.mesh),
            jax.remove_size_one_mesh_axis_from_type(True),
        ):
            yield

    def after(self, error: Exception) -> _Setting | None:
        """The setting extended by the axis or input layout that the error reports as missing; None
        for other errors.
        """
        if self.mesh.empty:
            return None
        if missing := _MISSING_AXIS.search(str(error)):
            names = (*self.mesh.axis_names, missing[1].strip("'\""))
            return _planning_mesh(names, (self.mesh.axis_types[0],) * len(names), self.sizes)
        if missing := _OTHER_LAYOUT.search(str(error)):
            spec = PartitionSpec(*ast.literal_eval(missing[1]))
            kind = re.sub(r"@[^,\]]+", "", missing[2])
            if self.inputs.get(kind) != spec:
                return replace(self, inputs={**self.inputs, kind: spec})
        return None

    def abstract(self, value: Any) -> jax.ShapeDtypeStruct:
        """The abstract value of an input, with the layout that the program requires of it."""
        plain = _abstract(value)
        spec = self.inputs.get(f"{plain.dtype}[{','.join(map(str, plain.shape))}]")
        return plain if spec is None else plain.update(sharding=NamedSharding(self.mesh, spec))


#: The empty mesh.
NO_MESH = AbstractMesh((), ())


def _planning_mesh(
    names: Sequence[str], types: Sequence[AxisType], sizes: Mapping[str, int]
) -> _Setting:
    mesh = AbstractMesh((1,) * len(names), tuple(names), axis_types=tuple(types))
    return _Setting(mesh=mesh, sizes=sizes)


def ambient_mesh() -> AbstractMesh:
    """The mesh that the caller has set; an empty one if there is none."""
    return jax.sharding.get_abstract_mesh()


def has_mesh_or_rules(ambient: AbstractMesh) -> bool:
    """True if a mesh or logical axis rules are set around the program."""
    return not ambient.empty or bool(nn.get_logical_axis_rules())


def _settings(ambient: AbstractMesh, function: Function) -> Iterator[_Setting]:
    """The settings to try tracing under, in order; further axes are added from errors."""
    named = [
        _planning_mesh(INNER_AXES, (kind,) * len(INNER_AXES), {})
        for kind in (AxisType.Auto, AxisType.Explicit)
    ]
    if not ambient.empty:
        sizes = dict(ambient.shape)
        yield _planning_mesh(ambient.axis_names, ambient.axis_types, sizes)
        yield _Setting(mesh=ambient)
    elif nn.get_logical_axis_rules():
        yield from named[:1]
    yield _Setting(mesh=NO_MESH)
    yield from named
    if ambient.empty:
        yield from (_Setting(mesh=mesh) for mesh in _meshes(function))


def _meshes(function: Function) -> list[AbstractMesh]:
    """The meshes that a function refers to: in closures, globals, and attributes of these."""
    meshes: list[AbstractMesh] = []
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(function, 0)]
    while waiting and len(seen) < _MAX_OBJECTS:
        value, depth = waiting.pop(0)
        if id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, (Mesh, AbstractMesh)):
            if value.abstract_mesh not in meshes:
                meshes.append(value.abstract_mesh)
        else:
            waiting += [(referred, depth + 1) for referred in _referred(value)]
    return meshes


def _referred(value: Any) -> Iterator[Any]:
    """The objects that a function or an object refers to."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif inspect.ismethod(value):
        yield from (value.__func__, value.__self__)
    elif inspect.isfunction(value):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _filled(cell))
        yield from value.__defaults__ or ()
        names = _names(value.__code__)
        referred = [value.__globals__[name] for name in names if name in value.__globals__]
        yield from referred
        for module in referred:
            if isinstance(module, ModuleType):
                yield from (vars(module)[name] for name in names if name in vars(module))
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif not isinstance(value, (type, ModuleType, jax.Array, np.ndarray)):
        yield from (getattr(value, "__dict__", None) or {}).values()
        if callable(inner := getattr(value, "__wrapped__", None)):
            yield inner


def _names(code: CodeType) -> list[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return [*code.co_names, *itertools.chain(*inner)]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def layout_free(function: Function, ambient: AbstractMesh) -> Function:
    """A function without its layouts: marked, and traceable without a mesh."""
    last_setting: list[_Setting] = []

    def free(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        results = _Results()
        flat = results.flat(lambda *leaves: function(*structure.unflatten(leaves)))
        setting, closed = _traced(
            flat, leaves, itertools.chain(last_setting, _settings(ambient, function))
        )
        last_setting[:] = [setting]
        jaxpr, constants = open_jaxpr(closed)
        return results.rebuilt(_Removal(setting, ambient).run(jaxpr, constants, leaves, _Manual()))

    return free


def brings_layouts(jaxpr: Jaxpr) -> bool:
    """True if a traced program contains layouts, or has them in the types of its constants."""
    body, constants = open_jaxpr(jaxpr)
    return any(map(has_layout, constants)) or any(
        eqn.primitive.name in ("sharding_constraint", "reshard", "shard_map")
        or any(map(_is_layout, _layouts(eqn)))
        or any(
            brings_layouts(item)
            for value in eqn.params.values()
            for item in (value if isinstance(value, (tuple, list)) else (value,))
            if hasattr(item, "eqns")
        )
        for eqn in body.eqns
    )


def has_layout(value: Any) -> bool:
    """True if the type of an array (or abstract array) has a layout over Explicit mesh axes."""
    sharding = getattr(getattr(value, "aval", value), "sharding", None)
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def _layouts(eqn: Eqn) -> list[Any]:
    """The parameters of an equation that can contain layouts."""
    params = eqn.params
    several = ("in_shardings", "out_shardings", "devices")
    return [
        *(params.get(key) for key in _PARAMETERS),
        *itertools.chain(*(params.get(key) or () for key in several)),
    ]


class _Results:
    """The results of a traced function: its arrays, and its leaves that are not arrays."""

    _tree: Any
    _others: list[Any]

    def flat(self, function: Function) -> Callable[..., list[Value]]:
        """The function with its arrays as a list."""

        def flat(*arguments: Any) -> list[Value]:
            leaves, self._tree = jax.tree.flatten(function(*arguments))
            self._others = [None if _is_array(leaf) else leaf for leaf in leaves]
            return [leaf for leaf in leaves if _is_array(leaf)]

        return flat

    def rebuilt(self, arrays: Sequence[Value]) -> Any:
        """The result tree with these arrays."""
        fresh = iter(arrays)
        return self._tree.unflatten(
            [next(fresh) if leaf is None else leaf for leaf in self._others]
        )


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _traced(
    flat: Function, leaves: Sequence[Value], settings: Iterable[_Setting]
) -> tuple[_Setting, jex.ClosedJaxpr]:
    """The jaxpr of a function, and the first setting under which it traces."""
    errors: list[Exception] = []
    for candidate in settings:
        setting: _Setting | None = candidate
        for _ in range(_MAX_RETRIES):
            if setting is None:
                break
            try:
                with setting.entered():
                    return setting, jax.make_jaxpr(flat)(*map(setting.abstract, leaves))
            except Exception as error:
                errors.append(error)
                setting = setting.after(error)
    # An error unrelated to meshes occurs under any mesh; otherwise the user's own setting explains
    # it.
    others = (error for error in errors if not _MESH_ERROR.search(str(error)))
    raise next(others, errors[0])


def _abstract(value: Any) -> jax.ShapeDtypeStruct:
    aval = value.aval if hasattr(value, "aval") else jax.typeof(value)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False))
    )


@dataclass(frozen=True, kw_only=True)
class _Manual:
    """The `shard_map`s around a part of a program.

    Attributes:
        maps: (mesh, axes, whether variance is checked) of each, the outermost first.
    """

    maps: tuple[tuple[Any, frozenset[str], bool], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the mesh axes that they map."""
        return {axis: mesh.shape[axis] for mesh, axes, _ in self.maps for axis in axes}

    def called(self, function: Callable[[], Any]) -> Any:
        """Calls a function, traced as if inside of them."""
        results: list[Any] = []

        def traced() -> None:
            results.append(function())

        for mesh, axes, checked in reversed(self.maps):
            traced = jax.shard_map(
                traced, mesh=mesh, axis_names=axes, check_vma=checked, in_specs=(), out_specs=None
            )
        jax.eval_shape(traced)
        return results[-1]


class _Removal:
    """Evaluates a traced program without layouts.

    Args:
        setting: the setting it was traced under.
        ambient: the mesh that the user has set.
    """

    def __init__(self, setting: _Setting, ambient: AbstractMesh) -> None:
        self.setting, self.ambient = setting, ambient
        self._jitted: dict[int, tuple[Any, Function]] = {}

    def run(
        self, jaxpr: Jaxpr, constants: Sequence[Value], arguments: Sequence[Value], manual: _Manual
    ) -> list[Value]:
        """The results of an open jaxpr."""
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_on_host, constants), strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            return _on_host(atom.val) if isinstance(atom, jex.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            info = eqn.source_info
            stack = source_info_util.current_name_stack() + info.name_stack
            with source_info_util.user_context(info.traceback, name_stack=stack):
                results = self.equation(eqn, list(map(read, eqn.invars)), manual)
            values.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def equation(self, eqn: Eqn, operands: list[Value], manual: _Manual) -> Sequence[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CASTS:
            return operands
        if name == "sharding_constraint":
            unconstrained = params.get("unconstrained_dims", ())
            return [self.mark(operands[0], params["sharding"], eqn, "", unconstrained)]
        if name == "reshard":
            explicit = AxisType.Explicit in params["dst_sharding"].mesh.axis_types
            requested = params["dst_sharding"] if explicit else None
            return [self.mark(operands[0], requested, eqn)]
        if name == "device_put" and all(_is_layout(layout) for layout in params["devices"]):
            requested = params["devices"]
            return [self.mark(*pair, eqn) for pair in zip(operands, requested, strict=True)]
        if name == "shard_map":
            return self.shard_map(eqn, operands, manual)
        if name == "custom_vmap_call":  # from `_ragged_dot`, not vmapped
            jaxpr, constants = open_jaxpr(params["call"])
            return self.run(jaxpr, constants, operands, manual)
        if name in _CALLS:
            return self.call(eqn, operands, manual)
        sizes = manual.sizes
        axes = [axis for axis in _axis_names(params) if axis in sizes]
        if axes:
            return _collective(eqn, operands, {axis: sizes[axis] for axis in axes})
        changed = {key: self.inner(value, manual) for key, value in params.items()}
        layouts = [changed.pop(key) for key in _PARAMETERS if _is_layout(params.get(key))]
        changed = {**params, **changed, **{key: None for key in _PARAMETERS if key in params}}
        bound = eqn.primitive.get_bind_params(changed)
        if name == "ragged_dot_general" and any(size > 1 for size in sizes.values()):
            return [_ragged_dot(partial(eqn.primitive.bind, **bound), bound)(*operands)]
        results = eqn.primitive.bind(*operands, **bound)
        results = list(results) if eqn.primitive.multiple_results else [results]
        if layouts and name in _SETS_LAYOUT:
            results[0] = self.mark(results[0], layouts[0], eqn)
        return results

    def inner(self, value: Any, manual: _Manual) -> Any:
        """A parameter of an equation, with layouts removed from programs and derivative rules in
        it.
        """
        if isinstance(value, tuple) and any(hasattr(item, "eqns") for item in value):
            return tuple(self.inner(item, manual) for item in value)
        if hasattr(value, "eqns"):
            jaxpr, constants = open_jaxpr(value)
            closed = self.program(jaxpr, constants, manual)
            return closed if hasattr(value, "consts") else open_jaxpr(closed)[0]
        if isinstance(value, linear_util.WrappedFun):
            return linear_util.wrap_init(self.rule(value, manual), debug_info=value.debug_info)
        return value

    def program(self, jaxpr: Jaxpr, constants: Sequence[Value], manual: _Manual) -> jex.ClosedJaxpr:
        return jax.make_jaxpr(lambda *values: self.run(jaxpr, constants, values, manual))(
            *map(_abstract, jaxpr.invars)
        )

    def rule(self, rule: Any, manual: _Manual) -> Function:
        """The rule of a custom derivative: (flags) -> jaxpr, or (cotangent arrays) ->
        cotangents.
        """

        def rule_without_layouts(*arguments: Any) -> Any:
            if not any(
                hasattr(argument, "aval") or isinstance(argument, jax.Array)
                for argument in arguments
            ):
                with self.setting.entered():
                    jaxpr, constants, *others = manual.called(lambda: rule.call_wrapped(*arguments))
                free, constants = open_jaxpr(self.program(jaxpr, constants, manual))
                return (free, constants, *others)
            results = _Results()
            with self.setting.entered():
                closed = manual.called(
                    lambda: jax.make_jaxpr(results.flat(rule.call_wrapped))(
                        *map(_abstract, arguments)
                    )
                )
            jaxpr, constants = open_jaxpr(closed)
            return results.rebuilt(self.run(jaxpr, constants, arguments, manual))

        return rule_without_layouts

    def call(self, eqn: Eqn, operands: list[Value], manual: _Manual) -> Sequence[Value]:
        """A jitted function, under its name."""
        params = eqn.params
        form = form_of(eqn)
        if isinstance(form, MarkedLoss):
            return self.loss(form, operands, manual)
        inner = next(params[key] for key in ("jaxpr", "call_jaxpr") if key in params)
        layouts = params.get("in_shardings", ())
        if any(map(_is_layout, layouts)):
            operands = [self.mark(*pair, eqn) for pair in zip(operands, layouts, strict=True)]
        if id(inner) not in self._jitted or manual.maps:
            jaxpr, constants = open_jaxpr(inner)

            def function(*values: Any) -> list[Value]:
                return self.run(jaxpr, constants, values, manual)

            function.__name__ = function.__qualname__ = str(params.get("name", eqn.primitive.name))
            inlined = bool(params.get("inline", False))
            self._jitted[id(inner)] = inner, jax.jit(function, inline=inlined)
        results = self._jitted[id(inner)][1](*operands)
        layouts = params.get("out_shardings", ())
        if any(map(_is_layout, layouts)):
            results = [self.mark(*pair, eqn) for pair in zip(results, layouts, strict=True)]
        return results

    def loss(self, form: MarkedLoss, operands: list[Value], manual: _Manual) -> Sequence[Value]:
        """The value and gradients of a loss that a step marks (`MarkedLoss`)."""
        count = form.constants
        variables = [*form.jaxpr.constvars, *form.jaxpr.invars]
        closed = jax.make_jaxpr(
            lambda *values: self.run(form.jaxpr, values[:count], values[count:], manual)
        )(*map(_abstract, variables))
        form = replace(
            form,
            function=layout_free(form.function, self.ambient),
            arrays=tuple(map(_on_host, form.arrays)),
        )
        return remarked(form, closed, operands)

    def mark(
        self, value: Value, sharding: Any, eqn: Eqn, by: str = "", unconstrained: Sequence[int] = ()
    ) -> Value:
        """The value marked with the requested layout, if the request is one."""
        if not isinstance(sharding, NamedSharding) or jax.dtypes.issubdtype(
            value.dtype, jax.dtypes.extended
        ):
            return value
        return self.marked(value, sharding.spec, sharding.mesh.shape, eqn, by, unconstrained)

    def marked(
        self,
        value: Value,
        spec: PartitionSpec,
        sizes: Mapping[str, int],
        eqn: Eqn,
        by: str = "",
        unconstrained: Sequence[int] = (),
    ) -> Value:
        parts = [_axes_of(part) for part in (*spec, *(None,) * (np.ndim(value) - len(spec)))]
        mesh_sizes = (
            {}
            if all(size == 1 for size in sizes.values()) and not self.setting.mesh.empty
            else sizes
        ) or self.setting.sizes
        layout = UserLayout(
            spec=tuple(None if dim in unconstrained else axes for dim, axes in enumerate(parts)),
            mesh=tuple(mesh_sizes.items()),
            requested_by=by
            or _SPELLINGS.get(eqn.primitive.name, f"{eqn.primitive.name}(out_sharding)"),
            line=user_line(eqn),
        )
        name = f"{_MARK}{hashlib.sha256(repr(layout).encode()).hexdigest()[:12]}"
        _MARKED[name] = layout
        return checkpoint_name(value, name)

    def shard_map(self, eqn: Eqn, operands: list[Value], manual: _Manual) -> Sequence[Value]:
        """The results of a `shard_map`, computed for all shards together."""
        params, mesh = eqn.params, eqn.params["mesh"]
        axes = frozenset(params["newly_manual_axes"])
        sizes = {axis: mesh.shape[axis] for axis in axes}
        within = _Manual(maps=(*manual.maps, (mesh, axes, params["check_vma"])))
        large = [axis for axis in mesh.axis_names if sizes.get(axis, 1) > 1]

        def body(*shards: Value) -> list[Value]:
            return self.run(params["jaxpr"], (), shards, within)

        def marked(values: Sequence[Value], specs: Sequence[PartitionSpec]) -> list[Value]:
            return [
                self.marked(value, spec, mesh.shape, eqn) if any(map(_axes_of, spec)) else value
                for value, spec in zip(values, specs, strict=True)
            ]

        def mapped(varying: bool, *operands: Value) -> list[Value]:
            function = body
            used = [_used(spec) for spec in params["out_specs"]]
            for axis in reversed(large):
                function = jax.vmap(
                    function,
                    in_axes=tuple(
                        0 if axis in _used(spec) else None for spec in params["in_specs"]
                    ),
                    out_axes=[
                        0 if varying or axis in axes_of_result else None for axes_of_result in used
                    ],
                    axis_name=axis,
                    axis_size=sizes[axis],
                )
            shards = [
                _in_shards(value, spec, sizes, large)
                for value, spec in zip(operands, params["in_specs"], strict=True)
            ]
            return [
                _from_shards(value, spec, large, varying)
                for value, spec in zip(function(*shards), params["out_specs"], strict=True)
            ]

        operands = marked(operands, params["in_specs"])
        try:
            if not large:
                results = body(*operands)
            else:
                shapes = list(map(_abstract, operands))
                try:
                    closed = jax.make_jaxpr(partial(mapped, False))(*shapes)
                except ValueError as error:
                    if "out_axes" not in str(error):
                        raise
                    # replication is not checked: the user vouches for it
                    closed = jax.make_jaxpr(partial(mapped, True))(*shapes)
                results = self.run(*open_jaxpr(closed), operands, manual)
        except ShardlibError:
            raise
        except Exception as error:
            raise TracingError(
                f"the shard_map at {user_line(eqn) or 'an unknown line'} over {_text(mesh)} cannot"
                f" be evaluated for all shards together: {type(error).__name__}: {error}\nTry: the"
                " same computation on whole arrays, which a plan shards; or a body of operations"
                " that jax.vmap maps"
            ) from error
        return marked(results, params["out_specs"])


#: The user's spelling of a primitive.
_SPELLINGS: Mapping[str, str] = {
    "sharding_constraint": "with_sharding_constraint",
    "dot_general": "einsum or dot(out_sharding)",
    "jit": "jit(in_shardings, out_shardings)",
    "pjit": "jit(in_shardings, out_shardings)",
    **{name: name for name in ("reshard", "shard_map", "device_put")},
}


def _text(mesh: Any) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def _is_layout(value: Any) -> bool:
    return isinstance(value, NamedSharding) and value.memory_kind in (
        None,
        "device",
        "unpinned_host",
    )


def _axes_of(part: Any) -> tuple[str, ...] | None:
    """The axes of one entry of a `PartitionSpec`; None if it is unconstrained."""
    if part is PartitionSpec.UNCONSTRAINED:
        return None
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _used(spec: PartitionSpec) -> frozenset[str]:
    return frozenset(axis for part in spec for axis in _axes_of(part) or ())


def _on_host(constant: Any) -> Any:
    """A constant or literal of a program; copied to the host if its type has a mesh."""
    if isinstance(constant, Tracer) or not hasattr(constant, "dtype"):
        return constant
    sharding = getattr(getattr(constant, "aval", None), "sharding", None)
    of_mesh = isinstance(getattr(constant, "sharding", None), NamedSharding)
    if not of_mesh and (sharding is None or sharding.mesh.empty):
        return constant
    if isinstance(constant, jax.Array) and not constant.is_fully_addressable:
        return constant
    array = np.asarray(constant)
    weak = getattr(constant.aval, "weak_type", False) and not array.ndim
    scalar = array.item() if weak else array
    return scalar if weak and jax.typeof(scalar).dtype == array.dtype else array


def _in_shards(
    value: Value, spec: PartitionSpec, sizes: Mapping[str, int], large: Sequence[str]
) -> Value:
    """An array as its shards, with a leading dim for each axis that shards it, in the order of
    `large`.
    """
    shape: list[int] = []
    axis_dims: dict[str, int] = {}
    for dim, size in enumerate(np.shape(value)):
        axes = [a for a in _axes_of(spec[dim]) or () if a in large] if dim < len(spec) else []
        for axis in axes:
            axis_dims[axis] = len(shape)
            shape.append(sizes[axis])
        shape.append(size // int(np.prod([sizes[axis] for axis in axes], dtype=int)))
    first = [axis_dims[axis] for axis in large if axis in axis_dims]
    if not first:
        return value
    others = [dim for dim in range(len(shape)) if dim not in first]
    return jax.numpy.reshape(value, shape).transpose(*first, *others)


def _ragged_dot(bind: Function, params: EqnParams) -> Function:
    """A ragged product under `jax.vmap`, which JAX (0.10 and 0.12) supports for few layouts: one
    product for all shards in the layout of a forward pass, otherwise one for each shard.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    forward = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    is_forward = numbers == forward

    @jax.custom_batching.custom_vmap
    def product(*operands: Value) -> Value:
        return bind(*operands)

    @product.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: Value) -> tuple[Value, bool]:
        def shard(index: int) -> list[Value]:
            return [
                operand[index] if is_batched else operand
                for operand, is_batched in zip(operands, batched, strict=True)
            ]

        rows, weights, groups = operands
        if is_forward and list(batched) == [False, True, False]:
            count, inner, width = weights.shape[1:]
            side_by_side = weights.transpose(1, 2, 0, 3).reshape(count, inner, size * width)
            result = product(rows, side_by_side, groups)
            return result.reshape(len(rows), size, width).transpose(1, 0, 2), True
        if not is_forward:
            return jax.numpy.stack([product(*shard(index)) for index in range(size)]), True
        rows, weights, groups = (
            operand if is_batched else jax.numpy.broadcast_to(operand, (size, *operand.shape))
            for operand, is_batched in zip(operands, batched, strict=True)
        )
        # The rows of a shard that are in no group join the last group, and are masked out.
        count, inside = rows.shape[1], groups.sum(1, keepdims=True, dtype=groups.dtype)
        result = product(
            rows.reshape(-1, rows.shape[2]),
            weights.reshape(-1, *weights.shape[2:]),
            groups.at[:, -1:].add(count - inside).reshape(-1),
        ).reshape(size, count, -1)
        within = jax.numpy.arange(count, dtype=groups.dtype)[None, :, None] < inside[..., None]
        return jax.numpy.where(within, result, 0), True

    return product


def _from_shards(value: Value, spec: PartitionSpec, large: Sequence[str], varying: bool) -> Value:
    """The global array of shards. They have leading dims as in `_in_shards`; with `varying`, for
    all axes, and along those that do not shard the array the shards are equal.
    """
    used = _used(spec)
    leading = [axis for axis in large if varying or axis in used]
    for axis in [axis for axis in leading if axis not in used]:
        value = jax.lax.index_in_dim(value, 0, leading.index(axis), keepdims=False)
        leading.remove(axis)
    if not leading:
        return value
    order: list[int] = []
    shape: list[int] = []
    for dim, size in enumerate(np.shape(value)[len(leading) :]):
        axes = [a for a in _axes_of(spec[dim]) or () if a in leading] if dim < len(spec) else []
        order += [*(leading.index(axis) for axis in axes), len(leading) + dim]
        counts = [np.shape(value)[leading.index(axis)] for axis in axes]
        shape.append(size * int(np.prod(counts, dtype=int)))
    return value.transpose(*order).reshape(shape)


def _axis_names(params: EqnParams) -> list[str]:
    """The mesh axes among the parameters of an equation."""
    names: list[str] = []
    for key in ("axes", "axis_name", "axis_names"):
        named = params.get(key, ())
        names += [
            axis
            for axis in (named if isinstance(named, (tuple, list, frozenset)) else (named,))
            if isinstance(axis, str)
        ]
    return names


def _collective(eqn: Eqn, operands: list[Value], sizes: Mapping[str, int]) -> Sequence[Value]:
    """A collective over axes of a `shard_map`; over axes of size 1 it only changes shapes."""
    name, params = eqn.primitive.name, eqn.params
    large = [axis for axis in sizes if sizes[axis] > 1]
    run = _COLLECTIVES.get(name)
    if run is None or params.get("axis_index_groups") is not None:
        what = "groups of devices in " if run is not None else ""
        raise TracingError(
            f"the shard_map at {user_line(eqn) or 'an unknown line'} uses {what}{name} over"
            f" {', '.join(sizes)}, which cannot be written for whole arrays\nTry: one of"
            f" {', '.join(sorted({_PUBLIC_NAMES.get(op, op) for op in _COLLECTIVES}))} over whole"
            " axes, or the same computation without shard_map"
        )
    return run(operands, params, large)


def _reduced(reduce: Function) -> Callable[[list[Value], EqnParams, list[str]], list[Value]]:
    def reduced(value: Value, params: EqnParams, large: list[str]) -> Value:
        for axis in large:
            value = reduce(jax.lax.all_gather(value, axis), axis=0)
        dims = tuple(axis for axis in params["axes"] if isinstance(axis, int))
        return reduce(value, axis=dims) if dims else value

    return lambda operands, params, large: [reduced(value, params, large) for value in operands]


def _sum(value: Value, axis: Any) -> Value:
    return jax.numpy.sum(value, axis=axis, dtype=value.dtype)


def _all_gather(operands: list[Value], params: EqnParams, large: list[str]) -> list[Value]:
    dim, tiled = params["all_gather_dimension"], params["tiled"]

    def gathered(value: Value) -> Value:
        if not tiled:
            value = jax.numpy.expand_dims(value, dim)
        for axis in reversed(large):  # the last axis is the minor one
            value = jax.lax.all_gather(value, axis, axis=dim, tiled=True)
        return value

    return list(map(gathered, operands))


def _reduce_scatter(operands: list[Value], params: EqnParams, large: list[str]) -> list[Value]:
    dim, tiled = params["scatter_dimension"], params["tiled"]

    def scattered(value: Value) -> Value:
        for axis in large:
            value = jax.lax.psum_scatter(value, axis, scatter_dimension=dim, tiled=True)
        return value if tiled else jax.numpy.squeeze(value, dim)

    return list(map(scattered, operands))


def _all_to_all(operands: list[Value], params: EqnParams, large: list[str]) -> list[Value]:
    split, concat = params["split_axis"], params["concat_axis"]

    def exchanged(value: Value) -> Value:
        if len(large) > 1:
            raise NotImplementedError("all_to_all over several mesh axes at once")
        if large:
            return jax.lax.all_to_all(
                value, large[0], split_axis=split, concat_axis=concat, tiled=params["tiled"]
            )
        return value if params["tiled"] else jax.numpy.moveaxis(value, split, concat)

    return list(map(exchanged, operands))


def _ppermute(operands: list[Value], params: EqnParams, large: list[str]) -> list[Value]:
    if len(large) > 1:
        raise NotImplementedError("ppermute over several mesh axes at once")
    if large:
        return [jax.lax.ppermute(operand, large[0], params["perm"]) for operand in operands]
    return [operand if params["perm"] else jax.numpy.zeros_like(operand) for operand in operands]


def _axis_index(operands: list[Value], params: EqnParams, large: list[str]) -> list[Value]:
    return [jax.lax.axis_index(large[0]) if large else jax.numpy.int32(0)]


#: Collectives supported: (operands, parameters, mesh axes larger than 1) -> results.
_COLLECTIVES: Mapping[str, Callable[[list[Value], EqnParams, list[str]], list[Value]]] = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant"), _reduced(_sum)),
    "pmax": _reduced(jax.numpy.max),
    "pmin": _reduced(jax.numpy.min),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _all_gather),
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "axis_index": _axis_index,
}
_PUBLIC_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("psum2", "psum_invariant"), "psum"),
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "psum_scatter",
}
