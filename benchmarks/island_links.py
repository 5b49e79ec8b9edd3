"""Islands as processes over emulated links: is a meeting as long as was said, and does a delay hide
it?

    python -m benchmarks island_links

Two islands, each a process with a program of one CPU device (one thread), meet over an outer server;
each has a relay of its own on the loopback address, with the same rate and latency. Predicted is
what `Island.findings` say: (bytes sent + bytes received) / rate + 2 latency.

- meetings: `delay=0`; seconds from sending to the mean, of the island that sent last in a round,
  which waits for nobody; the median over rounds. The server writes no checkpoint in between, but
  in the last case, where it writes and syncs one in each round before it answers.
- resting, busy: `delay` steps longer than a meeting. Of each round the mean time of the steps from sending
  to taking in, both among them, as against as many steps before it and after it, in which nothing
  crosses, so that all are measured within seconds of each other. The median of that ratio over
  rounds and islands; and what that makes of all steps of a round. Steps are *resting*: a small
  batch, and a wait of 50 ms, as for an accelerator that leaves the host free; or *busy*: the
  processor computes for about as long, and meetings want their part of it.

Parts are written one by one into the same file, with the load at their beginning and end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.environment import command_line, show, stored, write

WIDTH, HIDDEN = 512, 1024
#: Rows of a step, and seconds that it waits.
KINDS = {"busy": (256, 0.0), "resting": (4, 0.05)}
PARTS = ("meetings", *KINDS)
LINKS = ("10mbit-20ms", "50mbit-20ms", "200mbit-20ms")
#: Links of meetings that steps wait for, and rounds between checkpoints of the server.
WAITED = (*((link, 1000) for link in LINKS), (LINKS[-1], 1))
#: Rounds of each case after the first, which is left out.
MEETINGS = 6
#: Of the cases with a delay: the link, steps that hide a meeting of int8 with room, and rounds.
DELAYS = {"10mbit-20ms": (48, 12), "50mbit-20ms": (16, 24), "200mbit-20ms": (8, 36)}


def island(
    place: dict[str, Any], exchange: str, steps: int, link: str, kind: str, out: Path
) -> None:
    """One island: trains, and writes times of its steps and meetings."""
    rows, rest = KINDS[kind]
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import shardlib
    from shardlib.islands import servers
    from shardlib.islands.servers.relay import meeting_bytes, read_link

    def weights(key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return {
            "up": jax.random.normal(first, (WIDTH, HIDDEN)) * WIDTH**-0.5,
            "down": jax.random.normal(second, (HIDDEN, WIDTH)) * HIDDEN**-0.5,
        }

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for _ in range(4):
            x = x + jnp.tanh(x @ params["up"]) @ params["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    axes = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    x = np.random.default_rng(place["island"]).normal(size=(rows, WIDTH)).astype(np.float32)
    batch = {"x": x, "y": np.roll(x, 1, axis=1)}
    program = shardlib.compile(
        shardlib.tree(weights, axes), loss, optax.sgd(1e-3), batch, topology="cpu:1"
    )
    where = servers.MeetingPlace(**place)
    times: list[float] = []
    with servers.join(program, exchange=exchange, place=where, link=link) as found:
        state = program.init(0)
        for _ in range(5):
            state, metrics = program.step(state, batch)
        jax.block_until_ready(metrics)
        state = found.start(0)
        while found.steps < steps:
            began = time.perf_counter()
            state, metrics = found.step(state, batch)
            float(metrics["loss"])
            time.sleep(rest)
            times.append(time.perf_counter() - began)
        found.finish(state)
        exchanging = found.exchanging
        size = meeting_bytes(exchanging.exchange, exchanging.outline)
        said = read_link(link).seconds(size, size)
        out.write_text(
            json.dumps(
                {
                    "predicted_s": said,
                    "finding": str(found.findings[0]),
                    "steps_s": times,
                    "meetings_s": [met.seconds for met in found.meetings],
                    "waited_s": [met.waited_s for met in found.meetings],
                    "both": [len(met.islands) == 2 for met in found.meetings],
                    "events": found.events,
                }
            )
        )


def run(
    exchange: str, steps: int, link: str, *, kind: str = "busy", save_every: int = 1
) -> list[dict[str, Any]]:
    """What both islands have written."""
    from shardlib.islands.servers.joining import OuterServer
    from shardlib.islands.servers.relay import Relay, read_link
    from shardlib.islands.servers.rounds import Rounds

    emulated = read_link(link)
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"}
    server = OuterServer(islands=2, rounds=Rounds(save_every=save_every))
    with tempfile.TemporaryDirectory() as name, server:
        assert server.port is not None
        relays = [Relay(port=server.port, link=emulated) for _ in range(2)]
        outs = [Path(name) / f"{number}.json" for number in range(2)]
        processes: list[subprocess.Popen[bytes]] = []
        for number, relay in enumerate(relays):
            place = server.place(number)
            told = {"host": "127.0.0.1", "port": relay.at, "island": number}
            words = [exchange, str(steps), link, kind, str(outs[number]), json.dumps(told)]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks", "island_links", "--island", *words],
                    env={**variables, "SHARDLIB_MEETING_TOKEN": place.token},
                )
            )
        codes = [process.wait() for process in processes]
        for relay in relays:
            relay.close()
        assert codes == [0, 0], codes
        return [json.loads(out.read_text()) for out in outs]


def meetings(link: str, save_every: int) -> dict[str, Any]:
    """Meetings that steps wait for."""
    found = run("diloco:2:4:momentum=0", 4 * (MEETINGS + 1), link, save_every=save_every)
    pairs = list(zip(*(one["meetings_s"] for one in found), strict=True))[1:]
    took = median(min(pair) for pair in pairs)
    said = found[0]["predicted_s"]
    return {
        "link": link,
        "wire": "float32",
        "save_every": save_every,
        "predicted_s": said,
        "measured_s": took,
        "measured_over_predicted": took / said,
        "rounds_s": pairs,
        "finding": found[0]["finding"],
    }


def hidden(link: str, kind: str) -> dict[str, Any]:
    """Meetings beside steps."""
    delay, rounds = DELAYS[link]
    every = 2 * (delay + 1) + 4
    exchange = f"diloco:2:{every}:momentum=0:wire=int8:delay={delay}"
    found = run(exchange, every * (rounds + 2) + 2, link, kind=kind)
    ratios, crossing, alone = list[float](), list[float](), list[float]()
    for one in found:
        for number in range(2, rounds + 2):
            sent = number * every - 1  # the step after which it is sent
            before, during, after = (
                mean(one["steps_s"][first : first + delay + 1])
                for first in (sent - every + delay + 4, sent, sent + delay + 4)
            )
            crossing.append(during)
            alone.append((before + after) / 2)
            ratios.append(crossing[-1] / alone[-1])
    ratio, share = median(ratios), (delay + 1) / every
    return {
        "link": link,
        "wire": "int8",
        "delay": delay,
        "every": every,
        "predicted_s": found[0]["predicted_s"],
        "meeting_s": median(found[0]["meetings_s"] + found[1]["meetings_s"]),
        "waited_s": median(found[0]["waited_s"] + found[1]["waited_s"]),
        "most_waited_s": max(found[0]["waited_s"] + found[1]["waited_s"]),
        "step_s_alone": median(alone),
        "step_s_crossing": median(crossing),
        "crossing_over_alone": ratio,
        "all_steps_over_alone": 1 + (ratio - 1) * share,
        "ratios": ratios,
    }


def main() -> None:
    parser = command_line(__doc__, "island_links.json")
    parser.add_argument("--island", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    if options.island is not None:
        exchange, steps, link, kind, out, told = options.island
        place = {**json.loads(told), "token": os.environ["SHARDLIB_MEETING_TOKEN"]}
        island(place, exchange, int(steps), link, kind, Path(out))
        return
    for part in options.parts:
        before = os.getloadavg()[0]
        cases = []
        for link, save_every in WAITED if part == "meetings" else [(link, 0) for link in LINKS]:
            cases.append(meetings(link, save_every) if save_every else hidden(link, part))
            show(f"{link}, {part}", cases[-1])
        known = stored(options.out)
        load = [before, os.getloadavg()[0]]
        write(
            options.out,
            {
                "command": "python -m benchmarks island_links",
                "parameters": 2 * WIDTH * HIDDEN,
                **{name: known[name] for name in PARTS if name in known},
                part: {"load_before_and_after": load, "cases": cases},
            },
        )
