"""A plan for unlike devices is run: the results of one process, and a lost stage is noticed."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import shardlib
from shardlib import models
from shardlib.annotation.model import read
from shardlib.errors import ArgumentError, ModelError
from shardlib.machines.chips import Chip
from shardlib.machines.topology import Device
from shardlib.processes.wire import arrays_of, body_of
from shardlib.serve.edge import StageError, Workers, cut, run_edge
from shardlib.serve.edge_plan import EdgePlan
from tests.serve.test_meshes import FAMILIES

BATCH = {"tokens": jax.ShapeDtypeStruct((2, 16), jnp.int32)}


#: Seconds after which a stage of a chain of twelve batches, half a second each, is struck.
STRIKE_SECONDS = 10.0


def device(name: str, seconds: float) -> Device:
    chip = Chip(
        name=name,
        vendor="cpu",
        flops_per_s=(("float32", 1e9),),
        hbm_bytes=10**12,
        hbm_bytes_per_s=1e10,
    )
    return Device(name=name, chip=chip, link_bytes_per_s=1e8, layer_seconds=seconds)


DEVICES = [device("slow", 0.03), device("middle", 0.015), device("fast", 0.01)]


def forward(model: Any, batch: Any) -> Any:
    logits = model(batch["tokens"])
    return {"logits": logits, "best": jnp.argmax(logits, axis=-1)}


def planned(init: Any, devices: list[Device]) -> EdgePlan:
    return shardlib.plan_edge(init, forward, BATCH, devices=devices)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name in ("latent", "window in some layers") else [pytest.mark.matrix]
        )
        for name in FAMILIES
    ],
)
def test_stages_compute_what_the_model_does(name: str):
    config = replace(FAMILIES[name], layers=4)
    init = models.build(config)[0]
    model = read(init)
    weights = jax.jit(model.init)(0)
    plan = planned(init, DEVICES)
    assert len(plan.stages) > 1
    tokens = np.arange(32, dtype=np.int32).reshape(2, 16)
    given = [tokens]
    stages = cut(model, forward, BATCH, weights, plan)
    for one in stages:
        program = export.deserialize(bytearray(one.program))
        given = [np.asarray(x) for x in program.call(list(one.weights), given)]
    wanted = forward(model.rebuild(*weights), {"tokens": tokens})
    for found, right in zip(given, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, right, atol=1e-5)
    # Layers are where they are computed, and nowhere else.
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    ends = 2 * model.params["embedding"].size * 4
    assert sum(w.nbytes for one in stages for w in one.weights) <= whole + ends


def test_bfloat16_is_sent_and_handed_on():
    sizes = replace(FAMILIES["grouped"], layers=4)
    init = models.build(replace(sizes, param_dtype="bfloat16", compute_dtype="bfloat16"))[0]
    model = read(init)
    weights = jax.jit(model.init)(0)
    tokens = np.arange(32, dtype=np.int32).reshape(2, 16)
    given = [tokens]
    for one in cut(model, forward, BATCH, weights, planned(init, DEVICES)):
        arrays = {f"w{k}": array for k, array in enumerate(one.weights)}
        arrays |= {f"g{k}": array for k, array in enumerate(given)}
        size, chunks = body_of(arrays)
        there = dict(arrays_of(size, io.BytesIO(b"".join(map(bytes, chunks))).read))
        program = export.deserialize(bytearray(one.program))
        lists = [[there[name] for name in arrays if name[0] == kind] for kind in "wg"]
        given = [np.asarray(x) for x in program.call(*lists)]
    right = forward(model.rebuild(*weights), {"tokens": tokens})["logits"]
    logits = next(array for array in given if array.ndim == 3)
    assert logits.dtype == right.dtype and model.params["embedding"].dtype == jnp.bfloat16
    np.testing.assert_allclose(logits.astype(np.float32), right.astype(np.float32), atol=0.1)


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any, list[Any], list[Any]]:
    """A model, its plan, batches, and the results of one process."""
    init = models.build(replace(FAMILIES["grouped"], layers=4))[0]
    model = read(init)
    module = model.rebuild(*jax.jit(model.init)(3))
    batches = [{"tokens": np.full((2, 16), n, np.int32)} for n in range(40)]
    right = [jax.tree.leaves(forward(module, one)) for one in batches]
    return init, planned(init, DEVICES), batches, right


def equal(found: list[Any], right: list[Any]) -> None:
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_lost_stage_is_an_error_within_seconds(small: Any, how: str):
    init, plan, batches, _ = small
    slow = replace(plan, stages=tuple(replace(one, seconds=0.5) for one in plan.stages))
    struck = list[float]()
    workers = Workers.here(len(plan.stages))
    try:
        _strike(workers, getattr(signal, how), 1, struck)
        with pytest.raises(StageError, match="stage 1 of the chain") as caught:
            run_edge(slow, init, forward, batches, weights=3, simulated=True, workers=workers)
    finally:
        workers.close()
    assert caught.value.stage == 1
    host, port = workers.addresses[1]
    assert f"stage 1 of the chain, at {host}:{port}, " in str(caught.value)
    assert time.monotonic() - struck[0] < 60


@pytest.mark.long
@pytest.mark.processes
def test_a_chain_goes_on_without_a_lost_device(small: Any):
    init, plan, batches, right = small
    slow = replace(plan, stages=tuple(replace(one, seconds=0.5) for one in plan.stages))

    def again(lost: str) -> EdgePlan:
        return planned(init, [one for one in DEVICES if one.name != lost])

    workers = Workers.here(len(plan.stages))
    try:
        _strike(workers, signal.SIGKILL, 0, [])
        found = run_edge(
            slow, init, forward, batches, weights=3, simulated=True, again=again, workers=workers
        )
    finally:
        workers.close()
    equal(found.results, right)
    assert found.lost == (plan.stages[0].device,)
    assert len(found.plans) == 2


def _strike(workers: Workers, how: int, stage: int, when: list[float]) -> None:
    """Strikes a stage once it computes batches."""
    process = workers.processes[stage]

    def strike() -> None:
        time.sleep(STRIKE_SECONDS)
        when.append(time.monotonic())
        os.kill(process.pid, how)

    threading.Thread(target=strike, daemon=True).start()


@pytest.mark.long
@pytest.mark.processes
def test_processes_give_the_results_of_one_and_strangers_are_turned_away(small: Any):
    init, plan, batches, right = small
    workers = Workers.here(len(plan.stages))
    try:
        for address in workers.addresses:
            with socket.create_connection(address, 5) as one:
                one.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200)
        found = run_edge(plan, init, forward, batches, weights=3, workers=workers)
        equal(found.results, right)
        assert found.lost == () and found.batches_per_s is not None
        other = replace(workers, secret="another")
        with pytest.raises(StageError, match=r"does not answer.*a stage with another secret"):
            run_edge(plan, init, forward, batches[:2], weights=3, workers=other)
    finally:
        workers.close()


def test_what_cannot_be_run_is_said(small: Any):
    init, plan, batches, _ = small
    with pytest.raises(ArgumentError, match="there are no batches"):
        run_edge(plan, init, forward, [])
    nobody = Workers(addresses=[], secret="x" * 16)
    with pytest.raises(ArgumentError, match="there is no process of one"):
        run_edge(plan, init, forward, batches, workers=nobody)

    def unrolled(key: jax.Array) -> Any:
        return [jax.random.normal(key, (16, 16)) for _ in range(4)]

    tree = shardlib.tree(unrolled, [(None, None)] * 4)

    def plain(params: Any, batch: Any) -> Any:
        x = batch["tokens"].astype(jnp.float32)
        for one in params:
            x = jnp.tanh(x @ one)
        return x

    with pytest.raises(ModelError, match="no loop over its layers"):
        run_edge(plan, tree, plain, batches, workers=nobody)
