"""How the token of each row is chosen, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from shardlib.serving.sampling.edits import Edits, edits
from shardlib.serving.scheduling.requests import Request

#: An operand: an array of the host, or of a device.
Array = jax.Array | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Row:
    """A token of a step whose logits are wanted.

    Attributes:
        request: whose.
        drafted: tokens that stand between its own and the one that is chosen.
        given: the token that follows, where it is known and only its probability is asked; -1
            where it is chosen.
    """

    request: Request
    drafted: tuple[int, ...] = ()
    given: int = -1

    @property
    def tokens(self) -> list[int]:
        """Those before the one that is chosen."""
        return [*self.request.tokens, *self.drafted]

    @property
    def answered(self) -> int:
        """Tokens of the answer before it."""
        return len(self.request.answer) + len(self.drafted)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Choices:
    """How the token of each row is chosen, arrays [R]; see `Sampling`.

    Attributes:
        temperature, top_p, min_p: float32.
        top_k, position: int32.
        seed: uint32.
        given: int32, see `Row`.
        listed: bool, whether the likeliest tokens are asked for.
        edits: changes to the logits before.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    position: Array
    given: Array
    listed: Array
    edits: Edits


def choices(
    rows: Sequence[Row | None],
    *,
    vocab: int,
    longest: int,
    allowed: Mapping[int, np.ndarray] | None = None,
) -> Choices:
    """The choices of rows; those that are None take the likeliest token."""

    def array(dtype: str, default: float, of: Callable[[Row], float]) -> np.ndarray:
        return np.asarray([default if row is None else of(row) for row in rows], dtype)

    def setting(name: str, dtype: str, default: float) -> np.ndarray:
        return array(dtype, default, lambda row: getattr(row.request.asked.sampling, name))

    return Choices(
        temperature=setting("temperature", "float32", 0.0),
        top_k=setting("top_k", "int32", 0),
        top_p=setting("top_p", "float32", 1.0),
        min_p=setting("min_p", "float32", 0.0),
        seed=setting("seed", "uint32", 0),
        position=array("int32", 0, lambda row: row.request.count + len(row.drafted)),
        given=array("int32", -1, lambda row: row.given),
        listed=array("bool", 0, lambda row: row.request.asked.top > 0),
        edits=edits(
            [
                None if row is None else (row.request.asked, row.tokens, row.answered)
                for row in rows
            ],
            vocab=vocab,
            longest=longest,
            allowed=allowed or {},
        ),
    )
