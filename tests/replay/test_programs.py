"""Programs are what they were when they were stored, see `test_plans.py`.

They were stored with the code generator that XLA uses by itself, and not with the quicker one of
these tests: it decides about temporaries. They are compiled in a process of their own.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import pytest

from tests.processes import ROOT, python
from tests.replay import programs
from tests.replay.plans import differences, versions

#: Programs that are compiled again.
SAMPLE = 4
JOBS = sorted(programs.everything(), key=lambda job: zlib.crc32(job.name.encode()))[:SAMPLE]
COMPILE = """
import json, sys
import tests.conftest
from tests.replay import programs
print(json.dumps({job.name: programs.row(job) for job in programs.everything() if job.name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = python("-c", COMPILE, *(job.name for job in JOBS), env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def test_there_are_sixty_of_them():
    assert len(programs.everything()) >= 60


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(not programs.stored(), reason=f"none were stored for {versions()}")
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_sample_of_programs_is_what_was_stored(job: programs.Lowered, rows: dict[str, Any]):
    assert not differences(programs.stored()[job.name], rows[job.name])
