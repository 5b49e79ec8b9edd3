"""A brought model under shardlib beside plain optax on one device."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

import shardlib
from benchmarks.brought.case import Case, Tree, optimizer

STEPS = 5
TOLERANCE = 1e-5
#: Arrays that are smaller than this share of the model's largest number are held to this share of
#: it: what is zero but for rounding has no size of its own.
SMALL = 1e-2
#: The mesh that is planned, and one that shards everything that can be.
PINS: Mapping[str, Mapping[str, Any] | None] = {
    "planned": None,
    "data=2 fsdp=2 tensor=2": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3},
}


def plain_runs(case: Case) -> list[tuple[list[float], list[np.ndarray]]]:
    """Losses and final parameters of five steps by optax on one device, twice: as it is, and with
    parameters moved by half a unit in the last place at the start, which shows how far rounding
    alone carries this model.
    """
    update = optimizer(case)
    with jax.default_device(jax.local_devices()[0]):
        params, rest, value = case.plain()

        @jax.jit
        def step(params: Tree, rest: Tree, moments: Tree, batch: Tree) -> tuple[Tree, ...]:
            (loss, rest), gradients = jax.value_and_grad(value, has_aux=True)(params, rest, batch)
            updates, moments = update.update(gradients, moments, params)
            return optax.apply_updates(params, updates), rest, moments, loss

        def run(params: Tree) -> tuple[list[float], list[np.ndarray]]:
            losses, others, moments = [], rest, update.init(params)
            for _ in range(STEPS):
                params, others, moments, loss = step(params, others, moments, case.batch)
                losses.append(float(loss))
            return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(params)]

        return [run(params), run(_nudged(params))]


def _nudged(params: Tree) -> Tree:
    signs = np.random.default_rng(0)

    def moved(array: jax.Array) -> jax.Array:
        by = 1 + signs.choice([-1, 1], array.shape) * 2.0**-24
        return (np.asarray(array).astype(np.float64) * by).astype(array.dtype)

    return jax.tree.map(moved, params)


def sharded_run(
    case: Case, pin: Mapping[str, Any] | None
) -> tuple[Any, list[float], list[np.ndarray]]:
    """The plan, losses and final parameters of five steps under shardlib."""
    program = shardlib.compile(
        case.init, case.loss, optimizer(case), case.batch, topology="cpu:8", pin=pin,
        batch_axes=case.batch_axes,
    )  # fmt: skip
    state = program.init(seed=0)
    losses = []
    for _ in range(STEPS):
        state, metrics = program.step(state, case.batch)
        losses.append(float(metrics["loss"]))
    frozen = {one.path for one in program.plan.parameters if one.role == "frozen"}
    params = [
        np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
        if jax.tree_util.keystr(path, simple=True, separator=".") not in frozen
    ]
    return program.plan, losses, params


def distance(
    found: tuple[list[float], list[np.ndarray]], wanted: tuple[list[float], list[np.ndarray]]
) -> float:
    """The largest difference of a loss, relative to it, or of a parameter, relative to the largest
    element of its array; infinite where arrays are others.
    """
    (losses, params), (true_losses, true_params) = found, wanted
    if [p.shape for p in params] != [p.shape for p in true_params]:
        return float("inf")
    largest = max(float(np.abs(p).max(initial=0)) for p in true_params)
    of_losses = np.abs(np.subtract(losses, true_losses)) / np.maximum(np.abs(true_losses), 1e-3)
    of_params = [
        float(np.abs(p - t).max(initial=0)) / max(float(np.abs(t).max(initial=0)), SMALL * largest)
        for p, t in zip(params, true_params, strict=True)
    ]
    worst = max(float(of_losses.max()), *of_params)
    return worst if np.isfinite(worst) else float("inf")


def compared(case: Case) -> dict[str, Any]:
    """One row of the table."""
    with jax.enable_x64(case.double):
        return _compared(case)


def _compared(case: Case) -> dict[str, Any]:
    start = time.perf_counter()
    wanted, nudged = plain_runs(case)
    row: dict[str, Any] = {
        "package": case.package,
        "model": case.model,
        "framework": case.framework,
        "wrapper": case.wrapper,
        "lines_of_loss": case.lines,
        "dtype": "float64" if case.double else "float32",
        "parameters": int(sum(p.size for p in wanted[1])),
        "first_loss": wanted[0][0],
        "last_loss": wanted[0][-1],
        "moved_by_rounding": distance(nudged, wanted),
        "meshes": {},
    }
    for name, pin in PINS.items():
        try:
            plan, *found = sharded_run(case, pin)
        except Exception as error:
            row["meshes"][name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            if not isinstance(error, shardlib.errors.ShardlibError):
                row["meshes"][name]["trace"] = traceback.format_exc()[-3000:]
            continue
        row["meshes"][name] = {
            "mesh": str(plan.mesh),
            "zero": plan.zero if hasattr(plan, "zero") else None,
            "difference": distance((found[0], found[1]), wanted),
            "sharded_by_tensor": sum("tensor" in str(p) for p in plan.parameters),
            "findings": sorted({finding.code for finding in plan.findings}),
        }
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row
