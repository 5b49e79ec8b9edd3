"""What a plan was when it was stored: its decisions, its price, its findings; or how it was
refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import flax
import jax

from shardlib.cli.inputs import inputs_of
from shardlib.errors import ShardlibError
from shardlib.frontend.model import problem
from shardlib.graph import Problem
from shardlib.machines.topology import topology
from shardlib.planner.search import search
from tests.replay.jobs import Job, by_trace, jobs

STORED = Path(__file__).parent / "plans.json"
#: Relative difference of prices that another machine's arithmetic may make.
EXACT = 1e-9
Row = dict[str, Any]


def versions() -> str:
    """What a table holds for: tracing differs between versions of JAX."""
    return f"jax {jax.__version__}, flax {flax.__version__}"


def rows(chosen: tuple[Job, ...]) -> Iterator[tuple[Job, Row]]:
    """Plans all jobs."""
    for (model, batch, seq), group in by_trace(chosen):
        given = inputs_of(model, batch, seq)
        given.pop("batch_axes")
        found = problem(
            given.pop("init"),
            given.pop("loss"),
            given.pop("optimizer"),
            given.pop("batch"),
            name=given["name"],
        )
        for job in group:
            yield job, row(found, job)


def row(traced: Problem, job: Job) -> Row:
    """Plans a job."""
    try:
        plan = search(traced, topology(job.topology), job.pins)
    except ShardlibError as error:
        return {"error": type(error).__name__, "says": str(error).splitlines()[0]}
    estimate = plan.estimate
    return {
        "digest": plan.digest,
        "mesh": plan.decisions["mesh"],
        "step_seconds": estimate.step_seconds,
        "bytes": {name: value for name, value in asdict(estimate.device_bytes).items() if value},
        "findings": sorted(finding.code for finding in plan.findings),
    }


def differences(stored: Row, found: Row) -> list[str]:
    """What is not as it was stored."""
    return [
        f"{name}: {stored.get(name)} was stored, {found.get(name)} found"
        for name in sorted({*stored, *found})
        if not _same(stored.get(name), found.get(name))
    ]


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[name], two[name]) for name in one)
    if isinstance(one, float) and isinstance(two, float | int):
        return abs(one - two) <= EXACT * max(abs(one), abs(two))
    return one == two


def stored() -> dict[str, Row]:
    """The table for the versions in force; empty where there is none."""
    return json.loads(STORED.read_text()).get(versions(), {}) if STORED.exists() else {}


def everything() -> tuple[Job, ...]:
    """All jobs."""
    return jobs()
