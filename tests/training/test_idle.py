"""Processes that own all, some or none of the devices of a mesh."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
import pytest

from shardlib.checkpointing import huggingface
from shardlib.errors import LaunchError
from shardlib.layout import MeshShape
from shardlib.lowering.mesh import idle_devices
from shardlib.processes import values
from tests.checkpointing.test_huggingface import CONFIGS, drawn, program_of
from tests.processes import child, free_port
from tests.training.idle_fit import (
    EVERY,
    STEPS,
    batch_of,
    compiled,
    described,
    fitted,
    own_step,
)
from tests.training.idle_paths import paths

#: Devices of the mesh by processes of two devices.
USED = {"all": lambda count: 2 * count, "half": lambda count: count, "one": lambda count: 1}

#: What both of two processes are told of what needs one.
REFUSED = (
    "an engine computes on devices of its own process, and devices of",
    "the weights are on devices of other processes, and an engine computes in one",
    "pipeline='programs' runs from one process that has all devices, and there are 2 processes",
    "islands inside one program need a process that has all devices, and there are 2 processes",
)


@cache
def reference() -> dict[str, Any]:
    """The run of one process on one device that was left alone."""
    program = compiled(1)
    return described(program, fitted(program, batch_of, None))


@cache
def own_losses() -> list[float]:
    with TemporaryDirectory() as folder:
        return own_step(1, Path(folder, "own"))


def trained(folder: Path, count: int, used: str, how: str) -> list[dict[str, Any]]:
    """What each process comes to; nothing where they are killed."""
    process = child(
        "-m", "tests.training.idle_fit", count, free_port(), folder, USED[used](count), how
    )
    _, errors = process.communicate(timeout=150)
    assert process.returncode == (1 if how == "kill" else 0), errors[-3000:]
    texts = [path.read_text() for path in sorted(folder.glob("found-*"))]
    assert len(texts) == (0 if how == "kill" else count), errors[-3000:]
    return [json.loads(text) for text in texts]


class Store:
    """JAX's store of keys, of a job whose other processes read nothing."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes | str] = {}

    def key_value_set(self, key: str, value: bytes | str) -> None:
        self.keys[key] = value

    key_value_set_bytes = key_value_set

    def blocking_key_value_get_bytes(self, key: str, milliseconds: int) -> bytes | str:
        if key in self.keys:
            return self.keys[key]
        time.sleep(0.01)
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")


def test_values_that_nobody_reads_are_not_published_for_ever(monkeypatch: pytest.MonkeyPatch):
    """Processes that each run a program of their own devices: the store keeps two blocks, the
    process keeps no more, and its end waits for no reader. Who comes to read after all is told.
    """
    store = Store()
    monkeypatch.setattr("shardlib._jax_compat.coordination", lambda: (store, 0, 2))
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(values, "UNREAD_SECONDS", 0.0)
    channel = values.Channel(owners=frozenset({0}), name="alone")
    for _ in range(2 * values.BLOCK_MESSAGES + values.MOST_WAITING + 2):
        channel.send(bytes)
        while len(store.keys) < 2 * values.BLOCK_MESSAGES and not channel._waiting.empty():
            time.sleep(0.001)
    assert len(store.keys) == 2 * values.BLOCK_MESSAGES + 1
    assert channel._waiting.empty()
    assert channel._thread is not None and channel._thread.daemon
    monkeypatch.setattr("jax.process_index", lambda: 1)
    late = values.Channel(owners=frozenset({0}), name="alone")
    for key in [key for key in store.keys if "/sent/" in key]:
        del store.keys[key]
    with pytest.raises(LaunchError, match="has read nothing of it\nTry: call every program"):
        late.receive()


def test_processes_that_own_nothing_are_named():
    shape = MeshShape(data=2)
    [finding] = idle_devices(shape, 2, (1,))
    assert finding.message.startswith("process 1 owns no device of the mesh")
    [finding] = idle_devices(shape, 8, (1, 2, 3))
    assert "6 stay idle, all of processes 1 to 3" in finding.message
    assert not idle_devices(shape, 2)


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.processes
@pytest.mark.parametrize("used", list(USED))
@pytest.mark.parametrize(("count", "others", "how"), [(2, 4, "kill"), (4, 2, "term")])
def test_a_run_goes_on_with_another_number_of_processes(
    tmp_path: Path, count: int, others: int, used: str, how: str
):
    """Killed at step 4, or asked to stop, and gone on with: the numbers are those of one device, in
    processes with devices of the mesh as in those without.
    """
    stopped = trained(tmp_path, count, used, how)
    at = EVERY
    if how == "term":
        at = 10
        assert {one["steps"] for one in stopped} == {at}
        told = {one["stopped"] for one in stopped}
        assert told == {"SIGTERM", "another process"}
        for path in tmp_path.glob("found-*"):
            path.unlink()
    found, expected = trained(tmp_path, others, used, ""), reference()
    for one in found:
        assert one == found[0], "processes have other numbers"
        assert (one["resumed"], one["steps"], one["stopped"]) == (at, STEPS, "")
        assert len(one["losses"]) == STEPS and list(one["validations"]) == ["6", "12"]
        for name in ("losses", "loss", "loss of the average", "next loss"):
            np.testing.assert_allclose(one[name], expected[name], rtol=2e-5, err_msg=name)
        np.testing.assert_allclose(one["parameters"], expected["parameters"], atol=2e-5)
        np.testing.assert_allclose(one["own step"], own_losses(), rtol=2e-5)
        for step, metrics in expected["validations"].items():
            assert one["validations"][step] == pytest.approx(metrics, rel=2e-5)


@pytest.mark.long
@pytest.mark.processes
def test_what_a_job_does_beside_its_steps(tmp_path: Path):
    """State on disk, profiles, validation, samples, the best checkpoint, adapters and files of
    Hugging Face where process 0, or process 1, owns no device: all as of one process; and what
    needs one process is refused in both.
    """
    process = child("-m", "tests.training.idle_paths", 2, free_port(), tmp_path)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors[-3000:]
    first, second = (json.loads((tmp_path / f"found-{number}").read_text()) for number in range(2))
    for texts in (first.pop("refused"), second.pop("refused")):
        for text, said in zip(texts, REFUSED, strict=True):
            assert said in text and "Try: " in text, text
    assert first == second
    expected = paths(jax.devices()[:1], tmp_path / "alone")
    assert first["resumed"] == expected["resumed"] == 4
    for name in ("losses", "validations", "samples"):
        np.testing.assert_allclose(first[name], expected[name], rtol=2e-5, atol=1e-4, err_msg=name)
    for path, array in expected["adapter"].items():
        np.testing.assert_allclose(first["adapter"][path], array, atol=2e-5, err_msg=path)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [one["step"] for one in map(json.loads, lines) if "loss" in one] == [*range(1, 7)]
    assert list((tmp_path / "run" / "profiles" / "step-2").iterdir()) == [
        tmp_path / "run" / "profiles" / "step-2" / "process-1"
    ]
    model = program_of(CONFIGS["llama-2-7b"], tmp_path / "config", (1, 1))
    huggingface.save(
        model, drawn(model), tmp_path / "same", config=tmp_path / "config" / "config.json"
    )
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
