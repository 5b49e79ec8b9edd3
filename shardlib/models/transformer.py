"""The reference model: a decoder transformer in Flax NNX, built from a `TransformerConfig`.

Layers of one kind are one stacked module, made with `nnx.vmap` and run with `jax.lax.scan`, so that
tracing takes the same time for 2 layers and for 126. The logical axes of the parameters are
"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "layers", and where they occur "expert",
"expert_mlp", "q_lora", "kv_lora", "rope_dim", "value_dim", "positions".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlib.functions.routing import stepped
from shardlib.models.blocks import Block, Group, Norm, Rotary, Terms, View, cross_entropy, weight
from shardlib.models.config import RopeScaling, TransformerConfig

#: (model, batch) -> (loss, metrics); the batch has "inputs" and "targets", int32 [batch, seq] each,
#: and where documents share rows "segments" (int32, numbers of documents; a token sees its own
#: alone), "positions" (int32, within the document; only learned positions look at them, since
#: rotary ones are relative) and "weights" (float32, of each target in the mean).
Loss = Callable[["Transformer", Mapping[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]]


class Transformer(nnx.Module):
    """A decoder transformer.

    Args:
        config: what to build.
        rngs: random streams; parameters are drawn from `params`.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.config = config
        dtype, std = config.param_dtype, config.embed**-0.5
        self.embedding = weight(
            rngs, (config.vocab_size, config.embed), ("vocab", "embed"), std, dtype
        )
        if config.learned_positions:
            self.positions = weight(
                rngs, (config.max_seq, config.embed), ("positions", "embed"), std, dtype
            )
        first = config.experts.first_dense if config.experts else 0
        if first:
            self.dense_layers = _stack(config, first, False, rngs)
        self.layers = _stack(config, config.layers - first, config.experts is not None, rngs)
        self.norm = Norm(config.embed, "embed", config)
        if not config.tied:
            self.head = weight(
                rngs, (config.embed, config.vocab_size), ("embed", "vocab"), std, dtype
            )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, seq, vocab], float32, for int32 tokens [batch, seq]."""
        return self.forward(tokens)[0]

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """Normalised states [batch, seq, embed] before the logits, for int32 tokens [batch,
        seq].
        """
        return self._states(tokens, None, None)[0]

    def forward(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, Terms]:
        """Logits, and what the experts say of their routing, by layer with experts; see
        `MixtureOfExperts`.

        Args:
            tokens: int32 [batch, seq].
            segments: number of the document of every token, int32 [batch, seq]; None where a row is
                one document.
            positions: of every token in its document, int32 [batch, seq]; by default in its row.
        """
        x, terms = self._states(tokens, segments, positions)
        return self._logits(x), terms

    def _states(
        self, tokens: jax.Array, segments: jax.Array | None, positions: jax.Array | None
    ) -> tuple[jax.Array, Terms]:
        config, seq = self.config, tokens.shape[1]
        x = jnp.take(self.embedding[...], tokens, axis=0, mode="clip").astype(config.compute_dtype)
        if config.embed_scale:
            x = x * jnp.asarray(config.embed**0.5, x.dtype)
        if config.learned_positions:
            learned = (
                self.positions[:seq]
                if positions is None
                else jnp.take(self.positions[...], positions, axis=0, mode="clip")
            )
            x = x + learned.astype(x.dtype)
        terms, first = Terms(), 0
        for stack, count in self._stacks():
            x, stack_terms = _run(stack, x, config, range(first, first + count), segments)
            terms, first = terms | stack_terms, first + count
        return self.norm(x), terms

    def rebalance(self, loads: jax.Array) -> None:
        """Moves the biases of routers towards the mean load, from loads [layers, experts]."""
        assert self.config.experts is not None
        last = self.layers.blocks[-1] if isinstance(self.layers, Group) else self.layers
        bias = last.experts.bias
        bias[...] = stepped(bias[...], loads, self.config.experts.bias_rate)

    def _stacks(self) -> list[tuple[Block | Group, int]]:
        first = self.config.experts.first_dense if self.config.experts else 0
        return [
            *([(self.dense_layers, first)] if first else []),
            (self.layers, self.config.layers - first),
        ]

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.config.tied:
            logits = jnp.einsum(
                "bsd,vd->bsv",
                x,
                self.embedding[...].astype(x.dtype),
                preferred_element_type=jnp.float32,
            )
        else:
            logits = jnp.einsum(
                "bsd,dv->bsv", x, self.head[...].astype(x.dtype), preferred_element_type=jnp.float32
            )
        cap = self.config.logit_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits


def _stack(config: TransformerConfig, count: int, sparse: bool, rngs: nnx.Rngs) -> Block | Group:
    """Makes `count` blocks as one, or as one group of those that repeat, whose parameters have a
    leading "layers" dim.
    """
    interval = config.experts.every if config.experts and sparse else 1

    @nnx.split_rngs(splits=count // interval)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs: nnx.Rngs) -> Block | Group:
        return Block(config, sparse, rngs) if interval == 1 else Group(config, interval, rngs)

    return make(rngs)


def _run(
    stack: Block | Group,
    x: jax.Array,
    config: TransformerConfig,
    layers: range,
    segments: jax.Array | None,
) -> tuple[jax.Array, Terms]:
    """Runs the stacked blocks or groups one after another; terms have a leading dim for them."""
    definition, state = nnx.split(stack)
    view_of = _views(config, x.shape[1], layers, segments)
    count = len(stack.blocks) if isinstance(stack, Group) else 1
    flags = np.array([config.is_global(layer) for layer in layers]).reshape(-1, count)

    def body(
        carry: jax.Array, layer: tuple[nnx.State, jax.Array | None]
    ) -> tuple[jax.Array, Terms]:
        views = [view_of(None if layer[1] is None else layer[1][k]) for k in range(count)]
        block = nnx.merge(definition, layer[0])
        return block(carry, views) if isinstance(block, Group) else block(carry, views[0])

    mixed = flags.any() and not flags.all()
    return jax.lax.scan(body, x, (state, jnp.asarray(flags) if mixed else None))


def _views(
    config: TransformerConfig, seq: int, layers: range, segments: jax.Array | None
) -> Callable[[jax.Array | None], View]:
    """Returns what a layer sees, given whether it sees all; None where all layers of the stack are
    alike.
    """

    def view(seen_all: bool) -> View:
        theta = (
            config.rope_theta
            if seen_all or not config.rope_local_theta
            else config.rope_local_theta
        )
        scaling = config.rope_scaling if seen_all or not config.rope_local_theta else None
        table = None if config.learned_positions else rotary(seq, config.rope_dim, theta, scaling)
        return View(
            window=0 if seen_all else config.sliding_window,
            global_layer=None,
            rotary=table,
            segments=segments,
        )

    if len({config.is_global(layer) for layer in layers}) == 1:
        only = view(config.is_global(layers[0]))
        return lambda _: only
    global_view, local = view(True), view(False)

    def chosen(flag: jax.Array | None) -> View:
        assert flag is not None
        return View(
            window=config.sliding_window,
            global_layer=flag,
            rotary=_choose(flag, global_view.rotary, local.rotary),
            segments=segments,
        )

    return chosen


def _choose(flag: jax.Array | None, first: Rotary | None, second: Rotary | None) -> Rotary | None:
    if flag is None or first is None or second is None:
        return first
    return Rotary(
        cos=jnp.where(flag, first.cos, second.cos), sin=jnp.where(flag, first.sin, second.sin)
    )


def build(config: TransformerConfig) -> tuple[Callable[[nnx.Rngs], Transformer], Loss]:
    """Returns the constructor and the loss of a configuration, as `shardlib.compile` takes them."""

    def init(rngs: nnx.Rngs) -> Transformer:
        return Transformer(config, rngs)

    def loss(
        model: Transformer, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, terms = model.forward(
            batch["inputs"], batch.get("segments"), batch.get("positions")
        )
        entropy, experts = (
            cross_entropy(logits, batch["targets"], batch.get("weights")),
            config.experts,
        )
        if experts is None:
            return entropy, {"cross_entropy": entropy}
        if experts.bias_rate:
            model.rebalance(terms.pop("loads"))
        sums = {name: term.sum() for name, term in terms.items()}
        total = entropy + experts.balance * sums["balance"]
        return total + experts.z_loss * sums["router_z"] if experts.z_loss else total, {
            "cross_entropy": entropy,
            **sums,
        }

    return init, loss


def example_batch(
    config: TransformerConfig, batch: int, seq: int, *, packed: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract batch of a training step; `packed` where documents share rows, see `Loss`."""
    config.check_seq(seq)
    dtypes = {"inputs": jnp.int32, "targets": jnp.int32} | (
        {"segments": jnp.int32, "positions": jnp.int32, "weights": jnp.float32} if packed else {}
    )
    return {name: jax.ShapeDtypeStruct((batch, seq), dtype) for name, dtype in dtypes.items()}


def frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians a position for each pair, [dim / 2], stretched as `scaling` says.

    Args:
        scaling: how wavelengths are stretched; None for not at all.
    """
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    unscaled_share = (
        _kept_llama3(plain, scaling)
        if scaling.kind == "llama3"
        else _kept_yarn(dim, theta, scaling)
    )
    return plain * unscaled_share + plain / scaling.factor * (1 - unscaled_share)


def _kept_llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Share of each frequency that stays as it is: 1 for short waves, 0 for long ones (Llama 3.1
    reference code).
    """
    turns = scaling.original_seq * plain / (2 * math.pi)
    return np.clip(
        (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency), 0.0, 1.0
    )


def _kept_yarn(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """The same for YaRN: a ramp over the pairs, between those that turn `high_frequency` and
    `low_frequency` times.
    """

    def pair(turns: float) -> float:
        return dim * math.log(scaling.original_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling.high_frequency)), 0)
    high = min(math.ceil(pair(scaling.low_frequency)), dim - 1)
    return 1 - np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)


def rotary(seq: int, dim: int, theta: float, scaling: RopeScaling | None) -> Rotary:
    """Tables for positions 0 to seq - 1 and heads whose turned part has `dim` dims.

    Args:
        scaling: how wavelengths are stretched; None for not at all.

    Returns:
        Cosines and sines, float32 [seq, dim / 2] each.
    """
    positions = jax.lax.broadcasted_iota(jnp.float32, (seq, dim // 2), 0)
    angles = positions * jnp.asarray(frequencies(dim, theta, scaling), jnp.float32)
    return Rotary(cos=jnp.cos(angles), sin=jnp.sin(angles))
