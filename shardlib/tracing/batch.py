"""What are the dims of a batch called, and how many tokens does it hold?"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.axes import LogicalAxes
from shardlib.errors import BatchError, raise_all
from shardlib.untrusted.shown import fit

#: Kinds of NumPy's dtypes that hold no numbers: strings, objects, dates.
NO_NUMBERS = "SUOMm"
#: (path, shape, dtype name, logical axes) of one batch array, as `Problem.batch` has it.
Described = tuple[str, tuple[int, ...], str, LogicalAxes]
#: Arrays have fewer elements than this; what counts them, here and in XLA, has 63 bits.
ELEMENTS = 1 << 63
#: Arrays that a message lists.
LISTED = 4


def describe_batch(batch: Tree, batch_axes: Tree = None) -> tuple[Described, ...]:
    """Names the dims of every array of a batch.

    Args:
        batch_axes: pytree of the same structure, a tuple of names (or None) per array; None names
            by convention.
    """
    leaves = _arrays(
        [
            (".".join(filter(None, ("batch", path_text(path)))), leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        ]
    )
    check_counts((path, tuple(leaf.shape)) for path, leaf in leaves)
    axes = (
        _by_convention(batch, leaves)
        if batch_axes is None
        else _as_given(batch, batch_axes, leaves)
    )
    return tuple(
        (path, tuple(leaf.shape), leaf.dtype.name, names)
        for (path, leaf), names in zip(leaves, axes, strict=True)
    )


def check_counts(arrays: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Refuses arrays, by path and shape, with more elements than can be counted."""
    failures = [
        *dict.fromkeys(
            f"{path}: shape {fit(str(shape), 200)}"
            for path, shape in arrays
            if math.prod(shape) >= ELEMENTS
        )
    ]
    if failures:
        more = [f"and {len(failures) - LISTED} more"] if len(failures) > LISTED else []
        raise_all(
            BatchError,
            "arrays have 2^63 elements or more, which nothing can count",
            [*failures[:LISTED], *more],
            hint="a smaller batch or sequence",
        )


