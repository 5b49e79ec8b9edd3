"""One row per JAX primitive: its factor rule, its effect on the rows of the batch, and the operands
in which it is linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.tracing import row_rules as rows
from shardlib.tracing import rules
from shardlib.tracing.row_rules import Rule, along, axis, last
from shardlib.tracing.rules import Describe

#: Jointly linear in all operands.
ALL = slice(None)
#: A product: linear in each operand, the others constant.
EACH = "each"


@dataclass(frozen=True, kw_only=True)
class Primitive:
    """A primitive of JAX.

    Attributes:
        factors: its factor rule; None if it has none: its equations are opaque, and a Finding says
            so.
        rows: the rule for the kinds of its results (`shardlib.tracing.row_kinds`); None if it has
            none: results that read rows are mixed.
        keys: whether it reads random keys; `rows` is then applied before whole-batch values are
            passed in as constants.
        linear: the operands in which it is jointly linear, the others constant, or `EACH`; None if
            it is not linear.
    """

    factors: Describe | None = None
    rows: Rule | None = None
    keys: bool = False
    linear: slice | str | None = None


def _alike(names: tuple[str, ...], primitive: Primitive) -> Mapping[str, Primitive]:
    return dict.fromkeys(names, primitive)


_FIRST, _FIRST_TWO = slice(0, 1), slice(0, 2)

#: Of (array, positions, updates): the array and the updates.
_WRITTEN = slice(0, 3, 2)

TABLE: Mapping[str, Primitive] = {
    # element-wise
    **_alike(rules.ARITHMETIC, Primitive(factors=rules.arithmetic, rows=rows.elementwise)),
    **_alike(
        ("add", "add_any", "complex", "conj", "imag", "neg", "real", "sub"),
        Primitive(factors=rules.arithmetic, rows=rows.elementwise, linear=ALL),
    ),
    "mul": Primitive(factors=rules.arithmetic, rows=rows.elementwise, linear=EACH),
    "div": Primitive(factors=rules.arithmetic, rows=rows.elementwise, linear=_FIRST),
    "select_n": Primitive(factors=rules.arithmetic, rows=rows.elementwise, linear=slice(1, None)),
    **_alike(rules.COPIES, Primitive(factors=rules.identity, rows=rows.elementwise, linear=ALL)),
    "bitcast_convert_type": Primitive(factors=rules.same_bits, rows=rows.elementwise),
    "psum": Primitive(linear=ALL),
    # contractions
    "dot_general": Primitive(factors=rules.dot_general, rows=rows.dot_general, linear=EACH),
    "ragged_dot_general": Primitive(factors=rules.ragged_dot_general, linear=EACH),
    "conv_general_dilated": Primitive(
        factors=rules.conv_general_dilated, rows=rows.convolution, linear=EACH
    ),
    # reductions, windows and sorts
    "reduce_sum": Primitive(factors=rules.reduction, rows=rows.reduce_sum, linear=ALL),
    **_alike(
        ("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_xor"),
        Primitive(factors=rules.reduction, rows=rows.reduce_other),
    ),
    **_alike(
        ("argmax", "argmin"), Primitive(factors=rules.argument_reduction, rows=rows.reduce_other)
    ),
    "reduce": Primitive(factors=rules.generic_reduction),
    "cumsum": Primitive(factors=rules.cumulative, rows=along(axis, linear=True), linear=ALL),
    **_alike(
        ("cumlogsumexp", "cummax", "cummin", "cumprod"),
        Primitive(factors=rules.cumulative, rows=along(axis, linear=False)),
    ),
    "reduce_window_sum": Primitive(factors=rules.window_reduction, rows=rows.window, linear=ALL),
    **_alike(
        ("reduce_window", "reduce_window_max", "reduce_window_min"),
        Primitive(factors=rules.window_reduction, rows=rows.window),
    ),
    "select_and_gather_add": Primitive(
        factors=rules.select_and_gather_add, rows=rows.window, linear=_FIRST
    ),
    "select_and_scatter_add": Primitive(
        factors=rules.select_and_scatter_add, rows=rows.window, linear=_FIRST
    ),
    "select_and_scatter": Primitive(factors=rules.select_and_scatter_add),
    "sort": Primitive(
        factors=rules.sort, rows=along(lambda step: [step.params["dimension"]], linear=False)
    ),
    **_alike(
        ("approx_top_k", "top_k"), Primitive(factors=rules.top_k, rows=along(last, linear=False))
    ),
    # movement
    "broadcast_in_dim": Primitive(
        factors=rules.broadcast_in_dim, rows=rows.broadcast_in_dim, linear=ALL
    ),
    "reshape": Primitive(factors=rules.reshape, rows=rows.reshape, linear=ALL),
    "squeeze": Primitive(factors=rules.squeeze, rows=rows.squeeze, linear=ALL),
    "transpose": Primitive(factors=rules.transpose, rows=rows.transpose, linear=ALL),
    "rev": Primitive(
        factors=rules.reverse,
        rows=along(lambda step: list(step.params["dimensions"]), linear=True),
        linear=ALL,
    ),
    "slice": Primitive(factors=rules.slice_, rows=rows.slice_, linear=ALL),
    "pad": Primitive(factors=rules.pad, rows=rows.pad, linear=ALL),
    "concatenate": Primitive(factors=rules.concatenate, rows=rows.concatenate, linear=ALL),
    "split": Primitive(factors=rules.split, rows=rows.split, linear=ALL),
    "stack": Primitive(factors=rules.stack, rows=rows.stack, linear=ALL),
    "unstack": Primitive(factors=rules.unstack, rows=rows.unstack, linear=ALL),
    "tile": Primitive(factors=rules.tile, rows=rows.tile),
    **_alike(
        ("empty2", "iota", "iota_2x32_shape", "platform_index"), Primitive(factors=rules.generated)
    ),
    # lookups
    "gather": Primitive(factors=rules.gather, rows=rows.gather, linear=_FIRST),
    **_alike(
        ("scatter", "scatter-add"),
        Primitive(factors=rules.scatter, rows=rows.scatter, linear=_WRITTEN),
    ),
    **_alike(
        ("scatter-max", "scatter-min", "scatter-mul"),
        Primitive(factors=rules.scatter, rows=rows.scatter),
    ),
    "scatter-sub": Primitive(factors=rules.scatter),
    "dynamic_slice": Primitive(factors=rules.dynamic_slice, rows=rows.dynamic_slice, linear=_FIRST),
    "dynamic_update_slice": Primitive(
        factors=rules.dynamic_update_slice, rows=rows.dynamic_update_slice, linear=_FIRST_TWO
    ),
    # random numbers
    **_alike(
        ("random_bits", "random_split"), Primitive(factors=rules.drawn, rows=rows.shaped, keys=True)
    ),
    **_alike(
        ("random_unwrap", "random_wrap"),
        Primitive(factors=rules.same_bits, rows=rows.alike, keys=True),
    ),
    **_alike(
        ("random_fold_in", "random_seed", "threefry2x32"),
        Primitive(factors=rules.arithmetic, rows=rows.alike, keys=True),
    ),
    "random_gamma": Primitive(factors=rules.arithmetic, rows=rows.gamma, keys=True),
    "random_clone": Primitive(factors=rules.identity, rows=rows.alike, keys=True),
    **_alike(("rng_bit_generator", "rng_uniform"), Primitive(factors=rules.sequential)),
    # linear algebra
    **_alike(
        (
            "cholesky",
            "eig",
            "eigh",
            "geqrf",
            "householder_product",
            "lu",
            "lu_pivots_to_permutation",
            "qr",
            "schur",
            "svd",
            "tridiagonal_solve",
        ),
        Primitive(factors=rules.matrices, rows=rows.stacked),
    ),
    **_alike(
        ("cholesky_update", "geqp3", "hessenberg", "symmetric_product", "tridiagonal"),
        Primitive(rows=rows.stacked),
    ),
    "triangular_solve": Primitive(factors=rules.matrices, rows=rows.stacked, linear=slice(1, 2)),
    "custom_linear_solve": Primitive(factors=rules.matrices),
    "fft": Primitive(
        factors=rules.matrices,
        rows=along(
            lambda step: list(
                range(
                    len(step.operands[0][0]) - len(step.params["fft_lengths"]),
                    len(step.operands[0][0]),
                )
            ),
            linear=True,
        ),
        linear=ALL,
    ),
}
