"""Logical axis names that a user has written on arrays, in all spellings of Flax and JAX.

Boxes of Linen (`nn.Partitioned`, `nn.LogicallyPartitioned`), metadata of NNX variables, and trees
of names beside the arrays are read alike, whether they stand in a model or in the state of a step.
The names of an array become one tuple with one entry per dim. A dim that merges two named dims has
both names in a tuple; it becomes one name joined by "+", which rules may mention like any other:

>>> spelled(("embed", ("heads", "head_dim"), None))
('embed', 'heads+head_dim', None)

Fewer names than dims are those of the leading dims, as Flax reads them:

>>> of_dims(("embed", "kv"), 3)
('embed', 'kv', None)

A dim that `nnx.vmap` or `nnx.scan` adds without `nnx.PARTITION_NAME` gets no name from Flax, which
reads the names one dim too far to the left then; such dims are found by `stack_dims`, and called
"layers".
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
from flax import nnx
from flax.core import meta
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardlib import _jax_compat
from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.axes import LogicalAxes
from shardlib.errors import AnnotationError, raise_all
from shardlib.jax_types import Jaxpr, Value
from shardlib.report import Finding, diagnostic

#: The name that a stacking dim gets when the user gave it none.
STACK = "layers"
#: Keys of metadata under which Flax keeps names, the current one first.
KEYS: tuple[str, ...] = ("out_sharding", "sharding", "sharding_names")
#: Arrays that a message names.
NAMED = 12


def spelled(names: object) -> LogicalAxes:
    """Returns one name or None per dim that has one."""
    names = getattr(names, "sharding", names)
    spec = names.spec if isinstance(names, NamedSharding) else names
    if isinstance(spec, str) or not isinstance(spec, (tuple, list, PartitionSpec)):
        raise TypeError(f"{spec!r} is no tuple of logical axes")
    return tuple(_one_dim(entry) for entry in spec)


def _one_dim(entry: Any) -> str | None:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return None
    if isinstance(entry, str):
        return entry
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        return "+".join(entry) or None
    raise TypeError(
        f"{entry!r} is no logical axis; write a string, None, or a tuple of strings for a"
        " merged dim"
    )


def of_dims(names: LogicalAxes, rank: int, stacks: Sequence[int] = ()) -> LogicalAxes:
    """One name or None for each of `rank` dims."""
    remaining = iter(names)
    called = stacks[0] if stacks and STACK not in names else None
    axes = [
        (STACK if dim == called else None) if dim in stacks else next(remaining, None)
        for dim in range(rank)
    ]
    return (*axes, *remaining)


def holds_names(node: object) -> bool:
    """Whether a node of a tree is a box of Linen or a variable of NNX."""
    return isinstance(node, (meta.AxisMetadata, nnx.Variable))


def written(tree: Tree) -> list[object]:
    """What boxes and variables say of every leaf of a tree, in the order of its leaves; None of
    most.
    """
    return [
        _names(holder)
        for holder in jax.tree.leaves(tree, is_leaf=holds_names)
        for _ in jax.tree.leaves(holder)
    ]


def _names(holder: Any) -> object:
    if not holds_names(holder):
        return None
    if hasattr(holder, "names"):
        return holder.names
    metadata = metadata_of(holder)
    for key in KEYS:
        if metadata.get(key) is not None:
            return metadata[key]
    if not isinstance(holder, nnx.Variable) and hasattr(holder, "get_partition_spec"):
        return holder.get_partition_spec()
    return _names(getattr(holder, "value", None)) if not isinstance(holder, nnx.Variable) else None


def metadata_of(holder: Any) -> dict[str, Any]:
    """Metadata of a variable of NNX, or of the box that stands for one in Linen."""
    if isinstance(holder, nnx.Variable):
        return dict(holder.get_metadata())
    return dict(getattr(holder, "metadata", None) or {})


def beside(tree: Tree, axes: Tree, what: str) -> list[object]:
    """What a tree of names says of every leaf of a tree of arrays, in the order of its leaves."""
    places: dict[str, range] = {}
    paths: list[str] = []
    for path, holder in jax.tree_util.tree_leaves_with_path(tree, is_leaf=holds_names):
        inner = [
            path_text((*path, *inner_path))
            for inner_path, _ in jax.tree_util.tree_leaves_with_path(holder)
        ]
        places[path_text(path)] = range(len(paths), len(paths) + len(inner))
        places |= {
            text: range(len(paths) + offset, len(paths) + offset + 1)
            for offset, text in enumerate(inner)
        }
        paths += inner
    names_by_leaf: list[object] = [None] * len(paths)
    unknown: list[str] = []
    for text, names in _entries(axes, (), places):
        if text not in places:
            unknown.append(text)
        for position in places.get(text, ()):
            names_by_leaf[position] = names
    if unknown:
        _unknown(unknown, list(places), what)
    return names_by_leaf


def _entries(
    axes: Tree, path: tuple[Any, ...], places: dict[str, range]
) -> Iterator[tuple[str, object]]:
    """(dotted path, names) of a tree of names."""
    text = path_text(path)
    if text in places or axes is None:
        if isinstance(axes, nnx.Variable):
            axes = axes.get_raw_value()
        if axes is not None:
            yield text, axes
        return
    inner = f"{text}." if path else ""
    if not jax.tree.leaves(axes):  # a part of the state without arrays
        return
    if not any(place.startswith(inner) for place in places):
        yield text, axes
        return
    for key, child in jax.tree_util.tree_leaves_with_path(
        axes, is_leaf=lambda node: node is not axes
    ):
        if key:
            yield from _entries(child, (*path, *key), places)
        else:
            yield text, axes


def _unknown(keys: list[str], paths: list[str], what: str) -> NoReturn:
    """Refuses names of arrays that are not there."""
    near = {key: difflib.get_close_matches(key, paths, 1) for key in keys}
    raise_all(
        AnnotationError,
        f"axes name arrays that the {what} {'does' if what == 'state' else 'do'} not have",
        [
            f"{key!r}{f'; did you mean {matches[0]!r}?' if matches else ''}"
            for key, matches in near.items()
        ],
        hint=(
            "one tuple of names, or None, in the place of each array; or names by dotted path:"
            f" arrays are {', '.join(paths[:NAMED])}"
            f"{f' and {len(paths) - NAMED} more' if len(paths) > NAMED else ''}"
        ),
    )


def of_state(
    state: Tree, axes: Tree, stacks: Sequence[Sequence[int]], weights: Collection[int]
) -> tuple[dict[str, LogicalAxes], tuple[Finding, ...]]:
    """The logical axes of the weights in the state of a step by dotted path, and what the user
    should know.
    """
    names = [
        written_name if beside_name is None else beside_name
        for beside_name, written_name in zip(
            beside(state, axes, "state"), written(state), strict=True
        )
    ]
    named, findings = fitted(
        state, [entry if index in weights else None for index, entry in enumerate(names)], stacks
    )
    others = {
        index: entry
        for index, entry in enumerate(names)
        if entry is not None and index not in weights
    }
    return named, (*findings, *_unread(state, named, others))


@diagnostic
def optimizer_names(params: Tree) -> tuple[Finding, ...]:
    """A finding where variables have other names for the optimizer's arrays than for themselves."""
    holders = jax.tree_util.tree_leaves_with_path(params, is_leaf=holds_names)
    return _unread_finding(
        [
            path_text(path)
            for path, holder in holders
            for optimizer_axes in [metadata_of(holder).get("optimizer_sharding")]
            if optimizer_axes is not None and optimizer_axes != _names(holder)
        ]
    )


