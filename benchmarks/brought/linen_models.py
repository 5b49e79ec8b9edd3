"""Models of Flax Linen that others wrote."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from benchmarks.brought.case import Case, integers, next_token, normals, of_linen

ROWS = 16


def unet() -> Case:
    """flaxdiff: the U-Net of a diffusion model."""
    from flaxdiff.models.simple_unet import Unet

    module = Unet(
        emb_features=32, feature_depths=(16, 32), attention_configs=({"heads": 2}, {"heads": 2}),
        num_res_blocks=1,
    )  # fmt: skip
    return _diffusion(module)


def dit() -> Case:
    """flaxdiff: a diffusion transformer."""
    from flaxdiff.models.simple_dit import SimpleDiT

    module = SimpleDiT(patch_size=4, emb_features=64, num_layers=2, num_heads=4)
    return _diffusion(module)


def _diffusion(module: nn.Module) -> Case:
    """The noise in an image, found from the noisy image, the time and a text."""
    batch = {
        "x": normals(0, ROWS, 16, 16, 3),
        "t": normals(1, ROWS),
        "text": normals(2, ROWS, 8, 16),
        "noise": normals(3, ROWS, 16, 16, 3),
    }

    def loss(params, batch):
        found = module.apply({"params": params}, batch["x"], batch["t"], batch["text"])
        return jnp.mean((found - batch["noise"]) ** 2)

    return of_linen("flaxdiff", module, (batch["x"], batch["t"], batch["text"]), loss, batch)


def resnet() -> Case:
    """flaxmodels: ResNet 18 with batch statistics."""
    from flaxmodels import ResNet18

    def wide(call, words, named, context):
        if hasattr(context.module, "param_dtype"):
            object.__setattr__(context.module, "param_dtype", jnp.float64)
        return call(*words, **named)

    class Wide(nn.Module):
        """The model with parameters in float64, too, which it has no word for."""

        @nn.compact
        def __call__(self, x, train):
            with nn.intercept_methods(wide):
                return ResNet18("logits", None, num_classes=16, dtype="float64")(x, train)

    module = Wide()
    batch = {"x": normals(0, ROWS, 16, 16, 3).astype(np.float64), "y": integers(1, 16, ROWS)}

    def loss(variables, batch):
        logits, updates = module.apply(variables, batch["x"], train=True, mutable=["batch_stats"])
        error = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return error.mean(), updates

    return of_linen(
        "flaxmodels", module, (batch["x"],), loss, batch, {"train": False},
        model="ResNet18", double=True,
    )  # fmt: skip


def experts() -> Case:
    """nano-moe-jax: a language model with experts and a loss that balances them."""
    from nano_moe import NanoMoE
    from nano_moe.config import NanoMoEConfig

    module = NanoMoE(
        NanoMoEConfig(
            vocab_size=128, n_layers=2, d_model=64, d_ff=128, block_size=32, dropout_rate=0.0
        )
    )
    batch = {"tokens": integers(0, 128, ROWS, 32)}

    def loss(params, batch):
        logits, balance = module.apply({"params": params}, batch["tokens"])
        return next_token(logits, batch["tokens"]) + 0.01 * balance

    return of_linen("nano-moe-jax", module, (batch["tokens"],), loss, batch)


def policy() -> Case:
    """brax: the policy network of its PPO."""
    from brax.training.networks import MLP

    module = MLP(layer_sizes=(64, 64, 16))
    batch = {"observation": normals(0, ROWS, 24), "action": normals(1, ROWS, 8)}

    def loss(params, batch):
        mean, scale = jnp.split(module.apply({"params": params}, batch["observation"]), 2, axis=-1)
        return jnp.mean(((batch["action"] - mean) * jnp.exp(-scale)) ** 2 / 2 + scale)

    return of_linen("brax", module, (batch["observation"],), loss, batch)


def vision_transformer() -> Case:
    """kauldron: its ViT encoder, with a head that the mean of tokens goes through."""
    from kauldron import modules

    module = nn.Sequential(
        [
            modules.VitEncoder.from_spec(
                num_heads=4, hidden_size=64, num_layers=2, patch_size=4, mlp_size=128, image="x"
            ),
            lambda tokens: tokens.mean(-2),
            nn.Dense(16),
        ]
    )
    batch = {"x": normals(0, ROWS, 16, 16, 3), "y": integers(1, 16, ROWS)}

    def loss(params, batch):
        logits = module.apply({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return of_linen("kauldron", module, (batch["x"],), loss, batch, model="VitEncoder")


def gemma() -> Case:
    """gemma: Gemma 3, small: local and global attention, normed queries and keys."""
    from gemma.gm import nn
    from gemma.gm.nn import config as configs

    kinds = configs.AttentionType
    config = configs.TransformerConfig(
        num_embed=128,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
        sliding_window_size=8,
    )

    class Small(nn.Gemma3_1B):
        config: configs.TransformerConfig = config

    module = Small(dtype=jnp.float32)
    batch = {"tokens": integers(0, 128, ROWS, 32)}

    def loss(params, batch):
        logits = module.apply({"params": params}, batch["tokens"]).logits
        return next_token(logits, batch["tokens"])

    return of_linen("gemma", module, (batch["tokens"],), loss, batch, model="Gemma3")


def equivariant() -> Case:
    """e3x: a network for molecules whose energies turn with them."""
    import e3x

    class Energies(nn.Module):
        @nn.compact
        def __call__(self, positions, numbers, targets, sources):
            def one(positions, numbers):
                apart = positions[sources] - positions[targets]
                basis = e3x.nn.basis(
                    apart, max_degree=2, num=8, radial_fn=e3x.nn.reciprocal_bernstein
                )
                x = e3x.nn.Embed(num_embeddings=10, features=32)(numbers)
                y = e3x.nn.MessagePass(max_degree=2)(x, basis, dst_idx=targets, src_idx=sources)
                y = e3x.nn.silu(e3x.nn.Dense(32)(e3x.nn.add(x, y)))
                return nn.Dense(1)(y[..., 0, 0, :]).sum()

            return nn.vmap(
                lambda module, *molecule: one(*molecule),
                variable_axes={"params": None},
                split_rngs={"params": False},
            )(self, positions, numbers)

    targets, sources = e3x.ops.sparse_pairwise_indices(6)
    module = Energies()
    batch = {
        "positions": normals(0, ROWS, 6, 3),
        "numbers": integers(1, 10, ROWS, 6),
        "energies": normals(2, ROWS),
    }

    def loss(params, batch):
        found = module.apply(
            {"params": params}, batch["positions"], batch["numbers"], targets, sources
        )
        return jnp.mean((found - batch["energies"]) ** 2)

    inputs = (batch["positions"], batch["numbers"], targets, sources)
    return of_linen("e3x", module, inputs, loss, batch, model="MessagePass")


MODELS = (unet, dit, resnet, experts, policy, vision_transformer, gemma, equivariant)
