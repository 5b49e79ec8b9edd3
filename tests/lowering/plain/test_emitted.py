"""A plan as a file of plain JAX: run with the user's model where shardlib cannot be imported, it
has the numbers and the collectives of the program.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardlib
from shardlib.frontend.steps import StepProgram
from shardlib.verification.traffic import read_traffic
from tests.lowering.plain import models
from tests.processes import child

LINEN = shardlib.linen(models.MODULE, models.TOKENS["x"])
#: Case -> initialiser, loss, batch, pin.
CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "nnx": (
        models.Model,
        models.nnx_loss,
        models.TOKENS,
        {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3, "remat": "dots"},
    ),
    "scan": (
        shardlib.tree(models.layers),
        models.scan_loss,
        models.ROWS,
        {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3, "remat": "full", "microbatches": 2},
    ),
    "explicit": (
        shardlib.tree(models.lookup),
        models.explicit_loss,
        models.TOKENS,
        {"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3, "remat": "none"},
    ),
    "linen": (
        LINEN,
        models.linen_loss,
        models.TOKENS,
        {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 1, "remat": "none"},
    ),
}


#: Case -> modes of the mesh axes.
MODES = {"scan": ("auto", "explicit"), "explicit": ("explicit",)}


@cache
def compiled(case: str) -> shardlib.Program:
    init, loss, batch, pin = CASES[case]
    return shardlib.compile(init, loss, optax.adam(1e-2), batch, topology="cpu:8", pin=pin)


def traffic(text: str, program: shardlib.Program | StepProgram) -> Counter[Any]:
    """Collectives by kind, mesh axes and bytes."""
    found: Counter[Any] = Counter()
    for one in read_traffic(text, program.plan.mesh).collectives:
        found[one.kind, one.axes, round(one.bytes)] += round(one.count)
    return found


@pytest.mark.long
def test_emitted_files_train_without_shardlib_as_the_program_does(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for case in CASES:
        for mode in MODES.get(case, ("auto",)):
            file = tmp_path / f"sharded_{case}_{mode}.py"
            file.write_text(compiled(case).plan.emit("jax", mode=mode))
            files[str(file)] = case
    theirs = of_child(files, tmp_path, lambda: [own(case) for case in CASES])
    for (file, case), found in zip(files.items(), theirs, strict=True):
        program, (metrics, here) = compiled(case), own(case)
        equal(found["metrics"], metrics, file)
        assert here and traffic(found["text"], program) == here, file
        if "_explicit.py" in file:
            layouts = {one.path: one.rest for one in program.plan.parameters}
            assert found["types"] == {path: spec(layouts[path], program) for path in layouts}


#: Case of a step -> pin, mode.
STEPPED: dict[str, tuple[Any, str]] = {
    "train state": ({"mesh": {"data": 2, "fsdp": 4}, "zero": 2, "microbatches": 2}, "auto"),
    "modules": ({"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3}, "explicit"),
    "teacher": ({"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3, "microbatches": 2}, "auto"),
    "unmarked": ({"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3}, "explicit"),
    "unmarked, explicit": ({"mesh": {"fsdp": 4, "tensor": 2}, "zero": 3}, "auto"),
}


@cache
def stepped(case: str) -> StepProgram:
    init, make, batch, marked = models.STEPPED[case]
    return shardlib.compile_step(
        init,
        make(shardlib.value_and_grad if marked else jax.value_and_grad),
        batch,
        topology="cpu:8",
        pin=STEPPED[case][0],
    )


@pytest.mark.long
def test_emitted_files_do_steps_as_the_program_does(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for number, (case, (_, mode)) in enumerate(STEPPED.items()):
        file = tmp_path / f"sharded_{number}.py"
        file.write_text(stepped(case).plan.emit("jax", mode=mode))
        files[str(file)] = case
    theirs = of_child(files, tmp_path, lambda: [stepped(case).prepare() for case in STEPPED])
    for case, found in zip(STEPPED, theirs, strict=True):
        program, batch, every = stepped(case), models.STEPPED[case][2], []
        state = program.init(jax.random.key(0))
        for _ in range(models.STEPS):
            state, metrics = program.step(state, batch)
            every.append({name: float(value) for name, value in metrics.items()})
        equal(found["metrics"], every, case)
        sums = [float(np.abs(leaf).sum()) for leaf in map(np.asarray, jax.tree.leaves(state))]
        np.testing.assert_allclose(found["sums"], sums, rtol=1e-5, err_msg=case)
        here = traffic(program.compiled().as_text(), program)
        assert here and traffic(found["text"], program) == here, case
        if STEPPED[case][1] == "explicit":
            laid = [spec(layout, program) for layout in program.layouts.state]
            assert found["types"][: len(laid)] == laid


def equal(theirs: list[dict[str, float]], ours: list[dict[str, float]], case: str) -> None:
    for found, metrics in zip(theirs, ours, strict=True):
        assert found.keys() == metrics.keys()
        np.testing.assert_allclose(
            list(found.values()), [metrics[name] for name in found], rtol=1e-5, err_msg=case
        )


def of_child(files: dict[str, str], tmp_path: Path, meanwhile: Callable[[], object]) -> Any:
    """What a process says that has the files, the models, and no shardlib."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = tmp_path / "models.py"
    script.write_text(Path(models.__file__).read_text())
    (tmp_path / "shardlib.py").write_text("raise ImportError('not here')")
    process = child(script, *map("=".join, files.items()), cwd=tmp_path, env=environ)
    meanwhile()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out)


