"""Checkpoints of states that are partly on disk are those of states in memory, in both directions,
and their files stay until they are written.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import optax
import pytest

import shardlib
from shardlib.checkpointing import store
from shardlib.checkpointing.store import Checkpoints
from shardlib.lowering.disk import DiskArray
from tests.checkpointing.states import assert_same, numbers
from tests.checkpointing.test_plans import BATCH, PLANS, Model, loss

OPTIMIZER = optax.adam(1e-2)


def program(name, folder=None, **given):
    pin = {**PLANS[name], **({"offload": ["disk"]} if folder is not None else {})}
    return shardlib.compile(
        Model,
        loss,
        OPTIMIZER,
        BATCH,
        topology="cpu:8",
        pin=pin,
        batch_axes={"x": ("batch", None), "y": ("batch", None)},
        disk=folder,
        **given,
    )


def read(state):
    return numbers(
        jax.tree.map(lambda leaf: leaf.array() if isinstance(leaf, DiskArray) else leaf, state)
    )


def on_disk(state):
    return [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, DiskArray)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def first(folder):
    return program("fsdp", folder)


@pytest.fixture(scope="module")
def saved(first, tmp_path_factory):
    """A folder with a checkpoint that was written while training went on, what it holds, and the
    loss of the step after it.
    """
    checkpoints = Checkpoints(tmp_path_factory.mktemp("checkpoints"))
    checkpoints.prepare(first)
    state, _ = first.step(first.init(0), BATCH)
    kept = read(state)
    checkpoints.save(1, state, plan=first.plan)
    losses = []
    for _ in range(3):
        state, metrics = first.step(state, BATCH)
        losses.append(float(metrics["loss"]))
    checkpoints.close()
    assert len(checkpoints._camera._programs) == 1 and losses == sorted(losses, reverse=True)
    return checkpoints._folder.path, kept, losses


@pytest.mark.long
def test_goes_on_from_disk_to_disk(first, saved, monkeypatch):
    path, kept, losses = saved
    monkeypatch.setattr(store, "PORTION", 5000)
    restored = Checkpoints(path, read_only=True).restore(first)
    assert len(on_disk(restored.state)) == 4
    assert_same(read(restored.state), kept)
    state, found = restored.state, []
    for _ in range(3):
        state, metrics = first.step(state, BATCH)
        found.append(float(metrics["loss"]))
    assert found == losses


@pytest.mark.long
def test_goes_on_in_memory_and_back_on_disk(saved, folder, tmp_path):
    path, kept, losses = saved
    other = program("tensor")
    state = Checkpoints(path, read_only=True).restore(other).state
    assert not on_disk(state)
    assert_same(numbers(state), kept)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, plan=other.plan, wait=True)
        again = program("zero-2", folder)
        back = checkpoints.restore(again).state
        assert len(on_disk(back)) == 4
        assert_same(read(back), kept)
        after, metrics = again.step(back, BATCH)
        assert float(metrics["loss"]) == pytest.approx(losses[0], rel=1e-6)
        checkpoints.save(2, after, plan=again.plan, wait=True)
        assert_same(read(checkpoints.restore(again).state), read(after))


@pytest.mark.usefixtures("saved")  # whose programs are counted before others run
def test_a_damaged_state_on_disk_is_not_saved_as_good(first, tmp_path):
    state, _ = first.step(first.init(0), BATCH)
    leaf = on_disk(state)[0]
    leaf.array()
    path = next(iter(leaf._files.values())).path
    path.write_bytes(bytes(len(path.read_bytes())))
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(shardlib.ShardlibError, match="has changed"):
        checkpoints.save(1, state, plan=first.plan, wait=True)
    assert checkpoints.steps() == ()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_the_optimizer_starts_anew_with_the_guards(where, first, saved, folder):
    path, kept, _ = saved
    guards = shardlib.Guards(clip=1.0, scale=2.0**10, spike=True)
    other = program("tensor", folder if where == "disk" else None, guards=guards)
    state = Checkpoints(path, read_only=True).restore(other, parameters_only=True).state
    assert_same(read(state.params), kept.params)
    assert not any(value.any() for value in jax.tree.leaves(read(state.opt_state))) and len(
        on_disk(state)
    ) == (4 if where == "disk" else 0)
    after, metrics = other.step(state, BATCH)
    assert int(metrics["skipped"]) == 0
    assert int(after.step) == 2
    assert float(metrics["loss_scale"]) == 2.0**10
    assert replace(after, step=None).guard is not None
