"""Local training, with no engine: arrays in, arrays out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.islands import federated
from tests.islands.federated.jobs import (
    ABSTRACT,
    CLIENTS,
    ROWS,
    averaged,
    first,
    job,
    loss,
    rows,
    trained,
    weights,
)

Tree = Any


def rounds(what: federated.Job, many: int, mu: float = 0.0) -> dict[str, np.ndarray]:
    """Federated averaging of what clients answer."""
    theta = federated.arrays(program := federated.program(what, "cpu:1"), program.init())
    for number in range(1, many + 1):
        answers = [
            federated.train(
                what,
                federated.Request(
                    arrays=theta, partition=k, partitions=CLIENTS, round=number, mu=mu
                ),
            )
            for k in range(CLIENTS)
        ]
        total = sum(answer.weight for answer in answers)
        theta = {
            path: sum(answer.weight / total * answer.arrays[path] for answer in answers)
            for path in theta
        }
    return theta


def ask(**changed: Any) -> federated.Request:
    given = {"arrays": first(), "partition": 0, "partitions": CLIENTS, "round": 1}
    return federated.Request(**(given | changed))


def same(found: Tree, wanted: Tree, rtol: float = 1e-5) -> None:
    assert list(found) == sorted(wanted)
    for path, array in found.items():
        np.testing.assert_allclose(array.reshape(wanted[path].shape), wanted[path], rtol, 1e-6)


PLACES = [
    {"topology": "cpu:1"},
    {"topology": "cpu:2"},
    {"topology": "cpu:4", "pin": {"mesh.fsdp": 4, "zero": 3, "microbatches": 2}},
    {"topology": lambda partition: f"cpu:{1 + partition % 2}"},
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_rounds_are_plain_federated_averaging(place: dict[str, Any], mu: float) -> None:
    what = job(**place)
    same(rounds(what, 2, mu), averaged(2, what.optimizer, mu=mu))


def test_the_term_holds_clients_near_the_server() -> None:
    def moved(mu: float) -> float:
        found = federated.train(job(), ask(partition=1, mu=mu)).arrays
        return sum(float(np.sum((found[path] - first()[path]) ** 2)) for path in found)

    assert moved(5.0) < 0.5 * moved(0.0)


def test_two_devices_are_one() -> None:
    one, two = (federated.train(job(topology=f"cpu:{n}"), ask()) for n in (1, 2))
    same(two.arrays, dict(one.arrays), 1e-6)
    assert two.metrics == pytest.approx(one.metrics, rel=1e-6)


def test_metrics_are_those_of_the_round() -> None:
    answers = [federated.train(job(), ask(partition=k)) for k in range(CLIENTS)]
    assert [a.metrics["rows"] for a in answers] == [a.weight for a in answers] == list(ROWS)
    assert [a.metrics["steps"] for a in answers] == [6, 5, 1]
    equal = federated.train(job(local=federated.Local(weight="equal")), ask())
    assert (equal.weight, equal.metrics["rows"]) == (1, ROWS[0])


def test_evaluation_is_the_loss_of_all_rows() -> None:
    for k, many in enumerate(ROWS):
        found = federated.evaluate(job(topology="cpu:2"), ask(partition=k))
        assert found.metrics["loss"] == pytest.approx(float(loss(first(), rows(k, 3))), rel=1e-5)
        assert (found.weight, found.metrics["rows"], found.arrays) == (many, many, {})


def test_evaluations_have_rows_and_a_loss_of_their_own() -> None:
    def told(params: Tree, batch: Tree) -> tuple[jax.Array, dict[str, jax.Array]]:
        return loss(params, batch), {"square": jnp.mean(batch["x"] ** 2)}

    what = job(
        loss=told,
        validation=lambda partition, partitions: rows(2, partitions),
        local=federated.Local(evaluation=lambda params, batch: 3 * loss(params, batch)),
    )
    found = federated.evaluate(what, ask()).metrics
    wanted = 3 * float(loss(first(), rows(2, CLIENTS)))
    assert found == pytest.approx({"loss": wanted, "rows": ROWS[2]}, rel=1e-5)
    assert federated.train(what, ask()).metrics["square"] == pytest.approx(2.0, rel=0.3)


def test_a_process_compiles_once() -> None:
    compiled: list[str] = []

    def heard(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(about))

    jax.monitoring.register_event_duration_secs_listener(heard)
    what = job()
    for number in range(2):  # the second begins from what the first has left
        federated.train(what, ask(round=number))
    before = len(compiled)
    for number in range(2, 5):
        federated.train(what, ask(partition=number % 3, round=number))
    assert before and not compiled[before:]


def test_frozen_parameters_are_not_sent_and_stay() -> None:
    def base(program: shardlib.Program) -> shardlib.TrainState:
        state = program.init(0)
        return replace(state, params={**state.params, "up": state.params["up"] * 0 + 0.25})

    what = job(
        wrt=lambda path, leaf: "up" not in path,
        topology="cpu:2",
        local=federated.Local(start=base, epochs=2),
    )
    given = {path: array for path, array in first().items() if path != "up"}

    def alone(params: Tree, batch: Tree) -> jax.Array:
        return loss({**params, "up": jnp.full((4, 8), 0.25)}, batch)

    for number in (1, 2):
        found = federated.train(what, ask(arrays=given, round=number))
        assert list(found.arrays) == ["bias", "down"]
        wanted = trained(given, 0, number, what.optimizer, 0.0, alone)
        same(found.arrays, jax.tree.map(np.asarray, wanted))
        checked = federated.evaluate(what, ask(arrays=given))
        loss_now = float(alone(given, rows(0, 3)))
        assert checked.metrics["loss"] == pytest.approx(loss_now, rel=1e-5)


def test_optimizer_state_is_kept_or_begins_anew() -> None:
    """With all rows in each batch, two rounds that keep it are one of twice the steps."""
    optimizer = optax.adam(0.05)
    size = {
        "x": jax.ShapeDtypeStruct((24, 4), np.float32),
        "y": jax.ShapeDtypeStruct((24,), np.float32),
    }

    def twice(keep: str, mu: float = 0.0) -> dict[str, np.ndarray]:
        what = job(
            batch=size, optimizer=optimizer, local=federated.Local(keep=keep), topology="cpu:2"
        )
        one = federated.train(what, ask(mu=mu))
        assert bool(one.kept) == (keep == "optimizer")
        return dict(
            federated.train(what, ask(arrays=one.arrays, kept=one.kept, round=2, mu=mu)).arrays
        )

    long = job(batch=size, optimizer=optimizer, local=federated.Local(epochs=2))
    same(twice("optimizer"), dict(federated.train(long, ask()).arrays))
    apart = twice("nothing")["down"] - twice("optimizer")["down"]
    assert np.abs(apart).max() > 1e-3
    # One step from the anchor the term is zero, and with Adam's state it is as it was without.
    same(twice("optimizer", mu=0.5), twice("optimizer"))


def test_narrow_dtypes_and_scalars_are_sent_as_numpy_has_them() -> None:
    def narrow(key: jax.Array) -> Tree:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights(key))

    what = job(init=shardlib.tree(narrow), optimizer=optax.sgd(0.5))
    program = federated.program(what, "cpu:1")
    given = federated.arrays(program, program.init())
    assert {(str(array.dtype), array.ndim > 0) for array in given.values()} == {("float32", True)}
    found = federated.train(what, ask(arrays=given)).arrays
    state = federated.state(program, found)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}
    for path, array in found.items():
        np.testing.assert_array_equal(
            array.ravel(), np.asarray(state.params[path], np.float32).ravel()
        )


def test_a_state_of_the_server_can_be_evaluated_and_trained_on() -> None:
    what = job()
    program = federated.program(what, "cpu:4")
    found = federated.train(what, ask()).arrays
    for form in (found, list(found.values())):
        state = federated.state(program, form)
        wanted = float(
            loss({path: found[path].reshape(first()[path].shape) for path in found}, rows(0, 3))
        )
        assert float(program.evaluate(state, rows(0, 3))["loss"]) == pytest.approx(wanted, rel=1e-5)
        same(
            {path: np.asarray(leaf) for path, leaf in program.module(state).items()},
            {p: a.reshape(first()[p].shape) for p, a in found.items()},
        )
        program.step(state, {name: array[:8] for name, array in rows(0, 3).items()})


def test_dropout_is_another_for_each_client_and_round() -> None:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense = nnx.Linear(4, 4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    what = job(
        init=lambda rngs: Net(rngs),
        loss=lambda model, batch: (model.dropout(model.dense(batch["x"])) ** 2).mean(),
        rows=lambda partition, partitions: rows(0, 3),
        batch={"x": ABSTRACT["x"], "y": ABSTRACT["y"]},
        optimizer=optax.sgd(0.0),
        local=federated.Local(epochs=1),
    )
    program = federated.program(what, "cpu:1")
    given = federated.arrays(program, program.init())

    def loss_of(**changed: int) -> float:
        return federated.train(what, ask(arrays=given, **changed)).metrics["loss"]

    assert loss_of() == loss_of()
    assert len({loss_of(), loss_of(partition=1), loss_of(round=2)}) == 3
