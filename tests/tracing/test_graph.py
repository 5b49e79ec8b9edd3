"""Graphs of small programs: the golden text of one, loops and branches, what is opaque."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from shardlib.graph import Graph, text
from shardlib.tracing.trace import graph_from_jaxpr

GOLDEN = """\
%0 float32[3, 4, 4] layers (parameter)
%1 float32[2, 4] batch.x (batch)
scan x 3
  %2 float32[2, 4] = carry %1 | [a b] -> [a b] where a=2 b=4
  %3 float32[4, 4] = enter %0 | [a b c] -> [b c] where a=3 b=4 c=4, whole a
  %4 float32[2, 4] = dot_general %2 %3 | [b a] [a c] -> [b c] where a=4 b=2 c=4, sum a | 64 flops
  %5 float32[2, 4] = tanh %4 | [a b] -> [a b] where a=2 b=4 | 8 flops
  %6 float32[2] = reduce_sum %2 | [a b] -> [a] where a=2 b=4, sum b | 8 flops
  %7 float32[2, 4] = carry %2 %5 | [a b] [a b] -> [a b] where a=2 b=4
  %8 float32[3, 2] = exit %6 | [b] -> [a b] where a=3 b=2, whole a
%9 float32[] = reduce_sum %7 | [a b] -> [] where a=2 b=4, sum a b | 8 flops
return %9 %8"""


def layers(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, sums = jax.lax.scan(lambda c, k: (jnp.tanh(c @ k), c.sum(1)), x, w)
    return jnp.sum(out), sums


def trace(function, *shapes, dtype=jnp.float32) -> Graph:
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    return graph_from_jaxpr(closed, [(f"x{i}", "batch") for i in range(len(shapes))])


def test_golden_text() -> None:
    closed = jax.make_jaxpr(layers)(jnp.zeros((3, 4, 4)), jnp.zeros((2, 4)))
    graph = graph_from_jaxpr(closed, [("layers", "parameter"), ("batch.x", "batch")])
    assert text(graph) == GOLDEN
    assert graph.flops == 3 * (64 + 8 + 8) + 8
    assert [op.path for op in graph.ops][:3] == ["0/carry/0", "0/enter/0", "0/body/0"]


def test_only_the_dearest_branch_counts() -> None:
    graph = trace(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x * 2), (4, 4))
    assert [region.trips for region in graph.regions] == [1, 0, 1]
    assert (
        sum(
            op.flops * graph.trips(op.region)
            for op in graph.ops
            if op.kind in ("dot_general", "mul")
        )
        == 2 * 4**3
    )


def test_counted_while_loop() -> None:
    graph = trace(
        lambda x: jax.lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1],
        (4,),
    )
    assert [region.trips for region in graph.regions] == [1, 5]
    assert graph.findings == ()


def test_uncounted_while_loop_is_a_finding() -> None:
    graph = trace(lambda x: jax.lax.while_loop(lambda s: s[0] < 5, lambda s: s * 2, x), (4,))
    assert [(finding.code, finding.severity) for finding in graph.findings] == [
        ("unknown-trip-count", "warning")
    ]


def test_unknown_primitive_is_opaque_and_a_finding() -> None:
    def program(x: jax.Array) -> jax.Array:
        with jax.named_scope("head"):
            return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((4, 6), jnp.float32), x) * 2

    graph = trace(program, (4, 6))
    (finding,) = graph.findings
    assert (finding.code, finding.severity, finding.where) == (
        "opaque-primitive",
        "warning",
        "head",
    )
    assert "'pure_callback'" in finding.message
    (op,) = [op for op in graph.ops if op.category == "opaque"]
    assert str(op.rule) == "[a b] -> [c d] where a=4 b=6 c=4 d=6, whole a b c d"


def test_shard_map_is_opaque() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("a",))
    graph = trace(
        lambda x: jax.shard_map(
            lambda y: y * 2, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a")
        )(x),
        (4, 6),
    )
    assert [finding.code for finding in graph.findings] == ["opaque-primitive"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.random.normal(jax.random.key(0), (4, 6)) * x,
        lambda x: jax.random.split(jax.random.key(1), 3),
        lambda x: jax.random.key_data(jax.random.key(1)),
        lambda x: jax.random.wrap_key_data(jnp.zeros((2,), jnp.uint32)),
        lambda x: jax.random.gamma(jax.random.key(0), x),
        lambda x: jax.random.bits(jax.random.key(0, impl="rbg"), (4, 6)),
        lambda x: jnp.arange(6) + x,
        lambda x: jax.random.permutation(jax.random.key(0), x),
        lambda x: jax.jvp(
            lambda y: jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID"),
            (x,),
            (x,),
        ),
        lambda x: (
            jax.nn.gelu(x)
            + jax.nn.silu(x)
            + jax.scipy.special.erf(x)
            + jax.nn.softmax(x)
            + jax.nn.one_hot(jnp.argmax(x, 1), 6)
        ),
    ],
)
def test_checked_and_nothing_opaque(function) -> None:
    assert trace(function, (4, 6)).findings == ()
