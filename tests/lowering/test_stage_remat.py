"""Stages of which some layers are rematerialised compute what the unsharded model computes, and
remember less than if none were.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from shardlib.cost.variants import rematerialised_share
from shardlib.lowering.pipeline.layers import StageRemat
from tests.lowering.test_pipeline import program, steps_like_the_unsharded_model

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
@pytest.mark.parametrize("pipeline", ["lockstep", "programs"])
def test_what_waits_between_forward_and_backward_is_in_between(pipeline):
    def temporaries(remat, count=0):
        p = program({"stage": 2}, 8, "1f1b", remat=remat, remat_layers=count, pipeline=pipeline)
        if pipeline == "lockstep":
            return p.memory()["temporaries"]
        saved = p._dispatch.chunks[0].forward
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
            SimpleNamespace(virtual=virtual),
            SimpleNamespace(counts=(layers,)),
            c,
            SimpleNamespace(pipeline=pipeline),
        )
        for stages, part in zip(c.stage, share, strict=True):
            chunks = virtual if stages > 1 else 1
            here = layers // stages
            own = StageRemat(policy="full", count=number, layers=here, virtual=chunks)
            done = (
                own.alike.count * chunks
                if pipeline == "lockstep"
                else sum(own.of_chunk(k, here // chunks).count for k in range(chunks))
            )
            assert part * here == done
