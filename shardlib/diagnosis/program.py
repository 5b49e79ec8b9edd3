"""A user's function as a serialised program, and the mesh that it is for.

The function is traced here, as `jax.jit` would trace it, with shapes in the place of its arrays:
nothing runs, and no compiler is loaded.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib import _jax_compat
from shardlib.annotation.trees import Tree
from shardlib.diagnosis.edits import Edit, Spec, edited
from shardlib.diagnosis.source import error_text
from shardlib.errors import ArgumentError, TracingError
from shardlib.layout import MESH_AXES, MeshShape
from shardlib.verification.isolation import unstable_calls

AnyMesh = Mesh | AbstractMesh
#: Frames of an operation, the innermost first, that a program keeps.
MOST_FRAMES = 100


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An array that the function takes.

    Attributes:
        name: as Python spells it: "params['up']".
        spec: how it is sharded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec


@dataclass(frozen=True, kw_only=True)
class Result:
    """An array that the function returns.

    Attributes:
        name: its path in what is returned: "[0]['up']"; of what the function has put into an
            argument, the name of that.
        spec: its sharding in its type, which explicit mode has.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec


@dataclass(frozen=True, kw_only=True)
class TracedFunction:
    """A function of arrays, traced and lowered for a platform.

    Attributes:
        name: of the function.
        program: the serialised program over its flat arrays.
        module: the same as text of StableHLO, with its source lines.
        results: in the order of the program.
        mesh: (axis, size), the first axis major.
        arguments: in the order of the program.
        donated: numbers of the arguments that are donated.
        kinds: "Auto", "Explicit" or "Manual" of every axis.
        mapped: edit that was made -> how many dims of its value its line does not see.
    """

    name: str
    program: bytes
    module: str
    results: tuple[Result, ...]
    mesh: tuple[tuple[str, int], ...]
    arguments: tuple[Argument, ...]
    donated: tuple[int, ...]
    kinds: tuple[str, ...]
    mapped: Mapping[Edit, int] = field(default_factory=dict[Edit, int])

    @property
    def explicit(self) -> bool:
        """Whether the mesh has axes of explicit mode."""
        return AxisType.Explicit.name in self.kinds

    @property
    def shape(self) -> MeshShape:
        """The mesh in shardlib's axes: the first axis of the user's is the first of those; without
        axes of size 1.
        """
        sizes = dict(self.mesh)
        return MeshShape({axis: sizes[name] for axis, name in self.axis_names.items()})

    @property
    def axis_names(self) -> Mapping[str, str]:
        """Axis of `shape` -> the user's axis."""
        names = [name for name, size in self.mesh if size > 1]
        return dict(zip(MESH_AXES, names, strict=False))


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function with its arguments, as `shardlib.why` is given them.

    Attributes:
        function: plain or jitted.
        arguments: arrays or `jax.ShapeDtypeStruct`s, with or without shardings, in any trees.
        mesh: a mesh, {axis: size}, or "data=4,model=2"; None for that of the arrays or of the
            context.
        in_shardings, out_shardings: as `jax.jit` takes them; None for those of the arrays.
    """

    function: Callable[..., Any]
    arguments: tuple[Tree, ...]
    keywords: Mapping[str, Tree]
    mesh: AnyMesh | Mapping[str, int] | str | None = None
    in_shardings: Any = None
    out_shardings: Any = None


def mesh_of(request: AnyMesh | Mapping[str, int] | str) -> AnyMesh:
    """A mesh of a call; one without devices where only sizes are known.

    >>> dict(mesh_of("data=4,model=2").shape)
    {'data': 4, 'model': 2}
    """
    if isinstance(request, Mesh | AbstractMesh):
        return request
    if isinstance(request, str):
        pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part) for part in request.split(",")]
        if not all(pairs):
            raise ArgumentError(
                f"mesh {request!r} is not a list of axes and sizes\nTry: mesh='data=4,model=2'"
            )
        sizes = {pair[1]: int(pair[2]) for pair in pairs if pair}
        if len(sizes) != len(pairs):
            raise ArgumentError(f"mesh {request!r} names an axis twice\nTry: mesh='data=4,model=2'")
    else:
        sizes = dict(request) if isinstance(request, Mapping) else {}
    wrong = [size for size in sizes.values() if isinstance(size, bool) or not isinstance(size, int)]
    if not sizes or wrong or min(sizes.values()) < 1:
        raise ArgumentError(
            f"mesh {request!r} does not give axes sizes of at least 1\nTry:"
            " mesh={'data': 4, 'model': 2}, or a jax.sharding.Mesh"
        )
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def trace(call: Call, platform: str, mesh: AnyMesh, edits: Sequence[Edit] = ()) -> TracedFunction:
    """Traces a function and lowers it for a platform that need not be here.

    Args:
        platform: "tpu", "cuda" or "cpu".
        edits: of the user's program, which are made while it is traced.

    Raises:
        TracingError: the function does not trace or lower.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(_structs(call, mesh))
    leaves = [leaf for _, leaf in paths]
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    names = argument_names(call, [paths[i][0] for i in arrays])
    name, result_names = _function_name(call.function), list[str]()
    for edit in edits:
        for number in (arrays[argument] for argument in edit.arguments):
            leaves[number] = _struct(leaves[number], PartitionSpec(*edit.entries), mesh)

    def flat(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        positional, keywords = tree.unflatten(filled)
        result = call.function(*positional, **keywords)
        if call.out_shardings is not None:
            result = _constrained(result, call.out_shardings, mesh)
        # what the function has put into its arguments, such as modules of NNX, are results, too
        before = set(map(id, filled))
        trees = jax.tree_util.tree_leaves_with_path((positional, keywords))
        after = [(path, x) for path, x in trees if id(x) not in before]
        returned = jax.tree_util.tree_leaves_with_path(result)
        result_names[:] = [jax.tree_util.keystr(path) for path, _ in returned]
        result_names.extend(argument_names(call, [path for path, _ in after]))
        return [x for _, x in (*returned, *after)]

    flat.__name__ = flat.__qualname__ = name
    _stand_for(flat, call.function)
    program, data, donated = None, b"", list[int]()
    mapped: Mapping[Edit, int] = {}
    errors = list[Exception]()
    for context in _contexts(call, mesh):
        with context(), edited(edits, mesh) as made, _all_frames():
            mapped = made
            try:
                donated = _donated(call, tree.unflatten(leaves))
                program = export.export(
                    jax.jit(flat, keep_unused=True),
                    platforms=[platform],
                    disabled_checks=unstable_calls(),
                )(*(leaves[i] for i in arrays))
                data = bytes(program.serialize())
                break
            except Exception as error:
                errors.append(error)
    else:
        raise _not_lowered(name, platform, errors[0], names) from errors[0]
    if program.nr_devices == 1:
        raise _unsharded(name)
    return TracedFunction(
        name=name,
        program=data,
        module=program.mlir_module(),
        results=tuple(
            Result(
                name=name,
                shape=tuple(aval.shape),
                dtype=str(aval.dtype),
                spec=spec_of(aval.sharding, len(aval.shape)),
            )
            for name, aval in zip(result_names, program.out_avals, strict=True)
        ),
        mesh=tuple((str(axis), int(size)) for axis, size in mesh.shape.items()),
        arguments=tuple(
            Argument(
                name=names[k],
                shape=tuple(leaves[i].shape),
                dtype=str(leaves[i].dtype),
                spec=spec_of(leaves[i].sharding, len(leaves[i].shape)),
            )
            for k, i in enumerate(arrays)
        ),
        donated=tuple(arrays.index(i) for i in donated if i in arrays),
        kinds=tuple(kind.name for kind in mesh.axis_types),
        mapped=mapped,
    )


@contextmanager
def _all_frames() -> Iterator[None]:
    """A context in which operations are lowered with as many frames as lie between them and the
    user's line: a layer of Flax has more than the ten that JAX keeps.
    """
    name = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, name)
    jax.config.update(name, MOST_FRAMES)
    try:
        yield
    finally:
        jax.config.update(name, limit)


