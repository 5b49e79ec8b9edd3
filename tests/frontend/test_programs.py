"""What a step's program knows, keeps, refuses and proves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardlib
from shardlib.checkpointing.store import Checkpoints
from shardlib.errors import (
    AnnotationError,
    ArgumentError,
    BatchError,
    CheckpointError,
    PinError,
    PlanError,
    StateError,
    TracingError,
)
from shardlib.frontend.steps import StepProgram
from shardlib.tracing.steps import trace_step
from tests.frontend.equality import plain
from tests.frontend.examples import EXAMPLES, ROWS, Example, drawn

#: What each example trains, and what it only reads.
ROLES = {
    "language_model": ({"params"}, set()),
    "gan": ({"g", "d"}, set()),
    "distillation": ({"student"}, {"teacher"}),
    "dpo": ({"lora"}, {"base"}),
    "ppo": ({"nets"}, set()),
    "contrastive": ({"encoder"}, {"slow", "queue"}),
    "two_towers": ({"params"}, set()),
    "meta_learning": ({"params"}, set()),
    "ema_teacher": ({"student"}, {"teacher"}),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_weights_gradients_and_what_follows_them_are_found(name: str):
    example = EXAMPLES[name]()
    state = jax.eval_shape(example.init, jax.eval_shape(lambda: jax.random.key(0)))
    traced = trace_step(example.step, state, example.batch, batch_axes=example.batch_axes)

    def tops(numbers: Any) -> set[str]:
        return {traced.paths[number].partition(".")[0] for number in numbers}

    trained, read = ROLES[name]
    frozen = set(traced.roles.weights) - set(traced.roles.gradients)
    assert tops(traced.roles.gradients) == trained
    assert tops(frozen) == read
    matrices = {
        path
        for path, leaf in zip(traced.paths, jax.tree.leaves(state), strict=True)
        if path.partition(".")[0] in trained and len(leaf.shape) > 1
    }
    assert matrices <= {traced.paths[number] for number in traced.roles.gradients}
    kept = sum(
        one.state_bytes_per_element * np.prod(one.shape) for one in traced.problem.parameters
    )
    followers = sum(
        leaf.size * leaf.dtype.itemsize
        for number, leaf in enumerate(jax.tree.leaves(state))
        if number in traced.roles.followers
    )
    assert kept == pytest.approx(followers)


def test_moments_rest_where_their_weights_do_and_nothing_is_copied():
    example = EXAMPLES["language_model"]()
    program = shardlib.compile_step(
        example.init, example.step, example.batch, topology="cpu:8",
        pin={"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3},
    )  # fmt: skip
    of = dict(zip(program.traced.paths, program.layouts.state, strict=True))
    for name in ("embed", "qkv", "out", "up", "down", "head"):
        moments = [path for path in of if path.startswith("opt.") and path.endswith(f".{name}")]
        assert len(moments) == 2
        assert {of[path] for path in moments} == {of[f"params.{name}"]}
        assert "fsdp" in of[f"params.{name}"].axes
    memory = program.compiled().memory_analysis()
    state = sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(program.state)
    )
    assert memory.alias_size_in_bytes >= 0.99 * state


def test_a_flax_module_is_split_and_trained():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(16, 32, rngs=rngs)
            self.norm = nnx.LayerNorm(32, rngs=rngs)
            self.down = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(nnx.gelu(self.norm(self.up(x))))

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    optimizer = optax.adam(1e-2, eps=1e-3)
    state = {"params": params, "opt": optimizer.init(params)}
    batch = {"x": drawn(1, ROWS, 16), "y": drawn(2, ROWS, 16)}

    def step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        def loss(params: Any) -> jax.Array:
            return ((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {
            "loss": value
        }

    program = shardlib.compile_step(
        state, step, batch, topology="cpu:8", pin={"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3}
    )
    mine, theirs = program.init(), state
    for _ in range(2):
        mine, found = program.step(mine, batch)
        theirs, wanted = jax.jit(step)(theirs, batch)
        np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
    for a, b in zip(plain(mine), plain(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert float(state["params"]["up"]["kernel"][...].sum()) != 0  # the user's own is still there


def test_a_decorated_step_and_a_decorated_forward_pass():
    example = EXAMPLES["gan"]()
    state = example.init(jax.random.key(3))
    step = shardlib.parallelize(example.step)
    mine, theirs = state, state
    for _ in range(2):
        mine, found = step(mine, example.batch)
        theirs, wanted = jax.jit(example.step)(theirs, example.batch)
        for a, b in zip(plain((mine, found)), plain((theirs, wanted)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    assert float(state["g"][0]["w"].sum()) == float(
        example.init(jax.random.key(3))["g"][0]["w"].sum()
    )

    @shardlib.parallelize(topology="cpu:8", pin={"mesh": {"data": 2, "tensor": 4}})
    def forward(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ params["a"]) @ params["b"]

    params = {"a": drawn(0, 16, 32), "b": drawn(1, 32, 8)}
    for rows in (ROWS, 2 * ROWS):
        x = drawn(rows, rows, 16)
        np.testing.assert_allclose(
            forward(params, x), np.maximum(x @ params["a"], 0) @ params["b"], atol=1e-4
        )
    assert forward.program(params, drawn(0, ROWS, 16)).plan.mesh["tensor"] == 4


def step_of(example: Example, **change: Any) -> dict[str, Any]:
    return {"init": example.init, "step": example.step, "batch": example.batch, **change}


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"step": 3}, ArgumentError, "it is a function"),
        ({"step": lambda state, batch: 3.0}, TracingError, "or a pair"),
        ({"step": lambda state, batch: ({}, {})}, StateError, "another structure(.|\n)*gone after"),
        (
            {"step": lambda state, batch: (jax.tree.map(lambda x: x[None], state), {})},
            StateError,
            "other arrays",
        ),
        ({"step": lambda state, batch: 1 / 0}, TracingError, "ZeroDivisionError"),
        ({"init": lambda a, b, c: {}}, TracingError, "init cannot be traced"),
        ({"batch": {}}, BatchError, "no rows"),
        ({"pin": {"microbatches": 4}}, PinError, "needs them apart"),
        ({"pin": {"mesh": {"stage": 2}}}, PinError, "stage"),
        ({"pin": {"remat": "full"}}, PinError, "needs them apart"),
        ({"pin": {"zer": 1}}, PinError, "zer"),
        ({"axes": {"params": {"up": "embed"}}}, AnnotationError, "is not a tuple of logical axes"),
    ],
)
def test_wrong_steps_say_what_is_wrong(change: dict[str, Any], error: type, said: str):
    given = step_of(EXAMPLES["language_model"](), **change)
    init, step, batch = (given.pop(name) for name in ("init", "step", "batch"))
    with pytest.raises(error, match=said):
        shardlib.compile_step(init, step, batch, topology="cpu:8", **given)


GONE = "is no longer there: a step donates"
OTHERS = "does not belong to this program"


def test_a_state_that_is_gone_or_of_another_program_is_refused(tmp_path: Path):
    example = EXAMPLES["meta_learning"]()
    arguments = example.init, example.step, example.batch
    program = shardlib.compile_step(*arguments, topology="cpu:8")
    evaluation = program.evaluation(lambda state, batch: example.step(state, batch)[1]["loss"])
    state = program.init()
    before = evaluation.evaluate(state, example.batch)["loss"]
    _, metrics = program.step(state, example.batch)
    np.testing.assert_allclose(before, metrics["loss"], rtol=1e-6)
    moved = shardlib.compile_step(*arguments, topology="cpu:8", pin={"mesh": {"data": 4}}).init()
    uses = {
        "step": lambda state: program.step(state, example.batch),
        "evaluate": lambda state: evaluation.evaluate(state, example.batch),
        "save": lambda state: program.save(tmp_path / "gone", state),
    }
    wrong = [(state, GONE), ({"params": 1}, OTHERS), (3, OTHERS), (moved, OTHERS)]
    for name, use in uses.items():
        for given, said in wrong[: -1 if name == "save" else None]:
            with pytest.raises(StateError, match=f"^the state given to {name} {said}"):
                use(given)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(moved))
    assert not (tmp_path / "gone").exists()
    program.save(tmp_path / "moved", moved)
    for one, other in zip(plain(program.restore(tmp_path / "moved")), plain(moved), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(BatchError):
        program.step(program.init(), {"x": jnp.zeros((3, 8, 4)), "y": jnp.zeros((3, 8))})


def test_saved_states_of_steps_are_checkpoints(tmp_path: Path):
    def program(width: int) -> StepProgram:
        return shardlib.compile_step(
            lambda: {"w": jnp.ones((4, width)), "steps": 0},
            lambda state, batch: {"w": state["w"] + batch.mean(), "steps": state["steps"] + 1},
            jnp.ones((8, 4)),
            topology="cpu:8",
        )

    own, other = program(2), program(3)
    own.save(tmp_path / "one", {"w": np.full((4, 2), 3.0, np.float32), "steps": 5})
    for restored in (
        own.restore(tmp_path / "one"),
        Checkpoints(tmp_path / "one").restore(own).state,
    ):
        assert int(restored["steps"]) == 5 and (np.asarray(restored["w"]) == 3).all()
    with pytest.raises(CheckpointError, match=r"there are checkpoints in .*one, of steps \[0\]"):
        own.save(tmp_path / "one", own.init())
    (tmp_path / "empty").mkdir()
    for folder in ("none", "empty"):
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            own.restore(tmp_path / folder)
    with pytest.raises(CheckpointError, match=r"another model: w is float32\[4, 2\] in the"):
        other.restore(tmp_path / "one")


def test_states_that_the_first_release_saved_are_restored():
    def program(width: int) -> StepProgram:
        return shardlib.compile_step(
            lambda: {
                "w": jnp.zeros((width, 4)),
                "key": jax.random.key(0),
                "count": jnp.int32(0),
            },
            lambda state, batch: (
                {**state, "w": state["w"] / 2},
                {"x": (batch @ state["w"]).sum()},
            ),
            jnp.ones((8, width)),
            topology="cpu:8",
        )

    folder = Path(__file__).parent / "stored" / "state_of_0_1"
    state = program(4).restore(folder)
    np.testing.assert_array_equal(state["w"], np.arange(16.0).reshape(4, 4))
    np.testing.assert_array_equal(jax.random.key_data(state["key"]), [0, 7])
    assert int(state["count"]) == 3
    with pytest.raises(CheckpointError, match="has the state of another step"):
        program(5).restore(folder)


def test_a_program_without_devices_says_so():
    example = EXAMPLES["meta_learning"]()
    program = shardlib.compile_step(
        example.init, example.step, example.batch, topology="h100:8", abstract=True
    )
    state = example.init(jax.random.key(0))
    evaluation = program.evaluation(lambda state, batch: 0.0)
    for use in (
        program.init,
        program.prepare,
        lambda: program.step(state, example.batch),
        lambda: evaluation.evaluate(state, example.batch),
    ):
        with pytest.raises(PlanError, match=r"^the program has no devices: it was made with"):
            use()


def test_a_step_that_computes_nothing_is_planned():
    state = {"w": jnp.ones((4, 2))}
    program = shardlib.compile_step(
        state,
        lambda state, batch: (state, {"one": jnp.float32(1)}),
        jnp.ones((8,)),
        topology="cpu:8",
    )
    new, metrics = program.step(program.init(), jnp.ones((8,)))
    assert float(metrics["one"]) == 1 and (np.asarray(new["w"]) == 1).all()


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


def labelled(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(32, 16)).astype(np.float32)
    return {"x": rows, "y": random.integers(0, 4, 32).astype(np.int32)}


def classify(model: Classifier, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), logits


def train_in_place(
    model: Classifier, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch: Any
) -> None:
    (loss, logits), gradients = nnx.value_and_grad(classify, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["y"])
    optimizer.update(model, gradients)


def test_a_step_that_changes_modules_in_place_is_that_of_nnx_jit():
    """Weights, statistics of the batch, dropout's random numbers and metrics."""
    pin = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3}
    states, totals = [], []
    for wrapped in (nnx.jit, shardlib.parallelize(topology="cpu:8", pin=pin)):
        model = Classifier(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        step = wrapped(train_in_place)
        for seed in range(4):
            step(model, optimizer, metrics, labelled(seed))
        states.append(plain(nnx.state(model)))
        totals.append({name: float(value) for name, value in metrics.compute().items()})
    assert totals[1] == pytest.approx(totals[0], rel=1e-6)
    for own, other in zip(*states, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    assert not model.inner.kernel[...].sharding.is_fully_replicated


def test_a_function_that_changes_its_only_module_is_no_inference():
    models = Classifier(nnx.Rngs(0)), Classifier(nnx.Rngs(0))
    losses = [
        wrapped(lambda model, batch: classify(model, batch)[0])(model, labelled(0))
        for wrapped, model in zip(
            (nnx.jit, shardlib.parallelize(topology="cpu:8")), models, strict=True
        )
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    first, second = (model.norm.mean[...] for model in models)
    np.testing.assert_allclose(first, second, rtol=1e-5)
    assert np.abs(second).max() > 0  # zeros before
    with pytest.raises(ArgumentError, match="the arguments share variables of NNX"):
        shardlib.parallelize(train_in_place)(models[0], models[0], models[1], labelled(0))


def test_a_step_of_params_and_optimizer_state_returns_both_and_its_loss():
    transformation = optax.adam(0.1)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: ((batch["x"] @ p["w"]) ** 2).mean())(params)
        updates, opt_state = transformation.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    ends = []
    for run in (jax.jit(step), shardlib.parallelize(topology="cpu:8")(step)):
        params = {"w": jnp.ones((16, 4))}
        opt_state = transformation.init(params)
        for seed in range(3):
            params, opt_state, loss = run(params, opt_state, labelled(seed))
        ends.append(plain((params, opt_state, loss)))
    for own, other in zip(*ends, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5)
    with pytest.raises(ArgumentError, match=r"step was called with 1 argument\(s\)"):
        shardlib.parallelize(step)({})


def test_gradients_are_named_by_their_module():
    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(4)(linen.LayerNorm()(x))

    def step(params: Any, x: jax.Array) -> Any:
        gradients = jax.grad(lambda params: (Outer().apply(params, x) ** 2).mean())(params)
        return jax.tree.map(lambda param, gradient: param - gradient, params, gradients)

    plan = shardlib.compile_step(
        lambda key: Outer().init(key, jnp.ones((16, 4))),
        step,
        jnp.ones((16, 4)),
        topology="h100:8",
        pin={"mesh": {"data": 8}},
        abstract=True,
    ).plan
    causes = {collective.cause for collective in plan.estimate.collectives}
    assert "gradients of Outer/LayerNorm_0" in causes, causes
