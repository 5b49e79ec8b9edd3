"""What a microbatch takes at least on all stages together, by candidate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
#: Rows of a `Tick`.
QUANTITIES = 7


@dataclass(frozen=True)
class Tick:
    """Lower bounds for a microbatch and all stages together.

    Attributes:
        rows: array [QUANTITIES, candidates]; the properties are its rows.
    """

    rows: Array

    @property
    def busy(self) -> Array:
        """Seconds that stages are busy with kernels and with collectives that compute waits for."""
        return self.rows[0]

    @property
    def free(self) -> Array:
        """The same seconds less what gradients of weights take off a bubble of zero-bubble."""
        return self.rows[1]

    @property
    def loaded(self) -> Array:
        """The same seconds with what goes around a ring, in place of the compute under which that
        could hide.
        """
        return self.rows[2]

    @property
    def messages(self) -> Array:
        """Number of messages between stages, for a microbatch and chunk of layers."""
        return self.rows[3]

    @property
    def message_bytes(self) -> Array:
        """Bytes of these messages."""
        return self.rows[4]

    @property
    def blocked(self) -> Array:
        """Those seconds of `busy` that collectives take."""
        return self.rows[5]

    @property
    def layers(self) -> Array:
        """Those seconds of `busy` that are spent in layers, of which each stage has whole ones; 0
        where they differ.
        """
        return self.rows[6]

    def waiting(self, blocked: Array) -> Tick:
        """The same bounds where collectives that compute waits for take so many seconds."""
        more = blocked - self.blocked
        return Tick(
            np.concatenate([self.rows[:3] + more, self.rows[3:5], blocked[None], self.rows[6:]])
        )

    def take(self, which: Array) -> Tick:
        """Some of the candidates."""
        return Tick(self.rows[:, which])
