"""The whole text of an explanation and of a difference, word for word."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from shardlib.cost.pricing import DeviceBytes, Estimate, Seconds
from shardlib.cost.roofline import Applied
from shardlib.exchanges import EXACT
from shardlib.findings import Finding
from shardlib.islands.exchanges import RANK_FOUR, DiLoCo
from shardlib.layout import Collective, Layout, MeshShape, Rules
from shardlib.machines.chips import Chip, Tier
from shardlib.machines.topology import Topology, topology
from shardlib.planner.plan import Plan, Search
from shardlib.report.changes import diff
from shardlib.report.elements import WIDTH, bytes_text, clip, count_text, seconds_text
from shardlib.report.markup import card
from shardlib.report.text import (
    collective_rows,
    explain,
    notation,
    parameter_rows,
    quantity_bar,
    reasons,
    untold,
)
from shardlib.serve.search import plan_served
from tests.planner.fixture_plan import PLAN, parameter
from tests.report.fixture_page import text_of
from tests.serve.small_jobs import asked

EXPLANATION = """\
toy-7b on 2*h100:8: 16 devices, mesh fsdp=4 x tensor=4
1.81 s per step · 72.3 k tokens/s · MFU 19.2% · 48.0 GiB per device

Decisions
  mesh             fsdp=4 x tensor=4
  compute layout   batch_fsdp, mlp_tensor, vocab_tensor
  stored layout    ZeRO 3: parameters, gradients and optimizer state sharded over fsdp
  residual stream  sharded along the sequence over tensor (sequence parallelism)
  remat policy     full: the backward pass rematerialises every layer
  microbatches     2

Why
  - Kernels (compute and memory traffic) limit the step: 1.50 s of 1.81 s (82.8%). At the peak of
    the chips their FLOPs alone would take 455 ms; the rest is memory traffic, launches and matmuls
    that do not reach that peak.
  - The step needs 5.50 PFLOP and executes 30.9% more to recompute activations; the devices peak at
    15.8 PFLOP/s together.
  - Communication takes 576 ms, of which 56.6% hides behind compute; the most is over fsdp (501 ms).
  - Memory: 48.0 GiB of 80.0 GiB per device, 40.0% spare.
  - Another mesh does not fit in memory: data=16, which needs 121 GiB per device.

Next best (even: predicted within 5%)
        the time  per device  mesh             with
     1.05x, even    60.0 GiB  data=2 x fsdp=8  zero 3, remat full
  at least 2.21x              tensor=16

Time: 1.81 s per step
  compute                █████████████████████████████████▏        1.50 s   82.8%
  exposed communication  █████▌                                    250 ms   13.8%
  optimizer update       █▍                                       62.5 ms    3.4%
  launch overhead        ▏                                         100 µs    0.0%

Memory: 48.0 GiB of 80.0 GiB on the fullest device
  parameters     ██                                       4.00 GiB    5.0%
  gradients      ██                                       4.00 GiB    5.0%
  optimizer      ████████                                 16.0 GiB   20.0%
  activations    ██████████                               20.0 GiB   25.0%
  temporaries    █▌                                       3.00 GiB    3.8%
  communication  ▌                                        1.00 GiB    1.2%
  batch          ▏                                        64.0 KiB    0.0%
  spare          ████████████████                         32.0 GiB   40.0%

Collectives: 576 ms per step, 250 ms exposed, 326 ms hidden behind compute
  over    kind            count     bytes     time  mostly for
  fsdp    all-gather        384  12.0 GiB   376 ms  layers.*.mlp.up.kernel
  fsdp    reduce-scatter     96  1.50 GiB   125 ms  layers.*.mlp.up.kernel
  tensor  all-gather        128  4.00 GiB  75.0 ms  residual stream

Parameters: 534 M, 0.99 GiB in all
  parameter                       bytes  stored                      in compute
  embed.table                   250 MiB  [vocab_tensor, embed_fsdp]  gathers fsdp
  layers.*.norm.scale x3       24.0 KiB  [embed_fsdp]                gathers fsdp
  layers.*.mlp.up.kernel x3     384 MiB  [embed_fsdp, mlp_tensor]    gathers fsdp
  layers.*.mlp.down.kernel x3   384 MiB  [mlp_tensor, embed_fsdp]    gathers fsdp
  head.bias                         6 B  [3]                         same

Findings
  - warning: Nothing is known about the primitive 'fancy'; its operands are gathered. (loss/fancy)
    Try: replace it, or cut nothing that it reads.

Search
  - 412 of 18,000 candidates priced in 210 ms; no plan in the space can beat 1.80 s (gap 0.7%).
  - Candidates by outcome: 412 priced, 17,000 bound, 588 memory.
