"""What is written runs in a process without shardlib, and computes the same."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlib import models, serve
from shardlib.cli import main
from shardlib.errors import ArgumentError, CheckpointError, ModelError
from shardlib.serve.artefacts import row_length, single_pass, user_pass, write_artefact
from tests.models.configs import tiny
from tests.processes import python
from tests.serve.classifier import Classifier, forward
from tests.serve.hf_folders import write_folder

PAGE = Path(__file__).parents[2] / "docs" / "folders.md"


def elsewhere(folder: Path, arguments: str, outputs: str) -> Any:
    """What the loader of the page computes in a process of its own, which finds no shardlib."""
    (loader,) = re.findall(r"<!-- loader -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in loader.splitlines() if line.strip()]) <= 10
    program = f"""
import sys
sys.modules["shardlib"] = None
{loader}
import numpy as np
found = load({str(folder)!r})({arguments})
print(json.dumps({{name: np.asarray(found[name], np.float32).tolist() for name in {outputs}}}))
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ran = python("-c", program, cwd=folder.parent, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.long
@pytest.mark.processes
def test_a_classifier_runs_without_shardlib(tmp_path: Path):
    with pytest.raises(SystemExit) as ended:
        main(["export", "tests.serve.classifier:classifier", "--jax", str(tmp_path / "out")])
    assert not ended.value.code
    about = json.loads((tmp_path / "out" / "about.json").read_text())
    assert about["inputs"] == {"x": {"shape": [None, 5], "dtype": "float32"}}
    assert about["outputs"]["probabilities"] == {"shape": [None, 3], "dtype": "float32"}
    model = Classifier(nnx.Rngs(7))
    model.eval()
    for rows in (1, 6):
        x = np.linspace(-2, 2, rows * 5, dtype=np.float32).reshape(rows, 5)
        found = elsewhere(
            tmp_path / "out",
            f"x=np.linspace(-2, 2, {rows * 5}, dtype=np.float32).reshape({rows}, 5)",
            "('probabilities', 'best')",
        )
        wanted = forward(model, {"x": x})
        np.testing.assert_allclose(found["probabilities"], wanted["probabilities"], atol=1e-6)
        np.testing.assert_array_equal(found["best"], wanted["best"])


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b"])
def test_a_language_model_runs_without_shardlib(name: str, tmp_path: Path):
    """In bfloat16, and of experts for a fixed number of rows."""
    config = {**tiny(name), "dtype": "bfloat16"}
    folder = write_folder(tmp_path / "hf", config, name)
    words = ["export", str(folder), "--jax", str(tmp_path / "out"), "--seq", "12"]
    if name != "gpt2":
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        words += ["--batch", "2"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    found = elsewhere(
        tmp_path / "out",
        "tokens=np.arange(24, dtype=np.int32).reshape(2, 12)",
        "('logits',)",
    )
    served = serve.read_folder(folder)
    from shardlib.annotation.model import read

    assert isinstance(served.weights, tuple)
    module = read(served.init).rebuild(*served.weights)
    wanted = served.forward(module, jnp.arange(24).reshape(2, 12))
    np.testing.assert_allclose(found["logits"], wanted, atol=0.03, rtol=0.02)


def test_what_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shapes = {"x": jax.ShapeDtypeStruct((4, 5), jnp.float32)}
    one = single_pass(Classifier, forward, shapes)
    write_artefact(one, tmp_path / "out", platforms=("cpu",))
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        write_artefact(one, tmp_path / "out")
    with pytest.raises(ModelError, match="as many rows in their first dim"):
        write_artefact(
            single_pass(Classifier, lambda m, b: m(b["x"]).reshape(4, 3), shapes), tmp_path / "no"
        )
    found = models.UserModel(name="a:b", init=Classifier, loss=forward, batch=shapes)
    with pytest.raises(ModelError, match="a:b gives no 'outputs'"):
        user_pass(found, "a:b")
    with pytest.raises(ArgumentError, match="a:b brings its own batch; --seq cannot change it"):
        user_pass(found, "a:b", seq=12)
    served = serve.named("demo")
    most = served.longest
    assert (row_length(served, None), row_length(served, most)) == (min(128, most), most)
    said = f"a row of {most + 1} tokens is asked for; {served.name} looks at {most} at most"
    for where in ("--jax", "--triton"):
        with pytest.raises(SystemExit) as ended:
            main(["export", "demo", where, str(tmp_path / "long"), "--seq", str(most + 1)])
        assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "long" / "about.json").exists()
