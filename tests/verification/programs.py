"""A small program whose communication can be counted by hand, and the count.

`LAYERS` layers of two products. Weights are cut over fsdp at rest and gathered one layer at a time,
the hidden dim is cut over tensor; the batch is cut over fsdp. The gradient of a gather is a
reduce-scatter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.layout import MESH_AXES
from shardlib.models.config import TransformerConfig

#: A model that compiles in seconds.
CONFIG = TransformerConfig(
    name="tiny",
    vocab_size=256,
    layers=2,
    embed=64,
    heads=4,
    kv_heads=4,
    head_dim=16,
    mlp=128,
    max_seq=32,
    compute_dtype="float32",
)

LAYERS, EMBED, MLP, ROWS = 3, 512, 1024, 64
FSDP, TENSOR = 4, 2


def mesh_of(devices):
    import numpy as np

    sizes = [{"fsdp": FSDP, "tensor": TENSOR}.get(axis, 1) for axis in MESH_AXES]
    return jax.sharding.Mesh(
        np.array(devices).reshape(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )


def step(weights, x):
    """Gradients of a loss; everything manual, so that each collective below is written here."""

    def layer(x, w):
        up = jax.lax.all_gather(w[0], "fsdp", axis=0, tiled=True)
        down = jax.lax.all_gather(w[1], "fsdp", axis=1, tiled=True)
        return x + jax.lax.psum(jnp.tanh(x @ up) @ down, "tensor"), None

    def loss(weights):
        y, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
        return jnp.sum(y * y)

    return jax.grad(loss)(weights)


def lowered(devices):
    mesh = mesh_of(devices)
    up, down, batch = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp"), P("fsdp")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=((up, down), batch), out_specs=(up, down))

    def abstract(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    weights = abstract((LAYERS, EMBED, MLP), up), abstract((LAYERS, MLP, EMBED), down)
    return jax.jit(mapped).lower(weights, abstract((ROWS * FSDP, EMBED), batch))


WEIGHT_BYTES = (
    4 * EMBED * MLP // TENSOR
)  # a gathered weight, as one device of the tensor axis has it
ACTIVATION_BYTES = 4 * ROWS * EMBED

#: Result bytes of one step: two weights a layer, gathered forward and again backward; two
#: gradients; activations forward, again when recomputed (the compiler may leave that one out), and
#: their gradient backward.
GATHERED = 2 * LAYERS * 2 * WEIGHT_BYTES
SCATTERED = LAYERS * 2 * WEIGHT_BYTES // FSDP
REDUCED = {n * LAYERS * ACTIVATION_BYTES for n in (2, 3)}
