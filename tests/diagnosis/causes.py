"""Programs with one usual cause of communication each, and what is to be said of it.

Twelve causes, each in a forward pass and where a gradient or a transposition makes it, and eight
programs after public reports. What is expected was written down from the programs, before anything
was compiled: the line, the two shardings that meet there, and whether other shardings of values or
arguments would do with less, in the same memory. Where it was the expectation that was wrong, the
correction is said beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import shardlib
from shardlib.diagnosis.report import Diagnosis
from shardlib.diagnosis.rows import Row, spec_text
from shardlib.diagnosis.source import text_of

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, and what is to be said of its collective with the most bytes.

    Attributes:
        results: shardings of the results; None where they may be any.
        line: the text of its source line.
        backward: whether it belongs to a backward pass; None where both passes have it.
        made, needed: the shardings that meet; "" for `needed` where it may be any that has no axis
            of the collective on the dims that `made` shards over it.
        operands: in the place of both, shardings of the operands of the operation whose partial
            sums are added.
        avoidable: whether a cure is to be shown; none may be otherwise.
        local: "cpu", "v5e" or "h100", whose compilers make no collective of it.
        report: the public report that the program is after.
        misses: "cpu", "v5e" or "h100" -> what is known not to be right there: "line", "shardings",
            "cure".
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: Any = None
    line: str
    backward: bool | None = False
    made: str = ""
    needed: str = ""
    operands: tuple[str, ...] = ()
    avoidable: bool
    local: tuple[str, ...] = ()
    report: str = ""
    misses: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


def array(shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, PartitionSpec(*spec)))


def layout(value: jax.Array, *spec: Any) -> Any:
    return jax.lax.with_sharding_constraint(value, NamedSharding(MESH, PartitionSpec(*spec)))


P = PartitionSpec


# A contraction over a sharded dim: the second matmul of a feed-forward layer. The weights of either
# matmul are larger than the activations of a device, so no other sharding moves less.


def contraction(x, up, down):
    h = jax.nn.relu(x @ up)
    return h @ down


def contraction_gradient(x, up, down, t):
    return jax.vjp(lambda x: contraction(x, up, down), x)[1](t)[0]


# A softmax over a sharded dim: the largest and the sum of each row.


def softmax(logits):
    return jax.nn.softmax(logits)


def softmax_gradient(logits, t):
    return jax.vjp(softmax, logits)[1](t)[0]


# A lookup in an embedding that is sharded over the axis of the batch: what is looked up loses the
# batch's sharding, so partial sums are added in the matmul after it. The gradient of a lookup adds
# the rows of the whole batch.


def lookup(table, tokens, w):
    x = table[tokens]
    return x @ w


def rows_of(table, tokens):
    return table[tokens]


def lookup_gradient(table, tokens, t):
    return jax.vjp(lambda table: rows_of(table, tokens), table)[1](t)[0]


# Concatenation along a sharded dim, and the gradient of a split, which is one.


def concatenation(a, b):
    return jnp.concatenate([a, b])


def halves(x):
    return tuple(jnp.split(x, 2))


def split_gradient(x, a, b):
    return jax.vjp(halves, x)[1]((a, b))[0]


# A reshape that merges a dim with one that is sharded and stands behind it.


def merge(x):
    return x.reshape(128, 64)


def split_dim(x):
    return x.reshape(8, 16, 64)


def reshape_gradient(x, t):
    return jax.vjp(split_dim, x)[1](t)[0]


# A transposition, and a sum with one, for which no sharding of the matrix is right both ways.


def transposition(x):
    return x.T * 2


def symmetric(x):
    return x + x.T


def transposition_gradient(x, t):
    return jax.vjp(symmetric, x)[1](t)[0]


# Sums by segment. Their gradient is a lookup of every row's segment.


def segment_sums(rows, segments):
    return jnp.zeros(1024).at[segments].add(rows)


def scatter_gradient(rows, segments, t):
    return jax.vjp(lambda rows: segment_sums(rows, segments), rows)[1](t)[0]


# A sort along a sharded dim; its gradient puts a cotangent back in the order there was.


def sort(x):
    return jnp.sort(x, axis=0)


def sort_gradient(x, t):
    return jax.vjp(sort, x)[1](t)[0]


# Rows in a random order.


def shuffle(key, x):
    return jax.random.permutation(jax.random.wrap_key_data(key), x)


def shuffle_gradient(key, x, t):
    return jax.vjp(lambda x: shuffle(key, x), x)[1](t)[0]


# What a loop carries: sharded when a turn ends, and needed whole when the next one begins.


def turn(c, w):
    c = jnp.tanh(c @ w)
    return c, None


def carry(x, ws):
    return jax.lax.scan(turn, x, ws)[0]


def carry_gradient(x, ws, t):
    return jax.vjp(lambda x: carry(x, ws), x)[1](t)[0]


# Gradients that are clipped by their norm over all of them; and where they come from.


def clip(gradients):
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
    return [g * jnp.minimum(1.0, 1.0 / norm) for g in gradients]


def squares(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def clipped_step(w, x, y):
    g = jax.grad(squares)(w, x, y)
    return w - 0.1 * g * jnp.minimum(1.0, 1.0 / jnp.sqrt(jnp.sum(g * g)))


# A dim that the mesh does not divide: three heads on two devices.


def heads(x):
    return x.reshape(256, 3, 64)


def merged_heads(x):
    return x.reshape(256, 192)


def heads_gradient(x, t):
    return jax.vjp(merged_heads, x)[1](t)[0]


# After public reports.


def layouts_that_cross(a, b, c):
    d = layout(a + b, None, ("data", "model"), None)
    return c + d


def gathered_weights(x, w, v):
    h = jax.nn.gelu(x @ w)
    return jnp.mean((h @ v) ** 2)


def gathered_weights_again(x, w, v):
    return jax.grad(jax.checkpoint(gathered_weights), argnums=(1, 2))(x, w, v)


# Corrected: transforms along dims that are not sharded, which the report is of, are local by now.


def transform(x):
    return jnp.abs(jnp.fft.fft(x, axis=0))


def microbatches(x, w):
    xs = x.reshape(2, 512, 64)
    sums, _ = jax.lax.scan(lambda c, m: (c + jnp.sum(jnp.tanh(m @ w), 0), None), jnp.zeros(64), xs)
    return sums


def first_rows(x, rows):
    return x.at[0:3].set(rows)


def table_of_columns(table, tokens, t):
    return jax.vjp(lambda table: rows_of(table, tokens), table)[1](t)[0]


def running_sums(x):
    return jnp.cumsum(x, axis=-1)


def largest(logits):
    return jax.lax.top_k(logits, 8)[0]


_CONTRACTION = (
    array((64, 64), "data"),
    array((64, 256), None, "model"),
    array((256, 64), "model"),
)
_ROWS = array((4096, 64), "data")
_KEY = array((2,), dtype=jnp.uint32)
_INTS = {"dtype": jnp.int32}
_CROSSING = array((64, 64, 64), "model", None, "data")

CASES = (
    Case(
        name="contraction",
        function=contraction,
        arguments=_CONTRACTION,
        results=P("data"),
        line="return h @ down",
        operands=("[data, model]", "[model, -]"),
        avoidable=False,
    ),
    Case(
        name="contraction-gradient",
        function=contraction_gradient,
        arguments=(*_CONTRACTION, array((64, 64), "data")),
        results=P("data"),
        line="h = jax.nn.relu(x @ up)",
        backward=True,
        operands=("[data, model]", "[-, model]"),
        avoidable=False,
    ),
    Case(
        name="softmax",
        function=softmax,
        arguments=(array((64, 512), "data", "model"),),
        results=P("data", "model"),
        line="return jax.nn.softmax(logits)",
        operands=("[data, model]",),
        avoidable=False,
    ),
    Case(
        name="softmax-gradient",
        function=softmax_gradient,
        arguments=(array((64, 512), "data", "model"),) * 2,
        results=P("data", "model"),
        line="return jax.nn.softmax(logits)",
        backward=None,
        operands=("[data, model]",),
        avoidable=False,
    ),
    Case(
        name="lookup",
        function=lookup,
        arguments=(
            array((256, 64), None, "data"),
            array((64, 64), "data", **_INTS),
            array((64, 64)),
        ),
        line="return x @ w",
        operands=("[-, -, data]", "[data, -]"),
        avoidable=True,
    ),
    Case(
        name="lookup-gradient",
        function=lookup_gradient,
        arguments=(
            array((512, 64)),
            array((64, 32), "data", **_INTS),
            array((64, 32, 64), "data"),
        ),
        results=P(),
        line="return table[tokens]",
        backward=True,
        operands=("[data, -, -]",),
        avoidable=False,
    ),
    Case(
        name="concatenation",
        function=concatenation,
        arguments=(array((64, 64), "data"),) * 2,
        results=P(None, "data"),
        line="return jnp.concatenate([a, b])",
        made="[data, -]",
        avoidable=True,
    ),
    Case(
        name="split-gradient",
        function=split_gradient,
        arguments=(
            array((128, 64), "data"),
            array((64, 64), "data"),
            array((64, 64), "data"),
        ),
        results=P(None, "data"),
        line="return tuple(jnp.split(x, 2))",
        backward=True,
        made="[data, -]",
        avoidable=True,
    ),
    Case(
        name="reshape",
        function=merge,
        arguments=(array((8, 16, 64), None, "data"),),
        results=P("data"),
        line="return x.reshape(128, 64)",
        made="[-, data, -]",
        needed="[data, -, -]",
        avoidable=True,
    ),
    Case(
        name="reshape-gradient",
        function=reshape_gradient,
        arguments=(array((128, 64), "data"), array((8, 16, 64), None, "data")),
        results=P("data"),
        line="return x.reshape(8, 16, 64)",
        backward=True,
        made="[-, data, -]",
        needed="[data, -, -]",
        avoidable=True,
    ),
    Case(
        name="transposition",
        function=transposition,
        arguments=(array((256, 128), "data"),),
        results=P("data"),
        line="return x.T * 2",
        made="[-, data]",
        needed="[data, -]",
        avoidable=True,
    ),
    Case(
        name="transposition-gradient",
        function=transposition_gradient,
        arguments=(array((512, 512), "data"),) * 2,
        results=P("data"),
        line="return x + x.T",
        backward=True,
        made="[-, data]",
        needed="[data, -]",
        avoidable=False,
    ),
    Case(
        name="scatter",
        function=segment_sums,
        arguments=(array((65536,), "data"), array((65536,), "data", **_INTS)),
        results=P(),
        line="return jnp.zeros(1024).at[segments].add(rows)",
        operands=("[data]",),
        avoidable=False,
    ),
    Case(
        name="scatter-gradient",
        function=scatter_gradient,
        arguments=(
            array((65536,), "data"),
            array((65536,), "data", **_INTS),
            array((1024,), "data"),
        ),
        results=P("data"),
        line="return jnp.zeros(1024).at[segments].add(rows)",
        backward=True,
        made="[data]",
        needed="[-]",
        avoidable=True,
    ),
    Case(
        name="sort",
        function=sort,
        arguments=(array((4096, 16), "data"),),
        line="return jnp.sort(x, axis=0)",
        made="[data, -]",
        avoidable=True,
    ),
    Case(
        name="sort-gradient",
        function=sort_gradient,
        arguments=(array((4096, 16), None, "data"), array((4096, 16), "data")),
        results=P(None, "data"),
        line="return jnp.sort(x, axis=0)",
        backward=True,
        made="[data, -]",
        avoidable=True,
    ),
    Case(
        name="shuffle",
        function=shuffle,
        arguments=(_KEY, _ROWS),
        line="return jax.random.permutation(jax.random.wrap_key_data(key), x)",
        made="[data, -]",
        avoidable=True,
    ),
    Case(
        name="shuffle-gradient",
        function=shuffle_gradient,
        arguments=(_KEY, _ROWS, _ROWS),
        line="return jax.random.permutation(jax.random.wrap_key_data(key), x)",
        backward=True,
        made="[data, -]",
        avoidable=True,
    ),
    Case(
        name="carry",
        function=carry,
        arguments=(array((64, 64), "data", "model"), array((4, 64, 64), None, None, "model")),
        results=P("data", "model"),
        line="c = jnp.tanh(c @ w)",
        made="[data, model]",
        needed="[data, -]",
        avoidable=False,
    ),
    Case(
        name="carry-gradient",
        function=carry_gradient,
        arguments=(
            array((64, 64), "data", "model"),
            array((4, 64, 64), None, None, "model"),
            array((64, 64), "data", "model"),
        ),
        results=P("data", "model"),
        line="c = jnp.tanh(c @ w)",
        backward=True,
        operands=("[data, model]", "[-, model]"),
        avoidable=False,
    ),
    Case(
        name="norm",
        function=clip,
        arguments=([array((64, 64), "data", "model"), array((256, 64), "data", "model")],),
        results=P("data", "model"),
        line="norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))",
        operands=("[data, model]",),
        avoidable=False,
    ),
    Case(
        name="norm-gradient",
        function=clipped_step,
        arguments=(array((64, 128)), array((1024, 64), "data"), array((1024, 128), "data")),
        results=P(),
        line="return jnp.mean((x @ w - y) ** 2)",
        backward=True,
        operands=("[data, -]", "[data, -]"),
        avoidable=False,
    ),
    Case(
        name="uneven",
        function=heads,
        arguments=(array((256, 192), "data", "model"),),
        line="return x.reshape(256, 3, 64)",
        made="[data, model]",
        needed="[data, -]",
        avoidable=True,
    ),
    Case(
        name="uneven-gradient",
        function=heads_gradient,
        arguments=(array((256, 3, 64), "data"), array((256, 192), "data", "model")),
        line="return x.reshape(256, 192)",
        backward=True,
        made="[data, model]",
        needed="[data, -]",
        avoidable=True,
    ),
    Case(
        name="crossing-layouts",
        function=layouts_that_cross,
        arguments=(_CROSSING, _CROSSING, array((64, 64, 64), None, ("data", "model"))),
        results=P(None, ("data", "model")),
        line='d = layout(a + b, None, ("data", "model"), None)',
        made="[model, -, data]",
        needed="[-, data·model, -]",
        avoidable=True,
        report="https://github.com/jax-ml/jax/issues/21562",
    ),
    Case(
        name="gathered-weights",
        function=gathered_weights_again,
        arguments=(
            array((4096, 64), "data"),
            array((64, 512), None, "data"),
            array((512, 64), "data"),
        ),
        results=(P(None, "data"), P("data")),
        line="h = jax.nn.gelu(x @ w)",
        backward=None,
        operands=("[data, -]", "[data, -]"),
        avoidable=False,
        report="https://github.com/jax-ml/jax/issues/25010",
    ),
    Case(
        name="fourier",
        function=transform,
        arguments=(array((64, 1024), "data"),),
        line="return jnp.abs(jnp.fft.fft(x, axis=0))",
        made="[-, data]",
        avoidable=True,
        report="https://github.com/jax-ml/jax/issues/15680",
    ),
    Case(
        name="microbatches",
        function=microbatches,
        arguments=(array((1024, 64), "data"), array((64, 64))),
        results=P(),
        line="sums, _ = jax.lax.scan("
        "lambda c, m: (c + jnp.sum(jnp.tanh(m @ w), 0), None), jnp.zeros(64), xs)",
        made="[data:(1)2, data:(2)2, -]",
        # corrected: XLA gathers half of the rows, and no layout of them moves less than that
        avoidable=False,
        report="https://github.com/openxla/xla/issues/13306",
    ),
    Case(
        name="first-rows",
        function=first_rows,
        arguments=(array((64, 64), "data"), array((3, 64))),
        line="return x.at[0:3].set(rows)",
        made="[data, -]",
        avoidable=True,
        # corrected: there each device writes what it has of the three rows, and sends nothing
        local=("v5e", "h100"),
        report="https://github.com/jax-ml/jax/issues/23052",
    ),
    Case(
        name="table-of-columns",
        function=table_of_columns,
        arguments=(
            array((512, 64), None, "model"),
            array((64, 64), "data", **_INTS),
            array((64, 64, 64), "data", None, "model"),
        ),
        results=P(None, "model"),
        line="return table[tokens]",
        backward=True,
        operands=("[data, -, model]",),
        avoidable=False,
        report="https://github.com/openxla/xla/issues/42481",
    ),
    Case(
        name="running-sums",
        function=running_sums,
        arguments=(array((64, 1024), "data", "model"),),
        line="return jnp.cumsum(x, axis=-1)",
        made="[data, model]",
        needed="[data, -]",
        avoidable=True,
        # with JAX 0.12 GPUs send each other's last sums, 64 bytes, and need less memory so
        misses={"h100": ("cure",)},
        report="https://github.com/jax-ml/jax/issues/21403",
    ),
    Case(
        name="largest",
        function=largest,
        arguments=(array((64, 4096), "data", "model"),),
        line="return jax.lax.top_k(logits, 8)[0]",
        made="[data, model]",  # corrected: the dim of the batch is not kept either
        avoidable=True,
        report="https://github.com/jax-ml/jax/issues/19271",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a diagnosis of a case got right; `row` is what it says."""

    line: bool
    shardings: bool
    cure: bool
    row: str


