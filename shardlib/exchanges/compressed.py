"""Islands that exchange compressed gradients in every step."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

from shardlib.errors import PinError, raise_all
from shardlib.exchanges.checks import whole
from shardlib.exchanges.compressors import COMPRESSORS, Compressor, PowerSGD, Quantised, Sign, TopK
from shardlib.exchanges.shown import Shown
from shardlib.exchanges.spelling import text
from shardlib.untrusted.json_types import JsonObject
from shardlib.untrusted.shown import shown

#: What islands send unless something else is said.
RANK_FOUR = PowerSGD(rank=4)


@dataclass(frozen=True, kw_only=True)
class Compressed(Shown):
    """Islands exchange their gradients in every step, compressed, and all update by their mean:
    parameters stay alike on all islands, as with one optimizer of the whole batch.

    Attributes:
        islands: their number, at least 2; they divide the machine and the rows of the batch.
        by: how gradients are compressed.

    Raises:
        PinError: values out of range; all of them are listed.
    """

    kind: ClassVar[str] = "compressed"
    places: ClassVar[tuple[str, ...]] = ("islands", "by")
    keeps: ClassVar[bool] = False
    every: ClassVar[int] = 1

    islands: int = 2
    by: Compressor = RANK_FOUR

    def __post_init__(self) -> None:
        failures = whole("islands", self.islands, 2)
        if not isinstance(self.by, PowerSGD | TopK | Quantised | Sign):
            failures.append(
                f"by is {shown(self.by)}; it is one of shardlib.PowerSGD(rank=4), shardlib.TopK(),"
                " shardlib.Quantised('int8'), shardlib.Sign()"
            )
        elif isinstance(self.by, TopK) and not failures:
            sent = 2 * self.islands * self.by.density
            if sent >= 1 and self.by.density < 1:
                failures.append(
                    f"density is {self.by.density:g}; {self.islands} islands that send numbers and"
                    f" their places send more than all numbers from {1 / (2 * self.islands):g} on"
                )
        if failures:
            raise_all(PinError, "exchange=Compressed is not usable", failures)

    @property
    def meetings(self) -> int:
        """Number of exchanges that differ: one for each density of a warm-up."""
        return self.by.stages

    @property
    def period(self) -> int:
        """Steps between two exchanges."""
        return 1

    def due(self, step: int) -> int:
        """Which exchange a step has.

        Args:
            step: 1 for the first.
        """
        return self.by.stage(step) if isinstance(self.by, TopK) else 0

    @classmethod
    def read(cls, settings: Mapping[str, object]) -> Compressed:
        """The exchange of settings of its own and of its compressor.

        >>> print(Compressed.read({"islands": 4, "by": "topk", "density": 0.01}))
        compressed:4:topk:density=0.01

        Args:
            settings: as pins say them.

        Raises:
            PinError: there is no such compressor, or it has no such settings.
        """
        options = dict(settings)
        by = options.pop("by", PowerSGD.kind)
        own_settings = {"islands": options.pop("islands")} if "islands" in options else {}
        if isinstance(by, Mapping):
            options |= dict(cast("Mapping[str, Any]", by))
            by = options.pop("kind", None)
        if isinstance(by, str):
            by = _compressor(by, options)
        elif options:
            raise PinError(f"compressed has islands and by, and not {', '.join(sorted(options))}")
        return cls(**own_settings, by=by)  # type: ignore[arg-type]  (checked when it is made)

    def to_json(self) -> JsonObject:
        """The exchange as plain data."""
        return {"kind": self.kind, "islands": self.islands, "by": self.by.to_json()}

    def __str__(self) -> str:
        """As the command line spells it, with what differs from the defaults."""
        words = [self.kind, str(self.islands), self.by.kind]
        for field in fields(self.by):
            value = getattr(self.by, field.name)
            if value != field.default:
                words.append(f"{field.name}={text(value)}")
        return ":".join(words)


def _compressor(kind: str, settings: Mapping[str, Any]) -> Compressor:
    if kind not in COMPRESSORS:
        near = difflib.get_close_matches(kind, COMPRESSORS, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        if kind in ("int8", "int4"):
            meant = f"; did you mean 'quantised{':dtype=int4' if kind == 'int4' else ''}'?"
        raise PinError(f"by is {shown(kind)}; it is one of {', '.join(COMPRESSORS)}{meant}")
    form = COMPRESSORS[kind]
    names = [field.name for field in fields(form)]
    if strange := sorted(str(name) for name in settings if name not in names):
        has = f"has {', '.join(names)}" if names else "has no settings"
        raise PinError(f"by={kind} {has}, and not {', '.join(strange)}")
    return form(**settings)
