"""Forms in which others write their functions: in-place updates, boxes, static arguments, layers of
layers; and the frames of compiled programs.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import shardlib
from shardlib.diagnosis.edits import Edit
from shardlib.diagnosis.program import Call, find_mesh, trace
from shardlib.diagnosis.source import Frame, FrameTable
from tests.diagnosis import lookup_model as model

X, W = model.array((64, 128), "data"), model.array((128, 256), None, "model")

FRAMES = """HloModule f

FileNames
1 "/runner.py"
2 "/model.py"

FunctionNames
1 "main"
2 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=PARENT1}
2 {file_location_id=2 parent_frame_id=PARENT2}
"""


@pytest.mark.parametrize("parents", [(0, 1), (1, 2)])
def test_parents_of_frames_count_from_0_or_from_1(parents: tuple[int, int]) -> None:
    text = FRAMES.replace("PARENT1", str(parents[0])).replace("PARENT2", str(parents[1]))
    assert [frame.place for frame in FrameTable(text).frames(2)] == ["/model.py:7", "/runner.py:3"]


def traced(function, *arguments, **keywords):
    call = Call(function=function, arguments=arguments, keywords=keywords)
    return trace(call, "cpu", find_mesh(call))


@pytest.mark.long
def test_updates_in_place_are_results_and_layers_have_the_users_line() -> None:
    module = nnx.Linear(128, 256, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(module: nnx.Linear, x: jax.Array) -> None:
        gradient = nnx.grad(lambda module: jnp.mean(jnp.tanh(module(x))))(module)
        nnx.update(module, jax.tree.map(lambda a, b: a - b, nnx.state(module), gradient))

    rows = shardlib.why(step, module, X, topology="cpu:8", cures=0).rows
    assert [row.kind for row in rows] == ["all-reduce"] * 2
    assert {row.cause for row in rows} == {"gradient"}
    assert {row.source.user.file for row in rows if row.source.user} == {__file__}
    assert all(row.source.user for row in rows)


def test_boxes_stay_names_where_the_user_has_no_mesh() -> None:
    layer = nn.DenseGeneral(
        (4, 64),
        kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("data", None, None)),
    )
    boxed = jax.eval_shape(layer.init, jax.random.key(0), X)
    function = traced(lambda params, x: layer.apply(params, x), boxed, X)
    assert function.results[0].shape == (64, 4, 64)
    wanted = traced(
        lambda x: jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec("model")), X
    )
    assert wanted.results[0].shape == (64, 128)


def test_static_and_donated_arguments() -> None:
    @functools.partial(jax.jit, static_argnums=1, static_argnames="kind", donate_argnums=2)
    def f(x: jax.Array, times: int, w: jax.Array, kind: str = "a") -> tuple[jax.Array, jax.Array]:
        assert kind == "b"
        return jnp.sum(x @ w) * times, w * 2

    assert traced(f, X, 3, W, kind="b").donated == (1,)


def test_keys_are_arguments() -> None:
    def f(x: jax.Array, key: jax.Array) -> jax.Array:
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    assert traced(f, X, jax.random.key(0)).arguments[1].dtype == "key<fry>"


def test_callbacks_are_an_error_that_says_so() -> None:
    def f(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", jnp.sum(x))
        return x * 2

    with pytest.raises(shardlib.TracingError, match=r"(?s)calls Python while it runs.*Try: a copy"):
        shardlib.why(f, X, topology="cpu:8")


@pytest.mark.long
def test_meshes_may_have_many_axes_of_size_1() -> None:
    names = tuple("abcdefghijkl")
    mesh = jax.sharding.AbstractMesh(
        (1,) * 10 + (4, 2), names, axis_types=(jax.sharding.AxisType.Auto,) * 12
    )
    x, w = model.array((64, 128), "k", "l", mesh=mesh), model.array((128, 64), "l", mesh=mesh)
    (row,) = shardlib.why(lambda x, w: x @ w, x, w, topology="cpu:8", cures=0).rows
    assert (row.kind, row.axes) == ("all-reduce", ("l",))


@pytest.mark.long
def test_arguments_that_are_not_used_keep_their_numbers() -> None:
    def f(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return x @ params["used"]

    params = {"unused": model.array((128, 256)), "used": model.array((256, 64), "model")}
    x = model.array((64, 256), "data", "model")
    (row,) = shardlib.why(f, params, x, topology="cpu:8", cures=0).rows
    assert row.meeting is not None and row.meeting.contraction is not None
    names = [operand.name for operand in row.meeting.contraction.operands]
    assert names == ["x", "params['used']"]


def test_layouts_of_updates_follow_them(tmp_path: Path) -> None:
    file = tmp_path / "layer.py"
    file.write_text("x += y\n")
    edit = Edit(spec=(("data",),), frame=Frame(str(file), 1, 0, 1, 6), shape=(8,))
    assert edit.text(False) == "x += y; x = jax.lax.with_sharding_constraint(x, jax.P('data'))"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y = layout(y, spec)", "# without this line"),
        ("y = layout(\n    y, spec)", "# without this line"),
        ("y = layout(y, spec)  # (whole)", "# without this line"),
        ("y = layout(x + 1, spec)", "y = x + 1"),
        ("y = 2 * layout(\n    x, spec\n) + 1", "y = 2 * x + 1"),
    ],
)
def test_a_layout_that_is_left_out_leaves_its_value(tmp_path: Path, text, expected) -> None:
    file = tmp_path / "layer.py"
    file.write_text(text + "\n")
    code = text.partition("  #")[0]
    call = code[: code.rindex(")") + 1].splitlines()
    frame = Frame(str(file), 1, text.index("layout"), len(call), len(call[-1]))
    assert Edit(spec=(), frame=frame, removes=True).text(False) == expected


def rows_of(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table[tokens]


def test_a_line_under_vmap_does_not_see_the_dims_that_it_adds() -> None:
    """Its layout has the others, and the axes of the batch are those of `jax.vmap`; written so, the
    program has the layout that was tried.
    """

    def mapped(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return jax.vmap(functools.partial(rows_of, table))(tokens)

    def written(table: jax.Array, tokens: jax.Array) -> jax.Array:
        spec = jax.NamedSharding(model.MESH, jax.P())
        return jax.vmap(
            lambda row: jax.lax.with_sharding_constraint(table[row], spec), spmd_axis_name="data"
        )(tokens)

    arguments = model.array((256, 64), None, "data"), model.array((16, 32), dtype=jnp.int32)
    line = rows_of.__code__.co_firstlineno + 1
    edit = Edit(
        spec=(("data",), (), ()), frame=Frame(__file__, line, 11, line, 24), shape=(16, 32, 64)
    )
    call = Call(function=mapped, arguments=arguments, keywords={})
    tried = trace(call, "cpu", find_mesh(call), [edit])
    assert edit.text(False, tried.mapped[edit]) == (
        "return jax.lax.with_sharding_constraint(table[tokens], jax.P())"
        "  # under jax.vmap(..., spmd_axis_name='data')"
    )
    layout = re.compile(r"sdy.sharding_constraint %\w+ (<@mesh, \[.*?\]>) : tensor<16x32x64xf32>")
    expected = layout.findall(traced(written, *arguments).module)
    assert expected and set(layout.findall(tried.module)) == set(expected)


def test_a_layout_is_at_its_line_and_not_at_others_that_call_the_same_function() -> None:
    """JAX traces `jnp.add` once for both lines."""

    def twice(a: jax.Array, b: jax.Array) -> jax.Array:
        c = jnp.add(a, b)
        return jnp.add(c, b)

    line = twice.__code__.co_firstlineno + 1
    edit = Edit(spec=((), ("model",)), frame=Frame(__file__, line, 12, line, 25), shape=(64, 128))
    call = Call(function=twice, arguments=(X, X), keywords={})
    program = trace(call, "cpu", find_mesh(call), [edit])
    assert program.module.count("sdy.sharding_constraint") == 1
