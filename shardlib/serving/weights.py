"""Where do weights and pages of a served model live?

Weights are sharded over `tensor` as a plan of the forward pass has them in use, and pages over
their key heads where those divide; what does not is whole on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.model import Model, Tree
from shardlib.annotation.trees.paths import path_text
from shardlib.axes import MeshShape
from shardlib.compiler import plan
from shardlib.jax_types import KeyPath, Leaf
from shardlib.lowering.mesh.device_mesh import device_mesh
from shardlib.lowering.mesh.shardings import named_sharding
from shardlib.lowering.serving.pages import Pages
from shardlib.lowering.serving.program import Forward, TracedForward

#: Rows and tokens of the batch that weights are laid out for; layouts hardly depend on it.
ROWS, TOKENS = 8, 32


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where arrays of a served model live.

    Attributes:
        mesh: of its devices.
        params: shardings, as a tree like the params.
    """

    mesh: Mesh
    params: Tree

    @property
    def whole(self) -> NamedSharding:
        """On every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def weights(self, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Params and state on their devices.

        Args:
            params: arrays anywhere.
            state: arrays anywhere.
        """
        return jax.device_put(params, self.params), jax.device_put(state, self.whole)

    def pages(self, forward: TracedForward, count: int, size: int) -> Mapping[str, Pages]:
        """Empty pages on their devices, for each call of attention.

        Args:
            forward: what they are of.
            count: of pages.
            size: tokens of a page.
        """
        ways = self.mesh.shape["tensor"]

        def sharding(page: Leaf) -> NamedSharding:
            heads = len(page.shape) > 4 and page.shape[3] % ways == 0
            return NamedSharding(
                self.mesh, PartitionSpec(None, None, None, "tensor") if heads else PartitionSpec()
            )

        shapes = {name: tuple(pages) for name, pages in forward.new_pages(count, size).items()}
        return jax.jit(
            lambda: jax.tree.map(lambda page: jnp.zeros(page.shape, page.dtype), shapes),
            out_shardings=jax.tree.map(sharding, shapes),
        )()


def placed(
    model: Model, forward: Forward, tensor: int, devices: Sequence[jax.Device], longest: int
) -> Placed:
    """Lays a model out over some devices.

    Args:
        model: from a front end in `annotation/`.
        forward: its forward pass.
        tensor: devices that share every layer; the first of `devices`.
        devices: at least as many.
        longest: tokens of the longest request.

    Raises:
        PinError, InfeasibleError: the model cannot be shared by so many devices.
    """
    mesh, _ = device_mesh(MeshShape(tensor=tensor), devices[:tensor])
    batch = jax.ShapeDtypeStruct((ROWS, longest if longest < TOKENS else TOKENS), jnp.int32)

    def loss(module: Tree, tokens: jax.Array) -> jax.Array:
        return jnp.mean(forward(module, tokens).astype(jnp.float32))

    found = plan(
        model,
        loss,
        optax.sgd(1.0),
        batch,
        topology=f"cpu:{tensor}",
        pin={"mesh": {"tensor": tensor}, "zero": 0, "microbatches": 1},
    )
    layouts = {one.path: named_sharding(mesh, one.compute) for one in found.parameters}

    def of(path: KeyPath, _: Leaf) -> NamedSharding:
        return layouts[path_text(path)]

    return Placed(mesh=mesh, params=jax.tree_util.tree_map_with_path(of, model.params))
