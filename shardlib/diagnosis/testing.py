"""Assertions about the communication of a function, for tests: `shardlib.testing`.

    def test_step_reduces_gradients_once():
        assert_collectives(step, params, batch, {"all-reduce": 2}, topology="v5e:4x4")

The compiler of the topology runs, in a process of its own; no device is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from shardlib.diagnosis.diagnose import why
from shardlib.diagnosis.report import Diagnosis, report_text
from shardlib.errors import ArgumentError
from shardlib.layout import KINDS


def assert_collectives(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Asserts how many collectives of each kind one call of a function runs, loops counted out.

    Args:
        function: as `shardlib.why` takes it.
        arguments: those of the function, and last {kind: count}; kinds that are not named are 0.
            A kind may name its axes: "all-reduce over data".
        options: keywords of `shardlib.why`; no cure is looked for.

    Raises:
        AssertionError: the counts differ; the message has every collective with its line.
        ArgumentError: the last argument is not such a mapping.
    """
    *values, expected = arguments or (None,)
    counted = expected.items() if isinstance(expected, Mapping) else ()
    wrong = [
        word
        for word, count in counted
        if str(word).partition(" over ")[0] not in KINDS or not _is_count(count)
    ]
    if not isinstance(expected, Mapping) or wrong:
        raise ArgumentError(
            f"the last argument is {expected!r}, not counts of collectives\nTry:"
            " assert_collectives(step, params, batch, {'all-reduce': 2}, topology='cpu:8'); kinds"
            f" are {', '.join(KINDS)}"
        )
    diagnosis = why(function, *values, **{**options, "cures": 0})
    axes = [axis for axis, _ in diagnosis.mesh]
    named_axes = {a for word in expected for a in word.partition(" over ")[2].split(", ") if a}
    if unknown := sorted(named_axes - {*axes}):
        raise ArgumentError(
            f"{', '.join(unknown)} is no axis of the mesh\nTry: {', '.join(axes)}, in this order"
        )
    counts = Counter[str]()
    for row in diagnosis.rows:
        named = f"{row.kind} over {', '.join(row.axes)}"
        counts[named if named in expected else row.kind] += row.count
    differences = [
        f"{kind}: {counts[kind]}, expected {expected.get(kind, 0)}"
        for kind in sorted({*counts, *expected})
        if counts[kind] != expected.get(kind, 0)
    ]
    if differences:
        raise AssertionError("; ".join(differences) + "\n" + report_text(diagnosis))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def assert_no_unplanned(function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Asserts that every collective of a function is inherent in what it computes, or planned.

    Args:
        function: as `shardlib.why` takes it; also a program of shardlib's.
        arguments: those of the function.
        options: keywords of `shardlib.why`; no cure is looked for unless `cures` is given.

    Raises:
        AssertionError: others were found, or a part of the program could not be read; the
            message has their lines.
    """
    diagnosis: Diagnosis = why(function, *arguments, **{"cures": 0, **options})
    if problems := diagnosis.communication.problems:
        raise AssertionError("\n".join(problems) + "\n" + report_text(diagnosis))
    if diagnosis.unexplained:
        count = len(diagnosis.unexplained)
        raise AssertionError(
            f"{count} of {len(diagnosis.rows)} collectives are neither inherent nor planned\n"
            + report_text(diagnosis)
        )
