"""Fused kernels and recurrent cells on simulated devices: the numbers of one device, kernels and
products that are really divided, and the collectives that were predicted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib
from shardlib.annotation.trees import path_text
from shardlib.lowering.contractions import deinterleaved, interleave, interleaved, split_interleaved
from shardlib.verification.traffic import read_traffic
from tests.zoo.case import BATCH, SEQ, VOCAB, Case, cross_entropy, leaves_by_path, nnx_case, tokens
from tests.zoo.parity import capture, errors, run_sharded

EMBED, HEADS, STATE = 32, 8, 64
AXES = {"inputs": ("batch", "seq"), "targets": ("batch", "seq")}


class Recurrent(nnx.Module):
    """A language model around one of Flax's cells."""

    def __init__(self, cell: Callable[..., Any], rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.layer = nnx.RNN(cell(EMBED, STATE, rngs=rngs))
        self.head = nnx.Linear(STATE, VOCAB, rngs=rngs)
        self.memory = "LSTM" in cell.__name__

    def __call__(self, ids: jax.Array) -> jax.Array:
        zeros = jnp.zeros((ids.shape[0], STATE))
        return self.head(
            self.layer(self.embedding(ids), initial_carry=(zeros, zeros) if self.memory else zeros)
        )


class Fused(nnx.Module):
    """A block of a transformer whose queries, keys and values, and whose gate and values, come of
    one matmul each.
    """

    def __init__(self, how: str, rngs: nnx.Rngs):
        self.how = how
        self.embedding = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.qkv, self.out = (
            nnx.Linear(EMBED, 3 * EMBED, rngs=rngs),
            nnx.Linear(EMBED, EMBED, rngs=rngs),
        )
        self.up, self.down = (
            nnx.Linear(EMBED, 8 * EMBED, rngs=rngs),
            nnx.Linear(4 * EMBED, EMBED, rngs=rngs),
        )
        self.head = nnx.Linear(EMBED, VOCAB, rngs=rngs)

    def heads(self, y: jax.Array) -> list[jax.Array]:
        shape = (*y.shape[:2], HEADS, EMBED // HEADS)
        if self.how == "split":
            return [part.reshape(shape) for part in jnp.split(y, 3, axis=-1)]
        if self.how == "empty":  # as in Mamba 2, whose split has pieces for what it does not use
            at = [0, EMBED, EMBED, 2 * EMBED]
            return [part.reshape(shape) for part in jnp.split(y, at, axis=-1) if part.size]
        if self.how == "slices":
            return [y[..., i * EMBED : (i + 1) * EMBED].reshape(shape) for i in range(3)]
        return list(jnp.moveaxis(y.reshape(*y.shape[:2], 3, HEADS, EMBED // HEADS), 2, 0))

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedding(ids)
        q, k, v = self.heads(self.qkv(self.norm(x)))
        scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) / 2)
        x = x + self.out(jnp.einsum("bhst,bthd->bshd", scores, v).reshape(x.shape))
        gate, values = jnp.split(self.up(x), 2, axis=-1)
        return self.head(x + self.down(nnx.silu(gate) * values))


class LinenRecurrent(nn.Module):
    """The same around one of Linen's cells."""

    cell: Any

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        return nn.Dense(VOCAB)(nn.RNN(self.cell(STATE))(nn.Embed(VOCAB, EMBED)(ids)))


def case(name: str, init: Callable[[nnx.Rngs], nnx.Module]) -> Case:
    return nnx_case(
        name,
        init,
        lambda model, batch: model(batch["inputs"]),
        lambda logits, batch: cross_entropy(logits, batch["targets"]),
        {"inputs": tokens(0), "targets": tokens(1)},
        annotated=False,
        batch_axes=AXES,
    )


def fused_case(how: str) -> Case:
    return case(f"fused-{how}", lambda rngs: Fused(how, rngs))


def cell_case(cell: Callable[..., Any]) -> Case:
    return case(cell.__name__, lambda rngs: Recurrent(cell, rngs))


#: Megatron-LM's rules for `Fused`.
RULES = [["batch", ["data", "fsdp"]], ["out.kernel:0", "tensor"], ["down.kernel:0", "tensor"]]


def right(found: Case, pin: Mapping[str, Any]) -> shardlib.Program:
    """Checks loss and gradients against one device."""
    sharded = run_sharded(found, pin, place=True)
    worst = errors(sharded.loss, sharded.gradients, found.reference(0))
    assert max(worst.values()) < 1, worst
    return sharded.program


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4, 4), (2, 2, 2, 2)])
def test_interleaving_and_taking_apart_are_reverses(sizes: tuple[int, ...]) -> None:
    value = jnp.arange(2 * sum(sizes)).reshape(2, -1)
    mixed = interleaved(value, 1, sizes, 2)
    assert (deinterleaved(mixed, 1, sizes, 2) == value).all()
    parts = split_interleaved(mixed, 1, sizes, 2)
    for part, true in zip(
        parts, np.split(np.asarray(value), np.cumsum(sizes)[:-1], axis=1), strict=True
    ):
        np.testing.assert_array_equal(part, true)
    assert (interleave(parts, 1, 2) == mixed).all()


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("cell", "mesh", "zero"),
    [
        (nnx.LSTMCell, {"tensor": 8}, 0),
        (nnx.OptimizedLSTMCell, {"data": 2, "tensor": 4}, 0),
        (nnx.GRUCell, {"data": 2, "fsdp": 2, "tensor": 2}, 3),
        (nnx.SimpleCell, {"fsdp": 2, "tensor": 4}, 2),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_recurrent_cells_are_sharded_and_right(
    cell: Callable[..., Any], mesh: dict[str, int], zero: int
) -> None:
    rules = [["batch", ["data", "fsdp"]], ["head.kernel:0", "tensor"]]
    plan = right(cell_case(cell), {"mesh": mesh, "zero": zero, "rules": rules}).plan
    kernels = [one for one in plan.parameters if "layer.cell" in one.path and len(one.shape) == 2]
    assert kernels and all("tensor" in one.compute.axes for one in kernels), {
        one.path: str(one.compute) for one in kernels
    }
    assert not [finding for finding in plan.findings if finding.code == "replicated-compute"]


@pytest.mark.long
def test_gates_whose_rows_are_sharded_change_their_order_where_they_are() -> None:
    """The matrix of a recurrence, [state, 4 state], has both dims' colour sharded over tensor: its
    rows. Stored with its columns whole, they change their order on every device alone.
    """
    found = cell_case(nnx.OptimizedLSTMCell)
    pin = {
        "mesh": {"fsdp": 2, "tensor": 4},
        "zero": 3,
        "rules": [["batch", ["data", "fsdp"]], ["head.kernel:0", "tensor"]],
    }
    program = right(found, pin)
    recurrent = next(one for one in program.plan.parameters if one.shape == (STATE, 4 * STATE))
    assert str(recurrent.rest) == "[tensor·fsdp, -]"
    moved = read_traffic(program.compiled().as_text(), program.plan.mesh).collectives
    assert not [one for one in moved if one.kind == "all-to-all" and "fsdp" in one.axes]


@pytest.mark.long
@pytest.mark.parametrize(
    "cell", [nn.LSTMCell, nn.OptimizedLSTMCell, nn.GRUCell], ids=lambda cell: cell.__name__
)
def test_recurrent_cells_of_linen_are_sharded_and_right(cell: Any) -> None:
    module, batch = LinenRecurrent(cell), {"inputs": tokens(0), "targets": tokens(1)}

    def loss(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(
            module.apply(params if "params" in params else {"params": params}, batch["inputs"]),
            batch["targets"],
        )

    program = shardlib.compile(
        shardlib.linen(module, jnp.zeros((BATCH, SEQ), jnp.int32)),
        loss,
        capture(),
        batch,
        topology="cpu:8",
        batch_axes=AXES,
        pin={
            "mesh": {"data": 2, "tensor": 4},
            "microbatches": 1,
            "rules": [["batch", ["data"]], ["Dense_0.kernel:0", "tensor"]],
        },
    )
    kernels = {
        one.path: one
        for one in program.plan.parameters
        if "Cell_0" in one.path and "kernel" in one.path
    }
    assert kernels and all("tensor" in one.compute.axes for one in kernels.values())
    variables = module.init(jax.random.key(0), jnp.zeros((BATCH, SEQ), jnp.int32))
    truth, gradients = jax.jit(jax.value_and_grad(lambda params: loss(params, batch)))(
        variables["params"]
    )
    state, metrics = program.step(program.init(seed=0), batch)
    worst = errors(
        float(metrics["loss"]),
        leaves_by_path(state.opt_state),
        (float(truth), leaves_by_path(gradients)),
    )
    assert max(worst.values()) < 1, worst


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("how", "mesh", "pin"),
    [
        ("split", {"tensor": 8}, {"zero": 0}),
        ("slices", {"fsdp": 2, "tensor": 4}, {"zero": 1}),
        ("reshape", {"fsdp": 2, "tensor": 4}, {"zero": 3}),
        ("empty", {"fsdp": 2, "tensor": 4}, {"zero": 3}),
        ("split", {"data": 2, "fsdp": 2, "tensor": 2}, {"zero": 2}),
        ("split", {"data": 2, "tensor": 4}, {"microbatches": 2}),
    ],
)
def test_fused_kernels_are_right(how: str, mesh: dict[str, int], pin: dict[str, Any]) -> None:
    plan = right(fused_case(how), {"mesh": mesh, "rules": RULES, **pin}).plan
    for one in plan.parameters:
        if one.path.split(".")[0] in ("qkv", "up"):
            assert one.compute[-1] == ("tensor",), (one.path, str(one.compute))


@pytest.mark.long
def test_each_device_computes_its_part_and_weights_alone_move_as_predicted() -> None:
    program = right(
        fused_case("split"), {"mesh": {"data": 2, "tensor": 4}, "zero": 0, "rules": RULES}
    )

    def counted(collectives: Any) -> Counter[tuple[str, int]]:
        sizes: Counter[tuple[str, int]] = Counter()
        for one in collectives:
            if one.axes == ("tensor",):
                sizes[one.kind, one.bytes] += one.count
        return sizes

    text = program.compiled().as_text()
    compiled = counted(read_traffic(text, program.plan.mesh).collectives)
    assert compiled == counted(program.plan.estimate.collectives)
    # A device's part of either kernel, and of gathers the biases alone.
    columns = {EMBED * 3 * EMBED * 4 // 4, EMBED * 8 * EMBED * 4 // 4}
    assert {size for kind, size in compiled if kind == "all-to-all"} == columns
    assert all(size <= 8 * EMBED * 4 for kind, size in compiled if kind == "all-gather")
    shards = {
        path_text(path): leaf.sharding.shard_shape(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(program.state.params)
    }
    kernels = {"qkv.kernel": (32, 24), "up.kernel": (32, 64), "down.kernel": (32, 32)}
    assert {path: shards[path] for path in kernels} == kernels
    rows = BATCH // 2 * SEQ
    dots = set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text))
    assert f"{rows},{3 * EMBED}" not in dots and f"{rows},{8 * EMBED}" not in dots
    assert f"{rows},{3 * EMBED // 4}" in dots and f"{rows},{8 * EMBED // 4}" in dots


@pytest.mark.long
def test_what_a_custom_gradient_reads_stays_in_order_and_is_said() -> None:
    @jax.custom_vjp
    def ramp(y: jax.Array) -> jax.Array:
        return y * jnp.arange(y.shape[-1]) / y.shape[-1]

    ramp.defvjp(
        lambda y: (ramp(y), y.shape[-1]),
        lambda size, cotangent: (cotangent * jnp.arange(size) / size,),
    )

    class Custom(Fused):
        def heads(self, y: jax.Array) -> list[jax.Array]:
            return super().heads(ramp(y))

    found = case("custom", lambda rngs: Custom("split", rngs))
    program = shardlib.compile(
        found.init,
        found.loss,
        capture(),
        dict(found.batch),
        topology="cpu:8",
        pin={"mesh": {"data": 2, "tensor": 4}, "microbatches": 1, "rules": RULES},
    )
    assert [finding.where for finding in program.findings if finding.code == "fused-in-order"] == [
        "out.kernel:0"
    ]
    state, metrics = program.step(program.init(seed=0), dict(found.batch))
    worst = errors(float(metrics["loss"]), leaves_by_path(state.opt_state), found.reference(0))
    assert max(worst.values()) < 1, worst


def test_what_is_not_alike_at_all_positions_is_done_in_the_models_order() -> None:
    class Running(Fused):
        def heads(self, y: jax.Array) -> list[jax.Array]:
            ramp = jnp.asarray(np.linspace(0, 1, y.shape[-1]), jnp.float32)
            return super().heads(
                jnp.cumsum(y * jnp.arange(y.shape[-1]) / y.shape[-1], axis=-1) / 8 + ramp
            )

    right(
        case("summed-up", lambda rngs: Running("split", rngs)),
        {"mesh": {"data": 2, "tensor": 4}, "rules": RULES},
    )
