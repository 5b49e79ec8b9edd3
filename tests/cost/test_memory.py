"""Lifetimes against a direct simulation of the program, and laws that pricing relies on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

import shardlib
from shardlib import models
from shardlib.cost.facts import fuse, live_spans
from shardlib.cost.framework import FrameworkProfile
from shardlib.cost.memory import bytes_alive, points
from shardlib.cost.pricing import Totals, freshly_mapped, zeroes_early
from shardlib.cost.stages import Meshes
from shardlib.cost.tables import Pricer
from shardlib.cost.variants import offloaded
from shardlib.decisions.table import Decisions
from shardlib.graph import FactorRule, Graph, Op, Value
from shardlib.layout import MeshShape
from shardlib.machines.topology import Topology, place, topology
from shardlib.planner import search as planner
from shardlib.planner.assembly import price
from shardlib.planner.parts import Candidate
from shardlib.planner.workload import Workload, prepare
from shardlib.propagation.colours import Choice
from tests.planner import worlds
from tests.planner.worlds import workload


def chain(*kinds: str) -> Graph:
    """A straight program: each op reads the result before it."""
    values = (
        Value(shape=(8,), dtype="float32", role="batch"),
        *(Value(shape=(8,), dtype="float32") for _ in kinds),
    )
    rule = FactorRule(sizes=(8,), operands=(((0,),),), results=(((0,),),))
    ops = tuple(
        Op(kind=kind, operands=(i,), results=(i + 1,), rule=rule, category=kind)
        for i, kind in enumerate(kinds)
    )
    return Graph(values=values, ops=ops, inputs=(0,), outputs=(len(kinds),))


def test_elementwise_chains_are_fused_into_their_reader() -> None:
    graph = chain("matmul", "elementwise", "elementwise", "reduction")
    fusion = fuse(graph)
    assert fusion.materialised == {0, 1, 4}
    assert [(k.op, k.reads, k.writes) for k in fusion.kernels] == [(0, (0,), (1,)), (3, (1,), (4,))]


def test_a_value_lives_until_the_last_reader_that_fusion_reaches() -> None:
    graph = chain("matmul", "elementwise", "elementwise", "reduction", "matmul")
    spans = live_spans(graph, fuse(graph), frozenset())
    assert spans == {1: (0, 3), 4: (3, 4), 5: (4, 4)}


def test_the_peak_is_the_largest_simulated_sum() -> None:
    graph = worlds.layers().steps["none"].graph
    fusion = fuse(graph)
    spans = live_spans(graph, fusion, frozenset())
    sizes = np.array([value.bytes for value in graph.values], dtype=float)
    simulated = max(
        sum(sizes[v] for v, (birth, death) in spans.items() if birth <= at <= death)
        for at in range(len(graph.ops))
    )
    nowhere = np.zeros(len(graph.ops), dtype=bool)
    (alive,) = points(spans, bytes_alive(graph, spans, [sizes]), nowhere)
    assert sum(sizes[v] for v in alive) == simulated
    everywhere = points(spans, bytes_alive(graph, spans, [sizes]), ~nowhere)
    assert max(sum(sizes[v] for v in alive) for alive in everywhere) == simulated


JAX_0_10 = zeroes_early("h100")
#: Peak bytes per device by the compilers of TPU and GPU (libtpu 0.0.42.1, jax-cuda13-plugin 0.10.2; of
#: 0.12 where it differs by more than the tolerance): model, topology, rows, tokens in a row, pins, peak.
COMPILED = [
    ("llama2-7b", "v5e:16x16", 1024, 2048, {"mesh": {"fsdp": 256}, "zero": 3}, 4157315072),
    (
        "llama2-7b",
        "v5e:16x16",
        1024,
        2048,
        {"mesh": {"fsdp": 64, "tensor": 4}, "zero": 3},
        5563532288,
    ),
    (
        "llama2-7b",
        "v5e:16x16",
        512,
        2048,
        {"mesh": {"data": 16, "fsdp": 16}, "zero": 3},
        9671914496,
    ),
    # heads of 64 in lanes of 128
    (
        "gpt2-small",
        "v5e:4x4",
        64,
        1024,
        {"mesh": {"fsdp": 16}, "remat": "none"},
        4654170624 if JAX_0_10 else 4352181760,
    ),
    (
        "gpt2-small",
        "v6e:4x4",
        64,
        1024,
        {"mesh": {"fsdp": 4, "tensor": 4}, "remat": "dots"},
        2164461824,
    ),
    # the weight gradient of the head before, and after, the gradient of its input
    ("gpt2-small", "v5e:4x4", 64, 1024, {"mesh": {"fsdp": 16}}, 1178240000),
    ("gpt2-small", "v5p:2x2x4", 64, 1024, {"mesh": {"fsdp": 16}, "zero": 3}, 1107280640),
    # the gradient of the logits until the backward loop alone; beside it, up to JAX 0.11, the stacks
    # of gradients
    (
        "gpt2-small",
        "2*h100:8",
        64,
        1024,
        {"mesh": {"fsdp": 16}},
        1938039192 if JAX_0_10 else 1793732000,
    ),
    # what the first iteration of the backward loop recomputes, beside the logits
    (
        "llama3-8b",
        "16*h100:8",
        256,
        4096,
        {"mesh": {"data": 16, "fsdp": 8}, "zero": 3},
        25028461198 if JAX_0_10 else 21376082605,
    ),
    (
        "gpt2-small",
        "2*h100:8",
        64,
        1024,
        {"mesh": {"data": 16}, "remat": "none"},
        5929393176 if JAX_0_10 else 5643525164,
    ),
    ("gpt2-small", "2*a100:8", 64, 1024, {"mesh": {"fsdp": 16}}, 1872007076),
    # the update, with the largest parameter's state from host memory beside the gradients
    (
        "llama3-8b",
        "h100:2",
        4,
        1024,
        {"mesh": {"fsdp": 2}, "zero": 3, "microbatches": 2, "offload": ["optimizer"]},
        39638319716,
    ),
    # a pipeline whose chunks of layers are gathered in rounds
    (
        "llama2-70b",
        "16*h100:8",
        256,
        4096,
        {"mesh": {"stage": 4, "fsdp": 32}, "microbatches": 4, "gather": "once"},
        39861130588,
    ),
    # gathered along the sequence, and partial sums
    (
        "llama2-7b",
        "8*h100:8",
        256,
        2048,
        {"mesh": {"fsdp": 8, "tensor": 8}, "zero": 3},
        14118126497,
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("model, where, rows, tokens, pins, peak", COMPILED)
def test_memory_is_that_of_the_compilers(
    model: str, where: str, rows: int, tokens: int, pins: dict[str, Any], peak: int
):
    config = models.PRESETS[model]
    init, loss = models.build(config)
    plan = shardlib.plan(
        init=init,
        loss=loss,
        optimizer=optax.adamw(3e-4),
        batch=models.example_batch(config, rows, tokens),
        topology=where,
        pin={
            "microbatches": 1,
            "remat": "full",
            # the kernel of cuDNN cannot be compiled without a GPU
            **({} if topology(where).chip.vendor == "google" else {"attention": "blocks"}),
            **pins,
        },
    )
    assert plan.estimate.device_bytes.peak == pytest.approx(peak, rel=0.05)


BASE = Candidate(
    decisions=Decisions(mesh=MeshShape(fsdp=2, tensor=2), zero=3, context="all-gather"),
    choice=Choice(tensor=("mlp", "heads", "vocab"), batch="batch"),
)
UNCUT = replace(BASE, choice=Choice(batch="batch"))


@pytest.mark.parametrize("where", ("h100:8", "v5e:4x4", "4*a100:2"))
def test_more_bandwidth_or_flops_is_never_slower(where: str) -> None:
    place = topology(where)
    chip = place.chip
    for better in (
        replace(chip, hbm_bytes_per_s=chip.hbm_bytes_per_s * 2),
        replace(chip, flops_per_s=tuple((n, 2 * f) for n, f in chip.flops_per_s)),
    ):
        assert seconds(replace(place, chip=better, name="better"), BASE) <= seconds(place, BASE)


def test_memory_falls_with_zero_and_with_remat() -> None:
    # gradients of several microbatches are there for the whole step
    prices = [
        price(workload(), topology("h100:4"), BASE.replace(microbatches=2, zero=stage))
        for stage in (1, 2, 3)
    ]
    static = [
        sum(float(one.device_bytes[name][0]) for name in ("parameters", "gradients", "optimizer"))
        for one in prices
    ]
    assert float(prices[0].peak_bytes[0]) > float(prices[1].peak_bytes[0])
    assert static[0] > static[1] > static[2]
    none, full = (
        price(workload(), topology("h100:4"), BASE.replace(remat=policy)).device_bytes[
            "activations"
        ]
        for policy in ("none", "full")
    )
    assert full[0] < none[0]


def test_collectives_of_tensor_parallel_layers_are_those_of_megatron() -> None:
    """Two all-reduces a layer forward and two backward (Shoeybi et al., arXiv:1909.08053, section
    3), of batch x seq x embed.
    """
    plan = planner.search(
        workload().problem,
        "h100:4",
        {
            "mesh": {"tensor": 4},
            "remat": "none",
            "sequence_parallel": False,
            "microbatches": 1,
            "rules": [
                ("batch", ["data", "fsdp"]),
                ("mlp", "tensor"),
                ("heads", "tensor"),
                ("vocab", "tensor"),
            ],
        },
        workload=workload(),
    )
    whole = 16 * 32 * 64 * 4
    residual = [c for c in plan.estimate.collectives if c.kind == "all-reduce" and c.bytes == whole]
    embedding_and_head = 2  # forward of the one, backward of the other
    assert sum(c.count for c in residual) == 4 * 4 + embedding_and_head


def test_a_flat_buffer_is_cut_by_any_number_of_devices() -> None:
    """A dim of 64 or 128 elements is not divisible by 3; a padded buffer is."""
    decision = UNCUT.replace(mesh=MeshShape(fsdp=3), zero=1)
    profiles = [FrameworkProfile(name="toy", flat=flat, state_bytes=8) for flat in (False, True)]
    whole, flat = (
        price(prepare(workload().problem, "nvidia", profile), topology("h100:3"), decision)
        for profile in profiles
    )
    assert float(flat.device_bytes["optimizer"][0]) * 3 == pytest.approx(
        float(whole.device_bytes["optimizer"][0])
    )
    assert float(flat.seconds["optimizer"][0]) < float(whole.seconds["optimizer"][0])


def test_a_host_that_is_slower_than_the_device_sets_the_pace() -> None:
    """Kernels x seconds a launch, where that is more than the kernels take; otherwise nothing
    changes.
    """

    def took(dispatch_s: float, micro: int = 1, stages: int = 1) -> float:
        decision = UNCUT.replace(
            mesh=MeshShape(fsdp=4 // stages, stage=stages),
            microbatches=micro,
            zero=0,
            schedule="1f1b" if stages > 1 else "none",
        )
        return seconds(with_figures("h100:4", dispatch_s=dispatch_s), decision)

    assert took(1e-9) == took(0.0) < took(1e-3)
    kernels = (took(2e-3) - took(1e-3)) / 1e-3
    assert kernels == pytest.approx(round(kernels)) and kernels > 100, "every launch counts alike"
    # and once for every microbatch
    assert took(2e-3, micro=2) - took(1e-3, micro=2) == pytest.approx(2 * kernels * 1e-3)
    # a stage launches its part, and the pipeline waits for it
    assert took(2e-3, micro=2, stages=2) - took(1e-3, micro=2, stages=2) == pytest.approx(
        (2 + 1) * kernels / 2 * 1e-3
    )


@pytest.mark.long
def test_a_loss_that_nothing_fuses_moves_more_bytes_and_layers_do_not() -> None:
    decision = UNCUT.replace(mesh=MeshShape(fsdp=4), zero=0)

    def computes(profile: FrameworkProfile, unfused: float) -> float:
        # so slow that bytes are all that counts
        machine = with_figures("h100:4", unfused=unfused, memory=1e-3)
        load = prepare(workload().problem, "nvidia", profile)
        return float(price(load, machine, decision).seconds["compute"][0])

    plain, loss = FrameworkProfile(name="toy"), FrameworkProfile(name="toy", unfused_loss=3.0)
    assert computes(plain, 1.0) < computes(loss, 1.0) < computes(plain, 3.0)
    # where all kernels are apart, those of the loss are not further
    assert computes(loss, 3.0) == computes(plain, 3.0)


def test_gaps_between_kernels_add_up() -> None:
    decision = UNCUT.replace(mesh=MeshShape(fsdp=4), zero=0)

    def computes(gap_s: float) -> float:
        machine = with_figures("h100:4", gap_s=gap_s)
        return float(price(workload(), machine, decision).seconds["compute"][0])

    assert computes(0.0) == computes(topology("h100:4").chip.launch_s), "a launch is the least"
    kernels = (computes(2e-3) - computes(1e-3)) / 1e-3
    assert kernels == pytest.approx(round(kernels)) and kernels > 100


def placed(stage: int, where: str) -> Meshes:
    """A mesh of four devices with stages, and a microbatch for each."""
    mesh = MeshShape(stage=stage, fsdp=4 // stage)
    found = place(mesh, topology(where))
    assert found is not None
    return Meshes.placed([(mesh, found)], [stage], topology(where))


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_of_one_program_fill_the_host_memory_that_they_remember_in(stage: int):
    """With zeros, once, before they compute; without stages nothing is filled."""
    pricer, c = Pricer(topology("h100:4")), placed(stage, "h100:4")
    stacks = np.array([8e9])
    before = Totals(
        seconds={"compute": np.zeros(1), "exposed": np.zeros(1)},
        device_bytes={"activations": np.array([10e9])},
        flops=np.ones(1),
        stacks=stacks,
        in_flight=np.array([stage]),
        largest_state=np.zeros(1),
    )
    after = offloaded(before, ("activations",), pricer, c)
    assert after.device_bytes["activations"] == pytest.approx(2e9)
    transfer = stacks / pricer.topology.chip.host_bytes_per_s
    assert after.seconds["exposed"] == pytest.approx((3 if stage > 1 else 2) * transfer)


@pytest.mark.parametrize("layers", (3, 4))
def test_stages_of_one_program_store_stacks_whole_that_they_do_not_divide(layers: int):
    """By the shardings of the lowered state; what a step slices from a stack is not between steps."""
    config = replace(models.load("gpt2-small"), layers=layers, embed=64, vocab_size=128)
    init, loss = models.build(config)
    batch = models.example_batch(config, 8, 64)
    pin = {"mesh": {"stage": 2, "fsdp": 2}, "zero": 3, "microbatches": 4}
    program = shardlib.compile(init, loss, optax.adamw(1e-3), batch, topology="cpu:4", pin=pin)
    state = program.state.opt_state
    stored = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
    assert program.plan.estimate.device_bytes.optimizer == pytest.approx(stored, rel=1e-3)


def test_memory_that_is_mapped_anew_counts_from_half_of_what_an_allocator_gives_back():
    """Predictions of a CPU's temporaries may be half of what its program has."""
    mib = 1 << 20
    sizes = np.array([0.0, 15.0, 16.0, 24.0, 32.0, 64.0]) * mib
    found = freshly_mapped({"temporaries": sizes, "parameters": np.full(6, 1e9)})
    assert (found / mib).tolist() == [0.0, 0.0, 0.0, 12.0, 32.0, 64.0]


def seconds(where: Topology, decision: Candidate, load: Workload | None = None) -> float:
    """Seconds of a step."""
    return float(price(load or workload(), where, decision).step_seconds[0])


def with_figures(where: str, **efficiency: float) -> Topology:
    return replace(topology(where), name=f"{efficiency}", efficiency=efficiency)  # pyright: ignore[reportArgumentType]
