"""Logical axis names of arrays, in all spellings of Flax and JAX.

Boxes of Linen (`nn.Partitioned`, `nn.LogicallyPartitioned`), metadata of NNX variables, and
separate trees of names are read alike, in a model or in the state of a step. The names of an array
become one tuple with one entry per dim. A dim that merges two named dims has both names in a tuple;
it becomes one name joined by "+", which rules may mention like any other:

>>> spelled(("embed", ("heads", "head_dim"), None))
('embed', 'heads+head_dim', None)

Fewer names than dims are those of the leading dims, as in Flax:

>>> of_dims(("embed", "kv"), 3)
('embed', 'kv', None)

A dim that `nnx.vmap` or `nnx.scan` adds without `nnx.PARTITION_NAME` gets no name from Flax, which
then assigns the names one dim too far to the left; `stack_dims` finds such dims, and they are named
"layers".
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardlib import _jax_compat
from shardlib.annotation.trees import Partition, Tree, path_text
from shardlib.errors import AnnotationError, ArgumentError, TracingError, raise_all
from shardlib.findings import Finding, diagnostic
from shardlib.functions.losses import WeightedMean
from shardlib.jax_types import Index, Jaxpr, Metrics, Value
from shardlib.layout import LogicalAxes
from shardlib.untrusted.data import SEEDS, read_seed

#: The name of a stack dim that the user did not name.
STACK = "layers"
#: Metadata keys under which Flax stores names, the current one first.
KEYS: tuple[str, ...] = ("out_sharding", "sharding", "sharding_names")
#: Maximum number of arrays that a message names.
NAMED = 12


def spelled(names: object) -> LogicalAxes:
    """One name or None per named dim."""
    names = getattr(names, "sharding", names)
    spec = names.spec if isinstance(names, NamedSharding) else names
    if isinstance(spec, str) or not isinstance(spec, (tuple, list, PartitionSpec)):
        raise TypeError(f"{spec!r} is not a tuple of logical axes")
    return tuple(_one_dim(entry) for entry in spec)


def _one_dim(entry: Any) -> str | None:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return None
    if isinstance(entry, str):
        return entry
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        return "+".join(entry) or None
    raise TypeError(
        f"{entry!r} is not a logical axis; write a string, None, or a tuple of strings for a"
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
    """True if a tree node is a box of Linen or a variable of NNX."""
    return isinstance(node, (meta.AxisMetadata, nnx.Variable))


def written(tree: Tree) -> list[object]:
    """The names in boxes and variables for every leaf of a tree, in leaf order; None if it has
    none.
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
    """Metadata of a variable of NNX, or of its Linen box."""
    if isinstance(holder, nnx.Variable):
        return dict(holder.get_metadata())
    return dict(getattr(holder, "metadata", None) or {})


