"""Models of one shape and many sizes.

A family is a decoder that is known, made wider and deeper together: the width of a head, the number
of key heads, the ratio of feed-forward to width, vocabulary and everything else stay; the ratio of
width to layers stays near that of the known one. The loss of a transformer hardly depends on its
shape while the number of parameters stays (J. Kaplan et al., "Scaling laws for neural language
models", arXiv:2001.08361, section 3.1: a few percent over a factor of forty in that ratio).

>>> from shardlib.models import PRESETS
>>> sizes = family(PRESETS["llama3-8b"], 1.2e9, 1.3e9)
>>> [(one.embed, one.layers, round(one.parameter_count() / 1e9, 2)) for one in sizes]
[(2048, 12, 1.2), (2048, 13, 1.26)]
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardlib.errors import ArgumentError
from shardlib.models import EncoderDecoderConfig, TransformerConfig, UserModel
from shardlib.planning.units.quantity import parameters_text

#: Heads that a width is a multiple of, where each has its own keys: so many devices may share them.
HEADS = 8
#: Widths of the feed-forward are multiples of this where the known one is.
MLP = 256


def family(
    model: TransformerConfig | EncoderDecoderConfig | UserModel, smallest: float, largest: float
) -> list[TransformerConfig]:
    """Models of the shape of a known one, the smallest first."""
    if not isinstance(model, TransformerConfig) or model.experts or model.latent:
        raise ArgumentError(
            f"{model.name} names no family: sizes are those of a dense decoder, and of no"
            " user's own function\nTry: llama3-8b, or a .toml card"
        )
    models: list[TransformerConfig] = []
    unit, width = _unit(model), 0
    while True:
        width += unit
        sizes = [_resized(model, width, layers) for layers in _layers(model, width, unit)]
        if sizes and sizes[0].parameter_count() > largest:
            break
        models += [size for size in sizes if smallest <= size.parameter_count() <= largest]
    return sorted(models, key=TransformerConfig.parameter_count)


def _unit(model: TransformerConfig) -> int:
    """What widths are multiples of."""
    multi_head = model.kv_heads == model.heads
    return model.head_dim * (math.gcd(HEADS, model.heads) if multi_head else model.kv_heads)


def _layers(model: TransformerConfig, width: int, unit: int) -> range:
    """Numbers of layers for which this width is nearer to the known shape than the next: parameters
    of the layers grow with layers times the square of the width, those of the shape with its cube.
    """
    ratio = model.layers / model.embed / width**2
    low, high = ((width + side * unit / 2) ** 3 * ratio for side in (-1, 1))
    return range(max(1, math.ceil(low)), math.ceil(high))


def _resized(model: TransformerConfig, width: int, layers: int) -> TransformerConfig:
    heads = width * model.heads // model.embed
    step = MLP if model.mlp % MLP == 0 else 1
    sized = replace(
        model,
        embed=width,
        layers=layers,
        heads=heads,
        kv_heads=heads if model.kv_heads == model.heads else model.kv_heads,
        mlp=max(step, round(model.mlp / model.embed * width / step) * step),
    )
    return replace(sized, name=f"{model.name} at {parameters_text(sized.parameter_count())}")
