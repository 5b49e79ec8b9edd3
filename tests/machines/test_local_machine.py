"""The measured local machine: what devices share is shared in the price, whatever was measured is
kept in the cache, and figures scale to the devices asked for.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardlib import calibration
from shardlib.calibration import (
    Calibration,
    cache_path,
    figure_names,
    machine_of_figures,
    measured_cpu,
    now,
)
from shardlib.cost.collectives import collective_cost
from shardlib.cost.roofline import (
    busy_cores,
    efficiency_of,
    kernel_parts,
    kernel_seconds,
    matmul_seconds,
)
from shardlib.cost.terms import Amount, Compute, Elements, Matmul
from shardlib.errors import TopologyError
from shardlib.frontend.choice import measured_under_load
from shardlib.machines.topology import Span, Topology, topology
from shardlib.processes.timing import Clock, Pass, quiet_seconds, seconds_of
from tests.processes import python


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLIB_CACHE_DIR", str(tmp_path))
    return tmp_path


def figures(local: int, **changes: float) -> Calibration:
    """Made-up measurements of a quiet machine: everything is 8.0 but what is said."""
    usual = {**dict.fromkeys(figure_names(local), 8.0), "alone": 1.0, "cores": 1.0}
    return Calibration(figures={**usual, **changes}, made=now(), load=0.0)


def keep(devices: int, local: int, **changes: float) -> None:
    store(figures(local, **changes), devices, local)


def store(calibration: Calibration, devices: int = 8, local: int = 8) -> None:
    cache_path(devices, local).write_text(json.dumps(asdict(calibration)))


def stored() -> dict[str, Any]:
    return json.loads(cache_path(8, 8).read_text())


def on_cores(devices: int, cores: int, flops_per_s: float = 1e9) -> Topology:
    """So many devices on cores of 1 GFLOP/s, of which a device alone can use all."""
    share = min(1.0, cores / devices)
    return machine_of_figures(
        devices,
        devices,
        figures(
            devices,
            float32_flops_per_s=flops_per_s * share,
            bfloat16_flops_per_s=flops_per_s * share,
            elements_per_s=flops_per_s * share / 4,
            memory_bytes_per_s=flops_per_s * share,
            fresh_bytes_per_s=flops_per_s * share / 8,
            alone=min(devices, cores) / share,
        ),
    )


@pytest.mark.long
def test_a_measurement_is_plausible_and_kept(cache: Path):
    machine = measured_cpu(8)
    assert (machine.name, machine.devices, machine.tiers[0].shape) == ("cpu:8", 8, (8,))
    assert 1e8 < machine.chip.peak("float32") < 1e13
    assert 1e7 < machine.chip.hbm_bytes_per_s < 1e12
    assert 1e-8 < machine.chip.launch_s < 1e-2
    assert 1 <= machine.alone <= 8
    assert {(one.kind, one.ways) for one in machine.tiers[0].exchanges} == {
        (kind, ways) for kind in calibration.KINDS for ways in (2, 8)
    }
    assert all(1e-8 < one.latency_s < 1e-1 for one in machine.tiers[0].exchanges)
    assert all(1e-13 < one.seconds_per_byte < 1e-5 for one in machine.tiers[0].exchanges)
    assert "measured on" in machine.chip.sources[0]
    assert [path.parent for path in cache.iterdir()] == [cache]
    assert measured_cpu(8) == machine
    assert Topology.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("devices", [2, 4, 8, 16])
@pytest.mark.parametrize("cores", [1, 2, 4])
def test_devices_on_a_few_cores_have_their_flops_together(devices: int, cores: int):
    machine = on_cores(devices, cores)
    together = machine.devices * machine.chip.peak("float32")
    assert together == pytest.approx(1e9 * min(devices, cores))


@pytest.mark.parametrize("used", [1, 2, 4, 8])
def test_a_step_takes_as_long_on_any_number_of_devices_that_share_all(used: int):
    """Eight devices on two cores, of which one alone gets both: work that is split over fewer of
    them is done no later, by rate of matmuls and of memory.
    """
    machine = on_cores(8, 2).in_use(used)
    assert used * machine.chip.peak("float32") == pytest.approx(2e9)
    assert used * machine.chip.hbm_bytes_per_s == pytest.approx(2e9)


def test_a_device_that_gets_one_core_is_no_faster_than_that():
    machine = machine_of_figures(8, 8, figures(8, float32_flops_per_s=0.25e9, alone=4.0))
    rates = [used * machine.in_use(used).chip.peak("float32") for used in (8, 4, 2, 1)]
    assert rates == pytest.approx([2e9, 2e9, 2e9, 1e9])


@pytest.mark.parametrize(
    ("depth", "seconds"), [(16, 1.0), (48, 1.5), (112, 2.5)], ids=["shallow", "deeper", "deep"]
)
def test_blocks_of_a_matmul_take_a_start(depth: int, seconds: float):
    """A block of 8 x 16 at a multiply-add of each element a second, which takes as long to start as 48 elements of depth: depth + 48 s, over 64."""
    machine = machine_of_figures(
        1,
        1,
        figures(1, float32_flops_per_s=256.0, bfloat16_flops_per_s=256.0, matmul_start=48.0),
    )
    constants = efficiency_of("cpu", "cpu", "xla", dict(machine.efficiency))
    rows, columns, deep, batches = (np.array([float(n)]) for n in (8, 16, depth, 1))
    found = (
        matmul_seconds(rows, columns, deep, batches, machine.chip.peak("float32"), constants)[0]
        / 64
    )
    assert found == pytest.approx(seconds)


def test_a_gradient_of_a_weight_pays_for_transposed_copies():
    """Per byte of the gradient, whatever the batch: twice the batch costs no more copies."""
    machine = machine_of_figures(1, 1, figures(1, memory_bytes_per_s=1.0))
    constants = efficiency_of("cpu", "cpu", "xla", dict(machine.efficiency))

    def traffic(batch: float, *, weight: bool) -> float:
        rows, columns, depth = (_amount(size) for size in (4.0, 2.0, batch))
        term = Compute(
            flops=_amount(16 * batch),
            dtype="float32",
            traffic=(),
            trips=1,
            matmul=Matmul(rows=rows, columns=columns, depth=depth),
            is_weight_gradient=weight,
            category="matmul",
        )
        return float(kernel_parts(term, _local, machine.chip, constants)[2][0])

    assert traffic(8.0, weight=False) == 0
    assert traffic(8.0, weight=True) == traffic(16.0, weight=True) == constants.transposed * 32


@pytest.mark.parametrize(
    ("category", "matmuls", "share", "seconds"),
    [
        ("matmul", 1, 1.0, 1.0),
        ("matmul", 1, 0.5, 1.0),
        ("matmul", 16, 0.5, 2.0),
        ("matmul", 16, 0.75, 4 / 3),
        ("elementwise", 1, 0.5, 1.0),
    ],
    ids=["product", "product beside a slow batch", "batch on one core", "batch", "chain"],
)
def test_small_kernels_keep_one_of_two_cores_busy(
    category: str,
    matmuls: int,
    share: float,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
):
    """Of a large kernel a second; of one that has less than a core's work, twice its share of it."""
    monkeypatch.setattr(calibration, "cores", lambda: 2)
    machine = machine_of_figures(1, 1, figures(1, cores=8.0, batched=share, launch_s=1e-30))
    constants = efficiency_of("cpu", "cpu", "xla", dict(machine.efficiency))
    assert constants.cores == 2

    def busy(part: float) -> float:
        """Seconds of both cores that a part of a large kernel takes, over those of its work."""
        size = 2.0**26 * part
        term = Compute(
            flops=_amount(size),
            dtype="float32",
            traffic=(_amount(size),),
            trips=1,
            matmul=Matmul(
                rows=_amount(1.0),
                columns=_amount(1.0),
                depth=_amount(1.0),
                batches=_amount(float(matmuls)),
            ),
            category=category,
        )
        return float(part * constants.cores / busy_cores(term, _local, constants)[0])

    assert busy(1.0) == pytest.approx(seconds)
    assert busy(2**-12) == pytest.approx(2 * 2**-12)
    sizes = [2.0**-n for n in range(12)]
    assert sorted(map(busy, sizes)) == [busy(size) for size in reversed(sizes)]


