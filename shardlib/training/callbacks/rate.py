"""The learning rate, as a metric of every step."""

from __future__ import annotations

from collections.abc import Callable

from shardlib.errors import ModelError
from shardlib.training.callbacks.moment import Moment
from shardlib.training.states.rates import learning_rate


class LearningRate:
    """Writes the learning rate of every step down as "learning_rate".

    Args:
        schedule: the schedule that the optimizer was made with; by default the state says it, as
            that of `optax.inject_hyperparams` does.

    Raises:
        ModelError: at the first step, where neither says it.
    """

    def __init__(self, schedule: Callable[[int], float] | None = None) -> None:
        self._schedule = schedule

    def __call__(self, moment: Moment, /) -> None:
        """Adds it to the numbers of the step."""
        if moment.event != "step":
            return
        if self._schedule is not None:
            moment.log(learning_rate=float(self._schedule(moment.step - 1)))
            return
        found = learning_rate(moment.state)
        if found is None:
            raise ModelError(
                "the state does not say the learning rate\nTry: LearningRate(schedule), or"
                " optax.inject_hyperparams(optax.adamw)(learning_rate=...)"
            )
        moment.log(learning_rate=found)
