"""From a loss to a problem: layers found and folded, batches named, errors explained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardlib.annotation.model import read
from shardlib.annotation.names import Model
from shardlib.errors import AnnotationError, BatchError, TracingError
from shardlib.tracing.folding import fold
from shardlib.tracing.program import Run, find_repeats, flatten
from shardlib.tracing.trace import trace
from tests.zoo import CASES, Case

BATCH = {"tokens": jax.ShapeDtypeStruct((8, 16), jnp.int32)}


def tower(layers: int, *, scale: bool = False, wrapped: bool = False, skip: int = 0) -> Model:
    """A residual tower written as a Python loop over a list of layers; dropout draws from one
    key.
    """
    matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    params = {
        "embed": jax.ShapeDtypeStruct((32, 8), jnp.float32),
        "layers": [{"up": matrix, "down": matrix} for _ in range(layers)],
    }
    state = {"key": jax.eval_shape(jax.random.key, 0)}

    def apply(p: Any, key: Any, batch: Any) -> jax.Array:
        x = p["embed"][batch["tokens"]]
        seen = [x]
        for i, layer in enumerate(p["layers"]):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = x + jnp.where(kept, jax.nn.relu(x @ layer["up"]) @ layer["down"], 0) * (
                float(i + 1) if scale else 1.0
            )
            seen.append(x)
            if skip and i >= skip:
                x = x + seen[i - skip]
        return jnp.mean((x @ p["embed"].T) ** 2)

    def pure(p: Any, s: Any, batch: Any) -> Any:
        loss = (jax.jit(apply) if wrapped else apply)(p, s["key"], batch)
        return loss, ({"loss": loss}, {"key": jax.random.fold_in(s["key"], 99)})

    return Model(
        name="tower",
        init=None,
        params=params,
        state=state,
        axes={"embed": ("vocab", "embed")},
        bind=lambda loss: pure,  # type: ignore[arg-type]
        rebuild=None,
    )  # type: ignore[arg-type]


def real(model: Model) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: jnp.asarray(random.normal(size=s.shape) * 0.2, s.dtype), model.params
    )
    return (
        params,
        {"key": jax.random.key(7)},
        {"tokens": jnp.asarray(random.integers(0, 32, (8, 16)), jnp.int32)},
    )


@pytest.mark.long
@pytest.mark.parametrize("wrapped", [False, True])
def test_126_layers_are_found(wrapped: bool) -> None:
    traced = trace(tower(126, wrapped=wrapped), None, BATCH, policies=("none",))  # type: ignore[arg-type]
    assert [run.count for run in find_repeats(traced.program)] == [126]
    step = traced.problem.steps["none"]
    assert [(len(source.paths), source.stacked) for source in step.inputs] == [
        (1, False),
        (126, True),
        (126, True),
        (1, False),
        (1, False),
    ]
    assert step.inputs[2].paths[125] == "layers.125.up"
    assert step.graph.values[step.graph.inputs[1]].shape == (126, 8, 8)
    assert [step.graph.values[value].shape for value in step.gradients] == [
        (32, 8),
        (126, 8, 8),
        (126, 8, 8),
    ]
    assert len(step.graph.ops) < 150 < 126 * 5 < len(traced.problem.forward.ops)
    matmuls = sum(
        op.flops * step.graph.trips(op.region) for op in step.graph.ops if op.kind == "dot_general"
    )
    assert matmuls == 3 * sum(
        op.flops for op in traced.problem.forward.ops if op.kind == "dot_general"
    )


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"scale": True}, {"wrapped": True}, {"skip": 2}], ids=str)
@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_folded_equals_written_out(options: dict[str, Any], remat: str) -> None:
    model = tower(5, **options)
    args = real(model)
    pure = model.bind(None)  # type: ignore[arg-type]
    program = flatten(jax.make_jaxpr(pure)(*args))
    folded = fold(program, set(range(len(jax.tree.leaves(args[0])))))
    leaves = jax.tree.leaves(args)

    def value(stack: list[Any]) -> jax.Array:
        return folded.evaluate(stack, remat=remat)[0]

    expected, gradients = jax.value_and_grad(pure, has_aux=True)(*args)
    stack = folded.stack(leaves)
    floats = [i for i, array in enumerate(stack) if jnp.issubdtype(array.dtype, jnp.floating)]
    found, grads = jax.value_and_grad(
        lambda ours: value([ours.get(i, array) for i, array in enumerate(stack)])
    )({i: stack[i] for i in floats})
    np.testing.assert_allclose(found, expected[0], rtol=1e-6)
    flat = jax.tree.leaves(gradients)
    for i in floats:
        wanted = (
            jnp.stack([flat[j] for j in folded.inputs[i]])
            if i in folded.stacks
            else flat[folded.inputs[i][0]]
        )
        np.testing.assert_allclose(grads[i], wanted, rtol=1e-5, atol=1e-6)
    assert [loop.run.count for loop in folded.loops] == (
        [3] if "skip" in options else [5]
    )  # a longer run would reach two layers back


def test_crossing_value_is_the_residual_stream() -> None:
    program = flatten(jax.make_jaxpr(tower(6).bind(None))(*real(tower(6))))  # type: ignore[arg-type]
    folded = fold(program, set())
    (loop,) = folded.loops
    assert [program.avals[start].shape for start, _, _ in loop.carried.values()] == [(8, 16, 8)]


def test_encoder_then_decoder() -> None:
    def program(x: jax.Array, a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
        for w in a:
            x = jnp.tanh(x @ w)
        for w in b:
            x = jnp.sin(x @ w) + x
        return x

    w = [jnp.eye(4)] * 3
    assert find_repeats(flatten(jax.make_jaxpr(program)(jnp.eye(4), w, w))) == (
        Run(0, 2, 3),
        Run(6, 3, 3),
    )


def test_a_penalty_on_every_layer_hides_no_layers() -> None:
    def program(x: jax.Array, w: list[jax.Array]) -> jax.Array:
        value = jnp.float32(1)
        for one in w:
            x = x + jnp.tanh(x @ one)
        for one in (*w, x):  # as many equations to a turn, and a turn more
            value = value + (one**2).sum()
        return value

    w = [jnp.eye(4)] * 3
    assert find_repeats(flatten(jax.make_jaxpr(program)(jnp.eye(4), w))) == (Run(0, 3, 3),)


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.annotated], ids=lambda case: case.name
)
def test_zoo_is_rewritten_without_change(case: Case) -> None:
    model = read(case.init)
    traced = trace(
        model, case.loss, dict(case.batch), batch_axes=case.batch_axes, optimizer=optax.adam(1e-3)
    )
    params, state = model.init(0)
    args = (params, state, dict(case.batch))
    (loss, _), gradients = jax.jit(jax.value_and_grad(model.bind(case.loss), has_aux=True))(*args)
    largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(gradients))
    (found, _), others = jax.jit(jax.value_and_grad(traced.rewrite(remat="full"), has_aux=True))(
        *args
    )
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6 * largest)
    assert traced.problem.forward.findings == ()
    assert {
        parameter.state_bytes_per_element
        for parameter in traced.problem.parameters
        if parameter.trained
    } == {8.0}
    for step in traced.problem.steps.values():
        assert step.graph.findings == ()
        shapes = [step.graph.values[i].shape for i in step.graph.inputs_of("parameter")]
        assert [step.graph.values[value].shape for value in step.gradients] == shapes


def test_problem() -> None:
    problem = trace(tower(3), None, BATCH, optimizer=optax.adamw(1e-3)).problem  # type: ignore[arg-type]
    assert problem.batch == (("batch.tokens", (8, 16), "int32", ("batch", "seq")),)
    assert (problem.tokens, problem.compute_dtype, list(problem.steps)) == (
        128,
        "float32",
        ["none", "full", "dots"],
    )
    assert (problem.parameters[0].path, problem.parameters[0].axes) == ("embed", ("vocab", "embed"))
    assert [value.path for value in problem.forward.values[:9]][-3:] == [
        "layers.2.up",
        "state.key",
        "batch.tokens",
    ]
    assert (
        problem.steps["full"].graph.flops
        > problem.steps["dots"].graph.flops
        > problem.steps["none"].graph.flops
    )


def test_policies_without_layers() -> None:
    assert list(trace(tower(1), None, BATCH).problem.steps) == ["none"]  # type: ignore[arg-type]


def test_rewrite_refuses_other_shapes() -> None:
    model = tower(2)
    rewritten = trace(model, None, BATCH).rewrite()  # type: ignore[arg-type]
    params, state, _ = real(model)
    with pytest.raises(
        TracingError, match=r"batch.tokens: int32\[8, 16\] traced, int32\[4, 16\] given"
    ):
        rewritten(params, state, {"tokens": jnp.zeros((4, 16), jnp.int32)})


def with_loss(loss: Any) -> Model:
    return Model(
        name="tiny",
        init=None,
        params={"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)},
        state={},
        axes={},  # type: ignore[arg-type]
        bind=lambda f: lambda p, s, b: (f(p, b), ({}, s)),
        rebuild=None,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, b: p["w"] @ b, "returned float32[4, 8]; a loss is one floating-point number"),
        (lambda p, b: jnp.argmax(p["w"]), "returned int32[]; a loss is one floating-point number"),
        (
            lambda p, b: jnp.sum(b @ p["w"]),
            "It was called with the model and a batch of batch float32[4, 8].",
        ),
    ],
)
def test_bad_losses(loss: Any, message: str) -> None:
    with pytest.raises(TracingError) as error:
        trace(with_loss(loss), loss, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    assert message in str(error.value)


def test_loss_that_fails_keeps_its_cause() -> None:
    def loss(p: Any, b: Any) -> Any:
        raise KeyError("labels")

    with pytest.raises(TracingError, match="KeyError: 'labels'") as error:
        trace(with_loss(loss), loss, jnp.zeros((4, 8)))
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("batch", "axes", "message"),
    [
        ({"x": (8, 4), "y": (6,)}, None, "batch.y: shape (6,)"),
        ({"x": (8, 4)}, {"x": ("batch",)}, "batch.x: 1 names ('batch',) for shape (8, 4)"),
        ({"x": (8, 4)}, {"z": ("batch", None)}, "batch_axes has another structure than the batch"),
        ({"x": (8, 4)}, {"x": "batch"}, "batch.x: 'batch' is not a tuple of names"),
    ],
)
def test_bad_batches(batch: dict[str, tuple[int, ...]], axes: Any, message: str) -> None:
    arrays = {name: jnp.zeros(shape) for name, shape in batch.items()}
    with pytest.raises(BatchError) as error:
        trace(tower(1), None, arrays, batch_axes=axes)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_axes_of_the_wrong_rank() -> None:
    model = replace(tower(1), axes={"embed": ("vocab",), "layers.0.up": ("a", "b", "c")})
    with pytest.raises(AnnotationError) as error:
        trace(model, None, BATCH)  # type: ignore[arg-type]
    assert "embed: 1 names" in str(error.value)
    assert "layers.0.up: 3 names" in str(error.value)