@diagnostic
def _unread(
    state: Tree, named: Mapping[str, LogicalAxes], others: Mapping[int, object]
) -> tuple[Finding, ...]:
    """A finding where arrays that follow weights have names that no weight of their shape has."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    shapes_and_names = {(leaf.shape, named.get(path_text(path))) for path, leaf in leaves}
    paths = list[str]()
    for index, entry in others.items():
        path, leaf = leaves[index]
        axes = of_dims(spelled(entry), len(leaf.shape))
        if (
            any(axes)
            and len(axes) == len(leaf.shape)
            and (leaf.shape, axes) not in shapes_and_names
        ):
            paths.append(path_text(path))
    return _unread_finding(paths)


@diagnostic
def _unread_finding(paths: list[str]) -> tuple[Finding, ...]:
    if not paths:
        return ()
    return (
        Finding(
            code="state-names-unread",
            severity="info",
            where=", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else ""),
            message=(
                f"{len(paths)} arrays of optimizer state have names of their own, which are not"
                " read: what an optimizer keeps of a parameter is sharded as the parameter is, and"
                " by ZeRO over data and fsdp"
            ),
            hint="name the parameter, and pin zero",
        ),
    )


def fitted(
    tree: Tree, names: Sequence[object], stacks: Sequence[Sequence[int]] = ()
) -> tuple[dict[str, LogicalAxes], tuple[Finding, ...]]:
    """Checks what is written on arrays against them.

    Args:
        names: what the user wrote on each leaf; None where nothing was written.
    """
    axes: dict[str, LogicalAxes] = {}
    failures: list[str] = []
    stacked: list[str] = []
    for index, (key_path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        if names[index] is None:
            continue
        path, added = path_text(key_path), stacks[index] if stacks else ()
        try:
            own_axes = of_dims(spelled(names[index]), len(leaf.shape), added)
        except TypeError as error:
            failures.append(f"{path}: {error}")
            continue
        problem = _misfit(own_axes, leaf.shape)
        if problem:
            failures.append(f"{path}: {problem}")
        elif any(own_axes):
            axes[path] = own_axes
            stacked += [path] if added else []
    if failures:
        raise_all(
            AnnotationError,
            "logical axes do not fit their arrays",
            failures,
            hint="write one distinct name or None per dim",
        )
    return axes, (_stack_finding(stacked),) if stacked else ()


def _misfit(names: LogicalAxes, shape: tuple[int, ...]) -> str:
    if len(names) != len(shape):
        return f"{len(names)} names {names} for an array of {len(shape)} dims {shape}"
    named = [name for name in names if name]
    twice = sorted({name for name in named if named.count(name) > 1})
    return (
        f"{', '.join(map(repr, twice))} names two dims of {names}, shape {shape}" if twice else ""
    )


def _stack_finding(paths: list[str]) -> Finding:
    return Finding(
        code="stacking-dim-unnamed",
        severity="warning",
        where=", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else ""),
        message=(
            f"a transform adds a dim to {len(paths)} annotated arrays and does not name it; it is"
            f" called {STACK!r} here, and Flax itself would shard it by the name of the next dim."
        ),
        hint=(
            "name it in the transform: nnx.vmap(..., transform_metadata={nnx.PARTITION_NAME:"
            f" {STACK!r}}})"
        ),
    )


def stack_dims(make: Callable[[], Tree], tree: Tree) -> list[tuple[int, ...]]:
    """Dims of each leaf of a tree of NNX variables that a transform has added and not named.

    Where Flax would apply the names of a new variable, its value is marked by a constraint of no
    effect. JAX adds the dims of a `vmap` to the mark, and a loop around it adds its own.
    """
    names = written(tree)
    ranks = [len(leaf.shape) for leaf in jax.tree.leaves(tree)]
    if not any(_ambiguous(entry, rank) for entry, rank in zip(names, ranks, strict=True)):
        return [()] * len(ranks)
    marks: list[object] = []

    def marked(value: Value, mark: object, *_: object) -> Value:
        marks.append(mark)
        mesh = AbstractMesh((1,), (f"mark {len(marks) - 1}",), axis_types=(AxisType.Auto,))
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec()))

    try:
        with _jax_compat.names_alone(marked), nnx.use_eager_sharding(True):
            jaxpr = jax.make_jaxpr(make)().jaxpr
    except Exception:  # its dims are those that Flax reads, then
        return [()] * len(ranks)
    dims = list[tuple[int, ...]]()
    for entry, rank, var in zip(names, ranks, jaxpr.outvars, strict=True):
        mark, added = _mark(jaxpr, var) if _ambiguous(entry, rank) else (None, ())
        unnamed = mark is not None and tuple(marks[mark]) == tuple(entry)  # pyright: ignore
        dims.append(added if unnamed else ())
    return dims


def _ambiguous(names: object, rank: int) -> bool:
    try:
        return names is not None and 0 < len(spelled(names)) < rank
    except TypeError:  # which is told where names are fitted
        return False


def _mark(jaxpr: Jaxpr, var: Any) -> tuple[int | None, tuple[int, ...]]:
    """(number of the mark on a value, dims that were added to it since it was marked)."""
    eqn = next(
        (equation for equation in jaxpr.eqns if any(out is var for out in equation.outvars)), None
    )
    name, params = (eqn.primitive.name, eqn.params) if eqn is not None else ("", {})
    if eqn is None:
        return None, ()
    if name == "sharding_constraint":
        [axis] = params["sharding"].mesh.axis_names
        if axis.startswith("mark "):
            return int(axis.removeprefix("mark ")), tuple(sorted(params["unconstrained_dims"]))
        return _mark(jaxpr, eqn.invars[0])
    if name == "transpose":
        mark, added = _mark(jaxpr, eqn.invars[0])
        return mark, tuple(index for index, dim in enumerate(params["permutation"]) if dim in added)
    if name == "broadcast_in_dim":
        mark, added = _mark(jaxpr, eqn.invars[0])
        added_before = [
            dim for index, dim in enumerate(params["broadcast_dimensions"]) if index not in added
        ]
        return mark, tuple(dim for dim in range(len(params["shape"])) if dim not in added_before)
    if "jaxpr" not in params:
        return None, ()
    index = next(index for index, out in enumerate(eqn.outvars) if out is var)
    inner = _jax_compat.open_jaxpr(params["jaxpr"])[0]
    mark, added = _mark(inner, inner.outvars[index])
    if name == "scan" and index >= _jax_compat.scan_counts(params)[1]:
        added = (0, *(dim + 1 for dim in added))
    return mark, added
