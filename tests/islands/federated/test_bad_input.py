"""What goes wrong at a client says who and what."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardlib
from shardlib.islands import federated
from tests.islands.federated.jobs import CLIENTS, first, job, rows
from tests.islands.federated.test_local import ask


def test_parameters_of_another_model() -> None:
    given = {
        "up": np.zeros((4, 9), np.float32),
        "down": np.zeros((8, 1), np.int32),
        "more": np.zeros(3),
    }
    with pytest.raises(shardlib.ArgumentError) as error:
        federated.train(job(), ask(arrays=given))
    assert str(error.value) == (
        "the parameters are those of another model than weights:\n"
        "  - bias is missing\n"
        "  - down is int32, not float32\n"
        "  - up is [4, 9], not [4, 8]\n"
        "  - more is not known"
    )
    with pytest.raises(shardlib.ArgumentError, match="2 arrays, and weights trains 3"):
        federated.train(job(), ask(arrays=[np.zeros(1), np.zeros(1)]))


def test_no_parameters() -> None:
    with pytest.raises(shardlib.ArgumentError, match="no client has answered"):
        federated.state(federated.program(job(), "cpu:1"), {})


def test_parameters_that_are_not_finite() -> None:
    given = first() | {"up": np.full((4, 8), np.nan, np.float32)}
    with pytest.raises(shardlib.TrainingError, match="that were received are not finite: up"):
        federated.train(job(), ask(arrays=given))


def test_a_loss_that_is_not_finite_and_the_round_after() -> None:
    def spoilt(partition: int, partitions: int) -> Any:
        found = rows(0, CLIENTS)
        return {**found, "x": found["x"] * np.float32("nan" if partition == 1 else 1)}

    what = job(rows=spoilt)
    with pytest.raises(
        shardlib.TrainingError, match="partition 1 is nan in step 1 of 6 of round 3"
    ):
        federated.train(what, ask(partition=1, round=3))
    found = federated.train(what, ask()).arrays
    np.testing.assert_array_equal(
        found["up"], federated.train(job(rows=spoilt), ask()).arrays["up"]
    )


def test_rows_that_are_none() -> None:
    def none(partition: int, partitions: int) -> Any:
        return {name: array[:0] for name, array in rows(partition, partitions).items()}

    with pytest.raises(shardlib.DataError, match="partition 2 of 3 has no rows"):
        federated.train(job(rows=none), ask(partition=2))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"x": np.zeros((9, 4), np.float32)}, "partition 0 of 3 are PyTreeDef"),
        (
            {"x": np.zeros((9, 3), np.float32), "y": np.zeros((9,), np.int32)},
            r"x is float32\[9, 3\], and in a batch float32\[rows, 4\]\n  - y is int32",
        ),
        ({"x": np.zeros((9, 4), np.float32), "y": np.zeros((8,), np.float32)}, "y has 8 rows"),
    ],
)
def test_rows_that_are_no_rows_of_the_batch(found: Any, says: str) -> None:
    with pytest.raises(shardlib.BatchError, match=says):
        federated.train(job(rows=lambda partition, partitions: found), ask())


def test_partitions_are_counted_from_zero() -> None:
    with pytest.raises(shardlib.ArgumentError, match="partition 3 of 3: partitions are counted"):
        ask(partition=3)
    with pytest.raises(shardlib.ArgumentError, match="mu is -1"):
        ask(mu=-1)


def test_jobs_that_are_none() -> None:
    with pytest.raises(shardlib.ArgumentError, match=r"keep is 'all'.*\n.*epochs is 0"):
        federated.Local(keep="all", epochs=0)
    with pytest.raises(shardlib.ArgumentError, match=r"x has \[8\]\n  - y has \[7\]"):
        job(batch={"x": np.zeros((8, 4)), "y": np.zeros(7)})


def test_optimizer_state_of_another_optimizer() -> None:
    with pytest.raises(shardlib.StateError, match="that of another optimizer"):
        federated.train(job(), ask(kept={"0.mu": np.zeros(1)}))


def test_islands_and_statistics_are_no_client() -> None:
    from flax import nnx

    with pytest.raises(shardlib.PinError, match="exchange=diloco:2:10, and is of one client"):
        federated.train(job(topology="cpu:4", pin={"exchange": "diloco:2:10"}), ask())

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)

    what = job(
        init=lambda rngs: Net(rngs),
        loss=lambda model, batch: jnp.mean((model.norm(batch["x"])[:, 0] - batch["y"]) ** 2),
    )
    with pytest.raises(shardlib.PinError, match="each client would have its own"):
        federated.train(what, ask())


@pytest.mark.skipif(importlib.util.find_spec("flwr") is not None, reason="flwr is installed")
def test_without_flower_it_says_what_to_install() -> None:
    with pytest.raises(shardlib.MissingPackageError, match=r"pip install 'shardlib\[federated\]'"):
        federated.client(job())


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.full((4, 8), 1e300), "in the dtypes of the model, are not finite: up"),
        (np.full((4, 8), 1j, np.complex64), "up is complex64, not float32"),
        (np.ones((4, 8), "i4"), "up is int32, not float32"),
    ],
    ids=["too large", "imaginary", "whole"],
)
def test_parameters_that_the_model_cannot_hold(array: np.ndarray, says: str) -> None:
    program = federated.program(job(), "cpu:1")
    with pytest.raises(shardlib.ShardlibError, match=says):
        federated.state(program, first() | {"up": array})
    federated.state(program, first() | {"up": np.full((4, 8), 0.5)})


@dataclass
class Records:
    """Of a reply, as Flower has them."""

    array_records: dict[str, Any]
    metric_records: dict[str, Any]
    config_records: dict[str, Any]


@dataclass
class Reply:
    """A message with records."""

    content: Records
    metadata: Any = None
    error: bool = False

    def has_error(self) -> bool:
        return self.error


class Average:
    """A strategy that ends at what Flower's end at."""

    def aggregate_train(self, server_round: int, replies: Any) -> float:
        return self._mean(replies, arrays=True)

    def aggregate_evaluate(self, server_round: int, replies: Any) -> float:
        return self._mean(replies, arrays=False)

    def _mean(self, replies: Any, *, arrays: bool) -> float:
        good = [one.content for one in replies if not one.has_error()]
        records = [one.metric_records["metrics"] for one in good]
        assert len({frozenset(one) for one in records}) == 1
        if arrays:
            assert len({frozenset(one.array_records["arrays"]) for one in good}) == 1
        weight = sum(one["num-examples"] for one in records)
        return sum(one["loss"] * one["num-examples"] for one in records) / weight


