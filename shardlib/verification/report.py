"""What came out of a verification: what was promised, what the compiler made of it, and what
differs.

A `Verification` is a frozen value; its JSON can be kept as the baseline that later ones are held
against.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from shardlib.axes import ISLAND
from shardlib.collective import Collective
from shardlib.errors import VerificationError
from shardlib.exchanges.values import DiLoCo, Exchange
from shardlib.planning.plan import Plan, plan_to_data
from shardlib.planning.units.cards import card, short
from shardlib.planning.units.quantity import bytes_text, percent_text, seconds_text
from shardlib.report import Finding, diagnostic
from shardlib.untrusted import construct, parse_json, shown
from shardlib.untrusted.json_types import JsonObject
from shardlib.verification.compiled_step import CompiledStep

FORMAT = 1

#: (kind, mesh axes).
Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The verdict of a real compiler on a plan.

    Attributes:
        plan: the plan; its estimate is what was promised.
        compiled: what the compiler made of it; None where it made nothing, and a finding says why.
        compile_seconds: wall time of compiling.
        versions: package -> version of the compiler.
        findings: what differs, the worst first.
    """

    plan: Plan
    compiled: CompiledStep | None
    compile_seconds: float
    versions: Mapping[str, str]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no finding of severity "error"."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> str:
        """The verification as JSON text."""
        return json.dumps(verification_to_data(self), indent=1)

    def __str__(self) -> str:
        return verification_text(self)

    def __repr__(self) -> str:
        findings = [finding for finding in self.findings if finding.severity != "info"]
        return short(
            "Verification",
            f"{self.plan.model} on {self.plan.topology}: {self.plan.mesh}",
            "verified" if self.ok else "refuted",
            f"{len(findings)} findings" if findings else "",
        )

    def _repr_html_(self) -> str:
        text = verification_text(self)
        title, _, body = text.partition("\n")
        return card(
            title,
            [str(finding) for finding in self.findings if finding.severity != "info"],
            text=body,
        )


def verification_to_data(verification: Verification) -> JsonObject:
    """The verification as plain data; "predicted" is the plan's estimate, "compiled" is null where
    the compiler failed.

    Returns:
        "format", "ok", "plan", "predicted", "compiled", "compile_seconds", "versions" and
    """
    return {
        "format": FORMAT,
        "ok": verification.ok,
        "plan": plan_to_data(verification.plan),
        "predicted": verification.plan.estimate.to_json(),
        "compiled": verification.compiled.to_json() if verification.compiled else None,
        "compile_seconds": verification.compile_seconds,
        "versions": dict(verification.versions),
        "findings": [finding.to_json() for finding in verification.findings],
    }


def totals(collectives: tuple[Collective, ...]) -> dict[Key, int]:
    """Result bytes of a step by kind and mesh axes."""
    sums: dict[Key, int] = {}
    for c in collectives:
        sums[c.kind, c.axes] = sums.get((c.kind, c.axes), 0) + c.total_bytes
    return sums


def counts(collectives: tuple[Collective, ...]) -> dict[Key, int]:
    """Executions in a step by kind and mesh axes."""
    sums: dict[Key, int] = {}
    for c in collectives:
        sums[c.kind, c.axes] = sums.get((c.kind, c.axes), 0) + c.count
    return sums


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    """What of a report is compared."""

    collectives: tuple[Collective, ...]


def read_baseline(text: str | bytes, source: str) -> tuple[Collective, ...]:
    """The compiled collectives of an earlier verification."""
    again = "make it with `shardlib verify ... --json > report.json`"
    data = parse_json(text, source, VerificationError)
    if not isinstance(data, Mapping) or not isinstance(
        cast("Mapping[str, Any]", data).get("compiled"), Mapping
    ):
        raise VerificationError(
            f"{source} holds no report of a verification that compiled\nTry: {again}"
        )
    table = cast("Mapping[str, Any]", data)
    if table.get("format") != FORMAT:
        raise VerificationError(
            f"{source} is a report of format {shown(table.get('format'))}, this version reads"
            f" {FORMAT}\nTry: make it again"
        )
    return construct(
        _Compiled,
        table["compiled"],
        f"the report {source}",
        VerificationError,
        least=0.0,
        hint=again,
    ).collectives


