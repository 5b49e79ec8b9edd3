"""A pipeline computes what the unsharded model computes, under every schedule: in one program or in
a program per stage, with some layers rematerialised, with activations in host memory, and with
weights that are gathered once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib import _jax_compat
from shardlib import models as transformers
from shardlib.annotation.model import read
from shardlib.cost.stages import ModelFacts, Plans
from shardlib.cost.variants import rematerialised_share
from shardlib.decisions.table import Decisions
from shardlib.errors import PlanError
from shardlib.lowering.pipeline.layers import StageRemat
from shardlib.models.config import Experts
from shardlib.verification.traffic import read_traffic
from tests.lowering import models
from tests.lowering.hand_plan import RULES, hand_plan
from tests.lowering.steps import DENSE
from tests.lowering.test_gradients import in_parts, steps_like_one_device
from tests.lowering.test_step import close, unsharded
from tests.lowering.test_step import program as step_program
from tests.zoo import decoder, decoder_scan, encoder_decoder, linen_transformer
from tests.zoo.case import leaves_by_path
from tests.zoo.parity import capture, errors, relative_errors, run_sharded

PIPELINES = ("lockstep", "programs")
PROGRAMS = {"pipeline": "programs"}
#: Mesh, microbatches, schedule, chunks of a stage, remat policy.
LOCKSTEP = [
    ({"stage": 2}, 2, "1f1b", 1, "none"),
    ({"stage": 2, "data": 2}, 8, "gpipe", 1, "none"),
    ({"stage": 2, "data": 2}, 4, "interleaved", 2, "full"),
    ({"stage": 4, "fsdp": 2}, 8, "1f1b", 1, "full"),
    ({"stage": 4, "tensor": 2}, 4, "1f1b", 1, "dots"),
    ({"stage": 2, "fsdp": 2, "tensor": 2}, 4, "1f1b", 1, "none"),
    ({"stage": 3, "data": 2}, 4, "zero-bubble", 1, "dots"),
    ({"stage": 4, "fsdp": 2}, 2, "zero-bubble", 1, "none"),
    ({"stage": 4, "tensor": 2}, 8, "zero-bubble", 1, "full"),
    ({"stage": 3}, 8, "1f1b", 1, "full"),
    ({"stage": 3, "data": 2}, 4, "gpipe", 1, "full"),
]
PER_STAGE = [
    ({"stage": 2, "fsdp": 2}, 4, "gpipe", 1, "none"),
    ({"stage": 2, "data": 2}, 4, "1f1b", 1, "full"),
    ({"stage": 2, "tensor": 2}, 2, "interleaved", 2, "none"),
    ({"stage": 4, "fsdp": 2}, 8, "zero-bubble", 1, "none"),
    ({"stage": 3}, 4, "1f1b", 1, "dots"),
    ({"stage": 2, "tensor": 2}, 4, "zero-bubble", 1, "full"),
]
#: The same, and how many layers of the fullest stage follow the policy.
PARTLY = [
    ({"stage": 2}, 2, "1f1b", 1, "full", 1),
    ({"stage": 2, "data": 2}, 4, "gpipe", 1, "dots", 1),
    ({"stage": 2, "fsdp": 2, "tensor": 2}, 4, "1f1b", 1, "dots", 1),
    ({"stage": 2, "data": 2}, 4, "interleaved", 2, "full", 1),
    ({"stage": 2, "fsdp": 2}, 4, "zero-bubble", 1, "full", 1),
    ({"stage": 3}, 4, "1f1b", 1, "full", 1),
]
IN_HOST_MEMORY = [
    ({"stage": 2}, 4, "1f1b", 1, "full", 0),
    ({"stage": 2, "fsdp": 2, "tensor": 2}, 4, "1f1b", 1, "dots", 0),
    ({"stage": 2, "data": 2}, 4, "gpipe", 1, "full", 1),
    ({"stage": 2, "fsdp": 2}, 4, "interleaved", 2, "none", 0),
    ({"stage": 2, "fsdp": 2}, 4, "zero-bubble", 1, "full", 0),
]
OFFLOAD = {"offload": ("activations",)}
CASES = [
    *((*case, {}) for case in LOCKSTEP),
    *((*case, PROGRAMS) for case in PER_STAGE),
    *(
        (*case, {"remat_layers": count, "pipeline": pipeline, **more})
        for table, more in ((PARTLY, {}), (IN_HOST_MEMORY, OFFLOAD))
        for *case, count in table
        for pipeline in PIPELINES
    ),
]


def program(mesh, microbatches, schedule, virtual=1, remat="none", **options):
    """A program for 16 sequences of the transformer, whose layers are divided over stages."""
    return step_program(
        mesh,
        rules=[*RULES, ("layers", "stage")],
        microbatches=microbatches,
        schedule=schedule,
        virtual_stages=virtual,
        remat=remat,
        **options,
    )


def steps_like_the_unsharded_model(p):
    loss, accuracy, gradients, _ = unsharded(3, 16)
    state, metrics = p.step(p.init(3), models.transformer_batch())
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(accuracy, rel=1e-6)
    close(leaves_by_path(state.opt_state), gradients)


def evaluates_like_the_unsharded_model(p):
    metrics = p.evaluate(p.init(3), models.transformer_batch())
    assert float(metrics["loss"]) == pytest.approx(unsharded(3, 16)[0], rel=1e-5)


def stash_waits_in_host_memory(p):
    """Whether activations wait there between the forward and the backward pass of a microbatch."""
    if p.plan.pipeline == "programs":
        first = p._stage_step.chunks[0]
        saved = first.forward.results[len(first.outputs) :]
        return "pinned_host" in {leaf.sharding.memory_kind for leaf in saved if leaf.ndim > 2}
    with _jax_compat.in_mesh(p.mesh):
        text = str(jax.make_jaxpr(p.step_function())(p.state, p.batch))
    shapes = re.findall(r"<host>\[([\d,]+)\]", text)  # [stages, slots, layers, ...]
    return any(shape.startswith("2,") for shape in shapes)


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "microbatches", "schedule", "virtual", "remat", "options"), CASES, ids=str
)
def test_loss_metrics_and_gradients_equal_the_unsharded_model(
    mesh, microbatches, schedule, virtual, remat, options
):
    zero = 3 if "fsdp" in mesh else 0
    p = program(mesh, microbatches, schedule, virtual, remat, zero=zero, **options)
    steps_like_the_unsharded_model(p)
    if not options:
        evaluates_like_the_unsharded_model(p)
    if "offload" in options:
        assert stash_waits_in_host_memory(p)


@pytest.mark.long
def test_three_stages_hand_on_what_they_make():
    """In every run: two stages do not tell one direction of a hop from the other."""
    steps_like_the_unsharded_model(program({"stage": 3}, 4, "1f1b"))


def gathering(mesh, microbatches, schedule, virtual=1, remat="none", **more):
    """The same under a plan of the planner, with weights that are gathered once."""
    pin = {
        "mesh": mesh,
        "microbatches": microbatches,
        "schedule": schedule,
        "virtual_stages": virtual,
        "remat": remat,
        "zero": 3 if "fsdp" in mesh else 0,
        "gather": "once",
        **more,
    }
    return shardlib.compile(
        models.Transformer,
        models.transformer_loss,
        capture(),
        models.transformer_batch(16),
        topology="cpu:8",
        pin=pin,
    )


#: Accumulation is the number of groups of microbatches, one after the other.
GATHERED = [
    ({"stage": 2, "fsdp": 2}, 4, "1f1b", 1, "none", {}),
    ({"stage": 2, "fsdp": 2, "tensor": 2}, 4, "gpipe", 2, "full", {}),
    ({"stage": 2, "fsdp": 2, "data": 2}, 2, "gpipe", 2, "dots", {}),
    ({"stage": 2, "fsdp": 2}, 4, "zero-bubble", 1, "full", {}),
    ({"stage": 2, "fsdp": 4}, 4, "interleaved", 2, "none", {}),
    ({"stage": 2, "fsdp": 2}, 8, "gpipe", 2, "full", {"accumulation": 2}),
    ({"stage": 2, "fsdp": 2}, 8, "zero-bubble", 1, "full", {"accumulation": 4}),
    ({"stage": 2, "data": 2}, 8, "1f1b", 1, "full", {"accumulation": 2, "gather": "use"}),
    ({"stage": 2, "fsdp": 2}, 4, "1f1b", 1, "none", {"accumulation": 2, **PROGRAMS}),
    ({"stage": 2, "fsdp": 2}, 4, "zero-bubble", 1, "full", PROGRAMS),
]
MATRICES = 4 * 2  #: of the two layers of a stage
ENDS = 1  #: the table that is embedding and head, which is gathered once for both
USES = 2  #: the gradients of that table as embedding and as head have sums of their own


def over_fsdp(p, kind, region="shard_map"):
    """How often weights of layers are gathered, or gradients scattered, over fsdp in a step, in the
    region where that is done beforehand or anywhere.
    """
    return sum(
        one.count
        for one in read_traffic(p.compiled().as_text(), p.plan.mesh).collectives
        if one.axes == ("fsdp",) and one.kind == kind and region in one.cause
    )


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "microbatches", "schedule", "virtual", "remat", "more"), GATHERED, ids=str
)
def test_weights_gathered_once_give_the_same_gradients(
    mesh, microbatches, schedule, virtual, remat, more
):
    p = gathering(mesh, microbatches, schedule, virtual, remat, **more)
    steps_like_the_unsharded_model(p)
    if "pipeline" in more:
        first = p._stage_step.chunks[0]
        counts = {
            kind: sum(
                c.count
                for c in read_traffic(call.as_text(), p.plan.mesh).collectives
                if c.kind == kind
            )
            for kind, call in (
                ("all-gather", first.gather.compiled),
                ("reduce-scatter", first.backward.compiled),
            )
        }
        assert counts == {"all-gather": MATRICES, "reduce-scatter": 0}
    elif "accumulation" in more:
        evaluates_like_the_unsharded_model(p)
        # Anew for every group only where every round gathers its chunk, there forward and backward;
        # the CPU compiler may find that these are the same.
        least, most = {
            "gpipe": (2 * MATRICES, 4 * MATRICES),
            "zero-bubble": (MATRICES + ENDS,) * 2,
            "1f1b": (0, 0),
        }[schedule]
        assert least <= over_fsdp(p, "all-gather") <= most


def test_a_plan_that_gathers_once_says_where_nothing_is_gathered():
    nothing = program({"stage": 2, "data": 2}, 4, "1f1b", gather="once")
    once = gathering({"stage": 2, "fsdp": 2}, 4, "1f1b")
    for p, said in ((nothing, True), (once, False)):
        assert ("nothing-gathered-once" in {one.code for one in p.findings}) == said


@pytest.mark.long
def test_layers_gathered_once_are_gathered_and_reduced_as_often_for_many_microbatches_as_for_few():
    mesh = {"stage": 2, "fsdp": 2}
    for microbatches in (4, 8):
        p = gathering(mesh, microbatches, "1f1b")
        assert over_fsdp(p, "all-gather") == MATRICES + ENDS
        assert over_fsdp(p, "reduce-scatter") == MATRICES + USES
    p = gathering(mesh, 8, "gpipe", 2)
    # Forward and backward; the CPU compiler may find that the last chunk forward is the first one
    # backward.
    assert MATRICES <= over_fsdp(p, "all-gather") <= 2 * MATRICES
    # A place for sums is emptied before the second chunk begins, and both places at the end.
    assert MATRICES <= over_fsdp(p, "reduce-scatter") <= 3 * MATRICES // 2
    assert over_fsdp(gathering(mesh, 4, "1f1b", gather="use"), "all-gather", "") > 4 * MATRICES


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("gather", "schedule", "virtual"),
    [("use", "1f1b", 1), ("once", "1f1b", 1), ("once", "gpipe", 2)],
)
def test_stages_scatter_gradients_over_the_dims_of_a_torus(gather, schedule, virtual):
    """Every operation of the layers gathers its weight, and its gradient is scattered, not reduced
    whole.
    """
    case = decoder_scan.CASES[0]
    pin = {"schedule": schedule, "virtual_stages": virtual, "gather": gather, "remat": "full"}
    p = in_parts(case, {"stage": 2, "fsdp": 4}, microbatches=2, **pin)
    assert p.mesh.axis_names[2:4] == ("fsdp_0", "fsdp_1")
    steps_like_one_device(p, case)
    found = [
        c
        for c in read_traffic(p.compiled().as_text(), p.plan.mesh).collectives
        if c.axes == ("fsdp",) and "cond/" not in c.cause
    ]
    matrices = [
        4 * np.prod(parameter.shape[1:])
        for parameter in p.plan.parameters
        if {"stage", "fsdp"} <= parameter.rest.axes and len(parameter.shape) > 2
    ]
    assert any(c.kind == "reduce-scatter" for c in found)
    assert matrices and not [
        c for c in found if c.kind == "all-reduce" and c.bytes >= min(matrices)
    ]


@pytest.mark.long
def test_memory_does_not_grow_with_the_microbatches_of_1f1b():
    def temporaries(schedule, microbatches):
        batch = models.transformer_batch(2 * microbatches, 64)
        p = program({"stage": 2}, microbatches, schedule, remat="full", batch=batch)
        return p.memory()["temporaries"] - sum(leaf.nbytes for leaf in jax.tree.leaves(batch))

    assert temporaries("1f1b", 32) <= 1.02 * temporaries("1f1b", 8)
    assert temporaries("gpipe", 32) > 1.5 * temporaries("gpipe", 8)


@pytest.mark.long
def test_one_hop_a_tick_and_direction():
    p = program({"stage": 4}, 8, "1f1b", remat="full")
    text = p.compiled().as_text()
    hops = [
        line
        for line in text.splitlines()
        if " collective-permute(" in line or " collective-permute-start(" in line
    ]
    assert (
        len(hops) == 4
    )  # forward in the first scan, both ways in the second, backward in the third
    assert p.timeline().splitlines()[1].split()[:6] == ["stage", "0", ">", "0", "1", "2"]


class NoisyLayer(nnx.Module):
    def __init__(self, rngs):
        self.mlp, self.drop = models.Mlp(rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.mlp(x))


class Noisy(nnx.Module):
    """Dropout after the embedding, from one stream, and in every layer, from a stream for each."""

    def __init__(self, rngs):
        self.embedding = models.dense(rngs, (32, 16), ("vocab", "embed"))
        self.layers = nnx.split_rngs(splits=4)(
            nnx.vmap(NoisyLayer, transform_metadata={nnx.PARTITION_NAME: "layers"})
        )(rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        x = self.drop(self.embedding[...][tokens])
        return (
            nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )
            @ self.embedding[...].T
        )


def trained(init, loss, batch, topology, pin):
    """(losses, parameters, model state) after two steps."""
    p = shardlib.compile(init, loss, optax.sgd(1.0), batch, topology=topology, pin=pin)
    state, losses = p.init(1), []
    for _ in range(2):
        state, metrics = p.step(state, batch)
        losses.append(float(metrics["loss"]))
    drawn = [
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in jax.tree.leaves(state.model_state)
    ]
    return losses, leaves_by_path(state.params), list(map(np.asarray, drawn))


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "pin"),
    [
        ("cpu:8", {"mesh": {"stage": 2, "data": 2, "fsdp": 2}}),
        ("cpu:4", {"mesh": {"stage": 2, "data": 2}, **PROGRAMS}),
    ],
    ids=PIPELINES,
)
def test_dropout_draws_what_it_draws_without_stages(topology, pin):
    batch, pin = models.transformer_batch(16), {"microbatches": 4, **pin}
    pin |= {"schedule": "interleaved", "virtual_stages": 2}
    alone = {"mesh": {"data": 1}, "microbatches": 4}
    wanted = trained(Noisy, models.transformer_loss, batch, "cpu:1", alone)
    actual = trained(Noisy, models.transformer_loss, batch, topology, pin)
    assert actual[0] == pytest.approx(wanted[0], rel=1e-6)
    close(actual[1], wanted[1])
    assert len(wanted[2]) == 4
    for mine, theirs in zip(actual[2], wanted[2], strict=True):
        np.testing.assert_array_equal(mine, theirs)


EXPERTS = Experts(count=4, per_token=2, mlp=16, first_dense=1)
MIXED = replace(DENSE, name="mixed", layers=3, heads=2, kv_heads=1, tied=True, experts=EXPERTS)
#: One layer per chunk: rounds in which nothing enters or leaves, and a queue before the first stage.
DEEP = replace(MIXED, name="deep", layers=8, experts=None)
ROUNDS = {"schedule": "gpipe", "virtual_stages": 4, "zero": 3, "gather": "once"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "rows", "mesh", "pin"),
    [
        (DEEP, 16, {"stage": 2, "fsdp": 2}, {"microbatches": 4, **ROUNDS}),
        (MIXED, 16, {"stage": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 4}),
        (MIXED, 8, {"stage": 2}, {"microbatches": 2, **PROGRAMS}),
    ],
    ids=["rounds of chunks", "dense and experts", "dense and experts, programs"],
)
def test_transformers_train_as_without_stages(config, rows, mesh, pin):
    init, loss = transformers.build(config)
    batch = models.transformer_batch(rows, 16)
    alone = {"mesh": {"data": 1}, "microbatches": pin["microbatches"]}
    pin = {"mesh": mesh, "schedule": "1f1b", "remat": "full", **pin}
    wanted = trained(init, loss, batch, "cpu:1", alone)
    actual = trained(init, loss, batch, f"cpu:{np.prod(list(mesh.values()))}", pin)
    assert actual[0] == pytest.approx(wanted[0], rel=1e-5)
    # of two steps of plain descent, whose updates are as large as the parameters
    close(actual[1], wanted[1], 1e-4)


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "mesh", "pin"),
    [
        (decoder_scan.CASES[0], {"stage": 2, "tensor": 2}, {}),
        (linen_transformer.CASES[0], {"stage": 4, "data": 2}, {"remat": "full"}),
        (encoder_decoder.CASES[0], {"stage": 2, "fsdp": 2, "tensor": 2}, {"zero": 3}),
        (decoder.CASES[0], {"stage": 2, "tensor": 2}, {"microbatches": 2, "schedule": "gpipe"}),
        (
            linen_transformer.CASES[0],
            {"stage": 2, "data": 2},
            {"schedule": "zero-bubble", **PROGRAMS},
        ),
        (
            encoder_decoder.CASES[0],
            {"stage": 2, "fsdp": 2},
            {"microbatches": 2, "zero": 3, **PROGRAMS},
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_models_as_people_write_them(case, mesh, pin):
    """Linen's scan, layers with recomputation of their own, layers in a Python loop, an encoder
    whose output every layer of the decoder reads.
    """
    pin = {"mesh": mesh, "microbatches": 4, "schedule": "1f1b", **pin}
    sharded = run_sharded(case, pin, place=True)
    assert max(errors(sharded.loss, sharded.gradients, case.reference(0)).values()) <= 1


@pytest.mark.parametrize(
    ("mesh", "options", "said"),
    [
        (
            {"stage": 8},
            {"microbatches": 8, "schedule": "1f1b"},
            "8 stages of 1 chunk need 8 layers, and the loop over layers at",
        ),
        (
            {"stage": 2},
            {"microbatches": 4, "schedule": "interleaved", "virtual": 4},
            r"2 stages of 4 chunks need 8 layers.*\nTry: at most 4 chunks on all stages together",
        ),
        (
            {"stage": 2},
            {"microbatches": 1, "schedule": "interleaved", "virtual": 2},
            "need a microbatch for each of the 2 stages, and there are 1",
        ),
        (
            {"stage": 2},
            {"microbatches": 4, "accumulation": 4, "schedule": "interleaved", "virtual": 2},
            "need a microbatch for each of the 2 stages, and there are 1 in each group",
        ),
    ],
)
def test_what_cannot_be_a_pipeline(mesh, options, said):
    with pytest.raises(PlanError, match=said):
        program(mesh, **options)


@pytest.mark.parametrize("pipeline", ["lockstep", "programs"])
def test_a_loop_over_time_is_no_loop_over_layers(pipeline: str):
    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params["layers"])
        start, steps = jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1)
        last, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ params["time"] + x), None), start, steps)
        return jnp.mean((last - batch["y"]) ** 2)

    draws = np.random.default_rng(0)
    shapes, sizes = {"layers": (4, 16, 16), "time": (16, 16)}, {"x": (16, 8, 16), "y": (16, 16)}
    params = {name: draws.normal(size=shape).astype("f") / 4 for name, shape in shapes.items()}
    batch = {name: draws.normal(size=size).astype("f") for name, size in sizes.items()}
    program = shardlib.compile(
        shardlib.tree(lambda key: jax.tree.map(jnp.asarray, params)),
        loss,
        capture(),
        batch,
        topology="cpu:8",
        pin={"mesh": {"stage": 2, "data": 2}, "microbatches": 2, "pipeline": pipeline},
    )
    assert max(relative_errors(program, loss, batch).values()) <= 1e-5


def test_a_model_without_repeated_layers_is_no_pipeline():
    with pytest.raises(
        PlanError,
        match=(
            "a pipeline needs layers that repeat, and the loss has none at its top level;"
            " operations that multiply matrices: dot_general"
        ),
    ):
        shardlib.compile(
            models.Mlp,
            models.mlp_loss,
            optax.sgd(1.0),
            models.mlp_batch(),
            topology="cpu:2",
            plan=hand_plan(
                read(models.Mlp), models.mlp_batch(), {"stage": 2}, microbatches=2, schedule="1f1b"
            ),
        )


@pytest.mark.long
@pytest.mark.parametrize("pipeline", ["lockstep", "programs"])
def test_what_waits_between_forward_and_backward_is_in_between(pipeline):
    def temporaries(remat, count=0):
        p = program({"stage": 2}, 8, "1f1b", 1, remat, remat_layers=count, pipeline=pipeline)
        if pipeline == "lockstep":
            return p.memory()["temporaries"]
        saved = p._stage_step.chunks[0].forward
        return sum(leaf.size for leaf in saved.results)

    assert temporaries("full") < temporaries("full", 1) < temporaries("none")


class OfStages:
    """Candidates of which nothing but their stages is looked at."""

    def __init__(self, *stages):
        self.stage = np.array(stages)

    def __len__(self):
        return len(self.stage)


@pytest.mark.parametrize("pipeline", ["lockstep", "programs"])
def test_as_many_layers_are_priced_as_are_rematerialised(pipeline):
    layers, virtual, c = 16, 2, OfStages(1, 2, 4)
    for number in range(1, 4):
        share = rematerialised_share(
            number,
            Plans(
                decisions=Decisions(virtual_stages=virtual),
                model=ModelFacts(layer_counts=(layers,), batch_bytes=0.0, state_bytes=0.0),
                pricer=SimpleNamespace(profile=SimpleNamespace(pipeline=pipeline)),
                meshes=c,
            ),
        )
        for stages, part in zip(c.stage, share, strict=True):
            chunks = virtual if stages > 1 else 1
            here = layers // stages
            own = StageRemat(policy="full", count=number, layers=here, virtual=chunks)
            done = (
                own.of_every_chunk.count * chunks
                if pipeline == "lockstep"
                else sum(own.of_chunk(k, here // chunks).count for k in range(chunks))
            )
            assert part * here == done


@pytest.mark.parametrize(
    "pin",
    [
        {"mesh": {"stage": 2, "fsdp": 2}, "zero": 3, "microbatches": 4},
        {"mesh": {"stage": 2, "data": 2}, "microbatches": 4},
        {"mesh": {"stage": 2, "fsdp": 2}, "zero": 2, "microbatches": 4},
    ],
    ids=str,
)
def test_every_stage_has_all_of_embedding_and_head(pin: dict[str, Any]) -> None:
    program = shardlib.compile(
        models.Transformer,
        models.transformer_loss,
        optax.adamw(1e-3),
        models.transformer_batch(16),
        topology="cpu:4",
        pin={**pin, "schedule": "1f1b", "gather": "use"},
    )
    held = sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(program.state)
    )
    predicted = program.plan.estimate.device_bytes
    assert predicted.parameters + predicted.optimizer == pytest.approx(held, rel=0.01)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of inner ones among them."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


@pytest.mark.long
def test_what_chunks_gather_and_sum_up_is_written_layer_by_layer() -> None:
    """Written slot by slot, XLA for GPUs keeps zeros and copies of whole slots beside it."""
    config = replace(DENSE, name="twelve", layers=12, embed=32, heads=2, head_dim=16, mlp=48)
    init, loss = transformers.build(config)
    program = shardlib.compile(
        init,
        loss,
        optax.adamw(1e-3),
        transformers.example_batch(config, 8, 16),
        topology="cpu:4",
        pin={
            "mesh": {"stage": 2, "fsdp": 2},
            "zero": 3,
            "microbatches": 4,
            "schedule": "gpipe",
            "virtual_stages": 3,
            "gather": "once",
            "remat": "full",
        },
    )
    with _jax_compat.in_mesh(program.mesh):
        step = jax.make_jaxpr(program.step_function())(program.state, program.batch)
    window, layers, fsdp, matrix = 2, 2, 2, (32, 48)
    rooms = {(window, layers, *matrix), (window, layers, fsdp, *matrix)}
    written = {
        equation.invars[1].aval.shape
        for equation in _equations(step.jaxpr)
        if equation.primitive.name == "dynamic_update_slice"
        and equation.invars[0].aval.shape in rooms
    }
    assert written == {(1, 1, *matrix), (1, 1, fsdp, *matrix)}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_backward_loops_add_gradients_to_their_sums_in_place(schedule: str) -> None:
    """Stacked by a loop, the gradients of all layers would live beside their sums."""
    p = program({"stage": 2, "fsdp": 2}, 4, schedule, 1, "full", zero=3)
    with _jax_compat.in_mesh(p.mesh):
        step = jax.make_jaxpr(p.step_function())(p.state, p.batch)
    matrices = {leaf.shape for leaf in jax.tree.leaves(p.state.params) if leaf.ndim >= 3}
    of_stage = {(shape[0] // 2, *shape[1:]) for shape in matrices}
    carried, stacked = set(), set()
    for equation in _equations(step.jaxpr):
        if equation.primitive.name == "scan" and equation.params["reverse"]:
            shapes = [result.aval.shape for result in equation.outvars]
            _, count = _jax_compat.scan_counts(equation.params)
            carried.update(shapes[:count])
            stacked.update(shapes[count:])
    assert of_stage and {(1, *shape) for shape in of_stage} <= carried
    assert not stacked & of_stage


@pytest.mark.parametrize(
    "case",
    [
        ({"stage": 2, "fsdp": 2}, 4, "1f1b", 1, "none"),
        ({"stage": 4, "fsdp": 2}, 8, "zero-bubble", 1, "none"),
    ],
    ids=str,
)
def test_a_stage_is_told_its_number(case):
    """No `axis_index` stands in a region where the stages alone are manual: XLA takes its
    PartitionId out of there, and refuses it for TPUs (JAX 0.10.2).
    """
    text = program(*case).lower().as_text()
    assert "collective_permute" in text and "partition_id" not in text
