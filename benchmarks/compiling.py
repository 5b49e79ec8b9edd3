"""Reference models as jobs of the planner, and plans that the real compilers compile ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

import shardlib
from shardlib import models
from shardlib.verification.isolation import Limits


def inputs(config: Any, batch: int, seq: int, optimizer: Any = None) -> dict[str, Any]:
    """What `shardlib.plan` takes of a reference model, with AdamW where no optimizer is named."""
    init, loss = models.build(config)
    return {
        "init": init,
        "loss": loss,
        "optimizer": optimizer or optax.adamw(3e-4),
        "batch": models.example_batch(config, batch, seq),
        "name": config.name,
    }


def compiled(
    given: Mapping[str, Any], topology: str, *, seconds: float, gibibytes: float = 48, **plan: Any
) -> shardlib.Verification | str:
    """The compiled program of a plan, or of pins; or why there is none.

    The compiler may take so many seconds, and so much memory of this machine.
    """
    limits = Limits(seconds=seconds, memory_bytes=int(gibibytes * 2**30))
    try:
        found = shardlib.verify(**given, topology=topology, limits=limits, **plan)
    except shardlib.ShardlibError as error:
        return f"{type(error).__name__}: {error}"
    return str(found.findings[0]) if found.compiled is None else found


def decisions(plan: shardlib.Plan) -> dict[str, Any]:
    """The mesh and the chief decisions of a plan."""
    names = ("zero", "remat", "microbatches")
    return {"mesh": dict(plan.mesh), **{name: plan.decisions[name] for name in names}}
