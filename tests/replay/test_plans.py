"""Plans are what they were when they were stored. What changes them is said in the changelog, and
stored again by `benchmarks/replay.py`, which compares all of them.
"""

from __future__ import annotations

import zlib

import pytest

from tests.replay import plans
from tests.replay.jobs import by_trace, jobs

#: Plans of each model that are made again.
SAMPLE = 4
#: Models that are planned within moments.
QUICK = ("gpt2-small", "llama2-7b", "llama3-8b", "switch-base-8")


def test_there_are_three_hundred_of_them():
    assert len(jobs()) >= 300
    assert len({job.name for job in jobs()}) == len(jobs())


@pytest.mark.long
@pytest.mark.skipif(not plans.stored(), reason=f"none were stored for {plans.versions()}")
@pytest.mark.parametrize("model", QUICK)
def test_a_sample_of_plans_is_what_was_stored(model: str):
    table = plans.stored()
    groups = [group for (name, _, _), group in by_trace(jobs()) if name == model]
    group = sorted(groups, key=lambda group: zlib.crc32(group[0].name.encode()))[0]
    some = sorted(group, key=lambda job: zlib.crc32(job.name.encode()))[:SAMPLE]
    changed = {
        job.name: found
        for job, row in plans.rows(tuple(some))
        if (found := plans.differences(table[job.name], row))
    }
    assert not changed
