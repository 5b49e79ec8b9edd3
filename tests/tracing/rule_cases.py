"""One small example per rule of the table, with the rule it must get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True, kw_only=True)
class RuleCase:
    """A function whose jaxpr has one equation of interest.

    Attributes:
        name: what is special about it.
        primitive: the equation of interest; its operands are the function's arguments.
        function: the computation.
        arguments: arrays.
        rule: the expected `str` of the rule without sizes, which `check` and the laws hold.
        combine: how results of the parts of a summed factor combine; the neutral element is what
            absent parts hold.
        neutral: see `combine`.
    """

    name: str
    primitive: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rule: str
    combine: Callable[[Any, Any], Any] = np.add
    neutral: float = 0.0


def floats(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def ints(high: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(0, high, shape), jnp.int32)


def bools(*shape: int) -> jax.Array:
    return ints(2, *shape) > 0


def conv(**options: Any) -> Callable[..., Any]:
    settings = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        **options,
    }
    return lambda x, w: lax.conv_general_dilated(x, w, **settings)


def scattered(kind: Callable[..., Any], **numbers: Any) -> Callable[..., Any]:
    return lambda x, i, u: kind(x, i, u, lax.ScatterDimensionNumbers(**numbers))


def gathered(slices: tuple[int, ...], **numbers: Any) -> Callable[..., Any]:
    return lambda x, i: lax.gather(x, i, lax.GatherDimensionNumbers(**numbers), slices)


ROWS = {
    "update_window_dims": (1,),
    "inserted_window_dims": (0,),
    "scatter_dims_to_operand_dims": (0,),
}

#: By primitive: name, function, arguments, expected rule without sizes[, combine, neutral].
_CASES: dict[str, tuple[tuple[Any, ...], ...]] = {
    "dot_general": (
        ("matrix product", jnp.matmul, (floats(4, 6), floats(6, 8)), "[b a] [a c] -> [b c], sum a"),
        ("vector product", jnp.dot, (floats(6), floats(6)), "[a] [a] -> [], sum a"),
        (
            "batched product",
            lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b),
            (floats(2, 4, 6), floats(2, 6, 8)),
            "[a c b] [a b d] -> [a c d], sum b",
        ),
        (
            "attention scores",
            lambda q, k: lax.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2)))),
            (floats(2, 4, 3, 6), floats(2, 8, 3, 6)),
            "[a d b c] [a e b c] -> [a b d e], sum c",
        ),
        (
            "two contracted dims",
            lambda a, b: lax.dot_general(a, b, (((1, 2), (0, 1)), ((), ()))),
            (floats(4, 2, 3), floats(2, 3, 8)),
            "[c a b] [a b d] -> [c d], sum a b",
        ),
        (
            "two free dims",
            lambda a, b: lax.dot_general(a, b, (((2,), (0,)), ((), ()))),
            (floats(2, 4, 6), floats(6, 3, 5)),
            "[b c a] [a d e] -> [b c d e], sum a",
        ),
    ),
    "ragged_dot_general": (
        (
            "ragged product",
            lax.ragged_dot,
            (floats(6, 4), floats(2, 4, 8), jnp.array([2, 4])),
            "[c a] [b a d] [e] -> [c d], sum a, whole b c e",
        ),
    ),
    "conv_general_dilated": (
        (
            "convolution",
            conv(),
            (floats(2, 6, 6, 4), floats(3, 3, 4, 8)),
            "[a d g b] [e h b c] -> [a f i c], sum b, whole d e f g h i",
        ),
        (
            "pointwise convolution",
            conv(),
            (floats(2, 6, 6, 4), floats(1, 1, 4, 8)),
            "[a d e b] [1 1 b c] -> [a d e c], sum b",
        ),
        (
            "strided convolution",
            conv(window_strides=(2, 2), padding="VALID"),
            (floats(2, 6, 6, 4), floats(2, 2, 4, 8)),
            "[a d g b] [e h b c] -> [a f i c], sum b, whole d e f g h i",
        ),
        (
            "grouped convolution",
            conv(feature_group_count=2),
            (floats(2, 6, 6, 4), floats(3, 3, 2, 6)),
            "[b e h a*c] [f i c a*d] -> [b g j a*d], sum c, whole e f g h i j",
        ),
        (
            "depthwise convolution",
            conv(feature_group_count=4),
            (floats(2, 6, 6, 4), floats(3, 3, 1, 4)),
            "[b c f a] [d g 1 a] -> [b e h a], whole c d e f g h",
        ),
        (
            "batch-grouped convolution",
            conv(batch_group_count=2),
            (floats(4, 6, 6, 3), floats(3, 3, 3, 4)),
            "[a*b e h c] [f i c a*d] -> [b g j a*d], sum c, whole e f g h i j",
        ),
        (
            "channels first",
            conv(dimension_numbers=("NCHW", "OIHW", "NCHW")),
            (floats(2, 4, 6, 6), floats(8, 4, 3, 3)),
            "[a b d g] [c b e h] -> [a c f i], sum b, whole d e f g h i",
        ),
        (
            "transposed convolution",
            conv(lhs_dilation=(2, 2), padding=((1, 1), (1, 1))),
            (floats(2, 4, 4, 4), floats(3, 3, 4, 8)),
            "[a d g b] [e h b c] -> [a f i c], sum b, whole d e f g h i",
        ),
    ),
    "exp": (("unary", jnp.exp, (floats(4, 6),), "[a b] -> [a b]"),),
    "add": (("binary", jnp.add, (floats(4, 6), floats(4, 6)), "[a b] [a b] -> [a b]"),),
    "mul": (
        ("size-1 dim", jnp.multiply, (floats(4, 6), floats(1, 6)), "[a b] [1 b] -> [a b]"),
        ("scalar operand", lambda x: x * 2.0, (floats(4, 6),), "[a b] [] -> [a b]"),
    ),
    "select_n": (
        (
            "select",
            lax.select_n,
            (bools(4, 6), floats(4, 6), floats(4, 6)),
            "[a b] [a b] [a b] -> [a b]",
        ),
        (
            "select by scalar",
            lax.select_n,
            (jnp.asarray(True), floats(4, 6), floats(4, 6)),
            "[] [a b] [a b] -> [a b]",
        ),
    ),
    "clamp": (
        ("clamp", lambda x: lax.clamp(-0.5, x, 0.5), (floats(4, 6),), "[] [a b] [] -> [a b]"),
    ),
    "convert_element_type": (
        ("convert", lambda x: x.astype(jnp.bfloat16), (floats(4, 6),), "[a b] -> [a b]"),
    ),
    "bitcast_convert_type": (
        (
            "narrower bits",
            lambda x: lax.bitcast_convert_type(x, jnp.uint16),
            (floats(4, 6),),
            "[a b] -> [a b c], whole c",
        ),
    ),
    "optimization_barrier": (
        (
            "barrier",
            lambda x, y: lax.optimization_barrier((x, y)),
            (floats(4, 6), floats(2)),
            "[a b] [c] -> [a b] [c]",
        ),
    ),
    "is_finite": (("is finite", jnp.isfinite, (floats(4, 6),), "[a b] -> [a b]"),),
    "reduce_sum": (
        ("sum", lambda x: jnp.sum(x, 1), (floats(4, 6, 2),), "[a b c] -> [a c], sum b"),
    ),
    "reduce_max": (
        (
            "maximum",
            lambda x: jnp.max(x, (0, 2)),
            (floats(4, 6, 2),),
            "[a b c] -> [b], sum a c",
            np.maximum,
            -np.inf,
        ),
    ),
    "reduce_min": (
        (
            "minimum",
            lambda x: jnp.min(x, 0),
            (floats(4, 6),),
            "[a b] -> [b], sum a",
            np.minimum,
            np.inf,
        ),
    ),
    "reduce_prod": (
        (
            "product",
            lambda x: jnp.prod(x, 0),
            (floats(4, 6),),
            "[a b] -> [b], sum a",
            np.multiply,
            1.0,
        ),
    ),
    "reduce_and": (
        (
            "all",
            lambda x: jnp.all(x, 0),
            (bools(4, 6),),
            "[a b] -> [b], sum a",
            np.logical_and,
            1.0,
        ),
    ),
    "reduce_or": (
        ("any", lambda x: jnp.any(x, 0), (bools(4, 6),), "[a b] -> [b], sum a", np.logical_or, 0.0),
    ),
    "argmax": (("argmax", lambda x: jnp.argmax(x, 1), (floats(4, 6),), "[a b] -> [a], whole b"),),
    "reduce": (
        (
            "generic reduction",
            lambda x: lax.reduce(x, 0.5, lambda a, b: a + b + a * b, (0,)),
            (floats(4, 6),),
            "[a b] [] -> [b], whole a",
        ),
    ),
    "cumsum": (
        ("running sum", lambda x: jnp.cumsum(x, 1), (floats(4, 6),), "[a b] -> [a b], whole b"),
    ),
    "cummax": (
        ("running maximum", lambda x: lax.cummax(x, 0), (floats(4, 6),), "[a b] -> [a b], whole a"),
    ),
    "cumlogsumexp": (
        (
            "running log-sum-exp",
            lambda x: lax.cumlogsumexp(x, 0),
            (floats(4, 6),),
            "[a b] -> [a b], whole a",
        ),
    ),
    "cumprod": (
        (
            "running product",
            lambda x: lax.cumprod(x, 0, reverse=True),
            (floats(4, 6),),
            "[a b] -> [a b], whole a",
        ),
    ),
    "sort": (
        ("sort", lambda x: jnp.sort(x, 0), (floats(4, 6),), "[a b] -> [a b], whole a"),
        (
            "sort with values",
            lambda x, y: lax.sort((x, y), dimension=1, num_keys=1),
            (floats(4, 6), floats(6, 4).T),
            "[a b] [a b] -> [a b] [a b], whole b",
        ),
    ),
    "top_k": (
        ("top-k", lambda x: lax.top_k(x, 2), (floats(4, 6),), "[a b] -> [a c] [a c], whole b c"),
    ),
    "rev": (("reverse", lambda x: lax.rev(x, (1,)), (floats(4, 6),), "[a b] -> [a b], whole b"),),
    "reduce_window_max": (
        (
            "max-pooling",
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
            (floats(2, 4, 6, 3),),
            "[a b*c d*e f] -> [a b d f], sum c e",
            np.maximum,
            -np.inf,
        ),
    ),
    "reduce_window_sum": (
        (
            "overlapping windows",
            lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"),
            (floats(4, 6),),
            "[a b] -> [a c], whole b c",
        ),
    ),
    "select_and_scatter_add": (
        (
            "gradient of max-pooling",
            lambda g, x: jax.vjp(
                lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"), x
            )[1](g)[0],
            (floats(2, 3), floats(4, 6)),
            "[a c] [a*b c*d] -> [a*b c*d], whole b d",
        ),
    ),
    "broadcast_in_dim": (
        (
            "broadcast",
            lambda x: lax.broadcast_in_dim(x, (3, 4, 6), (1, 2)),
            (floats(4, 6),),
            "[b c] -> [a b c]",
        ),
        (
            "broadcast of size 1",
            lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)),
            (floats(4, 1),),
            "[a 1] -> [a b]",
        ),
    ),
    "reshape": (
        ("split heads", lambda x: x.reshape(4, 3, 2), (floats(4, 6),), "[a b*c] -> [a b c]"),
        ("merge heads", lambda x: x.reshape(4, 6), (floats(4, 3, 2),), "[a b c] -> [a b*c]"),
        ("flatten", lambda x: x.reshape(-1), (floats(4, 6),), "[a b] -> [a*b]"),
        ("regroup", lambda x: x.reshape(6, 4), (floats(2, 12),), "[a b*c] -> [a*b c]"),
        (
            "no common factors",
            lambda x: x.reshape(3, 2, 5),
            (floats(2, 3, 5),),
            "[a c e] -> [b d e], whole a b c d",
        ),
        (
            "common major factor",
            lambda x: x.reshape(6, 2),
            (floats(4, 3),),
            "[a*b d] -> [a*c e], whole b c d e",
        ),
        (
            "size-1 dims",
            lambda x: x.reshape(1, 4, 1, 6),
            (floats(4, 1, 6),),
            "[a 1 b] -> [1 a 1 b]",
        ),
    ),
    "squeeze": (
        ("squeeze", lambda x: lax.squeeze(x, (1,)), (floats(4, 1, 6),), "[a 1 b] -> [a b]"),
    ),
    "transpose": (
        ("transpose", lambda x: x.transpose(2, 0, 1), (floats(4, 6, 2),), "[a b c] -> [c a b]"),
    ),
    "slice": (
        (
            "slice",
            lambda x: lax.slice(x, (0, 1), (4, 5)),
            (floats(4, 6),),
            "[a b] -> [a c], whole b c",
        ),
        (
            "strided slice",
            lambda x: lax.slice(x, (0, 0), (4, 6), (2, 1)),
            (floats(4, 6),),
            "[a c] -> [b c], whole a b",
        ),
    ),
    "pad": (
        (
            "pad",
            lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0))),
            (floats(4, 6),),
            "[a b] [] -> [a c], whole b c",
        ),
        (
            "negative padding of equal size",
            lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0))),
            (floats(4, 6),),
            "[a b] [] -> [a c], whole b c",
        ),
    ),
    "concatenate": (
        (
            "concatenate",
            lambda x, y: jnp.concatenate([x, y], 1),
            (floats(4, 6), floats(4, 2)),
            "[a c] [a d] -> [a b], whole b c d",
        ),
    ),
    "stack": (
        (
            "stack",
            lambda x, y: jnp.stack([x, y], 1),
            (floats(4, 6), floats(4, 6)),
            "[a c] [a c] -> [a b c], whole b",
        ),
    ),
    "unstack": (
        (
            "unstack",
            lambda x: jnp.unstack(x, axis=1),
            (floats(4, 3),),
            "[a b] -> [a] [a] [a], whole b",
        ),
    ),
    "split": (
        (
            "split",
            lambda x: jnp.split(x, 2, 1),
            (floats(4, 6),),
            "[a b] -> [a c] [a d], whole b c d",
        ),
    ),
    "tile": (("tile", lambda x: jnp.tile(x, (1, 3)), (floats(4, 6),), "[a b] -> [a c*b]"),),
    "gather": (
        (
            "embedding lookup",
            gathered((1, 6), offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,)),
            (floats(8, 6), ints(8, 2, 4, 1)),
            "[c d] [a b 1] -> [a b d], sum c",
        ),
        (
            "two indexed dims",
            gathered(
                (1, 1, 6), offset_dims=(1,), collapsed_slice_dims=(0, 1), start_index_map=(0, 1)
            ),
            (floats(4, 2, 6), ints(2, 5, 2)),
            "[c d e] [a b] -> [a e], sum c d, whole b",
        ),
        (
            "take along axis",
            gathered(
                (1, 1),
                offset_dims=(),
                collapsed_slice_dims=(1,),
                start_index_map=(1,),
                operand_batching_dims=(0,),
                start_indices_batching_dims=(0,),
            ),
            (floats(4, 6), ints(6, 4, 3, 1)),
            "[a c] [a b 1] -> [a b], sum c",
        ),
        (
            "gather of windows",
            gathered((1, 2), offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1)),
            (floats(4, 6), ints(3, 5, 2)),
            "[c d] [a b] -> [a 1 e], whole b c d e",
        ),
    ),
    "scatter-add": (
        (
            "scatter-add of rows",
            scattered(lax.scatter_add, **ROWS),
            (jnp.zeros((8, 6)), ints(8, 4, 1), floats(4, 6)),
            "[b c] [a 1] [a c] -> [b c], sum a",
        ),
        (
            "scatter-add with batching dims",
            scattered(
                lax.scatter_add,
                update_window_dims=(),
                inserted_window_dims=(1,),
                scatter_dims_to_operand_dims=(1,),
                operand_batching_dims=(0,),
                scatter_indices_batching_dims=(0,),
            ),
            (jnp.zeros((4, 6)), ints(6, 4, 3, 1), floats(4, 3)),
            "[a c] [a b 1] [a b] -> [a c], sum b",
        ),
        (
            "scatter-add of windows",
            scattered(
                lax.scatter_add,
                update_window_dims=(1, 2),
                inserted_window_dims=(),
                scatter_dims_to_operand_dims=(1,),
            ),
            (jnp.zeros((4, 6)), ints(4, 3, 1), floats(3, 4, 2)),
            "[b c] [a 1] [a b d] -> [b c], sum a, whole c d",
        ),
    ),
    "scatter-max": (
        (
            "scatter-max of rows",
            scattered(lax.scatter_max, **ROWS),
            (jnp.full((8, 6), -jnp.inf), ints(8, 4, 1), floats(4, 6)),
            "[b c] [a 1] [a c] -> [b c], sum a",
            np.maximum,
            -np.inf,
        ),
    ),
    "scatter-mul": (
        (
            "scatter-mul of rows",
            scattered(lax.scatter_mul, **ROWS),
            (jnp.ones((8, 6)), ints(8, 4, 1), floats(4, 6)),
            "[b c] [a 1] [a c] -> [b c], sum a",
            np.multiply,
            1.0,
        ),
    ),
    "scatter": (
        (
            "scatter that overwrites",
            scattered(lax.scatter, **ROWS),
            (floats(8, 6), ints(8, 4, 1), floats(4, 6)),
            "[b c] [a 1] [a c] -> [b c], whole a",
        ),
    ),
    "dynamic_slice": (
        (
            "dynamic slice",
            lambda x, i: lax.dynamic_slice(x, (0, i), (4, 3)),
            (floats(4, 6), jnp.asarray(2)),
            "[a b] [] [] -> [a c], whole b c",
        ),
    ),
    "dynamic_update_slice": (
        (
            "dynamic update",
            lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)),
            (floats(4, 6), floats(4, 2), jnp.asarray(3)),
            "[a b] [a c] [] [] -> [a b], whole b c",
        ),
    ),
    "cholesky": (
        (
            "Cholesky",
            lambda x: lax.linalg.cholesky(x, symmetrize_input=False),
            (jnp.stack([2 * jnp.eye(3), jnp.eye(3) + 1]),),
            "[a b c] -> [a d e], whole b c d e",
        ),
    ),
    "fft": (
        (
            "Fourier transform",
            lambda x: jnp.fft.rfft(x),
            (floats(4, 6),),
            "[a b] -> [a c], whole b c",
        ),
    ),
}

CASES: tuple[RuleCase, ...] = tuple(
    RuleCase(
        name=name,
        primitive=primitive,
        function=function,
        arguments=arguments,
        rule=rule,
        **dict(zip(("combine", "neutral"), more, strict=False)),
    )
    for primitive, rows in _CASES.items()
    for name, function, arguments, rule, *more in rows
)
