"""The core works without a wing: copies of the package in which the folder of one is deleted."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import shardlib
from shardlib import wings
from shardlib.cli.app import SECTIONS
from tests.processes import python

PACKAGE = Path(shardlib.__file__).parent
#: Wing -> its commands, and an option that it adds to a command of another package.
COMMANDS = {
    "launch": (wings.COMMANDS_OF["launch"], None),
    "serve": (wings.COMMANDS_OF["serve"], wings.OPTIONS_OF["serve"]),
    "islands": ((), wings.OPTIONS_OF["islands"]),
    "frameworks": ((), None),
    "diagnosis": (wings.COMMANDS_OF["diagnosis"], None),
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
    "frameworks": (),
    "diagnosis": ("why",),
}
#: What a process does that has a package without a wing, as JSON: a step of SGD of a linear model on
#: two devices beside the same step in NumPy, public names that are refused, and commands.
WORK = """
import contextlib, io, json, os, sys
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
program = shardlib.compile(model, loss, optax.sgd(0.5), batch, topology="cpu:2")
before = program.init(0)
state, metrics = program.step(before, batch)
after = np.asarray(jax.tree.leaves(state.params)[0])
error = x @ w - y
expected = w - 0.5 * 2 / error.size * x.T @ error
names, commands = json.loads(sys.argv[1])
refusals = {}
for name in names:
    try:
        getattr(shardlib, name)
    except shardlib.MissingPackageError as refusal:
        refusals[name] = str(refusal)
loaded = sorted({name.split(".")[1] for name in sys.modules if name.startswith("shardlib.")})
exec("from shardlib import *", {})

def run(variables, words):
    from shardlib.cli import main

    out, err, status = io.StringIO(), io.StringIO(), 0
    os.environ.update(variables)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            status = end.code or 0
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}

print(json.dumps({
    "file": shardlib.__file__,
    "devices": program.plan.topology,
    "plain": program.plan.emit("jax"),
    "loss": [float(metrics["loss"]), float((error ** 2).mean())],
    "weights": float(abs(after - expected).max()),
    "refusals": refusals,
    "wings": loaded,
    "commands": {name: run(*command) for name, command in commands.items()},
}))
"""
CARD = (
    "vocab_size = 256\nlayers = 1\nembed = 32\nheads = 2\nkv_heads = 2\nhead_dim = 16\nmlp = 32\n"
)


def run(folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs Python with the package that is in a folder."""
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""}
    variables = {"PYTHONPATH": str(folder), **devices}
    return python(*words, check=check, cwd=folder, variables=variables)


@pytest.fixture(params=wings.WINGS, scope="module")
def without(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Any]]:
    """A wing, a folder with a copy of the package that has it no more, and what that does."""
    wing, folder = request.param, tmp_path_factory.mktemp(request.param)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "shardlib", ignore=ignored)
    shutil.rmtree(folder / "shardlib" / wing)
    sizes = ("--batch", "64", "--seq", "128", "--pin", "mesh.data=64")
    plan = ("plan", "gpt2-small", "--topology", "8*h100:8", *sizes, "--json", "--out", "plan.json")
    commands: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
        "help": ({}, ("--help",)),
        "plan": ({}, plan),
        "explain": ({}, ("explain", "plan.json")),
    }
    for name in COMMANDS[wing][0][-1:]:
        commands["missing"] = {}, (name, "runs/a")
    if option := COMMANDS[wing][1]:
        commands["option"] = {}, (option[0], "--help")
        commands["refused option"] = {}, (*option, "2")
    if wing == "islands":
        commands["exchange"] = {}, (*plan[:6], "--seq", "128", "--pin", "exchange=diloco:2:100")
    if wing == "frameworks":
        commands["framework"] = {}, (*plan, "--framework", "megatron-core")
        commands["configuration"] = {}, (*plan, "--emit", "flags.txt")
    if wing == "launch":
        (folder / "small.toml").write_text(f"{CARD}max_seq = 64\n")
        (folder / "text").mkdir()
        (folder / "text" / "a.txt").write_text("the cat sat and looked at the rat\n" * 3000)
        train = ("train", "--steps", "1", "--batch", "2", "--seq", "16", "--data", "text")
        train = (*train, "--sample-bytes", "0", "--json", "--topology", "cpu:2")
        train = (*train, "--model", "small.toml")
        commands["train"] = {}, train
        commands["train as one of several"] = {"SHARDLIB_PROCESSES": "auto"}, train
    done = run(folder, "-c", WORK, json.dumps([NAMES[wing], commands]))
    return wing, folder, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    """Helps of the whole package, by command; "" for that of all commands."""
    helps = {"": ("--help",), **{name: (name, "--help") for name in ("plan", "launch")}}
    commands = {name: ({}, words) for name, words in helps.items()}
    done = run(PACKAGE.parent, "-c", WORK, json.dumps([(), commands]))
    results = json.loads(done.stdout.splitlines()[-1])["commands"]
    return {command: result["out"] for command, result in results.items()}


