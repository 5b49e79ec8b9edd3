"""Batches a second of a chain of unlike devices, against the plan and the even cut.

    python -m benchmarks serving_edge [--batches N] [--pairs N]

A Llama of eight layers goes through three processes over TCP: devices that take 30, 60 and 150 ms a
layer. Their speeds are simulated: each process computes its part, and then sleeps until its batch
has taken as long as the plan says, so that two cores can stand for three devices. What is measured
is the cut, the framing, and that messages and batches overlap. The plan of `shardlib.plan_edge`
and the even cut run in turn; results are compared with those of one process.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import replace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.environment import card, command_line, write
from shardlib import models
from shardlib.annotation.model import read
from shardlib.frontend.model import problem
from shardlib.machines.chips import Chip
from shardlib.machines.topology import Device
from shardlib.serve.edge import run_edge
from shardlib.serve.edge_plan import EdgePlan, costs_of
from shardlib.serve.frontend import plan_edge

LLAMA = card("llama-8-layers")
BATCH = {"tokens": jax.ShapeDtypeStruct((2, 32), jnp.int32)}


def forward(model: Any, batch: Any) -> Any:
    """The next token at every place."""
    return jnp.argmax(model(batch["tokens"]), axis=-1)


def device(name: str, seconds: float) -> Device:
    """A device of so many seconds a layer."""
    chip = Chip(
        name=name,
        vendor="cpu",
        flops_per_s=(("float32", 1e10),),
        hbm_bytes=10**9,
        hbm_bytes_per_s=1e10,
    )
    return Device(name=name, chip=chip, link_bytes_per_s=1.25e8, layer_seconds=seconds)


DEVICES = [device("fast", 0.03), device("middle", 0.06), device("slow", 0.15)]


def even(plan: EdgePlan, init: Any) -> EdgePlan:
    """The same devices with as many pieces each, as listed."""

    def run(model: Any, batch: Any) -> Any:
        return jnp.zeros(()), {"results": forward(model, batch)}

    costs = costs_of(problem(init, run, optax.identity(), BATCH, rows="mean"), DEVICES)
    pieces = len(costs.names)
    cuts = [round(k * pieces / len(DEVICES)) for k in range(len(DEVICES) + 1)]
    stages = tuple(
        replace(
            plan.stages[0],
            device=DEVICES[k].name,
            first=cuts[k],
            last=cuts[k + 1] - 1,
            seconds=float(costs.seconds[k, cuts[k] : cuts[k + 1]].sum()),
            receive_seconds=0.0,
        )
        for k in range(len(DEVICES))
    )
    return replace(plan, stages=stages)


def main() -> None:
    parser = command_line(__doc__, "serving_edge_jax-*.json")
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=2)
    asked = parser.parse_args()
    init = models.build(LLAMA)[0]
    model = read(init)
    module = model.rebuild(*jax.jit(model.init)(0))
    random = np.random.default_rng(0)
    batches = [
        {"tokens": random.integers(0, 512, (2, 32)).astype(np.int32)} for _ in range(asked.batches)
    ]
    right = [np.asarray(forward(module, one)) for one in batches]
    best = plan_edge(init, forward, BATCH, devices=DEVICES)
    plans = {"planned": best, "even": even(best, init)}
    rates: dict[str, list[float]] = {name: [] for name in plans}
    equal = True
    for _ in range(asked.pairs):
        for name, plan in plans.items():
            found = run_edge(plan, init, forward, batches, simulated=True)
            assert found.batches_per_s is not None
            rates[name].append(found.batches_per_s)
            equal &= all((a[0] == b).all() for a, b in zip(found.results, right, strict=True))
            print(
                name, f"{found.batches_per_s:.2f} of {1 / plan.seconds:.2f} batches/s", flush=True
            )
    rows = {
        name: {
            "layers": [[one.device, one.first, one.last] for one in plan.stages],
            "predicted_batches_per_s": 1 / plan.seconds,
            "measured_batches_per_s": rates[name],
            "off": statistics.median(rates[name]) * plan.seconds - 1,
        }
        for name, plan in plans.items()
    }
    ratio = statistics.median(a / b for a, b in zip(rates["planned"], rates["even"], strict=True))
    result = {
        "speeds": "simulated by sleeping",
        "same_as_one_process": bool(equal),
        **rows,
        "planned_over_even": ratio,
    }
    write(asked.out, result)
    print(
        f"planned over even {ratio:.2f}, {rows['planned']['off']:+.1%} off the plan, the same as one"
        f" process: {equal}"
    )
