"""Fused dims: what a split, slices, a reshape or a concatenation take apart is sharded piece by
piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardlib.graph import Problem, check
from shardlib.propagation.colours import Choice, colour, with_fused_dims
from tests.planner import worlds

HEADS, WIDTH = 4, 6
EMBED = HEADS * WIDTH


def _split(y: Any) -> list[Any]:
    return [part.reshape(*part.shape[:-1], HEADS, WIDTH) for part in jnp.split(y, 3, axis=-1)]


def _sliced(y: Any) -> list[Any]:
    return [
        y[..., i * EMBED : (i + 1) * EMBED].reshape(*y.shape[:-1], HEADS, WIDTH) for i in range(3)
    ]


def _reshaped(y: Any) -> list[Any]:
    y = y.reshape(*y.shape[:-1], 3, HEADS, WIDTH)
    return [y[..., i, :, :] for i in range(3)]


def _moved(y: Any) -> list[Any]:
    return list(jnp.moveaxis(y.reshape(*y.shape[:-1], 3, HEADS, WIDTH), -3, 0))


def _unstacked(y: Any) -> list[Any]:
    return list(jnp.unstack(y.reshape(*y.shape[:-1], 3, HEADS, WIDTH), axis=-3))


def fused(apart: Callable[[Any], list[Any]], outputs: int = 3 * EMBED) -> Problem:
    """Attention whose queries, keys and values come of one matmul."""

    def loss(p: dict[str, Any], b: dict[str, Any]) -> Any:
        q, k, v = apart(b["x"] @ p["qkv"] + p["bias"])
        scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
        return jnp.mean(
            jnp.einsum("bhst,bthd->bshd", scores, v).reshape(*b["x"].shape[:2], -1) @ p["out"]
        )

    params = {
        "qkv": worlds.shape(16, outputs),
        "bias": worlds.shape(outputs),
        "out": worlds.shape(EMBED, 16),
    }
    return worlds.problem(
        loss, params, {"x": worlds.shape(4, 8, 16)}, {}, {"x": ("batch", "seq", None)}, remat={}
    )


@pytest.mark.parametrize("apart", [_split, _sliced, _reshaped, _moved, _unstacked])
def test_the_dim_of_a_fused_kernel_has_the_colour_of_its_heads(
    apart: Callable[[Any], list[Any]],
) -> None:
    before, problem = fused(apart), with_fused_dims(fused(apart))
    assert colour(before).parameters["qkv"][1] != colour(before).parameters["out"][0]
    found = colour(problem)
    heads = found.parameters["out"][0]
    assert found.parameters["qkv"][1] == found.parameters["bias"][0] == heads
    assert heads is not None and found.colours[heads].divisor == HEADS
    index = next(i for i in problem.forward.inputs if problem.forward.values[i].path == "qkv")
    assert problem.pieces[index, 1] == (EMBED,) * 3
    for graph in (problem.forward, *(step.graph for step in problem.steps.values())):
        check(graph)


@pytest.mark.parametrize("apart", [_split, _sliced, _reshaped, _moved, _unstacked])
def test_what_takes_a_fused_dim_apart_takes_it_as_it_is_cut(
    apart: Callable[[Any], list[Any]],
) -> None:
    problem = with_fused_dims(fused(apart))
    found = colour(problem)
    heads = found.parameters["out"][0]
    assert heads is not None
    choice = Choice(tensor=(heads,), batch="batch")
    for policy, step in problem.steps.items():
        for op in step.graph.ops:
            if op.rule.outer:
                specs = [
                    choice.spec(found.steps[policy][value])
                    for value in (*op.operands, *op.results)
                    if len(step.graph.values[value].shape) > 2
                ]
                assert all("tensor" in spec for spec in specs), (str(op.rule), specs)


def test_pieces_of_unequal_sizes_share_a_colour() -> None:
    def apart(y: Any) -> list[Any]:
        q, k, v = jnp.split(y, [EMBED, EMBED + 2 * WIDTH], axis=-1)
        q = q.reshape(*q.shape[:-1], HEADS, WIDTH)
        return [
            q,
            *(jnp.repeat(one.reshape(*one.shape[:-1], 2, WIDTH), 2, axis=-2) for one in (k, v)),
        ]

    problem = with_fused_dims(fused(apart, outputs=EMBED + 4 * WIDTH))
    index = next(i for i in problem.forward.inputs if problem.forward.values[i].path == "qkv")
    assert problem.pieces[index, 1] == (EMBED, 2 * WIDTH, 2 * WIDTH)
    found = colour(problem)
    name = found.parameters["qkv"][1]
    assert name is not None and found.parameters["out"][0] == name
    assert (2 * WIDTH) % found.colours[name].divisor == 0


def test_gates_that_are_concatenated_first_share_the_colour_of_the_state() -> None:
    def loss(p: dict[str, Any], b: dict[str, Any]) -> Any:
        gates = b["x"] @ jnp.concatenate([p["i"], p["f"]], axis=1)
        i, f = jnp.split(gates, 2, axis=-1)
        return jnp.mean((jax.nn.sigmoid(i) * jnp.tanh(f)) @ p["out"])

    problem = with_fused_dims(
        worlds.problem(
            loss,
            {"i": worlds.shape(8, 16), "f": worlds.shape(8, 16), "out": worlds.shape(16, 8)},
            {"x": worlds.shape(4, 8)},
            {},
            {"x": ("batch", None)},
            remat={},
        )
    )
    found = colour(problem)
    assert found.parameters["i"][1] == found.parameters["f"][1] == found.parameters["out"][0]


def test_batches_and_odd_slices_are_left_alone() -> None:
    def loss(p: dict[str, Any], b: dict[str, Any]) -> Any:
        x = jnp.concatenate([b["x"], b["y"]], axis=0) @ p["w"]
        left, right = jnp.split(x, 2, axis=0)
        return jnp.mean((left * right)[..., :-1] @ p["v"])

    before = worlds.problem(
        loss,
        {"w": worlds.shape(8, 16), "v": worlds.shape(15, 8)},
        {"x": worlds.shape(4, 8), "y": worlds.shape(4, 8)},
        {},
        dict.fromkeys("xy", ("batch", None)),
        remat={},
    )
    assert with_fused_dims(before) == before
