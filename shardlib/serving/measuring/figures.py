"""Latencies, throughput, and how many answers were in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardlib.serving.measuring.replay import Seen
from shardlib.untrusted.json_types import JsonObject

#: Percentiles that are told.
PERCENTILES = (50, 90, 99)


def tpot(one: Seen) -> float | None:
    """Seconds from token to token of an answer, in the mean; None for one of a single token."""
    if one.first is None or one.tokens < 2:
        return None
    return (one.ended - one.first) / (one.tokens - 1)


def figures(
    seen: Sequence[Seen], *, ttft_limit: float | None = None, tpot_limit: float | None = None
) -> JsonObject:
    """What is told of a replay, as plain data. An answer is in time when its first token and its
    tokens in the mean are; refused and failed ones never are.

    Args:
        seen: how each request went, at least one.
        ttft_limit: seconds to the first token at most; None for any.
        tpot_limit: seconds from token to token at most; None for any.
    """
    good = [one for one in seen if not one.error]
    refused = sum(one.status == 429 for one in seen)
    seconds = max(one.begun + one.ended for one in seen) - min(one.begun for one in seen)
    in_time = [
        one
        for one in good
        if (ttft_limit is None or (one.first or 0.0) <= ttft_limit)
        and (tpot_limit is None or (tpot(one) or 0.0) <= tpot_limit)
    ]
    tokens = sum(one.tokens for one in good)
    return {
        "requests": len(seen),
        "answered": len(good),
        "refused": refused,
        "failed": len(seen) - len(good) - refused,
        "errors": sorted({one.error for one in seen if one.error})[:5],
        "seconds": seconds,
        "output_tokens": tokens,
        "cached_tokens": sum(one.cached for one in good),
        "output_tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
        "ttft_seconds": _spread([one.first for one in good]),
        "tpot_seconds": _spread([tpot(one) for one in good]),
        "request_seconds": _spread([one.ended for one in good]),
        "limits": {"ttft_seconds": ttft_limit, "tpot_seconds": tpot_limit},
        "in_time": len(in_time) / len(seen),
    }


def _spread(values: Sequence[float | None]) -> JsonObject | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    told = np.percentile(known, PERCENTILES)
    return {"mean": float(np.mean(known))} | {
        f"p{percent}": float(value) for percent, value in zip(PERCENTILES, told, strict=True)
    }
