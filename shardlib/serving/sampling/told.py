"""What the rows of a step are, and what they tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np

from shardlib.annotation.model import Tree
from shardlib.serving.sampling.choices import Row
from shardlib.serving.sampling.choose import Chosen
from shardlib.serving.scheduling.requests import Told
from shardlib.serving.scheduling.schedule import Share

#: A user's forward pass: (model, int32 tokens [batch, seq]) -> logits [batch, seq, vocab]; of a
#: Linen model with a cache of its own (logits, updated collections).
UserForward = Callable[[Tree, jax.Array], Tree]


def rows_of(share: Share) -> list[Row]:
    """The rows of a share, in order."""
    request, end = share.request, share.first + share.count
    rows: list[Row] = []
    for position in range(end - share.rows, end):
        drafted = position + 1 - request.count
        if drafted >= 0:
            rows.append(Row(request=request, drafted=share.drafted[:drafted]))
        else:
            rows.append(Row(request=request, given=request.tokens[position + 1]))
    return rows


def told(chosen: Chosen, rows: Mapping[int, Row]) -> dict[int, Told]:
    """What is chosen in each row, on the host."""
    tokens, logprobs = np.asarray(chosen.token).tolist(), np.asarray(chosen.logprob).tolist()
    listed = any(row.request.asked.top for row in rows.values())
    likeliest, values = (
        (np.asarray(chosen.likeliest).tolist(), np.asarray(chosen.logprobs).tolist())
        if listed
        else ([[]] * len(tokens), [[]] * len(tokens))
    )
    return {
        index: Told(
            token=tokens[index],
            logprob=logprobs[index],
            likeliest=tuple(zip(likeliest[index], values[index], strict=True))[
                : row.request.asked.top
            ],
        )
        for index, row in rows.items()
    }
