"""Memory and compute of a decoder whose layers are written one after the other, and of the same
decoder as a loop: predicted, and as the compilers of TPU and GPU make them.

    python -m benchmarks written_layers [--topology v5e:2x4 ...] [--remat none ...] [--price-again]

Flax layers in a Python list are what most people write. The compiler then keeps less of a layer for
the backward pass than a loop, which stacks all that autodiff saves (`shardlib.cost.activations`).
Four layers of 1,024, 8 heads, 32 rows of 1,024 tokens, over data. With `--price-again` nothing is
compiled: present predictions stand beside stored programs.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardlib
from benchmarks.environment import command_line, stored, write

WIDTH, INNER, HEADS, VOCABULARY, TOKENS, ROWS, LAYERS = 1024, 4096, 8, 32_000, 1024, 32, 4


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        def linear(rows: int, columns: int) -> nnx.Linear:
            return nnx.Linear(rows, columns, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

        self.before, self.between = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, INNER), linear(INNER, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(self.before(x)).reshape(*x.shape[:2], 3 * HEADS, WIDTH // HEADS)
        mixed = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=2), is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.between(x))))


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, blocks: nnx.Module) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.blocks = blocks


class Written(Decoder):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs, nnx.List([Block(rngs) for _ in range(LAYERS)]))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class Looped(Decoder):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs, nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))(rngs))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def layers(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        return self.embed.attend(self.norm(layers(self.embed(tokens), self.blocks)))


def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
    labels = batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def case(model: type[Decoder], topology: str, remat: str, row: dict[str, Any]) -> dict[str, Any]:
    """Predicted and compiled peak bytes and compute seconds of a step.

    Args:
        row: what was compiled before; {} compiles.
    """
    batch = {"tokens": jax.ShapeDtypeStruct((ROWS, TOKENS + 1), jnp.int32)}
    pin = {"mesh": {"data": 8}, "zero": 0, "microbatches": 1, "remat": remat}
    plan = shardlib.plan(model, loss, optax.adamw(1e-3), batch, topology=topology, pin=pin)
    if not row:
        report = shardlib.verify(
            model, loss, optax.adamw(1e-3), batch, topology=topology, plan=plan
        )
        assert report.compiled is not None, report
        row = {"compiled_bytes": report.compiled.device_bytes["peak"]}
        if report.compiled.compute_seconds:
            row["compiled_seconds"] = report.compiled.compute_seconds
    estimate = plan.estimate
    predicted = int(estimate.device_bytes.peak)
    row |= {"predicted_bytes": predicted, "error": predicted / row["compiled_bytes"] - 1}
    if "compiled_seconds" in row:
        row["predicted_seconds"] = estimate.seconds.compute + estimate.seconds.optimizer
    return row


def main() -> None:
    parser = command_line(__doc__, "written_layers_jax-*.json")
    parser.add_argument("--topology", nargs="*", default=["v5e:2x4", "h100:8"])
    parser.add_argument("--remat", nargs="*", default=["none", "dots", "full"])
    parser.add_argument("--layers", nargs="*", default=["written", "looped"])
    parser.add_argument("--price-again", action="store_true", help="compile nothing")
    options = parser.parse_args()
    rows = stored(options.out, "rows") if options.out.exists() else {}
    for topology in options.topology:
        for remat in options.remat:
            for layers in options.layers:
                model = {"written": Written, "looped": Looped}[layers]
                name = f"{layers}, {topology}, {remat}"
                before = rows.get(name, {}) if options.price_again else {}
                if before or not options.price_again:
                    rows[name] = case(model, topology, remat, before)
                    print(name, rows[name], flush=True)
                    write(options.out, {"benchmark": "written_layers", "rows": rows})


if __name__ == "__main__":
    main()
