"""What a program is built with beside a plan and a loss."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardlib.annotation.model import PureLoss, UserLoss
from shardlib.lowering.mesh.gradient_exchange import GradientExchange
from shardlib.lowering.program.guards import Guards

#: A value of one field of `BuildOptions`.
BuildOption = Any


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Where a program runs, and what belongs to it beside a plan and a loss.

    Attributes:
        devices: exactly the devices to use; by default the first ones that JAX sees.
        abstract: lower for devices that are not here: the program can be exported, not run.
        guards: of the step; None for none.
        disk: folder for state that the plan puts on disk; by default what `SHARDLIB_DISK_DIR` says,
            or else the system's folder for temporary files.
        evaluation: what `Program.evaluate` evaluates; by default the loss.
        evaluated: the same as the user wrote it; None where it is not known.
        exchange: how partial sums of gradients are exchanged; by default as the plan says.
    """

    devices: Sequence[jax.Device] | None = None
    abstract: bool = False
    guards: Guards | None = None
    disk: str | os.PathLike[str] | None = None
    evaluation: PureLoss | None = None
    evaluated: UserLoss | None = None
    exchange: GradientExchange | None = None
