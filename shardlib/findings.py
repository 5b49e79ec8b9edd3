"""Findings, and the report that collects them.

A request that cannot be honoured is an error or a `Finding`, never a silent change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ParamSpec

from shardlib.compact import plain_fields

P = ParamSpec("P")

SEVERITIES: tuple[str, ...] = ("info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing worth telling the user.

    Attributes:
        code: stable kebab-case name of the kind of finding, e.g. "opaque-primitive".
        severity: "info", "warning" or "error".
        message: one or two sentences.
        where: tree path, op or mesh axis it is about.
        hint: what to try; may be empty.
    """

    code: str
    severity: str
    message: str
    where: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity

    def to_json(self) -> dict[str, str]:
        """The finding as plain data."""
        return plain_fields(self)

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        hint = f" Try: {self.hint}" if self.hint else ""
        return f"{self.severity}: {self.message}{where}{hint}"


def diagnostic(check: Callable[P, Iterable[Finding]]) -> Callable[P, tuple[Finding, ...]]:
    """A function whose findings are told and whose failure changes nothing else: whatever it raises
    is a finding, too.

    Every function of planning and lowering that returns findings is one (`tests/test_house.py`),
    but for those that refuse what a user gave, which say so under "Raises".
    """

    @functools.wraps(check)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> tuple[Finding, ...]:
        try:
            return tuple(check(*args, **kwargs))
        except Exception as error:
            return (
                Finding(
                    code="diagnostic-failed",
                    severity="warning",
                    where=check.__qualname__,
                    message=(
                        f"the diagnostic {check.__qualname__} failed and says nothing; plan and"
                        f" program are not affected: {type(error).__name__}: {error}"
                    ),
                    hint="report it: a diagnostic that fails is a defect of shardlib",
                ),
            )

    return guarded