def diagnose(case: Case, topology: str) -> Diagnosis:
    return shardlib.why(
        case.function, *case.arguments, topology=topology, out_shardings=case.results
    )


def judge(case: Case, diagnosis: Diagnosis) -> Judgement:
    """Compares a diagnosis with what is expected of the collective with the most bytes; of several
    with as many, of the one that is expected.
    """
    if diagnosis.topology.partition(":")[0] in case.local:
        nothing = not diagnosis.rows and not diagnosis.cures
        return Judgement(line=nothing, shardings=nothing, cure=nothing, row="no collective")
    most = max((row.bytes for row in diagnosis.rows), default=0.0)
    numbers = [n for n, row in enumerate(diagnosis.rows) if row.bytes >= 0.999 * most]
    at_line = [n for n in numbers if _at_line(case, diagnosis.rows[n])]
    right = [n for n in at_line if _has_shardings(case, diagnosis.rows[n])]
    number = next(iter((*right, *at_line, *numbers)), None)
    cured = number in diagnosis.cured if case.avoidable else not diagnosis.cures
    return Judgement(
        line=bool(at_line),
        shardings=bool(right),
        cure=cured and (number is None or not (case.avoidable and diagnosis.rows[number].inherent)),
        row="" if number is None else diagnosis.rows[number].reason,
    )


def _at_line(case: Case, row: Row) -> bool:
    frame = row.source.user
    backward = case.backward in (None, row.source.operation.backward)
    return frame is not None and text_of(frame) == case.line and backward


def _has_shardings(case: Case, row: Row) -> bool:
    meeting = row.meeting
    if meeting is None:
        return False
    if case.operands:
        contraction = meeting.contraction
        specs = [spec_text(o.spec) for o in contraction.operands] if contraction else []
        return sorted(specs) == sorted(case.operands)
    if meeting.contraction:  # of one operand, in which XLA looks up or sums by index
        return [spec_text(o.spec) for o in meeting.contraction.operands] == [case.made]
    if case.needed:
        return (spec_text(meeting.produced), spec_text(meeting.needed)) == (case.made, case.needed)
    pairs = zip(meeting.produced, meeting.needed, strict=True)
    kept = [set(a) & set(b) & set(row.axes) for a, b in pairs]
    return spec_text(meeting.produced) == case.made and not any(kept)
