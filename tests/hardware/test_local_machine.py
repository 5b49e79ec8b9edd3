"""The measured local machine: plausible, kept in the cache, and scaled to the devices asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from shardlib import calibration as local_machine
from shardlib.calibration import FIGURES, cache_path, measured_cpu
from shardlib.cost.machine.collectives import collective_cost
from shardlib.errors import TopologyError
from shardlib.hardware import Span, Topology, topology


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLIB_CACHE_DIR", str(tmp_path))
    return tmp_path


def keep(devices: int, local: int, **changes: object) -> None:
    cache_path(devices, local).write_text(json.dumps({**dict.fromkeys(FIGURES, 8.0), **changes}))


@pytest.mark.long
def test_a_measurement_is_plausible_and_kept(cache: Path):
    machine = measured_cpu(8)
    assert (machine.name, machine.devices, machine.tiers[0].shape) == ("cpu:8", 8, (8,))
    assert 1e8 < machine.chip.peak("float32") < 1e13
    assert 1e7 < machine.chip.hbm_bytes_per_s < 1e12
    assert 1e-8 < machine.chip.launch_s < 1e-2
    assert 1e-8 < machine.tiers[0].latency_s < 1e-1 and 1e6 < machine.tiers[0].bytes_per_s < 1e12
    assert "measured on" in machine.chip.sources[0]
    assert [path.parent for path in cache.iterdir()] == [cache]
    start = time.perf_counter()
    assert measured_cpu(8) == machine
    assert time.perf_counter() - start < 0.1
    assert Topology.from_json(machine.to_json()) == machine


def test_the_price_of_an_all_reduce_is_what_was_measured(
    cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """The figures are the inverse of the cost model: 16 floats took 1 ms, the large message 5
    ms.
    """
    times = iter([16e-3, 80e-3])
    monkeypatch.setattr(local_machine, "_best_seconds", lambda *_: next(times))
    mesh = jax.sharding.Mesh(jax.devices("cpu"), ("all",))
    latency_s, bytes_per_s = local_machine._all_reduce(mesh)
    keep(8, 8, latency_s=latency_s, link_bytes_per_s=bytes_per_s)
    cost = collective_cost("all-reduce", (Span(0, 0, 8),), measured_cpu(8))
    assert cost.seconds(0.0) == pytest.approx(1e-3)
    assert cost.seconds(4.0 * local_machine.MESSAGE) == pytest.approx(5e-3)


def test_cached_figures_are_used(cache: Path):
    keep(8, 8)
    assert measured_cpu(8).chip.hbm_bytes_per_s == 8.0


def test_more_devices_than_exist_share_the_same_cores(cache: Path):
    keep(32, 8)
    machine = measured_cpu(32)
    assert (
        machine.devices,
        machine.chip.hbm_bytes_per_s,
        machine.chip.peak("float32"),
        machine.chip.launch_s,
    ) == (32, 2.0, 2.0, 8.0)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"launch_s": -1}'])
def test_a_spoilt_cache_file_is_measured_again(
    cache: Path, content: str, monkeypatch: pytest.MonkeyPatch
):
    cache_path(8, 8).write_text(content)
    monkeypatch.setattr(local_machine, "_measure", lambda _: dict.fromkeys(FIGURES, 4.0))
    assert measured_cpu(8).chip.hbm_bytes_per_s == 4.0
    assert json.loads(cache_path(8, 8).read_text())["launch_s"] == 4.0


def test_refresh_measures_again(cache: Path, monkeypatch: pytest.MonkeyPatch):
    keep(8, 8)
    monkeypatch.setattr(local_machine, "_measure", lambda _: dict.fromkeys(FIGURES, 4.0))
    assert measured_cpu(8, refresh=True).chip.hbm_bytes_per_s == 4.0


def test_a_cache_that_cannot_be_written_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDLIB_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(local_machine, "_measure", lambda _: dict.fromkeys(FIGURES, 4.0))
    assert measured_cpu(8).chip.launch_s == 4.0


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
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize("said", [{}, {"PJRT_NPROC": "3"}], ids=["shardlib", "the user"])
def test_threads_for_several_collectives_of_every_device(said: dict[str, str]):
    """JAX starts its threads with the first question for devices; with eight devices and no word of
    shardlib they are fewer than four a device.
    """
    code = (
        "import os; from shardlib.processes.devices import let_collectives_wait;"
        " {}; import jax; jax.devices(); print(len(os.listdir('/proc/self/task')))"
    )
    environ = {k: v for k, v in os.environ.items() if not k.endswith("NPROC")} | said

    def threads(first: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", code.format(first)],
            capture_output=True,
            text=True,
            env=environ,
            cwd=Path(__file__).parents[2],
            check=True,
        )
        return int(done.stdout)

    more = threads("let_collectives_wait()") - threads("pass")
    assert more == 0 if said else more >= 3 * 8
