"""The job by MaxText: its own decoder of the Llama kind, its own state, step and shardings.

Rows of the batch are given to its step; all else is done by the functions of its `train` and
`train_compile`, in their order. Its model needs no scale in the scores of attention, since it
divides the first weights of the queries instead: `reference` has none, either.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from compiled import Compiled, built, versions
from flax import nnx
from flax.linen import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import sharding, train_utils
from maxtext_ahead import ahead
from model import EPSILON, JOBS, RATE, THETA, Job, reference, rows

#: As equal to the others as its options allow; and with recomputation and loops as MaxText comes.
#: Its policy "none" is read as no policy, and recomputes all; this one keeps the most.
PEERS: dict[str, dict[str, Any]] = {
    "maxtext": {"remat_policy": "minimal_with_context", "scan_layers": False},
    "maxtext-defaults": {},
}
#: What MaxText calls the machines.
MACHINES = {"v5e:2x4": "v5e-8"}


def options_of(job: Job, more: dict[str, Any]) -> list[str]:
    """The job in MaxText's words."""
    words: dict[str, Any] = {
        "run_name": "peer",
        "base_output_directory": tempfile.mkdtemp(),
        "base_emb_dim": job.embed,
        "base_num_query_heads": job.heads,
        "base_num_kv_heads": job.heads,
        "head_dim": job.head,
        "base_mlp_dim": job.mlp,
        "base_num_decoder_layers": job.layers,
        "vocab_size": job.vocab,
        "normalization_layer_epsilon": EPSILON,
        "rope_max_timescale": int(THETA),
        "max_target_length": job.seq,
        "per_device_batch_size": job.batch // 8,
        "dtype": job.dtype,
        "learning_rate": RATE,
        **more,
    }
    config = Path(pyconfig.__file__).parent / "base.yml"
    fixed = Path(__file__).with_name("maxtext_options.txt").read_text().split()
    return ["train", str(config), *fixed, *(f"{name}={value}" for name, value in words.items())]


def compiled(peer: str, topology: str | None) -> Compiled:
    """The step, on simulated devices of this machine or for a TPU that is not here."""
    return _here(PEERS[peer]) if topology is None else _for_tpu(PEERS[peer], topology)


def _here(more: dict[str, Any]) -> Compiled:
    """In the order of MaxText's `train_loop`."""
    job = JOBS["cpu"]
    config = pyconfig.initialize(options_of(job, {"hardware": "cpu", **more}))
    _, _, places, _, mesh, *_, state = train_utils.setup_train_loop(config, None)
    graph, state = nnx.split(state)
    params, places = sharding.maybe_update_params_sharding_with_opt(config, places)
    step, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, places, train.train_step, train.eval_step, None, params
    )
    split = sharding.get_input_data_sharding(config, mesh)
    batch = jax.device_put(_batch(job), split)
    began = _weights(nnx.to_flat_state(nnx.state(state.model, nnx.Param)), job)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        made, times = built(lambda: step.lower(state, batch))
    held = [state]

    def run() -> float:
        held[0], metrics = made(held[0], batch)
        return float(metrics["scalar"]["learning/loss"])

    return Compiled(
        text=made.as_text(),
        run=run,
        facts={
            **times,
            "mesh": {"fsdp": 8},
            "parameters": sum(one.size for one in began.values()),
            "remat": config.remat_policy,
            "reference": reference(job, began, scale=1.0),
            "versions": versions("flax", "optax", "maxtext"),
        },
    )


def _for_tpu(more: dict[str, Any], topology: str) -> Compiled:
    machine = {"compile_topology": MACHINES[topology], "compile_topology_num_slices": 1}
    config, made, facts = ahead(options_of(JOBS["tpu"], {**machine, **more}))
    return Compiled(
        text=made.as_text(),
        facts={
            **facts,
            "remat": config.remat_policy,
            "versions": versions("flax", "optax", "maxtext"),
        },
    )


def _batch(job: Job) -> dict[str, np.ndarray]:
    """The rows in the form of MaxText: with positions, and with 1 where a token counts."""
    found = rows(job)
    positions = np.broadcast_to(np.arange(job.seq, dtype=np.int32), (job.batch, job.seq))
    for name in ("inputs", "targets"):
        found |= {f"{name}_position": positions, f"{name}_segmentation": np.ones_like(positions)}
    return found


#: Names of a layer's parameters -> those in MaxText.
LAYER = {
    "before.scale": "pre_self_attention_layer_norm.scale",
    "between.scale": "post_self_attention_layer_norm.scale",
    "query.kernel": "self_attention.query.kernel",
    "key.kernel": "self_attention.key.kernel",
    "value.kernel": "self_attention.value.kernel",
    "out.kernel": "self_attention.out.kernel",
    "gate.kernel": "mlp.wi_0.kernel",
    "up.kernel": "mlp.wi_1.kernel",
    "down.kernel": "mlp.wo.kernel",
}


def _weights(params: Any, job: Job) -> dict[str, np.ndarray]:
    """MaxText's parameters by the names that `model.py` has for them."""
    given = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in params}
    found = {
        "embed.embedding": given.pop("token_embedder.embedding"),
        "norm.scale": given.pop("decoder.decoder_norm.scale"),
        "head.kernel": given.pop("decoder.logits_dense.kernel"),
    }
    for name, theirs in LAYER.items():
        stacked = given.pop(f"decoder.layers.{theirs}", None)
        for at in range(job.layers):
            one = (
                given.pop(f"decoder.layers_{at}.{theirs}")
                if stacked is None
                else np.take(stacked, at, axis=1)  # `param_scan_axis`
            )
            last = one.shape[-1] if name.startswith("out") else math.prod(one.shape[1:])
            found[f"layers.{at}.{name}"] = one if one.ndim == 1 else one.reshape(-1, last)
    assert not given, f"parameters that `model.py` has not: {sorted(given)}"
    return found
