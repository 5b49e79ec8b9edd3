"""Reference models: `load` finds one, `build` makes it, `example_batch` is what it eats.

Finding a model and counting its parameters needs no JAX; building one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardlib.models.config import Experts, LatentAttention, RopeScaling, TransformerConfig
from shardlib.models.load import UserModel, load
from shardlib.models.presets import PRESETS

if TYPE_CHECKING:
    import jax

__all__ = ["PRESETS", "Experts", "LatentAttention", "RopeScaling", "TransformerConfig", "UserModel", "build", "example_batch", "load"]


def build(config: TransformerConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns (init, loss) of a configuration, as `shardlib.compile` takes them; see `transformer.build`."""
    from shardlib.models import transformer

    return transformer.build(config)


def example_batch(config: TransformerConfig, batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract batch of a training step: "inputs" and "targets", int32 [batch, seq] each.

    Raises:
        ModelError: the sequence is longer than the model's.
    """
    from shardlib.models import transformer

    return transformer.example_batch(config, batch, seq)
