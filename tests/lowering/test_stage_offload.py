"""What a stage remembers between the forward and the backward pass of a microbatch waits in host
memory where the plan says so, and the numbers stay those of the unsharded model.
"""

from __future__ import annotations

import re

import jax
import pytest

from shardlib import _jax_compat
from tests.lowering.test_pipeline import program, steps_like_the_unsharded_model

#: Mesh, schedule, chunks of a stage, policy, how many layers of the fullest stage follow it.
CASES = [
    ({"stage": 2}, "1f1b", 1, "full", 0),
    ({"stage": 2, "fsdp": 2, "tensor": 2}, "1f1b", 1, "dots", 0),
    ({"stage": 2, "data": 2}, "gpipe", 1, "full", 1),
    ({"stage": 2, "fsdp": 2}, "interleaved", 2, "none", 0),
    ({"stage": 2, "fsdp": 2}, "zero-bubble", 1, "full", 0),
]


def built(mesh, schedule, virtual, remat, count, pipeline, offload=("activations",)):
    return program(
        mesh,
        4,
        schedule,
        virtual,
        remat,
        zero=3 if "fsdp" in mesh else 0,
        remat_layers=count,
        pipeline=pipeline,
        offload=offload,
    )


def text_of_step(p):
    with _jax_compat.in_mesh(p.mesh):
        return str(jax.make_jaxpr(p.step_function())(p.state, p.batch))


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(("mesh", "schedule", "virtual", "remat", "count"), CASES, ids=str)
def test_one_program_gives_the_numbers_of_the_unsharded_model(
    mesh, schedule, virtual, remat, count
):
    p = built(mesh, schedule, virtual, remat, count, "lockstep")
    steps_like_the_unsharded_model(p)
    stash = {
        shape for shape in re.findall(r"<host>\[([\d,]+)\]", text_of_step(p)) if shape[:2] == "2,"
    }
    assert stash  # [stages, slots, layers, ...]


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(("mesh", "schedule", "virtual", "remat", "count"), CASES, ids=str)
def test_programs_of_stages_give_the_numbers_of_the_unsharded_model(
    mesh, schedule, virtual, remat, count
):
    p = built(mesh, schedule, virtual, remat, count, "programs")
    steps_like_the_unsharded_model(p)
    first = p._dispatch.chunks[0]
    saved = first.forward.results[len(first.left) :]
    kinds = {leaf.sharding.memory_kind for leaf in saved if leaf.ndim > 2}
    assert "pinned_host" in kinds
