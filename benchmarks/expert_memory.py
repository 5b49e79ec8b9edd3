"""Memory of routed experts, as predicted and as the compilers of a TPU and a GPU have it.

    python -m benchmarks expert_memory [--topology v5e:2x4 ...] [--only NAME ...] [--out results.json]

Two small models on eight devices, one with a few wide experts as Mixtral has them, one with many
narrow ones and a shared expert as DeepSeek-V3: dropless and with a capacity, under every remat
policy. Every step is compiled ahead of time; bytes are those of one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.environment import card
from benchmarks.memory_savers import run
from shardlib.models.config import Experts, TransformerConfig

WIDE = card("wide")
NARROW = replace(WIDE, name="narrow", experts=Experts(count=32, per_token=4, mlp=512, shared=1))
MESHES: tuple[dict[str, int], ...] = ({"fsdp": 2, "expert": 4}, {"fsdp": 4, "expert": 2})


def rows() -> Iterator[tuple[str, str, dict[str, Any], TransformerConfig]]:
    """(name, the row that it is compared with, pins, model) of every row."""
    for model in (WIDE, NARROW):
        for form, capacity in (("dropless", 0.0), ("capacity 1.25", 1.25)):
            mesh = MESHES[model is NARROW and capacity > 0]
            for remat in ("none", "dots", "full"):
                name = f"{model.name}, {form}, remat"
                yield (
                    f"{name} {remat}",
                    f"{name} none" if remat != "none" else "",
                    {"mesh": mesh, "zero": 3, "remat": remat, "microbatches": 1},
                    with_capacity(model, capacity),
                )


def with_capacity(model: TransformerConfig, capacity: float) -> TransformerConfig:
    """The model with experts that drop what is beyond a capacity; 0 drops nothing."""
    assert model.experts is not None
    return replace(model, experts=replace(model.experts, capacity=capacity))


def main() -> None:
    run("expert_memory", __doc__, list(rows()))
