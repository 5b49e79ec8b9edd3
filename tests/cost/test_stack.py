"""Stacks: facts about software, read from data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlib.cost.framework import (
    CHOICES,
    XLA,
    FrameworkProfile,
    framework_profile,
    framework_profiles,
)
from shardlib.errors import PinError
from shardlib.lowering.experts import Where


@pytest.mark.parametrize("name", sorted(framework_profiles()))
def test_shipped_stacks_have_sources_and_survive_json(name: str) -> None:
    one = framework_profile(name)
    assert one.name == name and one.sources
    assert FrameworkProfile.from_json(one.to_json()) == one
    assert hash(one) == hash(FrameworkProfile.from_json(one.to_json()))


def test_the_default_says_nothing_but_what_lowering_does_with_experts_gathers_and_gradients() -> (
    None
):
    assert replace(
        XLA,
        sources=(),
        exchange_room=1.0,
        routed_saves="as others",
        reduction="microbatch",
        gathered_inputs="again",
    ) == FrameworkProfile(name="xla")
    assert XLA.exchange_room == Where(expert=(), ways=1).slack
    assert framework_profile("xla") is XLA is framework_profile(XLA)


def test_facts_of_published_stacks() -> None:
    assert (
        framework_profile("megatron-2021").attention,
        framework_profile("megatron-flash").attention,
    ) == (
        "traced",
        "fused",
    )
    assert (
        framework_profile("llm-foundry").reduction == "microbatch"
        and framework_profile("megatron-core").reduction == "step"
    )
    # arXiv:1910.02054, section 3.1: 16 bytes a parameter with float16, of which 12 are the
    # optimizer's
    assert (
        2
        + framework_profile("deepspeed-zero3").gradient_bytes(2)
        + (framework_profile("deepspeed-zero3").state_bytes or 0)
        == 16
    )
    # arXiv:2205.05198 and Megatron-LM: 18 bytes with float32 gradients
    assert (
        2
        + framework_profile("megatron-2021").gradient_bytes(2)
        + (framework_profile("megatron-2021").state_bytes or 0)
        == 18
    )
    assert XLA.gradient_bytes(4) == 4


def test_all_faults_are_listed() -> None:
    with pytest.raises(PinError) as caught:
        FrameworkProfile(
            name="mine",
            attention="flash",
            gather_overlap=1.5,
            reduction_dtype="half",
            runtime_bytes=-1,
            fragmentation=0.5,
        )
    assert (
        str(caught.value) == "framework profile 'mine' is not usable:\n"
        "  - attention is 'flash'; it is one of traced, fused, blocks, rematerialised\n"
        "  - gather_overlap is 1.5; it is a share from 0 to 1\n"
        "  - reduction_dtype is 'half', which is no dtype\n"
        "  - runtime_bytes is -1; it must not be negative\n"
        "  - fragmentation is 0.5; it is at least 1"
    )


@pytest.mark.parametrize("field", sorted(CHOICES))
def test_every_word_is_checked(field: str) -> None:
    for word in CHOICES[field]:
        assert getattr(FrameworkProfile(name="mine", **{field: word}), field) == word
    with pytest.raises(PinError, match=field):
        FrameworkProfile(name="mine", **{field: "no such word"})


def test_unknown_names_and_fields() -> None:
    with pytest.raises(PinError, match="framework profiles are xla, alpa, "):
        framework_profile("caffe")
    with pytest.raises(PinError, match="'speed' is no field"):
        FrameworkProfile.from_json({"name": "mine", "speed": 1})
