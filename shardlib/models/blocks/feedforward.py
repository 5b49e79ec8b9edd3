"""What happens to a token on its own: the dense feed-forward, and the mixture of experts.

Routing and experts are `shardlib.functions`: without a capacity every token visits all the experts
that it chose, and the FLOPs are those of the chosen experts, no more.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.functions.activations import ACTIVATIONS
from shardlib.functions.experts import visit
from shardlib.functions.routing import balance_loss, loads, route, z_loss
from shardlib.models.blocks.low_rank import adapted
from shardlib.models.blocks.parameters import constant, weight
from shardlib.models.config import TransformerConfig
from shardlib.models.config_parts import Experts

#: What training wants to know of a layer, by name; empty for a layer without experts.
Terms = dict[str, jax.Array]


class FeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    def __init__(self, config: TransformerConfig, width: int, axis: str, rngs: nnx.Rngs):
        self.activation, self.gated, self.biased = config.activation, config.gated, config.mlp_bias
        dtype, embed = config.param_dtype, config.embed
        if config.gated:
            self.gate = weight(rngs, (embed, width), ("embed", axis), embed**-0.5, dtype)
        self.up = weight(rngs, (embed, width), ("embed", axis), embed**-0.5, dtype)
        self.down = weight(
            rngs, (width, embed), (axis, "embed"), (2 * config.layers * width) ** -0.5, dtype
        )
        if config.mlp_bias:
            if config.gated:
                self.gate_bias = constant(0.0, (width,), (axis,), dtype)
            self.up_bias = constant(0.0, (width,), (axis,), dtype)
            self.down_bias = constant(0.0, (embed,), ("embed",), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Transforms `x` [batch, seq, embed]."""
        act = ACTIVATIONS[self.activation]
        hidden = self._linear(x, "up")
        hidden = act(self._linear(x, "gate")) * hidden if self.gated else act(hidden)
        return self._linear(hidden, "down")

    def _linear(self, x: jax.Array, name: str) -> jax.Array:
        y = adapted(self, name, x, x @ getattr(self, name)[...].astype(x.dtype))
        return y + getattr(self, f"{name}_bias")[...].astype(x.dtype) if self.biased else y


class RouterBias(nnx.Variable[jax.Array]):
    """What is added to the scores of experts for choosing alone: no parameter, for it has no
    gradient (arXiv:2408.15664).
    """


class MixtureOfExperts(nnx.Module):
    """Routed experts, and the experts that every token visits.

    It needs no more of a configuration than its activation, its widths and its dtypes;
    `mixture_of_experts` makes one from these.
    """

    def __init__(self, config: TransformerConfig, experts: Experts, rngs: nnx.Rngs):
        self.experts, self.activation, self.gated = experts, config.activation, config.gated
        dtype, embed, count, width = config.param_dtype, config.embed, experts.count, experts.mlp
        self.router = weight(rngs, (embed, count), ("embed", "expert"), embed**-0.5, dtype)
        inner, outer = ("expert", "embed", "expert_mlp"), ("expert", "expert_mlp", "embed")
        if config.gated:
            self.gate = weight(rngs, (count, embed, width), inner, embed**-0.5, dtype)
        self.up = weight(rngs, (count, embed, width), inner, embed**-0.5, dtype)
        self.down = weight(
            rngs, (count, width, embed), outer, (2 * config.layers * width) ** -0.5, dtype
        )
        if experts.bias:
            self.bias = RouterBias(
                jnp.zeros((count,), jnp.float32), out_sharding=("expert",), eager_sharding=False
            )
        if experts.shared:
            self.shared = FeedForward(config, experts.shared * width, "mlp", rngs)
        if experts.shared_gate:
            self.shared_gate = weight(rngs, (embed,), ("embed",), embed**-0.5, dtype)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Terms]:
        """Transforms `x` [batch, seq, embed]."""
        experts = self.experts
        limit = experts.load_limit(x.shape[-2])
        logits = x.astype(jnp.float32) @ self.router[...].astype(jnp.float32)
        routing = route(
            logits,
            experts.per_token,
            scores=experts.router,
            bias=self.bias[...] if experts.bias else None,
            normalise=experts.normalise,
            scaling=experts.scaling,
            groups=experts.groups,
            groups_per_token=experts.groups_per_token,
            group_score=experts.group_score,
        )
        out, dropped = visit(
            x,
            routing.weights,
            routing.chosen,
            self.up[...],
            self.down[...],
            self.gate[...] if self.gated else None,
            activation=self.activation,
            capacity=limit,
        )
        if experts.shared:
            shared = self.shared(x)
            if experts.shared_gate:
                shared = (
                    jax.nn.sigmoid(x @ self.shared_gate[...].astype(x.dtype))[..., None] * shared
                )
            out = out + shared
        terms = {"balance": balance_loss(routing.shares, routing.chosen)}
        if experts.z_loss:
            terms["router_z"] = z_loss(logits)
        if limit is not None:
            terms["dropped"] = dropped
        if experts.bias_rate:
            terms["loads"] = loads(routing.chosen, experts.count)
        return out, terms


def mixture_of_experts(
    experts: Experts,
    embed: int,
    rngs: nnx.Rngs,
    *,
    activation: str = "silu",
    gated: bool = True,
    layers: int = 1,
    param_dtype: str = "float32",
) -> MixtureOfExperts:
    """Makes a mixture of experts for a model of one's own.

    Args:
        param_dtype: dtype of the parameters.
    """
    config = TransformerConfig(
        name="mixture of experts",
        vocab_size=1,
        heads=1,
        kv_heads=1,
        head_dim=2,  # which experts do not look at
        layers=layers,
        embed=embed,
        mlp=experts.mlp,
        activation=activation,
        gated=gated,
        experts=replace(experts, first_dense=0, every=1),
        param_dtype=param_dtype,
    )
    return MixtureOfExperts(config, experts, rngs)
