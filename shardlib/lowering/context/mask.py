"""Which keys does a query see, and what does their distance add to scores?

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
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.functions.biases import BiasForm
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
class Offsets:
    """What distances add to scores.

    Attributes:
        form: how.
        array: of slopes or buckets, of the heads at hand.
    """

    form: BiasForm
    array: Value

    def of(self, query: Tokens, key: Tokens) -> Value:
        """What is added to scores, [N, Q, K] float32."""
        return self.form.of(self.array, key.position[None, :] - query.position[:, None])

    def back(self, query: Tokens, key: Tokens, cotangent: Value) -> Value:
        """The gradient of the array, float32.

        Args:
            cotangent: of what is added, [N, Q, K].
        """
        distance = key.position[None, :] - query.position[:, None]
        pull = jax.vjp(lambda array: self.form.of(array, distance), self.array.astype(jnp.float32))
        return pull[1](cotangent)[0]


jax.tree_util.register_dataclass(Offsets, data_fields=["array"], meta_fields=["form"])


@dataclass(frozen=True, kw_only=True)
class Sight:
    """How far a query sees.

    Attributes:
        causal: whether it sees no later position.
        window: it sees positions that are less than this far: the last `window` of them, itself
            included, where it is causal, and as many to the other side where it is not. A number or
            a traced scalar; 0 or None for all.
        offsets: what distances add to scores; None for nothing.
    """

    causal: bool = True
    window: Index | None = None
    offsets: Offsets | None = None

    def added(self, query: Tokens, key: Tokens) -> Value | None:
        """What is added to scores, [N, Q, K]; None for nothing."""
        return None if self.offsets is None else self.offsets.of(query, key)

    def offsets_back(self, query: Tokens, key: Tokens, cotangent: Value) -> tuple[Value, ...]:
        """The gradient of what distances add, if they add anything.

        Args:
            cotangent: of what is added, [N, Q, K].
        """
        return () if self.offsets is None else (self.offsets.back(query, key, cotangent),)

    @property
    def reach(self) -> Value | None:
        """The window as a distance; None where all is seen whatever the program is given."""
        if self.window is None or (isinstance(self.window, int | np.integer) and not self.window):
            return None
        return jnp.where(self.window > 0, self.window, FAR)

    def seen(self, query: Tokens, key: Tokens) -> Value | None:
        """Which keys are seen, [Q, K], or [B, Q, K] where there are documents; None where all
        are.
        """
        far = query.position[:, None] - key.position[None, :]
        conditions = [far >= 0] if self.causal else []
        if self.reach is not None:
            conditions.append((far if self.causal else jnp.abs(far)) < self.reach)
        if key.real is not None:
            conditions.append(key.real[None, :])
        if query.document is not None:
            conditions.append(query.document[:, :, None] == key.document[:, None, :])
        return reduce(operator.and_, conditions) if conditions else None

    def some(self, query: Tokens, key: Tokens) -> Value | None:
        """A scalar that is false only where none of the queries sees any of the keys; None where
        nothing can be told. It looks at the ends alone, so that a block of scores can be left out.
        """
        first, last = (
            query.position.min() - key.position.max(),
            query.position.max() - key.position.min(),
        )
        conditions = [last >= 0] if self.causal else []
        if self.reach is not None:
            conditions += [first < self.reach, last > -self.reach]
        if query.document is not None:
            conditions.append(
                (
                    (query.document.min(1) <= key.document.max(1))
                    & (key.document.min(1) <= query.document.max(1))
                ).any()
            )
        return reduce(operator.and_, conditions) if conditions else None

    @property
    def split(self) -> tuple[int, Given]:
        """The window, where the program knows it and 0 else, and what the program is given."""
        if self.window is None or isinstance(self.window, int | np.integer):
            return int(self.window or 0), Given(offsets=self.offsets)
        return 0, Given(window=jnp.asarray(self.window, jnp.int32), offsets=self.offsets)


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a program is given of a sight.

    Attributes:
        window: see `Sight`; None where the program knows it.
        offsets: see `Sight`.
    """

    window: Value | None = None
    offsets: Offsets | None = None

    def sight(self, window: int, *, causal: bool) -> Sight:
        """The sight."""
        return Sight(
            causal=causal,
            window=window if self.window is None else self.window,
            offsets=self.offsets,
        )

    def cotangent(self, *gradient: Value) -> Given | None:
        """Its cotangent."""
        if self.offsets is None:
            return None
        array = gradient[0].astype(self.offsets.array.dtype)
        return Given(offsets=replace(self.offsets, array=array))


jax.tree_util.register_dataclass(Given, data_fields=["window", "offsets"], meta_fields=[])
ALL_BEFORE = Sight()
