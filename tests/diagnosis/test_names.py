"""What rows call values: parameters in lists, operands that are gathered, lines that need them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import shardlib
from shardlib.diagnosis.rows import Index, _at_a_line, _match, with_warnings
from shardlib.diagnosis.source import NOWHERE, FrameTable
from shardlib.verification.hlo import parse
from tests.diagnosis import lookup_model as model
from tests.diagnosis.causes import layout

pytestmark = pytest.mark.long
#: Of a value that a loop is given, for which the compiler has no name.
WARNING = (
    "W1130 16:21:21.755642   14173 spmd_partitioner.cc:666] [SPMD] Involuntary full"
    " rematerialization. The compiler cannot go from sharding {a} to {b} efficiently for HLO"
    " operation %fake_parameter.2 = f32[128,64]{1,0} parameter(2), sharding={a}."
)
TOKENS = model.array((64, 128), "data")


def step(params, x):
    def loss(params):
        h = x
        for weights in params["layers"]:
            u = jnp.tanh(h @ weights["up"])
            h = h + u @ weights["down"]
        return jnp.mean(h**2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def test_gradients_of_parameters_in_a_list_have_their_path() -> None:
    weights = {"up": model.array((128, 256)), "down": model.array((256, 128))}
    diagnosis = shardlib.why(
        step, {"layers": [weights, weights]}, TOKENS, topology="cpu:8", cures=0
    )
    gradients = [row.reason for row in diagnosis.rows if row.cause == "gradient"]
    names = {reason.split("`")[1] for reason in gradients}
    assert names == {"params['layers'][*]['up']", "params['layers'][*]['down']"}
    assert all(row.inherent for row in diagnosis.rows)


def test_parameters_that_are_stored_sharded_over_the_batchs_axis_are_named_where_gathered() -> None:
    weights = {
        "up": model.array((128, 1024), "data"),
        "down": model.array((1024, 128), None, "data"),
    }
    x = model.array((4096, 128), "data")
    rows = shardlib.why(step, {"layers": [weights, weights]}, x, topology="cpu:8", cures=0).rows
    gathered = [row for row in rows if row.kind == "all-gather" and row.cause == "weights"]
    assert {row.reason.split("`")[1] for row in gathered} >= {
        f"params['layers'][{n}]['up']" for n in (0, 1)
    }
    assert all(row.inherent for row in gathered)


def test_the_line_that_needs_another_sharding_is_named() -> None:
    def f(x, w):
        y = x * 2
        y = layout(y, None, "data")
        y = jnp.tanh(y)
        return y @ w

    x, w = model.array((512, 64), "data"), model.array((64, 64), "data")
    diagnosis = shardlib.why(f, x, w, topology="cpu:8", cures=0)
    moved = next(row for row in diagnosis.rows if row.kind == "all-to-all")
    line = f.__code__.co_firstlineno + 2
    assert moved.cause == "constraint" and moved.source.frames[1].line == line, str(diagnosis)
    text = diagnosis.communication.text
    index = Index(parse(text), FrameTable(text))
    rows, others = with_warnings(diagnosis.rows, WARNING, index, dict(diagnosis.mesh))
    warned = [row for row in rows if row.warnings]
    assert not others and moved.instructions in [row.instructions for row in warned]
    assert {row.meeting.value.name for row in warned if row.meeting} <= {"x", "y", "jnp.tanh(y)"}
    _, others = with_warnings(diagnosis.rows, WARNING.replace("128", "7"), index, {})
    assert len(others) == 1


def test_a_product_with_a_parameter_is_no_gradient_of_one() -> None:
    """Everything is [64, 64]."""

    def loss(weights, x):
        x = x.astype(jnp.float32)
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def step(weights, x):
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x))

    up, down = model.array((64, 64), None, "model"), model.array((64, 64), "model")
    x = model.array((64, 64), "data", dtype=jnp.int32)
    rows = shardlib.why(step, [up, down] * 2, x, topology="cpu:8", cures=0).rows
    backward = [row for row in rows if row.source.operation.backward]
    sums = {row.axes: row.reason for row in backward}
    assert set(sums) == {("data",), ("model",)}
    assert sums["data",].startswith("the gradient of `weights[*]` is summed over the batch")
    assert "`backward of x` [data, model] and `weights[2]` [-, model]" in sums["model",]


def test_what_a_manual_region_returns_has_its_sharding() -> None:
    def f(x, order):
        spec = jax.P("data")
        y = jax.shard_map(lambda part: part + 1, mesh=model.MESH, in_specs=spec, out_specs=spec)(x)
        return y[order]

    x, order = model.array((512, 64), "data"), model.array((512,), dtype=jnp.int32)
    (row,) = shardlib.why(f, x, order, topology="cpu:8", cures=0).rows
    assert "`y` [data, -] runs over a dim that data shards" in row.reason


@pytest.mark.compiler("gpu")
def test_what_is_gathered_for_an_operation_that_shardy_does_not_know_has_its_name() -> None:
    def f(x, up, down, sizes):
        h = jax.nn.relu(jax.lax.ragged_dot(x, up, sizes))
        return jax.lax.ragged_dot(h, down, sizes)

    x, sizes = model.array((1024, 256), "data"), model.array((8,), dtype=jnp.int32)
    up = model.array((8, 256, 512), "model", "data")
    down = model.array((8, 512, 256), "model", None, "data")
    rows = shardlib.why(f, x, up, down, sizes, topology="h100:8", cures=0).rows
    first = f.__code__.co_firstlineno
    moved = {
        row.reason: row.source.user.line - first
        for row in rows
        if row.kind in ("all-gather", "all-to-all")
    }
    assert moved == {
        "`up`, an argument [model, data, -], is gathered over model": 1,
        "`down`, an argument [model, -, data], is gathered over model": 2,
        "`x`, an argument [data, -], is sharded along another dim over data": 1,
        "`h` is gathered over data for ragged_dot_general": 2,
    }


FUSED = """
HloModule lookup

