"""Every layer class of `flax.nnx` and `flax.linen` with names, five steps on data 2 x fsdp 2 x
tensor 2 beside plain JAX; all of them with `--every-case`.
"""

from __future__ import annotations

import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from shardlib.errors import AnnotationError
from tests.zoo.flax_layers import CASES, full_names, has_params, plain_losses, planned_losses

#: Layers that assign to their kernel in the forward pass.
ASSIGNING = ("flax.nnx.SpectralNorm", "flax.nnx.WeightNorm")


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    "case, names",
    [(case, ("all", "leading")[at % 2]) for at, case in enumerate(CASES)],
)
def test_five_steps_are_those_of_plain_jax(case: str, names: str):
    if not has_params(case):
        return
    if case in ASSIGNING:
        with pytest.raises(AnnotationError, match="the loss assigns to trained parameters"):
            planned_losses(case, names)
        return
    losses, program = planned_losses(case, names)
    np.testing.assert_allclose(losses, plain_losses(case), rtol=1e-5)
    assert losses[-1] != losses[0]
    assert program.plan.mesh.devices == 8
    assert "diagnostic-failed" not in {one.code for one in program.findings}


def test_every_layer_is_there():
    """The classes come from the packages; these have been there from the first."""
    assert {"flax.nnx.LoRALinear", "flax.nnx.MultiHeadAttention", "flax.linen.DenseGeneral"} <= set(
        CASES
    )
    assert len(CASES) > 50
    assert all(
        hasattr({"nnx": nnx, "linen": nn}[one.split(".")[1]], one.split(".")[2]) for one in CASES
    )


def test_names_are_those_of_all_dims_that_an_initialiser_makes():
    names = full_names("flax.nnx.MultiHeadAttention")
    assert names("MultiHeadAttention.kernel_init") == tuple(
        f"MultiHeadAttention.kernel_init {dim}" for dim in range(3)
    )
    assert len(full_names("flax.linen.Conv")("Conv.kernel_init")) == 3
