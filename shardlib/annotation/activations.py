"""Flax's logical constraints on activations do nothing, silently, where no rules are in force; that
is a finding here. What becomes of layouts otherwise: `shardlib.tracing.layouts`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardlib.annotation.model import PureLoss
from shardlib.annotation.trees.paths import Tree
from shardlib.axes import INNER_AXES
from shardlib.jax_types import Jaxpr
from shardlib.report import Finding, diagnostic


def no_mesh() -> AbstractContextManager[object]:
    """Takes any mesh that the caller has set out of force: a plan brings its own, and an outer one
    would leak into the trace.
    """
    return jax.set_mesh(Mesh(np.empty((), dtype=object), ()))


def planning_mesh() -> AbstractContextManager[object]:
    """A mesh of one device with all six mesh axes."""
    return jax.sharding.use_abstract_mesh(
        AbstractMesh(
            (1,) * len(INNER_AXES), INNER_AXES, axis_types=(AxisType.Auto,) * len(INNER_AXES)
        )
    )


def rules_in_force() -> bool:
    """Whether Flax's logical axis rules are set around the caller."""
    return bool(nn.get_logical_axis_rules())


def pinned_activations(jaxpr: Jaxpr) -> int:
    """Number of layouts pinned on activations in a program."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(
        (eqn.primitive.name == "sharding_constraint") + sum(map(pinned_activations, _inside(eqn)))
        for eqn in inner.eqns
    )


def _inside(eqn: Any) -> list[Any]:
    return [
        item
        for value in eqn.params.values()
        for item in (value if isinstance(value, (tuple, list)) else (value,))
        if hasattr(item, "eqns")
    ]


@diagnostic
def ignored_constraints(
    loss: PureLoss, params: Tree, state: Tree, batch: Tree
) -> tuple[Finding, ...]:
    """What Flax's logical constraints in a loss would have pinned, had rules been in force."""
    with planning_mesh(), nn.logical_axis_rules((("shardlib: no such axis", None),)):
        count = pinned_activations(jax.make_jaxpr(loss)(params, state, batch))
    return (
        (
            Finding(
                code="activation-names-ignored",
                severity="info",
                where=f"{count} of them",
                message=(
                    "the model names dims of activations and no logical axis rules are in force;"
                    " the plan places activations itself."
                ),
                hint=(
                    "to price or pin them, call shardlib.compile inside"
                    " flax.linen.logical_axis_rules(...), with honour='pins' to pin"
                ),
            ),
        )
        if count
        else ()
    )
