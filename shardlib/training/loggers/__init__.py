"""Where the numbers and events of a run go, beside the lines of JSON in its folder.

    settings = Settings(run="runs/a", loggers=(TensorBoard(), WandB(project="a")))

logger.py        the protocol
tensorboard.py   event files
wandb.py         Weights & Biases; offline, unless it is told otherwise
mlflow.py        MLflow; a file of SQLite, unless it is told otherwise
json_lines.py    lines of JSON in a file of one's own
"""

from __future__ import annotations

from shardlib.training.loggers.json_lines import JsonLines
from shardlib.training.loggers.logger import LoggedRun, Logger
from shardlib.training.loggers.mlflow import MLflow
from shardlib.training.loggers.tensorboard import TensorBoard
from shardlib.training.loggers.wandb import WandB

__all__ = ["JsonLines", "LoggedRun", "Logger", "MLflow", "TensorBoard", "WandB"]
