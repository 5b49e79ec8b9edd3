"""Stalls of a training loop by checkpoints, and bytes a second against plain Orbax.

    python -m benchmarks checkpointing

Two runs of the loop with the same program alternate, one without checkpoints and one with a
checkpoint every 50 steps; the stall is how long `save` takes to return, and beside it stands how
much longer all steps took, which on a machine whose devices are its processors has the writing in
it. Then the same state is saved and restored by `Checkpoints` and by a plain Orbax
`PyTreeCheckpointer`, in turn, forth and back, and by one that does not compress, as `Checkpoints`
does not. It is the state after a step: the moments of a first one are zeros, which compress to
nothing. Before each, what others have left to write is written.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.environment import card, command_line, show, simulate_devices, write

simulate_devices(8)

import jax
import optax
import orbax.checkpoint as ocp

import shardlib
from benchmarks.stepping import random_tokens
from shardlib import models
from shardlib.checkpointing.store import Checkpoints, Keep
from shardlib.models.config import TransformerConfig

#: A model whose step takes some tenths of a second on two cores that have other work as well.
LOOP = card("demonstration")
#: One whose state has more than a hundred megabytes.
LARGE = replace(LOOP, name="large", vocab_size=8192, embed=384, heads=6, kv_heads=6, mlp=1152)
#: And one with more than a gigabyte.
HUGE = replace(LARGE, name="huge", layers=8, embed=768, heads=12, kv_heads=12, mlp=3072)
EVERY = 50


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Loop:
    """A training loop that saves every so many steps, or never."""

    def __init__(self, program: shardlib.Program, batch: Any, folder: Path | None):
        self.program, self.batch, self.state, self.steps = (
            program,
            program.put(batch),
            program.init(0),
            0,
        )
        self.checkpoints = Checkpoints(folder, Keep(newest=2)) if folder else None
        if self.checkpoints:
            self.checkpoints.prepare(program)
        self.stalls: list[float] = []
        self.times: list[float] = []

    def run(self, count: int) -> None:
        """Some steps; each is waited for, as by a loop that prints its loss."""
        for _ in range(count):
            start = time.perf_counter()
            self.state, metrics = self.program.step(self.state, self.batch)
            self.steps += 1
            float(
                metrics["loss"]
            )  # a state is saved once its loss has been judged, as in `shardlib.fit`
            if self.checkpoints and self.steps % EVERY == 0:
                begun = time.perf_counter()
                self.checkpoints.save(
                    self.steps, self.state, plan=self.program.plan, metrics=metrics
                )
                self.stalls.append(time.perf_counter() - begun)
            self.times.append(time.perf_counter() - start)


def stall(program: shardlib.Program, batch: Any, saves: int, folder: Path) -> dict[str, Any]:
    """Both loops in turn, 10 steps at a time."""
    plain, saving = Loop(program, batch, None), Loop(program, batch, folder)
    for loop in (plain, saving):
        loop.run(EVERY // 5)
        loop.times.clear()
    while len(saving.stalls) < saves or saving.steps % EVERY:
        for loop in (plain, saving):
            loop.run(EVERY // 5)
    assert saving.checkpoints
    saving.checkpoints.close()
    step = statistics.median(plain.times)
    held = statistics.median(saving.stalls)
    return {
        "every_steps": EVERY,
        "saves": len(saving.stalls),
        "step_s": step,
        "stall_s": held,
        "stalls_s": saving.stalls,
        "stall_of_a_step": held / step,
        "stall_of_all_steps": held / (EVERY * step),
        "mean_step_s": statistics.mean(plain.times),
        "mean_step_with_saves_s": statistics.mean(saving.times),
        "slower_with_saves": statistics.mean(saving.times) / statistics.mean(plain.times) - 1,
    }


def throughput(program: shardlib.Program, batch: Any, repeats: int, folder: Path) -> dict[str, Any]:
    """Bytes a second of saving and restoring, ours and plain Orbax's of the same state."""
    state = jax.block_until_ready(program.step(program.init(0), batch)[0])
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    checkpoints, plain = Checkpoints(folder / "ours", Keep(newest=None)), ocp.PyTreeCheckpointer()
    bare = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
    checkpoints.prepare(program)
    tree, arguments = (
        {"state": state},
        {
            "state": jax.tree.map(
                lambda leaf: ocp.ArrayRestoreArgs(
                    sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
                ),
                program.state,
            )
        },
    )
    work: dict[str, Callable[[int], Any]] = {
        "save": lambda i: checkpoints.save(i, state, plan=program.plan, wait=True),
        "orbax_save": lambda i: plain.save(folder / f"orbax-{i}", tree),
        "uncompressed_save": lambda i: bare.save(
            folder / f"bare-{i}", args=ocp.args.PyTreeSave(tree)
        ),
        "restore": lambda i: jax.block_until_ready(checkpoints.restore(program, i).state),
        "orbax_restore": lambda i: jax.block_until_ready(
            plain.restore(
                folder / f"orbax-{i}", item={"state": program.state}, restore_args=arguments
            )
        ),
        "uncompressed_restore": lambda i: jax.block_until_ready(
            bare.restore(
                folder / f"bare-{i}",
                args=ocp.args.PyTreeRestore(item={"state": program.state}, restore_args=arguments),
            )
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in work}
    for i in range(repeats + 1):
        for kind in ("save", "restore"):
            names = [kind, f"orbax_{kind}", f"uncompressed_{kind}"]
            for name in names if i % 2 else names[::-1]:
                os.sync()
                found[name].append(seconds(lambda name=name, i=i: work[name](i)))
        for left in (f"orbax-{i}", f"bare-{i}", f"ours/{i}"):
            shutil.rmtree(folder / left)
    checkpoints.close()
    medians = {
        name: statistics.median(times[1:]) for name, times in found.items()
    }  # the first of each is not counted
    return {
        "state_bytes": size,
        "repeats": repeats,
        "seconds": {name: times[1:] for name, times in found.items()},
        "bytes_per_s": {name: size / median for name, median in medians.items()},
        **{
            f"{kind}_against_{whose}": medians[f"{whose}_{kind}"] / medians[kind]
            for kind in ("save", "restore")
            for whose in ("orbax", "uncompressed")
        },
    }


def compiled(config: TransformerConfig) -> tuple[shardlib.Program, Any]:
    """A program under ZeRO 3 on eight simulated devices, and a batch for it."""
    init, loss = models.build(config)
    batch = random_tokens(config.vocab_size, 8, 64)
    return (
        shardlib.compile(
            init,
            loss,
            optax.adamw(1e-3),
            batch,
            topology="cpu:8",
            pin={"mesh": {"fsdp": 8}, "zero": 3},
        ),
        batch,
    )


def main() -> None:
    parser = command_line(__doc__, "checkpointing.json")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        speed: dict[str, Any] = {}
        for config in (LARGE, HUGE):
            speed[config.name] = throughput(
                *compiled(config), options.repeats, Path(folder) / config.name
            )
            show(config.name, speed[config.name], "bytes_per_s")
        held = stall(*compiled(LOOP), options.saves, Path(folder) / "loop")
        print(held, flush=True)
    write(
        options.out,
        {
            "parameters": {config.name: config.parameter_count() for config in (LOOP, LARGE, HUGE)},
            "mesh": "fsdp=8",
            "load_average": os.getloadavg(),
            "throughput": speed,
            "stall": held,
        },
    )
