"""Which pins ask for more layers than a model has in its loops.

>>> from shardlib.decisions.pins import Pins
>>> pins = Pins.parse({"schedule": "1f1b"})
>>> print(layers_lacking("mlp", LayerGroups(names=(), counts=()), pins))
schedule='1f1b' splits layers into stages, and the model 'mlp' has no layers in a loop
Try: layers under jax.lax.scan or nnx.scan, or no such pin
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardlib.decisions.pins import Pins
from shardlib.decisions.readers import ANY_GROUP
from shardlib.schedules.table import named

#: Beyond any number of chunks that a schedule is asked for.
_MOST = 64


@dataclass(frozen=True, kw_only=True)
class LayerGroups:
    """The layers that a model has in its loops.

    Attributes:
        names: of the layer groups.
        counts: layers of each group.
        calls: how often the same parameters are used outside of all groups.
    """

    names: Sequence[str]
    counts: Sequence[int]
    calls: int = 1


def layers_lacking(model: str, groups: LayerGroups, pins: Pins) -> str:
    """Why the layers of a model are too few for its pins, and what to try; empty where they are
    not.
    """
    model = f"the model {model!r}"
    if not groups.counts and groups.calls > 1 and (pins.staged or pins.remat_layers):
        return _called_again(model, groups.calls, pins)
    return _too_few_for_stages(model, groups.counts, pins) or _too_few_to_rematerialise(
        model, groups.names, groups.counts, pins
    )


def _called_again(model: str, calls: int, pins: Pins) -> str:
    """Why a model whose layers a loss runs several times has none to split."""
    request = (
        f"{' with '.join(_stage_pins(pins))} splits layers into stages"
        if pins.staged
        else f"remat_layers={pins.remat_layers} rematerialises some of the layers"
    )
    often = "twice" if calls == 2 else f"{calls} times"
    return (
        f"{request}, and the loss runs the layers of {model}, or some of them, {often} with the"
        " same parameters, as where it calls the model or one of its layers more than once; they"
        " have to run once, each layer with parameters of its own\nTry: one call of the model for"
        " all rows, no layer that is used again, or no such pin"
    )


def _too_few_for_stages(model: str, counts: Sequence[int], pins: Pins) -> str:
    """Why pinned stages, or chunks of layers on each, have no layer for each of them."""
    if not pins.staged:
        return ""
    layers, stages = max(counts, default=0), dict(pins.mesh or pins.axes).get("stage", 1)
    request = " with ".join(_stage_pins(pins))
    if layers < 2:
        return (
            f"{request} splits layers into stages, and {model} has {_number(layers)} in a"
            " loop\nTry: layers under jax.lax.scan or nnx.scan, or no such pin"
        )
    if stages > layers:
        return (
            f"{request} splits layers into stages, and {model} has {_number(layers)} in a"
            " loop\nTry: fewer stages, or more layers under jax.lax.scan or nnx.scan"
        )
    chunks, stage_count = _chunks(pins), max(stages, 2)
    if chunks * stage_count <= layers:
        return ""
    source = (
        f"virtual_stages={chunks}"
        if pins.virtual_stages
        else f"schedule={pins.schedule!r} has at least virtual_stages={chunks}, and that"
    )
    limit = layers // stage_count
    fewer = (
        f"virtual_stages of at most {limit}"
        if limit > 1 and pins.virtual_stages
        else "a schedule without chunks of layers, such as '1f1b'"
    )
    return (
        f"{source} splits the layers of each of {stage_count} stages into {chunks} chunks:"
        f" {chunks * stage_count} chunks in all, and {model} has {_number(layers)} in a loop\nTry:"
        f" {fewer}, or fewer stages"
    )


def _stage_pins(pins: Pins) -> list[str]:
    """The pins that ask for stages."""
    stages = dict(pins.mesh or pins.axes).get("stage", 1)
    pinned = {
        "schedule": pins.schedule if pins.schedule and named(pins.schedule).staged else None,
        "pipeline": pins.pipeline if pins.pipeline == "programs" else None,
        "accumulation": pins.accumulation if (pins.accumulation or 1) > 1 else None,
        "virtual_stages": pins.virtual_stages if (pins.virtual_stages or 1) > 1 else None,
        "gather": pins.gather if pins.gather == "once" else None,
    }
    words = [f"{word}={value!r}" for word, value in pinned.items() if value is not None]
    return [f"stage={stages}"] if stages > 1 else words


def _chunks(pins: Pins) -> int:
    """The fewest chunks of layers that a stage has under the pins."""
    if pins.virtual_stages or pins.schedule is None:
        return pins.virtual_stages or 1
    tried = named(pins.schedule).tried(pinned=True, chunks=None, policy="none", limit=_MOST)
    return min(tried, default=1)


def _too_few_to_rematerialise(
    model: str, names: Sequence[str], counts: Sequence[int], pins: Pins
) -> str:
    """Why a pinned number of rematerialised layers is not fewer than there are."""
    if not counts and pins.remat_layers:
        return (
            f"remat_layers={pins.remat_layers} rematerialises some of the layers, and {model} has"
            " no layers in a loop\nTry: layers under jax.lax.scan or nnx.scan, or no such pin"
        )
    groups = {} if pins.remat_classes == ANY_GROUP else {n: c for n, _, c in pins.remat_classes}
    stages = dict(pins.mesh or pins.axes).get("stage", 1)
    chunks = stages * (pins.virtual_stages or 1)
    here = [(pins.virtual_stages or 1) * -(-count // chunks) for count in counts]
    location = f"a stage of {model}" if stages > 1 else model
    faults = [
        f"remat_classes rematerialises {requested} of the layers of {name!r}, and {location} has"
        f" {count} there"
        for name, count in zip(names, here, strict=True)
        if (requested := groups.get(name)) and requested > count - (len(names) == 1)
    ]
    if pins.remat_layers and counts and pins.remat_layers >= sum(here):
        faults.append(
            f"remat_layers={pins.remat_layers} rematerialises some of the layers, and {location}"
            f" has {_number(sum(here))} in a loop"
        )
    if not faults:
        return ""
    return "; ".join(faults) + "\nTry: fewer, or a remat policy without a number for all of them"


def _number(layers: int) -> str:
    return "no layers" if not layers else "1 layer" if layers == 1 else f"{layers} layers"
