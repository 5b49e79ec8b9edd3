"""Repositories of Triton: what they hold, and that its own schema reads them."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardlib import models, serve
from shardlib.cli import main
from shardlib.errors import ArgumentError, CheckpointError, ModelError
from shardlib.serve.artefacts import single_pass, user_pass
from shardlib.serve.triton.repository import MODELS, Repository
from tests.serve.classifier import Classifier, classifier
from tests.serve.test_written_folders import CARD

CONFIG = """\
name: "classifier"
backend: "python"
max_batch_size: 4
input {
  name: "x"
  data_type: TYPE_FP32
  dims: [5]
}
output {
  name: "best"
  data_type: TYPE_INT32
  dims: [1]
}
output {
  name: "probabilities"
  data_type: TYPE_FP32
  dims: [3]
}
dynamic_batching {
  max_queue_delay_microseconds: 2000
}
instance_group {
  count: 2
  kind: KIND_CPU
}
version_policy {
  latest {
    num_versions: 2
  }
}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, and a language model by the command line."""
    home = tmp_path_factory.mktemp("triton")
    (home / "tiny.toml").write_text(CARD)
    one = user_pass(models.UserModel(**{"name": "classifier", **classifier()}), "classifier")
    made = Repository(folder=home / "out", rows=4, instances=2, python_path=("/opt/venv",))
    assert made.write_pass(one) == "classifier"
    words = ["--triton", str(home / "out"), "--seq", "16", "--batch", "8"]
    with pytest.raises(SystemExit) as ended:
        main(["export", str(home / "tiny.toml"), *words])
    assert not ended.value.code
    return home / "out"


@pytest.mark.long
def test_the_configuration_of_a_single_pass(repository: Path):
    text = (repository / "classifier" / "config.pbtxt").read_text()
    assert text.startswith(CONFIG)
    assert [line for line in text.splitlines() if "batch_size:" in line] == [
        "max_batch_size: 4",
        *(f"  batch_size: {rows}" for rows in (1, 2, 4)),  # of the warm-up
    ]
    settings = json.loads((repository / "classifier" / "1" / "settings.json").read_text())
    assert settings == {"python_path": ["/opt/venv"], "sizes": [1, 2, 4]}


def test_a_language_model_has_five_parts(repository: Path):
    names = {path.name for path in repository.iterdir()} - {"classifier"}
    parts = ("tokenize", "states", "normalise", "embedding")
    assert names == {"tiny", *(f"tiny_{part}" for part in parts)}
    engine = (repository / "tiny" / "config.pbtxt").read_text()
    assert "decoupled: true" in engine
    assert "dynamic_batching" not in engine  # Triton does not batch for decoupled models
    assert "dynamic_batching" in (repository / "tiny_states" / "config.pbtxt").read_text()
    folder = serve.read_folder(repository / "tiny" / "1" / "model")
    assert folder.config is not None
    assert folder.config.vocab_size == 256
    for name in names - {"tiny_embedding"}:
        program = repository / name / "1" / "model.py"
        assert any(
            isinstance(node, ast.ClassDef) and node.name == "TritonPythonModel"
            for node in ast.parse(program.read_text()).body
        )


def test_the_schema_of_triton_reads_every_configuration(repository: Path):
    schema: Any = pytest.importorskip(
        "tritonclient.grpc.model_config_pb2", reason="tritonclient is not installed"
    )
    protobuf: Any = pytest.importorskip("google.protobuf.text_format")
    found = {}
    for path in repository.glob("*/config.pbtxt"):
        found[path.parent.name] = protobuf.Parse(path.read_text(), schema.ModelConfig())
    assert len(found) == 6
    assert all(name == config.name for name, config in found.items())
    one = found["classifier"]
    assert (one.max_batch_size, one.instance_group[0].count) == (4, 2)
    assert [warm.batch_size for warm in one.model_warmup] == [1, 2, 4]
    assert found["tiny"].model_transaction_policy.decoupled
    steps = found["tiny_embedding"].ensemble_scheduling.step
    assert [step.model_name for step in steps] == ["tiny_tokenize", "tiny_states", "tiny_normalise"]
    with pytest.raises(protobuf.ParseError):
        protobuf.Parse("dynamic_batchin { }", schema.ModelConfig())


def test_what_cannot_be_written_is_said(repository: Path, tmp_path: Path):
    one = user_pass(models.UserModel(**{"name": "classifier", **classifier()}), "classifier")
    with pytest.raises(CheckpointError, match="has a model classifier already"):
        Repository(folder=repository).write_pass(one)
    with pytest.raises(ArgumentError, match=r"'\.\./up' is not a name"):
        Repository(folder=tmp_path).write_pass(
            single_pass(Classifier, one.run, one.inputs, name="../up")
        )
    with pytest.raises(ArgumentError, match="a row of 'output' has no dims"):
        Repository(folder=tmp_path).write_pass(
            single_pass(Classifier, lambda m, b: m(b["x"])[:, 0], one.inputs, name="flat")
        )
    plain = serve.Served(
        name="own",
        init=Classifier,
        forward=lambda m, t: m(t),
        weights=0,
        longest=8,
        text=serve.named("demo").text,
    )
    with pytest.raises(ModelError, match="is not a reference transformer"):
        Repository(folder=tmp_path).write_language_model(plain)


@pytest.mark.processes
@pytest.mark.parametrize("program", ["forward", "generate", "normalise", "tokenize"])
def test_packages_are_those_of_the_python_path(program: str, tmp_path: Path):
    shutil.copyfile(MODELS / f"{program}.py", tmp_path / "model.py")
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("jax", "numpy"):
        (packages / f"{name}.py").write_text("raise SystemExit(7)")
    (tmp_path / "settings.json").write_text(json.dumps({"python_path": [str(packages)]}))
    assert subprocess.run([sys.executable, "model.py"], cwd=tmp_path).returncode == 7