%looked_up (rows: f32[8,4], row: s32[2,1]) -> f32[4,2] {
  %rows = f32[8,4]{1,0} parameter(0)
  %row = s32[2,1]{1,0} parameter(1)
  %taken = f32[2,4]{1,0} gather(%rows, %row), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,4}
  ROOT %turned = f32[4,2]{1,0} transpose(%taken), dimensions={1,0}
}

%copied (unused: s32[2,1], rows.1: f32[8,4]) -> f32[4,8] {
  %unused = s32[2,1]{1,0} parameter(0)
  %rows.1 = f32[8,4]{1,0} parameter(1)
  ROOT %turned.1 = f32[4,8]{1,0} transpose(%rows.1), dimensions={1,0}
}

ENTRY %main (table: f32[8,4], tokens: s32[2,1]) -> (f32[4,2], f32[4,8]) {
  %table = f32[8,4]{1,0} parameter(0)
  %tokens = s32[2,1]{1,0} parameter(1)
  %lookup = f32[4,2]{1,0} fusion(%table, %tokens), kind=kLoop, calls=%looked_up
  %copy = f32[4,8]{1,0} fusion(%tokens, %table), kind=kLoop, calls=%copied
  ROOT %both = (f32[4,2]{1,0}, f32[4,8]{1,0}) tuple(%lookup, %copy)
}
"""


def test_what_a_fusion_computes_is_no_copy_of_its_argument() -> None:
    index = Index(parse(FUSED), FrameTable(FUSED))
    copied = index.argument("copy")
    assert copied is not None and copied.name == "table"
    assert index.argument("lookup") is None and index.argument("both") is None


def test_a_gather_is_of_a_value_that_its_axes_shard() -> None:
    """A value that only gets axes is not gathered; one that changes its dim may be gathered, and
    each device takes a part.
    """

    def f(x):
        return layout(jnp.tanh(x), None, None) * 2

    (row,) = shardlib.why(f, model.array((512, 64), "data"), topology="cpu:8", cures=0).rows
    met, sizes = row.meeting, {"data": 4, "model": 2}
    assert row.kind == "all-gather" and met.produced == (("data",), ())
    gets = replace(met, produced=met.needed, needed=met.produced)
    part = replace(met, needed=((), ("data",)))
    size = 512 * 64 * 4

    def matched(row, *meetings):
        return _match(row, size, meetings, sizes, Counter())

    assert matched(row, gets) is None and matched(row, gets, met) is met
    nowhere = replace(row, source=NOWHERE)
    assert matched(nowhere, gets) is None and matched(nowhere, part) is part
    other = replace(met, source=met.value.source, users=())
    assert _at_a_line(nowhere, [met, part]) is met and _at_a_line(nowhere, [met, other]) is None
