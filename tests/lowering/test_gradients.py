"""Weights are gathered and their gradients reduce-scattered as planned, on meshes whose axes are
kept in physical parts, with the numbers of one device.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardlib
from shardlib.layout import MeshShape
from shardlib.lowering import accumulation, weights
from shardlib.lowering.collectives import Regions
from shardlib.lowering.contractions import ModelContraction
from shardlib.lowering.mesh import axis_names, device_mesh, physical_axes
from shardlib.lowering.uses import loss_equations, weight_uses
from shardlib.lowering.weights import LANES, SUBLANES, _scattered_rows
from shardlib.planner.plan import Link
from shardlib.tracing.program import flatten
from shardlib.verification.traffic import read_traffic
from tests.zoo import CASES
from tests.zoo.case import leaves_by_path
from tests.zoo.parity import capture, errors, placed_state, relative_errors

NAMES = (
    "decoder-annotated",
    "decoder-scan-annotated",
    "vit-unannotated",
    "resnet-groupnorm-unannotated",
    "linen-decoder-annotated",
    "encoder-decoder-annotated",
)
KINDS = [case for case in CASES if case.name in NAMES]
SCAN = next(case for case in CASES if case.name == "decoder-scan-annotated")
TORUS = (Link(kind="torus", ways=2), Link(kind="torus", ways=2))


def in_parts(
    case, mesh: dict[str, int], zero: int = 3, links: tuple[Link, ...] = TORUS, **pin
) -> shardlib.Program:
    """A program whose fsdp axis runs along the dims of a torus that these devices only play."""
    given = {
        "topology": "cpu:8",
        "pin": {"mesh": mesh, "zero": zero, "microbatches": 1, "remat": "none", **pin},
        "name": case.name,
        "batch_axes": None if case.batch_axes is None else dict(case.batch_axes),
    }
    plan = shardlib.plan(case.init, case.loss, capture(), dict(case.batch), **given)
    placed = dataclasses.replace(plan, placement=(("fsdp", links),))
    return shardlib.compile(
        case.init,
        case.loss,
        capture(),
        dict(case.batch),
        plan=placed,
        batch_axes=given["batch_axes"],
        name=case.name,
    )


def steps_like_one_device(program: shardlib.Program, case) -> None:
    state, metrics = program.step(placed_state(program, 0), dict(case.batch))
    wrong = errors(float(metrics["loss"]), leaves_by_path(state.opt_state), case.reference(0))
    assert max(wrong.values()) <= 1, max(wrong.items(), key=lambda item: item[1])


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ({"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}), ids=str)
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_axes_in_parts_compute_the_numbers_of_one_device(case, mesh):
    program = in_parts(case, mesh)
    assert program.mesh.axis_names[2:4] == ("fsdp_0", "fsdp_1")
    steps_like_one_device(program, case)


@pytest.mark.long
@pytest.mark.parametrize(("zero", "microbatches"), [(3, 1), (1, 2)])
def test_what_rematerialised_layers_gather_is_right_for_products_and_gradients(zero, microbatches):
    """Tensor shards the sequence between matmuls; what they read is gathered in the layers."""
    rules = [["batch", ["data", "fsdp"]], ["mlp", "tensor"], ["heads", "tensor"], ["seq", "tensor"]]
    mesh = {"fsdp": 4, "tensor": 2}
    program = in_parts(SCAN, mesh, zero, rules=rules, remat="full", microbatches=microbatches)
    steps_like_one_device(program, SCAN)
    found = read_traffic(program.compiled().as_text(), program.plan.mesh).collectives
    assert any(one.kind == "all-gather" and one.axes == ("tensor",) for one in found)


@pytest.mark.long
def test_three_parts_are_gathered_and_scattered_one_after_another():
    links = (*TORUS, Link(kind="torus", ways=2))
    steps_like_one_device(in_parts(SCAN, {"fsdp": 8}, links=links), SCAN)


@pytest.mark.long
def test_gradients_of_cut_weights_are_scattered_and_not_reduced_whole():
    links = (Link(kind="torus", ways=4), Link(kind="torus", ways=2))
    program = in_parts(SCAN, {"fsdp": 8}, links=links)
    found = read_traffic(program.compiled().as_text(), program.plan.mesh).collectives
    cut = [p for p in program.plan.parameters if "fsdp" in p.rest.axes]
    whole = sum(np.prod(p.shape) * 4 for p in program.plan.parameters if "fsdp" not in p.rest.axes)
    scattered = sum(c.total_bytes for c in found if c.kind == "reduce-scatter")
    assert scattered == sum(
        np.prod(p.shape) * 4 * (1 / 4 + 1 / 8) for p in cut
    )  # the results of both steps
    assert sum(c.total_bytes for c in found if c.kind == "all-reduce") <= whole + 64


@pytest.mark.long
def test_lookups_cut_along_rows_or_columns_and_indices_out_of_range():
    table = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    tokens = np.array([[0, 3, 15, 99], [5, 5, 5, 1], [2, 7, 8, 9], [14, 13, 0, 0]] * 2, np.int32)

    for mode in ("clip", "fill"):

        def loss(params, batch, mode=mode):
            rows = jnp.take(params["table"], batch["tokens"], axis=0, mode=mode, fill_value=0.0)
            return jnp.mean((rows @ params["out"]) ** 2)

        out = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
        params = {"table": jnp.asarray(table), "out": jnp.asarray(out)}
        model = shardlib.tree(
            lambda key, params=params: params,
            {"table": ("vocab", "embed"), "out": ("embed", "answer")},
        )
        for rules in (
            [("batch", ["data", "fsdp"]), ("vocab", "tensor")],
            [("batch", ["data", "fsdp"]), ("embed", "tensor")],
        ):
            given = {"batch_axes": {"tokens": ("batch", "seq")}}
            plan = shardlib.plan(
                model,
                loss,
                capture(),
                {"tokens": tokens},
                topology="cpu:8",
                **given,
                pin={
                    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
                    "zero": 3,
                    "rules": rules,
                    "microbatches": 1,
                },
            )
            switched = dataclasses.replace(
                plan, placement=(("fsdp", (Link(kind="switch", ways=2),)),)
            )
            program = shardlib.compile(
                model, loss, capture(), {"tokens": tokens}, plan=switched, **given
            )
            wrong = relative_errors(program, loss, {"tokens": tokens})
            assert max(wrong.values()) < 1e-5, (mode, rules, wrong)


def test_weights_are_followed_through_casts_transpositions_reshapes_and_scans():
    def loss(stack, table, x, tokens):
        def layer(x, w):
            heads = w.astype(jnp.bfloat16).reshape(8, 4, 2)
            return (
                x
                + jax.lax.dot_general(x.astype(jnp.bfloat16), heads, (((2,), (0,)), ((), ())))
                .reshape(x.shape)
                .astype(x.dtype),
                None,
            )

        x = x + table[tokens]
        x, _ = jax.lax.scan(layer, x, stack)
        return (x @ table.T).sum()

    stack, table, x = (
        np.ones((3, 8, 8), np.float32),
        np.ones((16, 8), np.float32),
        np.ones((2, 5, 8), np.float32),
    )
    jaxpr = jax.make_jaxpr(loss)(stack, table, x, np.zeros((2, 5), np.int32))
    uses = weight_uses(tuple(loss_equations(flatten(jaxpr), 2)))
    found = sorted((use.equation.name, use.view.parameter, use.view.dims) for use in uses.values())
    assert found == [
        ("dot_general", 0, (1, 2, None)),
        ("dot_general", 1, (1, 0)),
        ("gather", 1, (0, 1)),
    ]


def test_names_of_a_mesh_in_parts():
    mesh, _ = device_mesh(MeshShape(data=2, fsdp=4), parts={"fsdp": (2, 2)})
    assert physical_axes(mesh, ("data", "fsdp")) == ("data", "fsdp_0", "fsdp_1")
    assert axis_names(MeshShape(fsdp=4), {})[0] == (
        "stage",
        "data",
        "fsdp",
        "expert",
        "context",
        "tensor",
    )


def test_a_users_own_layouts_hold_on_a_mesh_in_parts():
    def loss(params, batch):
        hidden = jax.lax.with_sharding_constraint(
            batch["x"] @ params["w"], jax.sharding.PartitionSpec(("data", "fsdp"), "tensor")
        )
        return jnp.mean(hidden**2)

    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32))}
    batch = {"x": np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)}
    model = shardlib.tree(lambda key: params, {"w": ("embed", "mlp")})
    plan = shardlib.plan(
        model,
        loss,
        optax.sgd(0.1),
        batch,
        topology="cpu:8",
        pin={"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3},
    )
    program = shardlib.compile(
        model,
        loss,
        optax.sgd(0.1),
        batch,
        plan=dataclasses.replace(plan, placement=(("fsdp", TORUS),)),
    )
    _, metrics = program.step(program.init(0), batch)
    np.testing.assert_allclose(
        float(metrics["loss"]), np.mean((batch["x"] @ np.asarray(params["w"])) ** 2), rtol=1e-5
    )


@pytest.mark.long
@pytest.mark.parametrize("microbatches", (1, 2))
def test_gradients_of_a_head_that_do_not_wait_are_the_same(monkeypatch, microbatches):
    """With links that are not memory, every contraction outside of the layers is made to wait for
    its partial sums; then none is.
    """
    found = []
    rules = [["batch", ["data", "fsdp"]], ["mlp", "tensor"], ["heads", "tensor"]]
    pin = {"rules": rules, "microbatches": microbatches}
    for large in (0, math.inf):
        monkeypatch.setattr(weights, "LARGE_RESULT", large)
        network = (Link(kind="network", ways=4),)
        program = in_parts(SCAN, {"fsdp": 4, "tensor": 2}, 1, network, **pin)
        state, metrics = program.step(placed_state(program, 0), dict(SCAN.batch))
        selects = program.lower().as_text().count("stablehlo.select")
        found.append((selects, [metrics["loss"], *jax.tree.leaves(state.opt_state)]))
    (waiting, one), (free, other) = found
    assert waiting > free
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * float(np.abs(b).max()))


#: Shapes of both operands, and their dimension numbers: contracting dims, batch dims.
CONTRACTIONS = {
    "weight": ((2, 3, 5), (5, 7), (((2,), (0,)), ((), ()))),
    "contracted last": ((2, 3, 5), (7, 5), (((2,), (1,)), ((), ()))),
    "two dims, crossed": ((5, 2, 4), (4, 7, 5), (((0, 2), (2, 0)), ((), ()))),
    "scores": ((2, 3, 6, 5), (2, 4, 3, 5), (((3,), (3,)), ((0, 1), (0, 2)))),
    "batch behind": ((3, 5, 2), (5, 7, 2, 4), (((1,), (0,)), ((2,), (2,)))),
    "vector": ((5,), (5, 7), (((0,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("case", CONTRACTIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_contractions_are_those_of_jax(case: str, dtype: jnp.dtype) -> None:
    left_shape, right_shape, dims = CONTRACTIONS[case]
    numbers = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(numbers.integers(-4, 5, shape), dtype)

    left, right = drawn(left_shape), drawn(right_shape)

    def run(left: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)

    made, back = jax.vjp(run, left, right)
    cotangent = jnp.asarray(numbers.integers(-4, 5, made.shape), made.dtype)
    contraction = ModelContraction(equation=flatten(jax.make_jaxpr(run)(left, right)).equations[0])
    for wanted, (leaf, gradient) in enumerate(zip((left, right), back(cotangent), strict=True)):
        like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        found = contraction.operand_gradient(wanted, (left, right), cotangent, like)
        assert found.dtype == gradient.dtype
        np.testing.assert_array_equal(found, gradient)


SHAPES = (
    ((8 * SUBLANES, 10 * LANES), 0, "tiles"),
    ((8 * SUBLANES, 100), 0, "tiles of one row's columns"),
    ((8 * SUBLANES, LANES + 2), 0, "tiles, filled up"),
    ((3 * LANES, 16 * SUBLANES), 1, "tiles along the last dim"),
    ((24, 3, LANES), 0, "rows"),
    ((40, 5), 0, "short rows"),
)


@pytest.mark.parametrize(("shape", "dim", "_what"), SHAPES, ids=[what for _, _, what in SHAPES])
def test_scattered_rows_are_those_of_the_sum(shape: tuple[int, ...], dim: int, _what: str):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("major", "minor"))
    partial = np.random.default_rng(0).integers(-99, 99, (8, *shape)).astype(np.float32)
    cut = [("major", "minor") if at == dim else None for at in range(len(shape))]
    scattered = jax.shard_map(
        lambda one: _scattered_rows(one[0], dim, ("major", "minor"), stacked=False),
        mesh=mesh,
        in_specs=PartitionSpec(("major", "minor")),
        out_specs=PartitionSpec(*cut),
    )
    np.testing.assert_array_equal(jax.jit(scattered)(partial), partial.sum(0))


@pytest.mark.parametrize("spec", [PartitionSpec(None, "data"), PartitionSpec("data", None)])
def test_gradients_are_not_reduced_along_axes_of_one_device(spec: PartitionSpec) -> None:
    mesh, _ = device_mesh(MeshShape(data=8))
    region = Regions(mesh=mesh, torus=False).manual(jnp.sin, (spec,), spec)
    array = np.linspace(0.0, 1.0, 64, dtype=np.float32).reshape(8, 8)
    place = NamedSharding(mesh, spec)
    gradient = jax.jit(jax.grad(lambda x: region(x).sum()), in_shardings=place, out_shardings=place)
    compiled = gradient.lower(array).compile()
    assert "all-reduce" not in (compiled.as_text() or "")
    np.testing.assert_allclose(compiled(jax.device_put(array, place)), np.cos(array), rtol=1e-6)


def test_layers_add_their_gradients_to_the_sums_of_microbatches(monkeypatch):
    """No stack of the gradients of all layers lives beside the sums."""
    layers, width = 8, 256

    def loss(params, batch):
        y = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["w"])[0]
        return jnp.mean(y**2)

    def temporaries():
        program = shardlib.compile(
            shardlib.tree(lambda key: {"w": jax.random.normal(key, (layers, width, width)) / 16}),
            loss,
            optax.sgd(0.1),
            {"x": jax.ShapeDtypeStruct((32, width), jnp.float32)},
            topology="cpu:8",
            pin={"mesh": {"fsdp": 8}, "zero": 3, "microbatches": 4, "remat": "full"},
        )
        return program.compiled().memory_analysis().temp_size_in_bytes

    in_place = temporaries()
    monkeypatch.setattr(accumulation, "_outer_loops", lambda program: frozenset())
    assert temporaries() - in_place > 0.8 * 4 * layers * width * width / 8
