"""Edits of a user's program that are made while it is traced, as if its source had them: a layout
around an expression, another sharding of an argument, a layout left out, an operation run by each
device on its part.

JAX binds a primitive for every operation that it traces. While edits are tried, `bind` looks
whether the expression of the user's that it runs for is one of them. So a layout is there before
the program is differentiated, and its transpose lays out the cotangent, as it would in the source.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from linecache import getlines
from types import FrameType
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.diagnosis.source import Frame, around, expression, is_users

#: The mesh axes that shard each dim; an entry may be a part of an axis, "data:(1)2".
Spec = tuple[tuple[str, ...], ...]
#: Primitives of layouts that a program writes.
LAYOUTS = ("sharding_constraint", "reshard")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """An edit of a program.

    Attributes:
        spec: the layout: of the value of the expression at `frame`, or of the argument.
        frame: the expression; None for an argument.
        shape: of its value.
        arguments: numbers of the arguments, of which all are stored so; () for an expression.
        name: of the arguments, or of the operation that each device runs on its part.
        removes: True for a layout that is left out; `spec` is what is there without it.
        manual: True for an operation of one operand that each device runs on its part
            (`jax.shard_map`); `spec` and `shape` are those of the operand.
        written: the spec in the line, where the expression turns the dims of what it takes.
    """

    spec: Spec
    frame: Frame | None = None
    shape: tuple[int, ...] = ()
    arguments: tuple[int, ...] = ()
    name: str = ""
    removes: bool = False
    manual: bool = False
    written: Spec | None = None

    @property
    def entries(self) -> list[str | tuple[str, ...] | None]:
        """The spec as `jax.sharding.PartitionSpec` takes it; without None at its end."""
        return entries(self.spec)

    @property
    def place(self) -> str:
        """The line to edit."""
        return self.frame.place if self.frame else f"the sharding of {self.name}"

    def text(self, explicit: bool, mapped: int = 0) -> str:
        """The line as it should be, or the new sharding of the argument.

        Args:
            explicit: whether the mesh is of explicit mode.
            mapped: how many of the first dims the line does not see, as `jax.vmap` adds them.
        """
        if mapped:
            names = ", ".join(map(repr, filter(None, entries(self.spec[:mapped]))))
            line = replace(self, spec=self.spec[mapped:]).text(explicit)
            return f"{line}  # under jax.vmap(..., spmd_axis_name={names})" if names else line
        spec = f"jax.P({', '.join(map(repr, self.entries))})"
        if self.frame is None:
            return f"{self.name}: {spec}"
        inner = expression(self.frame)
        before, after = around(self.frame)
        if self.removes:
            line = before + _first_argument(inner) + after
            nothing = re.fullmatch(r"([\w.]+) = \1\s*(#.*)?", line)
            return "# without this line" if nothing else line
        if self.manual:
            listed = entries(self.spec if self.written is None else self.written)
            spec = f"jax.P({', '.join(map(repr, listed))})"
            return before + _by_part(inner, spec) + after
        layout = "jax.sharding.reshard" if explicit else "jax.lax.with_sharding_constraint"
        if target := re.match(r"([\w.]+)\s*[-+*/@%&|^<>]+=\s", inner):  # an update, not a value
            return f"{inner}; {target[1]} = {layout}({target[1]}, {spec})"
        return f"{before}{layout}({inner}, {spec}){after}"


def entries(spec: Spec) -> list[str | tuple[str, ...] | None]:
    """A spec as `jax.sharding.PartitionSpec` takes it; without None at its end."""
    axes = [None if not a else a[0] if len(a) == 1 else a for a in spec]
    while axes and axes[-1] is None:
        axes.pop()
    return axes


def _first_argument(call: str) -> str:
    """The value that a call lays out.

    >>> _first_argument("jax.lax.with_sharding_constraint(x @ w, spec)")
    'x @ w'
    """
    try:
        tree = ast.parse(call, mode="eval").body
    except SyntaxError:
        return f"...  # without {call}"
    if isinstance(tree, ast.Call) and tree.args:
        return ast.unparse(tree.args[0])
    return f"...  # without {call}"


def _by_part(call: str, spec: str) -> str:
    """A call that each device makes with its part of the first argument.

    >>> _by_part("top_k(x[0], 8)", "P('data')")
    "jax.shard_map(lambda x: top_k(x, 8), mesh=mesh, in_specs=P('data'), out_specs=P('data'))(x[0])"
    """
    specs = f"mesh=mesh, in_specs={spec}, out_specs={spec}"
    try:
        tree = ast.parse(call, mode="eval").body
    except SyntaxError:
        tree = None
    if not isinstance(tree, ast.Call) or not tree.args:
        return f"jax.shard_map(lambda x: ..., {specs})  # of {call}"
    argument = ast.unparse(tree.args[0])
    tree.args[0] = ast.Name("x")
    return f"jax.shard_map(lambda x: {ast.unparse(tree)}, {specs})({argument})"


_BIND = Primitive.bind


class _Tried(NamedTuple):
    """What is tried: `made` counts how often each edit was made, `mapped` are the dims that its
    line does not see.
    """

    mesh: Mesh | AbstractMesh
    edits: Sequence[Edit]
    made: Counter[Edit]
    mapped: dict[Edit, int]


#: What is tried in this process; tracing is done by one thread at a time.
_STATE: list[_Tried] = []


@contextmanager
def edited(edits: Sequence[Edit], mesh: Mesh | AbstractMesh) -> Iterator[Mapping[Edit, int]]:
    """A context in which functions are traced with edits; clears JAX's caches of traced functions
    before and after, where there are edits of expressions.

    Yields:
        Edit -> how many of the first dims its line does not see, of those that were made.
    """
    tried = _Tried(mesh, [edit for edit in edits if edit.frame is not None], Counter(), {})
    if not tried.edits:
        yield tried.mapped
        return
    jax.clear_caches()
    _STATE.append(tried)
    Primitive.bind = _bind
    try:
        yield tried.mapped
    finally:
        _STATE.pop()
        Primitive.bind = _BIND
        jax.clear_caches()


@functools.wraps(_BIND)
def _bind(self: Primitive, *arguments: Any, **parameters: Any) -> Any:
    state = _STATE[-1] if _STATE else None
    if state is None:
        return _BIND(self, *arguments, **parameters)
    mesh, edits, made, mapped = state
    nothing, before = _Tried(mesh, (), Counter(), {}), made.copy()
    if self.name in LAYOUTS:
        if any(edit.removes and _runs(edit) for edit in edits):
            return arguments[0]
        return _BIND(self, *arguments, **parameters)
    for edit in edits:
        is_named = edit.name in (self.name, parameters.get("name"))
        shapes = [getattr(value, "shape", None) for value in arguments]
        if edit.manual and is_named and shapes == [edit.shape] and _runs(edit):
            spec = PartitionSpec(*edit.entries)
            _STATE.append(nothing)
            try:
                called = parameters.get("jaxpr")  # a function that JAX has traced for whole arrays
                by_part = (
                    jaxpr_as_fun(called)
                    if isinstance(called, ClosedJaxpr)
                    else functools.partial(_BIND, self, **parameters)
                )
                mapped_over = jax.shard_map(by_part, mesh=mesh, in_specs=spec, out_specs=spec)
                return mapped_over(*arguments)
            finally:
                _STATE.pop()
    result = _BIND(self, *arguments, **parameters)
    results = list(result) if isinstance(result, list | tuple) else [result]
    shapes = [getattr(value, "shape", None) for value in results]
    for edit in edits:
        if edit.removes or edit.manual:
            continue
        if edit.shape in shapes and _runs(edit):
            made[edit] += 1
            _STATE.append(nothing)  # the layout itself is bound as it is
            try:
                results = [
                    _laid_out(value, edit, mesh) if shape == edit.shape else value
                    for value, shape in zip(results, shapes, strict=True)
                ]
            finally:
                _STATE.pop()
        elif made[edit] > before[edit]:  # bound by a rule of vmap's, with more dims than here
            hidden = (len(edit.shape) - len(shape) for shape in shapes if shape is not None)
            fits = [n for n in hidden if n > 0 and edit.shape[n:] in shapes and _runs(edit)]
            mapped[edit] = max([mapped.get(edit, 0), *fits])
    return type(result)(results) if isinstance(result, list | tuple) else results[0]


def _laid_out(value: Any, edit: Edit, mesh: Mesh | AbstractMesh) -> Any:
    spec = PartitionSpec(*edit.entries)
    if any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(value, NamedSharding(mesh, spec))
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def _runs(edit: Edit) -> bool:
    """Returns whether the user's innermost line that runs now is the edit's expression; not within
    a function of a library's that JAX traces once for all lines that call it.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_name.startswith("trace_to_jaxpr"):
            return False
        frame = frame.f_back
    if frame is None or edit.frame is None or frame.f_code.co_filename != edit.frame.file:
        return False
    positions = list(frame.f_code.co_positions())
    line, _, column, _ = positions[frame.f_lasti // 2]
    return (line, column) == (edit.frame.line, edit.frame.column)


# --------------------------------------------------------------------------------------------------
# Where a model of Flax says how a parameter is sharded, and the same with other axes.
#
# A parameter that should be stored in another sharding is an argument of the function, and its
# sharding often follows from an annotation in the model: `nn.with_partitioning`,
# `nn.with_logical_partitioning`, `kernel_metadata` or `out_sharding` of NNX. It stands where the
# layer or the parameter is made, which is found from the line that uses the parameter.

#: Functions whose second argument has the axes of what the first makes.
_PARTITIONED = ("with_partitioning", "with_logical_partitioning")
#: Keywords and keys that have the axes.
_AXES = ("out_sharding", "sharding", "sharding_names")
#: Names of the arrays in boxes and variables.
_INNER = ("value", "raw_value", "get_value")
Axes = tuple[str, ...]


def annotated(
    argument: str,
    stored: Spec,
    spec: Spec,
    frames: Iterable[Frame],
    axes: Iterable[str],
    rules: Sequence[tuple[str, str | Axes | None]],
) -> tuple[Frame, str] | None:
    """The line that says how an argument is sharded, and its text with another sharding; None
    where no line is found, or where it cannot say it.

    Args:
        argument: its name, as Python spells it.
        stored: its sharding; a line that says another one is not of it.
        spec: the other sharding.
        frames: where it is used.
        axes: of the mesh.
        rules: (logical axis, mesh axes), for annotations with logical axes.
    """
    keys = [key for key in re.findall(r"\w+", argument) if key not in _INNER]
    for frame in frames:
        if not is_users(frame.file):
            continue
        text = "".join(lines := getlines(frame.file))
        for node in _annotations(text, frame, keys[-1]):
            written = _written(node)
            offset = len(spec) - len(written)
            if offset not in (0, 1) or any(spec[:offset]):  # layers of a loop are one dim more
                continue
            named = _Names(written, axes, rules)
            names = named.of(spec[offset:])
            if names is None or not named.says(stored[offset:]):
                continue
            old = ast.get_source_segment(text, node) or ""
            new = ", ".join(map(repr, names)) + ("," if len(names) == 1 else "")
            call = f"{ast.unparse(node.func)}" if isinstance(node, ast.Call) else ""
            new = new.replace("'", '"') if '"' in old else new
            line = lines[node.lineno - 1].strip()
            place = Frame(frame.file, node.lineno, node.col_offset)
            return place, line.replace(
                old, f"{call}({new})", 1
            ) if old in line else f"{call}({new})"
    return None


def _written(node: ast.expr) -> list[str | Axes | None]:
    elements = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
    return [ast.literal_eval(element) for element in elements]


class _Names:
    """The names that an annotation is written in: mesh axes, or logical axes with their rules."""

    def __init__(
        self,
        written: Sequence[str | Axes | None],
        axes: Iterable[str],
        rules: Sequence[tuple[str, str | Axes | None]],
    ) -> None:
        used = [n for entry in written for n in (entry if isinstance(entry, tuple) else (entry,))]
        self.written, self.is_mesh = written, {*used} <= {*axes, None}
        self.meant = [(name, _axes(over)) for name, over in rules]

    def says(self, spec: Spec) -> bool:
        """Returns whether the annotation says a sharding."""
        return all(
            _axes(entry) == dim
            if self.is_mesh or entry is None
            else (entry, dim) in self.meant or not (dim or dict(self.meant).get(str(entry)))
            for entry, dim in zip(self.written, spec, strict=True)
        )

    def of(self, spec: Spec) -> list[str | Axes | None] | None:
        """A sharding in these names; None where no rule gives one of its axes."""
        if self.is_mesh:
            return [*entries(spec), *(None for _ in spec)][: len(spec)]
        names = list[str | Axes | None]()
        for dim, entry in zip(spec, self.written, strict=True):
            choices = [name for name, over in self.meant if over == dim]
            if dim and not choices:
                return None
            names.append(entry if entry in choices else choices[0] if dim else None)
        return names


def _axes(entry: str | Axes | None) -> Axes:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _annotations(text: str, frame: Frame, leaf: str) -> Iterator[ast.expr]:
    """The axes of what the expression of a frame uses, as the program writes them."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and node.lineno <= frame.line <= (node.end_lineno or node.lineno)
    ]
    assigned: dict[str, ast.Call] = {}
    for scope in around:
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                assigned |= {ast.unparse(target): node.value for target in node.targets}
    start = frame.line, frame.column
    used = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.expr)
        and start <= (node.lineno, node.col_offset)
        and (node.end_lineno, node.end_col_offset) <= (frame.last_line, frame.last_column)
    ]
    for node in used:
        call = node if isinstance(node, ast.Call) else assigned.get(ast.unparse(node))
        name = "" if isinstance(node, ast.Call) else ast.unparse(node).rpartition(".")[2]
        if call is not None:
            yield from _axes_of(call, leaf, name)


def _axes_of(call: ast.Call, leaf: str, name: str) -> Iterator[ast.expr]:
    """The axes that a call says of an array `leaf` that it makes, or of its value, which is called
    `name`.
    """
    keywords = {word.arg: word.value for word in call.keywords if word.arg}
    is_leaf = name == leaf or (
        bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == leaf
    )
    for value in (keywords.get(f"{leaf}_init"), *(call.args if is_leaf else ())):
        if isinstance(value, ast.Call) and _called(value) in _PARTITIONED and len(value.args) > 1:
            yield from _literal(value.args[1])
    metadata = keywords.get(f"{leaf}_metadata")
    words: Mapping[str, ast.expr] = keywords if is_leaf else {}
    if isinstance(metadata, ast.Dict):
        words = {
            key.value: value
            for key, value in zip(metadata.keys, metadata.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        }
    elif isinstance(metadata, ast.Call):
        words = {word.arg: word.value for word in metadata.keywords if word.arg}
    for key in _AXES:
        if key in words:
            yield from _literal(words[key])


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _literal(node: ast.expr) -> Iterator[ast.expr]:
    """The node where it is a tuple, a list or a PartitionSpec of names."""
    is_spec = isinstance(node, ast.Call) and _called(node) in ("P", "PartitionSpec")
    try:
        if is_spec or isinstance(node, ast.Tuple | ast.List):
            _written(node)
            yield node
    except ValueError:
        return