def test_a_machine_whose_devices_have_their_own_cores_stays_as_it_is():
    static = topology("cpu:8")
    assert static.in_use(1) is static
    machine = on_cores(8, 2)
    assert machine.in_use(8) is machine


@pytest.mark.parametrize("alone", [0.5, 9.0])
def test_alone_is_between_one_and_the_devices(alone: float):
    data = {**topology("cpu:8").to_json(), "alone": alone}
    with pytest.raises(TopologyError) as caught:
        Topology.from_json(data)
    assert str(caught.value) == (
        f"alone of topology 'cpu:8' is {alone}; it is from 1 to the number of devices, 8"
    )


def test_a_kernel_takes_the_sum_of_its_parts():
    """A core does one after another: 2 s of matmul, 1 s of vector work and 4 s of memory."""
    machine = machine_of_figures(
        1,
        1,
        figures(
            1,
            float32_flops_per_s=1.0,
            bfloat16_flops_per_s=1.0,
            elements_per_s=0.5,
            memory_bytes_per_s=2.0,
            launch_s=0.25,
        ),
    )
    term = Compute(
        flops=_amount(2.0),
        dtype="float32",
        traffic=(_amount(8.0),),
        trips=1,
        elements=Elements(simple=(_amount(0.5),)),
        category="convolution",
    )
    constants = efficiency_of("cpu", "cpu", "xla", dict(machine.efficiency))
    parts = kernel_parts(term, _local, machine.chip, constants)
    assert [float(one[0]) for one in parts] == [1.0, 2.0, 4.0]
    assert kernel_seconds(term, _local, machine.chip, constants)[0] == 7.25
    usual = efficiency_of("cpu", "cpu", "xla", {**dict(machine.efficiency), "at_once": True})
    assert kernel_seconds(term, _local, machine.chip, usual)[0] == 4.25


