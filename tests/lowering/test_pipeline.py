"""A pipeline computes what the unsharded model computes, under every schedule."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib.annotation.tree import read
from shardlib.errors import PinError, PlanError
from shardlib.lowering.program import build_program
from shardlib.models import build
from shardlib.models.config import Experts, TransformerConfig
from shardlib.planner.plan import Link
from shardlib.verification.traffic import read_traffic
from tests.lowering import models
from tests.lowering.hand_plan import RULES, hand_plan
from tests.lowering.test_step import close, flat, gradients_as_state, unsharded
from tests.zoo import decoder, decoder_scan, encoder_decoder, linen_transformer
from tests.zoo.case import leaves_by_path
from tests.zoo.parity import FLOOR, TOLERANCE, capture, errors, placed_state, run_sharded

CASES = [
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


def program(mesh, microbatches, schedule, virtual=1, remat="none", optimizer=None, **options):
    model, batch = read(models.Transformer), models.transformer_batch(16)
    plan = hand_plan(
        model,
        batch,
        mesh,
        rules=[*RULES, ("layers", "stage")],
        microbatches=microbatches,
        schedule=schedule,
        virtual_stages=virtual,
        remat=remat,
        **options,
    )
    axes = {"batch.inputs": ("batch", "seq"), "batch.targets": ("batch", "seq")}
    return build_program(
        plan,
        model,
        model.bind(models.transformer_loss),
        optimizer or gradients_as_state(),
        batch,
        batch_axes=axes,
    )


def steps_like_the_unsharded_model(p):
    """Checks one step of a program for 16 sequences of the transformer, whose optimizer keeps the
    gradients.
    """
    loss, accuracy, gradients, _ = unsharded(3, 16)
    state, metrics = p.step(p.init(3), models.transformer_batch())
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(accuracy, rel=1e-6)
    close(flat(state.opt_state), gradients)


def equals_the_unsharded_model(p):
    """Checks an evaluation and one step of such a program."""
    assert float(p.evaluate(p.init(3), models.transformer_batch())["loss"]) == pytest.approx(
        unsharded(3, 16)[0], rel=1e-5
    )
    steps_like_the_unsharded_model(p)


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(("mesh", "microbatches", "schedule", "virtual", "remat"), CASES, ids=str)
def test_loss_metrics_and_gradients_equal_the_unsharded_model(
    mesh, microbatches, schedule, virtual, remat
):
    p = program(mesh, microbatches, schedule, virtual, remat, zero=3 if "fsdp" in mesh else 0)
    equals_the_unsharded_model(p)


ONCE = [
    ({"stage": 2, "fsdp": 2}, 4, "1f1b", 1, "none"),
    ({"stage": 2, "fsdp": 2, "tensor": 2}, 4, "gpipe", 2, "full"),
    ({"stage": 2, "fsdp": 2, "data": 2}, 2, "gpipe", 2, "dots"),
    ({"stage": 2, "fsdp": 2}, 4, "zero-bubble", 1, "full"),
    ({"stage": 2, "fsdp": 4}, 4, "interleaved", 2, "none"),
]


def gathering(mesh, microbatches, schedule, virtual, remat, gather, **more):
    pin = {
        "mesh": mesh,
        "microbatches": microbatches,
        "schedule": schedule,
        "virtual_stages": virtual,
        "remat": remat,
        "zero": 3 if "fsdp" in mesh else 0,
        "gather": gather,
        **more,
    }
    return shardlib.compile(
        models.Transformer,
        models.transformer_loss,
        gradients_as_state(),
        models.transformer_batch(16),
        topology="cpu:8",
        pin=pin,
    )


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(("mesh", "microbatches", "schedule", "virtual", "remat"), ONCE, ids=str)
def test_weights_gathered_once_give_the_same_gradients(
    mesh, microbatches, schedule, virtual, remat
):
    p = gathering(mesh, microbatches, schedule, virtual, remat, "once")
    equals_the_unsharded_model(p)


MATRICES = 4 * 2  #: of the two layers that a stage has
ENDS = 1  #: the table that is embedding and head, which is gathered once for both
USES = 2  #: the gradients of that table as embedding and as head have sums of their own


def gathers_before_ticks(p):
    """How often weights of layers are gathered over fsdp in a step, in the region where that is
    done beforehand.
    """
    found = read_traffic(p.compiled().as_text(), p.plan.mesh).collectives
    return sum(
        c.count
        for c in found
        if c.axes == ("fsdp",) and c.kind == "all-gather" and "shard_map" in c.cause
    )


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "schedule", "virtual", "gather", "groups", "gathers"),
    [
        ({"stage": 2, "fsdp": 2}, "gpipe", 2, "once", 2, 2 * MATRICES),
        ({"stage": 2, "fsdp": 2}, "zero-bubble", 1, "once", 4, MATRICES + ENDS),
        ({"stage": 2, "data": 2}, "1f1b", 1, "use", 2, 0),
    ],
    ids=str,
)
def test_groups_of_microbatches_one_after_the_other_give_the_same_gradients(
    mesh, schedule, virtual, gather, groups, gathers
):
    p = gathering(mesh, 8, schedule, virtual, "full", gather, accumulation=groups)
    equals_the_unsharded_model(p)
    # Anew for every group only where every round gathers its chunk, there forward and backward; the
    # CPU compiler may find that these are the same.
    assert gathers <= gathers_before_ticks(p) <= (2 * gathers if schedule == "gpipe" else gathers)


def test_a_plan_that_gathers_once_says_where_nothing_is_gathered():
    said = "nothing-gathered-once"
    assert said in [
        finding.code
        for finding in program({"stage": 2, "data": 2}, 4, "1f1b", gather="once").findings
    ]
    assert said not in [
        finding.code
        for finding in gathering({"stage": 2, "fsdp": 2}, 4, "1f1b", 1, "none", "once").findings
    ]


@pytest.mark.long
def test_layers_gathered_once_are_gathered_and_reduced_as_often_for_many_microbatches_as_for_few():
    def runs(gather, microbatches, schedule="1f1b", virtual=1):
        """How often weights of layers are gathered, and their gradients scattered, over fsdp in a
        step; those that are gathered beforehand are gathered in a region of their own.
        """
        p = gathering({"stage": 2, "fsdp": 2}, microbatches, schedule, virtual, "none", gather)
        found = [
            c
            for c in read_traffic(p.compiled().as_text(), p.plan.mesh).collectives
            if c.axes == ("fsdp",)
        ]
        return tuple(
            sum(
                c.count
                for c in found
                if c.kind == kind and (gather == "use" or "shard_map" in c.cause)
            )
            for kind in ("all-gather", "reduce-scatter")
        )

    assert runs("once", 4) == runs("once", 8) == (MATRICES + ENDS, MATRICES + USES)
    gathers, reductions = runs("once", 8, "gpipe", 2)
    assert (
        MATRICES <= gathers <= 2 * MATRICES
        # forward and backward; the CPU compiler may find that the last chunk forward is the first one
        # backward
    )
    assert (
        MATRICES <= reductions <= 3 * MATRICES // 2
    )  # a place for sums is emptied before the second chunk begins, and both places at the end
    assert runs("use", 4)[0] > 4 * MATRICES


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("gather", "schedule", "virtual"),
    [("use", "1f1b", 1), ("once", "1f1b", 1), ("once", "gpipe", 2)],
)
def test_stages_scatter_gradients_over_the_dims_of_a_torus(gather, schedule, virtual):
    """These devices play a torus whose two dims make up fsdp: every operation of the layers gathers
    its weight, and its gradient is scattered, not reduced whole.
    """
    case = decoder_scan.CASES[0]
    batch, axes = dict(case.batch), None if case.batch_axes is None else dict(case.batch_axes)
    pin = {
        "mesh": {"stage": 2, "fsdp": 4},
        "zero": 3,
        "microbatches": 2,
        "schedule": schedule,
        "virtual_stages": virtual,
        "remat": "full",
        "gather": gather,
    }
    plan = shardlib.plan(
        case.init,
        case.loss,
        capture(),
        batch,
        topology="cpu:8",
        pin=pin,
        name=case.name,
        batch_axes=axes,
    )
    torus = tuple(Link(kind="torus", ways=2) for _ in range(2))
    p = shardlib.compile(
        case.init,
        case.loss,
        capture(),
        batch,
        plan=replace(plan, placement=(("fsdp", torus),)),
        name=case.name,
        batch_axes=axes,
    )
    assert p.mesh.axis_names[2:4] == ("fsdp_0", "fsdp_1")
    state, metrics = p.step(placed_state(p, 0), batch)
    assert (
        max(
            errors(
                float(metrics["loss"]), leaves_by_path(state.opt_state), case.reference(0)
            ).values()
        )
        <= 1
    )
    found = [
        c
        for c in read_traffic(p.compiled().as_text(), p.plan.mesh).collectives
        if c.axes == ("fsdp",) and "cond/" not in c.cause
    ]
    matrices = [
        4 * np.prod(parameter.shape[1:])
        for parameter in plan.parameters
        if {"stage", "fsdp"} <= parameter.rest.axes and len(parameter.shape) > 2
    ]
    assert any(c.kind == "reduce-scatter" for c in found)
    assert matrices and not [
        c for c in found if c.kind == "all-reduce" and c.bytes >= min(matrices)
    ]


@pytest.mark.long
def test_layers_rest_on_their_stages():
    p = program({"stage": 2, "fsdp": 2}, 4, "1f1b", zero=3, optimizer=optax.adamw(1e-2))
    state = p.init(0)
    for _ in range(2):
        state, _ = p.step(state, models.transformer_batch())
    for leaf in (state.params["layers"]["mlp"]["up"], state.opt_state[0].mu["layers"]["mlp"]["up"]):
        assert leaf.shape == (4, 16, 32)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(2, 8, 32)}


@pytest.mark.long
def test_memory_does_not_grow_with_the_microbatches_of_1f1b():
    def temporaries(schedule, microbatches):
        model, batch = read(models.Transformer), models.transformer_batch(2 * microbatches, 64)
        plan = hand_plan(
            model,
            batch,
            {"stage": 2},
            rules=[*RULES, ("layers", "stage")],
            microbatches=microbatches,
            schedule=schedule,
            remat="full",
        )
        axes = {"batch.inputs": ("batch", "seq"), "batch.targets": ("batch", "seq")}
        built = build_program(
            plan,
            model,
            model.bind(models.transformer_loss),
            optax.sgd(1e-2),
            batch,
            batch_axes=axes,
        )
        return built.memory()["temporaries"] - sum(
            np.asarray(leaf).nbytes for leaf in jax.tree.leaves(batch)
        )

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
    return losses, flat(state.params), list(map(np.asarray, drawn))


def draws_what_it_draws_without_stages(topology, pin):
    """Checks losses, parameters and random state after two steps of four microbatches against those
    on one device.
    """
    batch = models.transformer_batch(16)
    wanted = trained(
        Noisy, models.transformer_loss, batch, "cpu:1", {"mesh": {"data": 1}, "microbatches": 4}
    )
    found = trained(Noisy, models.transformer_loss, batch, topology, {"microbatches": 4, **pin})
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    close(found[1], wanted[1])
    assert len(wanted[2]) == 4
    for one, other in zip(found[2], wanted[2], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
def test_dropout_draws_what_it_draws_without_stages():
    draws_what_it_draws_without_stages(
        "cpu:8",
        {
            "mesh": {"stage": 2, "data": 2, "fsdp": 2},
            "schedule": "interleaved",
            "virtual_stages": 2,
        },
    )


@pytest.mark.long
def test_rounds_of_chunks_that_are_gathered_as_they_begin():
    """Eight layers, one a chunk: rounds in which nothing enters or leaves, and a queue before the
    first stage.
    """
    deep = TransformerConfig(
        name="deep",
        vocab_size=64,
        layers=8,
        embed=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp=32,
        compute_dtype="float32",
        tied=True,
    )
    pin = {
        "mesh": {"stage": 2, "fsdp": 2},
        "microbatches": 4,
        "schedule": "gpipe",
        "virtual_stages": 4,
        "remat": "full",
        "zero": 3,
        "gather": "once",
    }
    trains_as_without_stages(deep, 16, "cpu:4", pin)


def trains_as_without_stages(config, rows, topology, pin):
    """Checks losses and parameters after two steps of a model against those on one device with as
    many microbatches.
    """
    init, loss = build(config)
    batch = models.transformer_batch(rows, 16)
    wanted = trained(
        init, loss, batch, "cpu:1", {"mesh": {"data": 1}, "microbatches": pin["microbatches"]}
    )
    found = trained(init, loss, batch, topology, pin)
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    close(
        found[1], wanted[1], 1e-4
    )  # of two steps of plain descent, whose updates are as large as the parameters


MIXED = TransformerConfig(
    name="mixed",
    vocab_size=64,
    layers=3,
    embed=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp=32,
    compute_dtype="float32",
    tied=True,
    experts=Experts(count=4, per_token=2, mlp=16, first_dense=1),
)


@pytest.mark.long
def test_a_dense_layer_and_experts_with_their_auxiliary_loss():
    trains_as_without_stages(
        MIXED,
        16,
        "cpu:8",
        {
            "mesh": {"stage": 2, "fsdp": 2, "tensor": 2},
            "microbatches": 4,
            "schedule": "1f1b",
            "remat": "full",
        },
    )


def equals_its_reference(case, pin):
    """Checks loss and every gradient of a model of the zoo against the model alone."""
    found = run_sharded(case, pin, place=True)
    loss, gradients = case.reference(0)
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    assert found.loss == pytest.approx(loss, rel=1e-5)
    for path, wanted in gradients.items():
        assert np.abs(found.gradients[path] - wanted).max() <= max(
            TOLERANCE * np.abs(wanted).max(), FLOOR * largest
        ), path


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "pin"),
    [
        (
            decoder_scan.CASES[0],
            {"mesh": {"stage": 2, "tensor": 2}, "microbatches": 4, "schedule": "1f1b"},
        ),
        (
            linen_transformer.CASES[0],
            {
                "mesh": {"stage": 4, "data": 2},
                "microbatches": 4,
                "schedule": "1f1b",
                "remat": "full",
            },
        ),
        (
            encoder_decoder.CASES[0],
            {
                "mesh": {"stage": 2, "fsdp": 2, "tensor": 2},
                "microbatches": 4,
                "schedule": "1f1b",
                "zero": 3,
            },
        ),
        (
            decoder.CASES[0],
            {"mesh": {"stage": 2, "tensor": 2}, "microbatches": 2, "schedule": "gpipe"},
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_models_as_people_write_them(case, pin):
    """Linen's scan, layers with recomputation of their own, layers in a Python loop, an encoder
    whose output every layer of the decoder reads.
    """
    equals_its_reference(case, pin)


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
        optax.sgd(1.0),
        batch,
        topology="cpu:8",
        pin={"mesh": {"stage": 2, "data": 2}, "microbatches": 2, "pipeline": pipeline},
    )
    state, metrics = program.step(program.init(0), batch)
    value, gradients = jax.value_and_grad(loss)(params, batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(params[name] - state.params[name], gradient, atol=1e-6)


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


def test_state_that_depends_on_the_batch_is_refused():
    class Normal(Noisy):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)

        def __call__(self, tokens):
            return (
                super().__call__(tokens)
                + self.norm(self.embedding[...][tokens]) @ self.embedding[...].T
            )

    with pytest.raises(PinError, match=r"model state 'norm\.mean'"):
        trained(
            Normal,
            models.transformer_loss,
            models.transformer_batch(16),
            "cpu:2",
            {"mesh": {"stage": 2}, "microbatches": 2},
        )


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
