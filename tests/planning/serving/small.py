"""Small models and machines for plans that serve."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from shardlib.annotation.read import read
from shardlib.cost.serving.cuts import cuts
from shardlib.cost.serving.served_model import ServedModel
from shardlib.frontend.serving import traced_served
from shardlib.hardware.topology import topology
from shardlib.models import build
from shardlib.models.config import TransformerConfig
from shardlib.models.presets import PRESETS
from shardlib.planning.serving.pins import ServingPins
from shardlib.planning.serving.space import Asked
from shardlib.planning.serving.workload import ServingWorkload


@cache
def served(name: str) -> ServedModel:
    """A preset, traced."""
    config = PRESETS[name]
    assert isinstance(config, TransformerConfig)
    return traced_served(
        replace(read(build(config)[0]), name=name),
        lambda model, tokens: model(tokens),
        longest=config.max_seq,
    )


def asked(name: str, machine: str, pins: dict[str, int] | None = None, **load: object) -> Asked:
    """What is planned."""
    given = {"prompt": 512, "output": 128, **load}
    return Asked(
        model=served(name),
        cut=cuts(served(name)),
        topology=topology(machine),
        workload=ServingWorkload(**given),  # pyright: ignore[reportArgumentType]
        pins=ServingPins(**(pins or {})),
    )
