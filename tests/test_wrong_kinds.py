"""Is a value of a wrong kind refused with an error of shardlib, wherever it is given?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.decisions.pins import Pins
from shardlib.errors import ArgumentError, BatchError, ModelError, PinError, PlanError

BATCH = {"x": np.ones((8, 16), np.float32)}
QUERY = jnp.ones((2, 5, 4, 8))


def loss(params: Any, batch: Any) -> jax.Array:
    """A loss that needs its batch."""
    return ((batch["x"] @ params["w"]) ** 2).mean()


def given(batch: Any = BATCH) -> tuple[Any, ...]:
    """A model of one matrix."""
    init = shardlib.tree(lambda key: {"w": jnp.ones((16, 8))})
    return init, loss, optax.adam(1e-3), batch


def plan(batch: Any = BATCH, **options: Any) -> shardlib.Plan:
    """Plans it."""
    return shardlib.plan(*given(batch), topology="cpu:8", **options)


def fit(data: Any = lambda step: BATCH, program: Any = None, **options: Any) -> Any:
    """Trains it."""
    program = shardlib.compile(*given(), topology="cpu:1") if program is None else program
    return shardlib.fit(program, data, **options)


def attend(**options: Any) -> jax.Array:
    """Attention of ones."""
    return shardlib.attention(QUERY, QUERY, QUERY, **options)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "a number for a decision": (
        lambda: plan(pin={1: 2}),
        PinError,
        ["1 is not a decision", "word"],
    ),
    "a difference to a number": (
        lambda: plan().diff(cast("Any", 3)),
        ArgumentError,
        ["other is int"],
    ),
    "a plan of a number": (
        lambda: shardlib.Plan.from_json(cast("Any", 3)),
        PlanError,
        ["int and no text"],
    ),
    "steps in words": (lambda: fit(steps="3"), ArgumentError, ["steps is '3'", "steps=1000"]),
    "negative steps": (lambda: fit(steps=-2), ArgumentError, ["steps is -2", "from 0 on"]),
    "a list of batches": (lambda: fit([BATCH], steps=1), ArgumentError, ["data is a list"]),
    "no program": (
        lambda: fit(program=loss, steps=1, settings=3),
        ArgumentError,
        ["program is the function loss", "settings is 3"],
    ),
    "a scale in words": (lambda: attend(scale="a"), ModelError, ["scale is 'a'"]),
    "a negative softcap": (lambda: attend(softcap=-1.0), ModelError, ["softcap=-1 is negative"]),
    "a negative block": (lambda: attend(block=-2), ModelError, ["block=-2 is negative"]),
    "other segments": (
        lambda: attend(segments=jnp.ones((2, 7), jnp.int32)),
        ModelError,
        ["segments are (2, 7)", "(2, 5)"],
    ),
    "options of plan": (
        lambda: plan(name=7, limits=3),
        ArgumentError,
        ["name is 7 and no string", "limits is 3"],
    ),
    "rows in other words": (
        lambda: plan(rows="sum"),
        ArgumentError,
        ["rows is 'sum' and neither 'prove' nor 'mean'"],
    ),
    "no batch": (lambda: plan(None), BatchError, ["the batch has no rows"]),
    "an empty batch": (lambda: plan({}), BatchError, ["the batch has no rows", "KeyError: 'x'"]),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_value_of_another_kind_is_refused(mistake: str) -> None:
    run, kind, said = WRONG[mistake]
    with pytest.raises(kind) as caught:
        run()
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize("pin", [None, {"zero": 0}, Pins.parse({"zero": 0})])
def test_one_dtype_may_be_allowed_without_a_list(pin: Any) -> None:
    found = plan(pin=pin, allow={"moment_dtype": "bfloat16"})
    assert found.dtypes == (("moment_dtype", "bfloat16"),)
    assert found.dtypes == plan(pin=pin, allow={"moment_dtype": ["bfloat16"]}).dtypes


@pytest.mark.parametrize("scale", [0.5, 1, np.float32(0.5), jnp.float32(0.5)])
def test_a_scale_is_any_number(scale: Any) -> None:
    assert attend(scale=scale).shape == QUERY.shape
