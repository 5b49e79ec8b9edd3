from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import clu.metrics
import jax
import jax.numpy as jnp
import metrax
import numpy as np
import optax
import pytest

import shardlib
from shardlib.errors import BatchError, ModelError, PinError
from shardlib.training.fit import fit
from shardlib.training.measures import EventFiles, JsonLines, Judge, Policy, by_step, read_records
from shardlib.training.settings import Settings
from shardlib.training.validation import Validation, validator


def test_lines_come_back(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write({"step": 1, "loss": 2.5, "skipped": 1.0})
    sink.write({"step": 2, "loss": math.inf})
    assert read_records(path) == [
        {"step": 1, "loss": 2.5, "skipped": 1.0},
        {"step": 2, "loss": math.inf},
    ]  # before it is closed: every line is flushed
    sink.close()


def test_a_torn_line_costs_itself_alone(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    for torn in ('{"step": 2, "lo', '{"step": 2', "{", '{"step": 2, "loss": 1.0}', "[1]\n"):
        path.write_text('{"step": 1, "loss": 2.5}\n' + torn)
        sink = JsonLines(path)
        sink.write({"step": 3, "loss": 0.5})
        sink.close()
        assert [record["step"] for record in read_records(path)] == (
            [1, 2, 3] if torn.endswith("1.0}") else [1, 3]
        )
    assert read_records(tmp_path / "none.jsonl") == []


def test_steps_that_were_done_again_count_once():
    first = [{"step": step, "loss": float(step)} for step in range(1, 8)]
    again = [
        {"event": "resumed", "step": 4},
        *({"step": step, "loss": 10.0 * step} for step in (5, 6)),
    ]
    found = by_step([*first, *again])
    assert {step: record["loss"] for step, record in found.items()} == {
        1: 1.0,
        2: 2.0,
        3: 3.0,
        4: 4.0,
        5: 50.0,
        6: 60.0,
    }


def test_tensorboard_files_hold_the_numbers(tmp_path: Path):
    sink = EventFiles(tmp_path)
    sink.write({"step": 3, "loss": 0.125})
    sink.write({"step": 3, "event": "skipped"})
    sink.close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    assert (
        b"loss" in data and b"\x00\x00\x00>" in data and b"skipped" in data
    )  # 0.125 as a little-endian float


# Metrics of `clu` and `metrax` are those of the whole batch or set on one device, whatever the
# mesh, the microbatches and the size of a validation's batches.

WIDE, ROWS = 12, 32
Batch = Mapping[str, Any]


#: Two metrics of `clu` in one.
Collected = clu.metrics.Collection.create(
    accuracy=clu.metrics.Accuracy, square=clu.metrics.Average.from_output("square")
)


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (WIDE,)) / WIDE, "b": jnp.zeros(())}


def loss(params: Any, batch: Batch) -> Any:
    """A classifier of two classes, and what users measure of one."""
    z = batch["x"] @ params["w"] + params["b"]
    chance, label, mask = jax.nn.sigmoid(z), batch["y"], batch["mask"]
    target, both = label.astype(jnp.float32), jnp.stack([jnp.zeros_like(z), z], -1)
    return optax.sigmoid_binary_cross_entropy(z, label).mean(), {
        "masked": clu.metrics.Average.from_model_output(z, mask=mask),
        "collected": Collected.single_from_model_output(logits=both, labels=label, square=z * z),
        "accuracy": metrax.Accuracy.from_model_output((z > 0).astype(jnp.int32), label),
        "error": metrax.RMSE.from_model_output(z, target, sample_weights=mask),
        "explained": metrax.RSQUARED.from_model_output(z, target),
        "precision": metrax.Precision.from_model_output(chance, label),
        "recall": metrax.Recall.from_model_output(chance, label),
        "dice": metrax.Dice.from_model_output(chance, target),
        "roc": metrax.AUCROC.from_model_output(chance, label, num_thresholds=20),
    }


def rows_of(seed: int, rows: int) -> dict[str, np.ndarray]:
    """Rows whose mask leaves out more of the first than of the last."""
    drawn = np.random.default_rng(seed)
    return {
        "x": drawn.normal(size=(rows, WIDE)).astype(np.float32),
        "y": drawn.integers(0, 2, rows).astype(np.int32),
        "mask": (drawn.random(rows) < np.linspace(0.1, 1, rows)).astype(np.float32),
    }


@functools.cache
def program(**pin: Any) -> Any:
    return shardlib.compile(
        shardlib.tree(init), loss, optax.sgd(0.1), rows_of(0, ROWS), topology="cpu:4",
        pin={"mesh": {"data": 2, "fsdp": 2}, **pin},
    )  # fmt: skip


def numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What each metric computes; of a collection, by name."""
    found: dict[str, Any] = {}
    for name, one in metrics.items():
        value = one.compute() if hasattr(one, "compute") else one
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        found |= {f"{name}.{key}".removesuffix("."): np.asarray(number) for key, number in inner}
    return found


def reference(params: Any, batch: Batch) -> dict[str, Any]:
    """The metrics of all rows at once, on one device, by the packages alone."""
    with jax.default_device(jax.local_devices()[0]):
        return numbers(loss(jax.device_get(params), jax.tree.map(jnp.asarray, batch))[1])


def close(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, number in wanted.items():
        np.testing.assert_allclose(found[name], number, rtol=2e-6, atol=2e-6, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [1, pytest.param(4, marks=pytest.mark.matrix)])
def test_the_metrics_of_a_step_are_those_of_the_whole_batch(microbatches: int):
    trained, batch = program(microbatches=microbatches), rows_of(1, ROWS)
    state = trained.init(seed=0)
    wanted = reference(state.params, batch)
    _, metrics = trained.step(state, batch)
    assert isinstance(metrics["roc"], metrax.AUCROC)  # the object, for `merge` over steps
    del metrics["loss"]
    close(numbers(metrics), wanted)


@pytest.mark.long
@pytest.mark.parametrize("rows", [7, pytest.param(None, marks=pytest.mark.matrix)])
def test_the_metrics_of_a_validation_are_those_of_the_whole_set(rows: int | None):
    trained, held = program(), rows_of(2, 45)
    state = trained.init(seed=0)
    found = validator(Validation(data=held, rows=rows, name="held-out"), trained).validate(state)
    del found["held-out/loss"]
    wanted = reference(state.params, held)
    close(found, {f"held-out/{name}": one for name, one in wanted.items()})


@pytest.mark.long
def test_a_run_writes_the_numbers_of_each_step(tmp_path: Path):
    trained = program(microbatches=2)
    wanted = reference(trained.init(seed=0).params, rows_of(0, ROWS))
    fit(trained, lambda step: rows_of(step, ROWS), steps=2, settings=Settings(run=tmp_path / "run"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first = next(one for one in map(json.loads, lines) if one.get("step") == 1 and "loss" in one)
    close({name: first[name] for name in wanted}, wanted)


def test_a_metric_whose_parts_are_no_sums_is_refused():
    """A median of parts is not that of the whole, and an object with it is none either."""

    def median(params: Any, batch: Batch) -> Any:
        value, _ = loss(params, batch)
        z = batch["x"] @ params["w"]
        return value, {"median": clu.metrics.Average.from_model_output(jnp.median(z))}

    with pytest.raises(PinError, match=r"metric 'median\.total'"):
        shardlib.compile(
            shardlib.tree(init), median, optax.sgd(0.1), rows_of(0, ROWS), topology="cpu:4",
            pin={"microbatches": 4},
        )  # fmt: skip


def test_a_metric_that_cannot_be_merged_is_refused_by_name():
    """metrax 0.2.4 has no `merge` for F scores."""
    trained = program()

    def score(params: Any, batch: Batch) -> Any:
        value, _ = loss(params, batch)
        chance = jax.nn.sigmoid(batch["x"] @ params["w"])
        return value, {"f": metrax.FBetaScore.from_model_output(chance, batch["y"], beta=2.0)}

    asked = Validation(data=rows_of(2, 45), rows=7, loss=score)
    with pytest.raises(BatchError, match=r"f: FBetaScore\.merge is not implemented"):
        validator(asked, trained).validate(trained.init(seed=0))


@pytest.mark.long
def test_the_page_measures_all_rows():
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    code = page.partition("<!-- metrax -->\n```python\n")[2].partition("```")[0]
    batch = {"x": np.eye(32, 16, dtype=np.float32), "y": np.arange(32) % 3 == 0}
    scope: dict[str, Any] = {
        "jax": jax, "jnp": jnp, "optax": optax, "shardlib": shardlib, "batch": batch,
    }  # fmt: skip
    exec(compile(code, "training.md", "exec"), scope)
    assert float(scope["metrics"]["roc"].compute()) == pytest.approx(0.5)  # all logits are 0
    assert int(scope["metrics"]["recall"].false_negatives) + int(
        scope["metrics"]["recall"].true_positives
    ) == int(batch["y"].sum())


def falling(steps: int, seed: int = 0) -> list[float]:
    noise = np.random.default_rng(seed).normal(0, 0.05, steps)
    return [3 + 2 * math.exp(-step / 100) + noise[step] for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_falls_with_noise_has_no_spikes(seed: int):
    judge = Judge(Policy())
    assert {judge.see(loss) for loss in falling(1000, seed)} == {"go"}


def test_a_spike_is_seen_and_not_remembered():
    judge = Judge(Policy(window=32, spike=10.0))
    for loss in falling(200):
        judge.see(loss)
    before = judge.limit()
    assert judge.see(9.0) == judge.see(30.0) == "roll-back" and judge.limit() == before
    assert judge.see(before) == "go"


def test_nothing_is_a_spike_before_the_window_is_full():
    judge = Judge(Policy(window=4))
    assert [judge.see(loss) for loss in (1.0, 100.0, 1.0, 1e6)] == ["go"] * 4


def test_actions():
    for action, bad, jump in (
        ("warn", "roll-back", "warn"),
        ("roll-back", "roll-back", "roll-back"),
        ("stop", "stop", "stop"),
    ):
        judge = Judge(Policy(window=2, action=action), seen=[1.0, 1.1])
        assert (judge.see(math.inf), judge.see(50.0), judge.see(1.05)) == (bad, jump, "go")
    assert Judge(Policy(window=2, spike=0), seen=[1.0, 1.1]).see(50.0) == "go"


def test_what_was_seen_is_all_its_memory():
    one, losses = Judge(Policy(window=16)), falling(100)
    for loss in losses[:50]:
        one.see(loss)
    other = Judge(Policy(window=16), seen=[*one.seen])
    for loss in [*losses[50:], 40.0]:
        assert one.see(loss) == other.see(loss) and one.limit() == other.limit()


def test_policies_that_make_no_sense():
    with pytest.raises(ModelError) as caught:
        Policy(window=1, spike=-1.0, action="pray")
    assert (
        str(caught.value)
        == "the policy for bad losses is not usable:\n  - window is 1; it must be at least 2\n  -"
        " spike is -1.0; it must be at least 0\n  - action is 'pray'; it is one of warn, skip,"
        " roll-back, stop"
    )


def test_steps_left_out_in_a_row():
    judge = Judge(Policy(skips=2))
    assert [
        judge.skip(),
        judge.skip(),
        judge.see(1.0),
        judge.skip(),
        judge.skip(),
        judge.skip(),
    ] == ["go", "go", "go", "go", "go", "roll-back"]
