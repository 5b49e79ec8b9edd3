"""Fused attention: what is found, what it computes, moves and saves, against formulas of the
papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from shardlib.cost.activations import (
    fused,
    quantised,
    rematerialise_attention,
    rewritten,
    save_operands,
)
from shardlib.cost.attention import BACKWARD, FORWARD, causal_share, cores
from shardlib.cost.framework import XLA, framework_profile
from shardlib.cost.items import head_size, head_widths
from shardlib.graph import Graph, Op, StepGraph, check
from shardlib.propagation.colours import colour
from tests.cost.traced import BATCH, CONFIGS, SEQ, plain, problem, saved_bytes
from tests.planner import worlds

POLICIES = ("none", "full", "dots")


def scores_elements(name: str) -> int:
    return BATCH * CONFIGS[name].heads * SEQ * SEQ


def kernels(graph: Graph, kind: str) -> list[Op]:
    return [op for op in graph.ops if op.kind == kind]


def largest_made(graph: Graph) -> int:
    return max(
        math.prod(graph.values[value].shape)
        // (graph.regions[op.region].trips if op.kind == "exit" else 1)
        for op in graph.ops
        for value in op.results
    )


@pytest.mark.matrix
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "square"])
def test_no_array_as_large_as_the_scores_is_left(name: str, policy: str) -> None:
    traced = problem(name).steps[policy]
    step = fused(traced)
    check(step.graph)
    assert largest_made(traced.graph) >= scores_elements(name) > largest_made(step.graph)
    assert step.graph.values == traced.graph.values
    assert step.graph.outputs == traced.graph.outputs
    assert step.gradients == traced.gradients


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_a_recomputed_core_is_one_more_forward_kernel(name: str) -> None:
    steps = problem(name).steps
    assert [len(kernels(fused(steps[policy]).graph, FORWARD)) for policy in POLICIES] == [1, 2, 2]
    assert all(kernels(fused(steps[policy]).graph, BACKWARD) for policy in POLICIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_know_the_size_of_a_head(name: str) -> None:
    graph = fused(plain(name).steps["none"]).graph
    assert {head_size(op) for op in graph.ops if op.kind in (FORWARD, BACKWARD)} == {
        CONFIGS[name].head_dim
    }
    assert {head_size(op) for op in graph.ops if op.kind not in (FORWARD, BACKWARD)} == {0}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "policy", [pytest.param(one, marks=[pytest.mark.matrix] * (one != "none")) for one in POLICIES]
)
def test_kernels_know_the_widths_of_queries_and_values(name: str, policy: str) -> None:
    config = CONFIGS[name]
    latent = config.latent
    widths = (
        (config.head_dim, config.head_dim)
        if latent is None
        else (latent.nope_dim + latent.rope_dim, latent.v_dim)
    )
    graph = fused(problem(name, (policy,)).steps[policy]).graph
    assert {head_widths(op) for op in graph.ops if op.kind in (FORWARD, BACKWARD)} == {widths}
    assert {head_widths(op) for op in graph.ops if op.kind not in (FORWARD, BACKWARD)} == {None}


def test_flops_are_those_of_the_papers() -> None:
    """PaLM (arXiv:2204.02311, appendix B): 12 heads width seq FLOPs a token and layer, uncut;
    backward is 5 matmuls to 2 (arXiv:2307.08691, section 3.1).
    """
    config = CONFIGS["llama"]
    tokens, pair = BATCH * SEQ, 2 * config.heads * config.head_dim * SEQ
    graph = fused(plain("llama").steps["none"], block=SEQ).graph  # one block: nothing to leave out
    (forward,) = kernels(graph, FORWARD)
    backward = sum(op.flops for op in kernels(graph, BACKWARD))
    assert forward.flops == 2 * pair * tokens
    assert backward == 5 * pair * tokens == 2.5 * forward.flops
    palm = 12 * config.heads * config.head_dim * SEQ * tokens
    assert (
        forward.flops + backward - pair * tokens == palm
    )  # the scores again are not counted there


def test_causal_blocks() -> None:
    whole = sum(
        op.flops
        for op in fused(plain("llama").steps["none"], block=SEQ).graph.ops
        if op.kind in (FORWARD, BACKWARD)
    )
    for block in (16, 64, 128):
        blocks = SEQ // block
        computed = sum(query >= key for query in range(blocks) for key in range(blocks)) / blocks**2
        assert causal_share(SEQ, block) == computed
        graph = fused(plain("llama").steps["none"], block=block).graph
        assert sum(op.flops for op in graph.ops if op.kind in (FORWARD, BACKWARD)) == pytest.approx(
            whole * computed
        )


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [1, 30, 64, 65, 200])
def test_blocks_of_a_window(window: int, block: int) -> None:
    seen = [
        (query // block, key // block)
        for query in range(SEQ)
        for key in range(max(0, query - window + 1), query + 1)
    ]
    assert causal_share(SEQ, block, window) == len(set(seen)) / (SEQ // block) ** 2


@pytest.mark.long
def test_windows_are_found_where_all_layers_have_one() -> None:
    for name, window in (("local", 64), ("windows", 0), ("llama", 0)):
        assert {
            (core.causal, core.window)
            for policy in POLICIES
            for core in cores(problem(name).steps[policy])
        } == {(True, window)}, name


def test_attention_without_a_mask_computes_all_blocks() -> None:
    step = worlds.layers().steps["none"]
    (core,) = cores(step)
    assert not core.causal
    (forward,) = kernels(fused(step, block=8).graph, FORWARD)
    assert forward.flops == 2 * (2 * 16 * 32 * 32 * 64)


def test_kernels_read_and_write_no_more_than_queries_keys_values_and_statistics() -> None:
    config = CONFIGS["llama"]
    graph = fused(plain("llama").steps["none"]).graph
    query = BATCH * SEQ * config.heads * config.head_dim
    key = BATCH * SEQ * config.kv_heads * config.head_dim
    rows = BATCH * SEQ * config.heads

    def elements(values: tuple[int, ...]) -> list[int]:
        return sorted(math.prod(graph.values[value].shape) for value in values)

    (forward,) = kernels(graph, FORWARD)
    assert (elements(forward.operands), elements(forward.results)) == (
        sorted([query, key, key]),
        sorted([query, rows]),
    )
    for op in kernels(graph, BACKWARD):
        assert elements(op.operands) == sorted([query, query, key, key, rows])
    assert sorted(
        size for op in kernels(graph, BACKWARD) for size in elements(op.results)
    ) == sorted([query, key, key])


def test_dims_of_heads_can_be_cut_and_rows_of_scores_cannot() -> None:
    graph = fused(plain("llama").steps["none"]).graph
    (forward,) = kernels(graph, FORWARD)
    sizes = [forward.rule.sizes[f] for f in sorted(forward.rule.whole)]
    assert sizes == [CONFIGS["llama"].head_dim, SEQ] and not forward.rule.summed
    of_weights, of_queries = kernels(graph, BACKWARD)
    assert {of_weights.rule.sizes[f] for f in of_weights.rule.summed} == {
        SEQ,
        CONFIGS["llama"].heads // CONFIGS["llama"].kv_heads,
    }
    assert not of_queries.rule.summed


def test_a_softmax_of_logits_or_of_a_router_is_no_attention() -> None:
    for name in ("mixture", "gpt"):
        assert len(cores(plain(name).steps["none"])) == 1
    assert cores(worlds.mlp().steps["none"]) == []
    step = worlds.mlp().steps["none"]
    assert fused(step) is step


def test_where_something_else_reads_the_scores_they_stay() -> None:
    step = plain("llama").steps["none"]
    (core,) = cores(step)
    (scores,) = step.graph.ops[core.scores[0]].results
    saved = next(
        op
        for op in step.graph.ops
        if op.kind == "exit"
        and step.graph.values[op.operands[0]].shape == step.graph.values[scores].shape
    )
    watched = tuple(replace(op, operands=(scores,)) if op is saved else op for op in step.graph.ops)
    seen = replace(
        step,
        graph=replace(step.graph, ops=watched, outputs=(*step.graph.outputs, saved.results[0])),
    )
    assert fused(seen) is seen


def per_layer(step: StepGraph, name: str) -> float:
    """Saved bytes of a layer over seq x batch x embed."""
    config = CONFIGS[name]
    return saved_bytes(step) / config.layers / (SEQ * BATCH * config.embed)


def test_saved_bytes_are_those_of_korthikanti() -> None:
    """arXiv:2205.05198, equation 2: s b h (34 + 5 a s / h) with dropout, whose masks and results
    take 2 + 3 a s / h of it.
    """
    config = CONFIGS["gpt"]
    wide = config.heads * SEQ / config.embed
    step, names = plain("gpt").steps["none"], colour(plain("gpt")).steps["none"]
    statistics = (
        6 * 4 / config.embed + 2 * 4 * config.heads / config.embed
    )  # rows of norms and of the softmax, float32
    assert per_layer(save_operands(step, names)[0], "gpt") == pytest.approx(
        32 + 2 * wide, abs=statistics
    )
    assert per_layer(
        save_operands(*rematerialise_attention(step, names))[0], "gpt"
    ) == pytest.approx(32, abs=statistics)
    assert per_layer(save_operands(fused(step), names)[0], "gpt") == pytest.approx(
        32, abs=statistics
    )
    assert per_layer(step, "gpt") > 1.2 * (32 + 2 * wide)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("how", [save_operands, rematerialise_attention])
def test_values_saved_otherwise_leave_a_sound_graph(
    name: str, how: Callable[..., tuple[StepGraph, tuple[object, ...]]]
) -> None:
    step, names = plain(name).steps["none"], colour(plain(name)).steps["none"]
    changed, new = how(step, names)
    check(changed.graph)
    assert new[: len(names)] == names and len(new) == len(changed.graph.values)
    assert all(
        len(one) == len(value.shape) for one, value in zip(new, changed.graph.values, strict=True)
    )  # type: ignore[arg-type]
    assert saved_bytes(changed) < saved_bytes(step)
    matmuls = [
        sum(op.flops * graph.trips(op.region) for op in graph.ops if op.category == "matmul")
        for graph in (step.graph, changed.graph)
    ]
    assert matmuls[1] == matmuls[0] if how is save_operands else matmuls[1] > matmuls[0]


def test_stacks_decide() -> None:
    step, names = plain("llama").steps["none"], colour(plain("llama")).steps["none"]
    same, same_names = rewritten(step, names, XLA)
    assert same is step and same_names is names
    assert not kernels(rewritten(step, names, framework_profile("megatron-2021"))[0].graph, FORWARD)
    assert kernels(rewritten(step, names, framework_profile("megatron-core"))[0].graph, FORWARD)
    saved = [
        saved_bytes(rewritten(step, names, framework_profile(name))[0])
        for name in ("xla", "maxtext-tpu", "megatron-core")
    ]
    assert saved[0] > saved[1] > saved[2]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("delayed", [False, True])
def test_products_of_weights_in_eight_bits(name: str, *, delayed: bool) -> None:
    """Three products for every weight of a layer, forward and two backward, and nothing else, run
    in 8 bits.
    """
    traced, names = plain(name).steps["none"], colour(plain(name)).steps["none"]
    step, new = quantised(traced, names, "float8_e4m3fn", delayed=delayed)
    check(step.graph)
    assert len(new) == len(step.graph.values) and new[: len(names)] == names
    narrow = [
        op
        for op in step.graph.ops
        if op.category == "matmul" and step.graph.values[op.operands[0]].dtype == "float8_e4m3fn"
    ]
    inside = {
        value
        for value, path in weight_paths(step).items()
        if step.graph.values[value].dtype == "float8_e4m3fn" and "norm" not in path
    }
    assert all(
        step.graph.values[value].dtype == "float8_e4m3fn"
        for op in narrow
        for value in op.operands[:2]
    )
    assert all(step.graph.trips(op.region) > 1 for op in narrow)
    forward = [
        op for op in narrow if inside.intersection(op.operands) and op.region == narrow[0].region
    ]
    assert forward and len(narrow) == 3 * len(forward)
    passes = sum(op.kind == "reduce_max" for op in step.graph.ops) - sum(
        op.kind == "reduce_max" for op in traced.graph.ops
    )
    casts = sum(step.graph.values[op.results[0]].dtype == "float8_e4m3fn" for op in step.graph.ops)
    assert casts > 0 and passes == (0 if delayed else casts)


def test_scales_of_rows_need_a_cast_for_every_product() -> None:
    traced, names = plain("llama").steps["none"], colour(plain("llama")).steps["none"]
    shared, apart = (
        quantised(traced, names, "float8_e4m3fn", delayed=False, rows=rows)[0].graph
        for rows in (False, True)
    )

    def made(graph: Graph) -> int:
        return sum(graph.values[op.results[0]].dtype == "float8_e4m3fn" for op in graph.ops)

    narrow = sum(
        op.category == "matmul" and apart.values[op.operands[0]].dtype == "float8_e4m3fn"
        for op in apart.ops
    )
    assert made(apart) == 2 * narrow > made(shared)


def weight_paths(step: StepGraph) -> dict[int, str]:
    """Path of the parameter behind every copy of one."""
    return {value: step.graph.values[source].path for value, source in step.weights().items()}
