"""`shardlib.why`: a model that loses the sharding of its batch, its rows, and its cure."""

from __future__ import annotations

import json
import linecache
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardlib
from shardlib.diagnosis import diagnose
from shardlib.diagnosis.diagnose import why_text
from shardlib.diagnosis.graph import MOST
from shardlib.diagnosis.report import Diagnosis
from shardlib.diagnosis.source import user_frame
from shardlib.verification.traffic import read_traffic
from tests.diagnosis import lookup_model as model

pytestmark = pytest.mark.long
LOOKUP = 'x = params["embedding"][tokens]'


def line_of(text: str) -> int:
    lines = linecache.getlines(model.__file__)
    return next(number for number, line in enumerate(lines, 1) if line.strip() == text)


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return shardlib.why(model.step, *model.arguments(), topology="cpu:8")


def test_rows_are_all_bytes_of_the_program_and_have_lines(diagnosis: Diagnosis) -> None:
    text = diagnosis.communication.text
    traffic = read_traffic(text, shardlib.MeshShape(data=4, fsdp=2))
    sent = sum(item.wire_bytes for item in traffic.found)
    assert sum(row.bytes for row in diagnosis.rows) == pytest.approx(sent, rel=1e-9)
    assert sum(row.count for row in diagnosis.rows) >= sum(item.count for item in traffic.found)
    files = {row.source.user.file for row in diagnosis.rows if row.source.user}
    assert files == {model.__file__}
    known = sum(row.bytes for row in diagnosis.rows if row.source.user)
    assert known >= 0.99 * sent


def test_rows_of_one_size_have_each_their_own_cure() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def array(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    def f(x: jax.Array, wq: jax.Array, wk: jax.Array, wv: jax.Array, wo: jax.Array) -> jax.Array:
        query = jnp.einsum("bsd,dhk->bshk", x, wq)
        key = jnp.einsum("bsd,dhk->bshk", x, wk)
        value = jnp.einsum("bsd,dhk->bshk", x, wv)
        scores = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", query, key))
        return jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", scores, value), wo)

    weights = [array((64, 8, 16), "data") for _ in range(3)]
    out = array((8, 16, 64), None, None, "data")
    found = shardlib.why(f, array((8, 128, 64), "data"), *weights, out, topology="cpu:8")
    assert len(found.rows) == len(found.cured) == len(found.cures) == 4
    for row, cure in found.cured.items():
        meeting = found.rows[row].meeting
        assert meeting is not None
        assert found.cures[cure].changes[0].text == f"{meeting.value.name}: jax.P()"


def test_the_two_shardings_are_those_that_met(diagnosis: Diagnosis) -> None:
    line = line_of('hidden = jax.nn.relu(x @ weights["up"])')
    row = next(
        row
        for row in diagnosis.rows
        if row.source.user
        and row.source.user.line == line
        and row.axes == ("data",)
        and not row.source.operation.backward
    )
    assert row.kind == "all-reduce" and row.count == model.LAYERS
    assert row.meeting is not None and row.meeting.contraction is not None
    x, up = row.meeting.contraction.operands
    assert (x.name, x.spec[-1]) == ("x", ("data",))
    assert (up.name, up.spec) == ("params['layers']['up']", (("data",), ("model",)))
    assert row.inherent is not True


def test_the_cure_is_a_layout_where_the_batch_was_lost(diagnosis: Diagnosis) -> None:
    first = diagnosis.cures[0]
    assert [edit.frame.line for edit in first.edits if edit.frame] == [line_of(LOOKUP)]
    assert first.text == (
        "x = jax.lax.with_sharding_constraint(params[\"embedding\"][tokens], jax.P('data'))"
    )
    assert first.bytes[1] < 0.7 * first.bytes[0]


def test_the_cure_in_the_source_has_the_bytes_that_were_measured(diagnosis: Diagnosis) -> None:
    edited = shardlib.why(model.step_with_layout, *model.arguments(), topology="cpu:8", cures=0)
    assert edited.communication.wire_bytes == pytest.approx(diagnosis.cures[0].bytes[1])
    assert edited.communication.memory["peak"] == diagnosis.cures[0].memory[1]


def test_gradients_are_inherent(diagnosis: Diagnosis) -> None:
    gradients = [
        n
        for n, row in enumerate(diagnosis.after.rows)
        if row.cause == "gradient" and row.kind != "all-gather"
    ]
    assert gradients and all(diagnosis.after.rows[n].inherent for n in gradients)


def test_a_gather_that_sends_more_than_the_gradient_it_stands_for_is_avoidable(
    diagnosis: Diagnosis,
) -> None:
    (number,) = [n for n, row in enumerate(diagnosis.rows) if row.cause == "gradient"]
    row = diagnosis.rows[number]
    assert row.kind == "all-gather" and "gathers an operand" in row.reason
    assert number in diagnosis.cured and not row.inherent


def test_tracing_is_as_before_afterwards(diagnosis: Diagnosis) -> None:
    again = shardlib.why(model.step, *model.arguments(), topology="cpu:8", cures=0)
    assert again.communication.wire_bytes == diagnosis.communication.wire_bytes


def test_json_text_page_and_annotations(diagnosis: Diagnosis, tmp_path: Path) -> None:
    data = json.loads(diagnosis.to_json())
    first = data["collectives"][0]
    assert {
        "kind",
        "axes",
        "bytes",
        "count",
        "seconds",
        "exposed",
        "source",
        "shardings",
        "inherent",
        "cure",
    } <= first.keys()
    assert sum(row["bytes"] for row in data["collectives"]) == pytest.approx(data["bytes"])
    assert any(
        row["cure"] and "with_sharding" in row["cure"]["text"] for row in data["collectives"]
    )
    assert LOOKUP in str(diagnosis) and "Cures" in str(diagnosis)
    page = diagnosis.show(tmp_path / "why.html").read_text()
    assert "with_sharding_constraint" in page and "lookup_model.py" in page
    assert "shardlib-card" in diagnosis._repr_html_()
    before, after = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for rows, graph in ((diagnosis.rows, before), (diagnosis.after.rows, after)):
        met = [row for row in rows if row.meeting is not None]
        assert graph.count(' Z"') == min(len(met), MOST) > 0
        assert (f"the {MOST} of {len(met)} collectives" in graph) == (len(met) > MOST)
        assert all(f"{row.kind} over" in graph for row in met[:MOST])


def test_mesh_may_be_a_word_and_shardings_those_of_jit() -> None:
    def f(x, w):
        return x @ w

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 128), (128, 64))]
    spec = PartitionSpec
    found = shardlib.why(
        f,
        *shapes,
        topology="cpu:8",
        mesh="rows=4,columns=2",
        in_shardings=(spec("rows", "columns"), spec("columns")),
        out_shardings=spec("rows"),
        cures=0,
    )
    (row,) = found.rows
    assert (row.kind, row.axes, row.cause) == ("all-reduce", ("columns",), "partial-sums")
    assert row.bytes == 2 * (1 / 2) * 64 * 64 * 4 / 4