@diagnostic
def growth(before: tuple[Collective, ...], after: tuple[Collective, ...]) -> tuple[Finding, ...]:
    """One error for each kind and axes with more bytes or executions in `after` than `before`."""
    old_bytes, old_counts, new_counts = totals(before), counts(before), counts(after)
    findings: list[Finding] = []
    for key, size in totals(after).items():
        was, was_count, count = old_bytes.get(key, 0), old_counts.get(key, 0), new_counts[key]
        if size > was or count > was_count:
            findings.append(
                Finding(
                    code="collective-grew",
                    severity="error",
                    where=key_text(key),
                    message=(
                        f"{key_text(key)} grew from {was_count} executions and {bytes_text(was)} a"
                        f" step to {count} and {bytes_text(size)}."
                    ),
                )
            )
    return tuple(findings)


def key_text(key: Key) -> str:
    """A kind and its axes in words."""
    return f"{key[0]} over {'·'.join(key[1]) or 'unknown axes'}"


def verification_text(verification: Verification) -> str:
    """The verification as text for people: predicted beside compiled, then findings."""
    plan = verification.plan
    lines = [
        f"{plan.model} on {plan.topology}, {plan.mesh}:"
        f" {'verified' if verification.ok else 'REFUTED'}",
        "",
    ]
    if verification.compiled:
        lines += (
            _memory_lines(verification)
            + _time_lines(verification)
            + _collective_lines(verification)
        )
    elif verification.findings:
        lines += ["the compiler made no program of it", ""]
    lines += [str(finding) for finding in verification.findings] or ["nothing to report"]
    versions = ", ".join(f"{name} {version}" for name, version in verification.versions.items())
    lines += [
        "",
        f"compiled in {seconds_text(verification.compile_seconds)}"
        + (f" with {versions}" if versions else ""),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, predicted: str, compiled: str, difference: str = "") -> str:
    return f"  {name:34s} {predicted:>12s} {compiled:>12s} {difference:>9s}".rstrip()


def _difference(predicted: float, compiled: float) -> str:
    if not compiled:
        return ""
    sign = "+" if predicted >= compiled else "-"
    return f"{sign}{percent_text(abs(predicted - compiled) / compiled)}"


def _memory_lines(verification: Verification) -> list[str]:
    assert verification.compiled
    parts, real = verification.plan.estimate.device_bytes, verification.compiled.device_bytes
    stored = parts.parameters + parts.frozen + parts.optimizer + parts.batch
    rows = (
        ("state and batch (arguments)", stored, real["arguments"]),
        ("everything else", parts.peak - stored, max(0, real["peak"] - real["arguments"])),
        ("peak", parts.peak, real["peak"]),
    )
    return [
        _row("memory per device", "predicted", "compiled", "error"),
        *(_row(name, bytes_text(a), bytes_text(b), _difference(a, b)) for name, a, b in rows),
        "",
    ]


def _time_lines(verification: Verification) -> list[str]:
    assert verification.compiled
    if not verification.compiled.compute_seconds:
        return []
    seconds = verification.plan.estimate.seconds
    predicted = seconds.compute + seconds.optimizer
    return [
        _row("time of kernels", "predicted", "compiled", "error"),
        _row(
            "compute and optimizer",
            seconds_text(predicted),
            seconds_text(verification.compiled.compute_seconds),
            _difference(predicted, verification.compiled.compute_seconds),
        ),
        "",
    ]


def _collective_lines(verification: Verification) -> list[str]:
    assert verification.compiled
    listed = verification.plan.estimate.collectives
    steps = tuple(c for c in listed if not c.every)
    lines = _compared("result bytes of a step", steps, verification.compiled.collectives)
    if verification.compiled.meeting is None:
        return lines
    met = tuple(c for c in listed if c.every)
    copied = _copied(verification.plan.exchange, met)
    compiled = verification.compiled.meeting.collectives
    return [
        *lines,
        *_compared("result bytes of a meeting", tuple(c for c in met if c not in copied), compiled),
        *(
            f"beside steps, by copies between islands: {bytes_text(collective.total_bytes)} a"
            " device"
            for collective in copied
        ),
    ]


def _copied(exchange: Exchange, met: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """What crosses between islands in no program."""
    if not (isinstance(exchange, DiLoCo) and exchange.delay):
        return ()
    return tuple(c for c in met if ISLAND.name in c.axes)


def _compared(
    head: str, planned: tuple[Collective, ...], compiled: tuple[Collective, ...]
) -> list[str]:
    """Bytes of collectives that were planned beside those that were compiled."""
    promised, real = totals(planned), totals(compiled)
    keys = sorted({*promised, *real}, key=lambda key: -max(promised.get(key, 0), real.get(key, 0)))
    rows = [
        _row(
            key_text(key),
            bytes_text(promised.get(key, 0)),
            bytes_text(real.get(key, 0)),
            _difference(promised.get(key, 0), real.get(key, 0)),
        )
        for key in keys
    ]
    return [_row(head, "predicted", "compiled", "error"), *rows, ""] if rows else []
