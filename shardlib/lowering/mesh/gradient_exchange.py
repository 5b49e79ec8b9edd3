"""How partial sums of gradients are exchanged: what devices send, in which dtype, and what they
keep of it for the next step.

An exchange is a function of one device's partial sums and of the collectives that reduce them. The
one of all plans today sends them in a dtype:

    InDtype(bfloat16)        gradient = collectives(round(partial))

and one with error feedback (arXiv:1901.09847) keeps what it did not send, which is added to the
partial sums of the next step:

    sent = round(partial)    gradient = collectives(sent)    kept = partial - sent
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

#: Reduces one device's share, inside a manual region, in the dtype that it has: reduce-scatters
#: over the mesh axes that shard the gradient, all-reduces over the others.
Collectives = Callable[[jax.Array], jax.Array]


class GradientExchange(Protocol):
    """How partial sums of a gradient are exchanged, inside a manual region."""

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype in which partial sums are sent; None for their own."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether every device keeps something of its partial sums for the next step."""
        ...

    def __call__(
        self, partial: jax.Array, collectives: Collectives
    ) -> tuple[jax.Array, jax.Array | None]:
        """Reduces partial sums.

        Returns:
            The gradient, in the dtype of the partial sums, and what the device keeps, of their
            shape and dtype; None where it keeps nothing.
        """
        ...


@dataclass(frozen=True)
class InDtype:
    """Partial sums are sent in a dtype, and nothing is kept.

    Attributes:
        dtype: it; None for the dtype that they have.
    """

    dtype: np.dtype | None = None

    @property
    def keeps(self) -> bool:
        """Nothing is kept."""
        return False

    def __call__(self, partial: jax.Array, collectives: Collectives) -> tuple[jax.Array, None]:
        """See `GradientExchange`."""
        dtype = partial.dtype
        sent = (
            partial.astype(self.dtype)
            if self.dtype is not None and jnp.issubdtype(dtype, jnp.floating)
            else partial
        )
        return collectives(sent).astype(dtype), None
