"""Collectives read from real programs are those counted by hand, whatever form the compiler gives
them.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardlib.layout import Collective, MeshShape
from shardlib.verification.hlo import parse
from shardlib.verification.report import totals
from shardlib.verification.traffic import read_traffic, short_name, trip_count
from tests.verification import programs
from tests.verification.test_hlo import FRAGMENTS, MESH

HEAD = "HloModule m, num_partitions=8\n\n"


def expect_program(text: str, *, gathered: int) -> None:
    traffic = read_traffic(text, MESH)
    sums = totals(traffic.collectives)
    assert sums["all-gather", ("fsdp",)] == gathered
    assert sums["reduce-scatter", ("fsdp",)] == programs.SCATTERED
    assert sums["all-reduce", ("tensor",)] in programs.REDUCED
    assert len(sums) == 3 and traffic.problems == ()


@pytest.mark.parametrize(
    ("platform", "gathered"),
    [("cpu", programs.GATHERED), ("cuda", programs.GATHERED), ("tpu", programs.GATHERED // 2)],
)
def test_stored_programs(platform: str, gathered: int):
    """The TPU compiler rounds weights to bfloat16, as its default precision multiplies them, before
    it gathers them.
    """
    expect_program(FRAGMENTS[platform], gathered=gathered)


def test_a_program_compiled_now():
    expect_program(programs.lowered(jax.devices()).compile().as_text(), gathered=programs.GATHERED)


def test_trip_counts_read_off_conditions_are_those_that_the_compiler_knows():
    known = FRAGMENTS["cpu"]
    unknown, cuts = re.subn(r'"known_trip_count":\{[^}]*\},?', "", known)
    assert cuts == 2
    assert read_traffic(unknown, MESH) == read_traffic(known, MESH)


COPIED = """HloModule looped
%condition (carried: (s32[], f32[4])) -> pred[] {
  %carried = (s32[], f32[4]) parameter(0)
  %limit = s32[] constant(58)
  %counter = s32[] get-tuple-element(%carried), index=0
  ROOT %compare = pred[] compare(%counter, %limit), direction=LT
}
%body (carried.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %carried.1 = (s32[], f32[4]) parameter(0)
  %counter.1 = s32[] get-tuple-element(%carried.1), index=0
  %one = s32[] constant(STEP)
  %copy.1 = s32[] copy(%counter.1)
  %copy.2 = s32[] copy(%one)
  %added = s32[] add(%copy.1, %copy.2)
  %array = f32[4] get-tuple-element(%carried.1), index=1
  ROOT %tuple = (s32[], f32[4]) tuple(%added, %array)
}
ENTRY %main (given: f32[4]) -> (s32[], f32[4]) {
  %given = f32[4] parameter(0)
  %zero = s32[] constant(0)
  %copy.3 = s32[] copy(%zero)
  %start = (s32[], f32[4]) tuple(%copy.3, %given)
  ROOT %loop = (s32[], f32[4]) while(%start), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(("step", "trips"), [(1, 58), (2, 29), (3, 20), (0, None)])
def test_a_counter_that_the_compiler_copies_is_read(step, trips):
    """As the TPU compiler writes a loop whose counter it prefetches."""
    module = parse(COPIED.replace("STEP", str(step)))
    (around,) = [one for one in module.computations.values() if "loop" in one.by_name]
    assert not module.problems and trip_count(around.by_name["loop"], around, module) == trips


@pytest.mark.parametrize(
    ("asks", "times"),
    [
        (lambda tick: (tick >= 3) & (tick < 8), 5),
        (lambda tick: tick // 4 % 2 == 1, 4),
        (lambda tick: tick * 0 == 1, 0),
    ],
)
def test_a_conditional_is_counted_in_the_turns_in_which_it_holds(asks, times):
    """As microbatches enter and leave a pipeline; an outer loop does it all twice."""
    mesh = programs.mesh_of(jax.devices())

    def run(x):
        def turn(x, tick):
            return jax.lax.cond(
                asks(tick), lambda x: jax.lax.psum(jnp.sin(x), "fsdp"), lambda x: 2 * x, x
            ), None

        def group(x, _):
            return jax.lax.scan(turn, x, 2 + jnp.arange(9))[0], None

        return jax.lax.scan(group, x, None, length=2)[0]

    spec = PartitionSpec()
    manual = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    given = jax.ShapeDtypeStruct((16,), np.float32)
    found = read_traffic(jax.jit(manual).lower(given).compile().as_text(), MESH)
    counts = {one.kind: one.count for one in found.collectives}
    assert counts == ({"all-reduce": 2 * times} if times else {}) and not found.problems


def test_a_conditional_that_follows_from_an_argument_is_counted_as_often_as_it_is_there():
    mesh = programs.mesh_of(jax.devices())

    def run(x, first):
        return jax.lax.scan(
            lambda x, tick: (
                jax.lax.cond(tick > first, lambda x: jax.lax.psum(x, "fsdp"), lambda x: 2 * x, x),
                None,
            ),
            x,
            jnp.arange(9),
        )[0]

    spec = PartitionSpec()
    manual = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    given = jax.ShapeDtypeStruct((16,), np.float32), jax.ShapeDtypeStruct((), np.int32)
    found = read_traffic(jax.jit(manual).lower(*given).compile().as_text(), MESH)
    assert [one.count for one in found.collectives] == [9]


def test_cycles_are_weighted_by_trips():
    once = sum(int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', FRAGMENTS["tpu"]))
    assert once < read_traffic(FRAGMENTS["tpu"], MESH).cycles <= programs.LAYERS * once
    assert read_traffic(FRAGMENTS["cpu"], MESH).cycles == 0


def entry(*lines: str, before: str = "") -> str:
    return (
        HEAD
        + before
        + "ENTRY %main (p: f32[8,4]) -> f32[8,4] {\n  %p = f32[8,4]{1,0} parameter(0)\n"
        + "".join(f"  {line}\n" for line in lines)
        + "}\n"
    )


def only(text: str, mesh: MeshShape = MESH) -> Collective:
    traffic = read_traffic(text, mesh)
    assert traffic.problems == ()
    (found,) = traffic.collectives
    return found


GROUPS = "replica_groups=[2,4]<=[4,2]T(1,0)"
PAIRS = "source_target_pairs={{0,2},{2,0}}"
LAYOUTS = ("{0}", "{1,0}")  #: of arrays of one dim and of two


@pytest.mark.parametrize(
    ("line", "where", "kind", "size"),
    [
        ("(f32[8,4], f32[32,4]) all-gather-start(%p)", GROUPS, "all-gather", 512),
        (
            "((f32[8,4], f32[2]), (f32[32,4], f32[8])) all-gather-start(%p, %q)",
            GROUPS,
            "all-gather",
            544,
        ),
        ("f32[8,4] all-reduce-start(%p)", GROUPS, "all-reduce", 128),
        ("((f32[8,4]), f32[2,4]) reduce-scatter-start(%p)", GROUPS, "reduce-scatter", 32),
        (
            "(f32[8,4], f32[8,4], u32[], u32[]) collective-permute-start(%p)",
            PAIRS,
            "collective-permute",
            128,
        ),
        ("(f32[8], f32[8], f32[8], f32[8]) all-to-all(%p, %p, %p, %p)", GROUPS, "all-to-all", 128),
        ("f32[8,4] ragged-all-to-all(%p, %p, %p, %p, %p, %p)", GROUPS, "all-to-all", 128),
    ],
)
def test_a_started_collective_counts_once_with_its_result(line, where, kind, size):
    opcode = line.split("(%")[0].split()[-1].removesuffix("-start")
    line = re.sub(r"(f32\[[\d,]+\])", lambda one: one[1] + LAYOUTS[one[1].count(",")], line)
    text = entry(f"%s = {line}, {where}", f"ROOT %d = f32[8,4]{{1,0}} {opcode}-done(%s)")
    found = only(text)
    assert (found.kind, found.axes, found.bytes, found.count) == (kind, ("fsdp",), size, 1)


def test_wrapped_asynchronous_collective():
    wrapped = (
        "%wrapped (a: f32[8,4]) -> f32[2,4] {\n  %a = f32[8,4]{1,0} parameter(0)\n  ROOT %r ="
        " f32[2,4]{1,0} reduce-scatter(%a), replica_groups=[4,2]<=[8], dimensions={0},"
        ' to_apply=%sum\n}, execution_thread="x"\n\n'
    )
    text = entry(
        "%s = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-start(%p), calls=%wrapped",
        "%u = ((f32[8,4]), f32[2,4]) async-update(%s), calls=%wrapped",
        "ROOT %d = f32[2,4]{1,0} async-done(%u), calls=%wrapped",
        before=wrapped,
    )
    found = only(text)
    assert (found.kind, found.axes, found.bytes, found.count) == (
        "reduce-scatter",
        ("tensor",),
        32,
        1,
    )


def test_fused_all_reduce_scatter_is_a_reduce_scatter_of_the_shard():
    fused = (
        "%all-reduce-scatter.3 (a: f32[8,4]) -> f32[2,4] {\n  %a = f32[8,4]{1,0} parameter(0)\n  %r"
        " = f32[8,4]{1,0} all-reduce(%a), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%sum\n  %z ="
        " s32[] constant(0)\n  ROOT %d = f32[2,4]{1,0} dynamic-slice(%r, %z, %z),"
        " dynamic_slice_sizes={2,4}\n}\n\n"
    )
    found = only(
        entry(
            "ROOT %f = f32[2,4]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3",
            before=fused,
        )
    )
    assert (found.kind, found.axes, found.bytes) == ("reduce-scatter", ("fsdp",), 32)


def test_pieces_with_one_channel_are_told_apart_by_what_they_are():
    text = entry(
        "%a = f32[8,4]{1,0} all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%sum",
        "ROOT %b = f32[8,4]{1,0} all-reduce(%a), channel_id=1, replica_groups=[4,2]<=[8],"
        " to_apply=%sum",
    )
    assert only(text).count == 2


def test_the_larger_branch_of_a_conditional_counts():
    branch = (
        "%{0} (a: f32[8,4]) -> f32[8,4] {{\n  %a = f32[8,4]{{1,0}} parameter(0)\n  ROOT %r ="
        " f32[{1},4]{{1,0}} all-gather(%a), replica_groups=[4,2]<=[8]\n}}\n\n"
    )
    text = entry(
        "ROOT %c = f32[8,4]{1,0} conditional(%i, %p, %p), branch_computations={%small, %large}",
        before=branch.format("small", 16) + branch.format("large", 32),
    )
    assert only(text).bytes == 32 * 4 * 4


def test_groups_of_one_do_not_communicate_and_strange_groups_are_reported():
    alone = entry(
        "ROOT %r = f32[8,4]{1,0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%sum"
    )
    assert read_traffic(alone, MESH).found == ()
    strange = entry(
        "ROOT %r = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,3},{1,2},{4,7},{5,6}},"
        " to_apply=%sum"
    )
    traffic = read_traffic(strange, MESH)
    assert [c.axes for c in traffic.collectives] == [()]
    assert "not a product of mesh axes" in traffic.problems[0]


def test_the_mesh_must_be_that_of_the_program():
    assert (
        "the mesh tensor=2 has 2" in read_traffic(FRAGMENTS["cpu"], MeshShape(tensor=2)).problems[0]
    )


def test_causes():
    text = entry(
        "%c = f32[8,4]{1,0} copy(%p)",
        "ROOT %r = f32[16,4]{1,0} all-gather(%c), replica_groups=[4,2]<=[8], dimensions={0}",
    )
    assert read_traffic(text, MESH, ["params.embedding"]).collectives[0].cause == "params.embedding"
    assert (
        short_name(
            "jit(call)/call_exported/jit(shardlib_step_0a)/transpose(jvp())/while/body/eval_jaxpr/mlp/dot_general"
        )
        == "transpose(jvp())/mlp/dot_general"
    )


def test_programs_of_several_slices_number_the_devices_of_one():
    """The second slice is the second half of data; inside a slice, devices 0 to 3 are the mesh
    positions 0 to 3 or 4 to 7.
    """
    transfer = (
        '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="{}"'
    )
    text = entry(
        "%g = f32[16,4]{1,0} all-gather(%p), replica_groups={{0,2},{1,3}}, dimensions={0}",
        "%s = (f32[8,4]{1,0}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true,"
        " frontend_attributes={" + transfer.format("ALL_REDUCE") + "}",
        "%r = (f32[8,4]{1,0}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true,"
        " frontend_attributes={" + transfer.format("ALL_REDUCE") + "}",
        "%q = (f32[8,4]{1,0}, u32[], token[]) recv(%t), channel_id=3, is_host_transfer=true,"
        " frontend_attributes={" + transfer.format("GOSSIP") + "}",
    )
    text = text.replace("num_partitions=8", "num_partitions=4")
    traffic = read_traffic(
        text, MeshShape(data=2, fsdp=2, tensor=2), slices=[[0, 1, 2, 3], [4, 5, 6, 7]]
    )
    assert totals(traffic.collectives) == {
        ("all-gather", ("fsdp",)): 256,
        ("all-reduce", ("data",)): 128,
    }
    assert len(traffic.problems) == 1 and "GOSSIP" in traffic.problems[0]


def test_pieces_of_a_carried_gather_count_once():
    """TPU fusions carry an asynchronous collective along: a piece in each, and the first one starts
    it.
    """
    piece = (
        "%all-gather.{0} = f32[16,4]{{1,0}} all-gather(%a), replica_groups=[4,2]<=[8],"
        ' frontend_attributes={{chain_id="0"}}'
    )
    body = (
        "%f{0} (a: f32[8,4]) -> f32[8,4] {{\n  %a = f32[8,4]{{1,0}} parameter(0)\n  "
        + piece
        + "\n  ROOT %r = f32[8,4]{{1,0}} {1}\n}}\n\n"
    )
    before = (
        body.format(1, 'custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"')
        + body.format(2, "negate(%a)")
        + body.format(3, 'custom-call(%a, %all-gather.3), custom_call_target="AsyncCollectiveDone"')
    )
    found = only(
        entry(
            *(f"%c{i} = f32[8,4]{{1,0}} fusion(%p), kind=kCustom, calls=%f{i}" for i in (1, 2, 3)),
            before=before,
        )
    )
    assert (found.kind, found.axes, found.bytes, found.count) == ("all-gather", ("tensor",), 256, 1)


def permutes(count: int) -> str:
    """A program with so many permutes of a matmul around the tensor axis, 1 KiB each."""
    pairs = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    lines = [
        f"  %c{n} = bf16[4,128]{{1,0}} collective-permute(%p), source_target_pairs={pairs},"
        ' metadata={op_name="jit(f)/jvp()/dot_general"}'
        for n in range(count)
    ]
    head = "HloModule m, num_partitions=8\n\nENTRY %main (p: bf16[4,128]) -> bf16[4,128] {\n"
    body = ["  %p = bf16[4,128]{1,0} parameter(0)", *lines]
    return (
        head + "\n".join(body) + f"\n  ROOT %r = bf16[4,128]{{1,0}} add(%c0, %c{count - 1})\n}}\n"
    )


@pytest.mark.parametrize(
    ("count", "kind", "times"),
    [(5, "reduce-scatter", 1), (10, "reduce-scatter", 2), (4, "collective-permute", 4)],
)
def test_windows_of_a_matmul_are_the_reduce_scatter_that_they_carry_out(count, kind, times):
    """Four devices pass four windows on, half of them each way, and join the halves."""
    found = read_traffic(permutes(count), MeshShape(fsdp=2, tensor=4)).collectives
    assert [(one.kind, one.axes, one.bytes, one.count) for one in found] == [
        (kind, ("tensor",), 1024, times)
    ]