def find_mesh(call: Call) -> AnyMesh:
    """The mesh of a call: as it is given, of the arrays, of the context, or of the function's own
    layouts.

    Raises:
        ArgumentError: the meshes differ in their axes or sizes.
        TracingError: there is none.
    """
    asked = None if call.mesh is None else mesh_of(call.mesh)
    of_arrays = [
        sharding.mesh
        for leaf in jax.tree.leaves(
            (call.arguments, call.keywords, call.in_shardings, call.out_shardings)
        )
        if isinstance(
            sharding := leaf
            if isinstance(leaf, NamedSharding)
            else getattr(leaf, "sharding", None),
            NamedSharding,
        )
        and not sharding.mesh.empty
    ]
    if asked is not None and (
        other := next((m for m in of_arrays if m.shape != asked.shape), None)
    ):
        raise ArgumentError(
            f"mesh is {dict(asked.shape)}, and arrays are sharded over a mesh"
            f" {dict(other.shape)}\nTry: leave mesh out, or make the arrays' shardings for it"
        )
    context = _context_mesh()
    for mesh in (*of_arrays, asked, context):
        if mesh is not None:
            return mesh
    structs = _structs(call, None)
    leaves = jax.tree_util.tree_leaves_with_path(structs)
    arrays = [(path, leaf) for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    try:
        traced = jax.jit(_without_statics(call.function, structs)).trace(
            *(leaf for _, leaf in arrays)
        )
    except Exception as error:
        names = argument_names(call, [path for path, _ in arrays])
        raise TracingError(
            f"{_function_name(call.function)} does not trace{error_text(error, names)}\nTry: call"
            " it with these arguments under jax.eval_shape first"
        ) from error
    mesh = next(_meshes(traced.jaxpr), None)
    if mesh is None:
        raise _unsharded(_function_name(call.function))
    return mesh


def _stand_for(flat: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Lets a function of flat arrays have the place of the user's in messages of JAX."""
    vars(flat).update(__wrapped__=function, __signature__=inspect.signature(flat))


def _not_lowered(name: str, platform: str, error: Exception, names: Sequence[str]) -> TracingError:
    message = str(error)
    if "host_callbacks" in message or "require devices to be present" in message:
        return TracingError(
            f"{name} calls Python while it runs (jax.debug.print, jax.debug.callback,"
            " jax.pure_callback, jax.experimental.io_callback), and such a program cannot be"
            f" compiled in another process: {message[:200]}\nTry: a copy of {name} without its"
            " callbacks, or with zeros of the same shape for what they return"
        )
    return TracingError(
        f"{name} does not lower for {platform}{error_text(error, names)}\nTry:"
        f" call it as {name}(*arguments) under jax.jit here first"
    )


def _unsharded(name: str) -> TracingError:
    return TracingError(
        f"nothing in {name} is sharded: its arguments have no NamedSharding and it makes no"
        " sharding constraint, so it runs on one device and communicates nothing\nTry: arguments"
        " jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P('data'))), or"
        " in_shardings= and mesh="
    )


def _without_statics(function: Callable[..., Any], structs: Tree) -> Callable[..., Any]:
    leaves, tree = jax.tree.flatten(structs)

    def flat(*values: Any) -> Any:
        iterator = iter(values)
        filled = [next(iterator) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        positional, keywords = tree.unflatten(filled)
        return jax.tree.leaves(function(*positional, **keywords))

    _stand_for(flat, function)
    return flat


def _meshes(jaxpr: Any) -> Iterator[AnyMesh]:
    """Meshes of the layouts and manual regions of a program."""
    equations, _ = _jax_compat.open_jaxpr(jaxpr)
    for equation in equations.eqns:
        for value in equation.params.values():
            if isinstance(value, NamedSharding) and not value.mesh.empty:
                yield value.mesh
            elif isinstance(value, Mesh | AbstractMesh) and not value.empty:
                yield value
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _meshes(inner)


def _context_mesh() -> AnyMesh | None:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def _contexts(call: Call, mesh: AnyMesh) -> list[Callable[[], AbstractContextManager[object]]]:
    """Contexts to trace a function in, the next where it fails: that of the user, in which layers
    of Flax put nothing anywhere where it has no mesh, and one with this mesh; the other way round
    where the call names the mesh.
    """
    if _context_mesh() is not None:
        return [nullcontext]
    contexts = [nullcontext, functools.partial(_jax_compat.in_mesh, mesh)]
    return contexts if call.mesh is None else contexts[::-1]


def _structs(call: Call, mesh: AnyMesh | None) -> Tree:
    """(arguments, keywords) with shapes in the place of arrays, and the shardings of the call."""
    values = (call.arguments, dict(call.keywords))
    if call.in_shardings is None:
        return jax.tree.map(lambda leaf: _struct(leaf, None, mesh), values)
    asked = call.in_shardings
    prefix = asked if isinstance(asked, tuple) and not _is_sharding(asked) else (asked,)
    if len(prefix) == 1 and len(call.arguments) > 1 and not isinstance(asked, tuple):
        prefix = prefix * len(call.arguments)
    try:
        shardings = jax.tree.broadcast(
            tuple(prefix), call.arguments, is_leaf=lambda x: x is None or _is_sharding(x)
        )
    except ValueError as error:
        raise ArgumentError(
            f"in_shardings do not fit the arguments: {error}\nTry: one entry per argument: a"
            " NamedSharding, a PartitionSpec, None, or a tree of those"
        ) from error
    positional = jax.tree.map(
        lambda sharding, leaf: _struct(leaf, sharding, mesh),
        shardings,
        call.arguments,
        is_leaf=lambda x: x is None or _is_sharding(x),
    )
    return positional, jax.tree.map(lambda leaf: _struct(leaf, None, mesh), values[1])


def _is_sharding(value: Any) -> bool:
    return isinstance(value, jax.sharding.Sharding | PartitionSpec)


def _struct(leaf: Any, asked: Any, mesh: AnyMesh | None) -> Any:
    """The shape of an array; what is not an array stays."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    if asked is not None and not _is_sharding(asked):
        raise ArgumentError(
            f"in_shardings has {asked!r}, not a sharding\nTry: jax.P('data'), a NamedSharding, or"
            " None, one per argument or in trees like theirs"
        )
    sharding = asked if asked is not None else getattr(leaf, "sharding", None)
    if isinstance(sharding, PartitionSpec):
        if mesh is None:
            raise ArgumentError(
                f"in_shardings has the PartitionSpec {sharding}, and there is no mesh\nTry:"
                " mesh='data=4,model=2'"
            )
        try:
            placed = NamedSharding(mesh, sharding)
            placed.check_compatible_aval(leaf.shape)
        except Exception as error:  # JAX has errors of its own for axes that are named twice
            raise ArgumentError(
                f"in_shardings has {sharding} for an array of shape {leaf.shape}, and the mesh is"
                f" {dict(mesh.shape)}: {error}\nTry: axes of the mesh:"
                f" {', '.join(map(str, mesh.shape))}, each once"
            ) from error
        sharding = placed
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        sharding = None
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False)
    )


def _constrained(result: Tree, out_shardings: Any, mesh: AnyMesh) -> Tree:
    shardings = jax.tree.broadcast(
        out_shardings, result, is_leaf=lambda x: x is None or _is_sharding(x)
    )

    def constrained(sharding: Any, leaf: Any) -> Any:
        if sharding is None:
            return leaf
        if isinstance(sharding, PartitionSpec):
            sharding = NamedSharding(mesh, sharding)
        return jax.lax.with_sharding_constraint(leaf, sharding)

    return jax.tree.map(
        constrained, shardings, result, is_leaf=lambda x: x is None or _is_sharding(x)
    )


def _donated(call: Call, structs: Tree) -> list[int]:
    """Numbers of the flat leaves that a jitted function donates."""
    if not hasattr(call.function, "trace"):
        return []
    positional, keywords = structs
    traced = call.function.trace(*positional, **keywords)
    flags = [leaf.donated for leaf in jax.tree.leaves(getattr(traced, "args_info", ()))]
    leaves = jax.tree.leaves(structs)
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    for numbers in (arrays, range(len(leaves))):  # static arguments are not in `args_info`
        if len(flags) == len(numbers):
            return [i for i, flag in zip(numbers, flags, strict=True) if flag]
    return []


def _function_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "") or type(function).__name__
    return re.sub(r"\W", "_", name)


def argument_names(call: Call, paths: Sequence[Any]) -> list[str]:
    """Names of arrays of (arguments, keywords) as Python spells them in the function.

    Args:
        paths: the paths of the arrays.
    """
    try:
        parameters = list(inspect.signature(call.function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = list[str]()
    for path in paths:
        group, number = path[0].idx, path[1]
        if group == 1:
            first = str(number.key)
        else:
            named = number.idx < len(parameters) and parameters[number.idx].kind in (
                inspect.Parameter.POSITIONAL_ONLY,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
            )
            first = parameters[number.idx].name if named else f"args[{number.idx}]"
        names.append(first + jax.tree_util.keystr(path[2:]))
    return names


def spec_of(sharding: Any, rank: int) -> Spec:
    """A partition spec as axes of each dim."""
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    axes = tuple(
        ()
        if entry is None or entry is PartitionSpec.UNCONSTRAINED
        else (entry,)
        if isinstance(entry, str)
        else tuple(entry)
        for entry in spec
    )
    return (*axes, *((),) * (rank - len(axes)))
