"""Meetings of fragments, in narrow dtypes, and with neighbours, against loops over replicas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.islands.exchanges import padded
from shardlib.islands.meeting import packed, unpacked
from tests.islands.replicas import close, gossip
from tests.islands.test_diloco import (
    AXES,
    ROWS,
    STEPS,
    compiled,
    loss,
    rows,
    trained,
    weights,
)

Tree = Any


#: What crosses of numbers that are narrower than float32.
NARROW = {"all-to-all", "all-gather"}


def test_more_fragments_than_parts_are_refused() -> None:
    with pytest.raises(shardlib.PinError, match="fragments=5 at most"):
        compiled(optax.sgd(0.1), exchange="diloco:2:60:fragments=30", mesh={"fsdp": 4}, zero=3)


@pytest.mark.long
@pytest.mark.parametrize(("wire", "within"), [("bfloat16", 2**-8), ("int8", 2**-6), ("int4", 0.2)])
def test_what_crosses_in_a_narrow_dtype_is_nearly_the_mean(wire: str, within: float) -> None:
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("exchange", "kinds"),
    [
        ("gossip:4:ring", {"collective-permute"}),
        *((f"diloco:2:50:wire={wire}", NARROW) for wire in ("bfloat16", "int8", "int4")),
        ("compressed:2:powersgd:rank=2", {"all-reduce"}),
        ("compressed:2:topk:density=0.05", {"all-gather"}),
        ("compressed:2:quantised", NARROW),
        ("compressed:2:quantised:dtype=int4", NARROW),
        ("compressed:2:sign", {"all-gather"}),
    ],
)
def test_what_crosses_is_as_planned(exchange: str, kinds: set[str]) -> None:
    given = shardlib.tree(weights, AXES), loss, optax.adamw(1e-3), rows(0)
    mesh = {"fsdp": 2} if "gossip" in exchange else {"fsdp": 2, "tensor": 2}
    pin = {"exchange": exchange, "mesh": mesh, "zero": 3}
    found = shardlib.verify(*given, topology="cpu:8", pin=pin)
    assert found.compiled is not None and found.compiled.meeting is not None
    made, planned = Counter[str](), Counter[str]()
    for total, source in ((made, found.compiled.meeting), (planned, found.plan.estimate)):
        for collective in source.collectives:
            if "island" in collective.axes:
                total[collective.kind] += collective.total_bytes
    assert made == planned and set(made) == kinds
    assert not [one for one in found.findings if one.severity == "error"]


def _everything(arrays: Any, wire: str, islands: int) -> list[Any]:
    """The same means, of copies of everything that every island has."""
    return [jnp.mean(jax.lax.all_gather(one, "island"), axis=0) for one in arrays]


def _in_float32(arrays: Any, wire: str, islands: int) -> list[Any]:
    """The same means, as if numbers had been promised as float32."""
    return [jax.lax.pmean(one, "island") for one in arrays]


@pytest.mark.long
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
