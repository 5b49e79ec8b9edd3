"""Combinations of decisions that cannot be lowered: one row for each, and the only place that says
so.

The planner leaves such a combination out of its space, a pin of it is a `PinError` with the reason
of the row, and lowering refuses a plan that has it. **Whoever builds the lowering of a combination
deletes its row**; then `plan`, `compile`, `verify` and pins all accept it.

>>> [gap.says for gap in broken(frozenset({"routed", "reduction dtype"}))]
['a reduction_dtype of gradients where tokens are routed to experts']
>>> broken(frozenset({"routed", "stages"}))
[]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardlib.decisions.pins import Pins
from shardlib.decisions.table import LOWERED_DTYPES, LOWERED_PRODUCTS, Decisions, lowered_dtypes
from shardlib.errors import PinError, raise_all
from shardlib.layout import MeshShape
from shardlib.schedules import lowered as schedule_lowered


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A combination that cannot be lowered.

    Attributes:
        facts: facts (see `facts`) that a plan must all have to be affected.
        says: the combination in words.
        hint: what to pin instead.
        vendor: vendor of the affected chips; "" for all.
    """

    facts: frozenset[str]
    says: str
    hint: str
    vendor: str = ""


#: Combinations without a lowering; whoever builds one deletes its row.
GAPS: tuple[Gap, ...] = (
    # libtpu 0.0.42 refuses the slices of stage activations in host memory: "UNIMPLEMENTED: Async
    # slice only supports slicing in 1 dimension".
    Gap(
        facts=frozenset({"stages", "one program", "activations on host"}),
        says="activations in host memory beside stages in one program on TPUs",
        hint="pipeline='programs', or offload without activations",
        vendor="google",
    ),
    Gap(  # expert gradients are reduced where they are computed, in their own dtype
        facts=frozenset({"routed", "reduction dtype"}),
        says="a reduction_dtype of gradients where tokens are routed to experts",
        hint="no reduction_dtype, or experts='none'",
    ),
    Gap(  # 8 bits need scales stored alongside, 64 bits need JAX's x64 mode
        facts=frozenset({"dtype without lowering"}),
        says=f"a dtype other than {', '.join(LOWERED_DTYPES)} (of products also"
        f" {', '.join(LOWERED_PRODUCTS)})",
        hint="one of these dtypes",
    ),
    Gap(
        facts=frozenset({"schedule without lowering"}),
        says="a pipeline schedule that no program is made of",
        hint="another schedule",
    ),
)


def facts(decisions: Decisions) -> frozenset[str]:
    """The facts of a plan that `GAPS` test."""
    one = decisions
    return frozenset(
        name
        for name, true in {
            "stages": one.mesh["stage"] > 1,
            "one program": one.pipeline != "programs",
            "routed": one.experts != "none",
            "activations on host": "activations" in one.offload,
            "reduction dtype": "reduction_dtype" in dict(one.dtypes),
            "dtype without lowering": any(not has_lowering(*pair) for pair in one.dtypes),
            "schedule without lowering": not schedule_lowered(one.schedule),
        }.items()
        if true
    )


def facts_of_pins(pins: Pins) -> frozenset[str]:
    """The facts that are true of all plans under some pins."""
    sizes = dict(pins.mesh if pins.mesh is not None else pins.axes)
    return frozenset(
        name
        for name, true in {
            "stages": pins.staged,
            "one program": pins.pipeline != "programs",
            "routed": pins.experts not in (None, "none") or sizes.get("expert", 1) > 1,
            "activations on host": "activations" in (pins.offload or ()),
            "reduction dtype": "reduction_dtype" in dict(pins.dtypes),
            "dtype without lowering": any(
                not has_lowering(word, dtype)
                for word, dtypes in (*((w, (d,)) for w, d in pins.dtypes), *pins.allow)
                for dtype in dtypes
            ),
            "schedule without lowering": pins.schedule is not None
            and not schedule_lowered(pins.schedule),
        }.items()
        if true
    )


def has_lowering(word: str, dtype: str) -> bool:
    """True if programs support a dtype for `word`, such as "moment_dtype"."""
    return dtype in lowered_dtypes(word)


def on_chips(vendor: str) -> tuple[Gap, ...]:
    """The rows that apply to chips of a vendor."""
    return tuple(gap for gap in GAPS if gap.vendor in ("", vendor))


def broken(facts: Iterable[str], gaps: Sequence[Gap] = GAPS) -> list[Gap]:
    """The rows whose facts are all present."""
    all_facts = frozenset(facts)
    return [gap for gap in gaps if gap.facts <= all_facts]


def lowered(
    facts: frozenset[str], varying: Mapping[str, NDArray[np.bool_]], gaps: Sequence[Gap] = GAPS
) -> NDArray[np.bool_]:
    """Mask of the candidates that can be lowered.

    >>> on_host = frozenset({"one program", "activations on host"})
    >>> lowered(on_host, {"stages": np.array([False, True])})
    array([ True, False])

    Args:
        facts: facts of all candidates.
        varying: by fact, a mask of the candidates that have it, arrays [candidates]; at least one.
    """
    fine = np.ones(len(next(iter(varying.values()))), dtype=bool)
    for gap in gaps:
        others = gap.facts - facts
        if others <= varying.keys():
            fine &= ~np.logical_and.reduce([np.ones_like(fine), *(varying[o] for o in others)])
    return fine


def along(mesh: Mapping[str, NDArray[np.int64]] | MeshShape) -> dict[str, NDArray[np.bool_]]:
    """The facts that depend on mesh axis sizes, by candidate."""
    return {"stages": np.atleast_1d(mesh["stage"]) > 1}


def require(facts: frozenset[str], what: str, gaps: Sequence[Gap] = GAPS) -> None:
    """Raises if the facts cannot be lowered."""
    rows = broken(facts, gaps)
    if rows:
        raise_all(
            PinError,
            what,
            [gap.says for gap in rows],
            hint="; ".join(dict.fromkeys(gap.hint for gap in rows)),
        )
