"""A forward pass as the planner sees it, without a loss and its gradient."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardlib.annotation.model import Model
from shardlib.annotation.trees.paths import Tree
from shardlib.errors import ModelError
from shardlib.graph.problem import Problem
from shardlib.tracing.batch import describe_batch, tokens_of
from shardlib.tracing.jaxpr_to_graph import graph_from_program
from shardlib.tracing.parameters import abstract, described_parameters, named_inputs
from shardlib.tracing.program import flatten

#: Rows and tokens of the batch that weights are laid out for; layouts hardly depend on it.
ROWS, TOKENS = 8, 32


def forward_problem(
    model: Model, forward: Callable[[Tree, jax.Array], jax.Array], *, rows: int, tokens: int
) -> Problem:
    """The forward pass of a model; there are no step graphs.

    Args:
        forward: (model, int32 tokens [rows, tokens]) -> logits.
    """

    def run(params: Tree, state: Tree, tokens: jax.Array) -> jax.Array:
        return forward(model.evaluating(model.rebuild(params, state)), tokens)

    batch = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    shapes = (abstract(model.params), abstract(model.state), batch)
    described = describe_batch(batch)
    return Problem(
        model=model.name,
        forward=graph_from_program(
            flatten(jax.make_jaxpr(run)(*shapes)), named_inputs(model, shapes)
        ),
        steps={},
        parameters=described_parameters(model, None),
        batch=described,
        tokens=tokens_of(described),
    )


def served_problem(
    model: Model, forward: Callable[[Tree, jax.Array], jax.Array], *, longest: int
) -> Problem:
    """The forward pass by which programs that serve lay out weights."""
    try:
        return forward_problem(model, forward, rows=ROWS, tokens=min(longest, TOKENS))
    except ModelError:  # a model may want whole blocks of tokens
        return forward_problem(model, forward, rows=ROWS, tokens=longest)
