"""How tokens are chosen."""

from __future__ import annotations

import secrets

from shardlib.serving.http.bodies.choosing import Choosing
from shardlib.serving.scheduling.settings import Sampling

#: The least probability that OpenAI's `top_p: 0` stands for.
LEAST_TOP_P = 1e-6


def sampling_of(body: Choosing, default: Sampling) -> Sampling:
    """How tokens are chosen; where a body gives no seed, by one that is drawn."""

    def given(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    seed = secrets.randbits(32) if body.seed is None else body.seed % (1 << 32)
    return Sampling(
        temperature=given(body.temperature, default.temperature),
        top_p=max(given(body.top_p, default.top_p), LEAST_TOP_P),
        top_k=default.top_k if body.top_k is None else max(body.top_k, 0),
        min_p=given(body.min_p, default.min_p),
        seed=seed,
        frequency=given(body.frequency_penalty, default.frequency),
        presence=given(body.presence_penalty, default.presence),
        repetition=given(body.repetition_penalty, default.repetition),
        bias={int(token): float(value) for token, value in (body.logit_bias or {}).items()},
    )
