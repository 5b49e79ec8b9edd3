"""Eight simulated CPU devices, set before JAX starts; child processes of tests inherit them.

Grids (`pytestmark = pytest.mark.grid`) are cases of one test over models, meshes and schedules. With `--part 1/2` every second of them is run, with `--part 2/2` the others: two runs on two
versions of Python and JAX then cover all of them between them, and each covers every test. Without it everything is run.
"""

from __future__ import annotations

import os

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Tests compile far more than they compute: without the optimisations of the code generator XLA takes a third of the time.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="of the cases of grids, run the K-th of every N")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "grid: cases of one test over models, meshes and schedules, see tests/conftest.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--part").split("/"))
    seen: dict[str, int] = {}
    left_out: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("grid") is None or not hasattr(item, "callspec"):
            continue
        test = item.nodeid.partition("[")[0]
        number = seen[test] = seen.get(test, -1) + 1
        if number % parts != part - 1:
            left_out.append(item)
    items[:] = [item for item in items if item not in set(left_out)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