def _arrays(leaves: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The leaves of a batch, numbers as arrays."""
    arrays: list[tuple[str, Any]] = []
    failures: list[str] = []
    for path, leaf in leaves:
        try:
            array = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        except (TypeError, ValueError):
            failures.append(f"{path} is a {type(leaf).__name__}")
            continue
        if getattr(array.dtype, "kind", "") in NO_NUMBERS and not jax.dtypes.issubdtype(
            array.dtype, jax.dtypes.prng_key
        ):
            failures.append(f"{path} is an array of {array.dtype}")
        arrays.append((path, array))
    if failures:
        raise_all(
            BatchError,
            "the batch holds what is no array of numbers or random keys",
            failures,
            hint="leave it out of the batch; tokens are integers",
        )
    return arrays


def require_rows(described: tuple[Described, ...]) -> None:
    """Refuses a batch of no rows."""
    empty = [
        f"{path}: shape {shape}"
        for path, shape, _, axes in described
        if any(size == 0 and name == "batch" for size, name in zip(shape, axes, strict=True))
    ]
    if empty:
        raise_all(BatchError, "the batch has no rows", empty, hint="a batch of at least one row")


def _by_convention(batch: Tree, leaves: list[tuple[str, Any]]) -> list[LogicalAxes]:
    rows = {leaf.shape[0] for _, leaf in leaves if leaf.shape and not _is_key(leaf)}
    sizes = rows or {leaf.shape[0] for _, leaf in leaves if leaf.shape}
    if len(sizes) > 1:
        raise_all(
            BatchError,
            'the leading dims of the batch differ in size, so they cannot all be "batch"',
            [f"{path}: shape {tuple(leaf.shape)}" for path, leaf in leaves],
            hint=_which_rows(batch, [leaf for _, leaf in leaves]),
        )
    return [
        (
            (None,) * len(leaf.shape)
            if _is_key(leaf) and leaf.shape[:1] != (*sizes,)
            else _conventional(leaf)
        )
        for _, leaf in leaves
    ]


def _which_rows(batch: Tree, leaves: list[Any]) -> str:
    """How to say which arrays of a batch have rows: as many as most arrays have, for example."""
    sizes = Counter(leaf.shape[0] for leaf in leaves if leaf.shape and not _is_raw_key(leaf))
    common_size = sizes.most_common(1)[0][0] if sizes else 0
    names = [
        ("batch" if leaf.shape[:1] == (common_size,) else None, *(None,) * len(leaf.shape[1:]))
        if leaf.shape
        else ()
        for leaf in leaves
    ]
    axes = jax.tree.unflatten(jax.tree.structure(batch), names)
    advice = f"name the dims, for example batch_axes={fit(_spelled(axes), 600)}"
    if any(map(_is_raw_key, leaves)):
        return f"{advice}; a jax.random.PRNGKey belongs to no row, and jax.random.key needs no name"
    return f"{advice}, where the {common_size} are the rows"


def _spelled(axes: Tree) -> str:
    """A batch of names as its user writes it, by the fields of its own types."""
    if isinstance(axes, Mapping):
        return f"{{{', '.join(f'{key!r}: {_spelled(entry)}' for key, entry in axes.items())}}}"
    fields = getattr(axes, "_fields", ())
    if not fields and dataclasses.is_dataclass(axes):
        fields = tuple(field.name for field in dataclasses.fields(axes))
    if fields:
        parts = ", ".join(f"{name}={_spelled(getattr(axes, name))}" for name in fields)
        return f"{type(axes).__name__}({parts})"
    if isinstance(axes, list):
        return f"[{', '.join(map(_spelled, axes))}]"
    return repr(axes)


def _is_raw_key(leaf: Any) -> bool:
    """Whether an array may be the integers of one random key."""
    return leaf.dtype == jnp.uint32 and leaf.shape in ((2,), (4,))


def _is_key(leaf: Any) -> bool:
    """Whether an array holds typed random keys: as many of them as there are rows are one for each,
    others belong to the whole batch.
    """
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _conventional(leaf: Any) -> LogicalAxes:
    second = "seq" if len(leaf.shape) == 2 and jnp.issubdtype(leaf.dtype, jnp.integer) else None
    return ("batch", second, *(None,) * len(leaf.shape))[: len(leaf.shape)]


def _as_given(batch: Tree, batch_axes: Tree, leaves: list[tuple[str, Any]]) -> list[LogicalAxes]:
    structure = jax.tree.structure(batch)
    try:
        names_by_leaf = structure.flatten_up_to(batch_axes)
    except ValueError as error:
        raise BatchError(
            f"batch_axes has another structure than the batch, {structure}: {error}\n"
            "Try: one tuple of names per array, in the same dicts and lists as the batch"
        ) from error
    failures: list[str] = []
    for (path, leaf), names in zip(leaves, names_by_leaf, strict=True):
        if names is not None and (isinstance(names, str) or not isinstance(names, (tuple, list))):
            failures.append(f"{path}: {names!r} is no tuple of names")
        elif names is not None and len(names) != len(leaf.shape):
            failures.append(
                f"{path}: {len(names)} names {tuple(names)} for shape {tuple(leaf.shape)}"
            )
        elif names is not None and not all(name is None or isinstance(name, str) for name in names):
            failures.append(f"{path}: {tuple(names)} holds something that is no name")
        elif names is not None and (
            twice := sorted(
                {name for name in names if name is not None and list(names).count(name) > 1}
            )
        ):
            failures.append(
                f"{path}: {', '.join(map(repr, twice))} names two dims of {tuple(names)}"
            )
    if failures:
        raise_all(
            BatchError,
            "batch_axes does not fit the batch",
            failures,
            hint="give one name, or None, per dim",
        )
    return [
        (None,) * len(leaf.shape) if names is None else tuple(names)
        for (_, leaf), names in zip(leaves, names_by_leaf, strict=True)
    ]


def tokens_of(batch: tuple[Described, ...]) -> int:
    """Tokens of a batch: elements of the first integer array of rank 2, else the leading size of
    the first array.
    """
    for _, shape, dtype, _ in batch:
        if len(shape) == 2 and dtype.startswith(("int", "uint")):
            return shape[0] * shape[1]
    return next((shape[0] for _, shape, _, _ in batch if shape), 1)
