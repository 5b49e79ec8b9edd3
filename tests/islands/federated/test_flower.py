"""Flower's own strategies, mods and workflows around the client, in this process."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib.islands import federated
from tests.islands.federated.jobs import CLIENTS, ROWS, averaged, first, job, rows

pytest.importorskip("flwr", reason="the package flwr is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import strategy as strategies

from tests.islands.federated.in_process import InProcess

Tree = Any
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def begin(what: federated.Job) -> ArrayRecord:
    program = federated.program(what, "cpu:1")
    return federated.record(program, program.init())


def grid_of(what: federated.Job, partitions: tuple[int, ...] = (0, 1, 2), **more: Any) -> InProcess:
    return InProcess(federated.client(what, **more), list(partitions), CLIENTS)


def run(kind: str, what: federated.Job, rounds: int = 2, **settings: Any) -> Any:
    made = getattr(strategies, kind)(fraction_evaluate=0.0, min_available_nodes=3, **settings)
    return made.start(grid=grid_of(what), initial_arrays=begin(what), num_rounds=rounds)


def same(found: ArrayRecord, wanted: Tree, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert list(found) == sorted(wanted)
    for path, array in found.items():
        held = array.numpy().reshape(wanted[path].shape)
        np.testing.assert_allclose(held, wanted[path], rtol, atol)


@pytest.mark.parametrize("topology", ["cpu:1", "cpu:2"])
def test_fedavg_is_federated_averaging(topology: str) -> None:
    what = job(topology=topology)
    same(run("FedAvg", what).arrays, averaged(2, what.optimizer))


def test_fedprox_is_its_reference() -> None:
    what = job(topology="cpu:2")
    found = run("FedProx", what, proximal_mu=0.5)
    same(found.arrays, averaged(2, what.optimizer, mu=0.5))


def test_fedadam_is_adam_of_mean_differences() -> None:
    """Flower's server has Adam without a correction of the first moments."""
    moments: list[Tree] = []

    def adam(theta: Tree, local: list[Tree]) -> Tree:
        mean = jax.tree.map(
            lambda *p: sum(n * q for n, q in zip(ROWS, p, strict=True)) / sum(ROWS), *local
        )
        delta = jax.tree.map(np.subtract, mean, theta)
        m, v = moments[-1] if moments else (jax.tree.map(np.zeros_like, delta),) * 2
        m = jax.tree.map(lambda m, d: 0.9 * m + 0.1 * d, m, delta)
        v = jax.tree.map(lambda v, d: 0.99 * v + 0.01 * d**2, v, delta)
        moments.append((m, v))
        rate = 0.1 * np.sqrt(1 - 0.99 ** (len(moments) + 1)) / (1 - 0.9 ** (len(moments) + 1))
        return jax.tree.map(lambda t, m, v: t + rate * m / (np.sqrt(v) + 1e-3), theta, m, v)

    what = job()
    same(run("FedAdam", what, eta=0.1).arrays, averaged(2, what.optimizer, mean=adam), 1e-4, 1e-5)


def test_krum_takes_the_parameters_of_one_client() -> None:
    what = job()
    found = run("Krum", what, rounds=1, num_malicious_nodes=0).arrays
    local = [
        federated.train(what, federated.Request(arrays=first(), partition=k, partitions=3, round=1))
        for k in range(CLIENTS)
    ]
    assert any(
        all(np.array_equal(found[path].numpy(), one.arrays[path]) for path in found)
        for one in local
    )


def test_evaluations_are_weighted_by_rows() -> None:
    what = job()
    made = strategies.FedAvg(min_available_nodes=3, fraction_train=0.0)
    found = made.start(grid=grid_of(what), initial_arrays=begin(what), num_rounds=1)
    wanted = sum(n * float(what.loss(first(), rows(k, CLIENTS))) for k, n in enumerate(ROWS)) / sum(
        ROWS
    )
    assert found.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(wanted, rel=1e-5)


