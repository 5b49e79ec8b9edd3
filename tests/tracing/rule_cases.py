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
        rule: the expected `str` of the rule.
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

#: (name, primitive, function, arguments, expected rule[, combine, neutral])
_CASES: tuple[tuple[Any, ...], ...] = (
    (
        "matrix product",
        "dot_general",
        jnp.matmul,
        (floats(4, 6), floats(6, 8)),
        "[b a] [a c] -> [b c] where a=6 b=4 c=8, sum a",
    ),
    (
        "vector product",
        "dot_general",
        jnp.dot,
        (floats(6), floats(6)),
        "[a] [a] -> [] where a=6, sum a",
    ),
    (
        "batched product",
        "dot_general",
        lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b),
        (floats(2, 4, 6), floats(2, 6, 8)),
        "[a c b] [a b d] -> [a c d] where a=2 b=6 c=4 d=8, sum b",
    ),
    (
        "attention scores",
        "dot_general",
        lambda q, k: lax.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2)))),
        (floats(2, 4, 3, 6), floats(2, 8, 3, 6)),
        "[a d b c] [a e b c] -> [a b d e] where a=2 b=3 c=6 d=4 e=8, sum c",
    ),
    (
        "two contracted dims",
        "dot_general",
        lambda a, b: lax.dot_general(a, b, (((1, 2), (0, 1)), ((), ()))),
        (floats(4, 2, 3), floats(2, 3, 8)),
        "[c a b] [a b d] -> [c d] where a=2 b=3 c=4 d=8, sum a b",
    ),
    (
        "two free dims",
        "dot_general",
        lambda a, b: lax.dot_general(a, b, (((2,), (0,)), ((), ()))),
        (floats(2, 4, 6), floats(6, 3, 5)),
        "[b c a] [a d e] -> [b c d e] where a=6 b=2 c=4 d=3 e=5, sum a",
    ),
    (
        "ragged product",
        "ragged_dot_general",
        lax.ragged_dot,
        (floats(6, 4), floats(2, 4, 8), jnp.array([2, 4])),
        "[c a] [b a d] [e] -> [c d] where a=4 b=2 c=6 d=8 e=2, sum a, whole b c e",
    ),
    (
        "convolution",
        "conv_general_dilated",
        conv(),
        (floats(2, 6, 6, 4), floats(3, 3, 4, 8)),
        (
            "[a d g b] [e h b c] -> [a f i c] where a=2 b=4 c=8 d=6 e=3 f=6 g=6 h=3 i=6, sum b,"
            " whole d e f g h i"
        ),
    ),
    (
        "pointwise convolution",
        "conv_general_dilated",
        conv(),
        (floats(2, 6, 6, 4), floats(1, 1, 4, 8)),
        "[a d e b] [1 1 b c] -> [a d e c] where a=2 b=4 c=8 d=6 e=6, sum b",
    ),
    (
        "strided convolution",
        "conv_general_dilated",
        conv(window_strides=(2, 2), padding="VALID"),
        (floats(2, 6, 6, 4), floats(2, 2, 4, 8)),
        (
            "[a d g b] [e h b c] -> [a f i c] where a=2 b=4 c=8 d=6 e=2 f=3 g=6 h=2 i=3, sum b,"
            " whole d e f g h i"
        ),
    ),
    (
        "grouped convolution",
        "conv_general_dilated",
        conv(feature_group_count=2),
        (floats(2, 6, 6, 4), floats(3, 3, 2, 6)),
        (
            "[b e h a*c] [f i c a*d] -> [b g j a*d] where a=2 b=2 c=2 d=3 e=6 f=3 g=6 h=6 i=3 j=6,"
            " sum c, whole e f g h i j"
        ),
    ),
    (
        "depthwise convolution",
        "conv_general_dilated",
        conv(feature_group_count=4),
        (floats(2, 6, 6, 4), floats(3, 3, 1, 4)),
        "[b c f a] [d g 1 a] -> [b e h a] where a=4 b=2 c=6 d=3 e=6 f=6 g=3 h=6, whole c d e f g h",
    ),
    (
        "batch-grouped convolution",
        "conv_general_dilated",
        conv(batch_group_count=2),
        (floats(4, 6, 6, 3), floats(3, 3, 3, 4)),
        (
            "[a*b e h c] [f i c a*d] -> [b g j a*d] where a=2 b=2 c=3 d=2 e=6 f=3 g=6 h=6 i=3 j=6,"
            " sum c, whole e f g h i j"
        ),
    ),
    (
        "channels first",
        "conv_general_dilated",
        conv(dimension_numbers=("NCHW", "OIHW", "NCHW")),
        (floats(2, 4, 6, 6), floats(8, 4, 3, 3)),
        (
            "[a b d g] [c b e h] -> [a c f i] where a=2 b=4 c=8 d=6 e=3 f=6 g=6 h=3 i=6, sum b,"
            " whole d e f g h i"
        ),
    ),
    (
        "transposed convolution",
        "conv_general_dilated",
        conv(lhs_dilation=(2, 2), padding=((1, 1), (1, 1))),
        (floats(2, 4, 4, 4), floats(3, 3, 4, 8)),
        (
            "[a d g b] [e h b c] -> [a f i c] where a=2 b=4 c=8 d=4 e=3 f=7 g=4 h=3 i=7, sum b,"
            " whole d e f g h i"
        ),
    ),
    ("unary", "exp", jnp.exp, (floats(4, 6),), "[a b] -> [a b] where a=4 b=6"),
    ("binary", "add", jnp.add, (floats(4, 6), floats(4, 6)), "[a b] [a b] -> [a b] where a=4 b=6"),
    (
        "size-1 dim",
        "mul",
        jnp.multiply,
        (floats(4, 6), floats(1, 6)),
        "[a b] [1 b] -> [a b] where a=4 b=6",
    ),
    (
        "scalar operand",
        "mul",
        lambda x: x * 2.0,
        (floats(4, 6),),
        "[a b] [] -> [a b] where a=4 b=6",
    ),
    (
        "select",
        "select_n",
        lax.select_n,
        (bools(4, 6), floats(4, 6), floats(4, 6)),
        "[a b] [a b] [a b] -> [a b] where a=4 b=6",
    ),
    (
        "select by scalar",
        "select_n",
        lax.select_n,
        (jnp.asarray(True), floats(4, 6), floats(4, 6)),
        "[] [a b] [a b] -> [a b] where a=4 b=6",
    ),
    (
        "clamp",
        "clamp",
        lambda x: lax.clamp(-0.5, x, 0.5),
        (floats(4, 6),),
        "[] [a b] [] -> [a b] where a=4 b=6",
    ),
    (
        "convert",
        "convert_element_type",
        lambda x: x.astype(jnp.bfloat16),
        (floats(4, 6),),
        "[a b] -> [a b] where a=4 b=6",
    ),
    (
        "narrower bits",
        "bitcast_convert_type",
        lambda x: lax.bitcast_convert_type(x, jnp.uint16),
        (floats(4, 6),),
        "[a b] -> [a b c] where a=4 b=6 c=2, whole c",
    ),
    (
        "barrier",
        "optimization_barrier",
        lambda x, y: lax.optimization_barrier((x, y)),
        (floats(4, 6), floats(2)),
        "[a b] [c] -> [a b] [c] where a=4 b=6 c=2",
    ),
    ("is finite", "is_finite", jnp.isfinite, (floats(4, 6),), "[a b] -> [a b] where a=4 b=6"),
    (
        "sum",
        "reduce_sum",
        lambda x: jnp.sum(x, 1),
        (floats(4, 6, 2),),
        "[a b c] -> [a c] where a=4 b=6 c=2, sum b",
    ),
    (
        "maximum",
        "reduce_max",
        lambda x: jnp.max(x, (0, 2)),
        (floats(4, 6, 2),),
        "[a b c] -> [b] where a=4 b=6 c=2, sum a c",
        np.maximum,
        -np.inf,
    ),
    (
        "minimum",
        "reduce_min",
        lambda x: jnp.min(x, 0),
        (floats(4, 6),),
        "[a b] -> [b] where a=4 b=6, sum a",
        np.minimum,
        np.inf,
    ),
    (
        "product",
        "reduce_prod",
        lambda x: jnp.prod(x, 0),
        (floats(4, 6),),
        "[a b] -> [b] where a=4 b=6, sum a",
        np.multiply,
        1.0,
    ),
    (
        "all",
        "reduce_and",
        lambda x: jnp.all(x, 0),
        (bools(4, 6),),
        "[a b] -> [b] where a=4 b=6, sum a",
        np.logical_and,
        1.0,
    ),
    (
        "any",
        "reduce_or",
        lambda x: jnp.any(x, 0),
        (bools(4, 6),),
        "[a b] -> [b] where a=4 b=6, sum a",
        np.logical_or,
        0.0,
    ),
    (
        "argmax",
        "argmax",
        lambda x: jnp.argmax(x, 1),
        (floats(4, 6),),
        "[a b] -> [a] where a=4 b=6, whole b",
    ),
    (
        "generic reduction",
        "reduce",
        lambda x: lax.reduce(x, 0.5, lambda a, b: a + b + a * b, (0,)),
        (floats(4, 6),),
        "[a b] [] -> [b] where a=4 b=6, whole a",
    ),
    (
        "running sum",
        "cumsum",
        lambda x: jnp.cumsum(x, 1),
        (floats(4, 6),),
        "[a b] -> [a b] where a=4 b=6, whole b",
    ),
    (
        "running maximum",
        "cummax",
        lambda x: lax.cummax(x, 0),
        (floats(4, 6),),
        "[a b] -> [a b] where a=4 b=6, whole a",
    ),
    (
        "running log-sum-exp",
        "cumlogsumexp",
        lambda x: lax.cumlogsumexp(x, 0),
        (floats(4, 6),),
        "[a b] -> [a b] where a=4 b=6, whole a",
    ),
    (
        "running product",
        "cumprod",
        lambda x: lax.cumprod(x, 0, reverse=True),
        (floats(4, 6),),
        "[a b] -> [a b] where a=4 b=6, whole a",
    ),
    (
        "sort",
        "sort",
        lambda x: jnp.sort(x, 0),
        (floats(4, 6),),
        "[a b] -> [a b] where a=4 b=6, whole a",
    ),
    (
        "sort with values",
        "sort",
        lambda x, y: lax.sort((x, y), dimension=1, num_keys=1),
        (floats(4, 6), floats(6, 4).T),
        "[a b] [a b] -> [a b] [a b] where a=4 b=6, whole b",
    ),
    (
        "top-k",
        "top_k",
        lambda x: lax.top_k(x, 2),
        (floats(4, 6),),
        "[a b] -> [a c] [a c] where a=4 b=6 c=2, whole b c",
    ),
    (
        "reverse",
        "rev",
        lambda x: lax.rev(x, (1,)),
        (floats(4, 6),),
        "[a b] -> [a b] where a=4 b=6, whole b",
    ),
    (
        "max-pooling",
        "reduce_window_max",
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (floats(2, 4, 6, 3),),
        "[a b*c d*e f] -> [a b d f] where a=2 b=2 c=2 d=3 e=2 f=3, sum c e",
        np.maximum,
        -np.inf,
    ),
    (
        "overlapping windows",
        "reduce_window_sum",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"),
        (floats(4, 6),),
        "[a b] -> [a c] where a=4 b=6 c=6, whole b c",
    ),
    (
        "gradient of max-pooling",
        "select_and_scatter_add",
        lambda g, x: jax.vjp(
            lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"), x
        )[1](g)[0],
        (floats(2, 3), floats(4, 6)),
        "[a c] [a*b c*d] -> [a*b c*d] where a=2 b=2 c=3 d=2, whole b d",
    ),
    (
        "broadcast",
        "broadcast_in_dim",
        lambda x: lax.broadcast_in_dim(x, (3, 4, 6), (1, 2)),
        (floats(4, 6),),
        "[b c] -> [a b c] where a=3 b=4 c=6",
    ),
    (
        "broadcast of size 1",
        "broadcast_in_dim",
        lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)),
        (floats(4, 1),),
        "[a 1] -> [a b] where a=4 b=6",
    ),
    (
        "split heads",
        "reshape",
        lambda x: x.reshape(4, 3, 2),
        (floats(4, 6),),
        "[a b*c] -> [a b c] where a=4 b=3 c=2",
    ),
    (
        "merge heads",
        "reshape",
        lambda x: x.reshape(4, 6),
        (floats(4, 3, 2),),
        "[a b c] -> [a b*c] where a=4 b=3 c=2",
    ),
    (
        "flatten",
        "reshape",
        lambda x: x.reshape(-1),
        (floats(4, 6),),
        "[a b] -> [a*b] where a=4 b=6",
    ),
    (
        "regroup",
        "reshape",
        lambda x: x.reshape(6, 4),
        (floats(2, 12),),
        "[a b*c] -> [a*b c] where a=2 b=3 c=4",
    ),
    (
        "no common factors",
        "reshape",
        lambda x: x.reshape(3, 2, 5),
        (floats(2, 3, 5),),
        "[a c e] -> [b d e] where a=2 b=3 c=3 d=2 e=5, whole a b c d",
    ),
    (
        "common major factor",
        "reshape",
        lambda x: x.reshape(6, 2),
        (floats(4, 3),),
        "[a*b d] -> [a*c e] where a=2 b=2 c=3 d=3 e=2, whole b c d e",
    ),
    (
        "size-1 dims",
        "reshape",
        lambda x: x.reshape(1, 4, 1, 6),
        (floats(4, 1, 6),),
        "[a 1 b] -> [1 a 1 b] where a=4 b=6",
    ),
    (
        "squeeze",
        "squeeze",
        lambda x: lax.squeeze(x, (1,)),
        (floats(4, 1, 6),),
        "[a 1 b] -> [a b] where a=4 b=6",
    ),
    (
        "transpose",
        "transpose",
        lambda x: x.transpose(2, 0, 1),
        (floats(4, 6, 2),),
        "[a b c] -> [c a b] where a=4 b=6 c=2",
    ),
    (
        "slice",
        "slice",
        lambda x: lax.slice(x, (0, 1), (4, 5)),
        (floats(4, 6),),
        "[a b] -> [a c] where a=4 b=6 c=4, whole b c",
    ),
    (
        "strided slice",
        "slice",
        lambda x: lax.slice(x, (0, 0), (4, 6), (2, 1)),
        (floats(4, 6),),
        "[a c] -> [b c] where a=4 b=2 c=6, whole a b",
    ),
    (
        "pad",
        "pad",
        lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0))),
        (floats(4, 6),),
        "[a b] [] -> [a c] where a=4 b=6 c=9, whole b c",
    ),
    (
        "negative padding of equal size",
        "pad",
        lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0))),
        (floats(4, 6),),
        "[a b] [] -> [a c] where a=4 b=6 c=6, whole b c",
    ),
    (
        "concatenate",
        "concatenate",
        lambda x, y: jnp.concatenate([x, y], 1),
        (floats(4, 6), floats(4, 2)),
        "[a c] [a d] -> [a b] where a=4 b=8 c=6 d=2, whole b c d",
    ),
    (
        "stack",
        "stack",
        lambda x, y: jnp.stack([x, y], 1),
        (floats(4, 6), floats(4, 6)),
        "[a c] [a c] -> [a b c] where a=4 b=2 c=6, whole b",
    ),
    (
        "unstack",
        "unstack",
        lambda x: jnp.unstack(x, axis=1),
        (floats(4, 3),),
        "[a b] -> [a] [a] [a] where a=4 b=3, whole b",
    ),
    (
        "split",
        "split",
        lambda x: jnp.split(x, 2, 1),
        (floats(4, 6),),
        "[a b] -> [a c] [a d] where a=4 b=6 c=3 d=3, whole b c d",
    ),
    (
        "tile",
        "tile",
        lambda x: jnp.tile(x, (1, 3)),
        (floats(4, 6),),
        "[a b] -> [a c*b] where a=4 b=6 c=3",
    ),
    (
        "embedding lookup",
        "gather",
        gathered((1, 6), offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,)),
        (floats(8, 6), ints(8, 2, 4, 1)),
        "[c d] [a b 1] -> [a b d] where a=2 b=4 c=8 d=6, sum c",
    ),
    (
        "two indexed dims",
        "gather",
        gathered((1, 1, 6), offset_dims=(1,), collapsed_slice_dims=(0, 1), start_index_map=(0, 1)),
        (floats(4, 2, 6), ints(2, 5, 2)),
        "[c d e] [a b] -> [a e] where a=5 b=2 c=4 d=2 e=6, sum c d, whole b",
    ),
    (
        "take along axis",
        "gather",
        gathered(
            (1, 1),
            offset_dims=(),
            collapsed_slice_dims=(1,),
            start_index_map=(1,),
            operand_batching_dims=(0,),
            start_indices_batching_dims=(0,),
        ),
        (floats(4, 6), ints(6, 4, 3, 1)),
        "[a c] [a b 1] -> [a b] where a=4 b=3 c=6, sum c",
    ),
    (
        "gather of windows",
        "gather",
        gathered((1, 2), offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1)),
        (floats(4, 6), ints(3, 5, 2)),
        "[c d] [a b] -> [a 1 e] where a=5 b=2 c=4 d=6 e=2, whole b c d e",
    ),
    (
        "scatter-add of rows",
        "scatter-add",
        scattered(lax.scatter_add, **ROWS),
        (jnp.zeros((8, 6)), ints(8, 4, 1), floats(4, 6)),
        "[b c] [a 1] [a c] -> [b c] where a=4 b=8 c=6, sum a",
    ),
    (
        "scatter-max of rows",
        "scatter-max",
        scattered(lax.scatter_max, **ROWS),
        (jnp.full((8, 6), -jnp.inf), ints(8, 4, 1), floats(4, 6)),
        "[b c] [a 1] [a c] -> [b c] where a=4 b=8 c=6, sum a",
        np.maximum,
        -np.inf,
    ),
    (
        "scatter-mul of rows",
        "scatter-mul",
        scattered(lax.scatter_mul, **ROWS),
        (jnp.ones((8, 6)), ints(8, 4, 1), floats(4, 6)),
        "[b c] [a 1] [a c] -> [b c] where a=4 b=8 c=6, sum a",
        np.multiply,
        1.0,
    ),
    (
        "scatter that overwrites",
        "scatter",
        scattered(lax.scatter, **ROWS),
        (floats(8, 6), ints(8, 4, 1), floats(4, 6)),
        "[b c] [a 1] [a c] -> [b c] where a=4 b=8 c=6, whole a",
    ),
    (
        "scatter-add with batching dims",
        "scatter-add",
        scattered(
            lax.scatter_add,
            update_window_dims=(),
            inserted_window_dims=(1,),
            scatter_dims_to_operand_dims=(1,),
            operand_batching_dims=(0,),
            scatter_indices_batching_dims=(0,),
        ),
        (jnp.zeros((4, 6)), ints(6, 4, 3, 1), floats(4, 3)),
        "[a c] [a b 1] [a b] -> [a c] where a=4 b=3 c=6, sum b",
    ),
    (
        "scatter-add of windows",
        "scatter-add",
        scattered(
            lax.scatter_add,
            update_window_dims=(1, 2),
            inserted_window_dims=(),
            scatter_dims_to_operand_dims=(1,),
        ),
        (jnp.zeros((4, 6)), ints(4, 3, 1), floats(3, 4, 2)),
        "[b c] [a 1] [a b d] -> [b c] where a=3 b=4 c=6 d=2, sum a, whole c d",
    ),
    (
        "dynamic slice",
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (0, i), (4, 3)),
        (floats(4, 6), jnp.asarray(2)),
        "[a b] [] [] -> [a c] where a=4 b=6 c=3, whole b c",
    ),
    (
        "dynamic update",
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)),
        (floats(4, 6), floats(4, 2), jnp.asarray(3)),
        "[a b] [a c] [] [] -> [a b] where a=4 b=6 c=2, whole b c",
    ),
    (
        "Cholesky",
        "cholesky",
        lambda x: lax.linalg.cholesky(x, symmetrize_input=False),
        (jnp.stack([2 * jnp.eye(3), jnp.eye(3) + 1]),),
        "[a b c] -> [a d e] where a=2 b=3 c=3 d=3 e=3, whole b c d e",
    ),
    (
        "Fourier transform",
        "fft",
        lambda x: jnp.fft.rfft(x),
        (floats(4, 6),),
        "[a b] -> [a c] where a=4 b=6 c=4, whole b c",
    ),
)

CASES: tuple[RuleCase, ...] = tuple(
    RuleCase(
        name=case[0],
        primitive=case[1],
        function=case[2],
        arguments=case[3],
        rule=case[4],
        **dict(zip(("combine", "neutral"), case[5:], strict=False)),
    )
    for case in _CASES
)
