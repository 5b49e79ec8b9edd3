"""Are the arguments of the public functions what they should be? Asked before anything is
traced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardlib.decisions.pins import Pins
from shardlib.hardware.devices import devices_of
from shardlib.hardware.topology import Topology
from shardlib.planning.plan import Plan
from shardlib.untrusted.arguments import Kind, require_kinds


def _transformation(value: Any) -> bool:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def _devices(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and all(
        isinstance(one, jax.Device) for one in np.asarray(value, object).flat
    )


def _guards(value: Any) -> bool:
    # Whoever has guards has loaded the lowering; planning does without it.
    from shardlib.lowering.program.guards import Guards

    return isinstance(value, Guards)


_KINDS: Mapping[str, Kind] = {
    "loss": (callable, "function", "loss=lambda model, batch: jnp.mean(...)"),
    "evaluation": (callable, "function", "evaluation=lambda model, batch: jnp.mean(...)"),
    "optimizer": (_transformation, "optax transformation", "optimizer=optax.adam(1e-3)"),
    "batch": (
        lambda value: not isinstance(value, (bool, int, float, complex, str, bytes)),
        "tree of arrays, of which the leading dim is the number of rows",
        'batch={"x": jax.ShapeDtypeStruct((64, 128), jnp.float32)}',
    ),
    "topology": (
        lambda value: isinstance(value, (str, Topology)) or devices_of(value) is not None,
        "topology",
        'topology="cpu:8", a jax.sharding.Mesh, or a list of devices',
    ),
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
        _guards,
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
        given: arguments by name; None where one is left out.
    """
    require_kinds(asked, _KINDS, given, needed=_NEEDED)
