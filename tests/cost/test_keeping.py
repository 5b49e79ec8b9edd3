"""What stacks keep of layers and losses, against counts by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import pytest

from shardlib.cost.activations import (
    LiveRange,
    ProfileMemory,
    fused,
    in_half_precision,
    quantised,
    remat_rows,
    rewritten,
    save_named,
    save_operands,
)
from shardlib.cost.attention import FORWARD
from shardlib.cost.experts import with_local_routing
from shardlib.cost.facts import named_results
from shardlib.cost.framework import RESULTS, XLA, FrameworkProfile
from shardlib.cost.memory import live_ranges
from shardlib.cost.pricing import Estimate
from shardlib.graph import Graph, check
from shardlib.machines.topology import topology
from shardlib.planner.plan import Plan
from shardlib.planner.search import search
from shardlib.planner.workload import Workload, prepare
from shardlib.propagation.colours import colour
from tests.cost.traced import BATCH, CONFIGS, SEQ, plain, problem, saved_bytes

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
        workload=loaded(profile, name),
        profile=profile,
    )


def test_results_of_a_layer_have_names() -> None:
    config, step = CONFIGS["llama"], fused(plain("llama").steps["none"])
    region = next(op.region for op in step.graph.ops if op.kind == FORWARD)
    found = named_results(step.graph, region, step.weights())
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
        found = named_results(step.graph, region, step.weights())
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
    changed, new = save_named(step, names, ("query", "context"))
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
    check(save_operands(step, names, eager=True)[0].graph)


@pytest.mark.long
def test_copies_beside_attention_and_results_in_host_memory() -> None:
    config = CONFIGS["llama"]
    layer = 2 * TOKENS * config.heads * config.head_dim
    before, after = under("attention_copies", HAND.attention_copies, 3.0)
    copies = after.device_bytes.activations - before.device_bytes.activations
    assert copies == 3 * layer * config.layers
    kept, hosted = (  # four layers, of which two are on their way
        planned(replace(HAND, kept=words, offloaded=host), "windows").estimate.device_bytes
        for words, host in ((("layer_input", "query"), ()), (("query",), ("layer_input",)))
    )  # type: ignore[arg-type]
    assert kept.activations - hosted.activations == 2 * 2 * TOKENS * CONFIGS["windows"].embed


@pytest.mark.long
def test_inputs_gathered_along_the_sequence_are_kept_whole() -> None:
    rules = {
        "batch": ("data", "fsdp"),
        **dict.fromkeys(("heads", "kv_heads", "mlp", "vocab", "seq"), "tensor"),
    }
    pins = {"mesh": {"tensor": 2}, "sequence_parallel": True, "rules": rules}
    again, kept = under("gathered_inputs", "again", "kept", **pins)
    # two norms a layer, 2 bytes, of which half was elsewhere
    more = kept.device_bytes.activations - again.device_bytes.activations
    assert more == 2 * TOKENS * CONFIGS["llama"].embed * CONFIGS["llama"].layers
    again, kept = under("gathered_inputs", "again", "kept")
    assert again.device_bytes == kept.device_bytes


@pytest.mark.long
def test_the_loss_takes_so_many_bytes_a_logit() -> None:
    facts, step = loaded(HAND).programs["none", False].facts, plain("llama").steps["none"]
    profile = replace(HAND, logit_bytes=10.0)
    found = ProfileMemory(facts, profile).live_ranges(live_ranges(facts, step, profile))
    before = ProfileMemory(facts, HAND).live_ranges(live_ranges(facts, step, HAND))
    logits = TOKENS * CONFIGS["llama"].vocab_size

    def large(among: list[LiveRange]) -> list[LiveRange]:
        return [
            life
            for life in among
            if facts.graph.values[life.value].shape == (BATCH, SEQ, CONFIGS["llama"].vocab_size)
        ]

    loss, gradient = large(found)
    assert [life.ratio * facts.graph.values[life.value].bytes for life in (loss, gradient)] == [
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
    even, uneven = under("balance", "layers", "work", name="windows", **pins)
    # weights of the head over those of a layer
    head = 128 * 64 / (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
    assert loaded(HAND, "windows").model.head_work == pytest.approx(head)
    # floor((4 + 0.17) / 2) + 1 = 3 layers instead of 2
    assert uneven.device_bytes.parameters > even.device_bytes.parameters


@pytest.mark.long
def test_stages_that_gather_once_a_step_hold_everything_whole() -> None:
    buffered = replace(HAND, gradient_buffer=True)
    pins = {"mesh": {"stage": 2, "fsdp": 2}, "zero": 3, "schedule": "1f1b", "microbatches": 1}
    use, step = under("stage_gathers", "use", "step", profile=buffered, **pins)
    assert step.device_bytes.parameters == pytest.approx(3 * use.device_bytes.parameters, rel=0.02)
    assert step.device_bytes.gradients > use.device_bytes.gradients
    alone = {**pins, "mesh": {"fsdp": 2}, "schedule": "none"}
    use, step = under("stage_gathers", "use", "step", profile=buffered, **alone)
    assert use.device_bytes == step.device_bytes


@pytest.mark.long
def test_ends_that_stay_gathered() -> None:
    once, stay = under(
        "embedding_and_head_gathered",
        False,
        True,
        profile=replace(HAND, logit_bytes=400.0),
        mesh={"fsdp": 2},
        zero=3,
    )
    config = CONFIGS["llama"]
    assert stay.device_bytes.communication - once.device_bytes.communication == pytest.approx(
        2 * config.vocab_size * config.embed, rel=0.02
    )  # the embedding, too, at the loss


@pytest.mark.long
@pytest.mark.parametrize("zero", [2, 3])
def test_collectives_that_are_joined_keep_gradients_and_parameters_whole(zero: int) -> None:
    late = replace(HAND, early_remat=False)
    pins = {"mesh": {"fsdp": 2}, "zero": zero, "remat": "full"}
    apart, together = under("collected", "apart", "together", profile=late, **pins)
    whole = sum(2 * math.prod(p.shape) for p in problem("llama").parameters)  # bfloat16
    ours, theirs = together.device_bytes, apart.device_bytes
    if zero == 3:  # a layer's parameters make room for its gradients
        assert ours.gradients + ours.communication == pytest.approx(whole, rel=0.02)
    assert theirs.gradients < ours.gradients <= whole
    assert (ours.parameters, ours.optimizer) == (theirs.parameters, theirs.optimizer)
    assert together.step_seconds == apart.step_seconds
    apart, together = under("collected", "apart", "together")
    assert apart.device_bytes == together.device_bytes, "without ZeRO everything is whole anyway"


def test_routed_experts_keep_rows_and_the_products_that_activations_read() -> None:
    """As the lowered region does: of a gated activation the sigmoid, the slope, the activated gate
    and the product are made again.
    """
    config, step = CONFIGS["mixture"], plain("mixture").steps["none"]
    assert config.experts is not None
    before, names = with_local_routing(step, colour(plain("mixture")).steps["none"], "batch")
    after, _ = remat_rows(before, names)
    check(after.graph)
    freed = (saved_bytes(before) - saved_bytes(after)) / config.layers / TOKENS
    assert freed == 4 * 2 * config.experts.per_token * config.experts.mlp


@pytest.mark.long
def test_rows_that_have_travelled_lie_where_messages_have_room() -> None:
    config = CONFIGS["mixture"]
    assert config.experts is not None
    pins = {"mesh": {"expert": 2}, "experts": "dropless", "attention": "traced"}
    even, room = under("exchange_room", 1.0, 1.25, name="mixture", profile=XLA, **pins)
    rows = config.layers * TOKENS / 2 * config.experts.per_token
    more = room.device_bytes.activations - even.device_bytes.activations
    assert more == 0.25 * rows * 2 * (config.embed + 2 * config.experts.mlp)


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
    changed, new = in_half_precision(step, names)
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
    step, names = in_half_precision(
        plain("llama").steps["none"], colour(plain("llama")).steps["none"]
    )
    again, same = in_half_precision(step, names)
    assert again is step and same is names
    eight, _ = quantised(step, names, "float8_e4m3fn", delayed=True)
    assert products(eight.graph)[frozenset({"float8_e4m3fn"})] > 0, (
        "weights of layers go on to eight bits"
    )


def under(
    word: str,
    *values: object,
    name: str = "llama",
    profile: FrameworkProfile = HAND,
    **pins: object,
) -> list[Estimate]:
    """What plans cost where one fact of the profile has each of these values."""
    profiles = [replace(profile, **{word: value}) for value in values]  # type: ignore[arg-type]
    return [planned(one, name, **pins).estimate for one in profiles]
