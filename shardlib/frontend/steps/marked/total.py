"""All marked losses of a step as one problem: what the search plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from shardlib.annotation import activations
from shardlib.annotation.model import Model
from shardlib.annotation.trees.paths import Tree
from shardlib.axes import LogicalAxes
from shardlib.graph.problem import Parameter, Problem
from shardlib.jax_types import Value
from shardlib.report import Finding, diagnostic
from shardlib.tracing.steps.parts import tied_rows
from shardlib.tracing.steps.total_loss import total_loss
from shardlib.tracing.steps.traced_step import TracedStep
from shardlib.tracing.trace import trace

#: Begins the names of arrays of the state that a loss needs and that are no weights.
STATE = "state:"


def total_problem(traced: TracedStep) -> Problem:
    """The sum of the marked losses of a step as a problem; how it depends on rows is not known."""
    weights = {
        at: path
        for at, path in enumerate(traced.paths)
        if at in {*traced.roles.weights, *_roots(traced)}
    }
    trained = {*traced.trained, *traced.roles.gradients}
    leaves = jax.tree.leaves(traced.state)
    described = traced.problem.batch
    batch = {
        _key(path): leaf
        for (path, *_), leaf in zip(described, jax.tree.leaves(traced.batch), strict=True)
    }
    rest = {
        f"{STATE}{path}": leaves[at] for at, path in enumerate(traced.paths) if at not in weights
    }

    def loss(params: dict[str, Value], given: dict[str, Value]) -> Value:
        values = {at: params[path] for at, path in weights.items()}
        arguments = [
            values[at] if at in values else given.get(f"{STATE}{path}")
            for at, path in enumerate(traced.paths)
        ]
        rows = [given[_key(path)] for path, *_ in described]
        return total_loss(
            traced.program, [*arguments, *rows], traced.losses, values, traced.unmarked.gradients
        )

    named: dict[str, LogicalAxes] = {one.path: one.axes for one in traced.problem.parameters}
    model = _model(
        traced.name,
        {path: leaves[at] for at, path in weights.items()},
        named,
        frozenset(path for at, path in weights.items() if at not in trained),
    )
    axes = {_key(path): names for path, _, _, names in described}
    needed = _needed(loss, model.params, batch, rest)
    with activations.no_mesh():
        found = trace(
            model,
            loss,
            {**batch, **needed},
            batch_axes={**axes, **{key: (None,) * leaf.ndim for key, leaf in needed.items()}},
            rows="mean",
        ).problem
    found = tied_rows(found)
    kept = {one.path: one for one in traced.problem.parameters}
    return replace(
        found,
        forward=replace(
            found.forward,
            findings=(
                *found.forward.findings,
                *(one for one in traced.problem.forward.findings if one.code == "mapped-axis"),
                *_uncounted(traced),
            ),
        ),
        parameters=tuple(_with_state(one, kept.get(one.path)) for one in found.parameters),
        state_bytes=traced.problem.state_bytes,
        tokens=traced.problem.tokens,
    )


@diagnostic
def _uncounted(traced: TracedStep) -> tuple[Finding, ...]:
    """What the problem leaves out."""
    if not traced.unmarked.unknown:
        return ()
    return (
        Finding(
            code="unmarked-gradient",
            severity="warning",
            message=(
                "gradients are taken outside of the marked losses, in a loop or a branch that has"
                " a marked loss, too; the step computes them, and their time and bytes are not"
                " counted"
            ),
            where=", ".join(traced.paths[at] for at in traced.unmarked.unknown[:4]),
            hint="shardlib.value_and_grad for their loss, too",
        ),
    )


def _roots(traced: TracedStep) -> set[int]:
    return {root for one in traced.losses for root in one.roots if root is not None}


def _key(path: str) -> str:
    """The path of an array of the batch without the word in front, which `trace` adds again."""
    return path.removeprefix("batch").removeprefix(".")


def _model(
    name: str, params: Tree, axes: Mapping[str, LogicalAxes], frozen: frozenset[str]
) -> Model:
    """A model whose loss is (params, batch) -> scalar."""

    def bind(loss: Any) -> Any:
        return lambda params, state, batch: (loss(params, batch), ({}, state))

    return Model(
        name=name,
        init=lambda seed: (params, {}),
        params=params,
        state={},
        axes=axes,
        bind=bind,
        rebuild=lambda params, state: params,
        frozen=frozen,
    )


def _needed(
    loss: Callable[..., Value], params: Tree, batch: dict[str, Value], rest: dict[str, Value]
) -> dict[str, Value]:
    """Those of the other arrays of the state that the losses are computed from."""
    closed = jax.make_jaxpr(loss)(params, {**batch, **rest})
    read = {id(atom) for eqn in closed.jaxpr.eqns for atom in eqn.invars}
    keys = sorted({**batch, **rest})
    inputs = closed.jaxpr.invars[len(params) :]
    return {
        key: rest[key]
        for key, var in zip(keys, inputs, strict=True)
        if key in rest and id(var) in read
    }


def _with_state(one: Parameter, known: Parameter | None) -> Parameter:
    """A parameter with what the step keeps for it."""
    if known is None or not one.trained:
        return one
    return replace(
        one,
        state_bytes_per_element=known.state_bytes_per_element,
        state_arrays=known.state_arrays,
    )
