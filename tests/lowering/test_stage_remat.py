"""Stages of which some layers are rematerialised compute what the unsharded model computes, and
remember less than if none were.
"""

from __future__ import annotations

import pytest

import shardlib
from tests.lowering import models
from tests.lowering.test_pipeline import program, steps_like_the_unsharded_model
from tests.lowering.test_step import gradients_as_state

PROGRAMS = {"pipeline": "programs"}
#: Mesh, microbatches, schedule, chunks of a stage, policy, layers of the fullest stage; of four.
CASES = [
    ({"stage": 2}, 2, "1f1b", 1, "full", 1),
    ({"stage": 2, "data": 2}, 4, "gpipe", 1, "dots", 1),
    ({"stage": 2, "fsdp": 2, "tensor": 2}, 4, "1f1b", 1, "dots", 1),
    ({"stage": 2, "data": 2}, 4, "interleaved", 2, "full", 1),
    ({"stage": 2, "fsdp": 2}, 4, "zero-bubble", 1, "full", 1),
    ({"stage": 3}, 4, "1f1b", 1, "full", 1),
]


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize("pipeline", ["lockstep", "programs"])
@pytest.mark.parametrize(
    ("mesh", "microbatches", "schedule", "virtual", "remat", "count"), CASES, ids=str
)
def test_gradients_equal_the_unsharded_model(
    mesh, microbatches, schedule, virtual, remat, count, pipeline
):
    p = program(
        mesh,
        microbatches,
        schedule,
        virtual,
        remat,
        zero=3 if "fsdp" in mesh else 0,
        remat_layers=count,
        pipeline=pipeline,
    )
    steps_like_the_unsharded_model(p)


@pytest.mark.long
def test_weights_gathered_once_are_rematerialised_in_part():
    p = shardlib.compile(
        models.Transformer,
        models.transformer_loss,
        gradients_as_state(),
        models.transformer_batch(16),
        topology="cpu:4",
        pin={
            "mesh": {"stage": 2, "fsdp": 2},
            "microbatches": 4,
            "schedule": "1f1b",
            "remat": "full",
            "remat_layers": 1,
            "zero": 3,
            "gather": "once",
        },
    )
    assert p.plan.remat_layers == 1
    steps_like_the_unsharded_model(p)
