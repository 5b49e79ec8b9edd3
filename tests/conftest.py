"""Eight simulated CPU devices, set before JAX starts; child processes of tests inherit them.

Of the large matrices (`pytest.mark.matrix`) one case in six is run, spread by their names;
benchmarks run them in full (`parity.py`, `mesh_equality.py`, `pipeline_equality.py`), and so does
`--every-case`.

With `--part 1/2` every second test of a file, and every second case of a parametrized one, is run,
with `--part 2/2` the others; what depends on the versions of Python and JAX most
(`pytest.mark.every_version`) is in both. Without it everything is run.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# What is kept between runs is kept apart from what the user keeps.
os.environ.setdefault(
    "SHARDLIB_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"shardlib-tests-{os.getuid()}")
)
# Tests compile far more than they compute: without the optimisations of the code generator XLA
# takes a third of the time.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"


#: Of the cases of a matrix, one in so many is in one of the parts.
SPARSE = 6


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        default="1/1",
        metavar="K/N",
        help="of the tests of a file, run the K-th of every N",
    )
    parser.addoption("--every-case", action="store_true", help="run large matrices in full")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        keep_figures()
    config.addinivalue_line("markers", "every_version: with --part too, this test is run")
    config.addinivalue_line("markers", "matrix: one case of this test in six is run")


def keep_figures() -> None:
    """Writes figures of simulated devices as if they had been measured: plans for them are then
    those of a quiet machine of two cores, whatever else runs beside the tests.
    """
    from shardlib.calibration import cache_path

    for local in range(1, 9):
        figures = {
            "float32_flops_per_s": 1.9e11 / local,
            "bfloat16_flops_per_s": 1.6e11 / local,
            "memory_bytes_per_s": 4e10 / local**1.35,
            "launch_s": 6e-7 * local,
            "latency_s": 1.5e-5 * (local / 2) ** 1.5 if local > 1 else 1e-4,
            "link_bytes_per_s": 6.2e9 / local if local > 1 else 1e9,
        }
        for devices in range(local, 17):
            path = cache_path(devices, local)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(figures))
            draft.replace(path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--part").split("/"))
    named = [
        item
        for item in items
        if item.get_closest_marker("matrix") is not None
        and any(item.nodeid.endswith(argument) for argument in config.args)
    ]
    chosen = (
        {item.nodeid for item in items}
        if config.getoption("--every-case")
        else _sparse(items) | {item.nodeid for item in named}
    )
    seen: dict[str, int] = {}
    left_out: list[pytest.Item] = []
    for item in items:
        matrix = item.get_closest_marker("matrix") is not None
        if matrix and item.nodeid not in chosen:
            left_out.append(item)
            continue
        if parts == 1 or item.get_closest_marker("every_version") is not None:
            continue
        group = item.nodeid.partition("[" if matrix else "::")[0]
        number = seen[group] = (
            seen.get(group, zlib.crc32(group.encode())) + 1
        )  # what has a single test is not all in one part
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
    return {
        case
        for cases in matrices.values()
        for case in sorted(cases, key=lambda case: zlib.crc32(case.encode()))[
            : -(-len(cases) // SPARSE)
        ]
    }
