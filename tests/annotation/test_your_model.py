"""What docs/your_model.md shows trains as shown, and gives what the library's own training gives."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import shardlib
from shardlib.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "your_model.md").read_text()
PARTS = dict(re.findall(r"<!-- (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
STEPS = 5
Tree = Any


def run(part: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(PARTS["start"], "start", "exec"), scope)
    exec(compile(PARTS[part], part, "exec"), scope)
    return scope


def trained(scope: dict[str, Any], params: Tree, rest: Tree, value: Callable[..., Tree]) -> float:
    """The last loss of training by optax alone; `value` gives (loss, what changes beside)."""
    optimizer: optax.GradientTransformation = scope["optimizer"]
    moments, error = optimizer.init(params), np.inf
    for _ in range(STEPS):
        (error, rest), gradients = jax.value_and_grad(value, has_aux=True)(params, rest)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
    return float(error)


def of_nnx(scope: dict[str, Any]) -> float:
    wrt = nnx.Any(nnx.LoRAParam, scope["head"]) if "head" in scope else nnx.Param
    graph, params, rest = nnx.split(scope["Model"](nnx.Rngs(0)), wrt, ...)

    def value(params: Tree, rest: Tree) -> Tree:
        model = nnx.merge(graph, params, rest, copy=True)
        result = scope["loss"](model, scope["batch"])
        error = result[0] if isinstance(result, tuple) else result
        return error, nnx.split(model, wrt, ...)[2]

    return trained(scope, params, rest, value)


def of_linen(scope: dict[str, Any]) -> float:
    variables = scope["module"].init(jax.random.key(0), scope["batch"]["x"], train=False)
    rest = {"batch_stats": variables["batch_stats"]}
    return trained(
        scope, variables["params"], rest,
        lambda params, rest: scope["loss"]({"params": params, **rest}, scope["batch"]),
    )  # fmt: skip


def of_equinox(scope: dict[str, Any]) -> float:
    eqx = scope["eqx"]
    model = eqx.nn.MLP(16, 8, 64, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return trained(
        scope, params, (),
        lambda params, rest: (scope["loss"](eqx.combine(params, static), scope["batch"]), ()),
    )  # fmt: skip


def of_equinox_state(scope: dict[str, Any]) -> float:
    eqx = scope["eqx"]
    model, state = eqx.nn.make_with_state(scope["network"])(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return trained(
        scope, params, state,
        lambda params, rest: scope["loss"]((eqx.combine(params, static), rest), scope["batch"]),
    )  # fmt: skip


def of_haiku(scope: dict[str, Any]) -> float:
    params = scope["model"].init(jax.random.key(0), scope["batch"]["x"])
    return trained(
        scope, params, (), lambda params, rest: (scope["loss"](params, scope["batch"]), ())
    )


def of_haiku_state(scope: dict[str, Any]) -> float:
    params, state = scope["model"].init(jax.random.key(0), scope["batch"]["x"], True)
    return trained(
        scope, params, state, lambda params, rest: scope["loss"]((params, rest), scope["batch"])
    )


def of_tree(scope: dict[str, Any]) -> float:
    params = scope["init"](jax.random.key(0))
    return trained(
        scope, params, (), lambda params, rest: (scope["loss"](params, scope["batch"]), ())
    )


def of_layouts(scope: dict[str, Any]) -> float:
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((2, 4), ("rows", "model"), axis_types=explicit)):
        error = of_tree(scope)
    (found,) = [one for one in scope["program"].plan.findings if one.code == "own-layouts"]
    assert "(3)" in str(found) and "are pins of this plan" in str(scope["pinned"].findings)
    return error


def of_step(scope: dict[str, Any]) -> float:
    state, metrics = scope["start"](jax.random.key(0)), {"loss": np.inf}
    for _ in range(STEPS):
        state, metrics = scope["step"](state, scope["batch"])
    return float(metrics["loss"])


TRUTH = {
    "nnx": of_nnx,
    "linen": of_linen,
    "equinox": of_equinox,
    "equinox_state": of_equinox_state,
    "haiku": of_haiku,
    "haiku_state": of_haiku_state,
    "tree": of_tree,
    "layouts": of_layouts,
    "lora": of_nnx,
    "step": of_step,
}
NEEDS = {"equinox": "equinox", "haiku": "haiku"}


def test_every_part_of_the_page_is_run() -> None:
    assert PARTS.keys() == {"start", "ema", "generation", *TRUTH}
    assert len(re.findall("```python", PAGE)) == len(PARTS)
    assert "_src" not in PAGE and not re.search(r"shardlib\.\w+\.\w+", PAGE)  # public names alone


@pytest.mark.parametrize("part", TRUTH)
def test_the_part_gives_what_plain_optax_gives(part: str) -> None:
    for word, package in NEEDS.items():
        if part.startswith(word):
            pytest.importorskip(package)
    scope = run(part)
    np.testing.assert_allclose(float(scope["metrics"]["loss"]), TRUTH[part](scope), rtol=1e-5)
    if "validation" in scope:  # in evaluation mode, which is another loss than that of the step
        again = scope["program"].evaluate(scope["state"], scope["batch"])
        assert float(again["loss"]) == float(scope["validation"]["loss"])
        assert abs(float(again["loss"]) - float(scope["metrics"]["loss"])) > 1e-4


def test_the_average_is_that_of_the_parameters() -> None:
    scope = run("ema")
    params = scope["init"](jax.random.key(0))
    adam, average = optax.adam(1e-2), params
    moments = adam.init(params)
    for _ in range(STEPS):
        gradients = jax.grad(scope["loss"])(params, scope["batch"])
        updates, moments = adam.update(gradients, moments)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
    found = float(scope["validation"]["loss"])
    np.testing.assert_allclose(found, float(scope["loss"](average, scope["batch"])), rtol=1e-5)
    assert abs(found - float(scope["loss"](params, scope["batch"]))) > 1e-4


def test_what_was_trained_answers() -> None:
    assert run("generation")["answers"] == [[5, 6, 7, 8], [8, 0, 1, 2]]


@pytest.mark.parametrize("command", re.findall(r"(?m)^shardlib (launch .*--dry-run.*)$", PAGE))
def test_jobs_are_shown(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command))
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "my_training.py" in shown


# Three models that were brought by following docs/your_model.md, in an environment with nothing
# but `pip install .`: no name of shardlib is used that the page does not use.

MESHES = {"planned": {}, "all axes": {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}}


def cross_entropy(logits: Tree, y: Tree) -> Tree:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


# a temporal convolution network, Flax NNX ---------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, width: int, dilation: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(
            width, width, (3,), kernel_dilation=dilation, padding="CAUSAL", rngs=rngs
        )
        self.norm = nnx.GroupNorm(width, num_groups=4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Tree) -> Tree:
        return x + self.dropout(nnx.silu(self.norm(self.conv(x))))


class Temporal(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int = 32):
        self.inward = nnx.Linear(4, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, 2**depth, rngs) for depth in range(3)])
        self.outward = nnx.Linear(width, 6, rngs=rngs)

    def __call__(self, series: Tree) -> Tree:
        x = self.inward(series)
        for block in self.blocks:
            x = block(x)
        return self.outward(x[:, -1])


def temporal(rng: np.random.Generator) -> dict[str, Tree]:
    batch = {
        "x": rng.normal(size=(32, 20, 4)).astype(np.float32),
        "y": rng.integers(0, 6, 32),
    }

    def loss(model: Tree, batch: Tree) -> Tree:
        return cross_entropy(model(batch["x"]), batch["y"])

    graph, params, rest = nnx.split(Temporal(nnx.Rngs(0)), nnx.Param, ...)

    def value(params: Tree, rest: Tree) -> Tree:
        model = nnx.merge(graph, params, rest, copy=True)
        error = loss(model, batch)
        return error, nnx.split(model, nnx.Param, ...)[2]

    return {"init": Temporal, "loss": loss, "batch": batch, "truth": (params, rest, value)}


# a network over sets of points, Flax Linen: statistics of the batch, and a mask -------------------


class PointNet(nn.Module):
    @nn.compact
    def __call__(self, points: Tree, there: Tree, train: bool) -> Tree:
        x = points
        for width in (32, 64):
            x = nn.Dense(width)(x)
            x = nn.BatchNorm(use_running_average=not train)(x, mask=there[..., None])
            x = nn.relu(x)
        return nn.Dense(6)(jnp.where(there[..., None], x, -jnp.inf).max(axis=1))


def point_net(rng: np.random.Generator) -> dict[str, Tree]:
    module = PointNet()
    batch = {
        "points": rng.normal(size=(32, 24, 3)).astype(np.float32),
        "there": np.arange(24) < rng.integers(4, 25, (32, 1)),
        "y": rng.integers(0, 6, 32),
    }

    def loss(variables: Tree, batch: Tree) -> Tree:
        logits, updates = module.apply(
            variables, batch["points"], batch["there"], train=True, mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch["y"]), updates

    made = shardlib.linen(module, batch["points"], batch["there"], train=False)
    start = module.init(jax.random.key(0), batch["points"], batch["there"], train=False)
    rest = {"batch_stats": start["batch_stats"]}

    def value(params: Tree, rest: Tree) -> Tree:
        return loss({"params": params, **rest}, batch)

    return {"init": made, "loss": loss, "batch": batch, "truth": (start["params"], rest, value)}


# a differential equation with a learned right-hand side, arrays of one's own ----------------------


def start(key: Tree) -> Tree:
    keys = jax.random.split(key, 3)
    return {
        "field": [jax.random.normal(keys[0], (9, 48)) / 3, jax.random.normal(keys[1], (48, 8)) / 7],
        "read": jax.random.normal(keys[2], (8, 4)) / 3,
    }


def solved(params: Tree, state: Tree, steps: int = 8) -> Tree:
    """What is seen of the solution, by the classical method of Runge and Kutta."""

    def slope(t: Tree, state: Tree) -> Tree:
        inward, outward = params["field"]
        timed = jnp.concatenate([state, jnp.full_like(state[:, :1], t)], axis=1)
        return jnp.tanh(timed @ inward) @ outward

    def forward(state: Tree, t: Tree) -> tuple[Tree, Tree]:
        a = slope(t, state)
        b = slope(t + 0.5 / steps, state + 0.5 / steps * a)
        c = slope(t + 0.5 / steps, state + 0.5 / steps * b)
        d = slope(t + 1 / steps, state + c / steps)
        state = state + (a + 2 * b + 2 * c + d) / (6 * steps)
        return state, state @ params["read"]

    return jax.lax.scan(forward, state, jnp.arange(steps) / steps)[1]


def equation(rng: np.random.Generator) -> dict[str, Tree]:
    batch = {
        "start": rng.normal(size=(32, 8)).astype(np.float32),
        "seen": rng.normal(size=(32, 8, 4)).astype(np.float32),
    }

    def loss(params: Tree, batch: Tree) -> Tree:
        path = jnp.swapaxes(solved(params, batch["start"]), 0, 1)
        return ((path - batch["seen"]) ** 2).mean()

    def value(params: Tree, rest: Tree) -> Tree:
        return loss(params, batch), rest

    truth = (start(jax.random.key(0)), (), value)
    return {"init": shardlib.tree(start), "loss": loss, "batch": batch, "truth": truth}


JOBS: dict[str, Callable[[np.random.Generator], dict[str, Tree]]] = {
    "temporal": temporal,
    "point net": point_net,
    "equation": equation,
}


def plain(params: Tree, rest: Tree, value: Callable[..., Tree]) -> Iterator[float]:
    """The losses of training by optax alone."""
    optimizer = optax.adam(1e-2)
    moments = optimizer.init(params)
    for _ in range(STEPS):
        (error, rest), gradients = jax.value_and_grad(value, has_aux=True)(params, rest)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        yield float(error)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("job", JOBS)
def test_a_model_that_was_brought_by_the_page_trains_as_under_optax(job: str, mesh: str) -> None:
    made = JOBS[job](np.random.default_rng(0))
    program = shardlib.compile(
        made["init"], made["loss"], optax.adam(1e-2), made["batch"],
        topology="cpu:8", pin=MESHES[mesh],
    )  # fmt: skip
    state, losses = program.init(seed=0), []
    for _ in range(STEPS):
        state, metrics = program.step(state, made["batch"])
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, list(plain(*made["truth"])), rtol=2e-5)
    assert losses[-1] < losses[0]


def test_nothing_is_used_that_the_page_does_not_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "your_model.md").read_text()
    used = set(re.findall(r"\bshardlib\.(\w+)", Path(__file__).read_text())) - {"cli"}
    assert used and all(f"shardlib.{name}" in page for name in used)
