"""A compiler that aborts, hangs or eats memory is a value here, and this process lives."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from shardlib.errors import MissingPackageError
from shardlib.layout import MeshShape
from shardlib.machines.topology import topology
from shardlib.verification import isolation
from shardlib.verification.isolation import (
    Failure,
    Limits,
    failed,
    last_words,
    out_of_memory_text,
    require_compiler,
    run_child,
    target,
)
from tests.planner.fixture_plan import PLAN
from tests.processes import alive, child, until

HERE = target(topology("cpu:2"), MeshShape(data=2))
OOM = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 86.97G of 15.75G hbm. Exceeded hbm capacity by 71.23G.

  Largest program allocations in hbm:

  1. Size: 20.50G
     Operator: op_name="jit(step)/dot_general" source_file="m.py"
     Shape: bf16[32,16,2048,11008]{3,2,1,0}
     ==========================

  2. Size: 1.50G
     Operator: op_name="jit(step)/add"
     Shape: f32[4]{0}
"""


def failure(tmp_path: Path, code: str, **limits: float) -> Failure:
    made = run_child([sys.executable, "-c", code], tmp_path, HERE, Limits(**limits))
    assert isinstance(made, Failure)
    return made


def test_abort(tmp_path: Path):
    made = failure(
        tmp_path,
        "import os, sys; print('F0000 x.cc:1] Check failed: a == b', file=sys.stderr, flush=True);"
        " os.abort()",
    )
    assert made.kind == "compiler-abort"
    assert (
        made.message == "the compiler ended with signal SIGABRT: F0000 x.cc:1] Check failed: a == b"
    )


def test_time_limit(tmp_path: Path):
    made = failure(tmp_path, "import time; time.sleep(60)", seconds=0.3)
    assert made.kind == "compile-timeout" and made.seconds < 20


def test_memory_limit(tmp_path: Path):
    made = failure(
        tmp_path, "import time; x = b'x' * (400 << 20); time.sleep(60)", memory_bytes=200 << 20
    )
    assert made.kind == "compiler-memory"


def test_errors_of_the_compiler_are_told_apart(tmp_path: Path):
    write = (
        "import json, pathlib, sys; pathlib.Path({!r}).write_text(json.dumps({{'error': {{'kind':"
        " 'E', 'message': {!r}}}}}))"
    )
    path = str(tmp_path / "result.json")
    assert (
        failure(tmp_path, write.format(path, "INVALID_ARGUMENT: no")).message
        == "E: INVALID_ARGUMENT: no"
    )
    assert failure(tmp_path, write.format(path, OOM)).kind == "out-of-memory"


def test_out_of_memory_names_the_largest_buffers():
    text = (
        "the program needs 86.97GiB per device and there are 15.75GiB; largest buffers: 20.50GiB"
        " bf16[32,16,2048,11008]{3,2,1,0} jit(step)/dot_general; 1.50GiB f32[4]{0} jit(step)/add."
    )
    assert out_of_memory_text(OOM) == text
    finding = failed(Failure(kind="out-of-memory", message=OOM, seconds=1.0), PLAN)
    assert (finding.code, finding.severity) == ("out-of-memory", "error")
    assert finding.message.startswith(text + " The plan's largest parts are ")
    newer = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory"
        " required for HLO temporaries (192.00G) exceeds available HBM (15.75G). HLO module: jit_f."
    )
    assert (
        out_of_memory_text(newer)
        == "the program needs 192.00GiB per device for HLO temporaries and there are 15.75GiB."
    )


def test_last_words():
    assert last_words("") == "it left no message"
    assert last_words("a\nb\n") == "b"


@pytest.mark.parametrize(
    ("platform", "extra"), [("tpu", "shardlib[tpu]"), ("cuda", "shardlib[gpu]")]
)
def test_a_compiler_that_is_not_installed(
    platform: str, extra: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(isolation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="not installed") as stop:
        require_compiler(platform)
    assert f"pip install '{extra}'" in str(stop.value)


def test_targets_travel_as_json():
    for spelling, mesh in (
        ("2*v5e:4x4", {"data": 2, "fsdp": 16}),
        ("16*h100:8", {"data": 16, "tensor": 8}),
        ("tpu7x:2x2x2", {"fsdp": 16}),
    ):
        where = target(topology(spelling), MeshShape(mesh))
        assert isolation.Target.from_json(json.loads(json.dumps(where.to_json()))) == where
        assert len(set(where.order)) == len(where.order) == where.devices


def test_slices_are_outermost_and_neighbours_innermost():
    order = target(topology("2*v5e:4x4"), MeshShape(data=2, fsdp=4, tensor=4)).order
    assert [place[0] for place in order] == [0] * 16 + [1] * 16
    rows = [order[i : i + 4] for i in range(0, 16, 4)]
    assert all(
        len({(s, x) for s, x, *_ in row}) == 1 and [y for _, _, y, *_ in row] == [0, 1, 2, 3]
        for row in rows
    )
    assert target(topology("2*h100:8"), MeshShape(data=2, tensor=8)).order == tuple(
        (i,) for i in range(16)
    )


def test_every_gpu_of_the_catalogue_is_described():
    from shardlib.machines.catalog import CATALOG

    for name, product in CATALOG.items():
        if product.chip.vendor == "nvidia":
            spec = target(topology(f"{name}:8"), MeshShape(data=8)).spec
            assert f"device_memory_size: {product.chip.hbm_bytes}\n" in spec
        if product.chip.vendor == "google":
            assert 0.9e9 < target(topology(product.example), MeshShape(data=4)).cycles_per_s < 2.5e9


#: Verifies a step whose compilation starts another process and hangs, in folders below the first
#: argument; the child writes down both numbers.
VERIFYING = """
import sys, tempfile
from types import SimpleNamespace
from shardlib.verification import isolation
from tests.verification.test_isolation import HERE
tempfile.tempdir = sys.argv[1]
run = isolation.run_child
code = "import os, subprocess, sys, time; one = subprocess.Popen(['sleep', '1000']); open(sys.argv[1] + '/pids', 'w').write(f'{os.getpid()} {one.pid}'); time.sleep(1000)"
isolation.run_child = lambda command, *rest: run([sys.executable, "-c", code, command[-1]], *rest)
isolation.compile_apart(SimpleNamespace(program=b"x", to_json=dict), HERE)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL],
    ids=lambda number: number.name,
)
def test_whoever_is_killed_leaves_no_compiler_and_no_folder(tmp_path: Path, number: signal.Signals):
    def compiling() -> list[int]:
        words = [path.read_text().split() for path in tmp_path.glob("shardlib-verify-*/pids")]
        return list(map(int, words[0])) if words and len(words[0]) == 2 else []

    with child("-c", VERIFYING, tmp_path) as process:
        pids = until(compiling, 120)
        assert pids and all(map(alive, pids))
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode != 0
    until(lambda: not any(map(alive, pids)))
    until(lambda: not [*tmp_path.iterdir()])
