"""Regions that are manual over the mesh: what their gradients cost in the compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.layout import MeshShape
from shardlib.lowering.collectives import Machine
from shardlib.lowering.mesh import device_mesh


@pytest.mark.parametrize("spec", [PartitionSpec(None, "data"), PartitionSpec("data", None)])
def test_gradients_are_not_reduced_along_axes_of_one_device(spec: PartitionSpec) -> None:
    mesh, _ = device_mesh(MeshShape(data=8))
    region = Machine(mesh=mesh, torus=False).manual(jnp.sin, (spec,), spec)
    array = np.linspace(0.0, 1.0, 64, dtype=np.float32).reshape(8, 8)
    place = NamedSharding(mesh, spec)
    gradient = jax.jit(jax.grad(lambda x: region(x).sum()), in_shardings=place, out_shardings=place)
    compiled = gradient.lower(array).compile()
    assert "all-reduce" not in (compiled.as_text() or "")
    np.testing.assert_allclose(compiled(jax.device_put(array, place)), np.cos(array), rtol=1e-6)
