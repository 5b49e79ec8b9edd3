"""The marked losses of a step, lowered: what takes the places of their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardlib.jax_types import Value
from shardlib.report import Finding

#: Operands of a call -> value, auxiliary results, gradients of the trained leaves.
InPlace = Callable[..., Sequence[Value]]


@dataclass(frozen=True, kw_only=True)
class LoweredLosses:
    """The marked losses of a step, lowered; none in a step that marks none.

    Attributes:
        calls: what takes the place of each, by the path of its call.
        findings: what the user should know about them.
    """

    calls: Mapping[str, InPlace] = field(default_factory=dict[str, InPlace])
    findings: tuple[Finding, ...] = ()
