"""A sample of `benchmarks/fuzz_files.py`: files of every format, damaged and made up, are read or
refused with a `ShardlibError`, and nothing else happens.
"""

from __future__ import annotations

import pytest

from benchmarks.fuzz_files import run
from benchmarks.fuzz_formats import FORMATS, Format


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_files_of_strangers(form: Format):
    found = run(form, 24, seed=1)
    assert found.faults == [] and found.files == 24 == found.taken + found.refused
