"""Step time and collectives of the planned program, against one sharded by hand.

    python -m benchmarks hand_sharded

The same transformer, batch, mesh and optimizer on eight simulated CPU devices:
`hand_transformer.py`, written by hand without shardlib, against `shardlib.compile` twice: "planned"
has the mesh pinned and all else free, "same recipe" also has the recipe of the hand-sharded program
pinned (ZeRO 3, no sequence parallelism). Steps alternate in one run; a ratio is the median of those
of neighbours in time, so that a machine that is busy at times slows both alike, and the medians are
stored beside it. Collectives are read from the compiled programs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.environment import (
    alternate,
    card,
    command_line,
    ratio,
    show,
    simulate_devices,
    write,
)

simulate_devices(8)

import jax
import numpy as np
import optax
from flax import nnx

import shardlib
from benchmarks import hand_transformer
from benchmarks.hand_transformer import HandStep
from benchmarks.hlo_collectives import collectives, summary
from benchmarks.stepping import random_tokens, stepping
from shardlib import models

MESHES: dict[str, dict[str, int]] = {
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "data2-fsdp4": {"data": 2, "fsdp": 4},
    "fsdp4-tensor2": {"fsdp": 4, "tensor": 2},
    "tensor8": {"tensor": 8},
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}
CONFIG = card("hand-sharded")
SIZES = ("layers", "embed", "heads", "kv_heads", "head_dim", "mlp")


def by_hand(mesh: dict[str, int], init: Any, batch: dict[str, np.ndarray]) -> HandStep:
    """The hand-sharded step of a model on a mesh, not yet compiled."""
    values = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(init(nnx.Rngs(0)), nnx.Param)))
    sizes = (mesh.get(axis, 1) for axis in ("data", "fsdp", "tensor"))
    return hand_transformer.prepared(
        CONFIG, hand_transformer.make_mesh(*sizes), optax.adamw(1e-3), values, batch
    )


def hand_stepper(hand: HandStep, batch: dict[str, np.ndarray]) -> tuple[Callable[[], float], str]:
    """A function that runs one step of the hand-sharded program and returns the loss, and the
    compiled text.
    """
    program, carry = hand.compiled(), [hand.params, hand.opt_state]
    placed = jax.device_put(batch, dict.fromkeys(batch, hand.batch_sharding))

    def step() -> float:
        carry[0], carry[1], loss = program(carry[0], carry[1], placed)
        jax.block_until_ready(carry)
        return float(loss)

    return step, program.as_text()


def recipe(mesh: dict[str, int]) -> dict[str, Any]:
    """The decisions of the hand-sharded program, as pins."""
    rules = [
        ("batch", ("data", "fsdp")),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("mlp", "tensor"),
        ("vocab", "tensor"),
    ]
    return {
        "mesh": mesh,
        "zero": 3 if "fsdp" in mesh else 0,
        "sequence_parallel": False,
        "rules": rules,
    }


def compare(name: str, batch_size: int, seq: int, repeats: int) -> dict[str, Any]:
    """All programs under one mesh."""
    mesh, optimizer = MESHES[name], optax.adamw(1e-3)
    init, loss = models.build(replace(CONFIG, max_seq=seq))
    batch = random_tokens(CONFIG.vocab_size, batch_size, seq)
    hand, hand_text = hand_stepper(by_hand(mesh, init, batch), batch)
    steps, texts, plans = {"hand": hand}, {"hand": hand_text}, dict[str, shardlib.Plan]()
    for who, pin in (("planned", {"mesh": mesh}), ("same recipe", recipe(mesh))):
        pin = {"microbatches": 1, "remat": "none", **pin}
        program = shardlib.compile(init, loss, optimizer, batch, topology="cpu:8", pin=pin)
        if not any(program.plan.decisions == other.decisions for other in plans.values()):
            steps[who], plans[who] = stepping(program, batch), program.plan
            texts[who] = program.compiled().as_text()
    losses = {who: step() for who, step in steps.items()}
    assert all(
        abs(value - losses["hand"]) < 1e-5 * abs(losses["hand"]) for value in losses.values()
    ), f"the programs differ: {losses}"
    calls = alternate(steps, repeats, warm_up=False)
    seconds = {who: timings.seconds for who, timings in calls.items()}
    return {
        "mesh": mesh,
        "step_seconds": {who: statistics.median(all_of) for who, all_of in seconds.items()},
        "step_seconds_all": seconds,
        "ratio": {who: ratio(seconds[who], seconds["hand"]) for who in plans},
        "collectives": {who: summary(collectives(text)) for who, text in texts.items()},
        "plan": {
            who: {
                "rules": plan.rules.to_json(),
                "zero": plan.zero,
                "sequence_parallel": plan.sequence_parallel,
            }
            for who, plan in plans.items()
        },
    }


def main() -> None:
    parser = command_line(__doc__, "hand_sharded.json")
    parser.add_argument(
        "--mesh", choices=MESHES, action="append", help="a mesh; all of them when left out"
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch")
    parser.add_argument("--seq", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each program")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in args.mesh or MESHES:
        row = rows[name] = compare(name, args.batch, args.seq, args.repeats)
        show(name, row, "step_seconds", "ratio", "collectives")
        jax.clear_caches()
    worst = max(row["ratio"]["planned"] for row in rows.values())
    write(
        args.out,
        {
            "benchmark": "hand_sharded",
            "shape": {"vocab": CONFIG.vocab_size} | {name: getattr(CONFIG, name) for name in SIZES},
            "batch": args.batch,
            "seq": args.seq,
            "repeats": args.repeats,
            "worst_ratio": worst,
            "meshes": rows,
        },
    )
    print(f"worst step-time ratio planned/hand: {worst:.3f}")
