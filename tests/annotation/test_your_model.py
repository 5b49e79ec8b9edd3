"""What docs/your_model.md shows trains as shown, and gives what the library's own training gives."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

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
    assert PARTS.keys() == {"start", "ema", "generation", "command", "attention", *TRUTH}
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


@pytest.mark.long
def test_what_was_trained_answers() -> None:
    assert run("generation")["answers"] == [[5, 6, 7, 8], [8, 0, 1, 2]]


@pytest.mark.parametrize("command", re.findall(r"(?m)^shardlib (launch .*--dry-run.*)$", PAGE))
def test_jobs_are_shown(command: str, shell: Callable[..., tuple[int, str, str]]) -> None:
    code, shown, _ = shell(*shlex.split(command))
    assert code == 0
    assert "my_training.py" in shown


def test_attention_of_a_module_is_that_of_shardlib() -> None:
    layer = run("attention")["Layer"](nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 16, 64))
    mine = layer(x)
    module = layer.attention
    module.attention_fn = nnx.dot_product_attention
    mask = nnx.make_causal_mask(x[..., 0])
    np.testing.assert_allclose(mine, x + module(x, mask=mask), atol=1e-5)
    assert not np.allclose(mine, x + module(x), atol=1e-2)
