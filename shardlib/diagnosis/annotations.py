"""Where a model of Flax says how a parameter is sharded, and the same with other axes.

A parameter that should be stored in another sharding is an argument of the function, and its
sharding often follows from an annotation in the model: `nn.with_partitioning`,
`nn.with_logical_partitioning`, `kernel_metadata` or `out_sharding` of NNX. It stands where the
layer or the parameter is made, which is found from the line that uses the parameter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from linecache import getlines

from shardlib.diagnosis.edits import Spec, entries
from shardlib.diagnosis.source import Frame, is_users

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
    made: dict[str, ast.Call] = {}
    for scope in around:
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made |= {ast.unparse(target): node.value for target in node.targets}
    start = frame.line, frame.column
    used = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.expr)
        and start <= (node.lineno, node.col_offset)
        and (node.end_lineno, node.end_col_offset) <= (frame.last_line, frame.last_column)
    ]
    for node in used:
        call = node if isinstance(node, ast.Call) else made.get(ast.unparse(node))
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
    said: Mapping[str, ast.expr] = keywords if is_leaf else {}
    if isinstance(metadata, ast.Dict):
        said = {
            key.value: value
            for key, value in zip(metadata.keys, metadata.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        }
    elif isinstance(metadata, ast.Call):
        said = {word.arg: word.value for word in metadata.keywords if word.arg}
    for key in _AXES:
        if key in said:
            yield from _literal(said[key])


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
