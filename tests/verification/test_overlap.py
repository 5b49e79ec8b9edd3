"""Which collectives of a schedule hide behind matmuls, and options of the compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib
from shardlib.layout import MeshShape
from shardlib.verification.timelines import scheduled

MESH = MeshShape(data=2, tensor=4)
TEXT = """HloModule m, is_scheduled=true, num_partitions=8

%multiplied (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %dot = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%added (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  ROOT %sum = f32[8,8]{1,0} add(%c, %c)
}

ENTRY %main (p: f32[8,8], q: f32[2,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %q = f32[2,8]{1,0} parameter(1)
  %sent = (f32[8,8]{1,0}, f32[8,8]{1,0}) collective-permute-start(%p), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}, metadata={op_name="first"}
  %fused = f32[8,8]{1,0} fusion(%p, %p), kind=kOutput, calls=%multiplied, backend_config={"estimated_cycles":"70"}
  %again = f32[8,8]{1,0} fusion(%fused), kind=kLoop, calls=%added, backend_config={"estimated_cycles":"5"}
  %came = f32[8,8]{1,0} collective-permute-done(%sent)
  %gathering = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%q), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  %between = f32[8,8]{1,0} fusion(%came), kind=kLoop, calls=%added
  %gathered = f32[8,8]{1,0} all-gather-done(%gathering)
  %last = f32[8,8]{1,0} custom-call(%gathered, %between), custom_call_target="__cublas$gemm"
  ROOT %reduced = f32[8,8]{1,0} all-reduce(%last), channel_id=3, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%added
}
"""


def test_what_stands_between_start_and_done():
    sent, gathered, reduced = scheduled(TEXT, MESH)
    assert (
        sent.kind,
        sent.axes,
        sent.bytes,
        sent.split,
        sent.matmuls,
        sent.cycles,
        sent.operation,
    ) == ("collective-permute", ("tensor",), 256, True, 1, 75, "first")
    assert (gathered.kind, gathered.axes, gathered.bytes, gathered.split, gathered.matmuls) == (
        "all-gather",
        ("tensor",),
        256,
        True,
        0,
    )
    assert (reduced.kind, reduced.axes, reduced.split, reduced.matmuls) == (
        "all-reduce",
        ("data",),
        False,
        0,
    )


@pytest.mark.long
def test_options_reach_the_compiler():
    init = shardlib.tree(lambda key: {"w": jax.random.normal(key, (8, 4))}, {"w": ("embed", "mlp")})
    batch = {"x": jax.ShapeDtypeStruct((4, 8), np.float32)}
    given = {"topology": "cpu:2", "pin": {"mesh": {"data": 2}}}
    refused = shardlib.verify(
        init,
        lambda w, data: jnp.mean((data["x"] @ w["w"]) ** 2),
        optax.sgd(0.1),
        batch,
        **given,
        options={"xla_no_such_option": True},
    )
    assert refused.compiled is None and [one.code for one in refused.findings] == ["compile-error"]
    assert "xla_no_such_option" in refused.findings[0].message
    taken = shardlib.verify(
        init,
        lambda w, data: jnp.mean((data["x"] @ w["w"]) ** 2),
        optax.sgd(0.1),
        batch,
        **given,
        options={"xla_cpu_enable_fast_math": True},
    )
    assert taken.ok and taken.compiled is not None
    assert {(one.kind, one.axes) for one in taken.compiled.scheduled} == {
        (one.kind, one.axes) for one in taken.compiled.collectives
    }
