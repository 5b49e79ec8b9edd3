"""Models of Flax NNX that others wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.brought.case import Case, integers, next_token, of_nnx

ROWS, SEQ, VOCAB = 16, 32, 128


def llama3() -> Case:
    """google-tunix: Llama 3."""
    from tunix.models.llama3.model import Llama3, ModelConfig

    config = ModelConfig(
        num_layers=2, vocab_size=VOCAB, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16,
        num_kv_heads=2, rope_theta=10000, norm_eps=1e-5,
    )  # fmt: skip

    return _tunix("Llama3", lambda rngs: Llama3(config, rngs=rngs))


def qwen3_experts() -> Case:
    """google-tunix: Qwen 3 with experts."""
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    config = ModelConfig(
        num_layers=2, vocab_size=VOCAB, embed_dim=64, hidden_dim=64, num_heads=4, head_dim=16,
        num_kv_heads=2, rope_theta=10000, norm_eps=1e-6, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip

    return _tunix("Qwen3 (4 experts)", lambda rngs: Qwen3(config, rngs=rngs))


def _tunix(name: str, init: Callable[[Any], Any]) -> Case:
    """A decoder of google-tunix, with a causal mask."""

    def loss(model, batch):
        rows, length = batch["tokens"].shape
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
        logits, _ = model(batch["tokens"], positions, None, mask)
        return next_token(logits, batch["tokens"])

    return of_nnx("google-tunix", name, init, loss, {"tokens": integers(0, VOCAB, ROWS, SEQ)})


def mamba2() -> Case:
    """mamba2-jax: a state space model."""
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    return _state_space("mamba2-jax", Mamba2Config, Mamba2ForCausalLM)


def mamba3() -> Case:
    """mamba3-jax: its successor."""
    from mamba3_jax import Mamba3Config, Mamba3ForCausalLM

    return _state_space("mamba3-jax", Mamba3Config, Mamba3ForCausalLM)


def _state_space(package: str, configured: Any, made: Any) -> Case:
    config = configured(
        vocab_size=VOCAB, hidden_size=64, state_size=16, head_dim=16, chunk_size=16,
        num_hidden_layers=2,
    )  # fmt: skip

    def loss(model, batch):
        return model(batch["tokens"], labels=batch["tokens"])["loss"]

    return of_nnx(
        package, made.__name__, lambda rngs: made(config, rngs=rngs), loss,
        {"tokens": integers(0, VOCAB, ROWS, SEQ)},
    )  # fmt: skip


def masked_diffusion() -> Case:
    """dantinox: a language model that is trained by masking (LLaDA)."""
    from dantinox.core.config import ModelConfig
    from dantinox.core.model import Transformer

    config = ModelConfig(
        dim=64, n_heads=4, head_size=16, num_blocks=2, vocab_size=VOCAB, max_context=SEQ,
        causal=False,
    )  # fmt: skip

    def loss(model, batch):
        logits = model(batch["masked"], deterministic=True).logits
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["tokens"][..., None], axis=-1
        )[..., 0]
        return -(chosen * batch["hidden"]).sum() / batch["hidden"].sum()

    tokens = integers(0, VOCAB, ROWS, SEQ)
    hidden = np.random.default_rng(1).random(tokens.shape) < 0.5
    return of_nnx(
        "dantinox", "Transformer (masked diffusion)", lambda rngs: Transformer(config, rngs), loss,
        {
            "tokens": tokens,
            "masked": np.where(hidden, 4, tokens).astype(np.int32),
            "hidden": hidden.astype(np.float32),
        },
    )  # fmt: skip


MODELS = (llama3, qwen3_experts, mamba2, mamba3, masked_diffusion)
