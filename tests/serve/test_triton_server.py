"""A real Triton, where nvidia-pytriton is installed, answers what the model computes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flax import nnx

from shardlib import models
from shardlib.serve.artefacts import user_pass
from shardlib.serve.triton.repository import Repository
from tests.processes import free_port
from tests.serve.classifier import Classifier, classifier, forward

pytest.importorskip("pytriton", reason="nvidia-pytriton, which bundles a Triton, is not installed")
if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
    pytest.skip("this Python has no shared library for Triton", allow_module_level=True)

from benchmarks import serving_triton as real


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int, int]]:
    """A classifier behind a server on loopback."""
    work = tmp_path_factory.mktemp("triton")
    packages = sysconfig.get_paths()["purelib"]
    made = Repository(folder=work / "repository", rows=4, python_path=(packages,))
    made.write_pass(
        user_pass(models.UserModel(**{"name": "classifier", **classifier()}), "classifier")
    )
    ports = free_port(), free_port(), free_port()
    server, _ = real.started(work / "repository", work, ports)
    yield ports
    server.terminate()
    try:
        server.wait(60)
    finally:
        server.kill()


@pytest.mark.parametrize(("module", "which"), [(real.http, 0), (real.grpc, 1)])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_answers_are_the_models(ports: tuple[int, int, int], module: Any, which: int, rows: int):
    x = np.random.default_rng(rows).normal(size=(rows, 5)).astype(np.float32)
    own = Classifier(nnx.Rngs(7))
    own.eval()
    wanted = {name: np.asarray(one) for name, one in forward(own, {"x": x}).items()}
    client: Any = module.InferenceServerClient(f"127.0.0.1:{ports[which]}")
    found = client.infer("classifier", [real.tensor(module, "x", x, "FP32")])
    assert np.abs(found.as_numpy("probabilities") - wanted["probabilities"]).max() < 1e-5
    assert found.as_numpy("best").tolist() == wanted["best"].tolist()
