"""Jobs whose plans are kept: models, machines, batches and pins, drawn once and for all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: model -> (machines, batches, lengths of sequences)
MODELS: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]] = {
    "gpt2-small": (("h100:8", "v5e:2x4", "a100:4", "v5e:4x4", "2*a100:8"), (64, 256), (512, 1024)),
    "llama2-7b": (("h100:8", "2*h100:8", "v5e:16x16", "v5p:4x4x4", "v6e:4x4"), (64, 512), (4096,)),
    "llama2-70b": (("8*h100:8", "v5p:4x4x8", "v5e:16x16", "16*h200:8"), (128, 512), (4096,)),
    "llama3-8b": (
        ("h100:8", "4*h100:8", "v5e:16x16", "v6e:8x8", "b200:8"),
        (64, 256),
        (4096, 8192),
    ),
    "llama3-70b": (("16*h100:8", "v5p:8x8x8", "8*b200:8"), (256, 1024), (8192,)),
    "llama3-405b": (("256*h100:8", "v5p:16x16x16"), (1024,), (8192,)),
    "mixtral-8x7b": (("8*h100:8", "v5p:4x4x8"), (256,), (4096,)),
    "deepseek-v3": (("64*h100:8", "v5p:8x8x8"), (1024,), (4096,)),
    "switch-base-8": (("h100:8", "v5e:4x4"), (128,), (512,)),
}
PINS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"remat": "none"},
    {"remat": "dots"},
    {"remat": "full"},
    {"microbatches": 2},
    {"microbatches": 4, "remat": "full"},
    {"mesh.tensor": 2},
    {"mesh.tensor": 8},
    {"mesh.stage": 2},
    {"mesh.stage": 2, "schedule": "1f1b", "microbatches": 8},
    {"mesh.stage": 4, "schedule": "gpipe", "microbatches": 8, "remat": "full"},
    {"mesh.stage": 2, "schedule": "interleaved", "virtual_stages": 2, "microbatches": 8},
    {"mesh.stage": 2, "schedule": "zero-bubble", "microbatches": 8, "pipeline": "programs"},
    {"mesh.stage": 2, "gather": "once"},
    {"mesh.context": 2},
    {"mesh.context": 2, "context": "ring"},
    {"mesh.context": 2, "context": "ulysses"},
    {"attention": "blocks"},
    {"attention": "traced"},
    {"offload": ["optimizer"]},
    {"mesh.fsdp": 8},
    {"mesh.data": 4},
    {"collective_matmul": "loop"},
    {"allow": {"moment_dtype": ["bfloat16"]}},
    {"mesh.expert": 8},
    {"mesh.expert": 2, "experts": "dropless"},
    {"mesh.tensor": 4, "zero": 3},
    {"mesh.tensor": 3},
    {"microbatches": 7},
)
COUNT = 320


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is planned.

    Attributes:
        model, topology, batch, seq, pins: as `shardlib.plan` takes them; the model is a preset.
    """

    model: str
    topology: str
    batch: int
    seq: int
    pins: dict[str, Any]

    @property
    def name(self) -> str:
        """One line that tells the job from others."""
        pins = ",".join(f"{name}={value}" for name, value in self.pins.items())
        return f"{self.model} {self.topology} {self.batch}x{self.seq} [{pins}]"


def jobs() -> tuple[Job, ...]:
    """All jobs, those of one model and batch after each other."""
    rng, found = random.Random(20), dict[str, Job]()
    while len(found) < COUNT:
        job = _drawn(rng)
        found.setdefault(job.name, job)
    return tuple(sorted(found.values(), key=lambda job: (job.model, job.batch, job.seq, job.name)))


def _drawn(rng: random.Random) -> Job:
    model = rng.choice(list(MODELS))
    machines, batches, lengths = MODELS[model]
    return Job(
        model=model,
        topology=rng.choice(machines),
        batch=rng.choice(batches),
        seq=rng.choice(lengths),
        pins=dict(rng.choice(PINS)),
    )


def by_trace(chosen: tuple[Job, ...]) -> Iterator[tuple[tuple[str, int, int], list[Job]]]:
    """Jobs that plan the same traced loss."""
    groups: dict[tuple[str, int, int], list[Job]] = {}
    for job in chosen:
        groups.setdefault((job.model, job.batch, job.seq), []).append(job)
    yield from groups.items()
