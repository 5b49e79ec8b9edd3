"""The job as this library plans it: all of it, or all but the mesh."""

from __future__ import annotations

import time
from typing import Any

import optax
from compiled import Compiled, versions
from flax import nnx
from model import JOBS, OPTIMIZER, Decoder, loss, rows

import shardlib
from shardlib.machines.topology import topology as machine
from shardlib.verification.isolation import target

PEERS: dict[str, dict[str, Any]] = {"shardlib": {}, "shardlib-fsdp8": {"mesh": {"fsdp": 8}}}


def compiled(peer: str, topology: str | None) -> Compiled:
    """The step, on simulated devices of this machine or for a TPU that is not here."""
    return _here(PEERS[peer]) if topology is None else _for_tpu(PEERS[peer], topology)


def _here(pin: dict[str, Any]) -> Compiled:
    started, job = time.perf_counter(), JOBS["cpu"]
    program = shardlib.compile(
        lambda rngs: Decoder(job, rngs), loss, OPTIMIZER, rows(job), topology="cpu:8", pin=pin
    )
    middle = time.perf_counter()
    text = program.compiled().as_text() or ""
    times = {"trace_seconds": middle - started, "compile_seconds": time.perf_counter() - middle}
    held, batch = [program.init(0)], program.put(rows(job))

    def run() -> float:
        held[0], metrics = program.step(held[0], batch)
        return float(metrics["loss"])

    facts = {
        **times,
        "plan_seconds": program.plan.search.seconds,
        **_planned(program.plan),
        "parameters": _parameters(job),
        "versions": versions("flax", "optax"),
    }
    return Compiled(text=text, run=run, facts=facts)


def _for_tpu(pin: dict[str, Any], topology: str) -> Compiled:
    """`shardlib.verify` reads the program of the TPU compiler itself."""
    job = JOBS["tpu"]
    said = shardlib.verify(
        lambda rngs: Decoder(job, rngs), loss, OPTIMIZER, rows(job), topology=topology, pin=pin
    )
    assert said.compiled is not None, str(said)
    where = target(machine(topology), said.plan.mesh, said.plan.axis_order)
    return Compiled(
        text="",
        facts={
            "compile_seconds": said.compile_seconds,
            "peak_bytes": said.compiled.device_bytes["peak"],
            "temporary_bytes": said.compiled.device_bytes["temporaries"],
            "argument_bytes": said.compiled.device_bytes["arguments"],
            "cycles": round(said.compiled.compute_seconds * where.cycles_per_s),
            "wire_bytes": said.compiled.wire_bytes,
            **_planned(said.plan),
            "parameters": _parameters(job),
            "versions": versions("flax", "optax"),
        },
    )


def _planned(plan: shardlib.Plan) -> dict[str, Any]:
    mesh = {name: size for name, size in dict(plan.mesh).items() if size > 1}
    return {"mesh": mesh, "remat": str(plan.remat), "zero": plan.zero}


def _parameters(job: Any) -> int:
    made = nnx.eval_shape(lambda: Decoder(job, nnx.Rngs(0)))
    return optax.tree.size(nnx.state(made, nnx.Param))
