"""Checkpoints of islands that go on as another number of islands, or on another mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import CheckpointError, RunError
from shardlib.training.measures import read_records
from shardlib.training.run import RunFolder
from tests.checkpointing.states import assert_same, numbers
from tests.islands.small import program, rows, stepped

FOUR = "diloco:4:4:rate=0.5:momentum=0.8"


def alone() -> Any:
    return program("zero-3", exchange=None, topology="cpu:4")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of two islands two steps after their first meeting, and the state."""
    folder, made = tmp_path_factory.mktemp("two"), program("zero-3")
    state = stepped(made, made.init(0), 0, 6)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(6, state, plan=made.plan, wait=True)
    return folder, numbers(state)


def restored(folder: Path, made: Any, **more: Any) -> Any:
    return Checkpoints(folder, read_only=True).restore(made, **more)


def averaged(islands: Any) -> Any:
    """Moments of an optimizer, the mean over islands; counts are alike."""
    return jax.tree.map(
        lambda *leaves: np.mean(leaves, axis=0, dtype=np.float32).astype(leaves[0].dtype),
        *(island.opt_state for island in islands),
    )


def require_outer(params: Any, state: Any) -> None:
    """Parameters are the outer ones of a state."""
    down, up = params["down"], params["up"]
    found = [down["bias"], down["kernel"], params["scale"], up["bias"], up["kernel"]]
    for one, other in zip(found, state.exchange.params, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)
    np.testing.assert_array_equal(np.asarray(params["table"]), state.islands[0].params["table"])


def require_near(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), numbers(found), expected)


@pytest.mark.long
def test_another_mesh_of_an_island_keeps_every_bit(saved: Any) -> None:
    folder, state = saved
    assert_same(numbers(restored(folder, program("tensor")).state), state)


def test_two_islands_become_one(saved: Any) -> None:
    folder, state = saved
    found = restored(folder, made := alone())
    require_outer(found.state.params, state)
    require_near(found.state.opt_state, averaged(state.islands))
    assert_same(numbers(found.state.model_state), state.islands[0].model_state)
    (finding,) = found.findings
    assert (finding.code, finding.severity) == ("other-number-of-islands", "warning")
    assert finding.message == (
        "The checkpoint of step 6 is of 2 islands and goes on as 1. They start from the outer"
        " parameters, those of the last meeting, 2 steps ago: what islands did since is left out."
        " Moments of optimizers are means."
    )
    after, metrics = made.step(found.state, rows(6))
    assert int(after.step) == 7 and np.isfinite(metrics["loss"])


@pytest.mark.long
def test_two_islands_become_four(saved: Any) -> None:
    folder, state = saved
    found = restored(folder, made := program("two", exchange=FOUR)).state
    assert len(found.islands) == 4 and found.step == 6
    for island in found.islands:
        require_outer(island.params, state)
        require_near(island.opt_state, averaged(state.islands))
    assert_same(numbers(found.exchange), state.exchange)
    fresh = made.init(0).islands
    for number, island in enumerate(found.islands):
        key, own = (
            numbers(one.model_state)["drop"]["rngs"]["key"] for one in (island, fresh[number])
        )
        np.testing.assert_array_equal(key, own)  # those that were saved have not drawn another key
        assert numbers(island.model_state)["drop"]["rngs"]["count"] == 6
    after, _ = made.step(found, rows(6))
    assert after.step == 7


def test_one_becomes_two(tmp_path: Path) -> None:
    one, two = alone(), program("zero-1")
    state = stepped(one, one.init(0), 0, 3)
    kept = numbers(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, plan=one.plan, wait=True)
        found: Any = checkpoints.restore(two)
    for island in found.state.islands:
        assert_same(numbers(island.params), kept.params)
        assert_same(numbers(island.opt_state), kept.opt_state)
    assert_same(numbers(found.state.islands[0].model_state), kept.model_state)
    keys = [numbers(one.model_state)["drop"]["rngs"]["key"] for one in found.state.islands]
    assert not np.array_equal(*keys) and found.state.step == 3
    require_outer(kept.params, found.state)
    assert not any(np.any(np.asarray(leaf)) for leaf in found.state.exchange.momentum)
    assert "The outer momentum starts at zero." in found.findings[0].message
    after = stepped(two, found.state, 3, 5)  # a meeting at step 4
    assert after.step == 5


@pytest.mark.long
def test_gossiping_islands_start_others_with_their_mean(saved: Any, tmp_path: Path) -> None:
    folder, state = saved
    gossip = program("two", exchange="gossip:4:exponential")
    found = restored(folder, gossip)
    assert not found.state.exchange.params and found.findings[0].code == "other-number-of-islands"
    for island in found.state.islands:
        require_outer(island.params, state)
    after = numbers(stepped(gossip, found.state, 6, 7))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, stepped(gossip, restored(folder, gossip).state, 6, 7), plan=gossip.plan)
        four, one = (checkpoints.restore(made) for made in (program("two", exchange=FOUR), alone()))
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, 0), *(one.params for one in after.islands))
    for params in (one.state.params, *(island.params for island in _islands(four))):
        require_near(params, mean)
    assert four.findings[0].code == "other-exchange"
    assert "the mean of the islands' parameters" in four.findings[0].message
    require_outer(numbers(_islands(four)[0].params), numbers(four.state))


