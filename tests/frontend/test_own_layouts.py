"""Programs that bring layouts of their own, unchanged: constraints, explicit mode, `shard_map`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import shardlib
from shardlib.errors import ArgumentError, PinError, TracingError
from tests.zoo import explicit

Loss = Callable[[Any, Any], jax.Array]
AUTO = (AxisType.Auto,) * 2
EXPLICIT = (AxisType.Explicit,) * 2
PIN = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}
random = np.random.default_rng(0)
WEIGHTS = {
    name: random.normal(size=shape).astype(np.float32) / 6
    for name, shape in (("a", (32, 64)), ("b", (64, 32)))
}
BATCH = {name: random.normal(size=(16, 32)).astype(np.float32) for name in ("x", "y")}


def mesh(types: tuple[AxisType, ...], devices: int = 8) -> Mesh:
    grid = np.array(jax.devices()[:devices]).reshape(-1, 2)
    return Mesh(grid, ("rows", "model"), axis_types=types)


def of_hidden(constrain: Callable[[jax.Array], jax.Array]) -> Loss:
    def loss(params: Any, batch: Any) -> jax.Array:
        hidden = jax.nn.relu(constrain(batch["x"] @ params["a"]))
        return jnp.mean((hidden @ params["b"] - batch["y"]) ** 2)

    return loss


def constraint(layout: Any) -> Loss:
    return of_hidden(lambda hidden: jax.lax.with_sharding_constraint(hidden, layout))


plain = of_hidden(lambda hidden: hidden)


def by_einsum(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.einsum("bd,df->bf", batch["x"], params["a"], out_sharding=P("rows", "model"))
    out = jnp.einsum("bf,fd->bd", jax.nn.relu(hidden), params["b"], out_sharding=P("rows", None))
    return jnp.mean((out - batch["y"]) ** 2)


def in_shards(own: Mesh | None) -> Loss:
    def loss(params: Any, batch: Any) -> jax.Array:
        out = jax.shard_map(
            lambda x, a, b: jax.lax.psum(jax.nn.relu(x @ a) @ b, "model"),
            mesh=own,
            in_specs=(P("rows", None), P(None, "model"), P("model", None)),
            out_specs=P("rows", None),
        )(batch["x"], params["a"], params["b"])
        return jnp.mean((out - batch["y"]) ** 2)

    return loss


def by_hand(x: jax.Array) -> jax.Array:
    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, P("rows", "model"))

    same.defvjp(
        lambda x: (same(x), None),
        lambda _, g: (jax.lax.with_sharding_constraint(g, P("rows", "model")),),
    )
    return same(x)


#: Loss, and the mesh that is set around it.
STYLES: dict[str, tuple[Loss, Callable[[], AbstractContextManager[Any]]]] = {
    "names of ours": (constraint(P("fsdp", "tensor")), nullcontext),
    "names alone": (constraint(P("rows", "model")), nullcontext),
    "mesh in force": (constraint(P("rows", "model")), lambda: jax.set_mesh(mesh(AUTO))),
    "NamedSharding": (constraint(NamedSharding(mesh(AUTO), P("rows", "model"))), nullcontext),
    "4 of 8 devices": (constraint(NamedSharding(mesh(AUTO, 4), P("rows", "model"))), nullcontext),
    "custom derivative": (of_hidden(by_hand), nullcontext),
    "remat": (
        lambda p, b: jax.checkpoint(constraint(P("rows", "model")))(p, b),
        nullcontext,
    ),
    "reshard": (of_hidden(lambda h: reshard(h, P("rows", "model"))), nullcontext),
    "reshard, explicit": (
        of_hidden(lambda h: reshard(h, P("rows", None))),
        lambda: jax.set_mesh(mesh(EXPLICIT)),
    ),
    "einsum": (by_einsum, nullcontext),
    "einsum, explicit": (by_einsum, lambda: jax.set_mesh(mesh(EXPLICIT))),
    "jit": (
        of_hidden(jax.jit(lambda h: h, out_shardings=NamedSharding(mesh(AUTO), P("rows")))),
        nullcontext,
    ),
    "shard_map": (in_shards(mesh(AUTO)), nullcontext),
    "shard_map, mesh in force": (in_shards(None), lambda: jax.set_mesh(mesh(EXPLICIT))),
    "shard_map, explicit": (in_shards(mesh(EXPLICIT)), lambda: jax.set_mesh(mesh(EXPLICIT))),
    "shard_map, explicit mesh closed over": (in_shards(mesh(EXPLICIT)), nullcontext),
}
SHARDS = tuple(name for name in STYLES if name.startswith("shard_map"))


def descent(loss: Loss) -> Callable[[Any, Any], tuple[Any, Any]]:
    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
        return new, {"loss": value}

    return step


def stripped(plan: shardlib.Plan) -> dict[str, Any]:
    """What a plan decides and predicts."""
    words = json.loads(plan.to_json())
    apart = ("findings", "search", "model", "checksum")
    return {word: words[word] for word in words if word not in apart}


def own(plan: shardlib.Plan) -> str:
    """The one finding about layouts of the program."""
    (found,) = [one for one in plan.findings if one.code == "own-layouts"]
    return str(found)


def close(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = np.abs(np.asarray(other)).max()
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-5 * scale, rtol=0)


@pytest.fixture(scope="module")
def wanted() -> tuple[Any, Any]:
    return jax.jit(descent(plain))(WEIGHTS, BATCH)


MODEL = shardlib.tree(lambda key: jax.tree.map(jnp.asarray, WEIGHTS))


def planned(loss: Loss, **options: Any) -> shardlib.Plan:
    return shardlib.plan(MODEL, loss, optax.sgd(0.1), BATCH, topology="cpu:8", **options)


@pytest.fixture(scope="module")
def bare() -> dict[str, Any]:
    """The plan without layouts."""
    return stripped(planned(plain, pin=PIN))


@pytest.mark.parametrize("style", STYLES)
def test_compile_takes_layouts_out(style: str, wanted: tuple[Any, Any], bare: dict[str, Any]):
    loss, around = STYLES[style]
    with around():
        program = shardlib.compile(MODEL, loss, optax.sgd(0.1), BATCH, topology="cpu:8", pin=PIN)
        state, metrics = program.step(program.init(0), BATCH)
    close((state.params, metrics["loss"]), (wanted[0], wanted[1]["loss"]))
    assert "none of them is imposed" in own(program.plan)
    assert "test_own_layouts.py:" in own(program.plan)
    if style not in (*SHARDS, "remat") or style == "shard_map, mesh in force":
        assert stripped(program.plan) == bare
    assert not [one for one in program.plan.findings if one.code == "opaque-primitive"]


@pytest.mark.matrix
@pytest.mark.parametrize("style", STYLES)
def test_compile_step_takes_layouts_out(style: str, wanted: tuple[Any, Any]):
    loss, around = STYLES[style]
    with around():
        program = shardlib.compile_step(WEIGHTS, descent(loss), BATCH, topology="cpu:8", pin=PIN)
        state, metrics = program.step(program.init(0), BATCH)
    close((state, metrics), wanted)
    assert "test_own_layouts.py:" in own(program.plan)


@pytest.mark.parametrize("style", ("mesh in force", "einsum, explicit", "shard_map"))
def test_parallelize_and_marked_losses_take_layouts_out(style: str, wanted: tuple[Any, Any]):
    loss, around = STYLES[style]

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        value, gradients = shardlib.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), {"loss": value}

    with around():
        parallel = shardlib.parallelize(step, topology="cpu:8", pin=PIN)
        close(parallel(WEIGHTS, BATCH), wanted)
    assert "none of them is imposed" in own(parallel.program(WEIGHTS, BATCH).plan)


def test_layouts_are_priced_and_as_pins_they_are_the_plan():
    loss, _ = STYLES["NamedSharding"]
    names = {"a": ("embed", "mlp"), "b": ("mlp", "embed")}
    model = shardlib.tree(lambda key: jax.tree.map(jnp.asarray, WEIGHTS), names)

    def planned(**options: Any) -> shardlib.Plan:
        return shardlib.plan(model, loss, optax.sgd(0.1), BATCH, topology="cpu:8", **options)

    hints, pins = planned(), planned(honour="pins")
    assert dict(pins.mesh) == {"data": 4, "tensor": 2} and dict(hints.mesh) != dict(pins.mesh)
    assert pins.rules.axes_of("mlp") == ("tensor",) and pins.rules.axes_of("embed") == ()
    more = (pins.estimate.step_seconds - hints.estimate.step_seconds) * 1e3
    for plan in (hints, pins):
        told = re.search(r"([\d.]+) ms slower", own(plan))
        assert told is not None and float(told[1]) == pytest.approx(more, rel=0.01)
    program = shardlib.compile(
        model, loss, optax.sgd(0.1), BATCH, topology="cpu:8", honour="pins", plan=None
    )
    hidden = r'\[\{"data"(, "fsdp")?\}, \{"tensor"\}\]'
    assert re.search(hidden, program.lower().as_text())
    part = planned(honour="pins", pin={"zero": 0})
    assert dict(part.mesh) == {"data": 4, "tensor": 2}


def test_flax_calls_with_out_sharding_are_brought_unchanged():
    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            hidden = nnx.relu(self.up(x, out_sharding=P("rows", "model")))
            return self.down(hidden, out_sharding=P("rows", None))

    def loss(network: Network, batch: Any) -> jax.Array:
        return jnp.mean((network(batch["x"]) - batch["y"]) ** 2)

    with jax.set_mesh(mesh(EXPLICIT)):
        program = shardlib.compile(
            Network, loss, optax.sgd(0.1), BATCH, topology="cpu:8", pin=PIN, evaluation=loss
        )
        state = program.init(0)
        before = program.evaluate(state, BATCH)["loss"]
        _, metrics = program.step(state, BATCH)
    with jax.set_mesh(jax.make_mesh((1, 1), ("rows", "model"), axis_types=EXPLICIT)):
        wanted = loss(Network(nnx.Rngs(0)), jax.tree.map(jnp.asarray, BATCH))
    close((metrics["loss"], before), (wanted, wanted))
    assert "einsum or dot(out_sharding) P('rows', 'model') at test_own" in own(program.plan)


def test_four_of_eight_devices_as_pins():
    loss, _ = STYLES["4 of 8 devices"]
    plan = planned(loss, honour="pins")
    assert (plan.mesh["data"], plan.mesh["fsdp"], plan.mesh["tensor"]) == (2, 1, 2)


def test_logical_rules_of_flax_are_layouts_like_others():
    batch = {"x": BATCH["x"]}

    class Named(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.with_logical_constraint(nn.Dense(64)(x), ("rows", "hidden"))

    def loss(params: Any, batch: Any) -> jax.Array:
        return (Named().apply({"params": params}, batch["x"]) ** 2).mean()

    with nn.logical_axis_rules((("rows", "data"), ("hidden", "tensor"))):
        plan = shardlib.plan(
            shardlib.linen(Named(), batch["x"]),
            loss,
            optax.sgd(0.1),
            batch,
            topology="cpu:8",
            pin={"mesh": {"data": 4, "tensor": 2}},
            honour="pins",
        )
    assert "P('data', 'tensor')" in own(plan)
    assert plan.rules.axes_of("Dense_0.bias:0") == ("tensor",)


def test_layouts_that_contradict_each_other_or_a_pin_are_refused():
    def twice(params: Any, batch: Any) -> jax.Array:
        hidden = jax.lax.with_sharding_constraint(batch["x"] @ params["a"], P("rows", "model"))
        hidden = jax.lax.with_sharding_constraint(jax.nn.relu(hidden), P("rows", None))
        return jnp.mean((hidden @ params["b"] - batch["y"]) ** 2)

    with pytest.raises(PinError, match=r"is sharded by .*py:\d+ and whole by .*py:\d+"):
        planned(twice, honour="pins")
    assert "no plan has it: 'a:1' is sharded by" in own(planned(twice))
    with pytest.raises(
        PinError, match=r"mesh\.data is pinned to 8 and the program's layouts say 4"
    ):
        planned(STYLES["NamedSharding"][0], honour="pins", pin={"mesh": {"data": 8}})
    with pytest.raises(ArgumentError, match="honour is 'always'"):
        planned(twice, honour="always")
    with pytest.raises(ArgumentError, match="honour is 'always'"):
        shardlib.compile_step(WEIGHTS, descent(twice), BATCH, topology="cpu:8", honour="always")


@pytest.mark.parametrize(
    ("body", "says"),
    (
        (
            lambda x: jax.lax.psum(x, "rows", axis_index_groups=((0, 1), (2, 3))),
            "uses groups of devices in psum over rows",
        ),
        (lambda x: jax.lax.pshuffle(x, ("rows", "model"), [*range(8)]), "several mesh axes"),
    ),
)
def test_a_shard_map_that_cannot_be_rewritten_is_refused_with_its_line(
    body: Callable[[jax.Array], jax.Array], says: str
):
    def loss(params: Any, batch: Any) -> jax.Array:
        own = mesh(AUTO)
        x = jax.shard_map(
            body, mesh=own, in_specs=(P("rows"),), out_specs=P("rows"), check_vma=False
        )(batch["x"])
        return jnp.mean((x @ params["a"] @ params["b"] - batch["y"]) ** 2)

    with pytest.raises(TracingError, match=rf"test_own_layouts\.py:\d+(.|\n)*{says}(.|\n)*Try: "):
        planned(loss)


def test_collectives_in_shards_have_their_global_meaning():
    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(w, "rows", axis=0, tiled=True)
        out = jax.lax.psum_scatter(x @ whole, "model", scatter_dimension=1, tiled=True)
        out = out - jax.lax.pmax(jnp.max(jnp.abs(out)), ("rows", "model"))
        out = out + jax.lax.axis_index("rows") + 10 * jax.lax.axis_index("model")
        turned = jax.lax.ppermute(out, "rows", [(at, (at + 1) % 4) for at in range(4)])
        back = jax.lax.all_to_all(turned, "rows", split_axis=1, concat_axis=0, tiled=True)
        return back * jax.lax.axis_size("model")

    auto = mesh(AUTO)
    specs = {"in_specs": (P("rows", "model"), P(("model", "rows"), None))}
    function = jax.shard_map(body, mesh=auto, **specs, out_specs=P("rows", "model"))
    given = [random.normal(size=shape).astype(np.float32) for shape in ((16, 32), (32, 64))]

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        out = function(batch["x"], params["w"])
        return params, {"out": out}

    program = shardlib.compile_step(
        {"w": given[1]}, step, {"x": given[0]}, topology="cpu:8", pin={"mesh": {"data": 8}}
    )
    _, found = program.step(program.init(0), {"x": given[0]})
    close(found["out"], jax.jit(function)(*given))


def test_arrays_with_a_layout_in_their_type_may_be_closed_over():
    weights = {
        name: jax.device_put(WEIGHTS[name], NamedSharding(mesh(EXPLICIT), layout))
        for name, layout in (("a", P(None, "model")), ("b", P("model", None)))
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        return plain({"a": params["a"], "b": weights["b"]}, batch)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, gradient = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda a, b: a - 0.1 * b, state, gradient), {"loss": value}

    value, gradient = jax.value_and_grad(plain)(WEIGHTS, BATCH)
    init = shardlib.tree(lambda key: {"a": jnp.asarray(WEIGHTS["a"])})
    programs = (
        shardlib.compile(init, loss, optax.sgd(0.1), BATCH, topology="cpu:8", pin=PIN),
        shardlib.compile_step(
            lambda key: {"a": weights["a"]}, step, BATCH, topology="cpu:8", pin=PIN
        ),
    )
    for program in programs:
        state, metrics = program.step(program.init(0), BATCH)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
        params = state["a"] if isinstance(state, dict) else state.params["a"]
        np.testing.assert_allclose(params, WEIGHTS["a"] - 0.1 * gradient["a"], rtol=1e-5)


@pytest.mark.long
def test_a_decoder_in_explicit_mode_is_brought_unchanged():
    given, on = explicit.batch(), explicit.mesh(4, 2)
    with jax.set_mesh(on):
        params = jax.jit(explicit.init)(jax.random.key(0))
        after, told = jax.jit(descent(explicit.gemma_loss))(params, given)
        after, told = jax.tree.map(np.asarray, (after, told))
        program = shardlib.compile(
            shardlib.tree(explicit.init),
            explicit.gemma_loss,
            optax.sgd(0.1),
            given,
            topology="cpu:8",
            pin={"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3},
        )
        state, metrics = program.step(program.init(0), given)
        close((state.params, metrics["loss"]), (after, told["loss"]))
        assert "einsum or dot(out_sharding) P('x', None, 'y') at explicit.py" in own(program.plan)


@pytest.mark.long
def test_a_mixture_of_experts_with_its_own_shard_map_is_brought_unchanged():
    given = explicit.rows()
    own_mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    loss = explicit.moe_loss(own_mesh)
    params = explicit.moe_init(jax.random.key(0))
    after, told = jax.jit(descent(loss))(params, given)
    program = shardlib.compile(
        shardlib.tree(explicit.moe_init),
        loss,
        optax.sgd(0.1),
        given,
        topology="cpu:8",
        pin={"mesh": {"fsdp": 4, "tensor": 2}},
    )
    state, metrics = program.step(program.init(0), given)
    close((state.params, metrics["loss"]), (after, told["loss"]))
