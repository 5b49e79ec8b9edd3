"""How an order of plans is judged: seconds that a compiled schedule waits, by hand."""

from __future__ import annotations

import pytest

from benchmarks.order_candidates import judged
from benchmarks.scheduled_wire import waited_seconds
from shardlib.layout import MeshShape
from shardlib.verification.hlo import parse
from shardlib.verification.schedule import Rates, schedule
from shardlib.verification.traffic import read_traffic

GATHER = (
    "bf16[64,8] all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={1},"
    ' frontend_attributes={chain_id="0"}'
)
CYCLES = 'backend_config={{"estimated_cycles":"{}"}}'
#: One gather that two matmuls carry along, a permute behind one kernel, and a sum that nothing hides.
PROGRAM = f"""HloModule m, num_partitions=8

%begin (p: bf16[64,1]) -> bf16[64,8] {{
  %p = bf16[64,1] parameter(0)
  %gather.1 = {GATHER}
  ROOT %begun = bf16[64,8] custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}}

%first (p: bf16[64,1]) -> bf16[64,8] {{
  %p = bf16[64,1] parameter(0)
  %gather.2 = {GATHER}
  ROOT %step = bf16[64,8] custom-call(%gather.2), custom_call_target="AsyncCollectiveStep"
}}

%end (p: bf16[64,1]) -> bf16[64,8] {{
  %p = bf16[64,1] parameter(0)
  %gather.3 = {GATHER}
  ROOT %ended = bf16[64,8] custom-call(%gather.3), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (w: bf16[64,1]) -> bf16[64,8] {{
  %w = bf16[64,1] parameter(0)
  %s = bf16[64,8] fusion(%w), kind=kCustom, calls=%begin
  %m.1 = bf16[64,8] fusion(%w), kind=kCustom, calls=%first, {CYCLES.format(300)}
  %m.2 = bf16[64,8] fusion(%m.1), kind=kOutput, calls=%none, {CYCLES.format(200)}
  %e = bf16[64,8] fusion(%m.2), kind=kCustom, calls=%end
  %there = bf16[64,8] collective-permute-start(%e), source_target_pairs={{{{0,1}},{{1,0}}}}
  %m.3 = bf16[64,8] fusion(%e), kind=kOutput, calls=%none, {CYCLES.format(900)}
  %back = bf16[64,8] collective-permute-done(%there)
  ROOT %sum = bf16[64,8] all-reduce(%back), replica_groups=[1,8]<=[8]
}}
"""


@pytest.mark.parametrize(
    ("wire", "waited"),
    [
        # a permute and a sum of 800 s: the sum; a gather of 400 s hides behind 300 + 200 cycles
        (
            {"all-gather": 400.0, "collective-permute": 800.0, "all-reduce": 800.0},
            {"all-gather": 0.0, "collective-permute": 0.0, "all-reduce": 800.0},
        ),
        (
            {"all-gather": 700.0, "collective-permute": 1000.0, "all-reduce": 1.0},
            {"all-gather": 200.0, "collective-permute": 100.0, "all-reduce": 1.0},
        ),
    ],
)
def test_what_stands_between_start_and_done_hides(wire, waited):
    module = parse(PROGRAM)
    found = read_traffic(module, MeshShape(fsdp=8)).found
    assert sorted(one.kind for one in found) == sorted(wire)
    seconds = waited_seconds(module, found, lambda one: wire[one.kind], 1.0)
    assert {kind: wait for (kind, _), wait in seconds.items()} == waited
    rates = Rates(flops_per_s=lambda _: 1.0, bytes_per_s=1.0, cycles_per_s=1.0)
    run = schedule(module, rates, {one.name: wire[one.kind] for one in found})
    assert {one.kind: run.waited[one.name] for one in found} == waited and run.kernels == 1400.0


def test_regret_is_of_the_plan_that_is_predicted_to_be_the_fastest():
    found = judged([2.0, 1.0, 3.0], [4.0, 5.0, 10.0])
    assert found["regret"] == 0.25
    assert found["rank_correlation"] == pytest.approx(0.5)
    assert judged([1.0, 2.0, 3.0], [1.0, 1.01, 1.005])["rank_correlation"] is None
