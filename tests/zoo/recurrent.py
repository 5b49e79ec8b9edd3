"""Models with a recurrence over time: a scan, an associative scan and a running sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from tests.zoo.case import VOCAB, named, param
from tests.zoo.decoder import case

EMBED, STATE = 32, 64


class Gated(nnx.Module):
    """A minimal gated recurrence (arXiv:1603.09420) by `jax.lax.scan` over time, with a product in
    the loop.
    """

    def __init__(self, rngs: nnx.Rngs, *, annotated: bool):
        self.embedding = nnx.Embed(
            VOCAB, EMBED, embedding_metadata=named(annotated, "vocab", "embed"), rngs=rngs
        )
        self.input = nnx.Linear(
            EMBED,
            STATE,
            kernel_metadata=named(annotated, "embed", "state"),
            bias_metadata=named(annotated, "state"),
            rngs=rngs,
        )
        self.recurrent = param(annotated, rngs, (STATE, STATE), ("state_in", "state"), STATE)
        self.gate = param(annotated, rngs, (STATE, STATE), ("state_in", "state"), STATE)
        self.head = nnx.Linear(
            STATE, VOCAB, kernel_metadata=named(annotated, "state", "vocab"), rngs=rngs
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        recurrent, gate = self.recurrent[...], self.gate[...]

        def step(hidden: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            keep = jax.nn.sigmoid(x + hidden @ gate)
            hidden = keep * hidden + (1 - keep) * jnp.tanh(x + hidden @ recurrent)
            return hidden, hidden

        x = jnp.swapaxes(self.input(self.embedding(ids)), 0, 1)
        _, states = jax.lax.scan(step, jnp.zeros(x.shape[1:]), x)
        return self.head(jnp.swapaxes(states, 0, 1))


class FlaxGRU(nnx.Module):
    """Flax's own recurrent layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.layer = nnx.RNN(nnx.GRUCell(EMBED, STATE, rngs=rngs))
        self.head = nnx.Linear(STATE, VOCAB, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedding(ids)
        return self.head(self.layer(x, initial_carry=jnp.zeros((x.shape[0], STATE))))


class StateSpace(nnx.Module):
    """A diagonal state-space block (arXiv:2208.04933) by `jax.lax.associative_scan`."""

    def __init__(self, rngs: nnx.Rngs, *, annotated: bool):
        self.embedding = param(annotated, rngs, (VOCAB, EMBED), ("vocab", "embed"), EMBED)
        self.input = param(annotated, rngs, (EMBED, STATE), ("embed", "state"), EMBED)
        self.decay = param(annotated, rngs, (STATE,), ("state",), 1)
        self.output = param(annotated, rngs, (STATE, EMBED), ("state", "embed"), STATE)
        self.head = param(annotated, rngs, (EMBED, VOCAB), ("embed", "vocab"), EMBED)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedding[...][ids]
        drive = x @ self.input[...]
        decay = jnp.broadcast_to(jax.nn.sigmoid(self.decay[...]), drive.shape)
        _, states = jax.lax.associative_scan(
            lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, drive), axis=1
        )
        return (x + jnp.tanh(states) @ self.output[...]) @ self.head[...]


class LinearAttention(nnx.Module):
    """Attention without a softmax (arXiv:2006.16236): running sums of outer products."""

    def __init__(self, rngs: nnx.Rngs, *, annotated: bool):
        def projection(outputs: int, names: tuple[str, str]) -> nnx.Linear:
            return nnx.Linear(
                EMBED, outputs, use_bias=False, kernel_metadata=named(annotated, *names), rngs=rngs
            )

        self.embedding = nnx.Embed(
            VOCAB, EMBED, embedding_metadata=named(annotated, "vocab", "embed"), rngs=rngs
        )
        self.q, self.k = projection(8, ("embed", "state")), projection(8, ("embed", "state"))
        self.v = projection(EMBED, ("embed", "value"))
        self.head = nnx.Linear(
            EMBED, VOCAB, kernel_metadata=named(annotated, "value", "vocab"), rngs=rngs
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedding(ids)
        q, k = nnx.elu(self.q(x)) + 1, nnx.elu(self.k(x)) + 1
        memory = jnp.cumsum(k[..., :, None] * self.v(x)[..., None, :], axis=1)
        mixed = (
            jnp.einsum("bsk,bskv->bsv", q, memory)
            / jnp.einsum("bsk,bsk->bs", q, jnp.cumsum(k, axis=1))[..., None]
        )
        return self.head(mixed)


CASES = (
    case("recurrent", lambda rngs: Gated(rngs, annotated=True), annotated=True),
    case("recurrent", FlaxGRU, annotated=False),
    case("state-space", lambda rngs: StateSpace(rngs, annotated=True), annotated=True),
    case("state-space", lambda rngs: StateSpace(rngs, annotated=False), annotated=False),
    case("linear-attention", lambda rngs: LinearAttention(rngs, annotated=True), annotated=True),
    case("linear-attention", lambda rngs: LinearAttention(rngs, annotated=False), annotated=False),
)
