from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from shardlib.errors import ModelError
from shardlib.processes import timing
from shardlib.processes.timing import Busy
from shardlib.training.display import figures_table
from shardlib.training.fit import bigram_loss
from shardlib.training.rates import OPTIMIZERS, Ramp, batch_findings, large_batch, scaled, warmed_up
from shardlib.training.settings import Figures


def test_goyal_and_the_square_root():
    assert scaled(0.1, batch=8192, base=256, rule="linear") == pytest.approx(
        3.2
    )  # the rate of the paper's one-hour run
    assert scaled(1e-3, batch=1024, base=256, rule="sqrt") == pytest.approx(2e-3)
    assert scaled(1e-3, batch=1024, base=256, rule="none") == 1e-3
    with pytest.raises(ModelError, match="rule is 'cubic'; it is one of linear, sqrt, none"):
        scaled(1.0, batch=1, base=1, rule="cubic")


def test_warm_up_rises_in_a_line_and_ends_at_the_floor():
    rate = warmed_up(1.0, warm_up=10, steps=100, floor=0.05)
    rising = np.array([np.asarray(rate(step)).item() for step in range(11)])
    np.testing.assert_allclose(np.diff(rising), rising[1] - rising[0], rtol=1e-5)
    assert rising[10] == pytest.approx(1.0) and np.asarray(rate(100)).item() == pytest.approx(0.05)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_lower_a_quadratic(name: str):
    optimizer = large_batch(name, 10.0 if name == "lars" else 0.05, weight_decay=1e-4, clip=1.0)
    params: Any = {"a": jnp.ones(4), "b": jnp.full((2, 2), 2.0)}
    state = optimizer.init(params)
    for _ in range(60):
        gradients = params
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    assert all(float(jnp.abs(one).mean()) < 0.9 for one in params.values())


def test_lars_goes_by_the_norm_of_each_layer():
    """A layer's first step is rate x coefficient x its own norm, whatever the size of its gradient
    (arXiv:1708.03888, eq. 6).
    """
    params = {"a": jnp.full(4, 3.0), "b": jnp.full(4, 0.5)}
    gradients = {
        "a": jnp.full(4, 1e-3),
        "b": jnp.full(4, 1e3),
    }
    optimizer = large_batch("lars", 1.0, momentum=0.0)
    updates: Any = optimizer.update(gradients, optimizer.init(params), params)[0]
    for name, norm in (("a", 6.0), ("b", 1.0)):
        np.testing.assert_allclose(float(jnp.linalg.norm(updates[name])), 0.001 * norm, rtol=1e-4)


def test_ramp_covers_every_example_once():
    ramp = Ramp(first=16, last=64, increment=16, examples=1000)
    position = 0
    for step in range(60):
        size, seen = ramp.at(step)
        assert seen == position
        position += size
    sizes = [ramp.at(step)[0] for step in range(60)]
    assert sizes == sorted(sizes) and sizes[0] == 16 and sizes[-1] == 64
    full = next(step for step, size in enumerate(sizes) if size == 64)
    assert 1000 <= ramp.at(full)[1] < 1000 + 48
    with pytest.raises(ModelError, match="from 16 to 70 is not a whole number of increments of 16"):
        Ramp(first=16, last=70, increment=16, examples=100)


def test_batches_beyond_what_is_known():
    assert batch_findings(batch=8192, base=256, rule="linear") == ()
    (finding,) = batch_findings(batch=16384, base=256, rule="linear")
    assert finding.code == "large-batch" and "64 times 256" in finding.message
    assert batch_findings(batch=1 << 20, base=1, rule="none") == ()


# Times are compared with a prediction where the machine was quiet.


def stat(path: Path, work: int, idle: int) -> None:
    """Ticks of the only processor that this process may use, beside one that others fill."""
    usable = min(os.sched_getaffinity(0))
    path.write_text(
        f"cpu  {work} 0 0 {idle} 0 0 0 0 0 0\ncpu{usable} {work} 0 0 {idle} 0 0 0 0 0 0\n"
        f"cpu9999 {work * 100} 0 0 0 0 0 0 0 0 0\nintr 5\n"
    )


def test_what_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = [0.0]
    monkeypatch.setattr(timing, "STAT", tmp_path / "stat")
    monkeypatch.setattr(timing, "EVERY", 0.0)
    monkeypatch.setattr(os, "times", lambda: os.times_result((own[0], 0.0, 0.0, 0.0, 0.0)))
    stat(tmp_path / "stat", 1000, 1000)
    found = Busy()
    stat(tmp_path / "stat", 1500, 1500)
    own[0] = 400 / os.sysconf("SC_CLK_TCK")
    assert found.share() == found.recent() == pytest.approx(0.1)
    stat(tmp_path / "stat", 2500, 1500)
    assert found.share() == pytest.approx(1100 / 2000) and found.recent() == pytest.approx(1.0)
    assert Busy(alone=False).share() is None
    (tmp_path / "stat").write_text("nothing of the kind")
    assert found.share() is None and Busy().share() is None


def test_the_machine_itself_says_it():
    found = Busy()
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    share = found.share()
    assert share is None or 0 <= share <= 1


@pytest.mark.parametrize(
    ("share", "ratios"),
    [(0.02, ["2.00", "0.50", "3.00"]), (None, ["2.00", "0.50", "3.00"]), (0.6, ["-", "-", "3.00"])],
)
def test_times_beside_other_programs_are_not_compared(share: float | None, ratios: list[str]):
    shown = io.StringIO()
    Console(file=shown, width=120).print(
        figures_table(
            Figures(step_seconds=1.0, tokens_per_second=8.0, device_bytes=1 << 20),
            Figures(step_seconds=2.0, tokens_per_second=4.0, device_bytes=3 << 20),
            share,
        )
    )
    assert [
        line.split("│")[-2].strip().rpartition(" ")[2]
        for line in shown.getvalue().splitlines()
        if line.startswith("│")
    ] == ratios


def test_bigram_counts_by_hand():
    a, b = ord("a"), ord("b")
    text = {"inputs": np.array([[a, a]], np.int32), "targets": np.array([[a, b]], np.int32)}
    other = {"inputs": np.array([[a, b]]), "targets": np.array([[b, a]])}
    np.testing.assert_allclose(
        bigram_loss([text], [text, other]),
        -np.mean([np.log(2 / 258), np.log(2 / 258), np.log(2 / 258), np.log(1 / 256)]),
    )
