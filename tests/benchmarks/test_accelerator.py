"""The benchmark of accelerators runs here, too, and what it measures is what plans are priced with."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardlib
from benchmarks import accelerator
from shardlib.models.config import TransformerConfig

SMALL = TransformerConfig(
    name="small",
    vocab_size=64,
    max_seq=16,
    compute_dtype="float32",
    activation="gelu_tanh",
    gated=False,
    layers=2,
    embed=32,
    heads=2,
    kv_heads=2,
    head_dim=16,
    mlp=64,
)


def test_the_file_is_the_machine_with_its_shares(tmp_path: Path) -> None:
    for spelling in ("h100:1", "2*h100:8", "v5e:4x4", "v5p:2x2x2"):
        machine, file = shardlib.topology(spelling), tmp_path / "machine.toml"
        file.write_text(accelerator.topology_file(machine, {"matmul": 0.5, "memory": 0.25}))
        read = shardlib.topology(str(file))
        assert read.chip == machine.chip and dict(read.efficiency) == {
            "matmul": 0.5,
            "memory": 0.25,
        }
        for one, other in zip(read.tiers, machine.tiers, strict=True):
            assert (one.kind, one.shape, one.wrap) == (other.kind, other.shape, other.wrap)
            assert one.bytes_per_s == pytest.approx(other.bytes_per_s)


@pytest.mark.long
def test_it_runs_on_simulated_devices(tmp_path: Path) -> None:
    found = accelerator.run(
        "cpu:1", [(SMALL, 4, 16)], side=64, numbers=1 << 10, repeats=2, file=tmp_path / "m.toml"
    )
    (row,) = found["jobs"]
    assert row["step_seconds"] > 0 and row["peak_by"] == "compiler" and row["peak_bytes"] > 0
    assert set(row["predicted_over_measured"]) == {"shipped", "measured"}
    assert all(0 < share <= 1 for share in found["shares"].values())
