"""Shardings as text, and parameters folded into rows.

Shardings are written as the scaling book writes them (jax-ml/scaling-book, `sharding.md`):
[embed_fsdp, mlp_tensor] is a matrix whose dim "embed" is sharded over the mesh axis "fsdp" and
whose dim "mlp" is sharded over "tensor". A dim without a name shows its size.

>>> notation(("embed", "mlp"), (4096, 16384), Layout(("data", "fsdp"), "tensor"))
'[embed_data·fsdp, mlp_tensor]'
>>> notation((None, "mlp"), (3, 64), Layout((), ()))
'[3, mlp]'
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardlib.axes import LogicalAxes
from shardlib.graph.graph import ITEMSIZE
from shardlib.layout import Layout
from shardlib.planning.plan import ParameterLayout, Plan
from shardlib.planning.units.quantity import bytes_text, clip, parameters_text
from shardlib.planning.units.tables import aligned, and_more

#: Rows that a text lists.
MOST_PARAMETERS = 24


def notation(names: LogicalAxes, shape: Sequence[int], layout: Layout) -> str:
    """A layout as the scaling book writes it: [I_X, J_Y].

    Args:
        names: colour per dim; None where it has none.
    """
    dims = (
        f"{name or size}{'_' + '·'.join(axes) if axes else ''}"
        for name, size, axes in zip(names, shape, layout, strict=True)
    )
    return f"[{', '.join(dims)}]"


@dataclass(frozen=True, kw_only=True)
class ParameterRow:
    """Parameters that differ only in the number of their layer.

    Attributes:
        pattern: tree path with `*` for layer numbers.
        count: how many parameters.
        bytes: bytes of all of them, uncut.
        example: one of them.
    """

    pattern: str
    count: int
    bytes: int
    example: ParameterLayout

    @property
    def rest(self) -> str:
        """The stored layout in the scaling book's notation."""
        return notation(self.example.colours, self.example.shape, self.example.rest)

    @property
    def compute(self) -> str:
        """The layout in compute in the scaling book's notation."""
        return notation(self.example.colours, self.example.shape, self.example.compute)


def parameter_rows(parameters: Iterable[ParameterLayout]) -> list[ParameterRow]:
    """Parameters folded by pattern, in the order of their first appearance."""
    groups: dict[tuple[object, ...], list[ParameterLayout]] = {}
    for parameter in parameters:
        pattern = ".".join("*" if part.isdigit() else part for part in parameter.path.split("."))
        key = (
            pattern,
            parameter.shape,
            parameter.dtype,
            parameter.colours,
            parameter.compute,
            parameter.rest,
            parameter.gradient,
            parameter.state,
            parameter.role,
        )
        groups.setdefault(key, []).append(parameter)
    return [
        ParameterRow(
            pattern=str(key[0]) if len(group) > 1 else group[0].path,
            count=len(group),
            example=group[0],
            bytes=sum(math.prod(p.shape) * ITEMSIZE.get(p.dtype, 4) for p in group),
        )
        for key, group in groups.items()
    ]


def _compute_text(row: ParameterRow) -> str:
    """The layout in compute, told by what happens to the stored one where that says it all."""
    rest, compute = row.example.rest, row.example.compute
    gathered = [axis for dim in rest for axis in dim if axis not in compute.axes]
    if rest == compute:
        return "same"
    if compute == Layout(*(tuple(axis for axis in dim if axis not in gathered) for dim in rest)):
        return f"gathers {'·'.join(gathered)}"
    return row.compute


def parameters_section(plan: Plan) -> str:
    """The parameters of a plan, the largest kinds of them; empty without any."""
    rows = parameter_rows(plan.parameters)
    if not rows:
        return ""
    elements = sum(math.prod(p.shape) for p in plan.parameters)
    shown = sorted(sorted(range(len(rows)), key=lambda i: -rows[i].bytes)[:MOST_PARAMETERS])
    table = [
        ("parameter", "bytes", "stored", "in compute"),
        *(
            (
                clip(row.pattern, 32)
                + (f" x{row.count}" if row.count > 1 else "")
                + ("" if row.example.trained else f" ({row.example.role})"),
                bytes_text(row.bytes),
                row.rest,
                _compute_text(row),
            )
            for row in (rows[i] for i in shown)
        ),
    ]
    frozen = sum(math.prod(p.shape) for p in plan.parameters if not p.trained)
    head = (
        f"Parameters: {parameters_text(elements)}, {bytes_text(sum(row.bytes for row in rows))} in"
        f" all{f'; {parameters_text(frozen)} are frozen' if frozen else ''}"
    )
    return "\n".join(
        [
            head,
            *aligned(table, right={1}),
            *and_more(len(rows) - MOST_PARAMETERS, "smaller kinds of parameter"),
        ]
    )
