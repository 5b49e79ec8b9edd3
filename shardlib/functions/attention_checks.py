"""Checks of the operands of `shardlib.functions.attention`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax

from shardlib.errors import ModelError, raise_all


def check(
    queries: Sequence[jax.Array],
    keys: Sequence[jax.Array],
    value: jax.Array,
    *,
    causal: bool,
    window: int,
    block: int,
    segments: jax.Array | None,
    numbers: Mapping[str, float],
) -> None:
    """Raises where operands and options of a call do not fit each other."""
    batch, seq, heads = queries[0].shape[:3]
    length, groups = value.shape[1:3]
    failures = [
        (
            len(queries) == len(keys),
            f"queries are made of {len(queries)} arrays, keys of {len(keys)}",
        ),
        (
            all(query.shape[:3] == (batch, seq, heads) for query in queries),
            (
                "parts of queries differ in batch, sequence or heads:"
                f" {[query.shape for query in queries]}"
            ),
        ),
        (any(key.ndim == 4 for key in keys), "no part of the keys has heads: [B, T, K, H]"),
        (
            all(
                key.shape[:2] == (batch, length) and (key.ndim == 3 or key.shape[2] == groups)
                for key in keys
            ),
            (
                f"keys {[key.shape for key in keys]} and values {value.shape} differ in batch,"
                " sequence or heads"
            ),
        ),
        (
            all(
                query.shape[-1] == key.shape[-1] for query, key in zip(queries, keys, strict=False)
            ),
            (
                f"heads of queries {[query.shape[-1] for query in queries]} and of keys"
                f" {[key.shape[-1] for key in keys]} differ in width"
            ),
        ),
        (heads % groups == 0, f"{groups} key heads do not divide {heads} query heads"),
        (
            window >= 0 and (causal or not window),
            f"a window of {window} keys needs causal attention and cannot be negative",
        ),
        (block >= 0, f"block={block} is negative; it is 0 for all queries at once"),
        (
            block <= 0 or seq <= block or seq % block == 0,
            f"a sequence of {seq} is no multiple of block={block}",
        ),
        (
            segments is None or tuple(segments.shape) == (batch, seq) == (batch, length),
            (
                f"segments are {tuple(getattr(segments, 'shape', ()))}; they must be [batch, seq]"
                f" of queries and keys alike, {(batch, seq)} and {(batch, length)}"
            ),
        ),
        *((not message, message) for message in _no_numbers(numbers)),
    ]
    messages = [message for fits, message in failures if not fits]
    if messages:
        raise_all(ModelError, "attention does not fit its operands", messages)


def _no_numbers(numbers: Mapping[str, float]) -> list[str]:
    """What is wrong with factors: scale may be any number, softcap none below 0."""
    wrong: list[str] = []
    for name, value in numbers.items():
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        shown = value if isinstance(value, str | int | float) else type(value).__name__
        if not math.isfinite(number):
            wrong.append(f"{name} is {shown!r} and no finite number that is known when tracing")
        elif name == "softcap" and number < 0:
            wrong.append(f"softcap={number:g} is negative; it is 0 for none")
    return wrong
