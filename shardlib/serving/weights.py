"""Where do weights and pages of a served model live?

Weights are sharded over `tensor` as a plan of the forward pass has them in use, and pages over
their key heads where those divide; what does not is whole on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.annotation.model import Model, Tree
from shardlib.annotation.trees.paths import path_text
from shardlib.compiler import plan
from shardlib.errors import ModelError
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as parse_topology
from shardlib.jax_types import KeyPath, Leaf
from shardlib.lowering.mesh.device_mesh import parts_of
from shardlib.lowering.mesh.shardings import named_sharding
from shardlib.lowering.serving.pages import Pages
from shardlib.lowering.serving.program import Forward, TracedForward
from shardlib.planning.plan import Plan

#: Rows and tokens of the batch that weights are laid out for; layouts hardly depend on it.
ROWS, TOKENS = 8, 32


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where arrays of a served model live.

    Attributes:
        mesh: of its devices, or of none where programs are only compiled.
        params: shardings, as a tree like the params.
    """

    mesh: Mesh | AbstractMesh
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

    def of_pages(self, forward: TracedForward, count: int, size: int) -> Mapping[str, Tree]:
        """Pages without their contents, each with its sharding.

        Args:
            forward: what they are of.
            count: of pages.
            size: tokens of a page.
        """
        axes = parts_of(self.mesh, ("tensor",))
        ways = math.prod(self.mesh.shape[axis] for axis in axes)

        def page(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            heads = len(one.shape) > 4 and one.shape[3] % ways == 0
            spec = PartitionSpec(None, None, None, axes) if heads else PartitionSpec()
            return jax.ShapeDtypeStruct(
                one.shape, one.dtype, sharding=NamedSharding(self.mesh, spec)
            )

        return {
            name: tuple(map(page, pages)) for name, pages in forward.new_pages(count, size).items()
        }

    def pages(self, forward: TracedForward, count: int, size: int) -> Mapping[str, Pages]:
        """Empty pages on their devices, for each call of attention.

        Args:
            forward: what they are of.
            count: of pages.
            size: tokens of a page.
        """
        wanted = self.of_pages(forward, count, size)
        return jax.jit(
            lambda: jax.tree.map(lambda page: jnp.zeros(page.shape, page.dtype), wanted),
            out_shardings=jax.tree.map(lambda page: page.sharding, wanted),
        )()


def placed(model: Model, found: Plan, mesh: Mesh | AbstractMesh) -> Placed:
    """Where the arrays of a model live under a plan.

    Args:
        model: from a front end in `annotation/`.
        found: see `serving_layout`.
        mesh: of the plan.
    """
    layouts = {one.path: named_sharding(mesh, one.compute) for one in found.parameters}

    def of(path: KeyPath, _: Leaf) -> NamedSharding:
        return layouts[path_text(path)]

    return Placed(mesh=mesh, params=jax.tree_util.tree_map_with_path(of, model.params))


def serving_layout(
    model: Model, forward: Forward, tensor: int, *, topology: str | Topology, longest: int
) -> Plan:
    """Lays a model out over some devices, by a plan that trains it on as many of twice the memory:
    one for weights, and one for the gradients that nobody has here.

    Args:
        model: from a front end in `annotation/`.
        forward: its forward pass.
        tensor: devices that share every layer.
        topology: the machine, of at least as many.
        longest: tokens of the longest request.

    Raises:
        PinError, InfeasibleError: the model cannot be shared by so many devices.
    """

    def loss(module: Tree, tokens: jax.Array) -> jax.Array:
        return jnp.mean(forward(module, tokens).astype(jnp.float32))

    machine = parse_topology(topology) if isinstance(topology, str) else topology
    roomy = replace(
        machine.chip,
        hbm_bytes=2 * machine.chip.hbm_bytes,
        reserved_bytes=2 * machine.chip.reserved_bytes,
    )

    def of(seq: int) -> Plan:
        return plan(
            model,
            loss,
            optax.sgd(1.0),
            jax.ShapeDtypeStruct((ROWS, seq), jnp.int32),
            topology=replace(machine, chip=roomy),
            pin={"mesh": {"tensor": tensor}, "zero": 0, "microbatches": 1},
        )

    try:
        return of(min(longest, TOKENS))
    except ModelError:  # a model may want whole blocks of tokens
        return of(longest)