@cache
def own(case: str) -> tuple[list[dict[str, float]], Counter[Any]]:
    """Metrics and collectives of a program."""
    program, batch = compiled(case), CASES[case][2]
    state, every = program.init(0), []
    for _ in range(models.STEPS):
        state, metrics = program.step(state, batch)
        every.append({name: float(value) for name, value in metrics.items()})
    return every, traffic(program.compiled().as_text(), program)


def spec(layout: shardlib.Layout, program: shardlib.Program | StepProgram) -> str:
    """A layout as JAX says it."""
    axes = [[axis for axis in dim if program.plan.mesh[axis] > 1] for dim in layout]
    return str(P(*(tuple(dim) if len(dim) > 1 else dim[0] if dim else None for dim in axes)))


@pytest.mark.long
def test_the_file_has_the_tables_of_the_plan() -> None:
    plan = compiled("scan").plan
    text = plan.emit("jax")
    assert "shardlib" not in [line.split()[1] for line in text.splitlines() if "import " in line]
    tables: dict[str, Any] = {}
    exec(text, {"__name__": "emitted"}, tables)
    shardings = plan.shardings(jax.make_mesh((4, 2), ("fsdp", "tensor")))
    loss = tables["LOSSES"]["loss"]
    assert tables["MESH"] == {"fsdp": 4, "tensor": 2} and loss.remat == "full"
    assert loss.parameters.keys() == shardings.parameters.keys() == {"up", "down", "square"}
    for path, (_, stored, gradient, optimizer) in loss.parameters.items():
        assert stored == shardings.parameters[path].spec
        assert gradient == shardings.gradients[path].spec
        assert optimizer == shardings.optimizer[path].spec
    assert {f"batch.{path}": spec for path, spec in loss.batch.items()} == {
        path: sharding.spec for path, sharding in shardings.batch.items()
    }
    assert set(loss.layers.values()) == {"up", "down"}


def test_shardings_are_those_of_the_program() -> None:
    program = compiled("nnx")
    mesh = jax.make_mesh((1, 2, 2, 2), ("island", "data", "fsdp", "tensor"))
    shardings = program.plan.shardings(mesh)
    stored = jax.tree_util.tree_leaves_with_path(program.state.params)
    assert len(shardings.parameters) == len(stored)
    for path, leaf in stored:
        name = ".".join(str(getattr(one, "key", getattr(one, "idx", one))) for one in path)
        assert shardings.parameters[name].is_equivalent_to(
            jax.sharding.NamedSharding(mesh, leaf.sharding.spec), leaf.ndim
        )
    with pytest.raises(shardlib.LayoutError) as caught:
        program.plan.shardings(jax.make_mesh((4, 2), ("fsdp", "tensor")))
    assert str(caught.value) == (
        "the mesh {'fsdp': 4, 'tensor': 2} is not that of the plan, data=2 x fsdp=2 x tensor=2:\n"
        "  - data is 2 in the plan and missing in the mesh\n"
        "  - fsdp is 2 in the plan and 4 in the mesh\n"
        "Try: jax.make_mesh((2, 2, 2), ('data', 'fsdp', 'tensor'))"
    )


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out, self.noise = nnx.Linear(16, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.noise(x))


