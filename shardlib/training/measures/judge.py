"""Whether the loss of a step is one to go on with.

Two things go wrong with a loss: it is no longer finite, or it jumps. A jump is measured against the
last steps by their median and by the median distance from it, which one outlier does not move; PaLM
(arXiv:2204.02311, 5.1) met about twenty of them, and got past each by going back about 100 steps
and leaving out the batches around it.

>>> judge = Judge(Policy(window=4, spike=10.0, action="roll-back"))
>>> [judge.see(loss) for loss in (5.0, 4.9, 5.1, 4.8, 4.9, 90.0)]
['go', 'go', 'go', 'go', 'go', 'roll-back']
>>> judge.see(float("nan"))
'roll-back'
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from shardlib.errors import ModelError, raise_all

#: What may follow a spike: nothing but a warning; the step is left out, by a guard of the program
#: (`shardlib.Guards(spike=True)`); back to the newest checkpoint, and past the batches since; an
#: error.
ACTIONS = ("warn", "skip", "roll-back", "stop")
#: Median absolute deviations of a normal distribution in one standard deviation.
MAD_OF_SIGMA = 1.4826
#: Deviations below this part of the median are taken for it: a loss that has settled is not made of
#: spikes.
FLOOR = 0.01


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When a loss is bad, and what then.

    Attributes:
        window: losses that the next one is compared with; a spike is not looked for before there
            are that many.
        spike: standard deviations above the median of the window that make a spike; 0 looks for
            none.
        action: after a spike, one of `ACTIONS`. A loss that is not finite warns nobody: it rolls
            back, or stops.
        attempts: times that a run may roll back without a new checkpoint between.
        metric: the metric of a step that is judged; of a step of the user's own it is what stands
            for the loss.
        skips: steps in a row that guards may leave out; one more is a bad loss. A scale of the loss
            that begins too high takes up to twenty.

    Raises:
        ModelError: numbers out of range, all of them listed.
    """

    window: int = 64
    spike: float = 20.0
    action: str = "roll-back"
    attempts: int = 3
    metric: str = "loss"
    skips: int = 20

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {getattr(self, name)!r}; it must be at least {least}"
            for name, least in (("window", 2), ("spike", 0), ("attempts", 0), ("skips", 0))
            if not getattr(self, name) >= least
        ]
        if self.action not in ACTIONS:
            failures.append(f"action is {self.action!r}; it is one of {', '.join(ACTIONS)}")
        if failures:
            raise_all(ModelError, "the policy for bad losses is not usable", failures)


class Judge:
    """Sees every loss in its order; its memory is `seen`, which checkpoints keep, so that a resumed
    run judges as one that was never interrupted.
    """

    def __init__(self, policy: Policy, seen: Iterable[float] = ()) -> None:
        self.policy = policy
        self.seen: deque[float] = deque(seen, maxlen=policy.window)
        self.skipped = 0

    def see(self, loss: float) -> str:
        """ "go", or an action of the policy; a bad loss is not remembered."""
        if math.isfinite(loss):
            self.skipped = 0
        if not math.isfinite(loss):
            return "stop" if self.policy.action == "stop" else "roll-back"
        if loss > self.limit():
            return self.policy.action
        self.seen.append(loss)
        return "go"

    def skip(self) -> str:
        """The same for a step that guards have left out."""
        self.skipped += 1
        return "go" if self.skipped <= self.policy.skips else self.see(math.nan)

    def limit(self) -> float:
        """The largest loss that is no spike; infinite as long as too little was seen."""
        if not self.policy.spike or len(self.seen) < self.policy.window:
            return math.inf
        middle = statistics.median(self.seen)
        spread = statistics.median(abs(loss - middle) for loss in self.seen) * MAD_OF_SIGMA
        return middle + self.policy.spike * max(spread, FLOOR * abs(middle))
