"""Chains over unlike devices: against all cuts, orders and subsets; more is never slower; what does
not fit is said with its bytes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib
from shardlib.errors import InfeasibleError, MissingFileError, TopologyError, TracingError
from shardlib.frontend.model import problem
from shardlib.graph import Problem
from shardlib.machines.chips import Chip
from shardlib.machines.topology import Device, cluster
from shardlib.serve.edge_plan import (
    ChainCosts,
    EdgePlan,
    chain_of,
    costs_of,
    message_seconds,
    plan_chain,
    plan_edge,
)
from tests.planner import worlds
from tests.zoo import encoder_decoder


def device(
    name: str, *, memory: float = 100.0, link: float = 10.0, latency: float = 0.0, count: int = 1
) -> Device:
    chip = Chip(
        name=name,
        vendor="cpu",
        flops_per_s=(("float32", 1e9),),
        hbm_bytes=int(memory),
        hbm_bytes_per_s=1e9,
    )
    return Device(name=name, chip=chip, link_bytes_per_s=link, link_latency_s=latency, count=count)


@st.composite
def problems(draw: st.DrawFn) -> tuple[ChainCosts, list[Device]]:
    """Up to five pieces on up to four devices of up to three types; sizes and rates are whole
    numbers, so that ties are common.
    """
    pieces = draw(st.integers(1, 5))
    counts = draw(
        st.lists(st.integers(1, 2), min_size=1, max_size=3).filter(lambda found: sum(found) <= 4)
    )
    whole = st.integers(1, 9)
    devices = [
        device(
            f"d{k}",
            memory=draw(st.integers(3, 40)),
            link=draw(whole),
            latency=draw(st.sampled_from([0, 0, 1])),
            count=n,
        )
        for k, n in enumerate(counts)
    ]
    seconds = np.array([[draw(whole) for _ in range(pieces)] for _ in counts], dtype=float)
    weights, handed = (
        [draw(whole) for _ in range(pieces)],
        [
            0,
            *(draw(whole) for _ in range(pieces - 1)),
            0,
        ],
    )
    needed = [
        [
            float(sum(weights[i:j]) + handed[i] + handed[j]) if i < j else math.inf
            for j in range(pieces + 1)
        ]
        for i in range(pieces + 1)
    ]
    return (
        ChainCosts(
            names=tuple(f"p{k}" for k in range(pieces)),
            seconds=seconds,
            bytes=np.array([needed] * len(counts)),
            handed=np.array(handed, dtype=float),
        ),
        devices,
    )


def every_plan(costs: ChainCosts, devices: list[Device]) -> tuple[float, float]:
    """(seconds between batches, seconds from end to end) of the best of all cuts, orders and
    subsets, the devices told apart.
    """
    single = [v for v, one in enumerate(devices) for _ in range(one.count)]
    pieces, best = len(costs.names), (math.inf, math.inf)
    for used in range(1, min(len(single), pieces) + 1):
        for order in set(itertools.permutations(single, used)):
            for inner in itertools.combinations(range(1, pieces), used - 1):
                edges = (0, *inner, pieces)
                runs = list(zip(order, edges, edges[1:], strict=False))
                if any(costs.bytes[v, i, j] > devices[v].chip.usable_bytes for v, i, j in runs):
                    continue
                times = [costs.seconds[v, i:j].sum() for v, i, j in runs]
                sent = [
                    message_seconds(costs.handed[i], devices[u], devices[v])
                    for (u, _, _), (v, i, _) in itertools.pairwise(runs)
                ]
                best = min(best, (max([*times, *sent]), sum([*times, *sent])))
    return best


def planned(costs: ChainCosts, devices: list[Device]) -> EdgePlan | None:
    try:
        return plan_chain(costs, devices)
    except InfeasibleError:
        return None


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(drawn=problems())
def test_the_plan_is_the_best_of_all_cuts_orders_and_subsets(
    drawn: tuple[ChainCosts, list[Device]],
) -> None:
    costs, devices = drawn
    found, (seconds, latency) = planned(costs, devices), every_plan(costs, devices)
    if found is None:
        assert seconds == math.inf
        return
    assert (found.seconds, found.latency) == (pytest.approx(seconds), pytest.approx(latency))
    assert [stage.first for stage in found.stages] == [
        0,
        *(stage.last + 1 for stage in found.stages[:-1]),
    ] and found.stages[-1].last == len(costs.names) - 1
    for one in devices:
        assert (
            sum(stage.device == one.name for stage in found.stages)
            + dict(found.idle).get(one.name, 0)
            == one.count
        )
    assert all(stage.bytes <= stage.capacity_bytes for stage in found.stages)


@settings(max_examples=60, deadline=None)
@given(drawn=problems(), which=st.integers(0, 2))
def test_more_memory_faster_links_faster_devices_and_more_devices_are_never_slower(
    drawn: tuple[ChainCosts, list[Device]], which: int
) -> None:
    costs, devices = drawn
    before, v = planned(costs, devices), which % len(devices)
    one = devices[v]
    better = [
        (costs, replace(one, chip=replace(one.chip, hbm_bytes=one.chip.hbm_bytes + 5))),
        (costs, replace(one, link_bytes_per_s=2 * one.link_bytes_per_s)),
        (costs, replace(one, link_latency_s=0.0)),
        (costs, replace(one, count=one.count + 1)),
        (
            replace(
                costs,
                seconds=costs.seconds * np.where(np.arange(len(devices)) == v, 0.5, 1.0)[:, None],
            ),
            one,
        ),
    ]
    for cost, other in better:
        after = planned(cost, [*devices[:v], other, *devices[v + 1 :]])
        assert before is None or (
            after is not None and after.seconds <= before.seconds * (1 + 1e-9)
        )


@settings(max_examples=100, deadline=None)
@given(drawn=problems())
def test_what_is_lacking_is_enough(drawn: tuple[ChainCosts, list[Device]]) -> None:
    costs, devices = drawn
    try:
        plan_chain(costs, devices)
    except InfeasibleError as error:
        assert error.short_bytes > 0

        def given_more(extra: int) -> EdgePlan | None:
            return planned(
                costs,
                [
                    replace(one, chip=replace(one.chip, hbm_bytes=one.chip.hbm_bytes + extra))
                    for one in devices
                ],
            )

        if "with" in str(error):
            assert given_more(error.short_bytes) is not None and (
                error.short_bytes <= 2 or given_more(error.short_bytes - 2) is None
            )
        else:
            assert given_more(error.short_bytes - 1) is None


def world() -> Problem:
    return worlds.made(worlds.layers, depth=6, vocab=512)


def test_the_pieces_are_the_forward_pass() -> None:
    chain = chain_of(world(), "cpu")
    assert chain.names == (
        "before the layers",
        *(f"layer {k}" for k in range(6)),
        "after the layers",
    )
    flops = sum(
        kernel.flops.total * kernel.trips * group.count
        for group in chain.groups
        for kernel in group.kernels
    )
    assert flops == pytest.approx(world().forward.flops, rel=0.02)
    parameters = sum(math.prod(p.shape) * 4 for p in world().parameters)
    assert (
        sum(group.weights * group.count for group in chain.groups) + sum(chain.sizes.values())
        == parameters
    )
    stream = 16 * 32 * 64 * 4  # [batch, seq, embed] in float32
    assert (
        set(chain.handed()[1:-1]) <= {stream, stream + 16 * 32 * 4}
        and chain.handed()[0] == chain.handed()[-1] == 0
    )  # with the tokens, where the loss asks for them
    needed = chain.bytes()
    assert (
        needed[0, -1] >= parameters
        and needed[1, 2] < needed[1, 3] < needed[0, -1]
        and np.isinf(needed[2, 2])
    )


@pytest.mark.long
def test_what_later_pieces_read_is_handed_on() -> None:
    """A decoder reads the encoder's output in every layer; inputs and targets wait until they are
    asked for.
    """
    case = encoder_decoder.CASES[0]
    traced = problem(
        case.init,
        lambda m, b: (jnp.zeros(()), {"value": case.loss(m, b)}),
        optax.identity(),
        case.batch,
        batch_axes=case.batch_axes,
    )
    chain = chain_of(traced, "cpu")
    assert chain.names == (
        "before the layers",
        "layer 0",
        "layer 1",
        "between layers",
        "layer 2",
        "layer 3",
        "after the layers",
    )
    rows = {name: array.shape[0] * array.shape[1] * 4 for name, array in case.batch.items()}
    encoder, decoder, tokens = (
        rows["source"] * encoder_decoder.EMBED,
        rows["inputs"] * encoder_decoder.EMBED,
        rows["inputs"] + rows["targets"],
    )
    assert list(chain.handed()) == [
        0,
        *[encoder + tokens] * 3,
        *[decoder + encoder + rows["targets"]] * 2,
        decoder + rows["targets"],
        0,
    ]


def test_measured_layers_scale_a_device() -> None:
    plain, chain = device("d"), chain_of(world(), "cpu")
    slow = chain.seconds(replace(plain, layer_seconds=2.0))
    assert slow[1:-1] == pytest.approx(2.0) and slow / chain.seconds(plain) == pytest.approx(
        2.0 / chain.seconds(plain)[1]
    )
    faster = replace(plain, efficiency={"matmul": 0.9, "memory": 0.9, "vector": 0.5})
    slower = replace(plain, efficiency={"matmul": 0.3, "memory": 0.3, "vector": 0.1})
    assert (chain.seconds(faster) < chain.seconds(slower)).all()


def test_tied_weights_are_held_once_by_a_device_and_by_both_ends() -> None:
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table = nnx.Param(jnp.ones((1000, 8)))
            self.layers = nnx.Param(jnp.ones((4, 8, 8)))

    def forward(model: Tied, batch: dict[str, jax.Array]) -> jax.Array:
        x, _ = jax.lax.scan(
            lambda x, w: (jnp.tanh(x @ w), None),
            model.table[...][batch["tokens"]],
            model.layers[...],
        )
        return x @ model.table[...].T

    machine = device("one", memory=1e9, link=1e9, count=8)
    plan = shardlib.plan_edge(
        Tied, forward, {"tokens": jax.ShapeDtypeStruct((2, 4), jnp.int32)}, devices=[machine]
    )
    assert plan.examples == 2 and plan.model == "Tied"
    costs = costs_of(
        problem(
            Tied,
            lambda m, b: (jnp.zeros(()), {"y": forward(m, b)}),
            optax.identity(),
            {"tokens": jax.ShapeDtypeStruct((2, 4), jnp.int32)},
        ),
        [machine],
    )
    table, layer = 1000 * 8 * 4, 8 * 8 * 4
    whole, first, last, middle = (costs.bytes[0, i, j] for i, j in ((0, 6), (0, 1), (5, 6), (1, 2)))
    assert table + 4 * layer <= whole < 2 * table + 4 * layer + 2 * 4 * 1000 * 4
    assert min(first, last) >= table and layer <= middle < table


def test_a_slow_card_beside_fast_ones_takes_less_and_too_slow_a_link_nothing() -> None:
    costs = ChainCosts(
        names=tuple("abcdefgh"),
        seconds=np.array([[1.0] * 8, [3.0] * 8]),
        bytes=np.where(np.arange(9)[:, None] < np.arange(9), 1.0, np.inf)[None].repeat(2, 0),
        handed=np.array([0.0, *[10.0] * 7, 0.0]),
    )
    fast, slow = device("fast", count=2), device("slow")
    plan = plan_chain(costs, [fast, slow], model="m", examples=4)
    assert (plan.seconds, plan.single_seconds, plan.throughput) == (4.0, 8.0, 1.0)
    assert {stage.device for stage in plan.stages} == {"fast"} and dict(plan.idle) == {
        "slow": 1
    }  # 3 + 3 + 2 pieces would take 6 s on the slow one
    assert plan.bottleneck == "stage 0 on fast"
    text = plan.explain()
    assert (
        "m on 2 devices: 1 examples/s, a batch of 4 every 4.00 s" in text
        and "2.00x the throughput" in text
        and "Without a part: 1 slow." in text
    )
    assert max(map(len, text.splitlines())) <= 100
    lame = plan_chain(costs, [replace(fast, link_bytes_per_s=0.5), slow])
    assert lame.seconds == 8.0 and len(lame.stages) == 1  # a message takes 20 s
    narrow = plan_chain(costs, [replace(fast, link_bytes_per_s=1.6), slow])
    assert (narrow.seconds, narrow.bottleneck) == (6.25, "the message from stage 0 to stage 1")
    assert (
        narrow.to_json()["bottleneck"] == narrow.bottleneck and len(narrow.to_json()["stages"]) == 2
    )


def test_what_does_not_fit_says_where_and_how_much() -> None:
    tiny = [device("tiny", memory=20, count=2)]
    with pytest.raises(
        InfeasibleError,
        match=r"no device holds '.*' of world: it needs .* on tiny, which has 20 B: .* too little",
    ) as caught:
        plan_edge(world(), tiny)
    assert caught.value.short_bytes > 1000
    costs = costs_of(world(), [device("d", memory=1e9)])
    largest = max(costs.bytes[0, k, k + 1] for k in range(8))
    with pytest.raises(
        InfeasibleError,
        match=(
            r"1 devices hold \d of the 8 pieces of world, up to 'layer \d'; with .* more on each"
            r" they would hold all"
        ),
    ):
        plan_edge(world(), [device("d", memory=largest + 1)])


def test_models_without_layers_are_no_chain() -> None:
    with pytest.raises(TracingError, match="no layers that repeat"):
        plan_edge(worlds.mlp(), [device("d", memory=1e9)])


FILE = """
[[devices]]
name = "board"
count = 3
link_bytes_per_s = 1e8
[devices.chip]
name = "board"
vendor = "cpu"
flops_per_s = { float32 = 1e10 }
hbm_bytes = 1_000_000_000
hbm_bytes_per_s = 1e10
[devices.efficiency]
matmul = 0.5
[[devices]]
name = "card"
chip = "a100"
link_bytes_per_s = 1e9
link_latency_s = 1e-4
layer_seconds = 0.5
"""


def test_files_of_devices(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(FILE)
    board, card = cluster(path)
    assert (
        board.count,
        board.chip.hbm_bytes,
        board.efficiency,
        card.chip.name,
        card.layer_seconds,
    ) == (3, 10**9, (("matmul", 0.5),), "a100", 0.5)
    assert message_seconds(1e6, board, card) == pytest.approx(1e-4 + 1e-2)
    with pytest.raises(MissingFileError, match=r"nowhere\.toml"):
        cluster(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count = 3", "cuont = 3", "'cuont' is unknown"),
        ('chip = "a100"', 'chip = "a1000"', "chip 'a1000' is unknown"),
        ("link_bytes_per_s = 1e9\n", "", "'link_bytes_per_s' is missing"),
        ("count = 3", "count = 0", "count is 0; it must be positive"),
        ("layer_seconds = 0.5", "layer_seconds = 0", "layer_seconds is 0"),
        ('name = "card"', 'name = "board"', "devices have one name: board"),
        ("hbm_bytes_per_s = 1e10\n", "", "hbm_bytes_per_s"),
        ("[[devices]]", "[[device]]", "has no list of tables"),
        ('name = "board"', "name = ", "is not valid TOML"),
        ('chip = "a100"', "chip = 3", "'chip' is 3; it is a name or a table"),
        ("link_latency_s = 1e-4", "link_latency_s = -1", "must not be negative"),
    ],
)
def test_files_that_are_not_usable_say_why(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(TopologyError, match=message.replace("(", r"\(")):
        cluster(path)
    with pytest.raises(TopologyError, match="there are no devices"):
        cluster([])
