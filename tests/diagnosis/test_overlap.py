"""What hides a collective, or why nothing does, from the text of compiled programs."""

from __future__ import annotations

import pytest

from shardlib.diagnosis.overlap import overlaps
from shardlib.layout import MeshShape
from shardlib.machines.topology import topology
from shardlib.verification.hlo import parse
from shardlib.verification.traffic import read_traffic

DOT = "dot(%{}, %{}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
GROUPS = "replica_groups=[1,8]<=[8], dimensions={0}, channel_id=1"


def said(lines, where="h100:8"):
    text = "\n".join(
        [
            "HloModule m, num_partitions=8, is_scheduled=true",
            "",
            "ENTRY %main (p: bf16[512,4096], q: bf16[4096,4096]) -> bf16[4096,4096] {",
            "  %p = bf16[512,4096]{1,0} parameter(0)",
            "  %q = bf16[4096,4096]{1,0} parameter(1)",
            *(f"  {line}" for line in lines),
            "}",
        ]
    )
    module, mesh = parse(text), MeshShape(fsdp=8)
    found, kernels = overlaps(
        module,
        read_traffic(module, mesh),
        mesh,
        axes=("fsdp",),
        topology=topology(where),
        cycles_per_s=0.0,
    )
    (overlap,) = found.values()
    return overlap, kernels


WHOLE = "bf16[4096,4096]{1,0}"
START = f"%s = (bf16[512,4096], {WHOLE}) all-gather-start(%p), {GROUPS}"
DONE = f"%e = {WHOLE} all-gather-done(%s)"
FREE = f"%d = {WHOLE} " + DOT.format("q", "q")
AFTER = f"ROOT %r = {WHOLE} " + DOT.format("e", "q")
BOTH = f"ROOT %r = {WHOLE} " + DOT.format("e", "d")


def test_a_matmul_between_start_and_done_hides():
    overlap, kernels = said([START, FREE, DONE, BOTH])
    assert overlap.sentence == "asynchronous, behind 1 kernels with matmuls"
    assert overlap.exposed == pytest.approx(max(0.0, overlap.seconds - kernels / 2))
    flops = 2 * 2 * 4096**3
    assert flops / 989e12 < kernels < 2 * flops / 989e12


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            [START.replace("channel", 'backend_config={"is_sync":true}, channel'), DONE, AFTER],
            "synchronous: no independent work: every matmul beside it makes its operand or needs it",
        ),
        ([START, DONE, FREE, BOTH], "behind no matmul: the compiler put none of the 1 independent"),
        (
            [START, DONE, "ROOT %r = bf16[4096,4096]{1,0} negate(%e)"],
            "behind no matmul: no independent work: there is no matmul beside it",
        ),
        (
            [
                f"%s = ({WHOLE}, {WHOLE}) all-gather(%p, %p), {GROUPS}",
                f"%e = {WHOLE} get-tuple-element(%s), index=0",
                AFTER,
            ],
            "synchronous: combined from 2 arrays, which every matmul beside it makes or needs",
        ),
    ],
)
def test_what_hides_nothing_has_a_reason(lines, reason):
    overlap, _ = said(lines)
    assert reason in overlap.sentence
    assert overlap.exposed == pytest.approx(overlap.seconds)


def test_the_cpu_compiler_splits_nothing():
    overlap, kernels = said([f"%e = {WHOLE} all-gather(%p), {GROUPS}", FREE, BOTH], "cpu:8")
    assert overlap.sentence == "synchronous: the CPU compiler splits no collective"
    assert overlap.exposed == overlap.seconds and kernels == 0.0