def test_explicit_mode_and_manual_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    a = model.array((64, 64), "x", mesh=mesh)
    moved = shardlib.why(
        lambda a: jax.sharding.reshard(a, NamedSharding(mesh, PartitionSpec(None, "x"))) * 2,
        a,
        topology="cpu:8",
    )
    assert {row.cause for row in moved.rows} == {"constraint"}
    (cure,) = moved.cures
    assert cure.types == "the result has another type: it [x, -] ([-, x] before)"
    assert cure.types in str(moved) and cure.types in moved._repr_html_()
    manual = jax.shard_map(
        lambda a: jax.lax.psum(a, "x"),
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec(),
    )
    run_child, started = diagnose.run_child, list[str]()
    monkeypatch.setattr(
        diagnose,
        "run_child",
        lambda command, *rest: started.append(command[2]) or run_child(command, *rest),
    )
    written = shardlib.why(manual, a, topology="cpu:8")
    assert sorted(started) == ["shardlib.diagnosis.child", "shardlib.diagnosis.shardings"]
    (row,) = written.rows
    assert (row.kind, row.cause, row.inherent) == ("all-reduce", "written", True)
    assert not written.cures and written.tried == 0


def test_text_of_a_compiled_program_alone(diagnosis: Diagnosis) -> None:
    text = diagnosis.communication.text
    found = why_text(text, topology="cpu:8", mesh="data=4,model=2")
    assert [row.bytes for row in found.rows] and found.communication.wire_bytes == pytest.approx(
        diagnosis.communication.wire_bytes
    )
    assert {row.source.user for row in found.rows} >= {
        user_frame(row.source.frames) for row in diagnosis.rows[:3]
    }


def product(spec: jax.P) -> Diagnosis:
    """The diagnosis of a product of which an operand is sharded."""
    operands = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2
    setting = {"topology": "cpu:8", "mesh": "data=4,model=2", "cures": 0}
    return shardlib.why(lambda a, b: a @ b, *operands, in_shardings=(spec, jax.P()), **setting)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shardlib.why(3, topology="cpu:8"), "not a function"),
        (
            lambda: shardlib.why(lambda x: x * 2, jnp.ones(8), topology="cpu:8"),
            "nothing in .* is sharded",
        ),
        (
            lambda: shardlib.why(model.step, *model.arguments(), topology="cpu:4"),
            "8 devices",
        ),
        (
            lambda: shardlib.why(model.step, *model.arguments(), topology="cpu:8", mesh="data=8"),
            "arrays are sharded over a mesh",
        ),
        (
            lambda: shardlib.why(model.step, *model.arguments(), topology="cpu:8", mesh="data:8"),
            "not a list of axes and sizes",
        ),
        (
            lambda: shardlib.why(model.step, *model.arguments()[:1], topology="cpu:8"),
            "missing 1 required positional argument",
        ),
        (lambda: shardlib.why(model.step, topology="cpu:8", cures=-1), "cures is -1"),
        (
            lambda: shardlib.why(model.step, topology="cpu:8", cure_seconds=float("nan")),
            "cure_seconds is nan",
        ),
        (lambda: product(jax.P("data", "data")), "for an array of shape"),
        (lambda: product(jax.P("data", None, "model")), "for an array of shape"),
        (lambda: why_text("nothing"), "not the text of a compiled program"),
    ],
)
def test_what_cannot_be_diagnosed_says_so(call, message: str) -> None:
    with pytest.raises(shardlib.ShardlibError, match=message):
        call()
