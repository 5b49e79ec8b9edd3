"""Outer gradients that cross beside steps, against a loop over replicas; saved on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardlib
from shardlib import models
from shardlib.checkpointing.store import Checkpoints
from shardlib.islands.delayed import delivered
from tests.checkpointing.states import assert_same, numbers
from tests.islands.small import program as small
from tests.islands.small import rows as small_rows
from tests.islands.small import stepped
from tests.islands.test_diloco import (
    AXES,
    compiled,
    loss,
    rows,
    weights,
)


@pytest.mark.long
@pytest.mark.processes
def test_no_program_moves_anything_between_islands() -> None:
    made: Any = compiled(
        optax.adamw(1e-2), mesh={"fsdp": 4}, zero=1, exchange="diloco:2:6:fragments=2:delay=2"
    )
    found = shardlib.verify(
        shardlib.tree(weights, AXES),
        loss,
        optax.adamw(1e-2),
        rows(0),
        topology="cpu:8",
        plan=made.plan,
    )
    assert found.ok and found.compiled is not None and found.compiled.meeting is not None
    planned = {c.axes for c in made.plan.estimate.collectives if c.every}
    inside = sum(
        c.total_bytes for c in made.plan.estimate.collectives if c.every and "island" not in c.axes
    )
    assert planned == {("island",), ("fsdp",)} and inside
    assert {c.axes for c in found.compiled.meeting.collectives} == {("fsdp",)}
    assert sum(c.total_bytes for c in found.compiled.meeting.collectives) == inside
    assert "by copies between islands" in str(found)


@pytest.mark.long
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8", "int4"])
def test_copies_are_the_bytes_that_were_planned(wire: str) -> None:
    made: Any = small("zero-3", exchange=f"diloco:2:4:delay=2:wire={wire}")
    state = stepped(made, made.init(0), 0, 4)
    calls = made.calls[0]
    sent = made._apart(state.exchange.sent, [one.place for one in calls[0][0].about])
    got = delivered(made._rows(calls, sent))[1]
    here = made.programs[1].mesh.devices.flat[0]
    held = [
        sum(shard.data.nbytes for shard in row.addressable_shards if shard.device == here)
        for row in got
    ]
    (crossing,) = (c for c in made.plan.estimate.collectives if "island" in c.axes)
    assert held == [crossing.bytes] * 2
    assert (crossing.kind, crossing.count, crossing.every) == ("collective-permute", 1, 4)


@pytest.mark.long
def test_copies_arrive_while_programs_run() -> None:
    meshes = [Mesh(np.array(part), ("x",)) for part in np.split(np.array(jax.devices()[:4]), 2)]
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda _, y: jax.numpy.tanh(y @ y), x))
    whole, apart = PartitionSpec(), PartitionSpec("x")
    given = [jax.device_put(np.ones((400, 400)), NamedSharding(mesh, whole)) for mesh in meshes]
    jax.block_until_ready([busy(one) for one in given])
    rows = [
        jax.device_put(np.full((2, 1000), number), NamedSharding(mesh, apart))
        for number, mesh in enumerate(meshes)
    ]
    running = [busy(one) for one in given]
    got = jax.block_until_ready(delivered(rows))
    assert not any(one.is_ready() for one in running)
    for mesh, mine in zip(meshes, got, strict=True):
        assert [int(one[0, 0]) for one in mine] == [0, 1]
        assert all(one.sharding.device_set == {*mesh.devices.flat} for one in mine)


@pytest.mark.long
def test_other_islands_go_on_with_the_mean_of_what_was_on_the_way(tmp_path: Path) -> None:
    exchange = "diloco:{}:4:rate=0.5:momentum=0.8:delay=2"
    two: Any = small("two", exchange=exchange.format(2))
    state = stepped(two, two.init(0), 0, 5)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, plan=two.plan, wait=True)
    kept = numbers(state)
    four: Any = small("two", exchange=exchange.format(4))
    found: Any = Checkpoints(tmp_path, read_only=True).restore(four, 5).state
    assert int(found.exchange.sent_at) == 4
    for before, after in zip(kept.exchange.sent, found.exchange.sent, strict=True):
        mean = np.asarray(before).reshape(2, -1).mean(0)
        np.testing.assert_allclose(np.asarray(after).reshape(4, -1), [mean] * 4, rtol=1e-6)
    arrived = stepped(four, found, 5, 6)
    whole = stepped(two, state, 5, 6)
    for mine, wanted in zip(arrived.exchange.params, whole.exchange.params, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_checkpoint_without_a_delay_goes_on_with_one(tmp_path: Path) -> None:
    plain: Any = small("two", exchange="diloco:2:4")
    state = stepped(plain, plain.init(0), 0, 5)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, state, plan=plain.plan, wait=True)
    kept = numbers(state)
    made: Any = small("two", exchange="diloco:2:4:delay=2")
    found: Any = Checkpoints(tmp_path, read_only=True).restore(made, 5).state
    assert int(found.exchange.sent_at) == 0
    assert_same(numbers(found.exchange.params), kept.exchange.params)
    assert stepped(made, found, 5, 9).step == 9


@pytest.mark.long
def test_steps_wait_for_what_takes_longer_than_they_do() -> None:
    config = models.load("gpt2-small")
    init, model_loss = models.build(config)
    batch = models.example_batch(config, 64, 1024)

    def planned(delay: int) -> Any:
        return shardlib.plan(
            init,
            model_loss,
            optax.adamw(1e-3),
            batch,
            topology="2@10gbit-50ms*h100:8",
            pin={"exchange": f"diloco:2:100:delay={delay}"},
        ).estimate

    waits, late, hidden = planned(0), planned(1), planned(100)
    step = late.step_seconds - late.seconds.exchange
    copied = sum(c.seconds for c in late.collectives if "island" in c.axes)
    assert copied > step and late.seconds.exchange < waits.seconds.exchange
    rest = hidden.seconds.exchange  # programs of the island itself
    assert late.seconds.exchange - rest == pytest.approx((copied - step) / 100, rel=1e-6)
    assert rest < 0.01 * copied / 100


@pytest.mark.parametrize(
    ("exchange", "why"),
    [
        ("diloco:2:10:delay=-1", "delay is -1"),
        ("diloco:2:10:delay=11", "at most that many"),
        ("diloco:2:10:fragments=5:delay=3", "are sent after 2 steps"),
        ("diloco:2:10:mixing=0.3", "mixing is 0.3 without a delay"),
        ("diloco:2:10:delay=2:mixing=1", "mixing is 1"),
        ("diloco:2:10:delay=2:mixing=-0.1", "mixing is -0.1"),
    ],
)
def test_delays_that_are_none_are_refused(exchange: str, why: str) -> None:
    with pytest.raises(shardlib.PinError, match=why):
        compiled(optax.sgd(0.1), exchange=exchange)


def test_a_meeting_by_hand_is_refused() -> None:
    made: Any = small("two", exchange="diloco:2:4:delay=3")
    with pytest.raises(shardlib.StateError, match="arrives 3 steps later"):
        made.meet(made.init(0))
    plain: Any = small("two", exchange="diloco:2:4")
    for program, other in ((made, plain), (plain, made)):
        state = other.init(0)
        with pytest.raises(shardlib.StateError, match="on the way"):
            program.step(state, small_rows(0))
        other.step(state, small_rows(0))  # it was not taken over
