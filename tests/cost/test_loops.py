"""Collectives over tensor in loops: what the formula says of a model whose matmuls hide all
messages but the first, and what is chosen.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import shardlib
from shardlib.frontend.model import problem
from shardlib.machines.topology import topology as machine
from shardlib.planner import search as planner
from shardlib.planner.workload import prepare

SEQ, WIDTHS = 4096, {"embed": 1024, "mlp": 16384, "inner": 16384}
LAYER = {
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "mix": ("embed", "inner"),
    "back": ("inner", "embed"),
}
LAYERS, EXAMPLES = 2, 8
#: In a layer: forward two gathers and two scatters; back two gathers of cotangents, two scatters,
#: and two gathers for gradients of weights alone.
WITH_MATMULS, ALONE = 8, 2


def loss(params, batch):
    x = batch["x"]
    for k in range(LAYERS):
        w = params[f"layer{k}"]
        h = jnp.tanh(x)
        x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
        x = x + jnp.tanh(jnp.tanh(x) @ w["mix"]) @ w["back"]
    return jnp.mean((x - batch["y"]).astype(jnp.float32) ** 2)


@functools.cache
def traced():
    def initialise(_):
        return {
            f"layer{k}": {
                name: jnp.zeros([WIDTHS[axis] for axis in axes], jnp.bfloat16)
                for name, axes in LAYER.items()
            }
            for k in range(LAYERS)
        }

    batch = {
        name: jax.ShapeDtypeStruct((EXAMPLES, SEQ, WIDTHS["embed"]), jnp.bfloat16)
        for name in ("x", "y")
    }
    return problem(
        shardlib.tree(initialise, {f"layer{k}": LAYER for k in range(LAYERS)}),
        loss,
        optax.sgd(0.1),
        batch,
        batch_axes=dict.fromkeys(batch, ("batch", "seq", None)),
    )


@functools.cache
def prepared(vendor):
    return prepare(traced(), vendor)


@functools.cache
def planned(topology, tensor, collective_matmul, others=1):
    pin = {
        **(
            {"mesh": {"tensor": tensor, "data": others}}
            if tensor
            else {"mesh.fsdp": 1, "mesh.context": 1}
        ),
        "rules": [
            ["batch", ["data", "fsdp"]],
            ["mlp", "tensor"],
            ["inner", "tensor"],
            ["seq", "tensor"],
        ],
        "microbatches": 1,
    }
    return planner.search(
        traced(),
        topology,
        {**pin, **({"collective_matmul": collective_matmul} if collective_matmul else {})},
        workload=prepared(machine(topology).chip.vendor),
    )


def over_tensor(plan, *kinds):
    return [
        one for one in plan.estimate.collectives if one.axes == ("tensor",) and one.kind in kinds
    ]


@pytest.mark.long
def test_all_messages_but_the_first_hide():
    before, after = (planned("h100:4", 4, word) for word in ("none", "loop"))
    gone = over_tensor(before, "all-gather", "reduce-scatter")
    sent = over_tensor(after, "collective-permute")
    assert not over_tensor(after, "all-gather", "reduce-scatter")
    pieces = LAYERS * (WITH_MATMULS + ALONE) * 3
    assert sum(one.count for one in sent) == pieces
    assert {one.bytes for one in sent} == {EXAMPLES * SEQ * WIDTHS["embed"] * 2 // 4}
    hop = sum(one.seconds for one in sent) / pieces
    exposed = (
        before.estimate.seconds.exposed
        - sum(one.seconds for one in gone)
        + LAYERS * WITH_MATMULS * hop
    )
    assert after.estimate.seconds.exposed == pytest.approx(exposed, rel=1e-9)
    assert after.estimate.seconds.compute > before.estimate.seconds.compute
    assert after.estimate.device_bytes == before.estimate.device_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "tensor", "others"),
    [
        ("h100:4", 4, 1),
        ("h100:8", 2, 4),
        ("v5p:2x2x2", 8, 1),
        ("v5e:4x4", 4, 4),
        ("v5e:4x4", 16, 1),
        ("2*h100:8", 16, 1),
    ],
)
def test_loops_are_chosen_where_they_are_faster(topology, tensor, others):
    chosen, *pinned = (planned(topology, tensor, word, others) for word in ("any", "none", "loop"))
    fastest = min(pinned, key=lambda plan: plan.estimate.step_seconds)
    assert chosen.collective_matmul == fastest.collective_matmul
    assert chosen.estimate == fastest.estimate
    assert chosen.search.gap == 0 and chosen.search.lower_bound == pytest.approx(
        chosen.estimate.step_seconds
    )
    for plan in pinned:
        assert all(seconds >= 0 for seconds in vars(plan.estimate.seconds).values())


@pytest.mark.long
def test_both_are_chosen_somewhere():
    assert {
        planned(*case).collective_matmul for case in (("h100:4", 4, "any"), ("v5p:2x2x2", 8, "any"))
    } == {"none", "loop"}


@pytest.mark.long
def test_loops_are_for_those_who_ask():
    assert planned("v5p:2x2x2", 8, None).estimate == planned("v5p:2x2x2", 8, "none").estimate
    assert planned("cpu:4", 4, "any").collective_matmul == "none"
    assert planned("cpu:4", 4, "loop").collective_matmul == "loop"


@pytest.mark.long
def test_the_planner_decides_for_loops_and_mesh_together():
    """Against every mesh on its own."""
    best = planned("v5p:2x2x2", None, "any", None)
    each = [
        planned("v5p:2x2x2", tensor, word, 8 // tensor)
        for tensor in (1, 2, 4, 8)
        for word in ("none", "loop")
    ]
    assert best.estimate.step_seconds == pytest.approx(
        min(plan.estimate.step_seconds for plan in each), rel=1e-9
    )
    assert best.search.lower_bound <= best.estimate.step_seconds * (1 + 1e-12)  # sums round
