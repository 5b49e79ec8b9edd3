"""Matmuls over the tensor axis in loops compute what they compute on one device, and move messages
between neighbours in place of gathers and scatters.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardlib
from shardlib import models
from shardlib.lowering.collective_matmul import AxisRing, snake
from shardlib.verification.traffic import read_traffic
from tests.lowering.steps import DENSE, equal, token_batch, trained

BATCH, SEQ = 8, 16
CUT = [["batch", ["data", "fsdp"]], ["mlp", "tensor"], ["kv_heads", "tensor"], ["seq", "tensor"]]
DECODER = replace(DENSE, name="decoder", vocab_size=32, heads=12, kv_heads=4, head_dim=4, mlp=24)
LAYER = {
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "mix": ("embed", "inner"),
    "back": ("inner", "embed"),
}
WIDTHS = {"embed": 8, "mlp": 16, "inner": 24}


def decoder():
    return *models.build(DECODER), token_batch(BATCH, SEQ, DECODER.vocab_size), None, CUT


def own():
    """A user's model of matmuls written out: weights on either side, casts of the same input, no
    scan, and a product that the next rows are needed for.
    """

    def initialise(key):
        keys = jax.random.split(key, 2 * len(LAYER))
        return {
            f"layer{k}": {
                name: (
                    0.3
                    * jax.random.normal(
                        keys[k * len(LAYER) + i], tuple(WIDTHS[axis] for axis in axes)
                    )
                )
                for i, (name, axes) in enumerate(LAYER.items())
            }
            for k in range(2)
        }

    def layer(x, w):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        wide = jax.nn.silu(h @ w["gate"]) * jnp.einsum("df,bsd->bsf", w["up"], h)
        x = x + wide @ w["down"]
        inner = jnp.cumsum(jnp.tanh(x @ w["mix"]), axis=1) / SEQ
        return x + jnp.einsum("nd,bsn->bsd", w["back"], inner)

    def loss(params, batch):
        x = batch["x"]
        for k in range(2):
            x = layer(x, params[f"layer{k}"])
        return jnp.mean((x - batch["y"]) ** 2)

    rng = np.random.default_rng(1)
    axes = dict.fromkeys(("x", "y"), ("batch", "seq", None))
    init = shardlib.tree(initialise, {f"layer{k}": LAYER for k in range(2)})
    return (
        init,
        loss,
        {name: rng.normal(size=(BATCH, SEQ, WIDTHS["embed"])).astype(np.float32) for name in axes},
        axes,
        [*CUT[:2], ["inner", "tensor"], CUT[3]],
    )


MODELS = {"decoder": decoder, "own": own}


def train(name, topology, pin, steps=2):
    init, loss, data, axes, _ = MODELS[name]()
    return trained(init, loss, data, topology, pin, steps=steps, rate=0.5, batch_axes=axes)


@functools.cache
def reference(name):
    return train(name, "cpu:1", {"mesh": {}})[0]


def looped(name, mesh, **pin):
    return {
        "mesh": mesh,
        "rules": MODELS[name]()[-1],
        "collective_matmul": "loop",
        "remat": "none",
        **pin,
    }


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "pin"),
    [
        (
            "decoder",
            looped("decoder", {"tensor": 4, "fsdp": 2}, zero=3, remat="full"),
        ),  # three heads on a device
        ("decoder", looped("decoder", {"tensor": 2, "data": 2}, remat="dots", microbatches=2)),
        ("own", looped("own", {"tensor": 8})),
        ("own", looped("own", {"tensor": 2, "fsdp": 2, "data": 2}, zero=2)),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(f"{k}{v}" for k, v in value["mesh"].items())
    ),
)
def test_steps_are_those_of_one_device(name, pin):
    actual, program = train(name, f"cpu:{np.prod(list(pin['mesh'].values()))}", pin)
    assert program.plan.collective_matmul == "loop" and not any(
        one.code == "collective-matmul-unused" for one in program.findings
    )
    equal(actual, reference(name))
    moved = [
        one
        for one in read_traffic(program.compiled().as_text(), program.plan.mesh).collectives
        if one.axes == ("tensor",)
    ]
    assert {one.kind for one in moved} <= {"collective-permute", "all-reduce"}, moved
    assert any(one.kind == "collective-permute" for one in moved)


@pytest.mark.long
@pytest.mark.parametrize(("remat", "loops"), [("dots", 10), ("full", 11)])
def test_messages_are_as_predicted(remat, loops):
    """In a layer two gathers and two scatters; six loops on the way back, and under full
    recomputation again those whose results are needed: all but the last scatter.

    An operand that goes around for its matmuls and for the gradients of their weights goes around
    once: the compiler makes one message of two that are equal.
    """
    _, program = train("decoder", "cpu:2", looped("decoder", {"tensor": 2}, remat=remat), 0)
    found = [
        one
        for one in read_traffic(program.compiled().as_text(), program.plan.mesh).collectives
        if one.kind == "collective-permute"
    ]
    planned = [one for one in program.plan.estimate.collectives if one.kind == "collective-permute"]
    assert sum(one.count for one in planned) == DECODER.layers * loops
    assert sorted((one.bytes, one.count) for one in planned) == sorted(
        (one.bytes, one.count) for one in found
    )


@pytest.mark.parametrize("sizes", [(2,), (3,), (5,), (8,), (2, 4), (2, 2, 2), (3, 2)])
def test_pieces_and_sums_go_around(sizes):
    ways, names = int(np.prod(sizes)), tuple("abc"[: len(sizes)])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ways]).reshape(sizes), names)
    ring, rng = AxisRing.of_axis(names, sizes), np.random.default_rng(0)
    array, parts = (
        rng.normal(size=(ways, 3)).astype(np.float32),
        rng.normal(size=(ways, ways, 3)).astype(np.float32),
    )

    def both(piece, part):
        whole = ring.fold(
            piece,
            lambda made, device, one: (
                (jnp.zeros((1, ways, 3)) if made is None else made).at[0, device].set(one[0])
            ),
        )
        return whole, ring.reduce_scatter(lambda device: part[0][device][None], lambda one: 2 * one)

    cut = PartitionSpec(names)
    wholes, sums = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=(cut, cut), out_specs=(cut, cut), check_vma=False)
    )(array, parts)
    np.testing.assert_array_equal(wholes, np.broadcast_to(array, (ways, ways, 3)))
    np.testing.assert_allclose(sums, 2 * parts.sum(0), rtol=1e-5, atol=1e-6)


def test_neighbours_of_a_ring_are_neighbours_on_the_torus():
    for sizes in ((4,), (2, 2, 2), (4, 4), (2, 4, 3)):
        places = np.array(np.unravel_index(snake(sizes), sizes)).T
        assert sorted(snake(sizes)) == list(range(int(np.prod(sizes))))
        assert (np.abs(np.diff(places, axis=0)).sum(1) == 1).all()


@pytest.mark.parametrize(
    "pin",
    [{"mesh": {"data": 8}}, {"mesh": {"tensor": 8}, "sequence_parallel": False}],
    ids=["no tensor", "no sequence"],
)
def test_a_pin_that_changes_nothing_is_a_finding(pin):
    _, program = train("own", "cpu:8", {**pin, "collective_matmul": "loop"}, 0)
    assert {one.code for one in program.findings} >= {"collective-matmul-unused"}