def test_metrics_of_a_round() -> None:
    found = run("FedAvg", job(), rounds=1, train_metrics_aggr_fn=federated.metrics)
    metrics = found.train_metrics_clientapp[1]
    assert (metrics["rows"], metrics["clients"]) == (sum(ROWS), 3)


def test_two_clients_of_one_partition_are_refused() -> None:
    made = strategies.FedAvg(train_metrics_aggr_fn=federated.metrics, fraction_evaluate=0.0)
    grid = grid_of(job(), (0, 1, 1))
    with pytest.raises(shardlib.LaunchError, match="several clients have partition 1"):
        made.start(grid=grid, initial_arrays=begin(job()), num_rounds=1)


def test_a_client_that_fails_says_why_and_the_others_go_on() -> None:
    def spoilt(partition: int, partitions: int) -> Tree:
        found = rows(partition, partitions)
        none = {name: array[:0] for name, array in found.items()}
        return none if partition == 2 else found

    what = job(rows=spoilt)
    grid = grid_of(what)
    made = strategies.FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    found = made.start(grid=grid, initial_arrays=begin(what), num_rounds=1)
    assert len(grid.errors) == 1 and "partition 2 of 3 has no rows" in grid.errors[0]
    assert list(found.arrays) == ["bias", "down", "up"]


def test_a_server_of_another_model_is_told_so() -> None:
    grid = grid_of(job())
    other = ArrayRecord([np.zeros(3, np.float32)])
    made = strategies.FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    made.start(grid=grid, initial_arrays=other, num_rounds=1)
    assert len(grid.errors) == 3 and "those of another model than weights" in grid.errors[0]


def test_a_server_without_parameters_is_told_so() -> None:
    grid = grid_of(job())
    none = ArrayRecord({"_empty": Array(dtype="", shape=(), stype="numpy.ndarray", data=b"")})
    content = RecordDict({"fitins.parameters": none, "fitins.config": ConfigRecord()})
    grid.send_and_receive([Message(content, dst_node_id=100, message_type="train")])
    assert "the server has no parameters to begin with" in grid.errors[0]


def test_a_client_that_knows_no_partition() -> None:
    grid = grid_of(job())
    for context in grid.contexts.values():
        context.node_config = {}
    strategies.FedAvg(fraction_evaluate=0.0, min_available_nodes=3).start(
        grid=grid, initial_arrays=begin(job()), num_rounds=1
    )
    assert "partition-id of the client is None" in grid.errors[0]


def test_optimizer_state_is_kept_in_the_context_of_a_client() -> None:
    what = job(optimizer=optax.adam(0.01), local=federated.Local(keep="optimizer"))
    grid = grid_of(what)
    made = strategies.FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    found = made.start(grid=grid, initial_arrays=begin(what), num_rounds=2)
    theta: Any = first()
    kept: list[Any] = [{}] * CLIENTS
    for number in (1, 2):
        answers = [
            federated.train(
                what,
                federated.Request(
                    arrays=theta, partition=k, partitions=3, round=number, kept=kept[k]
                ),
            )
            for k in range(CLIENTS)
        ]
        kept = [one.kept for one in answers]
        theta = {p: sum(a.weight * a.arrays[p] for a in answers) / sum(ROWS) for p in theta}
    assert all(kept) and not grid.errors
    same(found.arrays, theta)


def test_clipped_updates_are_no_longer_than_the_norm() -> None:
    """Scalars among them, without noise; each client counts alike."""
    what = job(local=federated.Local(epochs=2, weight="equal"))
    inner = strategies.FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    made = strategies.DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 0.05, 3)
    found = made.start(grid=grid_of(what), initial_arrays=begin(what), num_rounds=1)

    def clipped(theta: Tree, local: list[Tree]) -> Tree:
        deltas = [jax.tree.map(np.subtract, one, theta) for one in local]
        norms = [np.sqrt(sum(np.sum(d**2) for d in one.values())) for one in deltas]
        assert min(norms) > 0.05
        return {
            path: theta[path]
            + sum(0.05 / n * one[path] for n, one in zip(norms, deltas, strict=True)) / 3
            for path in theta
        }

    same(found.arrays, averaged(1, what.optimizer, mean=clipped))


