"""Loss that islands cost, over 2,000 steps of as many tokens.

    python -m benchmarks island_quality [--only TEXT] [--seeds 2]

A byte transformer of half a million parameters on the sources of Python's standard library, four
islands of one simulated device each; every way of exchanging sees the same batches in the same
order, with the same rate of the inner optimizer, which was chosen for the exact one. Held out are
files that no batch has. Stored is the loss there of the outer parameters (the mean where nothing is
outer), after 2,000 steps, for each seed of parameters and order; `gap` is that over the exact
optimizer of the same kind. Runs that are stored already are not done again.
"""

from __future__ import annotations

import json
import statistics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.environment import (
    card,
    command_line,
    environment,
    show,
    simulate_devices,
    stored,
    table,
)

ISLANDS = 4
simulate_devices(ISLANDS)

import numpy as np
import optax

import shardlib
from shardlib import models

CONFIG = card("island-bytes")
STEPS, ROWS, SEQ = 2000, 16, 64
#: Steps over which rates rise.
WARM_UP = 100
#: Part of the files that is held out, and rows of it that are evaluated.
HELD_OUT, JUDGED = 10, 512
#: (name, optimizer, exchange) -> the first of each optimizer is what others are compared with.
WAYS: tuple[tuple[str, str, str], ...] = [tuple(way) for way in table("island_quality")]


def text() -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library: to train on, and held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.glob("*.py")) + sorted((folder / "email").glob("*.py"))
    every = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
    parts = (
        [one for number, one in enumerate(every) if (number % HELD_OUT == 0) == held]
        for held in (False, True)
    )
    train, judged = (np.concatenate(part).astype(np.int32) for part in parts)
    return train, judged


def batches(data: np.ndarray, seed: int, rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Rows from places drawn at random, for ever."""
    draw = np.random.default_rng(seed)
    while True:
        starts = draw.integers(0, len(data) - SEQ - 1, rows)
        both = np.stack([data[at : at + SEQ + 1] for at in starts])
        yield {"inputs": both[:, :-1], "targets": both[:, 1:]}


def optimizer_of(name: str, *, summed: bool) -> optax.GradientTransformation:
    """AdamW, or SGD with a momentum of 0.9, which top-k has in what it sums."""
    peak = 3e-3 if name == "adamw" else 0.05
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, WARM_UP, STEPS, 0.1 * peak)
    if name == "adamw":
        return optax.adamw(rate, weight_decay=0.01)
    return optax.sgd(rate, momentum=None if summed else 0.9)


def run(way: tuple[str, str, str], seed: int) -> dict[str, Any]:
    """One way of exchanging, trained and judged."""
    name, optimizer, exchange = way
    train, judged = text()
    init, loss = models.build(CONFIG)
    program = shardlib.compile(
        init,
        loss,
        optimizer_of(optimizer, summed="topk" in exchange),
        models.example_batch(CONFIG, ROWS, SEQ),
        topology=f"cpu:{ISLANDS}",
        pin={"exchange": exchange, "mesh": {"data": ISLANDS if exchange == "exact" else 1}},
    )
    state, start, losses = program.init(seed), time.monotonic(), list[float]()
    for number, batch in zip(range(STEPS), batches(train, seed, ROWS), strict=False):
        state, metrics = program.step(state, batch)
        if number % 100 == 99:
            losses.append(float(metrics["loss"]))
    found = program.evaluate(state, next(batches(judged, 999, JUDGED)))
    return {
        "way": name,
        "optimizer": optimizer,
        "exchange": exchange,
        "seed": seed,
        "held_out": float(found["loss"]),
        "losses": losses,
        "seconds": time.monotonic() - start,
        "bytes_over_islands": sum(
            c.total_bytes / max(1, c.every)
            for c in program.plan.estimate.collectives
            if ("island" if exchange != "exact" else "data") in c.axes
        ),
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each way the means over seeds, and the gap to the exact optimizer of the same kind."""
    by_way: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        by_way.setdefault((row["optimizer"], row["way"]), []).append(row["held_out"])
    return [
        {
            "way": way,
            "optimizer": optimizer,
            "held_out": statistics.mean(found),
            "seeds": len(found),
            "gap": statistics.mean(found) / statistics.mean(by_way[optimizer, "exact"]) - 1,
        }
        for (optimizer, way), found in by_way.items()
        if (optimizer, "exact") in by_way
    ]


def main() -> None:
    parser = command_line(__doc__, "island_quality.json")
    parser.add_argument("--only", default="", help="ways whose name has this text")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    rows = stored(args.out, "rows", [])
    for seed in range(args.seeds):
        for way in WAYS:
            done = any(
                (r["exchange"], r["optimizer"], r["seed"]) == (way[2], way[1], seed) for r in rows
            )
            if done or args.only not in way[0]:
                continue
            rows.append(run(way, seed))
            show(f"{way[0]} ({way[1]}), seed {seed}", rows[-1], "held_out", "seconds")
            result = {
                **environment(),
                "benchmark": "island_quality",
                "steps": STEPS,
                "rows_of_a_step": ROWS,
                "tokens_of_a_row": SEQ,
                "islands": ISLANDS,
                "rows": rows,
                "summary": summary(rows),
            }
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    for one in summary(rows):
        print(
            f"{one['optimizer']:6} {one['way']:38} {one['held_out']:.4f} {one['gap']:+.2%} ({one['seeds']} seeds)"
        )
