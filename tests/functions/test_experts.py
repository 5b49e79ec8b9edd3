"""Tokens visit the experts that they chose, and no others; what is dropped is what a queue in the
order of the tokens drops, and it is counted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.errors import ModelError
from shardlib.functions.attention import form_of
from shardlib.functions.experts import ExpertForm, visit
from tests.functions import numpy_experts

BATCH, SEQ, WIDTH, INNER, COUNT = 2, 12, 6, 5, 4


def arrays(per_token, *, skew=0.0, seed=0, gated=True):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(BATCH, SEQ, WIDTH))
    chosen = np.argsort(
        -(draw.gumbel(size=(BATCH, SEQ, COUNT)) + skew * np.arange(COUNT)), axis=-1
    )[..., :per_token].astype(np.int32)
    weights = draw.uniform(size=chosen.shape)
    up, gate = (draw.normal(size=(COUNT, WIDTH, INNER)) for _ in range(2))
    down = draw.normal(size=(COUNT, INNER, WIDTH))
    return x, weights, chosen, up, down, *([gate] if gated else [])


def by_loops(given, **options):
    x, weights, chosen, *rest = given
    out, dropped = numpy_experts.visit(
        x.reshape(-1, WIDTH),
        weights.reshape(-1, weights.shape[-1]),
        chosen.reshape(-1, chosen.shape[-1]),
        *rest,
        **options,
    )
    return out.reshape(x.shape), dropped


@pytest.mark.parametrize("capacity", [None, 0.5, 1.0, 1.25, 8.0])
@pytest.mark.parametrize(
    ("per_token", "gated", "activation"), [(1, True, "silu"), (2, True, "gelu"), (3, False, "relu")]
)
@pytest.mark.parametrize("skew", [0.0, 50.0], ids=["even", "skewed"])
def test_results_and_drops_are_those_of_loops(per_token, gated, activation, capacity, skew):
    given = arrays(per_token, skew=skew, gated=gated)
    out, dropped = by_loops(given, activation=activation, capacity=capacity)
    found, lost = visit(
        *(jnp.asarray(array, None if array.dtype == np.int32 else jnp.float32) for array in given),
        activation=activation,
        capacity=capacity,
    )
    np.testing.assert_allclose(found, out, rtol=1e-5, atol=1e-5 * np.abs(out).max())
    assert int(lost) == dropped and lost.dtype == jnp.int32
    if capacity is None or capacity == 8.0:
        assert dropped == 0
    elif skew and per_token == 1:
        assert dropped == BATCH * SEQ - int(np.ceil(capacity * BATCH * SEQ / COUNT))


@pytest.mark.parametrize("capacity", [None, 0.75])
def test_gradients_are_those_of_differences(capacity):
    x, weights, chosen, up, down, gate = map(jnp.asarray, arrays(2, skew=1.0))
    ones = np.random.default_rng(1).normal(size=x.shape)

    def loss(*leaves):
        x, weights, up, down, gate = leaves
        return jnp.sum(visit(x, weights, chosen, up, down, gate, capacity=capacity)[0] * ones)

    leaves = [np.asarray(leaf, np.float32) for leaf in (x, weights, up, down, gate)]
    slopes = jax.grad(loss, argnums=tuple(range(5)))(*leaves)
    for place, slope in enumerate(slopes):
        way = np.random.default_rng(place).normal(size=slope.shape)

        def along(step, place=place, way=way):
            moved = [np.asarray(leaf, np.float64) for leaf in leaves]
            moved[place] = moved[place] + step * way
            x, weights, *rest = moved
            return np.sum(
                by_loops((x, weights, np.asarray(chosen), *rest), capacity=capacity)[0] * ones
            )

        assert float(np.sum(slope * way)) == pytest.approx(
            (along(1e-5) - along(-1e-5)) / 2e-5, rel=2e-4, abs=1e-3
        )


def test_the_call_tells_its_form():
    given = [jnp.asarray(array) for array in arrays(2, gated=False)]
    (equation,) = jax.make_jaxpr(lambda *a: visit(*a, activation="gelu", capacity=1.5))(*given).eqns
    assert form_of(equation) == ExpertForm(activation="gelu", gated=False, capacity=1.5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"capacity": 0.0}, "capacity 0.0 of experts is not positive"),
        ({"capacity": -1.0}, "capacity -1.0 of experts is not positive"),
        (
            {"activation": "tanh"},
            "activation 'tanh' of experts is not known\nTry: one of silu, relu, gelu, gelu_tanh",
        ),
        (
            {"x": (2, 3, 7)},
            r"x is \(2, 3, 7\); with up \(4, 6, 5\) and x \(2, 3, 7\) it must be \(2, 3, 6\)",
        ),
        ({"chosen": (2, 3, 5), "weights": (2, 3, 5)}, "a token cannot visit 5 of 4 experts"),
        ({"down": (4, 6, 5)}, r"down is \(4, 6, 5\); with up .* it must be \(4, 5, 6\)"),
        ({"up": (6, 5)}, r"up is \(6, 5\); it has three dims"),
    ],
)
def test_what_does_not_fit(changed, message):
    shapes = {
        "x": (2, 3, 6),
        "weights": (2, 3, 2),
        "chosen": (2, 3, 2),
        "up": (4, 6, 5),
        "down": (4, 5, 6),
    } | {k: v for k, v in changed.items() if isinstance(v, tuple)}
    options = {k: v for k, v in changed.items() if not isinstance(v, tuple)}
    with pytest.raises(ModelError, match=message):
        visit(
            *(
                jnp.zeros(shape, jnp.int32 if name == "chosen" else jnp.float32)
                for name, shape in shapes.items()
            ),
            **options,
        )
