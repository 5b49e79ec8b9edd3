"""The optimizer's update as a program: which parameters' matrices it multiplies, and its FLOPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from shardlib.graph import UpdateArray
from shardlib.tracing.trace import matrix_updates, trace_update
from tests.tracing.test_trace import tower

WIDE, TALL, STACKED = (64, 256), (256, 64), (3, 32, 128)


def parameters(**shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


MODEL = parameters(up=WIDE, down=TALL, scale=(64,))


def newton_schulz(rows: int, columns: int) -> float:
    """FLOPs of five iterations: X X^T, (X X^T)^2, and their product with X."""
    m, n = sorted((rows, columns))
    return 5 * (2.0 * m * m * n + 2.0 * m**3 + 2.0 * m * m * n)


def spectral_clip() -> optax.GradientTransformation:
    """Singular values of at most 1, written by hand."""

    def clipped(update: jax.Array) -> jax.Array:
        if update.ndim < 2:
            return update
        left, values, right = jnp.linalg.svd(update, full_matrices=False)
        return (left * jnp.minimum(values, 1.0)[..., None, :]) @ right

    return optax.GradientTransformation(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None: (jax.tree.map(clipped, updates), state),
    )


def flops(optimizer: optax.GradientTransformation, params: Any = MODEL) -> dict[str, float]:
    return {facts.path: facts.flops for facts in trace_update(optimizer, params).facts}


ORTHOGONAL = {"up": newton_schulz(*WIDE), "down": newton_schulz(*TALL)}
LABELS = {"up": "muon", "down": "adam", "scale": "adam"}


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.adamw(1e-3), {}),
        (optax.adafactor(1e-3), {}),
        (optax.contrib.muon(1e-3), ORTHOGONAL),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(1e-3)), ORTHOGONAL),
        (optax.chain(optax.contrib.muon(1e-3), optax.clip_by_global_norm(1.0)), ORTHOGONAL),
        (
            optax.partition({"muon": optax.contrib.muon(1e-3), "adam": optax.adam(1e-3)}, LABELS),
            {"up": ORTHOGONAL["up"]},
        ),
        (
            optax.masked(optax.contrib.muon(1e-3), {"up": True, "down": False, "scale": False}),
            {"up": ORTHOGONAL["up"]},
        ),
        (
            optax.inject_hyperparams(optax.contrib.muon, static_args=("ns_steps",))(
                learning_rate=1e-3, ns_steps=5
            ),
            ORTHOGONAL,
        ),
    ],
)
def test_products_of_matrices_are_counted_by_parameter(
    optimizer: optax.GradientTransformation, expected: dict[str, float]
) -> None:
    assert flops(optimizer) == pytest.approx(expected)


def test_flops_are_those_of_the_compiler() -> None:
    optimizer = optax.contrib.muon(1e-3)
    params = parameters(up=(128, 512), down=(512, 128))
    state = jax.eval_shape(optimizer.init, params)
    counted = jax.jit(optimizer.update).lower(params, state, params).cost_analysis()
    assert sum(flops(optimizer, params).values()) == pytest.approx(counted["flops"], rel=0.03)


def test_loops_and_decompositions_count() -> None:
    in_loop = optax.contrib.muon(1e-3, ns_coeffs=((3.4, -4.8, 2.0),) * 5)
    assert flops(in_loop) == pytest.approx(ORTHOGONAL)
    assert set(flops(spectral_clip())) == {"up", "down"}


def test_matrices_of_a_stack_are_updated_alone() -> None:
    def muon(dims: Any) -> optax.GradientTransformation:
        numbers = {"layers": optax.contrib.MuonDimensionNumbers(*dims)}
        return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers)

    params = parameters(layers=STACKED)
    (of_layers,) = trace_update(muon((1, 2)), params).facts
    assert of_layers.stack == (0,)
    assert of_layers.matrices == STACKED[0]
    assert of_layers.flops == pytest.approx(STACKED[0] * newton_schulz(*STACKED[1:]))
    (of_columns,) = trace_update(muon((0, 1)), params).facts
    assert of_columns.stack == (2,)


def test_equal_updates_are_alike() -> None:
    params = parameters(first=WIDE, second=WIDE, down=TALL)
    alike = {f.path: f.alike for f in trace_update(optax.contrib.muon(1e-3), params).facts}
    assert alike["first"] == alike["second"] != alike["down"]


def test_an_update_reads_the_momentum_once_and_whole() -> None:
    facts = {f.path: f for f in trace_update(optax.contrib.muon(1e-3), MODEL).facts}
    momentum = UpdateArray(dtype="float32", shape=WIDE, replicated=False)
    assert [a for a in facts["up"].reads if not a.replicated] == [momentum]
    assert facts["up"].writes == (momentum,)


def test_products_of_several_parameters_are_said() -> None:
    def mixed(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return {**updates, "up": updates["up"] @ updates["down"] @ updates["up"]}, state

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), mixed)
    traced = trace_update(optimizer, MODEL)
    assert traced.facts == ()
    assert traced.coupled == ("down", "up")


def model() -> Any:
    return replace(tower(2), axes={})


def test_an_update_that_cannot_be_traced_warns() -> None:
    def by_number(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return (updates, state) if jnp.sum(updates["embed"]) > 0 else (params, state)

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), by_number)
    facts, (finding,) = matrix_updates(model(), optimizer)
    assert facts == ()
    assert (finding.code, finding.severity) == ("optimizer-untraced", "warning")
    assert "TracerBoolConversionError" in finding.message


def test_an_unknown_number_of_iterations_warns() -> None:
    dynamic = optax.inject_hyperparams(optax.contrib.muon)(learning_rate=1e-3)
    facts, findings = matrix_updates(model(), dynamic)
    assert facts
    assert {f.code for f in findings} == {"unknown-trip-count"}
    assert matrix_updates(model(), optax.adamw(1e-3)) == ((), ())
