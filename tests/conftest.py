"""Eight simulated CPU devices, set before JAX starts; child processes of tests inherit them.

With `--part 1/2` every second test of a file, and every second case of a parametrized one, is run, with `--part 2/2` the others: two runs on two versions of Python and JAX then cover all between them. Without
it everything is run. What depends on the versions most is marked (`pytest.mark.every_version`): it is in both.
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="of the tests of a file, run the K-th of every N")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_version: with --part too, this test is run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--part").split("/"))
    seen: dict[str, int] = {}
    left_out: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("every_version") is not None:
            continue
        file = item.nodeid.partition("::")[0]
        number = seen[file] = seen.get(file, zlib.crc32(file.encode())) + 1  # files with a single test are not all in one part
        if number % parts != part - 1:
            left_out.append(item)
    items[:] = [item for item in items if item not in set(left_out)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