def noisy_loss(model: Noisy, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def test_matrices_of_the_optimizer_are_made_whole_by_programs_of_shardlib_alone() -> None:
    def of_layout(layout: str) -> shardlib.Plan:
        return shardlib.plan(
            lambda rngs: nnx.Linear(16, 16, rngs=rngs),
            noisy_loss,
            optax.contrib.muon(1e-2),
            models.ROWS,
            topology="cpu:8",
            pin={"mesh": {"fsdp": 8}, "zero": 3, "optimizer_layout": layout},
        )

    assert (
        "plan of <lambda>: matrices of the optimizer made whole (optimizer_layout=owned)"
        in refused(of_layout("owned"))
    )
    assert "optax.with_extra_args_support(optimizer).update" in of_layout("sharded").emit("jax")


def test_what_plain_jax_cannot_express_is_listed() -> None:
    staged = shardlib.plan(
        *CASES["scan"][:2],
        optax.adam(1e-2),
        models.ROWS,
        topology="cpu:8",
        pin={"mesh": {"stage": 2, "data": 2}, "param_dtype": "bfloat16"},
    )
    assert refused(staged) == (
        "plain JAX cannot express the plan of layers:\n"
        "  - pipeline stages (stage=2)\n"
        "  - dtypes of the plan ({'param_dtype': 'bfloat16'})\n"
        "Try: pin decisions away (what the model itself calls stays); or run the plan with"
        " shardlib.compile"
    )
    stateful = shardlib.plan(
        Noisy,
        noisy_loss,
        optax.adam(1e-2),
        models.ROWS,
        topology="cpu:8",
        pin={"mesh": {"data": 8}},
        wrt=lambda path, leaf: "bias" in path,
    )
    assert refused(stateful) == (
        "plain JAX cannot express the plan of Noisy:\n"
        "  - state of the model beside its parameters, such as statistics and random streams\n"
        "  - frozen parameters (out.kernel)\n"
        "Try: pin decisions away (what the model itself calls stays); or run the plan with"
        " shardlib.compile"
    )
    read = shardlib.Plan.from_json(stateful.to_json())
    assert refused(read) == (
        "this plan was read from a file and does not carry its model\nTry: the command line"
        " (`shardlib explain plan.json ...`), which traces the model again; or plan again"
    )
    assert refused(staged, "torch") == "no plan is written as 'torch'\nTry: 'jax'"
    with pytest.raises(
        shardlib.ShardlibError, match=r"mode is 'manual'\nTry: 'auto' or 'explicit'"
    ):
        staged.emit("jax", mode="manual")


@pytest.mark.long
def test_steps_that_plain_jax_cannot_express_are_listed() -> None:
    def planned(step: Any, **pin: Any) -> shardlib.Plan:
        program = shardlib.compile_step(
            models.layers, step, models.ROWS, topology="cpu:8", pin=pin, abstract=True
        )
        return program.plan

    def noisy(params: Any, batch: Any) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            noise = jax.random.normal(jax.random.key(0), batch["x"].shape)
            return models.scan_loss(params, {**batch, "x": batch["x"] + noise})

        return shardlib.value_and_grad(loss)(params, batch)[1]

    assert refused(planned(noisy, mesh={"data": 8}, microbatches=2)) == (
        "plain JAX cannot express the plan of noisy: in the loss loss: 2 microbatches of a loss"
        " that draws random numbers\n"
        "Try: pin decisions away (what the model itself calls stays); or run the plan with"
        " shardlib.compile"
    )
    marked = models.of_explicit(shardlib.value_and_grad)
    program = shardlib.compile_step(
        models.lookup, marked, models.TOKENS, topology="cpu:8", abstract=True
    )
    assert "layouts of its own in a step that marks its losses" in refused(program.plan)

    def mapped(params: Any, batch: Any) -> Any:
        slopes = jax.lax.pmean(jax.grad(models.scan_loss)(params, batch), "devices")
        return jax.tree.map(lambda one, slope: one - slope, params, slopes)

    assert "plan of mapped: reductions over an axis of jax.pmap" in refused(planned(mapped))


def test_a_step_that_marks_another_loss_is_told() -> None:
    sharded = ModuleType("sharded")
    exec(stepped("teacher").plan.emit("jax"), sharded.__dict__)
    state, mesh = models.teacher(jax.random.key(0)), sharded.make_mesh()
    with pytest.raises(ValueError, match=r"marks no loss by .* planned marks loss\.0, loss\.1"):
        sharded.shard_step(models.of_teacher(jax.value_and_grad), state, models.ROWS, mesh)


def refused(plan: shardlib.Plan, form: str = "jax") -> str:
    with pytest.raises(shardlib.PlanError) as caught:
        plan.emit(form)
    return str(caught.value)


def test_another_loss_or_other_parameters_are_told() -> None:
    tables: dict[str, Any] = {"__name__": "emitted"}
    exec(compiled("scan").plan.emit("jax"), tables)
    mesh, params = tables["make_mesh"](), models.layers(jax.random.key(0))
    with pytest.raises(ValueError) as caught:
        tables["parameter_shardings"]({"up": params["up"], "down": params["up"]}, mesh)
    assert str(caught.value) == (
        "these are not the parameters that were planned: down is (4, 16, 64) here, (4, 64, 16) in"
        " the plan; square is missing here, (16, 16) in the plan"
    )
    with pytest.raises(ValueError, match=r"the loss has no (dot_general|scan)\.\d"):
        tables["make_step"](
            lambda params, batch: jnp.mean(params["up"]),
            optax.adam(1e-2),
            params,
            models.ROWS,
            mesh,
        )
