"""A vision transformer (arXiv:2010.11929): strided convolution into patches, attention, dropout or
a class token.

The annotated model pools by the mean and drops out, so it carries random state; the unannotated one
has a class token, so its sequence of 17 divides by nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from tests.zoo.case import BATCH, Case, cross_entropy, named, nnx_case, normals, tokens
from tests.zoo.encoder_decoder import EMBED, EncoderBlock

LAYERS, IMAGE, PATCH, CLASSES = 2, 16, 4, 8
PATCHES = (IMAGE // PATCH) ** 2


class ViT(nnx.Module):
    """[batch, height, width, channel] images -> [batch, classes] logits."""

    def __init__(self, rngs: nnx.Rngs, *, annotated: bool):
        self.patches = nnx.Conv(
            3,
            EMBED,
            (PATCH, PATCH),
            strides=(PATCH, PATCH),
            kernel_metadata=named(annotated, "height", "width", "channel", "embed"),
            rngs=rngs,
        )
        self.token = (
            None if annotated else nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, 1, EMBED)))
        )
        length = PATCHES if annotated else PATCHES + 1
        self.positions = nnx.Param(
            0.1 * jax.random.normal(rngs.params(), (length, EMBED)),
            **named(annotated, "seq", "embed"),
        )
        self.dropout = nnx.Dropout(0.1 if annotated else 0.0, rngs=rngs)
        self.blocks = nnx.List([EncoderBlock(rngs, annotated) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.head = nnx.Linear(
            EMBED, CLASSES, kernel_metadata=named(annotated, "embed", "classes"), rngs=rngs
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images).reshape(images.shape[0], PATCHES, EMBED)
        if self.token is not None:
            x = jnp.concatenate(
                [jnp.broadcast_to(self.token[...], (images.shape[0], 1, EMBED)), x], axis=1
            )
        x = self.dropout(x + self.positions[...])
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.token is not None else x.mean(axis=1))


def case(*, annotated: bool) -> Case:
    """Classification of random images."""
    return nnx_case(
        "vit",
        lambda rngs: ViT(rngs, annotated=annotated),
        lambda model, batch: model(batch["images"]),
        lambda logits, batch: cross_entropy(logits, batch["labels"]),
        {"images": normals(0, IMAGE, IMAGE, 3), "labels": tokens(1, 1)[:BATCH, 0] % CLASSES},
        annotated=annotated,
        batch_axes={"images": ("batch", "height", "width", "channel"), "labels": ("batch",)},
    )


CASES = (case(annotated=True), case(annotated=False))
