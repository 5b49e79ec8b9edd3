"""The job in plain Flax, with shardings by hand or chosen by google-parallax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compiled import Compiled, built, memory_of, tpu_devices, versions
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from model import JOBS, OPTIMIZER, Decoder, Job, rows, step_of

Specs = Any
Choose = Callable[[Any, Mesh, Job], Specs]


def _by_hand(sharded: bool) -> Choose:
    """FSDP as users of Flax write it: the largest dim that divides; or nothing sharded."""

    def specs(params: Any, mesh: Mesh, _: Job) -> Specs:
        ways = mesh.shape["fsdp"]

        def spec(leaf: Any) -> P:
            dims = [at for at, size in enumerate(leaf.shape) if size % ways == 0]
            if not sharded or not dims or leaf.ndim < 2:
                return P()
            largest = max(dims, key=lambda at: leaf.shape[at])
            return P(*("fsdp" if at == largest else None for at in range(leaf.ndim)))

        return jax.tree.map(spec, params)

    return specs


def _by_parallax(strategy: str, data: str, model: str) -> Choose:
    """What google-parallax chooses, read off the model that it makes on simulated devices."""

    def specs(params: Any, mesh: Mesh, job: Job) -> Specs:
        import parallax

        sample = jnp.zeros((8, job.seq), jnp.int32)
        with jax.set_mesh(mesh):
            made = parallax.create_sharded_model(
                lambda: Decoder(job, nnx.Rngs(0)),
                (sample,),
                strategy=parallax.ShardingStrategy(strategy),
                data_axis_name=data,
                model_axis_name=model,
            )
        chosen = jax.tree.map(lambda leaf: leaf.sharding.spec, nnx.state(made, nnx.Param))
        return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(chosen))

    return specs


#: Peer -> names and sizes of the mesh, axis of the batch, shardings of parameters.
PEERS: dict[str, tuple[dict[str, int], str, Choose]] = {
    "flax-dp": ({"fsdp": 8}, "fsdp", _by_hand(False)),
    "flax-fsdp": ({"fsdp": 8}, "fsdp", _by_hand(True)),
    "parallax-fsdp": ({"fsdp": 8}, "fsdp", _by_parallax("fsdp", "fsdp", "fsdp")),
    "parallax-auto": ({"data": 4, "model": 2}, "data", _by_parallax("auto", "data", "model")),
}


def compiled(peer: str, topology: str | None) -> Compiled:
    """The step of a peer, on simulated devices of this machine or for a TPU that is not here."""
    job = JOBS["cpu" if topology is None else "tpu"]
    shape, axis, choose = PEERS[peer]
    axes = (AxisType.Auto,) * len(shape)
    here = where = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=axes)
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(job, nnx.Rngs(0))), nnx.Param)
    specs = choose(params, here, job)
    if topology is not None:
        devices = np.array(tpu_devices(topology)).reshape(here.devices.shape)
        where = Mesh(devices, tuple(shape))
    places = jax.tree.map(
        lambda spec: NamedSharding(where, spec), specs, is_leaf=lambda s: isinstance(s, P)
    )
    whole, split = NamedSharding(where, P()), NamedSharding(where, P(axis))
    shapes = jax.eval_shape(OPTIMIZER.init, params)
    states = optax.tree_map_params(
        OPTIMIZER,
        lambda _, place: place,
        shapes,
        places,
        transform_non_params=lambda _: whole,
    )
    step = jax.jit(
        step_of(graph),
        in_shardings=(places, states, split),
        out_shardings=(places, states, whole),
        donate_argnums=(0, 1),
    )
    batch = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in rows(job).items()}
    with jax.set_mesh(where):
        made, times = built(lambda: step.lower(params, shapes, batch))
    facts = {
        **times,
        "mesh": shape,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "versions": versions("flax", "optax", "google-parallax"),
    }
    if topology is not None:
        return Compiled(text=made.as_text(), facts={**facts, **memory_of(made)})
    first = jax.jit(lambda: nnx.state(Decoder(job, nnx.Rngs(0)), nnx.Param), out_shardings=places)()
    held = [first, jax.jit(OPTIMIZER.init, out_shardings=states)(first)]
    placed = jax.device_put(rows(job), split)

    def run() -> float:
        held[0], held[1], value = made(held[0], held[1], placed)
        return float(value)

    return Compiled(text=made.as_text(), run=run, facts=facts)