def _islands(found: Any) -> Any:
    return found.state.islands


@pytest.mark.long
def test_what_cannot_be_averaged_is_an_error(tmp_path: Path) -> None:
    def init(params: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.int8), params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        signs = jax.tree.map(lambda leaf: jnp.sign(leaf).astype(jnp.int8), updates)
        return jax.tree.map(lambda sign: -0.01 * sign.astype(jnp.float32), signs), signs

    made = program("zero-3", optimizer=optax.GradientTransformation(init, update))
    with Checkpoints(tmp_path) as checkpoints:
        state = stepped(made, made.init(0), 0, 1)
        checkpoints.save(1, state, plan=None, wait=True)
        other = program(
            "zero-3", exchange=None, topology="cpu:4", optimizer=made.programs[0].optimizer
        )
        with pytest.raises(CheckpointError, match="has other integers on each of the 2 islands"):
            checkpoints.restore(other)
        found = checkpoints.restore(other, parameters_only=True)
        assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(found.state.opt_state))


def test_another_optimizer_or_model_is_an_error(saved: Any) -> None:
    folder, _ = saved
    other = program("zero-3", exchange=None, topology="cpu:4", optimizer=optax.sgd(0.1))
    with pytest.raises(
        CheckpointError, match=r"of another optimizer:\n  - opt_state\.0\.count is in"
    ):
        restored(folder, other)
    tree = shardlib.tree(lambda key: {"w": jnp.ones((8, 8))}, {"w": ("in", "out")})
    strange: Any = shardlib.compile(
        tree,
        lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2),
        optax.sgd(0.1),
        rows(0),
        topology="cpu:4",
        pin={"exchange": FOUR},
    )
    with pytest.raises(CheckpointError, match="of another model"):
        restored(folder, strange)


@pytest.mark.long
def test_a_run_goes_on_as_another_number_of_islands(tmp_path: Path) -> None:
    settings = {"save_every": 3, "loggers": ()}

    def run(made: Any, steps: int, **more: Any) -> Any:
        kept = shardlib.Settings(run=tmp_path, **settings, **more)
        return shardlib.fit(made, rows, steps=steps, settings=kept)

    run(program("zero-3"), 6)
    found = run(program("two", exchange=FOUR), 9)
    assert found.resumed == 6 and len(found.state.islands) == 4 and len(found.losses) == 9
    events = [one for one in read_records(RunFolder(tmp_path).metrics) if "event" in one]
    noted = [one for one in events if one["event"] == "noticed"]
    assert [one["code"] for one in noted] == ["other-number-of-islands"]
    with pytest.raises(RunError, match="exchange is exact") as refused:
        run(alone(), 10)
    assert "loss" not in str(refused.value).partition("Try")[0]
    assert run(alone(), 10, allow_changes=("exchange",)).steps == 10


@pytest.mark.long
def test_islands_go_on_with_the_mean_of_what_was_not_sent(tmp_path: Path) -> None:
    two = program("two", exchange="compressed:2:powersgd:rank=1")
    four = program("two", exchange="compressed:4:powersgd:rank=1")
    state = stepped(two, two.init(0), 0, 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, plan=two.plan, wait=True)
    saved = numbers(state)
    found = restored(tmp_path, four)
    assert found.findings[0].code == "other-number-of-islands"
    again = numbers(found.state)
    for old, new in zip(saved.exchange.residual, again.exchange.residual, strict=True):
        each = np.reshape(old, (2, -1)).mean(0)
        np.testing.assert_allclose(np.reshape(new, (4, -1)), np.tile(each, (4, 1)), rtol=1e-6)
    for old, new in zip(saved.exchange.factors, again.exchange.factors, strict=True):
        np.testing.assert_array_equal(old, new)
    assert max(np.abs(one).max() for one in again.exchange.residual) > 0
    for island in again.islands:  # parameters are alike on all islands, and stay what they were
        assert_same(island.params, saved.islands[0].params)
    after = numbers(stepped(four, found.state, 3, 4))
    assert_same(after.islands[0].params, after.islands[3].params)


@pytest.mark.long
def test_one_goes_on_with_compressed_gradients_and_back(tmp_path: Path) -> None:
    one, two = alone(), program("two", exchange="compressed:2:topk:density=0.1")
    state = stepped(one, one.init(0), 0, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, plan=one.plan, wait=True)
        found = checkpoints.restore(two)
        assert not any(np.abs(leaf).max() for leaf in numbers(found.state).exchange.residual)
        later = stepped(two, found.state, 2, 4)
        params = numbers(later).islands[0].params
        checkpoints.save(4, later, plan=two.plan, wait=True)
        assert_same(numbers(checkpoints.restore(one).state).params, params)
