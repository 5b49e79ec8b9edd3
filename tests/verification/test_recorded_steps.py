"""The steps of a plan in a profile of JAX: those that XLA's own converter finds there."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import jax
import optax
import pytest

from shardlib.errors import MissingFileError, VerificationError
from shardlib.verification.recorded_steps import newest_profile, recorded_steps
from tests.lowering import small

STEPS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory):
    """A program, and the folder of a run that has recorded three steps of it."""
    program = small.program(optax.sgd(0.1), {"mesh": {"data": 2, "tensor": 4}})
    run = tmp_path_factory.mktemp("run")
    state = jax.block_until_ready(program.step(program.init(0), small.batch())[0])
    with jax.profiler.trace(run / "profiles" / "step-6"):
        for _ in range(STEPS):
            state, _ = program.step(state, small.batch())
        jax.block_until_ready(state)
    return program, run


def converted(run: Path) -> dict[str, list[float]]:
    """Microseconds of every instruction in the trace that XLA's converter wrote of the profile."""
    (path,) = run.rglob("*.trace.json.gz")
    found = defaultdict(list)
    for one in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if "hlo_op" in one.get("args", {}) and "shardlib_step" in one["args"]["hlo_module"]:
            found[one["args"]["hlo_op"]].append(one["dur"])
    return found


def test_operations_are_those_of_the_converter(recorded):
    program, run = recorded
    steps = recorded_steps(newest_profile(run), program.plan.digest)
    assert [step.name for step in steps] == ["step 6", "step 7", "step 8"]
    assert all(one.start < other.start for one, other in pairwise(steps))
    mine = defaultdict(list)
    for step in steps:
        assert {one.device for one in step.operations} == set(range(8))
        for one in step.operations:
            mine[one.name].append(one.seconds * 1e6)
    theirs = converted(run)
    collectives = [name for name in theirs if name.startswith(("all-reduce", "all-gather"))]
    assert collectives
    for name in collectives:
        assert sorted(mine[name]) == pytest.approx(sorted(theirs[name]), abs=0.002)


def test_steps_without_numbers_are_parted_where_they_begin(recorded, monkeypatch):
    from shardlib import _jax_compat

    program, run = recorded
    profile = newest_profile(run)
    wanted = [len(step.operations) for step in recorded_steps(profile, program.plan.digest)]
    read = _jax_compat.profile_events

    def without(content: bytes):
        return [
            (*event, {name: value for name, value in stats.items() if name != "run_id"})
            for *event, stats in read(content)
        ]

    monkeypatch.setattr(_jax_compat, "profile_events", without)
    found = recorded_steps(profile, program.plan.digest)
    assert len(found) == STEPS
    assert [len(step.operations) for step in found] == wanted


def test_what_is_no_profile_of_the_plan_is_said(recorded, tmp_path: Path):
    program, run = recorded
    with pytest.raises(VerificationError, match=rf"shows: {program.plan.digest}\nTry: the plan"):
        recorded_steps(newest_profile(run), "0123456789ab")
    with pytest.raises(MissingFileError, match="has no profile"):
        newest_profile(tmp_path)
    other = tmp_path / "a.xplane.pb"
    other.write_bytes(b"nothing of the kind" + os.urandom(64))
    with pytest.raises(VerificationError, match="is no profile of JAX"):
        recorded_steps(newest_profile(tmp_path), program.plan.digest)
