"""Programs are what they were when they were stored, see `test_plans.py`."""

from __future__ import annotations

import zlib

import pytest

from tests.replay import programs
from tests.replay.plans import differences, versions

#: Programs that are compiled again.
SAMPLE = 4


def test_there_are_sixty_of_them():
    assert len(programs.everything()) >= 60


@pytest.mark.skipif(not programs.stored(), reason=f"none were stored for {versions()}")
@pytest.mark.parametrize(
    "job",
    sorted(programs.everything(), key=lambda job: zlib.crc32(job.name.encode()))[:SAMPLE],
    ids=lambda job: job.name,
)
def test_a_sample_of_programs_is_what_was_stored(job: programs.Lowered):
    assert not differences(programs.stored()[job.name], programs.row(job))