def _amount(total: float) -> Amount:
    return Amount(total=total, batch=False, tensor=False)


def _local(amount: Amount) -> Any:
    return np.array([amount.total])


@pytest.mark.parametrize(
    ("kind", "per_byte"), [("all-reduce", 2e-9), ("all-gather", 2e-9), ("reduce-scatter", 8e-9)]
)
def test_the_price_of_a_collective_is_what_was_measured(kind: str, per_byte: float):
    """Of 4 of 4 participants: 1 ms, and 2 ns for every byte of the full array, of which a
    reduce-scatter's result has a quarter.
    """
    changes = {f"{kind}.4.s": 1e-3, f"{kind}.4.s_per_byte": 2e-9}
    cost = collective_cost(kind, (Span(0, 0, 4),), machine_of_figures(4, 4, figures(4, **changes)))
    assert (cost.latency_s, cost.seconds_per_byte) == pytest.approx((1e-3, per_byte))


def test_collectives_of_other_groups_lie_between_the_measured_ones():
    changes = {
        "all-to-all.2.s": 1e-3,
        "all-to-all.8.s": 3e-3,
        "all-to-all.2.s_per_byte": 1e-9,
        "all-to-all.8.s_per_byte": 2e-9,
    }
    machine = machine_of_figures(8, 8, figures(8, **changes))
    cost = collective_cost("all-to-all", (Span(0, 0, 4),), machine)
    assert (cost.latency_s, cost.seconds_per_byte) == pytest.approx((2e-3, 1.5e-9))


