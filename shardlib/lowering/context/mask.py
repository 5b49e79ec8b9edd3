"""Which keys does a query see?

Masks are made from positions and documents, for the queries and keys that are at hand: no array has
a side for all of the queries and one for all of the keys.

>>> import jax.numpy as jnp
>>> tokens = Tokens(position=jnp.arange(4))
>>> Sight(window=2).seen(tokens, tokens).astype(int).tolist()
[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
>>> bool(Sight().some(tokens[:2], tokens[2:])), bool(Sight().some(tokens[2:], tokens[:2]))
(False, True)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.jax_types import Index, Value

#: Farther than any two positions.
FAR = 2**30


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Where some tokens stand.

    Attributes:
        position: in the sequence, [S].
        document: number of the document, [B, S]; None where there is one.
        real: false for tokens that only fill a block, [S]; None where all are real.
    """

    position: Value
    document: Any = None
    real: Any = None

    def __getitem__(self, which: slice) -> Tokens:
        return Tokens(
            position=self.position[which],
            document=None if self.document is None else self.document[:, which],
            real=None if self.real is None else self.real[which],
        )


jax.tree_util.register_dataclass(
    Tokens, data_fields=["position", "document", "real"], meta_fields=[]
)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """How far a query sees.

    Attributes:
        causal: whether it sees no later position.
        window: it sees positions that are less than this far: the last `window` of them, itself
            included, where it is causal, and as many to the other side where it is not. A number or
            a traced scalar; 0 or None for all.
    """

    causal: bool = True
    window: Index | None = None

    @property
    def reach(self) -> Value | None:
        """The window as a distance; None where all is seen whatever the program is given."""
        if self.window is None or (isinstance(self.window, int | np.integer) and not self.window):
            return None
        return jnp.where(self.window > 0, self.window, FAR)

    def seen(self, query: Tokens, key: Tokens) -> Value | None:
        """Which keys are seen, [Q, K], or [B, Q, K] where there are documents; None where all
        are.

        Args:
            query: positions and documents of the queries.
            key: those of the keys.
        """
        far = query.position[:, None] - key.position[None, :]
        found = [far >= 0] if self.causal else []
        if self.reach is not None:
            found.append((far if self.causal else jnp.abs(far)) < self.reach)
        if key.real is not None:
            found.append(key.real[None, :])
        if query.document is not None:
            found.append(query.document[:, :, None] == key.document[:, None, :])
        return reduce(operator.and_, found) if found else None

    def some(self, query: Tokens, key: Tokens) -> Value | None:
        """A scalar that is false only where none of the queries sees any of the keys; None where
        nothing can be told. It looks at the ends alone, so that a block of scores can be left out.

        Args:
            query: positions and documents of the queries.
            key: those of the keys.
        """
        first, last = (
            query.position.min() - key.position.max(),
            query.position.max() - key.position.min(),
        )
        found = [last >= 0] if self.causal else []
        if self.reach is not None:
            found += [first < self.reach, last > -self.reach]
        if query.document is not None:
            found.append(
                (
                    (query.document.min(1) <= key.document.max(1))
                    & (key.document.min(1) <= query.document.max(1))
                ).any()
            )
        return reduce(operator.and_, found) if found else None


def split_window(window: Index | None) -> tuple[int, Value | None]:
    """A window as a number that the program knows and one that it is given: one of them is 0 or
    None.
    """
    if window is None or isinstance(window, int | np.integer):
        return int(window or 0), None
    return 0, jnp.asarray(window, jnp.int32)
