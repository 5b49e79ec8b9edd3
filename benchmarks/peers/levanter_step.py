"""The job by Levanter: its own Llama on named axes, under the step of its own Trainer.

Its loss predicts the next token within the rows that it is given, so that the last token of a row
has no target; `reference` leaves it out, too. For a TPU that is not here its step is
traced for simulated devices and exported.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from compiled import Compiled, built, memory_of, tpu_devices, versions
from jax import export
from jax.sharding import Mesh, NamedSharding
from levanter.layers.attention import AttentionBackend
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from model import EPSILON, JOBS, OPTIMIZER, Batch, Decoder, Job, reference, rows

#: As equal to the others as its options allow; and with recomputation and loops as Levanter comes.
PEERS: dict[str, dict[str, Any]] = {
    "levanter": {"gradient_checkpointing": False, "scan_layers": False},
    "levanter-defaults": {},
}


def compiled(peer: str, topology: str | None) -> Compiled:
    """The step, on simulated devices of this machine or for a TPU that is not here."""
    job = JOBS["cpu" if topology is None else "tpu"]
    devices = None if topology is None else tpu_devices(topology)
    config = TrainerConfig(
        id="peer",
        tracker=NoopConfig(),
        train_batch_size=job.batch,
        num_train_steps=1000,
        log_jaxprs=False,
        log_xla_hlo=False,
        require_accelerator=False,
        log_dir=Path(tempfile.mkdtemp()),
        mp=jmp.get_policy(f"params=float32,compute={job.dtype},output=float32"),
    )
    model = LlamaConfig(
        max_seq_len=job.seq,
        hidden_dim=job.embed,
        intermediate_dim=job.mlp,
        num_layers=job.layers,
        num_heads=job.heads,
        num_kv_heads=job.heads,
        layer_norm_epsilon=EPSILON,
        attn_backend=AttentionBackend.VANILLA,
        **PEERS[peer],
    )
    trainer = Trainer(config, OPTIMIZER, _loss, add_default_hooks=False)
    trainer.__enter__()  # for the life of the process: every step needs its mesh and its axes
    return _stepped(trainer, model, job, devices)


def _loss(model: Any, example: LmExample, *, key: Any = None) -> Any:
    return model.compute_next_token_loss(example, key=key)


def _stepped(trainer: Trainer, model: LlamaConfig, job: Job, devices: Any) -> Compiled:
    """The step that `Trainer.train_step` runs where no hook wants a look at the gradients."""

    def first() -> Any:
        return trainer.initial_state(
            jax.random.PRNGKey(0),
            model_init=lambda: model.build(hax.Axis("vocab", job.vocab), key=jax.random.PRNGKey(1)),
        )

    axes = (trainer.TrainBatch, model.max_Pos)

    def example(tokens: Any) -> LmExample:
        weight = hax.named(jnp.ones((job.batch, job.seq), jnp.float32), axes)
        return LmExample(tokens=hax.named(tokens, axes), loss_weight=weight)

    step = trainer._jit_train_step_fn_no_hook
    if devices is None:
        state = first()
        batch = hax.shard(example(jnp.asarray(rows(job)["inputs"])), trainer.compute_axis_mapping)
        made, times = built(lambda: step.lower(state, (batch,), {}))
    else:
        state = _shapes(eqx.filter_eval_shape(first), trainer, trainer.parameter_axis_mapping)
        tokens = jax.ShapeDtypeStruct((job.batch, job.seq), jnp.int32)
        batch = eqx.filter_eval_shape(example, tokens)
        batch = _shapes(batch, trainer, trainer.compute_axis_mapping)
        arrays, rest = eqx.partition(state, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

        def whole(arrays: Any, batch: Any) -> Any:
            return step(eqx.combine(arrays, rest), (batch,), {})

        made, times = built(lambda: _lowered(whole, (arrays, batch), trainer, devices))
    facts = {
        **times,
        "mesh": {name: size for name, size in trainer.device_mesh.shape.items() if size > 1},
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.model)),
        "remat": "none" if model.gradient_checkpointing is False else "full",
        "versions": versions("flax", "optax", "marin-levanter"),
    }
    if devices is not None:
        return Compiled(text=made.as_text(), facts={**facts, **memory_of(made)})
    facts["reference"] = reference(job, _weights(state.model, job), objective=_without_last)
    held = [state]

    def run() -> float:
        info = trainer.train_step(held[0], batch)
        held[0] = info.state
        return float(info.loss)

    return Compiled(text=made.as_text(), run=run, facts=facts)


def _lowered(step: Any, shapes: Any, trainer: Trainer, devices: Any) -> Any:
    """The step, traced here for simulated devices and lowered for others: some of Haliax and
    Levanter runs programs while it traces, which devices that are not here cannot.
    """
    told = export.export(jax.jit(step, donate_argnums=0), platforms=["tpu"])(*shapes)
    here = trainer.device_mesh
    there = Mesh(
        np.array(devices).reshape(here.devices.shape), here.axis_names, axis_types=here.axis_types
    )
    places, _ = jax.tree.unflatten(told.in_tree, told.in_shardings_jax(there))
    jitted = jax.jit(told.call, in_shardings=places, donate_argnums=0)
    with jax.set_mesh(there):
        bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)
        return jitted.lower(*bare)


def _shapes(tree: Any, trainer: Trainer, mapping: Any) -> Any:
    """Shapes with their shardings, by their named axes."""

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, hax.NamedArray):
            return leaf
        spec = hax.partitioning.pspec_for_axis(leaf.axes, mapping)
        array = jax.ShapeDtypeStruct(
            leaf.array.shape, leaf.array.dtype, sharding=NamedSharding(trainer.device_mesh, spec)
        )
        return dataclasses.replace(leaf, array=array)

    return jax.tree.map(placed, tree, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))


def _without_last(model: Decoder, batch: Batch) -> jax.Array:
    """Levanter's loss: no target for the last token of a row."""
    logits = model(batch["inputs"]).astype(jnp.float32)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return found[:, :-1].mean()


