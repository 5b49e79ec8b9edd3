"""Latencies, throughput, and how many answers were in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardlib.serving.measuring.replay import Seen
from shardlib.untrusted.json_types import JsonObject

#: Percentiles that are told.
PERCENTILES = (50, 90, 99)


def tpot(answer: Seen) -> float | None:
    """Seconds from token to token of an answer, in the mean; None for one of a single token."""
    if answer.first is None or answer.tokens < 2:
        return None
    return (answer.ended - answer.first) / (answer.tokens - 1)


def figures(
    seen: Sequence[Seen], *, ttft_limit: float | None = None, tpot_limit: float | None = None
) -> JsonObject:
    """What is told of a replay, as plain data. An answer is in time when its first token and its
    tokens in the mean are; refused and failed ones never are.

    Args:
        ttft_limit: seconds to the first token at most; None for any.
        tpot_limit: seconds from token to token at most; None for any.
    """
    good = [answer for answer in seen if not answer.error]
    refused = sum(answer.status == 429 for answer in seen)
    seconds = max(answer.begun + answer.ended for answer in seen) - min(
        answer.begun for answer in seen
    )
    in_time = [
        answer
        for answer in good
        if (ttft_limit is None or (answer.first or 0.0) <= ttft_limit)
        and (tpot_limit is None or (tpot(answer) or 0.0) <= tpot_limit)
    ]
    tokens = sum(answer.tokens for answer in good)
    return {
        "requests": len(seen),
        "answered": len(good),
        "refused": refused,
        "failed": len(seen) - len(good) - refused,
        "errors": sorted({answer.error for answer in seen if answer.error})[:5],
        "seconds": seconds,
        "output_tokens": tokens,
        "cached_tokens": sum(answer.cached for answer in good),
        "output_tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
        "ttft_seconds": _spread([answer.first for answer in good]),
        "tpot_seconds": _spread([tpot(answer) for answer in good]),
        "request_seconds": _spread([answer.ended for answer in good]),
        "limits": {"ttft_seconds": ttft_limit, "tpot_seconds": tpot_limit},
        "in_time": len(in_time) / len(seen),
    }


def _spread(values: Sequence[float | None]) -> JsonObject | None:
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    percentiles = np.percentile(measured, PERCENTILES)
    return {"mean": float(np.mean(measured))} | {
        f"p{percent}": float(value) for percent, value in zip(PERCENTILES, percentiles, strict=True)
    }
