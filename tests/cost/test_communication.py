"""What is planned to be communicated, held to what the GPU compiler made of the same models (with
`benchmarks/planned_collectives.py`), by formulas.
"""

from __future__ import annotations

import functools

import optax
import pytest

from shardlib import models
from shardlib.frontend.model import problem
from shardlib.models.config import EncoderDecoderConfig, Experts, TransformerConfig
from shardlib.planner.search import search
from shardlib.planner.workload import Workload, prepare
from shardlib.verification.report import totals

BATCH, SEQ, EMBED, VOCAB, LAYERS = 16, 256, 128, 512, 2
#: Bytes of the tokens of a device, whole along the sequence, in 16 bits; fsdp is 2
TOKENS = BATCH // 2 * SEQ * EMBED * 2
DENSE = TransformerConfig(
    name="dense",
    vocab_size=VOCAB,
    layers=LAYERS,
    embed=EMBED,
    heads=4,
    kv_heads=4,
    head_dim=32,
    mlp=256,
    max_seq=SEQ,
)
CONFIGS = {
    "dense": DENSE,
    "tied": TransformerConfig(**{**vars(DENSE), "name": "tied", "tied": True}),
    "mixture": TransformerConfig(
        **{
            **vars(DENSE),
            "name": "mixture",
            "experts": Experts(count=4, per_token=2, mlp=256, balance=0.01),
        }
    ),
    "t5": EncoderDecoderConfig(
        name="t5",
        vocab_size=VOCAB,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        embed=EMBED,
        heads=4,
        head_dim=32,
        mlp=256,
        tied=False,
        max_seq=SEQ,
    ),
}
ALONG = {"batch": ["data", "fsdp"], "seq": ["tensor"]}


@functools.cache
def workload(name: str) -> Workload:
    """A traced model for Nvidia's GPUs."""
    config = CONFIGS[name]
    init, loss = models.build(config)
    batch = models.example_batch(config, BATCH, SEQ)
    return prepare(problem(init, loss, optax.adamw(1e-3), batch), "nvidia")


@functools.cache
def planned(name: str, zero: int = 3, tensor: int = 4, rules: str = "seq"):
    """Bytes of collectives by kind and axes."""
    named = {**ALONG, **({"expert_mlp": ["tensor"]} if rules == "experts" else {})}
    pins = {
        "mesh": {"fsdp": 8 // tensor, "tensor": tensor},
        "microbatches": 1,
        "zero": zero,
        "remat": "full",
        "attention": "traced" if name == "t5" else "blocks",
        **({"rules": named} if tensor > 1 else {}),
    }
    load = workload(name)
    return totals(search(load.problem, "h100:8", pins, workload=load).estimate.collectives)


@pytest.mark.long
def test_attention_that_is_written_out_gathers_keys_and_values_and_exchanges_no_scores():
    found, attentions = planned("t5"), 3 * LAYERS  # of the decoder two in a layer
    assert not [kind for kind, _ in found if kind == "all-to-all"]
    # Forward and again, of every attention; and what the decoder's attention and both ends need.
    keys_and_values = 2 * attentions * 2 * TOKENS
    assert keys_and_values <= found["all-gather", ("tensor",)] <= 1.3 * keys_and_values


@pytest.mark.long
def test_gradients_of_scales_are_summed_over_all_axes_at_once():
    found, scales = planned("dense"), (2 * LAYERS + 1) * EMBED * 4
    assert found["all-reduce", ("fsdp", "tensor")] == scales
    assert found["all-reduce", ("fsdp",)] < scales


@pytest.mark.long
def test_tokens_are_gathered_for_experts_whose_width_is_sharded_and_sums_are_scattered():
    """Forward, again, and of results backward; results of a token are added up before they are
    scattered, forward, and so are gradients.
    """
    wide, narrow = planned("mixture", rules="experts"), planned("mixture")
    gathered, scattered = (
        wide.get((kind, ("tensor",)), 0) - narrow.get((kind, ("tensor",)), 0)
        for kind in ("all-gather", "reduce-scatter")
    )
    assert gathered == pytest.approx(3 * LAYERS * TOKENS)
    assert scattered == pytest.approx(2 * LAYERS * TOKENS / 4)


@pytest.mark.long
def test_each_use_of_a_table_scatters_its_gradient_and_one_reduction_sums_both():
    """The lookup's is in float32, the head's in 16 bits."""
    table = VOCAB * EMBED
    scattered = [planned(name, tensor=1)["reduce-scatter", ("fsdp",)] for name in ("tied", "dense")]
    assert scattered[0] == scattered[1]  # that of a head of its own, too
    reduced = [
        planned(name, zero=1, tensor=1)["all-reduce", ("fsdp",)] for name in ("tied", "dense")
    ]
    assert reduced[1] - reduced[0] == table * 2


@pytest.mark.long
def test_scatters_over_two_axes_of_a_torus_are_done_over_one_after_the_other():
    """XLA for TPU has no reduce-scatter over two dims of a torus: the gradient of the head, in 16
    bits, is halved over fsdp and the half is quartered over expert; on a switch it is one.
    """
    config = CONFIGS["mixture"]
    init, loss = models.build(config)
    batch = models.example_batch(config, BATCH, SEQ)
    pins = {
        "mesh": {"fsdp": 2, "expert": 4},
        "microbatches": 1,
        "zero": 3,
        "attention": "blocks",
        "experts": "dropless",
    }
    head = 2 * VOCAB * EMBED
    for topology, vendor, wanted in (
        ("v5e:2x4", "google", {(("fsdp",), head // 2), (("expert",), head // 8)}),
        ("h100:8", "nvidia", {(("fsdp", "expert"), head // 8)}),
    ):
        load = prepare(problem(init, loss, optax.adamw(1e-3), batch), vendor)
        listed = search(load.problem, topology, pins, workload=load).estimate.collectives
        found = {(one.axes, one.bytes) for one in listed if one.kind == "reduce-scatter"}
        assert wanted <= found
        assert (("fsdp", "expert") in {axes for axes, _ in found}) == (vendor == "nvidia")