@pytest.mark.parametrize("weight", ["equal", "rows"])
def test_flowers_accountant_has_the_same_epsilon(weight: str) -> None:
    """It takes clients that count alike, and no others."""
    pytest.importorskip("dp_accounting", reason="the package dp-accounting is not installed")
    from flwr.supercore import privacy_accounting as flower
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

    config = flower.PrivacyConfig(
        target_delta=1e-3,
        population_size=CLIENTS,
        neighboring_relation=flower.NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling_method=flower.SamplingMethod.NO_AMPLIFICATION,
    )
    what = job(local=federated.Local(weight=weight))
    inner = strategies.FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    made = strategies.DifferentialPrivacyServerSideFixedClipping(
        inner, 1.5, 0.5, CLIENTS, accountant=RdpAccountant(config)
    )

    def start() -> None:
        made.start(grid=grid_of(what), initial_arrays=begin(what), num_rounds=2)

    if weight == "rows":
        with pytest.raises(ValueError, match="equal client weights"):
            start()
        return
    start()
    spent = made.privacy_spent()
    assert spent is not None and spent.num_releases == 2
    assert spent.epsilon == pytest.approx(federated.epsilon(1.5, 2, delta=1e-3), rel=1e-9)


@pytest.mark.processes  # Ray looks for accelerators
def test_a_client_is_copied_into_other_processes() -> None:
    """What engines send is the app itself; the job it has is the same job."""
    cloudpickle = pytest.importorskip("ray.cloudpickle", reason="Ray is not installed")
    what = job(init=shardlib.tree(lambda key: {"w": jax.random.normal(key, (4,))}))
    copied = pickle.loads(cloudpickle.dumps(federated.client(what)))
    answers = list(copied._registered_funcs.values())
    assert len(answers) == 2
    assert pickle.loads(cloudpickle.dumps(what)) == what != job()


def secure(what: federated.Job, rounds: int, **settings: Any) -> list[np.ndarray]:
    """FedAvg by SecAgg+."""
    from flwr.client.mod import secaggplus_mod
    from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.compat.common import recorddict_compat
    from flwr.server import LegacyContext, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
    from flwr.server.workflow.constant import MAIN_PARAMS_RECORD

    program = federated.program(what, "cpu:1")
    given = list(federated.arrays(program, program.init()).values())
    context = LegacyContext(
        Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}),
        config=ServerConfig(num_rounds=rounds),
        strategy=FedAvg(
            min_fit_clients=3,
            min_available_clients=3,
            initial_parameters=ndarrays_to_parameters(given),
        ),
    )
    grid = grid_of(what, mods=[secaggplus_mod])
    workflow = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, **settings)
    DefaultWorkflow(fit_workflow=workflow)(grid, context)
    assert not grid.errors
    record = context.state.array_records[MAIN_PARAMS_RECORD]
    assert len(context.history.losses_distributed) == rounds
    return parameters_to_ndarrays(recorddict_compat.arrayrecord_to_parameters(record, True))


def test_secure_aggregation_is_federated_averaging() -> None:
    """Within its quantisation: of each client a step of the range, over its part of the weights."""
    what = job()
    found = secure(what, 1, max_weight=100.0, clipping_range=8.0, quantization_range=1 << 22)
    wanted = averaged(1, what.optimizer)
    step = 2 * 8.0 / (1 << 22)
    assert len(found) == len(wanted)
    for array, path in zip(found, sorted(wanted), strict=True):
        apart = np.abs(array.reshape(wanted[path].shape) - wanted[path]).max()
        assert apart < CLIENTS * step * 100.0 / sum(ROWS) + 1e-6
