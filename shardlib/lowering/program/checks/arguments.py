"""Are the arguments of the public functions what they should be? Asked before anything is
traced.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import numpy as np

from shardlib.decisions.pins import Pins
from shardlib.errors import ArgumentError, raise_all
from shardlib.hardware.topology import Topology
from shardlib.lowering.program.guards import Guards
from shardlib.planning.plan import Plan

#: Seeds are below it.
SEEDS = 2**31


def _transformation(value: Any) -> bool:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def _devices(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and all(
        isinstance(one, jax.Device) for one in np.asarray(value, object).flat
    )


#: Whether a value is of a kind, the kind in words, and an example.
Kind = tuple[Callable[[Any], bool], str, str]
_KINDS: Mapping[str, Kind] = {
    "loss": (callable, "function", "loss=lambda model, batch: jnp.mean(...)"),
    "evaluation": (callable, "function", "evaluation=lambda model, batch: jnp.mean(...)"),
    "optimizer": (_transformation, "optax transformation", "optimizer=optax.adam(1e-3)"),
    "topology": (lambda value: isinstance(value, (str, Topology)), "topology", 'topology="cpu:8"'),
    "pin": (
        lambda value: isinstance(value, (Mapping, Pins)),
        "mapping of decisions",
        'pin={"mesh": {"data": 8}}',
    ),
    "allow": (
        lambda value: isinstance(value, Mapping),
        "mapping of dtypes",
        'allow={"moment_dtype": ["bfloat16"]}',
    ),
    "limits": (
        lambda value: hasattr(value, "seconds") and hasattr(value, "memory_bytes"),
        "limits of a compiler",
        "limits=shardlib.verification.isolation.Limits(seconds=600.0)",
    ),
    "name": (lambda value: isinstance(value, str), "string", 'name="model"'),
    "framework": (
        lambda value: isinstance(value, str),
        "name of a framework",
        'framework="megatron-core"',
    ),
    "plan": (
        lambda value: isinstance(value, Plan),
        "plan",
        "plan=shardlib.plan(...), or plan=shardlib.Plan.from_json(text)",
    ),
    "devices": (_devices, "list of devices", "devices=jax.devices()"),
    "guards": (
        lambda value: isinstance(value, Guards),
        "guards",
        "guards=shardlib.Guards(clip=1.0)",
    ),
    "disk": (
        lambda value: isinstance(value, (str, os.PathLike)),
        "path of a folder",
        'disk="/path"',
    ),
}
#: Those that cannot be left out.
_NEEDED = ("loss", "optimizer")


def require_arguments(asked: str, **given: object) -> None:
    """Refuses arguments of the wrong kind.

    Args:
        asked: name of the function that they are given to.
        given: arguments by name; None where one is left out.

    Raises:
        ArgumentError: one is none of what it should be; all of them are listed.
    """
    require_kinds(asked, _KINDS, given, needed=_NEEDED)


def require_kinds(
    asked: str, kinds: Mapping[str, Kind], given: Mapping[str, object], *, needed: Collection[str]
) -> None:
    """Refuses arguments of the wrong kind.

    Args:
        asked: name of the function that they are given to.
        kinds: of every argument what it must be.
        given: arguments by name; None where one is left out.
        needed: names of those that cannot be left out.

    Raises:
        ArgumentError: one is none of what it should be; all of them are listed.
    """
    wrong = [
        name
        for name, value in given.items()
        if (value is not None or name in needed) and not kinds[name][0](value)
    ]
    if wrong:
        raise_all(
            ArgumentError,
            f"shardlib.{asked} cannot use its arguments",
            [f"{name} is {_shown(given[name])} and no {kinds[name][1]}" for name in wrong],
            hint="; ".join(kinds[name][2] for name in wrong),
        )


def read_seed(seed: SupportsIndex) -> int:
    """A seed as an integer.

    Raises:
        ArgumentError: it is none, or out of range.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        raise ArgumentError(
            f"seed is {_shown(seed)} and no integer\nTry: an integer from 0 to {SEEDS - 1}"
        ) from None
    if not 0 <= number < SEEDS:
        raise ArgumentError(f"seed {number} is out of range\nTry: an integer from 0 to {SEEDS - 1}")
    return number


def _shown(value: Any) -> str:
    """A value in a few words."""
    if value is None or isinstance(value, (bool, int, float, str)):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}..."
    return (
        f"the function {value.__name__}"
        if hasattr(value, "__name__")
        else f"a {type(value).__name__}"
    )
