"""Step time by the order in which parameters cross a link.

    python -m benchmarks transfer_order

A worker of a parameter server, whose stages are programs of their own on simulated CPU devices of
one thread each, fetches all parameters, computes, and pushes all gradients, over an emulated link
(`shardlib.islands.servers.Relay`, in the server's process). First the step is timed with all parameters at
hand; the rate of the link is then chosen such that a fetch and a push together take as long, so that
communication is about compute. In turn, in one run:

- order of use: buckets of parameters as the forward pass needs them, gradients the other way round;
- shuffled: the same buckets of rows of layers in random orders, another one in each step;
- at once: the step waits for all parameters, and the push for all gradients.

Efficiency is TicTac's, (sum - step) / (sum - max) of compute and wire. Numbers do not depend on the
order, bit for bit (`tests/islands/servers/test_stages.py`). With one microbatch the step is also replayed
(`shardlib.islands.transfers`): a fetch beside the forward pass, and, the other way round in
time, a push beside the backward pass, which is taken to be two thirds of the compute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import time
from statistics import median
from typing import Any

from benchmarks.environment import command_line, show, write

STAGES, LAYERS, WIDTH, VOCABULARY = 4, 8, 256, 1024
LATENCY_S = 0.005
BUCKET_BYTES = 1 << 20
WAYS = ("order of use", "shuffled", "at once")
#: (name, microbatches, rows)
MODELS = (("one microbatch", 1, 512), ("four microbatches", 4, 512))


def job(microbatches: int, rows: int) -> Any:
    """A stack of layers between an embedding and a head, in stages."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import shardlib

    def weights(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        return {
            "z_embed": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
            "layers": {
                "up": jax.random.normal(keys[1], (LAYERS, WIDTH, 4 * WIDTH)) / 16,
                "down": jax.random.normal(keys[2], (LAYERS, 4 * WIDTH, WIDTH)) / 32,
            },
            "a_head": jax.random.normal(keys[3], (WIDTH, VOCABULARY)) / 16,
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(layer, params["z_embed"][batch["tokens"]], params["layers"])
        return jnp.mean((x @ params["a_head"]) ** 2)

    axes = {
        "z_embed": ("vocab", "embed"),
        "layers": {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")},
        "a_head": ("embed", "vocab"),
    }
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (rows, 4), dtype=np.int32)
    pin: Any = {
        "mesh": {"stage": STAGES},
        "microbatches": microbatches,
        "pipeline": "programs",
        "schedule": "gpipe",
        "remat": "none",
    }
    return shardlib.servers.Job(
        init=shardlib.tree(weights, axes),
        loss=loss,
        rows=lambda worker, step: {"tokens": tokens},
        topology=f"cpu:{STAGES}",
        pin=pin,
    )


def serve(rate: float) -> None:
    """A server and a relay before it, until the standard input ends."""
    import threading

    from shardlib.islands.exchanges import Asynchronous
    from shardlib.islands.servers.relay import Link, Relay
    from shardlib.islands.servers.server import Service
    from shardlib.islands.servers.service import Listening

    exchange = Asynchronous(workers=1, servers=1, rule="sgd", rate=1e-3)
    listening = Listening(service=Service(exchange=exchange), secret=os.environ["ORDER_SECRET"])
    threading.Thread(target=listening.serve, daemon=True).start()
    link = Link(bytes_per_s=rate, latency_s=LATENCY_S)
    relay = Relay(port=listening.port, link=link)
    print(json.dumps([listening.port, relay.at]), flush=True)
    sys.stdin.read()


def replayed(compute: float, wire: float, sizes: list[int]) -> float:
    """Seconds of a step in the order of use, whose stages compute as long as each other."""
    from shardlib.islands.transfers import Load, replay

    total = sum(sizes)

    def passes(seconds: float, sizes: list[int]) -> float:
        each = seconds / len(sizes)
        loads = [Load(forward=each, backward=0.0, wire=wire / 2 * n / total) for n in sizes]
        return replay(loads).seconds

    return passes(compute / 3, sizes) + passes(2 * compute / 3, sizes)


def measured(name: str, microbatches: int, rows: int, steps: int) -> dict[str, Any]:
    """The times of the steps of all ways over one link."""
    from shardlib.islands.exchanges import Asynchronous, Part
    from shardlib.islands.servers.wire import Connection
    from shardlib.islands.servers.worker import Computing, Landing, OnHost, Orders, Worker

    class AtOnce(Computing):
        """Waits for all parameters, and gives all gradients together."""

        waits = False

        def fetched(self, landing: Landing) -> None:
            for path in self.trained if self.waits else ():
                landing.whole(path)
            super().fetched(landing)

        def taken(self) -> Any:
            found = super().taken()
            if not self.waits:
                return found
            found.finite()
            sizes = {path: leaf.size for path, leaf in self.trained.items()}
            parts = {path: Part(path=path, start=0, stop=size) for path, size in sizes.items()}
            return OnHost(arrays={path: found.run(part) for path, part in parts.items()})

    computing = AtOnce(job(microbatches, rows), 0, 0.0)
    assert max(computing.runs.values()) == STAGES, "steps begin with a part"
    batch = computing.program.put({"tokens": job(microbatches, rows).rows(0, 0)["tokens"]})
    whole, times = Landing.of(computing.first(), computing.runs), list[float]()
    for _ in range(7):
        began = time.perf_counter()
        computing.fetched(whole)
        loss = computing.step(batch)
        computing.taken().finite()
        loss()
        times.append(time.perf_counter() - began)
    compute, size = median(times), 4 * sum(leaf.size for leaf in computing.trained.values())
    rate = 2 * size / compute
    word = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "transfer_order", "--serve", str(rate)],
        env={**os.environ, "ORDER_SECRET": word, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        direct, port = json.loads(process.stdout.readline())

        def link(at: int) -> Connection:
            return Connection(where=lambda: ("127.0.0.1", at), server=0, worker=0, secret=word)

        exchange = Asynchronous(workers=1, servers=1, rule="sgd", rate=1e-3)
        worker = Worker(
            number=0,
            exchange=exchange,
            computing=computing,
            links=[link(direct)],
            bucket_bytes=BUCKET_BYTES,
        )
        worker.begin()
        worker.links = [link(port)]
        known, rng, sizes = worker.orders, random.Random(0), worker._sizes
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for step in range(steps * len(WAYS)):
            way = WAYS[step % len(WAYS)]
            parts = rng.sample(computing.parts, len(computing.parts))
            shuffled = Orders.of(parts, sizes, 1, BUCKET_BYTES)
            worker.orders, computing.waits = (
                shuffled if way == "shuffled" else known,
                way == WAYS[2],
            )
            began = time.perf_counter()
            worker.step(step, batch)
            found[way].append(time.perf_counter() - began)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    wire = 2 * size / rate + 4 * LATENCY_S
    steps_s = {way: median(one[1:]) for way, one in found.items()}
    needs = [computing.gradients.needs(stage) for stage in range(STAGES)]
    each = [sum(computing.trained[p].size // computing.runs[p] for p, _ in one) for one in needs]
    least, most = max(compute, wire), compute + wire
    return {
        "model": name,
        "microbatches": microbatches,
        "stages": STAGES,
        "bytes": size,
        "compute_s": compute,
        "wire_s": wire,
        "rate_bytes_per_s": rate,
        "step_s": steps_s,
        "replayed_s": replayed(compute, wire, each) if microbatches == 1 else None,
        "efficiency": {way: (most - one) / (most - least) for way, one in steps_s.items()},
        "shorter_than_shuffled": 1 - steps_s[WAYS[0]] / steps_s[WAYS[1]],
        "shorter_than_at_once": 1 - steps_s[WAYS[0]] / steps_s[WAYS[2]],
        "all_s": found,
    }


def main() -> None:
    parser = command_line(__doc__, "transfer_order.json")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=9, help="of each way and model")
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    flags = f"--xla_force_host_platform_device_count={STAGES} --xla_cpu_multi_thread_eigen=false"
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=flags, OMP_NUM_THREADS="1")
    cases, before = list[dict[str, Any]](), os.getloadavg()[0]
    for name, microbatches, rows in MODELS:
        cases.append(case := measured(name, microbatches, rows, options.steps))
        show(name, case)
    load = [before, os.getloadavg()[0]]
    command = "python -m benchmarks transfer_order"
    write(options.out, {"command": command, "load_before_and_after": load, "cases": cases})