"""

DIFFERENCE = """\
toy-7b on 2*h100:8

Decisions
  - mesh: fsdp=4 x tensor=4
  + mesh: fsdp=16
  - compute layout: batch_fsdp, mlp_tensor, vocab_tensor
  + compute layout: batch_fsdp
  - residual stream: sharded along the sequence over tensor (sequence parallelism)
  + residual stream: no tensor axis
  - microbatches: 2
  + microbatches: 1

                             before     after           change
  seconds per step           1.81 s    1.96 s  +150 ms (1.08x)
    compute                  1.50 s    1.40 s  -100 ms (0.93x)
    exposed communication    250 ms    500 ms  +250 ms (2.00x)
    optimizer update        62.5 ms   62.5 ms                =
    launch overhead          100 µs    100 µs                =
  bytes per device         48.0 GiB  48.0 GiB                =
    parameters             4.00 GiB  4.00 GiB                =
    gradients              4.00 GiB  4.00 GiB                =
    optimizer              16.0 GiB  16.0 GiB                =
    activations            20.0 GiB  20.0 GiB                =
    temporaries            3.00 GiB  3.00 GiB                =
    communication          1.00 GiB  1.00 GiB                =
    batch                  64.0 KiB  64.0 KiB                =

Layouts: 7 of 11 parameters change
  parameter                                before (-) and after (+)
  embed.table                  stored      - [vocab_tensor, embed_fsdp]
                                           + [vocab, embed_fsdp]
                               in compute  - [vocab_tensor, embed]
                                           + [vocab, embed]
  layers.*.mlp.up.kernel x3    stored      - [embed_fsdp, mlp_tensor]
                                           + [embed_fsdp, mlp]
                               in compute  - [embed, mlp_tensor]
                                           + [embed, mlp]
  layers.*.mlp.down.kernel x3  stored      - [mlp_tensor, embed_fsdp]
                                           + [mlp, embed_fsdp]
                               in compute  - [mlp_tensor, embed]
                                           + [mlp, embed]