def test_processor_time_counts_only_where_all_cores_are_busy():
    walls, processor = [4.0, 3.0], [4.0, 4.0]
    assert quiet_seconds(walls, processor, cores=2, all_busy=True) == 2.0
    assert quiet_seconds(walls, processor, cores=2, all_busy=False) == 3.0


def test_more_devices_than_exist_share_the_same_cores(cache: Path):
    keep(32, 8, alone=2.0)
    machine = measured_cpu(32)
    assert (
        machine.devices,
        machine.chip.hbm_bytes_per_s,
        machine.chip.peak("float32"),
        machine.chip.launch_s,
        machine.alone,
    ) == (32, 2.0, 2.0, 32.0, 8.0)


def test_a_cache_that_cannot_be_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDLIB_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(calibration, "measure", lambda _: figures(8, launch_s=4.0))
    assert measured_cpu(8).chip.launch_s == 4.0


@pytest.mark.long
def test_one_device_keeps_the_static_links(cache: Path):
    machine, static = measured_cpu(1), topology("cpu:1")
    assert machine.tiers == static.tiers
    assert machine.chip.sources != static.chip.sources


def test_no_devices_are_refused():
    with pytest.raises(TopologyError) as caught:
        measured_cpu(0)
    assert str(caught.value) == "measured_cpu(devices=0) needs at least one device"


def test_importing_starts_no_backend():
    """Asking for a platform that does not exist fails as soon as a backend starts."""
    code = (
        "import os; os.environ['JAX_PLATFORMS'] = 'nowhere'; import shardlib.calibration;"
        " print('ok')"
    )
    assert python("-c", code).stdout == "ok\n"


@pytest.mark.parametrize("said", [{}, {"PJRT_NPROC": "3"}], ids=["shardlib", "the user"])
def test_threads_for_several_collectives_of_every_device(said: dict[str, str]):
    """JAX starts its threads with the first question for devices; with eight devices and no word of
    shardlib they are fewer than four a device.
    """
    code = (
        "import os; from shardlib.processes.machine import let_collectives_wait;"
        " {}; import jax; jax.devices(); print(len(os.listdir('/proc/self/task')))"
    )
    environ = {k: v for k, v in os.environ.items() if not k.endswith("NPROC")} | said

    def threads(first: str) -> int:
        done = python("-c", code.format(first), env=environ)
        return int(done.stdout)

    more = threads("let_collectives_wait()") - threads("pass")
    assert more == 0 if said else more >= 3 * 8


GOOD = asdict(figures(8))
SPOILT = [
    *("", "[]", "{}", '{"figures": {"launch_s": -1}}'),
    *(
        json.dumps({**GOOD, "figures": {**GOOD["figures"], name: value}})
        for name in ("alone", "all-reduce.2.s_per_byte")
        for value in (-1, 0, True, "fast", None, 1e300)
    ),
    *(json.dumps({**GOOD, "made": made}) for made in (None, 3, "yesterday", "2026-11-28")),
    *(json.dumps({**GOOD, "load": load}) for load in (-1, 2, "much")),
]


def test_figures_that_no_run_could_have_written_are_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    keep(8, 8)
    assert measured_cpu(8).chip.hbm_bytes_per_s == 8.0
    monkeypatch.setattr(calibration, "measure", lambda _: figures(8, launch_s=4.0))
    for content in SPOILT:
        cache_path(8, 8).write_text(content)
        assert measured_cpu(8).chip.launch_s == 4.0, content
        assert stored()["figures"]["launch_s"] == 4.0
    keep(8, 8)
    assert measured_cpu(8, refresh=True).chip.launch_s == 4.0


@pytest.mark.parametrize(("days", "again"), [(0, False), (6, False), (8, True), (-1, True)])
def test_figures_expire_after_a_week(
    days: int, again: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calibration, "measure", lambda _: figures(8, launch_s=4.0))
    made = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    store(replace(figures(8), made=made))
    assert (measured_cpu(8).chip.launch_s == 4.0) is again


