"""Eight simulated CPU devices, set before JAX starts; child processes of tests inherit them.

With `--part 1/2` every second test of a file, and every second case of a parametrized one, is run, with `--part 2/2` the others: two runs on two versions of Python and JAX then cover all between them. Without
it everything is run. What depends on the versions most is marked (`pytest.mark.every_version`): it is in both. Of the large matrices that are marked so (`pytest.mark.matrix`), one case in six,
spread by their names, is in one part or the other; benchmarks have run them in full (`parity.py`, `mesh_equality.py`, `pipeline_equality.py`).
"""

from __future__ import annotations

import os
import tempfile
import zlib

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# What is kept between runs is kept apart from what the user keeps.
os.environ.setdefault("SHARDLIB_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"shardlib-tests-{os.getuid()}"))
# Tests compile far more than they compute: without the optimisations of the code generator XLA takes a third of the time.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"


#: Of the cases of a matrix, one in so many is in one of the parts.
SPARSE = 6


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="of the tests of a file, run the K-th of every N")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_version: with --part too, this test is run")
    config.addinivalue_line("markers", "matrix: with --part, one case of this test in six is in one of the parts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--part").split("/"))
    if parts == 1:
        return
    chosen = _sparse(items)
    seen: dict[str, int] = {}
    left_out: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("every_version") is not None:
            continue
        matrix = item.get_closest_marker("matrix") is not None
        if matrix and item.nodeid not in chosen:
            left_out.append(item)
            continue
        group = item.nodeid.partition("[" if matrix else "::")[0]
        number = seen[group] = seen.get(group, zlib.crc32(group.encode())) + 1  # what has a single test is not all in one part
        if number % parts != part - 1:
            left_out.append(item)
    items[:] = [item for item in items if item not in set(left_out)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def _sparse(items: list[pytest.Item]) -> set[str]:
    """The cases of matrices that are run, one of `SPARSE` of each, at least one."""
    matrices: dict[str, list[str]] = {}
    for item in items:
        if item.get_closest_marker("matrix") is not None:
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
    return {case for cases in matrices.values() for case in sorted(cases, key=lambda case: zlib.crc32(case.encode()))[:-(-len(cases) // SPARSE)]}
