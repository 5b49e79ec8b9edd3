"""What a user adds to a run: functions that are called while it goes on.

    settings = Settings(callbacks=(EarlyStop("validation/loss"), BestCheckpoint("validation/loss")))

moment.py      the protocol, and what a callback is given
stopping.py    early stop
best.py        the best checkpoint
rate.py        the learning rate as a metric
samples.py     samples of what was learned
"""

from __future__ import annotations

from shardlib.training.callbacks.best import BestCheckpoint
from shardlib.training.callbacks.moment import Callback, Moment
from shardlib.training.callbacks.rate import LearningRate
from shardlib.training.callbacks.samples import Samples
from shardlib.training.callbacks.stopping import EarlyStop

__all__ = ["BestCheckpoint", "Callback", "EarlyStop", "LearningRate", "Moment", "Samples"]
