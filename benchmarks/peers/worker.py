# ruff: noqa: E402  (simulated devices are set before JAX is imported)
"""One peer in a process of its own, in an environment of its own.

    python benchmarks/peers/worker.py PEER [--tpu v5e:2x4 --text FILE]

Without --tpu it compiles the step on eight simulated devices, says `READY {...}`, and for each
line on its input runs a step and prints its seconds. With --tpu it compiles the step for a TPU that
is not here, and writes the program's text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_NUM_CPU_DEVICES="8",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from model import JOBS, OPTIMIZER, Decoder, Job, loss, rows

Specs = Any
#: A step that was compiled, what it takes first, and how a batch is placed.
Ready = tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], Any], Any]


def _step(graph: Any) -> Callable[..., Any]:
    """(parameters, optimizer state, batch) -> the next ones and the loss, as Flax users write it."""

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(lambda p: loss(nnx.merge(graph, p), batch))(params)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def _by_hand(sharded: bool) -> Callable[[Any, Mesh, Job], Specs]:
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


def _by_parallax(strategy: str, data: str, model: str) -> Callable[[Any, Mesh, Job], Specs]:
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
PEERS: dict[
    str, tuple[dict[str, int], str | tuple[str, ...], Callable[[Any, Mesh, Job], Specs]]
] = {
    "flax-dp": ({"fsdp": 8}, "fsdp", _by_hand(False)),
    "flax-fsdp": ({"fsdp": 8}, "fsdp", _by_hand(True)),
    "parallax-fsdp": ({"fsdp": 8}, "fsdp", _by_parallax("fsdp", "fsdp", "fsdp")),
    "parallax-auto": ({"data": 4, "model": 2}, "data", _by_parallax("auto", "data", "model")),
}


#: This library: all of it planned, and all but the mesh.
SHARDLIB: dict[str, dict[str, Any]] = {"shardlib": {}, "shardlib-fsdp8": {"mesh": {"fsdp": 8}}}


def compiled_step(peer: str, job: Job, devices: Any = None) -> tuple[Any, Any, Any, Any]:
    """The step of a peer, compiled for eight devices, what that took, and its parameters and its
    batch, placed where these devices are simulated ones.
    """
    shape, axis, choose = PEERS[peer]
    axes = (AxisType.Auto,) * len(shape)
    here = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=axes)
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(job, nnx.Rngs(0))), nnx.Param)
    specs = choose(params, here, job)
    where = (
        here
        if devices is None
        else Mesh(np.array(devices).reshape(here.devices.shape), tuple(shape))
    )
    places = jax.tree.map(
        lambda spec: NamedSharding(where, spec), specs, is_leaf=lambda s: isinstance(s, P)
    )
    whole, split = NamedSharding(where, P()), NamedSharding(where, P(axis))
    states = optax.tree_map_params(
        OPTIMIZER,
        lambda _, place: place,
        jax.eval_shape(OPTIMIZER.init, params),
        places,
        transform_non_params=lambda _: whole,
    )
    step = jax.jit(
        _step(graph),
        in_shardings=(places, states, split),
        out_shardings=(places, states, whole),
        donate_argnums=(0, 1),
    )
    batch = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in rows(job).items()}
    started = time.perf_counter()
    with jax.set_mesh(where):
        traced = step.lower(params, jax.eval_shape(OPTIMIZER.init, params), batch)
    middle = time.perf_counter()
    made = traced.compile()
    times = {"trace_seconds": middle - started, "compile_seconds": time.perf_counter() - middle}
    if devices is not None:
        return made, times, None, None
    first = jax.jit(lambda: nnx.state(Decoder(job, nnx.Rngs(0)), nnx.Param), out_shardings=places)()
    state = jax.jit(OPTIMIZER.init, out_shardings=states)(first)
    return made, times, (first, state), jax.device_put(rows(job), split)


def peer_here(peer: str) -> tuple[Callable[[], float], dict[str, Any], str]:
    """A peer's step on simulated devices."""
    compiled, times, carry, batch = compiled_step(peer, JOBS["cpu"])
    held = list(carry)

    def step() -> float:
        held[0], held[1], value = compiled(held[0], held[1], batch)
        return float(value)

    return step, {**times, "mesh": PEERS[peer][0]}, compiled.as_text()


def shardlib_here(pin: dict[str, Any]) -> tuple[Callable[[], float], dict[str, Any], str]:
    """The same of this library: planned, not told."""
    sys.path.insert(0, str(ROOT))
    import shardlib

    started = time.perf_counter()
    job = JOBS["cpu"]
    program = shardlib.compile(
        lambda rngs: Decoder(job, rngs), loss, OPTIMIZER, rows(job), topology="cpu:8", pin=pin
    )
    middle = time.perf_counter()
    text = program.compiled().as_text()
    times = {"trace_seconds": middle - started, "compile_seconds": time.perf_counter() - middle}
    held, batch = [program.init(0)], program.put(rows(job))

    def step() -> float:
        held[0], metrics = program.step(held[0], batch)
        return float(metrics["loss"])

    mesh = {name: size for name, size in dict(program.plan.mesh).items() if size > 1}
    return step, {**times, "plan_seconds": program.plan.search.seconds, "mesh": mesh}, text


def for_tpu(peer: str, topology: str, text: Path) -> dict[str, Any]:
    """A peer's step, compiled for a TPU."""
    from jax.experimental import topologies

    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    compiled, times, _, _ = compiled_step(peer, JOBS["tpu"], described.devices)
    text.write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    return {
        **times,
        "peak_bytes": memory.peak_memory_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=[*SHARDLIB, *PEERS])
    parser.add_argument("--tpu")
    parser.add_argument("--text", type=Path, required=True)
    options = parser.parse_args()
    if options.tpu is not None:
        print("READY " + json.dumps(for_tpu(options.peer, options.tpu, options.text)), flush=True)
        return
    if options.peer in SHARDLIB:
        step, facts, text = shardlib_here(SHARDLIB[options.peer])
    else:
        step, facts, text = peer_here(options.peer)
    options.text.write_text(text)
    facts["losses"] = [step() for _ in range(3)]
    facts["jax"] = jax.__version__
    print("READY " + json.dumps(facts), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        step()
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
