"""From logical axes to mesh axes: one semantics for every front end.

Rules are a priority list. They are tried from the first to the last; a rule takes effect on the
first dim of that name which is still undecided, if none of its mesh axes is used in the value yet.
A rule to None decides "not sharded" and closes the name for later rules. This is the semantics of
Flax Linen (`flax.linen.logical_to_mesh_axes`), applied to every model; the spelling of Flax and of
MaxText is accepted.

>>> rules = Rules.parse([("batch", ["data", "fsdp"]), ("mlp", "tensor"), ("seq", "tensor")])
>>> mesh = MeshShape(data=2, fsdp=2, tensor=2)
>>> str(rules.resolve(("batch", "seq", "mlp"), (8, 8, 8), mesh).layout)
'[data·fsdp, -, tensor]'
>>> str(rules.resolve(("batch", "seq", "embed"), (8, 8, 8), mesh).layout)
'[data·fsdp, tensor, -]'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from shardlib.errors import RuleError, raise_all
from shardlib.layout import INNER_AXES, MESH_AXIS_ALIASES, Layout, LogicalAxes, MeshShape


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A rule that matched a dim and could not be honoured there.

    Attributes:
        logical: the logical axis.
        axes: the mesh axes that the rule asked for.
        dim: which dim of the value it matched.
        reason: "indivisible" or "in use".
    """

    logical: str
    axes: tuple[str, ...]
    dim: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A layout and the rules that had to be passed over to reach it."""

    layout: Layout
    skips: tuple[Skip, ...]


@dataclass(frozen=True)
class Rules:
    """A priority list of (logical axis, mesh axes); mesh axes () decide "not sharded".

    Attributes:
        entries: (logical axis, mesh axes) pairs, the first to be tried first; `parse` reads other
            spellings and checks them.
    """

    entries: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def parse(cls, rules: Rules | Mapping[str, object] | Iterable[Sequence[object]]) -> Rules:
        """Reads rules in Flax's spelling (pairs) or MaxText's (pairs with lists, repeated names as
        fallbacks).

        Args:
            rules: pairs (logical axis, mesh axis, several of them, or None), or a mapping of the
                same; aliases of mesh axes are understood. `Rules` are given back as they are.

        Returns:
            The rules, with the canonical names of mesh axes.

        Raises:
            RuleError: an entry is not a pair, or names something that is not a mesh axis; all of
                them are listed.
        """
        if isinstance(rules, Rules):
            return rules
        given: Any = rules
        if isinstance(given, str) or not np.iterable(given):
            raise RuleError(
                f"sharding rules are {rules!r}; they are a list of pairs (logical axis, mesh axes)"
            )
        entries: list[tuple[str, tuple[str, ...]]] = []
        failures: list[str] = []
        given = cast("Iterable[Any]", rules.items() if isinstance(rules, Mapping) else rules)
        for entry in given:
            if not _is_pair(entry):
                failures.append(f"{entry!r} is not a pair (logical axis, mesh axes)")
                continue
            logical, target = entry
            names: Any = () if target is None else (target,) if isinstance(target, str) else target
            if not _is_words(names):
                failures.append(
                    f"{logical!r}: {target!r} is not a mesh axis, list of mesh axes or None"
                )
                continue
            axes = tuple(MESH_AXIS_ALIASES.get(str(name), str(name)) for name in names)
            unknown = [
                str(name) for name, axis in zip(names, axes, strict=True) if axis not in INNER_AXES
            ]
            if unknown:
                failures.append(
                    f"{logical!r} -> {', '.join(map(repr, unknown))} is not a mesh axis"
                )
            elif len(set(axes)) < len(axes):
                failures.append(
                    f"{logical!r} -> {', '.join(map(repr, axes))} uses a mesh axis twice"
                )
            else:
                entries.append((str(logical), axes))
        if failures:
            raise_all(
                RuleError,
                "sharding rules are not usable",
                failures,
                hint=f"mesh axes are {', '.join(INNER_AXES)}",
            )
        return cls(tuple(entries))

    @property
    def names(self) -> frozenset[str]:
        """Every logical axis that some rule mentions."""
        return frozenset(name for name, _ in self.entries)

    def axes_of(self, logical: str) -> tuple[str, ...]:
        """Mesh axes of the first rule for a logical axis; () when there is none.

        Args:
            logical: name of a logical axis.

        Returns:
            Names of mesh axes, the major one first.
        """
        return next((axes for name, axes in self.entries if name == logical), ())

    def __add__(self, other: Rules) -> Rules:
        return Rules(self.entries + other.entries)

    def resolve(self, names: LogicalAxes, shape: Sequence[int], mesh: MeshShape) -> Resolved:
        """Decides the layout of one value.

        Mesh axes of size 1 are left out of the layout. A rule whose mesh axes do not divide the dim
        is passed over and listed in `skips`: the caller makes it an error (a user's pin) or a
        finding (the planner's choice).

        Args:
            names: logical axis per dim; None where the dim has no name.
            shape: size per dim, elements.
            mesh: sizes of the mesh axes.

        Returns:
            The layout, and the rules that were passed over.

        Raises:
            RuleError: `names` and `shape` differ in length.
        """
        if len(names) != len(shape):
            raise RuleError(
                f"{len(names)} logical axes {names} for an array of {len(shape)} dims"
                f" {tuple(shape)}"
            )
        decided: dict[int, tuple[str, ...]] = {}
        used: set[str] = set()
        skips: list[Skip] = []
        for logical, rule_axes in self.entries:
            axes = tuple(axis for axis in rule_axes if axis in mesh)
            for dim, name in enumerate(names):
                if name != logical or dim in decided:
                    continue
                if used & set(axes):
                    skips.append(Skip(logical=logical, axes=axes, dim=dim, reason="in use"))
                elif shape[dim] % mesh.ways(axes):
                    skips.append(Skip(logical=logical, axes=axes, dim=dim, reason="indivisible"))
                elif axes or not rule_axes:
                    decided[dim] = axes
                    used |= set(axes)
                    if axes:
                        break
        return Resolved(
            layout=Layout(*(decided.get(dim, ()) for dim in range(len(shape)))), skips=tuple(skips)
        )

    def to_json(self) -> list[list[object]]:
        """The rules as plain lists, in Flax's spelling."""
        return [[name, list(axes)] for name, axes in self.entries]

    def __str__(self) -> str:
        return ", ".join(f"{name} -> {'·'.join(axes) or '-'}" for name, axes in self.entries)


def _is_words(value: Any) -> bool:
    if not isinstance(value, Sequence):
        return False
    return all(isinstance(word, str) for word in cast("Sequence[object]", value))


def _is_pair(entry: Any) -> bool:
    """Returns whether an entry looks like (logical axis, mesh axes)."""
    return (
        isinstance(entry, Sequence)
        and not isinstance(entry, str)
        and len(entry) == 2  # pyright: ignore[reportUnknownArgumentType]
        and isinstance(entry[0], str)
    )
