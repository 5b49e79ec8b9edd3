"""Meetings of fragments, in narrow dtypes, and with neighbours, against loops over replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.islands.exchanges import padded
from shardlib.islands.meeting import packed, unpacked
from tests.islands.replicas import close, diloco, gossip
from tests.islands.test_diloco import (
    AXES,
    ROWS,
    STEPS,
    compiled,
    halves,
    loss,
    rows,
    trained,
    weights,
)

Tree = Any


@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"fsdp": 2, "tensor": 2}, "zero": 3},
        {"mesh": {"fsdp": 4}, "zero": 1},
    ],
    ids=str,
)
def test_fragments_meet_one_after_the_other(pin: dict[str, Any]) -> None:
    optimizer = optax.adamw(1e-2, eps=1e-3)
    program = compiled(optimizer, exchange="diloco:2:6:rate=0.5:momentum=0.8:fragments=2", **pin)
    losses, state = trained(program)
    first = jax.tree.map(np.asarray, program.module(program.init(0)))
    about = [{AT[one.place]: one.rows for one in meeting.about} for meeting in program.meetings]
    assert about[0]["up"] == (0, 2) and about[1]["down"] == (1, 2)  # a layer each
    masks = [{name: mask(first[name], name in one, one.get(name)) for name in AT} for one in about]
    for name in AT:  # every number is in one of them
        assert (masks[0][name] ^ masks[1][name]).all()
    expected, outer, replicas = diloco(
        loss,
        first,
        optimizer,
        [halves(rows(step)) for step in range(STEPS)],
        every=6,
        rate=0.5,
        momentum=0.8,
        fragments=masks,
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    close(program.module(state), outer)
    for one, mine in zip(state.islands, replicas, strict=True):
        close(one.params, mine)


#: Names of parameters in the order of their leaves.
AT = sorted(AXES)


def mask(array: np.ndarray, belongs: bool, some: tuple[int, int] | None) -> np.ndarray:
    found = np.zeros(array.shape, bool)
    if some is None:
        found[...] = belongs
    else:
        found[some[0] :: some[1]] = True
    return found


def test_more_fragments_than_parts_are_refused() -> None:
    with pytest.raises(shardlib.PinError, match="fragments=5 at most"):
        compiled(optax.sgd(0.1), exchange="diloco:2:60:fragments=30", mesh={"fsdp": 4}, zero=3)


@pytest.mark.processes
@pytest.mark.parametrize(("wire", "within"), [("bfloat16", 2**-8), ("int8", 2**-6), ("int4", 0.2)])
def test_what_crosses_in_a_narrow_dtype_is_as_planned_and_nearly_the_mean(
    wire: str, within: float
) -> None:
    def program(form: str) -> Any:
        return compiled(
            optax.sgd(0.1),
            exchange=f"diloco:2:50:rate=1:momentum=0:wire={form}",
            mesh={"fsdp": 4},
            zero=3,
        )

    narrow, wide = program(wire), program("float32")
    found = []
    for one in (narrow, wide):
        state = one.init(0)
        before = jax.tree.map(np.asarray, one.module(state))
        for step in range(3):
            state, _ = one.step(state, rows(step))
        after = one.module(one.meet(state))
        found.append(jax.tree.map(lambda a, b: np.asarray(a) - b, after, before))
    moved, exact = (np.concatenate([x.ravel() for x in jax.tree.leaves(one)]) for one in found)
    assert 0 < np.abs(moved - exact).max() <= within * np.abs(exact).max()
    crossing = [c for c in narrow.plan.estimate.collectives if "island" in c.axes]
    assert sorted(c.kind for c in crossing) == ["all-gather", "all-to-all"]
    verified = shardlib.verify(
        shardlib.tree(weights, AXES),
        loss,
        optax.sgd(0.1),
        rows(0),
        topology="cpu:8",
        plan=narrow.plan,
    )
    assert verified.compiled is not None and verified.compiled.meeting is not None
    compiled_bytes = {
        c.kind: c.total_bytes for c in verified.compiled.meeting.collectives if "island" in c.axes
    }
    assert compiled_bytes == {c.kind: c.bytes for c in crossing}
    assert not [one for one in verified.findings if one.severity == "error"]


@pytest.mark.parametrize("wire", ["int8", "int4", "bfloat16"])
def test_packed_numbers_are_those_of_a_plain_formula(wire: str) -> None:
    count = padded(wire, [1000], 2)
    numbers = np.random.default_rng(0).normal(size=(2, count // 2)).astype(np.float32)
    numbers[0, :256] = 0  # a block of zeros has no scale
    found = unpacked(packed(jnp.asarray(numbers), wire), wire)
    if wire == "bfloat16":
        expected = numbers.astype(jnp.bfloat16).astype(np.float32)
    else:
        most = {"int8": 127, "int4": 7}[wire]
        grouped = numbers.reshape(2, -1, 256)
        scale = np.abs(grouped).max(-1, keepdims=True) / np.float32(most)
        with np.errstate(invalid="ignore"):
            whole = np.nan_to_num(np.clip(np.rint(grouped / scale), -most, most))
        expected = (whole * scale).reshape(numbers.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("pin", "islands"),
    [
        ({"exchange": "gossip:4:exponential", "mesh": {"fsdp": 2}, "zero": 1}, 4),
        ({"exchange": "gossip:4:ring", "mesh": {"fsdp": 2}, "zero": 3}, 4),
        ({"exchange": shardlib.Gossip(islands=8)}, 8),
    ],
    ids=str,
)
def test_gossip_is_a_loop_over_replicas_that_are_mixed(pin: dict[str, Any], islands: int) -> None:
    optimizer = optax.adamw(1e-2, eps=1e-3)
    program = compiled(optimizer, **pin)
    losses, state = trained(program)
    eye = np.eye(islands)
    if program.exchange.graph == "ring":
        mixing = [(eye + np.roll(eye, 1, 1) + np.roll(eye, -1, 1)) / 3]
    else:
        mixing = [(eye + np.roll(eye, -(2**t), 1)) / 2 for t in range(islands.bit_length() - 1)]
    for matrix in mixing:  # doubly stochastic
        np.testing.assert_allclose([matrix.sum(0), matrix.sum(1)], 1)
    each = ROWS // islands
    batches = [
        [
            jax.tree.map(lambda a, k=k: a[k * each : (k + 1) * each], rows(step))
            for k in range(islands)
        ]
        for step in range(STEPS)
    ]
    first = jax.tree.map(np.asarray, program.module(program.init(0)))
    expected, replicas = gossip(loss, first, optimizer, batches, [m.tolist() for m in mixing])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for one, mine in zip(state.islands, replicas, strict=True):
        close(one.params, mine)
    close(program.module(state), jax.tree.map(lambda *x: np.mean(x, 0), *replicas))


def test_after_as_many_meetings_as_distances_all_islands_have_the_mean() -> None:
    program = compiled(optax.sgd(0.5), exchange="gossip:8:exponential:every=100")
    state, _ = program.step(program.init(0), rows(0))
    apart = [jax.tree.map(np.asarray, one.params) for one in state.islands]
    assert np.ptp([one["head"] for one in apart], axis=0).max() > 1e-3
    for meeting in range(3):
        state = program.meet(state, meeting)
    mean = jax.tree.map(lambda *x: np.mean(x, 0, dtype=np.float64), *apart)
    for one in state.islands:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), one.params, mean
        )


@pytest.mark.processes
def test_permutes_are_as_planned() -> None:
    given = shardlib.tree(weights, AXES), loss, optax.adamw(1e-3), rows(0)
    pin = {"exchange": "gossip:4:ring", "mesh": {"fsdp": 2}, "zero": 1}
    found = shardlib.verify(*given, topology="cpu:8", pin=pin)
    planned = [c for c in found.plan.estimate.collectives if "island" in c.axes]
    assert found.compiled is not None and found.compiled.meeting is not None
    compiled_ones = [c for c in found.compiled.meeting.collectives if "island" in c.axes]
    assert {c.kind for c in compiled_ones} == {"collective-permute"}
    assert sum(c.total_bytes for c in compiled_ones) == sum(c.bytes for c in planned)
    assert not [one for one in found.findings if one.severity == "error"]


def _everything(arrays: Any, wire: str, islands: int) -> list[Any]:
    """The same means, of copies of everything that every island has."""
    return [jnp.mean(jax.lax.all_gather(one, "island"), axis=0) for one in arrays]


def _in_float32(arrays: Any, wire: str, islands: int) -> list[Any]:
    """The same means, as if numbers had been promised as float32."""
    return [jax.lax.pmean(one, "island") for one in arrays]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("planted", "wire", "code"),
    [(_everything, "float32", "hidden-exchange"), (_in_float32, "int8", "wide-exchange")],
)
def test_what_a_meeting_moves_beside_its_plan_is_found(
    planted: Any, wire: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardlib.islands.meeting.means", planted)
    given = shardlib.tree(wide, AXES), loss, optax.sgd(0.1), rows(0)
    pin = {"exchange": f"diloco:2:10:wire={wire}", "mesh": {"fsdp": 4}, "zero": 3}
    found = shardlib.verify(*given, topology="cpu:8", pin=pin)
    assert code in [one.code for one in found.findings if one.severity == "error"]
    assert not found.ok


def wide(key: Any) -> Tree:
    """The weights with a table that is more than the padding of a meeting."""
    return {**weights(key), "table": jax.random.normal(key, (4096, 16))}
