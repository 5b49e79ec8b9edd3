"""A Llama in plain JAX, sharded by hand for TPUs: FSDP as a careful user writes it.

The mathematics, the dtypes and the parameter shapes are those of `shardlib.models.transformer`;
nothing is imported from there. Parameters and Adam moments are sharded over one axis, which the
batch is sharded over, too; the compiler gathers and reduces. Layers are a scan, rematerialised by
`jax.checkpoint`; attention is the splash kernel that comes with JAX, in a `jax.shard_map`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import export
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.models.config import TransformerConfig
from shardlib.verification.isolation import ExportedStep

AXIS = "fsdp"
#: Positions of a block of the kernel.
BLOCK = 512


@dataclass(frozen=True, kw_only=True)
class HandLlama:
    """The training step of a Llama on the devices of one mesh axis.

    Attributes:
        config: sizes of a dense decoder with as many heads of keys as of queries.
        mesh: of one axis, `AXIS`.
    """

    config: TransformerConfig
    mesh: AbstractMesh | Mesh

    def shapes(self) -> dict[str, tuple[tuple[int, ...], P]]:
        """Shape and sharding of every parameter."""
        c = self.config
        n, d, h, w, f = c.layers, c.embed, c.heads, c.head_dim, c.mlp
        heads = P(None, AXIS, None, None)
        return {
            "embedding": ((c.vocab_size, d), P(None, AXIS)),
            "attention_norm": ((n, d), P()),
            "query": ((n, d, h, w), heads),
            "key": ((n, d, h, w), heads),
            "value": ((n, d, h, w), heads),
            "out": ((n, h, w, d), P(None, None, None, AXIS)),
            "mlp_norm": ((n, d), P()),
            "gate": ((n, d, f), P(None, AXIS, None)),
            "up": ((n, d, f), P(None, AXIS, None)),
            "down": ((n, f, d), P(None, None, AXIS)),
            "norm": ((d,), P()),
            "head": ((d, c.vocab_size), P(AXIS, None)),
        }

    def loss(self, params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        """Mean cross entropy, nats."""
        table = params["embedding"].astype(jnp.bfloat16)
        x = self.rows(jnp.take(table, batch["inputs"], axis=0, mode="clip"))
        outside = ("embedding", "norm", "head")
        layers = {name: leaf for name, leaf in params.items() if name not in outside}
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (self.layer(x, w), None)), x, layers)
        logits = jnp.einsum(
            "bsd,dv->bsv",
            rms(x, params["norm"]),
            params["head"].astype(x.dtype),
            preferred_element_type=jnp.float32,
        )
        shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        places = jax.lax.broadcasted_iota(jnp.int32, shifted.shape, 2)
        target = jnp.where(places == batch["targets"][..., None], shifted, 0.0).sum(-1)
        return (jnp.log(jnp.exp(shifted).sum(-1)) - target).mean()

    def layer(self, x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        """One layer; residual stream in and out."""
        w = {k: v if k.endswith("norm") else v.astype(x.dtype) for k, v in weights.items()}
        y = rms(x, w["attention_norm"])
        query, key, value = (
            jnp.einsum("bsd,dhw->bshw", y, w[name]) for name in ("query", "key", "value")
        )
        mixed = self.attend(turn(query), turn(key), value)
        x = self.rows(x + jnp.einsum("bshw,hwd->bsd", mixed, w["out"]))
        y = rms(x, w["mlp_norm"])
        return self.rows(x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"])

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """Causal attention [batch, seq, heads, width], every device for its examples."""
        seq, heads = query.shape[1:3]

        def local(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            kernel: Any = splash.make_splash_mha(
                splash.MultiHeadMask([splash.CausalMask((seq, seq))] * heads),
                head_shards=1,
                q_seq_shards=1,
                block_sizes=splash.BlockSizes(
                    block_q=BLOCK,
                    block_kv=BLOCK,
                    block_q_dkv=BLOCK,
                    block_kv_dkv=BLOCK,
                    block_q_dq=BLOCK,
                    block_kv_dq=BLOCK,
                ),
            )
            scaled = query * self.config.head_dim**-0.5
            found = jax.vmap(kernel)(*(jnp.swapaxes(a, 1, 2) for a in (scaled, key, value)))
            return jnp.swapaxes(found, 1, 2)

        rows = P(AXIS)
        run = jax.shard_map(
            local, mesh=self.mesh, in_specs=(rows,) * 3, out_specs=rows, check_vma=False
        )
        return run(query, key, value)

    def rows(self, x: jax.Array) -> jax.Array:
        """An activation whose examples are sharded."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(AXIS)))

    def exported(self, optimizer: optax.GradientTransformation, batch: Any) -> ExportedStep:
        """The step for an abstract batch of "inputs" and "targets", for the process that compiles
        it.
        """
        specs = self.shapes()
        params = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, (shape, _) in specs.items()}
        state = (params, jax.eval_shape(optimizer.init, params))
        paths, tree = jax.tree_util.tree_flatten_with_path(state)
        laid = [
            next((specs[k.key][1] for k in path if getattr(k, "key", None) in specs), P())
            for path, _ in paths
        ]
        inputs = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch.items()}
        places = (*laid, *(P(AXIS) for _ in inputs))

        def step(*leaves: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
            (params, moments), data = (
                tree.unflatten(leaves[: len(laid)]),
                dict(zip(inputs, leaves[len(laid) :], strict=True)),
            )
            loss, gradients = jax.value_and_grad(self.loss)(params, data)
            updates, moments = optimizer.update(gradients, moments, params)
            return tuple(jax.tree.leaves((optax.apply_updates(params, updates), moments))), loss

        def named(spec: P) -> NamedSharding:
            return NamedSharding(self.mesh, spec)

        jitted = jax.jit(
            step,
            in_shardings=tuple(map(named, places)),
            out_shardings=(tuple(map(named, laid)), named(P())),
            donate_argnums=tuple(range(len(laid))),
        )
        kernels = export.DisabledSafetyCheck.custom_call("tpu_custom_call")
        made = export.export(jitted, platforms=["tpu"], disabled_checks=[kernels])(
            *(leaf for _, leaf in paths), *inputs.values()
        )
        plain = tuple([[] if axis is None else [axis] for axis in spec] for spec in places)
        return ExportedStep(
            program=bytes(made.serialize()),
            mesh=((AXIS, self.mesh.size),),
            arguments=tuple("" for _ in places),
            in_specs=plain,
            out_specs=plain[: len(laid)],
            in_kinds=("",) * len(places),
            out_kinds=("",) * len(laid),
            donated=len(laid),
        )


def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm over the last dim, computed in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5) * scale).astype(
        x.dtype
    )


def turn(x: jax.Array) -> jax.Array:
    """Rotary positions of [batch, seq, heads, width], by halves, computed in float32."""
    seq, width = x.shape[1], x.shape[3]
    angles = (
        jax.lax.broadcasted_iota(jnp.float32, (seq, width // 2), 0)
        * 10000.0 ** (-jnp.arange(0, width, 2) / width)
    )[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
