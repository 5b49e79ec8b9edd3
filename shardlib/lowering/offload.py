"""Optimizer state offloaded to host memory, and its transfers to the device and back.

Arrays of optimizer state that have a parameter's shape rest in pinned memory of the host where the
plan says so (`pinned_host`), copied to the device for the update and back; the compiler decides
when. Everything is computed on the device: whatever is read is copied first, lest the compiler
computes where it lies. State on disk is read and written by the host
(`shardlib.lowering.disk`); a program for devices that are not here has it in host
memory, which is the same to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib.annotation.trees import Tree
from shardlib.findings import Finding
from shardlib.jax_types import KeyPath
from shardlib.lowering.mesh import HOST, owned, shapes_of
from shardlib.planner.plan import Plan

#: Memory of the device.
DEVICE = "device"


def reachable(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether the devices of a mesh have host memory at hand; abstract ones are taken to
    have it.
    """
    return isinstance(mesh, AbstractMesh) or all(
        HOST in {memory.kind for memory in device.addressable_memories()}
        for device in mesh.local_devices
    )


def offloading(
    plan: Plan, opt_state: Tree, params: Tree, cut: Tree, mesh: Mesh | AbstractMesh
) -> tuple[Tree, tuple[Finding, ...]]:
    """The shardings of optimizer state with the memories that a plan decides for."""
    if "optimizer" not in plan.offload and not (
        "disk" in plan.offload and isinstance(mesh, AbstractMesh)
    ):
        return cut, ()
    if not reachable(mesh):
        return cut, (
            Finding(
                code="no-host-memory",
                severity="warning",
                where="offload=optimizer",
                message=(
                    f"the devices cannot reach memory of the host ({HOST}): optimizer state stays"
                    " on the device"
                ),
                hint="leave the offload out, or a higher zero stage",
            ),
        )
    shapes = shapes_of(params)

    def place(path: KeyPath, leaf: Tree, sharding: NamedSharding) -> NamedSharding:
        return sharding if owned(path, leaf, shapes) is None else sharding.with_memory_kind(HOST)

    return jax.tree_util.tree_map_with_path(place, opt_state, cut), ()


def fetched(tree: Tree, shardings: Tree) -> Tree:
    """Arrays on the device; those that are stored there are passed on."""
    return _moved(
        tree,
        shardings,
        lambda leaf, sharding: jax.device_put(leaf, sharding.with_memory_kind(DEVICE)),
    )


def to_host(tree: Tree, shardings: Tree) -> Tree:
    """Arrays where they are stored; those that are stored on the device are passed on."""
    return _moved(tree, shardings, jax.device_put)


def _moved(tree: Tree, shardings: Tree, move: Callable[[Any, NamedSharding], Any]) -> Tree:
    return jax.tree.map(
        lambda leaf, sharding: move(leaf, sharding) if sharding.memory_kind == HOST else leaf,
        tree,
        shardings,
    )
