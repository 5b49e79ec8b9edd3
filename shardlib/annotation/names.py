"""Which logical axes did the user write on an array, and do they fit it?

Users write names in many spellings: a tuple, a `PartitionSpec`, a `NamedSharding`. All become one
tuple with one entry per dim. A dim that merges two named dims carries both names in a tuple; it
becomes one name joined by "+", which rules may mention like any other:

>>> spelled(("embed", ("heads", "head_dim"), None))
('embed', 'heads+head_dim', None)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import path_text
from shardlib.axes import LogicalAxes
from shardlib.errors import AnnotationError, raise_all
from shardlib.jax_types import KeyPath
from shardlib.report import Finding

#: The name that a stacking dim gets when the user gave it none.
STACK = "layers"


def spelled(names: object) -> LogicalAxes:
    """Returns one name or None per dim.

    Raises:
        TypeError: an entry is neither a string, None, nor a tuple of strings.
    """
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


def fitted(
    written: Mapping[KeyPath, object],
    shapes: Mapping[KeyPath, tuple[int, ...]],
    *,
    stacks: bool,
) -> tuple[dict[str, LogicalAxes], tuple[Finding, ...]]:
    """Checks every annotation against its array.

    Args:
        written: what the user wrote, per key path; None where nothing was written.
        shapes: shape per key path.
        stacks: whether names that are one short of the rank mean a stack of layers made by a
            transform that did not name its new dim; that dim is the leading one and is called
            "layers".

    Returns:
        Logical axes per dotted path, for named arrays only, and what the user should know.

    Raises:
        AnnotationError: malformed names, a rank mismatch or a name twice in one array; all of them
            are listed.
    """
    axes: dict[str, LogicalAxes] = {}
    failures: list[str] = []
    stacked: list[str] = []
    for key_path, names in written.items():
        if names is None:
            continue
        path, shape = path_text(key_path), shapes[key_path]
        try:
            found = spelled(names)
        except TypeError as error:
            failures.append(f"{path}: {error}")
            continue
        if stacks and found and len(found) == len(shape) - 1:
            stacked.append(path)
            found = (STACK if STACK not in found else None, *found)
        problem = _misfit(found, shape)
        if problem:
            failures.append(f"{path}: {problem}")
        elif any(found):
            axes[path] = found
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
            f"{len(paths)} annotated arrays have one dim more than names; the leading dim is taken"
            f" for a stack and called {STACK!r}."
        ),
        hint=(
            "name it in the transform: nnx.vmap(..., transform_metadata={nnx.PARTITION_NAME:"
            f" {STACK!r}}})"
        ),
    )
