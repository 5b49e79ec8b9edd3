# ruff: noqa: E402  (paths and simulated devices are set before JAX is imported)
"""Is the planned program as fast as one sharded by hand, and does it communicate as little?

    python benchmarks/hand_sharded.py

The same transformer, batch, mesh and optimizer on eight simulated CPU devices: `hand_transformer.py`, written by hand without
shardlib, against `shardlib.compile` with the mesh pinned. Steps alternate (hand, planned, hand, planned, ...), so that a busy
machine slows both; the ratio is that of the medians. Collectives are read from the compiled programs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.environment import RESULTS, simulate_devices, write

simulate_devices(8)

import jax
import numpy as np
import optax
from flax import nnx

import shardlib
from benchmarks import hand_transformer
from benchmarks.hlo_collectives import collectives, summary
from shardlib import models
from shardlib.models.config import TransformerConfig

MESHES: dict[str, dict[str, int]] = {
    "data8": {"data": 8}, "fsdp8": {"fsdp": 8}, "data2-fsdp4": {"data": 2, "fsdp": 4}, "fsdp4-tensor2": {"fsdp": 4, "tensor": 2},
    "tensor8": {"tensor": 8}, "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}
SHAPE = hand_transformer.Shape(vocab=1024, layers=4, embed=256, heads=16, kv_heads=8, head_dim=16, mlp=768)


def config(seq: int) -> TransformerConfig:
    """The reference transformer of the same shape in float32."""
    return TransformerConfig(
        name="hand-sharded", vocab_size=SHAPE.vocab, layers=SHAPE.layers, embed=SHAPE.embed, heads=SHAPE.heads, kv_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim, mlp=SHAPE.mlp, max_seq=seq, compute_dtype="float32")


def hand_stepper(mesh: dict[str, int], optimizer: optax.GradientTransformation, init: Any, batch: dict[str, np.ndarray]) -> tuple[Callable[[], float], str]:
    """A function that runs one step of the hand-sharded program and returns the loss, and the compiled text."""
    values = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(init(nnx.Rngs(0)), nnx.Param)))
    program = hand_transformer.build(
        SHAPE, hand_transformer.make_mesh(*(mesh.get(axis, 1) for axis in ("data", "fsdp", "tensor"))), optimizer, values, batch)
    placed = jax.device_put(batch, dict.fromkeys(batch, program.batch_sharding))
    carry = [program.params, program.opt_state]

    def step() -> float:
        carry[0], carry[1], loss = program.step(carry[0], carry[1], placed)
        return float(loss)

    return step, program.step.as_text()


def planned_stepper(
    mesh: dict[str, int], optimizer: optax.GradientTransformation, init: Any, loss: Any, batch: dict[str, np.ndarray]
) -> tuple[Callable[[], float], str, shardlib.Plan]:
    """The same for the program that shardlib makes, and its plan."""
    program = shardlib.compile(init, loss, optimizer, batch, topology="cpu:8", pin={"mesh": mesh, "microbatches": 1, "remat": "none"})
    placed = program.put(batch)
    carry = [program.init(0)]

    def step() -> float:
        carry[0], metrics = program.step(carry[0], placed)
        return float(metrics["loss"])

    return step, program.compiled().as_text(), program.plan


def timed(step: Callable[[], float]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare(name: str, batch_size: int, seq: int, repeats: int) -> dict[str, Any]:
    """Both programs under one mesh."""
    mesh, optimizer = MESHES[name], optax.adamw(1e-3)
    init, loss = models.build(config(seq))
    numbers = np.random.default_rng(0)
    batch = {key: numbers.integers(0, SHAPE.vocab, (batch_size, seq)).astype(np.int32) for key in ("inputs", "targets")}
    hand, hand_text = hand_stepper(mesh, optimizer, init, batch)
    planned, planned_text, plan = planned_stepper(mesh, optimizer, init, loss, batch)
    losses = (hand(), planned())
    assert abs(losses[0] - losses[1]) < 1e-5 * abs(losses[0]), f"the programs differ: loss {losses}"
    seconds: dict[str, list[float]] = {"hand": [], "planned": []}
    for repeat in range(repeats):
        for key, step in (("hand", hand), ("planned", planned)) if repeat % 2 == 0 else (("planned", planned), ("hand", hand)):
            seconds[key].append(timed(step))
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    pairs = [planned / hand for hand, planned in zip(seconds["hand"], seconds["planned"], strict=True)]
    return {
        "mesh": mesh, "ratio": medians["planned"] / medians["hand"], "pair_ratios": {"median": statistics.median(pairs), "min": min(pairs), "max": max(pairs)},
        "step_seconds": medians, "collectives": {"hand": summary(collectives(hand_text)), "planned": summary(collectives(planned_text))},
        "plan": {"rules": plan.rules.to_json(), "zero": plan.zero, "sequence_parallel": plan.sequence_parallel}, "loss": losses[0],
    }


def main() -> None:
    """Runs every mesh and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", choices=MESHES, action="append", help="a mesh; all of them when left out")
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch")
    parser.add_argument("--seq", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each program")
    parser.add_argument("--out", type=Path, default=RESULTS / "hand_sharded.json")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in args.mesh or MESHES:
        row = rows[name] = compare(name, args.batch, args.seq, args.repeats)
        totals = {who: row["collectives"][who].get("total", {"count": 0, "wire_bytes": 0.0}) for who in ("hand", "planned")}
        print(f"{name:20s} planned/hand {row['ratio']:.3f}  collectives {totals['planned']['count']:.0f}/{totals['hand']['count']:.0f}  "
              f"wire MB {totals['planned']['wire_bytes'] / 1e6:.1f}/{totals['hand']['wire_bytes'] / 1e6:.1f}", flush=True)
        jax.clear_caches()
    worst = max(row["ratio"] for row in rows.values())
    write(args.out, {"benchmark": "hand_sharded", "shape": vars(SHAPE), "batch": args.batch, "seq": args.seq, "repeats": args.repeats,
                     "worst_ratio": worst, "meshes": rows})
    print(f"worst step-time ratio planned/hand: {worst:.3f}")


if __name__ == "__main__":
    main()
