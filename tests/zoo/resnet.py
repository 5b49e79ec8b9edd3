"""A convolutional residual net (arXiv:1512.03385) with group norm, or with batch norm and its
running statistics.
"""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx

from tests.zoo.case import Case, cross_entropy, named, nnx_case, normals, tokens

IMAGE, WIDTH, CLASSES = 8, 16, 8


def norm(kind: str, features: int, rngs: nnx.Rngs) -> nnx.Module:
    """A normalisation layer; batch norm trains, so it updates its statistics."""
    return (
        nnx.GroupNorm(features, num_groups=4, rngs=rngs)
        if kind == "group"
        else nnx.BatchNorm(features, rngs=rngs)
    )


def conv(
    annotated: bool,
    inputs: int,
    outputs: int,
    names: tuple[str, str],
    rngs: nnx.Rngs,
    stride: int = 1,
) -> nnx.Conv:
    """A 3x3 convolution without bias."""
    return nnx.Conv(
        inputs,
        outputs,
        (3, 3),
        strides=(stride, stride),
        use_bias=False,
        kernel_metadata=named(annotated, "height", "width", *names),
        rngs=rngs,
    )


class Residual(nnx.Module):
    """Two convolutions and a shortcut; a stride of 2 doubles the features."""

    def __init__(self, inputs: int, stride: int, rngs: nnx.Rngs, *, kind: str, annotated: bool):
        outputs = inputs * stride
        first, second = ("channel", "mid_channel"), ("mid_channel", "channel")
        self.conv1 = conv(annotated, inputs, outputs, first, rngs, stride)
        self.norm1 = norm(kind, outputs, rngs)
        self.conv2 = conv(annotated, outputs, outputs, second, rngs)
        self.norm2 = norm(kind, outputs, rngs)
        shortcut = named(annotated, "height", "width", "channel", "wide_channel")
        self.shortcut = (
            nnx.Conv(
                inputs,
                outputs,
                (1, 1),
                strides=(stride, stride),
                kernel_metadata=shortcut,
                rngs=rngs,
            )
            if stride > 1
            else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    """[batch, height, width, channel] images -> [batch, classes] logits."""

    def __init__(self, rngs: nnx.Rngs, *, kind: str, annotated: bool):
        block = partial(Residual, rngs=rngs, kind=kind, annotated=annotated)
        self.stem = conv(annotated, 3, WIDTH, ("colour", "channel"), rngs)
        self.norm = norm(kind, WIDTH, rngs)
        self.blocks = nnx.List([block(WIDTH, 1), block(WIDTH, 2)])
        self.head = nnx.Linear(
            2 * WIDTH, CLASSES, kernel_metadata=named(annotated, "channel", "classes"), rngs=rngs
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


def case(kind: str, *, annotated: bool) -> Case:
    """Classification of random images."""
    return nnx_case(
        f"resnet-{kind}norm",
        lambda rngs: ResNet(rngs, kind=kind, annotated=annotated),
        lambda model, batch: model(batch["images"]),
        lambda logits, batch: cross_entropy(logits, batch["labels"]),
        {"images": normals(0, IMAGE, IMAGE, 3), "labels": tokens(1, 1)[:, 0] % CLASSES},
        annotated=annotated,
        batch_axes={"images": ("batch", "height", "width", "colour"), "labels": ("batch",)},
    )


CASES = tuple(
    case(kind, annotated=annotated) for kind in ("group", "batch") for annotated in (True, False)
)
