"""The core works without a wing: copies of the package in which the folder of one is deleted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardlib
from shardlib import wings

PACKAGE = Path(shardlib.__file__).parent
#: Wing -> its commands, and an option that it adds to a command of another package.
COMMANDS = {
    "launch": (("doctor", "launch", "compare", "fit-model"), None),
    "serve": (
        ("edge", "edge-stage", "generate", "export", "serve", "bench-serve"),
        ("plan", "--serve"),
    ),
    "islands": ((), ("launch", "--islands")),
}
#: Wing -> public names that it defines.
NAMES = {
    "launch": ("join",),
    "serve": ("plan_serving", "plan_edge", "verify_serving"),
    "islands": (
        "Asynchronous",
        "Compressed",
        "DiLoCo",
        "Gossip",
        "IslandsProgram",
        "PowerSGD",
        "Quantised",
        "Sign",
        "TopK",
    ),
}
#: A step of SGD of a linear model on two devices, beside the same step in NumPy.
STEP = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import shardlib

x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
y = np.random.default_rng(1).normal(size=(8, 2)).astype("float32")
w = np.random.default_rng(2).normal(size=(4, 2)).astype("float32")

def init(rng):
    return {"w": jnp.asarray(w)}

def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

model = shardlib.tree(init, {"w": ("embed", "mlp")})
batch = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
plan = shardlib.plan(model, loss, optax.sgd(0.5), batch, topology="cpu:2")
program = shardlib.compile(model, loss, optax.sgd(0.5), batch, topology="cpu:2")
before = program.init(0)
state, metrics = program.step(before, batch)
after = np.asarray(jax.tree.leaves(state.params)[0])
error = x @ w - y
expected = w - 0.5 * 2 / error.size * x.T @ error
refusals = {}
for name in json.loads(sys.argv[1]):
    try:
        getattr(shardlib, name)
    except shardlib.MissingPackageError as refusal:
        refusals[name] = str(refusal)
print(json.dumps({
    "file": shardlib.__file__,
    "devices": plan.topology,
    "loss": [float(metrics["loss"]), float((error ** 2).mean())],
    "weights": float(abs(after - expected).max()),
    "refusals": refusals,
    "wings": sorted({name.split(".")[1] for name in sys.modules if name.startswith("shardlib.")}),
}))
"""


@pytest.fixture(params=wings.WINGS, scope="module")
def without(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A wing, and a folder with a copy of the package that has it no more."""
    folder = tmp_path_factory.mktemp(request.param)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "shardlib", ignore=ignored)
    shutil.rmtree(folder / "shardlib" / request.param)
    return request.param, folder


def python(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
            "XLA_FLAGS": "",
            **variables,
        },
    )


def commands_of(text: str) -> list[str]:
    """The commands that a help lists."""
    lines = text.split("Commands:\n")[1].splitlines()
    return [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]


def test_core_plans_compiles_and_steps(without: tuple[str, Path]):
    wing, folder = without
    done = python(folder, "-c", STEP, json.dumps(NAMES[wing]))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert Path(data["file"]).is_relative_to(folder) and data["devices"] == "cpu:2"
    assert data["loss"][0] == pytest.approx(data["loss"][1], rel=1e-5)
    assert data["weights"] < 1e-5
    assert not set(data["wings"]) & set(wings.WINGS)
    assert data["refusals"] == {
        name: f"shardlib.{name} is part of shardlib.{wing}, and that package is missing here\nTry:"
        " pip install --force-reinstall shardlib"
        for name in NAMES[wing]
    }


def test_command_line_lacks_the_commands_of_the_wing(without: tuple[str, Path]):
    wing, folder = without
    own, option = COMMANDS[wing]
    whole = python(PACKAGE.parent, "-m", "shardlib", "--help").stdout
    done = python(folder, "-m", "shardlib", "--help")
    assert done.returncode == 0, done.stderr
    assert set(own) <= set(commands_of(whole))
    assert commands_of(done.stdout) == [name for name in commands_of(whole) if name not in own]
    if option is not None:
        command, name = option
        whole_text = python(PACKAGE.parent, "-m", "shardlib", command, "--help")
        assert name in whole_text.stdout
        text = python(folder, "-m", "shardlib", command, "--help")
        assert text.returncode == 0 and name not in text.stdout, text.stderr


def test_plan_command_works(without: tuple[str, Path], tmp_path: Path):
    _, folder = without
    sizes = ("--batch", "64", "--seq", "128", "--pin", "mesh.data=64")
    words = ("gpt2-small", "--topology", "8*h100:8", *sizes, "--json")
    file = tmp_path / "plan.json"
    done = python(folder, "-m", "shardlib", "plan", *words, "--out", str(file))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mesh"]["data"] == 64
    text = python(folder, "-m", "shardlib", "explain", str(file))
    assert text.returncode == 0 and "data" in text.stdout, text.stderr


def test_islands_say_what_is_missing(without: tuple[str, Path], tmp_path: Path):
    wing, folder = without
    if wing != "islands":
        pytest.skip("only islands exchange")
    sizes = ("--batch", "64", "--seq", "128", "--pin", "exchange=diloco:2:100")
    done = python(folder, "-m", "shardlib", "plan", "gpt2-small", "--topology", "8*h100:8", *sizes)
    assert done.returncode == 2
    said = " ".join((done.stdout + done.stderr).split())
    assert (
        "exchange='diloco:2:100' is part of shardlib.islands, and that package is missing" in said
    )


def test_train_needs_launch_where_it_is_one_of_several_processes(without: tuple[str, Path]):
    wing, folder = without
    if wing != "launch":
        pytest.skip("only launch joins processes")
    words = ("-m", "shardlib", "train", "--steps", "1", "--batch", "2", "--seq", "16")
    card = (
        "vocab_size = 256\nlayers = 1\nembed = 32\nheads = 2\nkv_heads = 2\nhead_dim = 16\nmlp = 32"
    )
    (folder / "small.toml").write_text(f"{card}\nmax_seq = 64\n")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the cat sat on the mat and looked at the rat\n" * 2000)
    words = (*words, "--data", "text", "--sample-bytes", "0", "--json", "--topology", "cpu:2")
    words = (*words, "--model", "small.toml")
    alone = python(folder, *words)
    assert alone.returncode == 0, alone.stderr
    assert json.loads(alone.stdout)["validation_loss"] > 0
    several = python(folder, *words, SHARDLIB_PROCESSES="auto")
    assert several.returncode == 2
    assert "shardlib.join is part of shardlib.launch" in several.stdout + several.stderr


@pytest.mark.parametrize("wing", ["launch", "serve", "islands"])
def test_commands_of_a_wing_can_be_imported_first(wing: str):
    done = python(PACKAGE.parent, "-c", f"import shardlib.{wing}.commands, shardlib.cli.commands")
    assert done.returncode == 0, done.stderr
