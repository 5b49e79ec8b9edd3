"""Which remat policies plans may follow, alike for all layers or by layer group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlib.cost.terms.abilities import Abilities
from shardlib.decisions.pins import Pins
from shardlib.decisions.readers import ANY_GROUP
from shardlib.errors import PinError, raise_all
from shardlib.graph.problem import Problem


def policies_of_groups(
    problem: Problem, pins: Pins, names: Sequence[str], by_class: bool
) -> tuple[Pins, tuple[tuple[str, int | None], ...]]:
    """The pins with what `remat_classes` says of all layers in the words for all, and otherwise the
    policy of each layer group; those that it leaves out rematerialise nothing.
    """
    pinned = {name: (policy, layers) for name, policy, layers in pins.remat_classes}
    if not pinned or pins.remat_classes == ANY_GROUP:
        return pins, ()
    _require_groups(problem, pinned, names)
    each = tuple(pinned.get(name, ("none", None)) for name in names)
    policy, layers = each[0]
    if len(set(each)) == 1 and (layers is None or len(each) == 1):
        return pins.but(remat=policy, remat_layers=layers, remat_classes=()), ()
    if not by_class:
        raise PinError(
            f"remat_classes gives layer groups different policies, and {problem.model} has"
            f" {len(names)} of them; at most a few can differ\nTry: remat, with the same policy"
            " for all"
        )
    return pins.but(remat=None, remat_layers=None), each


def _require_groups(
    problem: Problem, pinned: Mapping[str, tuple[str, int | None]], names: Sequence[str]
) -> None:
    """Raises where `remat_classes` names what is no layer group, or a policy that none can have."""
    if not names:
        raise PinError(
            f"remat_classes names {', '.join(map(repr, pinned))}, and {problem.model} has no layer"
            " groups: none of its layers repeat in a loop\nTry: layers under jax.lax.scan or"
            " nnx.scan, or no remat_classes"
        )
    failures = [f"{name!r} is none of them" for name in pinned if name not in names]
    failures += [
        f"{name!r} is to follow {policy!r}, which needs layers that repeat"
        for name, (policy, _) in pinned.items()
        if name in names and policy not in problem.steps
    ]
    if failures:
        raise_all(
            PinError,
            f"remat_classes does not fit the layer groups of {problem.model}, which are"
            f" {', '.join(names)}",
            failures,
            hint=f"remat_classes={{{names[0]!r}: 'full'}}",
        )


def policies_of_space(
    problem: Problem, pins: Pins, each: Sequence[tuple[str, int | None]], able: Abilities
) -> tuple[str, ...]:
    """The remat policies that layers of some plan follow."""
    if each:
        pinned = {"none", *(policy for policy, _ in each)}
        return tuple(policy for policy in problem.steps if policy in pinned)
    if pins.remat is None:
        return tuple(policy for policy in problem.steps if policy in able.remat)
    if pins.remat not in problem.steps:
        raise PinError(
            f"remat={pins.remat!r} rematerialises layers, and {problem.model} has no repeated"
            f" layer; it can be {', '.join(problem.steps)}"
        )
    return (
        ("none", pins.remat) if pins.remat_layers and "none" in problem.steps else (pins.remat,)
    )  # the layers that rematerialise nothing


def names_of_classes(parameters: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Names of layer groups, by the paths of their parameters: what these begin with, or the
    place among the classes.

    >>> names_of_classes([["encoder.layers.up", "encoder.layers.down"], ["decoder.layers.up"]])
    ('encoder.layers', 'decoder.layers')
    >>> names_of_classes([["a", "b"]])
    ('layers#0',)
    """
    shared = [_shared_path(paths) for paths in parameters]
    return tuple(
        name if name and shared.count(name) == 1 else f"{name or 'layers'}#{k}"
        for k, name in enumerate(shared)
    )


def _shared_path(paths: Sequence[str]) -> str:
    """The parts of dotted paths that all begin with."""
    shared: list[str] = []
    for parts in zip(*(path.split(".")[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
