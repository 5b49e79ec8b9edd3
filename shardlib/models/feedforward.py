"""What happens to a token on its own? The dense feed-forward, and the mixture of experts.

The mixture is dropless: tokens are sorted by expert and multiplied with `jax.lax.ragged_dot`, so every token visits all the
experts that it chose and the FLOPs are those of the chosen experts, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.models.config import Experts, TransformerConfig
from shardlib.models.parameters import constant, weight

_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu, "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False), "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    def __init__(self, config: TransformerConfig, width: int, axis: str, rngs: nnx.Rngs):
        self.activation, self.gated, self.biased = config.activation, config.gated, config.mlp_bias
        dtype, embed = config.param_dtype, config.embed
        if config.gated:
            self.gate = weight(rngs, (embed, width), ("embed", axis), embed**-0.5, dtype)
        self.up = weight(rngs, (embed, width), ("embed", axis), embed**-0.5, dtype)
        self.down = weight(rngs, (width, embed), (axis, "embed"), (2 * config.layers * width) ** -0.5, dtype)
        if config.mlp_bias:
            if config.gated:
                self.gate_bias = constant(0.0, (width,), (axis,), dtype)
            self.up_bias = constant(0.0, (width,), (axis,), dtype)
            self.down_bias = constant(0.0, (embed,), ("embed",), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Transforms `x` [batch, seq, embed]."""
        act = _ACTIVATIONS[self.activation]
        hidden = self._linear(x, "up")
        hidden = act(self._linear(x, "gate")) * hidden if self.gated else act(hidden)
        return self._linear(hidden, "down")

    def _linear(self, x: jax.Array, name: str) -> jax.Array:
        y = x @ getattr(self, name)[...].astype(x.dtype)
        return y + getattr(self, f"{name}_bias")[...].astype(x.dtype) if self.biased else y


class MixtureOfExperts(nnx.Module):
    """Routed experts, and the experts that every token visits. Returns the output and the load-balancing term."""

    def __init__(self, config: TransformerConfig, experts: Experts, rngs: nnx.Rngs):
        self.experts, self.activation, self.gated = experts, config.activation, config.gated
        dtype, embed, count, width = config.param_dtype, config.embed, experts.count, experts.mlp
        self.router = weight(rngs, (embed, count), ("embed", "expert"), embed**-0.5, dtype)
        inner, outer = ("expert", "embed", "expert_mlp"), ("expert", "expert_mlp", "embed")
        if config.gated:
            self.gate = weight(rngs, (count, embed, width), inner, embed**-0.5, dtype)
        self.up = weight(rngs, (count, embed, width), inner, embed**-0.5, dtype)
        self.down = weight(rngs, (count, width, embed), outer, (2 * config.layers * width) ** -0.5, dtype)
        if experts.shared:
            self.shared = FeedForward(config, experts.shared * width, "mlp", rngs)
        if experts.shared_gate:
            self.shared_gate = weight(rngs, (embed,), ("embed",), embed**-0.5, dtype)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Transforms `x` [batch, seq, embed]."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen, scores = self._route(tokens)
        sizes = jnp.bincount(chosen.reshape(-1), length=self.experts.count).astype(jnp.int32)
        out = self._visit(tokens, weights, chosen, sizes).reshape(x.shape)
        if self.experts.shared:
            shared = self.shared(x)
            if self.experts.shared_gate:
                shared = jax.nn.sigmoid(x @ self.shared_gate[...].astype(x.dtype))[..., None] * shared
            out = out + shared
        visits = sizes.astype(jnp.float32) / (tokens.shape[0] * self.experts.per_token)
        return out, self.experts.count * jnp.sum(visits * scores.mean(0))

    def _route(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Weights and experts [tokens, per_token] of every token, and the scores [tokens, experts] as shares."""
        experts = self.experts
        logits = tokens.astype(jnp.float32) @ self.router[...].astype(jnp.float32)
        scores = jax.nn.softmax(logits, axis=-1) if experts.router == "softmax" else jax.nn.sigmoid(logits)
        allowed = scores if experts.groups == 1 else jnp.where(self._allowed(scores), scores, -1.0)
        weights, chosen = jax.lax.top_k(allowed, experts.per_token)
        if experts.normalise:
            weights = weights / weights.sum(-1, keepdims=True)
        shares = scores if experts.router == "softmax" else scores / scores.sum(-1, keepdims=True)
        return weights * experts.scaling, chosen, shares

    def _allowed(self, scores: jax.Array) -> jax.Array:
        """Mask [tokens, experts] of the experts in the best groups of each token."""
        experts = self.experts
        grouped = scores.reshape(scores.shape[0], experts.groups, -1)
        ranks = jax.lax.top_k(grouped, min(experts.group_score, grouped.shape[-1]))[0].sum(-1)
        best = jax.lax.top_k(ranks, experts.groups_per_token)[1]
        mask = (best[:, :, None] == jnp.arange(experts.groups)).any(1)
        return jnp.broadcast_to(mask[:, :, None], grouped.shape).reshape(scores.shape)

    def _visit(self, tokens: jax.Array, weights: jax.Array, chosen: jax.Array, sizes: jax.Array) -> jax.Array:
        """Sorts the visits by expert, multiplies, and brings the results home."""
        act, per_token = _ACTIVATIONS[self.activation], self.experts.per_token
        order = jnp.argsort(chosen.reshape(-1))
        rows = jnp.take(tokens, order // per_token, axis=0, mode="clip")
        hidden = jax.lax.ragged_dot(rows, self.up[...].astype(rows.dtype), sizes)
        gate = jax.lax.ragged_dot(rows, self.gate[...].astype(rows.dtype), sizes) if self.gated else None
        hidden = act(hidden) if gate is None else act(gate) * hidden
        results = jax.lax.ragged_dot(hidden, self.down[...].astype(rows.dtype), sizes)
        home = jnp.take(results, jnp.argsort(order), axis=0, mode="clip").reshape(*weights.shape, -1)
        return jnp.einsum("nk,nkd->nd", weights.astype(home.dtype), home)