def names_of_leaves(tree: Tree, axes: Tree, what: str) -> list[object]:
    """The names in a separate tree for every leaf of a tree of arrays, in leaf order."""
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
    """Raises an error for names of arrays that do not exist."""
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
    """The logical axes of the weights in the state of a step by dotted path, and findings."""
    names = [
        written_name if beside_name is None else beside_name
        for beside_name, written_name in zip(
            names_of_leaves(state, axes, "state"), written(state), strict=True
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
    """A finding if variables have other names for the optimizer's arrays than for themselves."""
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
    """A finding if arrays that follow weights have names that no weight of their shape has."""
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
    """Checks names against the arrays they are written on.

    Args:
        names: the user's names for each leaf; None if it has none.
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
    """Dims of each leaf of a tree of NNX variables that a transform has added without a name.

    Where Flax would apply the names of a new variable, its value is marked by a constraint without
    effect. JAX adds the dims of a `vmap` to the mark, and so does a loop around it.
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
    except Exception:  # then the dims are those that Flax reads
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
    except TypeError:  # reported where names are fitted
        return False


def _mark(jaxpr: Jaxpr, var: Any) -> tuple[int | None, tuple[int, ...]]:
    """(number of the mark on a value, dims added to it since it was marked)."""
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


# --------------------------------------------------------------------------------------------------
# Results that a user's loss may return.


def loss_and_metrics(result: Tree) -> tuple[Value, Metrics]:
    """The value and metrics of a loss that returned `loss` or `(loss, metrics)`."""
    value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    return scalar_and_metrics(value, metrics, result)


def scalar_and_metrics(value: Tree, metrics: Tree, result: Tree) -> tuple[Value, Metrics]:
    """The value and metrics of a loss, checked."""
    if not _is_number(value) or not isinstance(metrics, Mapping):
        raise TracingError(
            f"the loss returned {_shape(result)}; expected a scalar or a pair (scalar, dict of"
            ' metrics)\nTry: return jnp.mean(...), or return jnp.mean(...), {"name": metric}'
        )
    if "loss" in metrics:
        raise TracingError(
            "the loss returned a metric called 'loss'; that name is taken by the loss itself\nTry:"
            " another name"
        )
    return _divided(value), {name: _divided(metric) for name, metric in metrics.items()}


def _is_number(value: Any) -> bool:
    return hasattr(value, "dtype") or isinstance(value, (int, float, complex, WeightedMean))


def _divided(result: Tree) -> Any:
    return result.value() if isinstance(result, WeightedMean) else result


def _shape(result: Tree) -> str:
    if result is None:
        return "None"
    return (
        f"a tuple of {len(result)} ({', '.join(type(part).__name__ for part in result)})"
        if isinstance(result, tuple)
        else type(result).__name__
    )


# --------------------------------------------------------------------------------------------------
# Random keys in place of seeds: `program.init(jax.random.key(3))` equals `program.init(3)`.

#: Argument of `program.init`: an integer, a typed key, or the raw data of a key.
Seed = int | np.integer[Any] | jax.Array | np.ndarray

_TRY = f"Try: an integer from 0 to {SEEDS - 1}, or jax.random.key(0)"


def read_seed_or_key(seed: Seed) -> np.ndarray | np.int32:
    """A seed as an int32 scalar, or a key as its uint32 data; both can be passed to a program over
    several processes.
    """
    if not isinstance(seed, jax.Array | np.ndarray) or _is_integer(seed):
        return np.int32(read_seed(seed))  # pyright: ignore[reportArgumentType]
    default = jax.random.key(0)
    if jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if seed.dtype != default.dtype:
            raise ArgumentError(
                f"seed is a {seed.dtype}, and JAX's default is {default.dtype}\nTry:"
                f" jax.config.update('jax_default_prng_impl', {str(jax.random.key_impl(seed))!r})"
                " before the program is compiled"
            )
        if seed.ndim:
            raise ArgumentError(f"seed is {seed.size} keys of shape {seed.shape}\nTry: one key")
        return np.asarray(jax.random.key_data(seed))
    raw = jax.random.key_data(default).shape
    if seed.dtype != jnp.uint32 or seed.shape != raw:
        raise ArgumentError(
            f"seed is an array {seed.dtype}{list(seed.shape)}, and neither an integer nor a key"
            f" (uint32{list(raw)})\n{_TRY}"
        )
    return np.asarray(seed)


def key_of(seed: Index) -> jax.Array:
    """The key of a result of `read_seed_or_key`."""
    return jax.random.wrap_key_data(jnp.asarray(seed)) if jnp.ndim(seed) else jax.random.key(seed)


def _is_integer(array: jax.Array | np.ndarray) -> bool:
    return array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.integer)


# --------------------------------------------------------------------------------------------------
# A user's model as one value, independent of its library.
#
# Every front end (`model.py`) turns the user's model into a `Model`: pure functions over
# two pytrees. `params` are trained by the optimizer, or frozen; `state` is updated by the model
# itself (random streams, batch statistics) and may be empty. Tree paths are written with dots:
# "layers.mlp.up.kernel".

#: A user's own model, the first argument of their loss: an nnx module, a params tree, a variables
#: dict.
UserModule = Any
#: A user's own loss: (model, batch) -> scalar, or -> (scalar, dict of metrics).
UserLoss = Callable[[UserModule, Tree], Tree]
#: (params, state, batch) -> (loss, (metrics, new state)); loss is a float scalar, metrics a dict of
#: scalars.
PureLoss = Callable[[Tree, Tree, Tree], tuple[jax.Array, tuple[Mapping[str, jax.Array], Tree]]]
#: A transformation applied to the user's functions before they are called.
Free = Callable[[Callable[..., Any]], Callable[..., Any]]


def as_it_is(value: Any) -> Any:
    """The identity."""
    return value


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that can be initialised, traced and trained.

    Attributes:
        name: for messages.
        init: seed (an int or an int32 scalar tracer) -> (params, state), pure and jittable; the
            values equal those of the user's own constructor for that seed.
        params: abstract arrays that are trained or frozen (`jax.ShapeDtypeStruct` leaves, no
            shardings).
        state: abstract model state, same form.
        axes: logical axes per dotted path of `params`; paths without names are absent.
        bind: user's loss -> `PureLoss`.
        rebuild: (params, state) -> the first argument of the user's loss (an nnx module, a params
            tree).
        findings: findings from reading the model.
        evaluating: first argument of the user's loss -> the same in evaluation mode; the identity
            if the library has no modes.
        frozen: dotted paths of `params` that are not trained.
        state_axes: logical axes per dotted path of `state`; paths without names are absent.
    """

    name: str
    init: Callable[[Index], tuple[Tree, Tree]]
    params: Tree
    state: Tree
    axes: Mapping[str, LogicalAxes]
    bind: Callable[[Callable[..., Tree]], PureLoss]
    rebuild: Callable[[Tree, Tree], Tree]
    findings: tuple[Finding, ...] = ()
    evaluating: Callable[[Tree], Tree] = as_it_is

    @property
    def has_modes(self) -> bool:
        """True if the library distinguishes training and evaluation mode."""
        return self.evaluating is not as_it_is

    def evaluated(self, loss: Callable[..., Tree]) -> PureLoss:
        """The user's loss as a `PureLoss` in evaluation mode."""
        return self.bind(lambda model, batch: loss(self.evaluating(model), batch))

    frozen: frozenset[str] = frozenset()
    state_axes: Mapping[str, LogicalAxes] = field(default_factory=dict[str, LogicalAxes])

    @cached_property
    def partition(self) -> Partition:
        """The split of `params` into trained and frozen."""
        return Partition.of(self.params, self.frozen)
