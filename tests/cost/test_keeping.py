"""What stacks keep of layers and losses, against counts by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import pytest

from shardlib.cost.activations import (
    Keeping,
    Life,
    in_halves,
    keep_named,
    keep_operands,
    keep_rows,
    quantised,
    rewritten,
    saved_bytes,
)
from shardlib.cost.attention import FORWARD, fused
from shardlib.cost.experts import localised
from shardlib.cost.facts import roles
from shardlib.cost.framework import RESULTS, XLA, FrameworkProfile
from shardlib.cost.layers import weights_of
from shardlib.cost.memory import lives
from shardlib.graph import Graph, check
from shardlib.machines.topology import topology
from shardlib.planner.plan import Plan
from shardlib.planner.search import search
from shardlib.planner.workload import Workload, prepare
from shardlib.propagation.colours import colour
from tests.cost.traced import BATCH, CONFIGS, SEQ, plain, problem

TOKENS = SEQ * BATCH
HAND = FrameworkProfile(
    name="hand",
    attention="fused",
    saves="operands",
    embedding_and_head="owners",
    pipeline="asynchronous",
)


def kept_bytes(name: str, *kept: str, **changes: object) -> float:
    """Bytes a token and layer that a stack saves."""
    step, _ = rewritten(
        plain(name).steps["none"],
        colour(plain(name)).steps["none"],
        replace(HAND, kept=kept, **changes),
    )  # type: ignore[arg-type]
    return saved_bytes(step) / CONFIGS[name].layers / TOKENS


@lru_cache(maxsize=16)
def loaded(profile: FrameworkProfile, name: str = "llama") -> Workload:
    return prepare(problem(name), "nvidia", profile)


def planned(
    profile: FrameworkProfile, name: str = "llama", where: str = "h100:4", **pins: object
) -> Plan:
    return search(
        problem(name),
        topology(where),
        {"mesh": {"data": 1}, "zero": 0, "remat": "none", "microbatches": 1, **pins},
        load=loaded(profile, name),
        profile=profile,
    )


def test_results_of_a_layer_have_names() -> None:
    config, step = CONFIGS["llama"], fused(plain("llama").steps["none"])
    region = next(op.region for op in step.graph.ops if op.kind == FORWARD)
    found = roles(step.graph, region, weights_of(step))
    assert tuple(found) == RESULTS
    sizes = {
        name: {math.prod(step.graph.values[value].shape) // TOKENS for value in values}
        for name, values in found.items()
        if name not in ("context", "layer_input")
    }
    wide, narrow = config.heads * config.head_dim, (config.kv_heads or 0) * config.head_dim
    assert sizes == {
        "query": {wide},
        "key": {narrow},
        "value": {narrow},
        "out": {config.embed},
        "gate": {config.mlp},
        "wide": {config.mlp},
        "narrow": {config.embed},
    }
    assert all(len(found[name]) == 1 for name in sizes)


@pytest.mark.parametrize("name", ["gpt", "latent", "mixture", "windows"])
def test_no_result_has_two_names(name: str) -> None:
    step = fused(plain(name).steps["none"])
    for region in {op.region for op in step.graph.ops if op.kind == FORWARD}:
        found = roles(step.graph, region, weights_of(step))
        named = [value for values in found.values() for value in values]
        assert len(named) == len(set(named)) and all(
            found[word] for word in ("query", "key", "value", "context", "out", "narrow")
        )


def test_what_is_named_is_saved_and_nothing_else() -> None:
    config = CONFIGS["llama"]
    rows = 4 * (config.heads + 8)  # float32 statistics of rows: one a head, and a few of norms
    heads, groups = config.heads * config.head_dim, (config.kv_heads or 0) * config.head_dim
    assert kept_bytes("llama", "layer_input") == pytest.approx(2 * config.embed, abs=rows)
    assert kept_bytes("llama", "query", "value", "context", "gate") == pytest.approx(
        2 * (config.embed + 2 * heads + groups + config.mlp), abs=rows
    )
    assert kept_bytes("llama", "query", "key", "value") == pytest.approx(
        2 * (config.embed + heads + 2 * groups), abs=rows
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_keeping_less_leaves_a_sound_graph_and_computes_more(name: str) -> None:
    step, names = fused(plain(name).steps["none"]), colour(plain(name)).steps["none"]
    changed, new = keep_named(step, names, ("query", "context"))
    check(changed.graph)
    assert len(new) == len(changed.graph.values) and new[: len(names)] == names
    flops = [
        sum(op.flops * graph.trips(op.region) for op in graph.ops)
        for graph in (step.graph, changed.graph)
    ]
    assert saved_bytes(changed) < saved_bytes(step) and flops[1] > flops[0]


def test_eager_layers_keep_the_activated_gate() -> None:
    assert kept_bytes("llama", saves="eager") - kept_bytes("llama") == 2 * CONFIGS["llama"].mlp
    assert kept_bytes("gpt", saves="eager") == kept_bytes("gpt")
    step, names = fused(plain("llama").steps["none"]), colour(plain("llama")).steps["none"]
    check(keep_operands(step, names, eager=True)[0].graph)


@pytest.mark.long
def test_copies_beside_attention_and_results_in_host_memory() -> None:
    config = CONFIGS["llama"]
    layer = 2 * TOKENS * config.heads * config.head_dim
    before = planned(HAND).estimate.device_bytes.activations
    assert (
        planned(replace(HAND, attention_copies=3.0)).estimate.device_bytes.activations - before
        == 3 * layer * config.layers
    )
    deep = {"name": "windows"}  # four layers, of which two are on their way
    kept, hosted = (
        planned(replace(HAND, kept=words, offloaded=host), **deep).estimate.device_bytes.activations
        for words, host in ((("layer_input", "query"), ()), (("query",), ("layer_input",)))
    )  # type: ignore[arg-type]
    assert kept - hosted == 2 * 2 * TOKENS * CONFIGS["windows"].embed


@pytest.mark.long
def test_inputs_gathered_along_the_sequence_are_kept_whole() -> None:
    rules = {
        "batch": ("data", "fsdp"),
        "heads": "tensor",
        "kv_heads": "tensor",
        "mlp": "tensor",
        "vocab": "tensor",
        "seq": "tensor",
    }
    pins = {"mesh": {"tensor": 2}, "sequence_parallel": True, "rules": rules}
    again, kept = (
        planned(replace(HAND, gathered_inputs=word), **pins).estimate.device_bytes.activations
        for word in ("again", "kept")
    )  # type: ignore[arg-type]
    assert (
        kept - again == 2 * TOKENS * CONFIGS["llama"].embed * CONFIGS["llama"].layers
    )  # two norms a layer, 2 bytes, of which half was elsewhere
    alone = [
        planned(replace(HAND, gathered_inputs=word)).estimate.device_bytes
        for word in ("again", "kept")
    ]
    assert alone[0] == alone[1]


@pytest.mark.long
def test_the_loss_takes_so_many_bytes_a_logit() -> None:
    facts, step = loaded(HAND).programs["none", False].facts, plain("llama").steps["none"]
    profile = replace(HAND, logit_bytes=10.0)
    found = Keeping(facts, profile).lives(lives(facts, step, profile))
    before = Keeping(facts, HAND).lives(lives(facts, step, HAND))
    logits = TOKENS * CONFIGS["llama"].vocab_size

    def large(among: list[Life]) -> list[Life]:
        return [
            life
            for life in among
            if facts.graph.values[life.value].shape == (BATCH, SEQ, CONFIGS["llama"].vocab_size)
        ]

    loss, gradient = large(found)
    assert [life.share * facts.graph.values[life.value].bytes for life in (loss, gradient)] == [
        10 * logits,
        2 * logits,
    ]
    assert loss.birth == min(life.birth for life in large(before))
    assert loss.death + 1 == gradient.birth
    assert gradient.death == max(life.death for life in large(before))
    assert [life for life in found if life not in (loss, gradient)] == [
        life for life in before if life not in large(before)
    ]


@pytest.mark.long
def test_stages_cut_by_work_put_the_layer_that_passes_it_before_the_cut() -> None:
    pins = {"mesh": {"stage": 2}, "schedule": "1f1b", "microbatches": 2}
    even, uneven = (
        planned(replace(HAND, balance=word), "windows", **pins).estimate.device_bytes.parameters
        for word in ("layers", "work")
    )  # type: ignore[arg-type]
    model = loaded(HAND, "windows").model
    head = (
        128 * 64 / (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
    )  # weights of the head over those of a layer
    assert model.head_layers == pytest.approx(head)
    assert uneven > even  # floor((4 + 0.17) / 2) + 1 = 3 layers instead of 2


@pytest.mark.long
def test_stages_that_gather_once_a_step_hold_everything_whole() -> None:
    pins = {"mesh": {"stage": 2, "fsdp": 2}, "zero": 3, "schedule": "1f1b", "microbatches": 1}
    use, step = (
        planned(
            replace(HAND, gradient_buffer=True, stage_gathers=word), **pins
        ).estimate.device_bytes
        for word in ("use", "step")
    )  # type: ignore[arg-type]
    assert step.parameters == pytest.approx(3 * use.parameters, rel=0.02)
    assert step.gradients > use.gradients
    alone = [
        planned(
            replace(HAND, gradient_buffer=True, stage_gathers=word),
            **{**pins, "mesh": {"fsdp": 2}, "schedule": "none"},
        ).estimate.device_bytes
        for word in ("use", "step")
    ]  # type: ignore[arg-type]
    assert alone[0] == alone[1]


@pytest.mark.long
def test_ends_that_stay_gathered() -> None:
    pins = {"mesh": {"fsdp": 2}, "zero": 3}
    once, stay = (
        planned(
            replace(HAND, logit_bytes=400.0, embedding_and_head_gathered=flag), **pins
        ).estimate.device_bytes
        for flag in (False, True)
    )  # type: ignore[arg-type]
    config = CONFIGS["llama"]
    assert stay.communication - once.communication == pytest.approx(
        2 * config.vocab_size * config.embed, rel=0.02
    )  # the embedding, too, at the loss


@pytest.mark.long
@pytest.mark.parametrize("zero", [2, 3])
def test_collectives_that_are_joined_keep_gradients_and_parameters_whole(zero: int) -> None:
    pins = {"mesh": {"fsdp": 2}, "zero": zero, "remat": "full"}
    apart, together = (
        planned(replace(HAND, early_remat=False, collected=word), **pins).estimate
        for word in ("apart", "together")
    )  # type: ignore[arg-type]
    whole = sum(2 * math.prod(p.shape) for p in problem("llama").parameters)  # bfloat16
    held = together.device_bytes.gradients + together.device_bytes.communication
    if zero == 3:
        assert held == pytest.approx(whole, rel=0.02), (
            "a layer's parameters make room for its gradients"
        )
    assert together.device_bytes.gradients > apart.device_bytes.gradients
    assert together.device_bytes.gradients <= whole
    assert (together.device_bytes.parameters, together.device_bytes.optimizer) == (
        apart.device_bytes.parameters,
        apart.device_bytes.optimizer,
    )
    assert together.step_seconds == apart.step_seconds
    alone = [
        planned(replace(HAND, collected=word)).estimate.device_bytes
        for word in ("apart", "together")
    ]  # type: ignore[arg-type]
    assert alone[0] == alone[1], "without ZeRO everything is whole anyway"


def test_routed_experts_keep_rows_and_the_products_that_activations_read() -> None:
    """As the lowered region does: of a gated activation the sigmoid, the slope, the activated gate
    and the product are made again.
    """
    config, step = CONFIGS["mixture"], plain("mixture").steps["none"]
    assert config.experts is not None
    before, names = localised(step, colour(plain("mixture")).steps["none"], "batch")
    after, _ = keep_rows(before, names)
    check(after.graph)
    freed = (saved_bytes(before) - saved_bytes(after)) / config.layers / TOKENS
    assert freed == 4 * 2 * config.experts.per_token * config.experts.mlp


@pytest.mark.long
def test_rows_that_have_travelled_lie_where_messages_have_room() -> None:
    config = CONFIGS["mixture"]
    assert config.experts is not None
    pins = {"mesh": {"expert": 2}, "experts": "dropless", "attention": "traced"}
    even, room = (
        planned(
            replace(XLA, exchange_room=factor), "mixture", **pins
        ).estimate.device_bytes.activations
        for factor in (1.0, 1.25)
    )
    rows = config.layers * TOKENS / 2 * config.experts.per_token
    assert room - even == 0.25 * rows * 2 * (config.embed + 2 * config.experts.mlp)


def test_words_of_results_are_checked() -> None:
    with pytest.raises(ValueError, match="kept names 'everything'"):
        FrameworkProfile(name="mine", kept=("everything",))
    assert FrameworkProfile.from_json(replace(XLA, kept=("context",)).to_json()).kept == (
        "context",
    )


@pytest.mark.long
def test_a_pinned_number_of_layers_recomputes_and_the_others_do_not() -> None:
    none, some, full = (
        planned(HAND, "windows", **pins).estimate
        for pins in ({}, {"remat": "full", "remat_layers": 2}, {"remat": "full"})
    )
    assert full.hardware_flops > some.hardware_flops > none.hardware_flops
    assert (
        full.device_bytes.activations
        < some.device_bytes.activations
        < none.device_bytes.activations
    )


# Products in half precision throughout: which are cast, and that nothing else changes.


def products(graph: Graph) -> Counter[frozenset[str]]:
    """Products by the dtypes of their two operands."""
    return Counter(
        frozenset(graph.values[value].dtype for value in op.operands[:2])
        for op in graph.ops
        if op.kind in ("dot_general", "ragged_dot_general")
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_no_product_mixes_half_and_single_precision(name: str) -> None:
    step, names = plain(name).steps["none"], colour(plain(name)).steps["none"]
    changed, new = in_halves(step, names)
    check(changed.graph)
    assert new[: len(names)] == names and [len(one) for one in new] == [
        len(value.shape) for value in changed.graph.values
    ]
    before, after = products(step.graph), products(changed.graph)
    mixed = frozenset({"bfloat16", "float32"})
    assert before[mixed] > 0 and after[mixed] == 0, (
        "the gradients of logits and of scores are float32 where autodiff makes them"
    )
    assert after[frozenset({"bfloat16"})] == before[frozenset({"bfloat16"})] + before[mixed]
    assert after[frozenset({"float32"})] == before[frozenset({"float32"})], (
        "the router stays in float32"
    )
    assert (before[frozenset({"float32"})] > 0) == (name == "mixture")
    assert sum(op.flops for op in step.graph.ops if op.category == "matmul") == sum(
        op.flops for op in changed.graph.ops if op.category == "matmul"
    )


def test_a_step_without_mixed_products_is_left_alone() -> None:
    step, names = in_halves(plain("llama").steps["none"], colour(plain("llama")).steps["none"])
    again, same = in_halves(step, names)
    assert again is step and same is names
    eight, _ = quantised(step, names, "float8_e4m3fn", delayed=True)
    assert products(eight.graph)[frozenset({"float8_e4m3fn"})] > 0, (
        "weights of layers go on to eight bits"
    )