def commands_of(text: str) -> list[str]:
    """The commands that a help lists."""
    sections = [block.strip("\n").splitlines() for block in text.split("\n\n")]
    lines = [
        line
        for title, *lines in sections
        if title.rstrip(":") in (*SECTIONS, "Others")
        for line in lines
    ]
    return [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]


def test_core_works_without_a_wing(
    without: tuple[str, Path, dict[str, Any]], help_texts: dict[str, str]
):
    """One test: its process takes seconds, and workers of a run do not share it."""
    wing, folder, data = without
    compiles_and_steps(wing, folder, data)
    lacks_the_commands_of_the_wing(wing, data["commands"], help_texts)
    plan, text = (data["commands"][name] for name in ("plan", "explain"))
    assert plan["status"] == 0 and json.loads(plan["out"])["mesh"]["data"] == 64, plan
    assert text["status"] == 0 and "data" in text["out"], text
    if wing == "islands":
        refused = data["commands"]["exchange"]
        assert refused["status"] == 2
        said = " ".join((refused["out"] + refused["err"]).split())
        missing = "is part of shardlib.islands, and that package is missing"
        assert f"exchange='diloco:2:100' {missing}" in said
    if wing == "serve":
        earlier = run(folder, "-c", "import shardlib.serving", check=False)
        missing = "shardlib.serving is part of shardlib.serve, and that package is missing here"
        assert f"MissingPackageError: {missing}\nTry: install" in earlier.stderr
    if wing == "frameworks":
        for name, what in (
            ("framework", "framework 'megatron-core'"),
            ("configuration", "the configuration of a plan"),
        ):
            refused = data["commands"][name]
            assert refused["status"] == 2
            said = " ".join((refused["out"] + refused["err"]).split())
            assert f"{what} is part of shardlib.frameworks, and that package is missing" in said
    if wing == "launch":  # which joins processes
        alone, several = (data["commands"][name] for name in ("train", "train as one of several"))
        assert alone["status"] == 0 and json.loads(alone["out"])["validation_loss"] > 0, alone
        assert several["status"] == 2
        assert "shardlib.join is part of shardlib.launch" in several["out"] + several["err"]


def compiles_and_steps(wing: str, folder: Path, data: dict[str, Any]) -> None:
    assert Path(data["file"]).is_relative_to(folder) and data["devices"] == "cpu:2"
    assert data["loss"][0] == pytest.approx(data["loss"][1], rel=1e-5)
    assert data["weights"] < 1e-5 and "import jax" in data["plain"]
    assert not set(data["wings"]) & set(wings.WINGS)
    assert data["refusals"] == {
        name: f"shardlib.{name} is part of shardlib.{wing}, and that package is missing here\nTry:"
        " install shardlib whole: pip install --force-reinstall, from where it came"
        for name in NAMES[wing]
    }


def lacks_the_commands_of_the_wing(
    wing: str, results: dict[str, Any], help_texts: dict[str, str]
) -> None:
    own, option = COMMANDS[wing]
    every = commands_of(help_texts[""])
    assert set(own) <= set(every)
    assert commands_of(results["help"]["out"]) == [name for name in every if name not in own]
    for name in own[-1:]:
        refused = results["missing"]
        assert refused["status"] == 2
        said = " ".join((refused["out"] + refused["err"]).split())
        assert f"the command {name} is part of shardlib.{wing}, and that package is" in said
    if option is not None:
        command, name = option
        assert name in help_texts[command]
        text = results["option"]
        assert text["status"] == 0 and name not in text["out"], text
        refused = results["refused option"]
        said = " ".join((refused["out"] + refused["err"]).split())
        assert refused["status"] == 2
        assert f"{command} {name} is part of shardlib.{wing}, and that package is missing" in said


def test_commands_of_wings_are_known():
    modules = {
        wing: importlib.import_module(f"shardlib.{wing}.commands")
        for wing in ("diagnosis", "launch", "serve", "islands")
    }
    assert {
        wing: tuple(m.COMMANDS) for wing, m in modules.items() if m.COMMANDS
    } == wings.COMMANDS_OF


@pytest.mark.parametrize("wing", ["launch", "serve", "islands"])
def test_commands_of_a_wing_can_be_imported_first(wing: str):
    run(PACKAGE.parent, "-c", f"import shardlib.{wing}.commands, shardlib.cli.commands")
