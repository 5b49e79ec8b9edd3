"""A model spread over a chain of unlike devices, for inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import optax

from shardlib.annotation.read import Init
from shardlib.annotation.trees.paths import Tree
from shardlib.frontend.traced_model import problem
from shardlib.hardware.cluster import Device, cluster
from shardlib.planning.edge.edge import plan_edge as spread
from shardlib.planning.edge.edge_plan import EdgePlan


def plan_edge(
    init: Init,
    forward: Callable[[Tree, Tree], Tree],
    batch: Tree,
    *,
    devices: str | Path | Sequence[Device],
    batch_axes: Tree = None,
    name: str | None = None,
) -> EdgePlan:
    """Spreads a model over a chain of unlike devices for inference: runs of layers, in the order
    and on the devices with the highest throughput.

    Args:
        init: a model, see `shardlib.plan`; so all that says no more here.
        forward: (model, batch) -> any arrays: what inference computes.
        batch: one batch as it goes through the devices, arrays or `jax.ShapeDtypeStruct`.
        devices: path of a TOML file, see `shardlib.hardware.cluster`, or the devices themselves.
        batch_axes: logical axes of the batch.
        name: what to call the model.

    Returns:
        The plan: a stage for every device that is used, with its pieces of the model, seconds and
        bytes.

    Raises:
        AnnotationError: `init` is nothing that can be read, or names do not fit its arrays.
        TracingError: `forward` cannot be traced, or the model has no layers that repeat.
        TopologyError: the file of devices is not usable.
        MissingFileError: the file of devices is not there.
        InfeasibleError: the devices do not hold the model; the message says how many bytes are
            lacking.
    """
    listed = cluster(devices)

    def run(model: Tree, batch: Tree) -> Tree:
        return jnp.zeros(()), {"results": forward(model, batch)}

    return spread(
        problem(init, run, optax.identity(), batch, batch_axes=batch_axes, name=name, rows="mean"),
        listed,
    )
