"""Calls of `shardlib.why` that are wrong, and programs whose diagnosis was."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import shardlib
from shardlib.diagnosis import diagnose
from shardlib.diagnosis.program import Call, find_mesh, trace
from shardlib.diagnosis.rows import explain
from tests.diagnosis import lookup_model as model
from tests.diagnosis.causes import transposition

pytestmark = pytest.mark.long
X = model.array((64, 64), "data")


def product(a):
    return a @ a.T


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_shardings": "data"}, "in_shardings has 'data', not a sharding"),
        ({"in_shardings": (7,)}, "in_shardings has 7, not a sharding"),
        ({"in_shardings": (PartitionSpec("b"),)}, "axes of the mesh: data, model"),
        ({"keywords": 3}, "keywords is int"),
        ({"limits": 3}, "limits is int"),
        ({"options": 3}, "options is int"),
        ({"progress": 3}, "progress is int"),
        ({"cure_seconds": "3"}, "cure_seconds is str"),
        ({"topology": "cpu:4"}, "the mesh data 4 x model 2 has 8 devices, and cpu:4 has 4"),
        ({"options": {"xla_nope": 1}}, "the compiler's own names of options"),
        ({"topology": None}, "topology is missing"),
    ],
)
def test_wrong_arguments_are_named(options, message: str) -> None:
    with pytest.raises(shardlib.ShardlibError, match=message) as refusal:
        shardlib.why(product, X, **{"topology": "cpu:8", "cures": 0, **options})
    assert "Try:" in str(refusal.value)


def test_gradients_are_those_of_the_parameter_that_the_line_names() -> None:
    def loss(params, x):
        h = jax.nn.gelu(x @ params["up"])
        y = h @ params["down"]
        return jnp.mean(y**2)

    params = {"up": model.array((64, 256)), "down": model.array((256, 64))}
    diagnosis = shardlib.why(jax.grad(loss), params, X, topology="cpu:8", cures=0)
    for row in diagnosis.rows:
        if row.cause == "gradient":
            line = Path(__file__).read_text().splitlines()[row.source.user.line - 1]
            assert ("up" in line) == ("['up']" in row.reason)
            assert ("down" in line) == ("['down']" in row.reason)
    assert sum(row.cause == "gradient" for row in diagnosis.rows) == 2


def test_a_gradient_may_be_summed_where_a_layout_asks_for_a_part_of_it() -> None:
    """As programs are that lay out gradients within manual axes, with JAX 0.12: Shardy has a whole
    value there, of which the layout takes a part.
    """

    def f(params, x):
        gradient = jax.grad(lambda params: jnp.mean(jnp.tanh(x @ params["up"]) ** 2))(params)
        return jax.lax.with_sharding_constraint(gradient["up"], PartitionSpec("data"))

    params = {"up": model.array((64, 256))}
    (row,) = shardlib.why(f, params, X, topology="cpu:8", cures=0).rows
    assert row.kind == "all-reduce" and row.meeting is not None
    call = Call(function=f, arguments=(params, X), keywords={})
    function = trace(call, "cpu", find_mesh(call))
    part = replace(row.meeting, reduced=(), produced=((), ()), needed=(("data",), ()))
    other = replace(part, value=replace(part.value, shape=(64, 128)))
    meetings = (part, other, replace(part, computed=True))
    rows = [replace(row, meeting=meeting) for meeting in meetings]
    rows[1] = replace(rows[1], bytes=row.bytes / 2)
    said = explain(rows, function)
    assert [entry.cause for entry in said] == ["gradient", "operation", "partitioner"]
    assert [entry.inherent for entry in said] == [True, None, None]
    assert (
        said[0].reason
        == "the gradient of `params['up']` is summed over the batch, which data shards"
    )


def test_a_layout_that_costs_is_left_out() -> None:
    def f(x, w):
        q = jnp.einsum("bsd,dhk->bshk", x, w)
        q = jax.lax.with_sharding_constraint(q, PartitionSpec("data", None, None, "model"))
        return jnp.einsum("bshk,bthk->bhst", q, q)

    x = model.array((16, 32, 64), "data")
    w = model.array((64, 4, 32), None, "model")
    diagnosis = shardlib.why(f, x, w, topology="cpu:8")
    text = "# without this line"
    assert [cure.text for cure in diagnosis.cures] == [text]
    assert diagnosis.cures[0].bytes[1] == 0


def test_what_a_cure_leaves_is_not_called_avoidable() -> None:
    def f(x, w):
        y = jax.lax.with_sharding_constraint(x @ w, PartitionSpec(None, "data"))
        return y * 2

    x, w = model.array((256, 512), "data", "model"), model.array((512, 128), "model")
    diagnosis = shardlib.why(f, x, w, topology="cpu:8")
    reduction = next(n for n, row in enumerate(diagnosis.rows) if row.kind == "all-reduce")
    left = diagnosis.cures[-1].bytes[1]
    assert diagnosis.cures and left == pytest.approx(diagnosis.rows[reduction].bytes)
    assert reduction not in diagnosis.cured


def test_what_a_cure_takes_away_is_avoidable_whatever_it_edits() -> None:
    def f(x, w):
        return x @ w, jnp.sort(x, axis=1).astype(jnp.bfloat16)

    x, w = model.array((4096, 64), "data", "model"), model.array((64, 128), "model")
    reduction, *_ = shardlib.why(f, x, w, topology="cpu:8", cures=0).rows
    assert (reduction.kind, reduction.inherent) == ("all-reduce", True)
    diagnosis = shardlib.why(f, x, w, topology="cpu:8")
    assert [cure.text for cure in diagnosis.cures] == ["x: jax.P(('data', 'model'))"]
    assert {row.inherent is True for row in diagnosis.rows} == {False}
    assert set(diagnosis.cured) == set(range(len(diagnosis.rows)))


def test_the_command_simulates_the_devices_of_a_mesh(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "def case():\n"
        "    mesh = jax.make_mesh((4, 2), ('data', 'model'))\n"
        "    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P('data')))\n"
        "    return lambda a: a.sum(0), (x,)\n"
    )
    ours = ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    run = subprocess.run(
        [sys.executable, "-m", "shardlib", "why", "mine:case", "-t", "cpu:8", "--cures", "0"],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(Path(shardlib.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.returncode, run.stderr) == (0, "")  # no word of JAX's plugins
    assert "mine.py:6" in run.stdout and "all-reduce over data" in run.stdout


def test_an_error_of_the_users_function_names_its_line() -> None:
    def branches(weights, x):
        if (weights["a"] @ x).sum() > 0:
            return x
        return x * 2

    with pytest.raises(shardlib.TracingError) as refusal:
        shardlib.why(branches, {"a": X}, X, topology="cpu:8", cures=0)
    message = str(refusal.value)
    line = branches.__code__.co_firstlineno
    assert f'test_faults.py:{line + 1}: if (weights["a"] @ x).sum() > 0:)' in message
    assert f"{__file__}:{line} for jit" in message and "values[" not in message
    assert str(Path(shardlib.__file__).parent) not in message
    with pytest.raises(shardlib.TracingError, match=rf"test_faults\.py:{line + 1}"):
        shardlib.why(branches, {"a": jnp.zeros((8, 8))}, jnp.zeros((8, 8)), topology="cpu:8")


@pytest.mark.parametrize(
    ("function", "spec", "cure"),
    [
        (lambda x: jnp.argmax(x, axis=-1), ("data", "model"), "x: jax.P(('data', 'model'))"),
        (lambda x: jnp.argsort(x, axis=0), ("data",), "x: jax.P(None, 'data')"),
        (lambda x: jnp.median(x, axis=0), ("data",), "x: jax.P(None, 'data')"),
        (lambda x: jax.lax.top_k(x, 4)[0], (None, "model"), "x: jax.P('model') and "),
    ],
    ids=["argmax", "argsort", "median", "top-k"],
)
def test_what_is_ordered_may_be_sharded_along_another_dim(function, spec, cure: str) -> None:
    diagnosis = shardlib.why(function, model.array((64, 4096), *spec), topology="cpu:8")
    assert diagnosis.cures[0].text.startswith(cure) and diagnosis.cures[-1].bytes[1] == 0
    assert set(diagnosis.cured) == set(range(len(diagnosis.rows)))


def test_no_more_cures_are_tried_after_the_seconds_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was tried until then counts."""
    clock = iter(range(10_000))
    monkeypatch.setattr(diagnose, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    arguments = transposition, model.array((256, 128), "data")
    options = {"topology": "cpu:8", "out_shardings": PartitionSpec("data")}
    early, late = (shardlib.why(*arguments, cure_seconds=n, **options) for n in (1, 500))
    assert (early.cures, early.tried) == ((), 0) and late.cures and late.tried
    assert "incomplete: cures were looked for during 1 s, and not to the end" in str(early)
    assert "incomplete" not in str(late)


def test_what_no_layout_removes_is_inherent() -> None:
    diagnosis = shardlib.why(jnp.sort, model.array((4096,), "data"), topology="cpu:8")
    assert not diagnosis.cures and diagnosis.rows
    assert all(row.inherent for row in diagnosis.rows)


@pytest.mark.compiler("tpu")
def test_running_sums_on_tpus_have_their_lines() -> None:
    """That compiler computes them in pieces, and names none of the program's lines for them."""

    def sums(x, numbers):
        ids = jnp.cumsum(jnp.where(numbers > 0, 1, 0))
        return x * ids[:, None], jnp.cumsum(x, axis=0)

    x, numbers = model.array((65536, 64), "data"), model.array((65536,), "data", dtype=jnp.int32)
    diagnosis = shardlib.why(sums, x, numbers, topology="v5e:4x2", cures=0)
    line = sums.__code__.co_firstlineno
    floats = {row.source.user.line for row in diagnosis.rows if row.dtypes == ("f32",)}
    whole_numbers = {row.source.user.line for row in diagnosis.rows if row.dtypes == ("s32",)}
    assert floats == {line + 2} and whole_numbers == {line + 1}


def test_a_text_from_before_partitioning_has_no_answer() -> None:
    text = """\
HloModule f, num_partitions=8

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0), sharding={devices=[8,1]<=[8]}
  ROOT %y = f32[8,8]{1,0} add(%x, %x)
}
"""
    with pytest.raises(shardlib.VerificationError, match="before XLA partitions and schedules it"):
        diagnose.why_text(text)
    compiled = text.replace("num_partitions=8", "is_scheduled=true, num_partitions=8")
    assert not diagnose.why_text(compiled).rows