def _weights(model: Any, job: Job) -> dict[str, np.ndarray]:
    """Levanter's parameters by the names that `model.py` has for them."""

    def matrix(leaf: hax.NamedArray, inner: tuple[str, ...], width: int) -> np.ndarray:
        names = tuple(axis.name for axis in leaf.axes if axis.name not in inner)
        return np.asarray(leaf.rearrange((*inner, *names)).array).reshape(-1, width)

    found = {
        "embed.embedding": np.asarray(model.embeddings.token_embeddings.weight.array),
        "norm.scale": np.asarray(model.transformer.norm.weight.array),
        "head.kernel": matrix(model.lm_head.weight, ("embed",), job.vocab),
    }
    for at, layer in enumerate(model.transformer.layers.unstacked()):
        mixed, fed = layer.self_attn, layer.mlp
        parts = {
            "before.scale": np.asarray(layer.input_layernorm.weight.array),
            "between.scale": np.asarray(layer.post_attention_layernorm.weight.array),
            "query.kernel": matrix(mixed.q_proj.weight, ("embed",), job.embed),
            "key.kernel": matrix(mixed.k_proj.weight, ("embed",), job.embed),
            "value.kernel": matrix(mixed.v_proj.weight, ("embed",), job.embed),
            "out.kernel": matrix(mixed.o_proj.weight, ("heads", "head_size"), job.embed),
            "gate.kernel": matrix(fed.gate_proj.weight, ("embed",), job.mlp),
            "up.kernel": matrix(fed.up_proj.weight, ("embed",), job.mlp),
            "down.kernel": matrix(fed.down_proj.weight, ("mlp",), job.embed),
        }
        found |= {f"layers.{at}.{name}": leaf for name, leaf in parts.items()}
    return found
