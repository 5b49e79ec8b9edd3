"""Is the planned program as fast as one sharded by hand, and does it communicate as little?

    python benchmarks/hand_sharded.py

The same transformer, batch, mesh and optimizer on eight simulated CPU devices:
`hand_transformer.py`, written by hand without shardlib, against `shardlib.compile` twice: "planned"
has the mesh pinned and all else free, "same recipe" also has the recipe of the hand-sharded program
pinned (ZeRO 3, no sequence parallelism). Steps alternate in one run; a ratio is the median of those
of neighbours in time, so that a machine that is busy at times slows both alike, and the medians are
stored beside it. Collectives are read from the compiled programs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.environment import RESULTS, command_line, simulate_devices, write

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
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "data2-fsdp4": {"data": 2, "fsdp": 4},
    "fsdp4-tensor2": {"fsdp": 4, "tensor": 2},
    "tensor8": {"tensor": 8},
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}
SHAPE = hand_transformer.Shape(
    vocab=1024, layers=4, embed=256, heads=16, kv_heads=8, head_dim=16, mlp=768
)


def config(seq: int) -> TransformerConfig:
    """The reference transformer of the same shape in float32."""
    return TransformerConfig(
        name="hand-sharded",
        vocab_size=SHAPE.vocab,
        layers=SHAPE.layers,
        embed=SHAPE.embed,
        heads=SHAPE.heads,
        kv_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        mlp=SHAPE.mlp,
        max_seq=seq,
        compute_dtype="float32",
    )


def hand_stepper(
    mesh: dict[str, int],
    optimizer: optax.GradientTransformation,
    init: Any,
    batch: dict[str, np.ndarray],
) -> tuple[Callable[[], float], str]:
    """A function that runs one step of the hand-sharded program and returns the loss, and the
    compiled text.
    """
    values = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(init(nnx.Rngs(0)), nnx.Param)))
    program = hand_transformer.build(
        SHAPE,
        hand_transformer.make_mesh(*(mesh.get(axis, 1) for axis in ("data", "fsdp", "tensor"))),
        optimizer,
        values,
        batch,
    )
    placed = jax.device_put(batch, dict.fromkeys(batch, program.batch_sharding))
    carry = [program.params, program.opt_state]

    def step() -> float:
        carry[0], carry[1], loss = program.step(carry[0], carry[1], placed)
        return float(loss)

    return step, program.step.as_text()


def planned_stepper(
    pin: dict[str, Any],
    optimizer: optax.GradientTransformation,
    init: Any,
    loss: Any,
    batch: dict[str, np.ndarray],
) -> tuple[Callable[[], float], str, shardlib.Plan]:
    """The same for the program that shardlib makes, and its plan."""
    program = shardlib.compile(
        init,
        loss,
        optimizer,
        batch,
        topology="cpu:8",
        pin={"microbatches": 1, "remat": "none", **pin},
    )
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
    init, loss = models.build(config(seq))
    numbers = np.random.default_rng(0)
    batch = {
        key: numbers.integers(0, SHAPE.vocab, (batch_size, seq)).astype(np.int32)
        for key in ("inputs", "targets")
    }
    hand, hand_text = hand_stepper(mesh, optimizer, init, batch)
    steps, texts, plans = {"hand": hand}, {"hand": hand_text}, dict[str, shardlib.Plan]()
    for who, pin in (("planned", {"mesh": mesh}), ("same recipe", recipe(mesh))):
        step, text, plan = planned_stepper(pin, optimizer, init, loss, batch)
        if not any(plan.decisions == other.decisions for other in plans.values()):
            steps[who], texts[who], plans[who] = step, text, plan
    losses = {who: step() for who, step in steps.items()}
    assert all(
        abs(value - losses["hand"]) < 1e-5 * abs(losses["hand"]) for value in losses.values()
    ), f"the programs differ: {losses}"
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    for repeat in range(repeats):
        for who in list(steps) if repeat % 2 == 0 else list(steps)[::-1]:
            seconds[who].append(timed(steps[who]))
    medians = {who: statistics.median(values) for who, values in seconds.items()}
    return {
        "mesh": mesh,
        "step_seconds": medians,
        "step_seconds_all": seconds,
        "ratio": {who: _ratio(seconds[who], seconds["hand"]) for who in plans},
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


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the ratios of steps that ran next to each other."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def main() -> None:
    """Runs every mesh and writes the table."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--mesh", choices=MESHES, action="append", help="a mesh; all of them when left out"
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences in a batch")
    parser.add_argument("--seq", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each program")
    parser.add_argument("--out", type=Path, default=RESULTS / "hand_sharded.json")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in args.mesh or MESHES:
        row = rows[name] = compare(name, args.batch, args.seq, args.repeats)
        totals = {
            who: table.get("total", {"count": 0, "bytes": 0, "wire_bytes": 0.0})
            for who, table in row["collectives"].items()
        }
        for who, ratio in row["ratio"].items():
            print(
                f"{name:20s} {who:12s} step time over hand {ratio:.3f}  collectives"
                f" {totals[who]['count']:.0f} / {totals['hand']['count']:.0f}  result MB"
                f" {totals[who]['bytes'] / 1e6:.1f} / {totals['hand']['bytes'] / 1e6:.1f}  wire MB"
                f" {totals[who]['wire_bytes'] / 1e6:.1f} /"
                f" {totals['hand']['wire_bytes'] / 1e6:.1f}",
                flush=True,
            )
        jax.clear_caches()
    worst = max(row["ratio"]["planned"] for row in rows.values())
    write(
        args.out,
        {
            "benchmark": "hand_sharded",
            "shape": vars(SHAPE),
            "batch": args.batch,
            "seq": args.seq,
            "repeats": args.repeats,
            "worst_ratio": worst,
            "meshes": rows,
        },
    )
    print(f"worst step-time ratio planned/hand: {worst:.3f}")


if __name__ == "__main__":
    main()
