"""Names of TPU slices, as Google's tools have them.

Names: docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (labels of nodes),
docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e} (accelerator types) and
docs.cloud.google.com/tpu/docs/runtimes (runtime versions), all read 2026-11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.launching.job import Job


@dataclass(frozen=True, kw_only=True)
class TpuKind:
    """Names of one generation.

    Attributes:
        node: value of the label of GKE nodes.
        accelerator: beginning of Cloud TPU's accelerator types; empty where Cloud TPU does not
            offer it by itself.
        counted: what the number in an accelerator type counts, for one chip: 2 where it counts
            TensorCores.
        shaped: whether a slice of one size exists in several shapes, so that the shape must be
            said.
        runtime: version of the software of a TPU VM.
        track: release track of gcloud that knows the shapes of this generation.
    """

    node: str
    accelerator: str = ""
    counted: int = 1
    shaped: bool = False
    runtime: str = ""
    track: tuple[str, ...] = ()


KINDS: Mapping[str, TpuKind] = {
    "v4": TpuKind(
        node="tpu-v4-podslice",
        accelerator="v4",
        counted=2,
        shaped=True,
        runtime="tpu-ubuntu2204-base",
    ),
    "v5e": TpuKind(
        node="tpu-v5-lite-podslice", accelerator="v5litepod", runtime="v2-alpha-tpuv5-lite"
    ),
    "v5p": TpuKind(
        node="tpu-v5p-slice",
        accelerator="v5p",
        counted=2,
        shaped=True,
        runtime="v2-alpha-tpuv5",
        track=("alpha",),
    ),
    "v6e": TpuKind(node="tpu-v6e-slice", accelerator="v6e", runtime="v2-alpha-tpuv6e"),
    "tpu7x": TpuKind(node="tpu7x"),
}


def is_tpu(job: Job) -> bool:
    """Whether the job runs on TPUs."""
    return job.machine.chip.vendor == "google"


def kind_of(job: Job) -> TpuKind:
    """Names of the generation of the job; those of a generation that nobody has named here are
    empty.
    """
    return KINDS.get(job.machine.chip.name, TpuKind(node=""))


def shape_of(job: Job) -> str:
    """The shape of a slice, in chips.

    >>> shape_of(Job(name="a", command=("train",), topology="2*v5p:4x4x8"))
    '4x4x8'
    """
    torus = next((tier for tier in job.machine.tiers if tier.kind == "torus"), None)
    return "x".join(map(str, torus.shape)) if torus else ""


def chips_per_host(job: Job) -> int:
    """Chips of a host; a chip can be several JAX devices."""
    return job.devices_per_host // job.machine.chip.devices_per_chip


def accelerator_type(job: Job) -> str:
    """Cloud TPU's name of a slice.

    >>> for topology in ("v5e:4x8", "v5p:4x4x4"):
    ...     accelerator_type(Job(name="a", command=("train",), topology=topology))
    'v5litepod-32'
    'v5p-128'
    """
    kind = kind_of(job)
    chips = job.machine.devices // job.slices // job.machine.chip.devices_per_chip
    return f"{kind.accelerator}-{chips * kind.counted}"


def check_tpu(job: Job) -> list[str]:
    """Why these TPUs cannot be asked for; empty for GPUs, too."""
    if not is_tpu(job):
        return []
    failures = (
        []
        if kind_of(job).node
        else [
            f"{job.machine.chip.name} is a TPU whose names are not known; they are for"
            f" {', '.join(KINDS)}"
        ]
    )
    failures += [] if shape_of(job) else [f"{job.topology} does not say the shape of a slice"]
    failures += (
        [
            f"{job.host_processes} processes share the chips of a host, and JAX runs one process on"
            " a TPU host"
        ]
        if job.host_processes > 1
        else []
    )
    return failures
