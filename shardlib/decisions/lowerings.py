"""Combinations of decisions that cannot be lowered: one row for each, and the only place that says
so.

The planner leaves such a combination out of its space, a pin of it is a `PinError` with the reason
of the row, and lowering refuses a plan that has it. **Whoever builds the lowering of a combination
deletes its row**; then `plan`, `compile`, `verify` and pins all accept it.

>>> [row.combination for row in matching_rows(frozenset({"routed", "reduction dtype"}))]
['a reduction_dtype of gradients where tokens are routed to experts']
>>> matching_rows(frozenset({"routed", "stages"}))
[]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardlib.decisions.pins import Pins
from shardlib.decisions.table import Decisions, lowered_dtypes
from shardlib.errors import PinError, raise_all
from shardlib.formats import FORMATS
from shardlib.layout import MeshShape
from shardlib.schedules import lowered as schedule_lowered


@dataclass(frozen=True, kw_only=True)
class Unsupported:
    """A combination that cannot be lowered.

    Attributes:
        facts: facts (see `facts_of_decisions`) that a plan must all have to be affected.
        combination: the combination in words.
        hint: what to pin instead.
        vendor: vendor of the affected chips; "" for all.
    """

    facts: frozenset[str]
    combination: str
    hint: str
    vendor: str = ""


#: Combinations without a lowering; whoever builds one deletes its row.
UNSUPPORTED: tuple[Unsupported, ...] = (
    # libtpu 0.0.42 refuses the slices of stage activations in host memory: "UNIMPLEMENTED: Async
    # slice only supports slicing in 1 dimension".
    Unsupported(
        facts=frozenset({"stages", "one program", "activations on host"}),
        combination="activations in host memory beside stages in one program on TPUs",
        hint="pipeline='programs', or offload without activations",
        vendor="google",
    ),
    Unsupported(  # expert gradients are reduced where they are computed, in their own dtype
        facts=frozenset({"routed", "reduction dtype"}),
        combination="a reduction_dtype of gradients where tokens are routed to experts",
        hint="no reduction_dtype, or experts='none'",
    ),
    Unsupported(  # 8 bits need scales stored alongside, 64 bits need JAX's x64 mode
        facts=frozenset({"dtype without lowering"}),
        combination=f"a dtype other than {', '.join(lowered_dtypes(''))} (of matmuls also"
        f" {', '.join(d for d in lowered_dtypes('matmul_dtype') if not FORMATS[d].stored)})",
        hint="one of these dtypes",
    ),
    Unsupported(
        facts=frozenset({"schedule without lowering"}),
        combination="a pipeline schedule that no program is made of",
        hint="another schedule",
    ),
)


def facts_of_decisions(decisions: Decisions) -> frozenset[str]:
    """The facts of a plan that `UNSUPPORTED` test."""
    mesh, dtypes = decisions.mesh, decisions.dtypes
    return frozenset(
        name
        for name, true in {
            "stages": mesh["stage"] > 1,
            "one program": decisions.pipeline != "programs",
            "routed": decisions.experts != "none",
            "activations on host": "activations" in decisions.offload,
            "reduction dtype": "reduction_dtype" in dict(dtypes),
            "dtype without lowering": any(not has_lowering(*pair) for pair in dtypes),
            "schedule without lowering": not schedule_lowered(decisions.schedule),
        }.items()
        if true
    )


def facts_of_pins(pins: Pins) -> frozenset[str]:
    """The facts that are true of all plans under some pins."""
    sizes = dict(pins.mesh if pins.mesh is not None else pins.axes)
    return frozenset(
        name
        for name, true in {
            "stages": pins.always_staged,
            "one program": pins.pipeline != "programs",
            "routed": pins.experts not in (None, "none") or sizes.get("expert", 1) > 1,
            "activations on host": "activations" in (pins.offload or ()),
            "reduction dtype": "reduction_dtype" in dict(pins.dtypes),
            "dtype without lowering": any(
                not has_lowering(key, dtype)
                for key, dtypes in (*((w, (d,)) for w, d in pins.dtypes), *pins.allow)
                for dtype in dtypes
            ),
            "schedule without lowering": pins.schedule is not None
            and not schedule_lowered(pins.schedule),
        }.items()
        if true
    )


def has_lowering(key: str, dtype: str) -> bool:
    """True if programs support a dtype for `key`, such as "moment_dtype"."""
    return dtype in lowered_dtypes(key)


def unsupported_on(vendor: str) -> tuple[Unsupported, ...]:
    """The rows that apply to chips of a vendor."""
    return tuple(row for row in UNSUPPORTED if row.vendor in ("", vendor))


def matching_rows(
    facts: Iterable[str], unsupported: Sequence[Unsupported] = UNSUPPORTED
) -> list[Unsupported]:
    """The rows whose facts are all present."""
    all_facts = frozenset(facts)
    return [row for row in unsupported if row.facts <= all_facts]


def lowerable(
    facts: frozenset[str],
    varying: Mapping[str, NDArray[np.bool_]],
    unsupported: Sequence[Unsupported] = UNSUPPORTED,
) -> NDArray[np.bool_]:
    """Mask of the candidates that can be lowered.

    >>> on_host = frozenset({"one program", "activations on host"})
    >>> lowerable(on_host, {"stages": np.array([False, True])})
    array([ True, False])

    Args:
        facts: facts of all candidates.
        varying: by fact, a mask of the candidates that have it, arrays [candidates]; at least one.
    """
    mask = np.ones(len(next(iter(varying.values()))), dtype=bool)
    for row in unsupported:
        others = row.facts - facts
        if others <= varying.keys():
            mask &= ~np.logical_and.reduce([np.ones_like(mask), *(varying[o] for o in others)])
    return mask


def facts_of_mesh(
    mesh: Mapping[str, NDArray[np.int64]] | MeshShape,
) -> dict[str, NDArray[np.bool_]]:
    """The facts that depend on mesh axis sizes, by candidate."""
    return {"stages": np.atleast_1d(mesh["stage"]) > 1}


def require(
    facts: frozenset[str], what: str, unsupported: Sequence[Unsupported] = UNSUPPORTED
) -> None:
    """Raises if the facts cannot be lowered."""
    rows = matching_rows(facts, unsupported)
    if rows:
        raise_all(
            PinError,
            what,
            [row.combination for row in rows],
            hint="; ".join(dict.fromkeys(row.hint for row in rows)),
        )
