"""What holds for every test: simulated devices, tiers, draws from large matrices.

Eight simulated CPU devices are set before JAX starts; child processes of tests inherit them. What
one process of a run compiles, the others load: the run has a compilation cache of its own.

Each test is of a tier (`tiers.py`), and `--quick` runs the unit tier without its matrices and
without its long tests (`pytest.mark.long`): searches over large spaces, and questions of many
searches, that take a second or more. A unit test that compiles a program or starts a process fails.

Of what takes long and of large matrices a run draws some (`drawing.py`). The draw changes with the
commit and the Python, and is named when a run begins; `--draw NAME` draws the same again,
`--every-case` runs all, and `--one-in N` draws from the cases of all other tests, too, for a second
Python whose libraries every test should meet, but not with every case. Tests that need the compiler
of a vendor take long.
"""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drawing import Case, Draw
from tests.tiers import TIERS, tier_of

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# As shardlib does, before whatever a test does first; see `shardlib.processes.place`.
os.environ.setdefault("PJRT_NPROC", "32")
# What is kept between runs is kept apart from what the user keeps.
os.environ.setdefault(
    "SHARDLIB_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"shardlib-tests-{os.getuid()}")
)
# Tests compile far more than they compute: without the optimisations of the code generator XLA
# takes a third of the time.
# On a busy machine a simulated device may reach a collective long after the others; XLA would end
# the process after 40 seconds.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_cpu_collective_call_terminate_timeout_seconds=200"
)
# A run has a compilation cache of its own: what one of its processes has compiled, the others load.
# Tests of a process that compiles elsewhere or has a cache of its own set these themselves.
if "PYTEST_XDIST_WORKER" not in os.environ and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE = tempfile.mkdtemp(prefix="shardlib-compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

# Under `nohup` SIGHUP is ignored, and processes that tests start would inherit that; a handler they
# do not. Workers of a run end with it, whatever they handle.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN or "PYTEST_XDIST_WORKER" in os.environ:
    signal.signal(signal.SIGHUP, lambda *_: None)


#: Markers of unit tests that a quick run leaves out.
FULL = ("matrix", "long")
#: Of the command of a process that may be started in any tier.
CONFINED = "confined_child.py"
#: What the test that runs now has compiled and started.
compiled: list[str] = []
started: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="run the unit tier alone, without its matrices and its long tests",
    )
    parser.addoption(
        "--draw",
        metavar="NAME",
        help="draw the cases of large matrices as the run did that said this name",
    )
    parser.addoption("--every-case", action="store_true", help="draw nothing, run everything")
    parser.addoption(
        "--one-in",
        type=int,
        metavar="N",
        help="of the cases of every test that is not a matrix, and of the long tests, draw one in N,"
        " at least one",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unit: nothing is compiled, and no process is started")
    config.addinivalue_line(
        "markers", "compile: programs are compiled and run on simulated devices"
    )
    config.addinivalue_line("markers", "processes: other processes are started")
    config.addinivalue_line(
        "markers", "compiler(vendor): needs the compiler of a vendor, tpu or gpu (./run compilers)"
    )
    config.addinivalue_line("markers", "matrix: a draw of one case in twelve is run")
    config.addinivalue_line(
        "markers",
        "long: three seconds or more, a unit test one; a draw of one in six is run, none of"
        " --quick",
    )
    if not hasattr(config, "workerinput"):
        # Workers are given the options.
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        config.option.draw = config.option.draw or f"{_commit(config.rootpath)}-{version}"
    if (
        importlib.metadata.version("jaxlib") < "0.11"
    ):  # has two code generators; the older one takes half of the time
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    # Traces are large and live long: looking through them all for garbage takes a tenth of the time.
    gc.set_threshold(50_000, 50, 100)
    # Who has workers runs no test, and needs no JAX.
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        keep_figures()
        watch()


def _commit(root: Path) -> str:
    """A name that changes with the commit; the same for all of a copy without Git."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"],
            capture_output=True,
            text=True,
            cwd=root,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def pytest_sessionstart(session: pytest.Session) -> None:
    _say(session.config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        _say(config)


def _say(config: pytest.Config) -> None:
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        terminal.write_line(
            "no matrices and no long tests"
            if config.option.quick
            else (
                "everything"
                if config.option.every_case
                else f"long tests and cases drawn with --draw {config.option.draw}"
            )
        )


def watch() -> None:
    """Writes down every program that XLA compiles in this process, and every process that it
    starts.
    """
    import jax.monitoring

    def compiling(event: str, duration_secs: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(about.get("fun_name", "?")))

    def starting(event: str, about: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and CONFINED not in str(
            about
        ):
            started.append(str(about[1]) if event != "os.fork" else "a copy of itself")

    jax.monitoring.register_event_duration_secs_listener(compiling)
    sys.addaudithook(starting)


def tier(item: pytest.Item) -> str | None:
    """The tier of a test: its own marker, or that of its file."""
    return next((marker.name for marker in item.iter_markers() if marker.name in TIERS), None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    compiled.clear()
    started.clear()
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    if started and tier(item) in ("unit", "compile"):
        pytest.fail(
            f"a test of the {tier(item)} tier started a process: {started[0]}", pytrace=False
        )
    if compiled and tier(item) == "unit":
        pytest.fail(
            f"a test of the unit tier compiled {len(compiled)} program{'s' * (len(compiled) > 1)}:"
            f" {', '.join(compiled[:5])}",
            pytrace=False,
        )


def _without_compiler(item: pytest.Item) -> str | None:
    """The vendor whose compiler a test needs and this environment lacks."""
    from shardlib.verification.isolation import GPU_PLUGINS

    packages = {"tpu": ("libtpu",), "gpu": GPU_PLUGINS}
    return next(
        (
            vendor
            for marker in item.iter_markers("compiler")
            for vendor in marker.args
            if not any(importlib.util.find_spec(name) for name in packages[vendor])
        ),
        None,
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of other tiers, and modules without examples, are not even imported for a quick
    run.
    """
    if (
        config.option.quick
        and collection_path.suffix == ".py"
        and collection_path.is_relative_to(config.rootpath)
    ):
        path, text = str(collection_path.relative_to(config.rootpath)), collection_path.read_text()
        if path.startswith("shardlib/") and ">>>" not in text:
            return True
        return None if "mark.unit" in text or tier_of(path) == "unit" else True
    return None


def keep_figures() -> None:
    """Writes figures of simulated devices as if they had been measured: plans for them are then
    those of a quiet machine of two cores, whatever else runs beside the tests.
    """
    from shardlib.calibration import cache_path, figure_names, now

    for local in range(1, 9):
        figures = {
            "float32_flops_per_s": 1.9e11 / local,
            "bfloat16_flops_per_s": 1.6e11 / local,
            "matmul_start": 8.0,
            "batched": 1.0,
            "cores": 1.0,
            "convolution_flops_per_s": 5e10 / local,
            "memory_bytes_per_s": 4e10 / local**1.35,
            "elements_per_s": 1e10 / local,
            "transcendental_per_s": 1.5e9 / local,
            "fresh_bytes_per_s": 5e9 / local,
            "optimizer_bytes_per_s": 2e10 / local**1.35,
            "gather_bytes_per_s": 1e10 / local,
            "launch_s": 6e-7 * local,
            "step_s": 2e-4,
            "alone": 1.0,
        }
        for name in figure_names(local):
            if name.endswith(".s"):
                figures[name] = 1.5e-5 * (local / 2) ** 1.5
            elif name.endswith(".s_per_byte"):
                figures[name] = local * (1.5e-10 if name.startswith("all-gather") else 3e-10)
        for devices in range(local, 17):
            path = cache_path(devices, local)
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps({"figures": figures, "made": now(), "load": 0.0}))
            draft.replace(path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if tier(item) is None and (name := tier_of(str(item.path.relative_to(config.rootpath)))):
            item.add_marker(name)
        if vendor := _without_compiler(item):
            reason = f"needs the compiler of the {vendor}: pip install 'shardlib[{vendor}]'"
            item.add_marker(pytest.mark.skip(reason=reason))
    if config.option.quick:
        kept = {item.nodeid for item in items if _quick(item)}
    elif config.option.every_case:
        kept = {item.nodeid for item in items}
    else:
        kept = _draw(config).kept([_case(item) for item in items], config.args)
    left_out = [item for item in items if item.nodeid not in kept]
    items[:] = [item for item in items if item.nodeid in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    # Modules and their syntax trees stay to the end: nobody needs to look through them for garbage.
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    # At its end pytest looks for garbage several times. Here that is mostly traces, which nothing
    # finalises.
    if session.config.option.quick:
        gc.freeze()


def _quick(item: pytest.Item) -> bool:
    return tier(item) == "unit" and not any(item.get_closest_marker(name) for name in FULL)


def _draw(config: pytest.Config) -> Draw:
    draw = Draw(config.option.draw)
    sparse = config.option.one_in
    return draw if sparse is None else replace(draw, long=sparse, others=sparse, units=sparse)


def _case(item: pytest.Item) -> Case:
    return Case(
        item.nodeid,
        tier(item) or "compile",
        matrix=item.get_closest_marker("matrix") is not None,
        long=any(item.get_closest_marker(name) for name in ("long", "compiler")),
    )


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]):
    """Runs a command; returns (exit code, stdout, stderr)."""

    from shardlib.cli import main

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(list(words))
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run
