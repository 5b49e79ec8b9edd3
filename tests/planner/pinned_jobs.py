"""Random jobs: small models on small machines, each with pins that its free plan must not be slower
than.

Pins restrict the space that is searched. What the planner never does by itself is not among them:
other dtypes, state on disk, loops over tensor, layer groups apart, per-stage programs, groups of
microbatches and rules.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardlib.errors import InfeasibleError, PinError
from shardlib.layout import INNER_AXES
from shardlib.machines.topology import Topology, topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from shardlib.planner.workload import Workload, prepare
from tests.planner import worlds
from tests.planner.worlds import with_memory

#: What one plan may be faster than another by, of its time: rounding.
ROUNDING = 1e-9
#: Pins that are tried for each model, machine and memory.
PINS_A_MODEL = 5
MACHINES = (
    "cpu:8",
    "cpu:4",
    "h100:4",
    "h100:8",
    "2*h100:4",
    "4*h100:2",
    "3*a100:2",
    "2*a100:8",
    "v5e:2x2",
    "v5e:2x4",
    "v5e:4x4",
    "2*v5e:2x4",
    "v5p:2x2x2",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model on a machine.

    Attributes:
        kind: of the model, a function of `tests.planner.worlds`.
        sizes: its arguments.
        functions: the custom calls that it is taken to call.
        where: the machine.
        share: of the memory that the fastest plan takes, what a device has; None for its own.
    """

    kind: str
    sizes: tuple[tuple[str, Any], ...]
    functions: frozenset[str]
    where: str
    share: float | None


def drawn(seed: int) -> Job:
    """A random job."""
    rng = random.Random(seed)
    kind = rng.choice(("mlp", "layers", "layers", "stack", "experts", "two_stacks"))
    sizes: dict[str, Any] = {"batch": rng.choice((2, 4, 6, 8, 16, 64))}
    if kind != "mlp":
        sizes["depth"] = rng.choice((2, 3, 4, 6, 8))
        sizes["seq"] = rng.choice((16, 64, 512, 2048))
    sizes["embed"] = rng.choice((32, 256, 1024))
    sizes["hidden"] = sizes["embed"] * rng.choice((1, 3, 4))
    if kind == "two_stacks":
        sizes |= {"hidden": (sizes["hidden"], 2 * sizes["embed"]), "depth": (2, sizes["depth"])}
    functions = frozenset({"attention"} if kind == "layers" and rng.random() < 0.7 else ())
    return Job(
        kind=kind,
        sizes=tuple(sizes.items()),
        functions=functions | ({"dropless"} if kind == "experts" else frozenset()),
        where=rng.choice(MACHINES),
        share=rng.choice((None, None, 0.9, 0.6, 0.4)),
    )


def pins(job: Job, load: Workload, seed: int) -> Iterator[dict[str, Any]]:
    """Random pins that make sense together, for the most part."""
    rng, devices = random.Random(seed + 1_000_003), topology(job.where).devices
    ways = [n for n in range(2, devices + 1) if devices % n == 0]
    options: dict[str, list[Any]] = {
        **{f"mesh.{axis}": [1, *ways] for axis in INNER_AXES},
        "mesh": [dict(mesh) for mesh in _meshes(rng, devices)],
        "zero": [0, 1, 2, 3],
        "remat": list(load.problem.steps),
        "remat_layers": [0, 1, 2],
        "microbatches": [1, 2, 4, 8],
        "schedule": ["none", "gpipe", "1f1b", "interleaved", "zero-bubble"],
        "virtual_stages": [1, 2, 3, 4],
        "gather": ["use", "once"],
        "pipeline": ["lockstep"],
        "context": ["none", "all-gather", "ring", "ulysses"],
        "attention": ["traced", "blocks", "cudnn", "splash"],
        "experts": ["none", "dropless"],
        "collective_matmul": ["none"],
        "offload": [["optimizer"], ["activations"], ["optimizer", "activations"], ["none"]],
        "axis_order": [rng.sample(INNER_AXES, len(INNER_AXES))],
        "sequence_parallel": [True, False],
    }
    for _ in range(PINS_A_MODEL):
        words = rng.sample(list(options), rng.choice((1, 1, 1, 2)))
        if "mesh" in words:
            words = [word for word in words if not word.startswith("mesh.")]
        yield {word: rng.choice(options[word]) for word in words}


def _meshes(rng: random.Random, devices: int) -> Iterator[dict[str, int]]:
    """Random meshes of all devices."""
    for _ in range(8):
        left, mesh = devices, dict[str, int]()
        for axis in rng.sample(INNER_AXES, len(INNER_AXES)):
            size = rng.choice([n for n in range(1, left + 1) if left % n == 0])
            mesh[axis], left = size, left // size
        mesh["data"] *= left
        yield mesh


@functools.lru_cache(maxsize=8)
def prepared(job: Job) -> Workload:
    """The model of a job, for its chips."""
    made = getattr(worlds, job.kind)(**dict(job.sizes))
    return prepare(replace(made, functions=job.functions), topology(job.where).chip.vendor)


def machine(job: Job, load: Workload) -> Topology:
    """The machine of a job, with its memory."""
    place = topology(job.where)
    roomy = None if job.share is None else found(load, place, {})
    if job.share is None or roomy is None:
        return place
    return with_memory(place, roomy.estimate.device_bytes.peak * job.share)


def found(load: Workload, place: Topology, pin: dict[str, Any]) -> Plan | None:
    """The plan under pins; None where they allow none, or none fits."""
    try:
        return planner.search(load.problem, place, pin, workload=load)
    except (PinError, InfeasibleError):
        return None


def beaten(seed: int) -> Iterator[dict[str, Any]]:
    """A row for each pins of a drawn job: seconds of the free plan and of the pinned one."""
    job = drawn(seed)
    load = prepared(job)
    place = machine(job, load)
    free = found(load, place, {})
    for pin in pins(job, load, seed):
        plan = found(load, place, pin)
        seconds = None if free is None else free.estimate.step_seconds
        pinned = None if plan is None else plan.estimate.step_seconds
        yield {
            "seed": seed,
            "job": f"{job.kind} {dict(job.sizes)} {sorted(job.functions)} on {job.where}"
            f" {job.share}",
            "pins": pin,
            "seconds": seconds,
            "pinned_seconds": pinned,
            "beaten": pinned is not None and (seconds is None or seconds > pinned * (1 + ROUNDING)),
        }
