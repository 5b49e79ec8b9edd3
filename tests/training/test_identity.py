"""What a run is, is what is traced: another experiment does not go on in its folder without a
word.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import shardlib
from shardlib.errors import ModelError, RunError
from shardlib.lowering.program import Program
from shardlib.training.fit import fit
from shardlib.training.identity import drawn, traced
from shardlib.training.measures import read_records
from shardlib.training.run import RunFolder
from shardlib.training.settings import Settings
from tests.processes import python
from tests.training.small import Model, batch_of, compiled, loss

MESH = {"data": 2}


def program(
    loss: Callable[..., Any] = loss,
    optimizer: optax.GradientTransformation | None = None,
    pin: dict[str, Any] | None = None,
    topology: str = "cpu:2",
    **words: Any,
) -> Program:
    return shardlib.compile(
        Model,
        loss,
        optimizer or optax.adam(1e-2),
        batch_of(0),
        topology=topology,
        pin=pin or {"mesh": MESH},
        **words,
    )


def what(one: Program, data: Any = batch_of, seed: int = 0) -> dict[str, Any]:
    return traced([(0, one)], data, seed)


def changed(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    found = what(program())
    assert found["loss"]["untraceable"] == ""
    return found


@jax.custom_vjp
def straight(x: jax.Array) -> jax.Array:
    return jnp.round(x)


straight.defvjp(lambda x: (straight(x), None), lambda _, g: (g,))


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    return jnp.round(x)


halved.defvjp(lambda x: (halved(x), None), lambda _, g: (g * 0.5,))


def absolute(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean(jnp.abs(model.up(batch["x"])[:, :16] - batch["y"]))


def weighed(weight: float) -> Callable[..., Any]:
    return lambda model, batch: weight * loss(model, batch)


def rounded(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, batch: jnp.mean(function(model.up(batch["x"])) ** 2)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (lambda: what(program(absolute)), {"loss"}),
        (lambda: what(program(weighed(1.0))), {"loss"}),
        (lambda: what(program(optimizer=optax.adam(2e-2))), {"lr"}),
        (lambda: what(program(optimizer=optax.adam(1e-2, b1=0.8))), {"lr"}),
        (lambda: what(program(optimizer=optax.sgd(1e-2))), {"optimizer", "lr"}),
        (
            lambda: what(program(optimizer=optax.adam(optax.cosine_decay_schedule(1e-2, 100)))),
            {"optimizer", "lr"},
        ),
        (lambda: what(program(guards=shardlib.Guards(clip=1.0))), {"optimizer"}),
        (lambda: what(program(), data=lambda step: batch_of(step + 1)), {"data"}),
        (lambda: what(program(), seed=1), {"seed"}),
    ],
    ids=["loss", "weight", "lr", "b1", "optimizer", "schedule", "guards", "data", "seed"],
)
def test_what_is_another_is_told_apart(
    plain: dict[str, Any], other: Callable[[], dict[str, Any]], names: set[str]
):
    assert changed(plain, other()) == names


def test_schedules_and_derivatives_by_hand_count():
    one, other = (
        what(program(optimizer=optax.adam(optax.cosine_decay_schedule(1e-2, steps))))
        for steps in (100, 200)
    )
    assert changed(one, other) == {"lr"}
    one, other = (what(program(rounded(function))) for function in (straight, halved))
    assert changed(one, other) == {"loss"}
    assert one["loss"]["operations"] == other["loss"]["operations"]
    assert changed(what(program(weighed(0.5))), what(program(weighed(0.25)))) == {"loss"}


@pytest.mark.parametrize(
    ("pin", "topology"),
    [
        ({"mesh": {"fsdp": 4}, "zero": 3}, "cpu:4"),
        ({"mesh": {"data": 2, "tensor": 2}, "microbatches": 2}, "cpu:4"),
        ({"mesh": {}}, "cpu:1"),
    ],
    ids=str,
)
def test_plan_mesh_and_microbatches_do_not_count(
    plain: dict[str, Any], pin: dict[str, Any], topology: str
):
    assert changed(plain, what(program(pin=pin, topology=topology))) == set()


def test_names_do_not_count(plain: dict[str, Any]):
    def called_otherwise(network: Model, examples: dict[str, jax.Array]) -> jax.Array:
        return loss(network, examples)

    assert changed(plain, what(program(called_otherwise))) == set()
    one, other = (
        drawn(jax.jit(function), jnp.float32(1))
        for function in (lambda x: jnp.sin(x) * 2, lambda y: jnp.sin(y) * 2)
    )
    assert one == other


def test_constraints_in_the_loss_count_for_nothing():
    """Where a value is to be is the plan's, and derivatives by hand are still compared."""

    def constrained(function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean(
                function(
                    jax.lax.with_sharding_constraint(
                        model.up(batch["x"]), jax.sharding.PartitionSpec("data")
                    )
                )
                ** 2
            )

        return inside

    one, other = (what(program(constrained(function))) for function in (straight, halved))
    assert one["loss"]["untraceable"] == "" and changed(one, other) == {"loss"}


@pytest.mark.long
def test_another_model_is_one_change(plain: dict[str, Any], tmp_path: Path):
    def other(act: Any, width: int, optimizer: optax.GradientTransformation) -> dict[str, Any]:
        class Wider(nnx.Module):
            def __init__(self, rngs: nnx.Rngs):
                self.up = nnx.Linear(16, width, rngs=rngs)
                self.down = nnx.Linear(width, 16, rngs=rngs)

        def loss(model: Wider, batch: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((model.down(act(model.up(batch["x"]))) - batch["y"]) ** 2)

        return what(
            shardlib.compile(
                Wider, loss, optimizer, batch_of(0), topology="cpu:2", pin={"mesh": MESH}
            )
        )

    folder = RunFolder(tmp_path / "run")
    folder.open({}, other(jnp.tanh, 32, optax.adam(1e-2)))
    with pytest.raises(RunError) as caught:
        folder.check({}, other(jnp.tanh, 48, optax.adam(1e-2)))
    assert str(caught.value).startswith(
        f"{folder.path} holds another run: model: the model has other arrays, with which loss and"
        " optimizer are traced\nTry: "
    )
    assert "--allow-changes model, or" in str(caught.value)
    with pytest.raises(RunError) as caught:
        folder.check({}, other(jnp.sin, 48, optax.sgd(1e-2)))
    assert "--allow-changes loss,optimizer,lr,model, or" in str(caught.value)


@pytest.mark.long
@pytest.mark.processes
def test_the_same_in_every_process(plain: dict[str, Any]):
    code = (
        "import json; from tests.training.test_identity import program, what;"
        " print(json.dumps(what(program())))"
    )
    done = python("-c", code, variables={"PYTHONHASHSEED": "7"})
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(json.dumps(plain))


def test_a_folder_refuses_and_lists(plain: dict[str, Any], tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.open({"model": {"layers": 2, "embed": 8}}, plain)
    before = folder.manifest.read_bytes()
    other = what(program(absolute, optax.adam(2e-2)), seed=1)
    for attempt in (folder.check, folder.open):
        with pytest.raises(RunError) as caught:
            attempt({"model": {"layers": 3, "embed": 8}}, other)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{folder.path} holds another run:"
    assert lines[1] == "  - model.layers is 3, the run has 2"
    assert lines[2].startswith("  - loss: the loss computes something else (1 abs more, ")
    assert lines[3] == "  - lr: numbers of the optimizer are others (-0.02 in place of -0.01)"
    assert lines[4] == "  - seed is 1, the run has 0"
    assert "--allow-changes model,loss,lr,seed" in lines[5]
    assert folder.manifest.read_bytes() == before
    with pytest.raises(RunError, match="holds another run: seed is 1, the run has 0"):
        folder.open({"model": {"layers": 3, "embed": 8}}, other, ("model", "loss", "lr"))
    found = folder.open(
        {"model": {"layers": 3, "embed": 8}}, other, ("model", "loss", "lr", "seed")
    )
    assert [one.name for one in found.changes] == [
        "model",
        "loss",
        "lr",
        "seed",
    ] and folder.changed() == {"model", "loss", "lr", "seed"}
    (entry,) = json.loads(folder.manifest.read_text())["changes"]
    assert entry["before"]["traced"] == json.loads(json.dumps(plain)) and entry["before"][
        "run"
    ] == {"model": {"layers": 2, "embed": 8}}
    assert (
        folder.open({"model": {"layers": 3, "embed": 8}}, other).changes == ()
    )  # from now on that is the run


def test_other_versions_are_said(plain: dict[str, Any], tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.open({}, plain)
    data = json.loads(folder.manifest.read_text())
    data["versions"]["jax"] = "0.1"
    folder.manifest.write_text(json.dumps(data))
    assert folder.open({}, plain).changes == ()  # other versions that write down the same
    with pytest.raises(
        RunError,
        match=(
            r"the loss computes something else \(.*\); it was traced by other versions \(jax 0\.1"
            rf" -> {jax.__version__}\), which may write the same down otherwise"
        ),
    ):
        folder.open({}, what(program(absolute)))


def test_a_run_of_an_older_version_is_taken_up(plain: dict[str, Any], tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.open({"a": 1})
    assert folder.open({"a": 1}, plain).untraced and not folder.open({"a": 1}, plain).untraced
    with pytest.raises(RunError, match="seed is 3, the run has 0"):
        folder.open({"a": 1}, {**plain, "seed": {"value": 3}})


@pytest.mark.long
def test_fit_goes_on_with_another_optimizer_on_purpose(tmp_path: Path):
    def run(one: Program, steps: int, shown: io.StringIO | None = None, **settings: Any) -> Any:
        return fit(
            one,
            batch_of,
            steps=steps,
            settings=Settings(run=tmp_path, loggers=(), **settings),
            console=Console(file=shown or io.StringIO(), width=300),
        )

    run(compiled(MESH), 4)
    files = {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and "owner" not in path.parts
    }
    other = program(optimizer=optax.sgd(1e-2, momentum=0.9))
    with pytest.raises(RunError, match="the optimizer is another"):
        run(other, 8)
    assert files == {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and "owner" not in path.parts
    }
    shown = io.StringIO()
    found = run(other, 8, shown, allow_changes=("optimizer", "lr"))
    assert found.resumed == 4 and len(found.losses) == 8 and np.isfinite(found.losses).all()
    assert "a change on purpose, written down in " in shown.getvalue()
    (event,) = (
        record
        for record in read_records(tmp_path / "metrics.jsonl")
        if record.get("event") == "changed"
    )
    assert event["names"] == ["optimizer", "lr"] and event["step"] == 4
    assert run(other, 9).resumed == 8
    with pytest.raises(
        ModelError,
        match="allow_changes has 'lss'; known are loss, optimizer, lr, data, seed, model, batch",
    ):
        run(other, 9, allow_changes=("lss",))
    with pytest.raises(ModelError, match="allow_changes is 'loss', not a tuple of names"):
        Settings(allow_changes="loss")  # pyright: ignore[reportArgumentType]
