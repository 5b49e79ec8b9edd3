"""`shardlib edge --run` over stages that somebody has started, at addresses of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardlib.cli import main
from tests.serve.cards import card

DEVICE = """
[[devices]]
name = "{name}"
link_bytes_per_s = 1e9
layer_seconds = {seconds}
[devices.chip]
name = "{name}"
vendor = "cpu"
flops_per_s = {{ float32 = 1e9 }}
hbm_bytes = 100_000_000
hbm_bytes_per_s = 1e9
"""
#: Devices, each with an address that stands for a host, and seconds of a layer.
HOSTS = {"board": ("127.0.0.2", 0.1), "laptop": ("127.0.0.3", 0.1), "phone": ("127.0.0.4", 0.2)}


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[tuple[list[str], dict[str, subprocess.Popen[str]]]]:
    """Words of the command, and a process on each host."""
    (tmp_path / "secret").write_text("a secret of these tests\n")
    (tmp_path / "tiny.toml").write_text(card(vocab=64, layers=6))
    devices = "".join(DEVICE.format(name=n, seconds=s) for n, (_, s) in HOSTS.items())
    (tmp_path / "devices.toml").write_text(devices)
    secret = ["--secret-file", str(tmp_path / "secret")]
    command = [sys.executable, "-m", "shardlib", "edge-stage", "--json"]
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, (host, _) in HOSTS.items():
            running[name] = subprocess.Popen(
                [*command, "--listen", f"{host}:0", *secret],
                stdout=subprocess.PIPE,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
                text=True,
            )
        words = ["edge", str(tmp_path / "tiny.toml"), "-d", str(tmp_path / "devices.toml")]
        words += ["-b", "2", "-s", "16", "--json", "--simulated", *secret]
        for name, one in running.items():
            assert one.stdout is not None
            where = json.loads(one.stdout.readline())
            words += ["--at", f"{name}={where['host']}:{where['port']}"]
        yield words, running
    finally:
        for one in running.values():
            one.kill()
            one.communicate()


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out)


def kill(process: subprocess.Popen[str], seconds: float, when: list[float]) -> None:
    """Kills a stage after some seconds."""

    def strike() -> None:
        time.sleep(seconds)
        when.append(time.monotonic())
        os.kill(process.pid, signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()


@pytest.mark.long
def test_stages_on_hosts_run_a_plan_and_one_of_them_goes(
    stages: tuple[list[str], dict[str, subprocess.Popen[str]]],
    capsys: pytest.CaptureFixture[str],
):
    words, running = stages
    code, found = run([*words, "--run", "12"], capsys)
    assert code == 0 and len(found["stages"]) > 1
    assert found["run"]["batches"] == 12 and found["run"]["lost"] == []
    rate = found["run"]["examples_per_s"] / found["throughput"]
    assert 0.3 < rate < 1.1
    first = found["stages"][0]["device"]
    when: list[float] = []
    kill(running[first], 8, when)
    code, found = run([*words, "--run", "100", "--elastic"], capsys)
    assert code == 0 and found["run"] == found["run"] | {"batches": 100, "lost": [first]}
    left = [one for one in HOSTS if one != first]
    listed = "".join(DEVICE.format(name=one, seconds=HOSTS[one][1]) for one in left)
    Path(words[3]).write_text(listed)
    kill(running[left[0]], 8, when)
    code, found = run([*words, "--run", "2000"], capsys)
    assert code == 2 and time.monotonic() - when[-1] < 60
    (address,) = (one for one in words if one.startswith(f"{left[0]}="))
    assert f"at {address.partition('=')[2]}, " in found["error"]["message"]
