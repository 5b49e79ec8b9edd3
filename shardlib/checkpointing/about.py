"""What a checkpoint says of itself: a JSON document with a digest.

It has everything that is not an array: the plan, the position in the data, metrics, and of every
array shape, dtype and sums.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from shardlib.checkpointing.tree import Spec
from shardlib.errors import CheckpointError
from shardlib.planning.plan import Plan, plan_from_data, plan_to_data
from shardlib.report import Finding
from shardlib.untrusted import construct, shown
from shardlib.untrusted.json_types import Json, JsonMapping, JsonObject

#: Version of the JSON form; readers refuse others.
FORMAT = 1


class DamagedError(Exception):
    """A checkpoint whose bytes are not the ones that were written."""


@dataclass(frozen=True, kw_only=True)
class About:
    """The document of one checkpoint.

    Attributes:
        step: steps done.
        time: seconds since 1970 when it was written.
        arrays: what is stored, by path.
        sums: two sums of each array, see `shardlib.lowering.runtime.checksums`.
        plan: the plan it was trained under as plain data; None where it was saved without.
        extra: what the training loop wants back, as plain data.
        metrics: numbers by name.
    """

    step: int
    time: float
    arrays: Mapping[str, Spec]
    sums: Mapping[str, tuple[int, int]]
    plan: JsonMapping | None
    extra: JsonMapping
    metrics: Mapping[str, float]

    def to_json(self) -> JsonObject:
        """The document as plain data, with its digest."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "time": self.time,
            "jax": jax.__version__,
            "arrays": {
                path: {
                    "shape": list(spec.shape),
                    "dtype": spec.dtype,
                    "key": spec.key,
                    "sums": list(self.sums[path]),
                }
                for path, spec in self.arrays.items()
            },
            "plan": self.plan,
            "extra": dict(self.extra),
            "metrics": dict(self.metrics),
        }
        return {"digest": digest(content), "content": content}

    def read_plan(self) -> tuple[Plan | None, tuple[Finding, ...]]:
        """The plan, or a finding where another version wrote it in a form that this one does not
        read.
        """
        if self.plan is None:
            return None, ()
        try:
            return plan_from_data(self.plan), ()
        except (ValueError, TypeError) as error:
            return None, (
                Finding(
                    code="checkpoint-plan",
                    severity="info",
                    where=f"step {self.step}",
                    message=f"The plan of the checkpoint is not read: {error}",
                ),
            )


@dataclass(frozen=True, kw_only=True)
class _Array:
    """What a document has of one array."""

    shape: tuple[int, ...]
    dtype: str
    key: str
    sums: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class _Written:
    """The content of a document; metrics may be no finite numbers."""

    step: int
    time: float
    arrays: Mapping[str, _Array]
    plan: JsonMapping | None
    extra: JsonMapping
    metrics: JsonMapping


def digest(content: Json) -> str:
    """SHA-256 of plain data, whatever the order of keys."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def described(
    step: int,
    sums: Mapping[str, tuple[int, int]],
    specs: Mapping[str, Spec],
    plan: Plan | None,
    extra: JsonMapping,
    metrics: JsonMapping,
) -> About:
    """The document of a state that is being saved; waits for its metrics.

    Args:
        specs: shape, dtype and sharding of every array, by path.
        plan: what it is trained under; None where there is none.
    """
    numbers = {name: float(value) for name, value in metrics.items()}
    return About(
        step=step,
        time=time.time(),
        arrays=specs,
        sums=sums,
        plan=plan_to_data(plan) if plan else None,
        extra=extra,
        metrics=numbers,
    )


def from_json(data: Json) -> About:
    """Reads a document."""
    try:
        same = isinstance(data, Mapping) and digest(data.get("content")) == data.get("digest")
    except (TypeError, ValueError, RecursionError):  # no plain data
        same = False
    if not same:
        raise DamagedError("its description does not have the digest that it was saved with")
    content = data["content"]
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(
            f"the checkpoint has format {shown(found)}, this version reads {FORMAT}\nTry: the"
            " version of shardlib that wrote it"
        )
    written = construct(_Written, content, "the description of the checkpoint", CheckpointError)
    arrays = written.arrays
    return About(
        step=written.step,
        time=written.time,
        plan=written.plan,
        extra=written.extra,
        metrics=content["metrics"],
        arrays={path: Spec(shape=a.shape, dtype=a.dtype, key=a.key) for path, a in arrays.items()},
        sums={path: a.sums for path, a in arrays.items()},
    )


def of_step(about: About, step: int) -> About:
    """The document, if it is that of the step that the folder is called by."""
    if about.step != step:
        raise DamagedError(
            f"it is the checkpoint of step {about.step} under another name; what was saved at step"
            f" {step} is not in it"
        )
    return about


def checked_extra(extra: JsonMapping) -> JsonObject:
    """What JSON makes of `extra`, so that later changes to it change nothing."""
    try:
        return dict(json.loads(json.dumps(dict(extra))))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra is no plain data ({error})\nTry: dicts, lists, strings, numbers, booleans and"
            " None; arrays belong in the state"
        ) from error
