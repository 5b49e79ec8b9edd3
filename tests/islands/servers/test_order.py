"""Means in buckets, in the order of use: the same bits, whatever the order and the buckets."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import shardlib
from shardlib.errors import ArgumentError
from shardlib.islands.exchanges import Part
from shardlib.islands.servers.island import ArrivingMean, mean_order
from shardlib.islands.servers.rounds import Outer, RoundService, pack, unpack
from shardlib.islands.servers.wire import Answer, gathered
from shardlib.processes.wire import FrameError, made
from tests.islands.servers.helpers import together
from tests.islands.servers.jobs import rows
from tests.islands.servers.test_island import joined

USES = tuple(
    Part(path=path, start=start, stop=start + 5)
    for path, start in (("w", 5), ("a", 0), ("w", 0), ("b", 0), ("w", 10))
)
FRAGMENT = [
    Part(path="a", start=2, stop=5),
    Part(path="b", start=0, stop=5),
    Part(path="w", start=0, stop=11),
]


def _params(exchange: str, order: Any = None, bucket_bytes: int = 4096) -> list[Any]:
    """Of two islands after six steps."""
    service = RoundService(islands=2)

    def run(number: int) -> Any:
        island = joined(service, number, exchange, bucket_bytes=bucket_bytes)
        if order is not None:
            island.exchanging.uses = order(island.exchanging.uses)
        state = island.start(0)
        for step in range(6):
            state, _ = island.step(state, rows(number, step))
        return jax.device_get(island.finish(state).params)

    return together(partial(run, 0), partial(run, 1))


@pytest.mark.parametrize(
    "exchange",
    [
        "diloco:2:2",
        "diloco:2:2:wire=bfloat16",
        "diloco:2:4:fragments=2:delay=1:mixing=0.25",
        "diloco:2:2:wire=int8",
    ],
)
def test_bits_do_not_depend_on_the_order(exchange: str) -> None:
    found = _params(exchange)
    for other in (
        _params(exchange, lambda uses: tuple(reversed(uses))),
        _params(exchange, lambda uses: (), bucket_bytes=1 << 20),  # buckets of nothing
    ):
        for one, two in zip(found, other, strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [4, 20, 1 << 20])
def test_what_comes_in_buckets_is_the_outer_update(wire: str, bucket_bytes: int) -> None:
    rng, exchange = np.random.default_rng(0), shardlib.DiLoCo(islands=2, every=1, wire=wire)
    outer, same = (Outer.first(np.arange(30, dtype=np.float32)) for _ in range(2))
    mean = pack(rng.normal(size=19).astype(np.float32), [3, 5, 11], wire)
    order = mean_order(USES, FRAGMENT, wire, bucket_bytes)
    coming = ArrivingMean(outer, 4, FRAGMENT, exchange, order)
    coming.receiver.begin(Answer())
    for name, array in made(gathered(mean, order)).items():
        with pytest.raises(FrameError, match="bucket"):
            coming.receiver.take(name, array[:-1].astype(np.float64))
        assert not coming.receiver.complete and outer.theta.tolist() == list(range(30))
        coming.receiver.take(name, array)
        coming.receiver.take(name, array)  # once more, since a connection has broken
    assert coming.receiver.complete
    np.testing.assert_array_equal(coming.done()["numbers"], mean["numbers"])
    same.update(4, 23, unpack(mean, [3, 5, 11], wire), exchange)
    np.testing.assert_array_equal(outer.theta, same.theta)
    np.testing.assert_array_equal(outer.momentum, same.momentum)


def test_what_is_used_first_is_there_first() -> None:
    exchange = shardlib.DiLoCo(islands=2, every=1)
    order = mean_order(USES, FRAGMENT, "float32", 20)
    coming = ArrivingMean(Outer.first(np.zeros(19, np.float32)), 0, FRAGMENT, exchange, order)
    buckets = list(made(gathered({"numbers": np.ones(19, np.float32)}, order)).items())
    for name, array in buckets[:2]:
        coming.receiver.take(name, array)
    assert coming.landing.there([("a", 0)]) and not coming.landing.there([("b", 0)])


@pytest.mark.parametrize("bucket_bytes", [0, -1, 2.5, "4MB"])
def test_buckets_of_no_size_are_refused(bucket_bytes: Any) -> None:
    with pytest.raises(ArgumentError, match="bucket_bytes is"):
        joined(RoundService(islands=2), 0, "diloco:2:2", bucket_bytes=bucket_bytes)
