"""Reference models: `load` finds one, `build` makes it, `example_batch` is a batch for it.

Finding a model and counting its parameters needs no JAX; building one does.

blocks.py       the parts of the reference models
config.py       configurations of transformers: decoders and encoder-decoders
huggingface.py  families of models on Hugging Face
presets.py      models by name, in TOML files, and in the `config.json` of Hugging Face
transformer.py  the reference decoder and encoder-decoder
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardlib.jax_types import Function
from shardlib.models.config import (
    EncoderDecoderConfig,
    Experts,
    LatentAttention,
    RopeScaling,
    TransformerConfig,
)
from shardlib.models.presets import PRESETS, UserModel, load

if TYPE_CHECKING:
    import jax

__all__ = [
    "PRESETS",
    "EncoderDecoderConfig",
    "Experts",
    "LatentAttention",
    "RopeScaling",
    "TransformerConfig",
    "UserModel",
    "build",
    "example_batch",
    "load",
]


def build(
    config: TransformerConfig | EncoderDecoderConfig,
) -> tuple[Function, Function]:
    """Returns (init, loss) of a configuration, as `shardlib.compile` takes them."""
    from shardlib.models import transformer

    return (
        transformer.build_encoder_decoder(config)
        if isinstance(config, EncoderDecoderConfig)
        else transformer.build(config)
    )


def example_batch(
    config: TransformerConfig | EncoderDecoderConfig, batch: int, seq: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract batch of a training step: "inputs" and "targets", for an encoder-decoder also
    "decoder_inputs", int32 [batch, seq] each.
    """
    from shardlib.models import transformer

    return (
        transformer.encoder_decoder_batch(config, batch, seq)
        if isinstance(config, EncoderDecoderConfig)
        else transformer.example_batch(config, batch, seq)
    )