@pytest.mark.parametrize(("version", "again"), [("0.0.1", True), (None, False)])
def test_other_versions_and_cores_measure_again(
    version: str | None, again: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calibration, "measure", lambda _: figures(8, launch_s=4.0))
    keep(8, 8)
    if version is not None:
        monkeypatch.setattr(calibration.jax, "__version__", version)
    assert (measured_cpu(8).chip.launch_s == 4.0) is again
    keep(8, 8)
    monkeypatch.setattr(calibration, "cores", lambda: 77)
    assert measured_cpu(8).chip.launch_s == 4.0


def test_figures_under_load_are_measured_again_by_the_next_process_when_it_is_quieter(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calibration, "LOOK_S", 0.0)
    now_used = [0.5]
    monkeypatch.setattr(calibration.Busy, "share", lambda _: now_used[0])
    monkeypatch.setattr(calibration, "measure", lambda _: replace(figures(8), load=0.6))
    assert measured_cpu(8).chip.launch_s == 8.0 and stored()["load"] == 0.6
    monkeypatch.setattr(calibration, "measure", lambda _: figures(8, launch_s=4.0))
    now_used[0] = 0.0
    assert measured_cpu(8).chip.launch_s == 8.0  # all plans of a process have the same prices
    monkeypatch.setattr(calibration, "_under_load", {})
    now_used[0] = 0.5
    assert measured_cpu(8).chip.launch_s == 8.0  # as busy as before: no better
    monkeypatch.setattr(calibration, "_under_load", {})
    now_used[0] = 0.2
    assert measured_cpu(8).chip.launch_s == 4.0 and stored()["load"] == 0.0


def test_a_plan_says_when_its_prices_were_measured_and_under_what_load(
    monkeypatch: pytest.MonkeyPatch,
):
    machine = machine_of_figures(8, 8, figures(8))
    assert machine.measured is not None
    assert measured_under_load(machine) == ()
    measured = replace(machine.measured, made="2026-11-28T18:14:43+00:00", load=0.42, place="P")
    (finding,) = measured_under_load(replace(machine, measured=measured))
    assert finding.message == (
        "the prices were measured on 28 November 2026, 18:14 UTC (P), while other programs used"
        " 42% of the processors; the times are uncertain."
    )


def test_a_quiet_pass_counts_and_else_what_others_cannot_have_slowed():
    loaded = Pass(walls=(9.0, 4.0), processor=(6.0, 6.0), others=0.5)
    unknown = replace(loaded, others=None)
    quiet = Pass(walls=(2.0, 3.0, 7.0), processor=(4.0, 4.0, 4.0), others=0.0)
    assert seconds_of([loaded, quiet], cores=2, all_busy=True) == 3.0
    assert seconds_of([loaded, unknown], cores=2, all_busy=True) == 3.0
    assert seconds_of([loaded, unknown], cores=2, all_busy=False) == 4.0
    assert seconds_of([unknown], cores=2, all_busy=True) == 6.5


def test_a_clock_makes_a_program_once_and_runs_all_in_every_pass():
    made: list[str] = []
    ran: list[str] = []

    def program(name: str, seconds: float):
        made.append(name)

        def run() -> None:
            ran.append(name)
            time.sleep(seconds)

        return run

    clock = Clock(budget_s=0.04, runs=2)
    for name, seconds in (("a", 0.002), ("b", 0.03)):
        make = partial(program, name, seconds)
        assert clock.seconds(name, make, devices=1) >= seconds
    clock.again(2)
    assert clock.seconds("a", lambda: program("a", 9.0), devices=1) >= 0.002
    assert made == ["a", "b"]
    assert len(clock.passes["a"]) == len(clock.passes["b"]) == 3
    assert {len(one.walls) for one in clock.passes["b"]} == {2}
    assert all(len(one.walls) > 2 for one in clock.passes["a"])
    last = "".join(ran).rindex("b")
    assert "".join(ran)[:last].rindex("a") > "".join(ran).index("b")  # in turns
