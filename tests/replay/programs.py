"""What a lowered program was when it was stored: its collectives by kind and mesh axes, how many
and how many bytes, and its memory on simulated devices.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax

import shardlib
from shardlib._jax_compat import compiled_memory
from shardlib.verification.traffic import read_traffic
from tests.replay.plans import Row, versions
from tests.zoo import CASES, Case

STORED = Path(__file__).parent / "programs.json"
_LAYERED = (
    "decoder-scan-annotated",
    "decoder-annotated",
    "vit-unannotated",
    "linen-decoder-annotated",
)
_SPREAD = (
    "encoder-decoder-annotated",
    "recurrent-annotated",
    "resnet-groupnorm-unannotated",
    "tree-annotated",
    "mlp-annotated",
)
_ZERO: tuple[dict[str, Any], ...] = (
    {"mesh": {"fsdp": 8}, "zero": 3},
    {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 1},
    {"mesh": {"data": 2, "fsdp": 2}, "zero": 2, "microbatches": 2},
    {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3, "remat": "full"},
)
_STAGED: tuple[dict[str, Any], ...] = (
    {"mesh": {"stage": 2, "fsdp": 4}, "schedule": "1f1b", "microbatches": 2},
    {"mesh": {"stage": 2, "data": 2}, "schedule": "gpipe", "microbatches": 4, "remat": "full"},
    {
        "mesh": {"stage": 2, "fsdp": 2, "tensor": 2},
        "schedule": "1f1b",
        "microbatches": 2,
        "gather": "once",
    },
)
_MORE: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    ("decoder-scan-annotated", pin)
    for pin in (
        {"mesh": {"data": 8}, "zero": 0},
        {"mesh": {"tensor": 8}},
        {"mesh": {"data": 2, "tensor": 4}, "sequence_parallel": True},
        {"mesh": {"fsdp": 8}, "zero": 3, "microbatches": 1, "remat": "dots"},
        {"mesh": {"stage": 2, "data": 2}, "schedule": "zero-bubble", "microbatches": 4},
        {
            "mesh": {"data": 4, "tensor": 2},
            "microbatches": 2,
            "dtypes": {"reduction_dtype": "float32"},
        },
        {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3, "microbatches": 2},
        {"mesh": {"fsdp": 2, "tensor": 4}, "zero": 2},
        {"mesh": {"data": 2, "tensor": 4}, "collective_matmul": "loop", "sequence_parallel": True},
        {
            "mesh": {"stage": 2, "fsdp": 2, "data": 2},
            "schedule": "1f1b",
            "microbatches": 2,
            "zero": 3,
        },
        {"mesh": {"data": 1}, "remat": "full"},
        {"mesh": {"fsdp": 4, "data": 2}, "zero": 1},
        {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3, "remat": "dots"},
    )
)


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A program: a model of the zoo under a pinned plan."""

    model: str
    pin: dict[str, Any]

    @property
    def name(self) -> str:
        """One line that tells it from others."""
        return f"{self.model} {json.dumps(self.pin, sort_keys=True)}"


def everything() -> tuple[Lowered, ...]:
    """All programs."""
    listed = (
        [(model, pin) for model in (*_LAYERED, *_SPREAD) for pin in _ZERO]
        + [(model, pin) for model in _LAYERED[:3] for pin in _STAGED]
        + list(_MORE)
    )
    listed += [
        (model, {"mesh": {"data": 4, "tensor": 2}, "zero": 0}) for model in (*_LAYERED, *_SPREAD)
    ]
    return tuple(
        {job.name: job for job in (Lowered(model=model, pin=pin) for model, pin in listed)}.values()
    )


def rows(chosen: tuple[Lowered, ...]) -> Iterator[tuple[Lowered, Row]]:
    """Compiles all programs."""
    for job in chosen:
        yield job, row(job)
        jax.clear_caches()


def row(job: Lowered) -> Row:
    """Compiles a program."""
    case: Case = next(one for one in CASES if one.name == job.model)
    try:
        program = shardlib.compile(
            case.init,
            case.loss,
            optax.adamw(1e-3),
            case.batch,
            topology="cpu:8",
            pin=job.pin,
            batch_axes=case.batch_axes,
        )
        compiled = program.lower().compile()
    except shardlib.ShardlibError as error:
        return {"error": type(error).__name__, "says": str(error).splitlines()[0]}
    sizes, counts = Counter[str](), Counter[str]()
    for item in read_traffic(compiled.as_text(), program.plan.mesh).found:
        where = f"{item.kind} over {'+'.join(item.axes) or 'other groups'}"
        sizes[where] += item.bytes * item.count
        counts[where] += item.count
    return {
        "digest": program.plan.digest,
        "bytes": dict(sizes),
        "counts": dict(counts),
        "memory": compiled_memory(compiled),
    }


def stored() -> dict[str, Row]:
    """The table for the versions in force; empty where there is none."""
    return json.loads(STORED.read_text()).get(versions(), {}) if STORED.exists() else {}