"""


def machine(gib: int) -> Topology:
    """Devices with so much memory."""
    chip = Chip(
        name="toy",
        vendor="cpu",
        flops_per_s=(("bfloat16", 1e12),),
        hbm_bytes=gib * 2**30,
        hbm_bytes_per_s=1e9,
    )
    return Topology(
        name="toy:8",
        chip=chip,
        tiers=(Tier(name="wire", kind="switch", shape=(8,), bytes_per_s=1e9),),
    )


def wider() -> Plan:
    """The fixture plan over fsdp alone."""

    def cut(colours: tuple[str | None, ...]) -> Layout:
        return Layout(*("fsdp" if name == "embed" else () for name in colours))

    return replace(
        PLAN,
        mesh=MeshShape(fsdp=16),
        microbatches=1,
        sequence_parallel=False,
        rules=Rules.parse([("batch", "fsdp")]),
        parameters=tuple(
            replace(
                p,
                compute=Layout.replicated(len(p.shape)),
                rest=cut(p.colours),
                state=cut(p.colours),
            )
            for p in PLAN.parameters
        ),
        estimate=replace(
            PLAN.estimate,
            seconds=Seconds(compute=1.4, exposed=0.5, optimizer=0.0625, overhead=0.0001),
        ),
    )


def test_explanation():
    assert explain(PLAN, topology=machine(80)) == EXPLANATION


def test_explanation_is_the_same_after_a_round_trip_through_json():
    assert explain(Plan.from_json(PLAN.to_json())) == explain(PLAN)
    assert json.loads(PLAN.to_json())["search"]["gap"] == PLAN.search.gap


def test_difference():
    assert diff(PLAN, wider()) == DIFFERENCE


@pytest.mark.parametrize(
    ("label", "meaning"),
    [
        ("context", "no context axis"),
        ("attention", "as the model is written"),
        ("experts", "tokens are sorted as the model is written"),
        ("matmuls over tensor", "collectives before and after them"),
        ("residual stream", "replicated over tensor"),
        ("pipeline", "no stages"),
        ("microbatches", "1"),
        ("dtypes", "those of the model"),
        ("links", "the usual order"),
        ("host memory", "none"),
        ("disk", "none"),
    ],
)
def test_a_default_is_told_by_its_meaning(label: str, meaning: str):
    assert untold(label, PLAN) == meaning


def test_a_default_without_its_axis_is_no_decision():
    assert untold("residual stream", wider()) == "no tensor axis"
    assert "keys and values go around" in untold("attention", replace(PLAN, context="ring"))


def test_nothing_differs():
    text = diff(PLAN, PLAN)
    assert "Decisions: the same" in text and "Layouts" not in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("    ")] == [
        "change",
        *["="] * 11,
    ]


def test_ratios_are_told_where_they_say_more_than_two_figures():
    memory = PLAN.estimate.device_bytes
    grown = replace(
        PLAN,
        estimate=replace(
            PLAN.estimate,
            seconds=replace(PLAN.estimate.seconds, compute=1.5 + 1e-13),
            device_bytes=replace(memory, batch=4, gradients=memory.gradients // 64, temporaries=0),
        ),
    )
    rows = [re.split(r" {2,}", line.strip()) for line in diff(grown, PLAN).splitlines()]
    changes = {row[0]: row[-1] for row in rows if len(row) == 4}
    assert changes["batch"] == "+64.0 KiB" and changes["temporaries"] == "+3.00 GiB"
    assert changes["gradients"] == "+3.94 GiB (64x)" and changes["compute"] == "="
    assert "(0.02x)" in diff(PLAN, grown) and "(0.00x)" not in diff(PLAN, grown)


def test_explanation_fits_the_width():
    long = parameter(
        "a.very.long.path.that.goes.on.and.on.to.the.very.end.of.the.line.kernel",
        (8, 16, 32, 64),
        ("experts", "embedding", "intermediate", "head_dimension"),
        Layout("expert", (), "tensor", ()),
        Layout(("expert", "data"), ("fsdp",), "tensor", "context"),
    )
    slow = Collective(
        kind="collective-permute",
        axes=("stage", "data", "fsdp", "expert"),
        bytes=1,
        count=10**7,
        seconds=0.2,
        cause="x." * 80,
    )
    plan = replace(
        PLAN,
        parameters=(*PLAN.parameters, long),
        estimate=replace(PLAN.estimate, collectives=(*PLAN.estimate.collectives, slow)),
    )
    assert max(map(len, explain(plan).splitlines())) <= WIDTH


def test_one_device_needs_no_communication():
    plan = Plan(
        model="m",
        topology="cpu:1",
        mesh=MeshShape(),
        rules=Rules(),
        estimate=Estimate(
            seconds=Seconds(compute=0.5),
            device_bytes=DeviceBytes(parameters=100),
            tokens=1000,
            peak_flops_per_s=1e12,
        ),
    )
    text = explain(plan)
    assert text.startswith(
        "m on cpu:1: 1 device, mesh one device\n500 ms per step · 2.00 k tokens/s · MFU 0.0% · 100 B"
        " per device\n"
    )
    assert "One device needs no communication." in text
    for absent in ("Collectives", "Parameters", "Findings", "Search"):
        assert absent not in text


def test_memory_of_the_topology_is_looked_up():
    usable = topology("h100:8").chip.usable_bytes
    assert f"Memory: 48.0 GiB of {bytes_text(usable)} on the fullest device" in explain(PLAN)
    margin = Applied(quantity="margin", factor=1.07)
    held = explain(replace(PLAN, estimate=replace(PLAN.estimate, corrections=(margin,))))
    limit = bytes_text(usable / 1.07)
    assert f"Memory: 48.0 GiB of {limit} on the fullest device" in held
    assert f"48.0 GiB of {limit} per device" in " ".join(held.split())
    assert "Memory: 48.0 GiB on the fullest device" in explain(
        replace(PLAN, topology="elsewhere.toml")
    )


def test_idle_devices_and_their_reason_are_a_reason():
    message = "the plan uses 4 of 8 devices: no plan on more that fits is faster"
    found = Finding(code="idle-devices", severity="info", message=message)
    assert f"T{message[1:]}." in reasons(PLAN.with_findings(found))


def test_too_much_memory_says_how_much():
    assert "Memory: 48.0 GiB of 40.0 GiB per device, 8.00 GiB too much." in explain(
        PLAN, topology=machine(40)
    )


def test_an_optimal_plan_says_so():
    assert "no plan in the space is faster within the cost model" in explain(
        replace(PLAN, search=Search(evaluations=3, candidates=3))
    )


def test_layers_fold_only_where_they_are_alike():
    odd = replace(PLAN.parameters[1], path="layers.7.norm.scale", rest=Layout(()), state=Layout(()))
    rows = {(row.pattern, row.count) for row in parameter_rows((*PLAN.parameters, odd))}
    assert ("layers.*.norm.scale", 3) in rows and ("layers.7.norm.scale", 1) in rows
    assert sum(row.count for row in parameter_rows(PLAN.parameters)) == len(PLAN.parameters)


def test_collective_rows_keep_every_byte_and_second():
    rows = collective_rows(PLAN.estimate.collectives)
    assert sum(row.bytes for row in rows) == sum(c.total_bytes for c in PLAN.estimate.collectives)
    assert sum(row.seconds for row in rows) == pytest.approx(
        sum(c.seconds for c in PLAN.estimate.collectives)
    )
    assert len({(row.axes, row.kind) for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("scope", "cause"),
    [
        ("layers.mlp.up", "layers.mlp.up"),
        ("jvp()", "activations, forward"),
        ("transpose(jvp())", "activations, backward"),
        ("transpose(jvp(block/mlp))", "block/mlp, backward"),
        ("jvp(head)", "head, forward"),
    ],
)
def test_causes_are_free_of_the_words_of_autodiff(scope: str, cause: str):
    assert (
        collective_rows([Collective(kind="all-reduce", axes=("data",), bytes=1, cause=scope)])[
            0
        ].cause
        == cause
    )


def test_notation():
    assert (
        notation(("batch", None, "embed"), (8, 3, 64), Layout(("data", "fsdp"), (), "tensor"))
        == "[batch_data·fsdp, 3, embed_tensor]"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (61.3 * 2**30, "61.3 GiB"),
        (2**50, "1.00 PiB"),
    ],
)
def test_bytes(value: float, text: str):
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (1e-9, "1.00 ns"),
        (2.5e-7, "250 ns"),
        (9.999e-4, "1.00 ms"),
        (0.9999, "1.00 s"),
        (119, "119 s"),
        (120, "2.00 min"),
        (7200, "2.00 h"),
    ],
)
def test_seconds(value: float, text: str):
    assert seconds_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (999, "999"), (1500, "1.50 k"), (999_999, "1.00 M"), (4.12e16, "41.2 P")],
)
def test_counts(value: float, text: str):
    assert count_text(value) == text


def test_bars_are_proportional_and_never_vanish():
    assert [quantity_bar(n / 8, 1) for n in range(9)] == list(" ▏▎▍▌▋▊▉█")
    assert quantity_bar(1e-9, 3) == "▏  "
    assert quantity_bar(5, 3) == "███"
    assert quantity_bar(-1, 3) == "   "


def test_clip_keeps_both_ends():
    assert clip("abcdefgh", 8) == "abcdefgh"
    assert clip("abcdefgh", 5) == "ab…gh"


@pytest.mark.parametrize(("flops", "said"), [(2e16, "Compute limits"), (1e14, "Kernels (compute")])
def test_compute_limits_a_step_only_where_flops_take_the_time(flops: float, said: str):
    estimate = replace(PLAN.estimate, model_flops=flops, hardware_flops=flops)
    assert reasons(replace(PLAN, estimate=estimate))[0].startswith(said)


# Values in one line, and as cards in a notebook.


def read(html: str) -> str:
    """The text of a card, which fetches and runs nothing."""
    assert len(html) < 60_000
    assert not re.search(r"\s(src|href|onclick)=", html)
    return text_of(html)


@pytest.fixture(scope="module")
def serving():
    return plan_served(asked("llama3-8b", "v5e:4x4"))


def test_lines_are_short(serving):
    for value in (PLAN, serving):
        assert len(repr(value)) < 200 and "\n" not in repr(value)
    assert repr(PLAN).startswith(f"<Plan {PLAN.model} on {PLAN.topology}")


def test_a_plan_as_a_card_says_what_its_text_says():
    text = read(PLAN._repr_html_())
    for line in PLAN.explain().splitlines()[:2]:
        assert line in text
    assert "time per step" in text and "memory per device" in text


def test_a_serving_plan_shows_its_curve(serving):
    html = serving._repr_html_()
    text = read(html)
    assert html.count("<circle") == len(serving.pareto())
    assert "tokens/s a chip" in text and html.count('r="6"') == 1


def test_what_a_user_names_is_text_and_no_html():
    assert "<script>" not in card("<script>", ["<b>"], rows=[["<i>", "x"]], text="<u>")


@pytest.mark.parametrize(
    "value",
    [topology("2*h100:8"), topology("v5e:4x8"), DiLoCo(islands=2, every=100), EXACT, RANK_FOUR],
)
def test_machines_and_exchanges_are_tables(value):
    assert "\n" not in repr(value) and len(repr(value)) < 200
    if hasattr(value, "_repr_html_"):
        assert read(value._repr_html_())


def test_a_machine_says_its_links():
    text = read(topology("2*h100:8")._repr_html_())
    assert "16 devices" in text and "InfiniBand" in text and "450.0 GB/s" in text
