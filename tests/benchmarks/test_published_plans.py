"""What rows of published runs say of other frameworks, of ranks of experts and of ZeRO groups, on
small rows written here.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published.cases import Case, as_known, case_of
from benchmarks.published.experts import spread_of
from benchmarks.published.pricing import Bench, boundless
from tests.benchmarks.test_published_runs import PLAN, document, row, the_case


def sparse(**plan: Any) -> dict[str, Any]:
    """A row of a model with experts on 16 devices, without stages."""
    parallel = {**PLAN, "pp": 1, "dp": 8, "ep": 4, "zero_stage": 1, **plan}
    return {"model": "sparse", "precision": "bf16", "parallel": parallel}


def test_a_framework_without_a_profile_is_priced_as_its_nearest() -> None:
    assert case_of(document(), row(framework="another")) == "no stack for another in fp16"
    liked = the_case(framework="another", framework_like="Megatron-Core")
    known = the_case(framework="Megatron-Core")
    assert liked.assumed == ("another as Megatron-Core",) and known.assumed == ()
    assert (liked.software, liked.pins) == (known.software, known.pins)


def test_what_a_row_names_as_nearest_is_also_the_release() -> None:
    """NeMo 22.09 begins as the NeMo of today does, and is not it."""
    old = the_case(framework="NeMo 22.09", framework_like="NeMo 24.03")
    assert old.software.stack.name == "megatron-core-2403"
    assert old.assumed == ("NeMo 22.09 as NeMo 24.03",)
    assert as_known(row(framework_like="Megatron-LM")) == (row(framework_like="Megatron-LM"), ())


@pytest.mark.long
def test_optimizer_state_over_a_group_of_ranks() -> None:
    plan = {**PLAN, "tp": 1, "pp": 1, "dp": 16, "zero_stage": 1}
    every, eight = the_case(parallel=plan), the_case(parallel=plan, zero_group=8)
    assert (every.pins["mesh"], every.pins["zero"]) == ({"fsdp": 16}, 1)
    assert (eight.pins["mesh"], eight.pins["zero"]) == ({"data": 2, "fsdp": 8}, 1)
    bench = Bench()
    state = [
        bench.plan(case, case.pins, boundless(case.topology)).estimate.device_bytes.optimizer
        for case in (every, eight)
    ]
    assert state[1] == pytest.approx(2 * state[0], rel=0.01)
    assert case_of(document(), row(parallel=plan, zero_group=3)) == (
        "optimizer state over 3 ranks, of which data has 16"
    )


@pytest.mark.long
def test_ranks_of_tensor_cut_the_width_of_experts() -> None:
    case = the_case(**sparse(etp=2))
    assert case.pins["mesh"] == {"fsdp": 2, "expert": 4, "tensor": 2}
    assert case.pins["rules"] == {"expert_mlp": "tensor"} and case.assumed == ()
    bench, without = Bench(), {name: pin for name, pin in case.pins.items() if name != "rules"}
    cut, whole = (
        bench.plan(case, pins, boundless(case.topology)).estimate for pins in (case.pins, without)
    )
    assert cut.seconds.compute < whole.seconds.compute
    assert cut.device_bytes.parameters < whole.device_bytes.parameters


def test_experts_over_ranks_of_tensor() -> None:
    """With etp 1 the ranks of experts are those of data and tensor together."""
    case = the_case(**sparse(etp=1, ep=16), framework="Megatron-Core")
    assert case.pins["mesh"] == {"expert": 8, "tensor": 2} and case.pins["zero"] == 1
    assert case.pins["rules"] == {"expert_mlp": "tensor"} and case.assumed == ()
    assert case.software.stack.exchange == "ranks"
    # more ranks than data has: no other reading is possible
    beyond = the_case(**sparse(ep=16), framework="Megatron-Core")
    assert (beyond.pins, beyond.software) == (case.pins, case.software)
    assert beyond.assumed == ("experts over ranks of tensor",)


@pytest.mark.parametrize(
    ("plan", "why"),
    (
        ({"etp": 3}, "experts over 3 of 2 ranks of tensor"),
        ({"etp": 1, "ep": 1}, "experts over 1 ranks, 2 of them of tensor"),
        ({"etp": 2, "ep": 16}, "experts over 16 ranks, of which data has 8"),
        ({"etp": 1, "ep": 64}, "experts over 32 ranks, of which data has 8"),
    ),
)
def test_ranks_of_experts_that_no_mesh_has(plan: dict[str, int], why: str) -> None:
    assert case_of(document(), row(**sparse(**plan))) == why


def test_what_a_row_does_not_say_of_experts_is_assumed() -> None:
    assert the_case(**sparse()).assumed == ("width of experts over tensor",)
    dense = the_case(parallel={**PLAN, "etp": 1})
    assert "rules" not in dense.pins and dense.assumed == ()


def test_experts_take_ranks_of_replicas_and_of_shards() -> None:
    spread = spread_of(row(**sparse(tp=1)), True, {"tp": 1, "ep": 8}, 4, 4)
    assert (spread.data, spread.fsdp, spread.expert, spread.cut) == (2, 1, 8, False)


def test_zero_shards_over_experts_and_context_alone() -> None:
    """What ZeRO shards, it shards over ranks of experts and of the context too."""
    experts = the_case(**sparse(tp=1, dp=16, ep=16))
    assert (experts.pins["mesh"], experts.pins["zero"]) == ({"expert": 16}, 1)
    context = the_case(parallel={**PLAN, "tp": 1, "pp": 1, "dp": 1, "cp": 16, "zero_stage": 1})
    assert (context.pins["mesh"], context.pins["zero"]) == ({"context": 16}, 1)
    assert isinstance(context, Case)