def test_replies_that_cannot_be_averaged_do_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reply(arrays: dict[str, Any], **metrics: Any) -> Reply:
        found = {"metrics": metrics} if metrics else {}
        return Reply(Records({"arrays": arrays} if arrays else {}, found, {}))

    good = [
        reply({"a": 1}, loss=1.0, **{"num-examples": 3}),
        reply({"a": 2}, loss=2.0, **{"num-examples": 1}),
    ]
    bad = [
        reply({"a": 1}),
        reply({}, loss=9.0, **{"num-examples": 3}),
        reply({"b": 1}, loss=9.0, **{"num-examples": 3}),
        reply({"a": 1}, loss=9.0),
        reply({"a": 1}, loss=float("nan"), **{"num-examples": 3}),
        reply({"a": 1}, loss=9.0, **{"num-examples": 0}),
        reply({"a": 1}, loss=9.0, more=1, **{"num-examples": 3}),
        reply({"a": 1}, loss=9.0, **{"num-examples": [3]}),
    ]
    failed = Reply(Records({}, {}, {}), error=True)
    strategy: Any = federated.tolerant(Average())
    assert strategy.aggregate_train(1, iter([bad[0], *good, *bad[1:], failed])) == 1.25
    assert caplog.text.count("the round goes on without it") == len(bad)
    assert strategy.aggregate_evaluate(1, [*good, bad[0], bad[6]]) == 1.25
