"""What keeps a step from doing harm: finite checks, a scale of the loss, clipped gradients, a limit
for the loss.

    guards = shardlib.Guards(clip=1.0, scale=2.0**15)
    program = shardlib.compile(init, loss, optimizer, batch, guards=guards)
    state, metrics = program.step(state, batch)
    metrics["gradient_norm"], metrics["skipped"], metrics["loss_scale"]

All of it is part of the compiled step: nothing waits for the host. The norm of the gradients is one
scalar, summed over all devices at once; it is not finite where any gradient is not, so it is the
check too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.annotation.trees.paths import Tree
from shardlib.errors import PlanError, raise_all
from shardlib.jax_types import Metrics, Value
from shardlib.lowering.runtime.state import GuardState, TrainState


@dataclass(frozen=True, kw_only=True)
class Guards:
    """Guards of a training step. A step whose loss or gradients are not finite leaves parameters,
    optimizer state and model state as they were.

    Attributes:
        clip: gradients whose global norm is larger are scaled down to it; None leaves them.
        scale: first scale of the loss, for gradients in float16; None for no scale. It is halved
            after gradients that are not finite and doubled after `growth` steps without
            (arXiv:1710.03740, section 3.2; torch.amp.GradScaler).
        growth: steps after which the scale is doubled.
        spike: skip steps whose loss is above the `limit` of the state, which is infinite until
            `limited` sets it.

    Raises:
        PlanError: numbers out of range, all of them listed.
    """

    clip: float | None = None
    scale: float | None = None
    growth: int = 2000
    spike: bool = False

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {value!r}; it must be positive and finite"
            for name, value in (("clip", self.clip), ("scale", self.scale))
            if value is not None and not (math.isfinite(value) and value > 0)
        ]
        failures += [f"growth is {self.growth!r}; it must be at least 1"] if self.growth < 1 else []
        if failures:
            raise_all(PlanError, "the guards are not usable", failures)

    def first(self) -> GuardState:
        """What they carry before the first step."""
        return GuardState(
            scale=None if self.scale is None else jnp.float32(self.scale),
            good=None if self.scale is None else jnp.int32(0),
            limit=jnp.float32(jnp.inf) if self.spike else None,
        )

    def after(self, state: GuardState, finite: Value) -> GuardState:
        """What they carry after a step with gradients that are finite, or not.

        Args:
            state: before the step.
            finite: whether loss and gradients are finite, boolean scalar.

        Returns:
            The state with the scale halved or doubled, where there is one.
        """
        if state.scale is None:
            return state
        grown = state.good + 1 >= self.growth
        return replace(
            state,
            scale=jnp.where(
                finite, jnp.where(grown, state.scale * 2, state.scale), state.scale / 2
            ),
            good=jnp.where(finite & ~grown, state.good + 1, 0),
        )


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A step's loss and gradients behind its guards.

    Attributes:
        loss: without the scale.
        gradients: without the scale, and clipped.
        norm: global norm of the gradients before they are clipped.
        finite: whether all of them are finite.
        wanted: whether the update is to be done.
    """

    loss: Any
    gradients: Tree
    norm: Any
    finite: Any
    wanted: Any

    def chosen(self, new: Tree, old: Tree) -> Tree:
        """New arrays where the update is wanted, otherwise those before it."""
        return jax.tree.map(lambda after, before: jnp.where(self.wanted, after, before), new, old)

    def metrics(self, state: GuardState) -> Metrics:
        """What they say of the step, which began with a state."""
        found = {"gradient_norm": self.norm, "skipped": 1 - self.wanted.astype(jnp.int32)}
        return found if state.scale is None else {**found, "loss_scale": state.scale}


def checked(
    guards: Guards, state: GuardState, loss: Value, gradients: Tree, shardings: Tree
) -> Checked:
    """Checks a step."""
    if state.scale is not None:
        loss, gradients = (
            loss / state.scale,
            jax.tree.map(lambda leaf: leaf / state.scale.astype(leaf.dtype), gradients),
        )
    norm = global_norm(jax.tree.leaves(gradients), jax.tree.leaves(shardings))
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    wanted = finite if state.limit is None else finite & (loss <= state.limit)
    if guards.clip is not None:
        clip, small = guards.clip, norm < guards.clip
        gradients = jax.tree.map(
            lambda leaf: jnp.where(small, leaf, leaf / norm.astype(leaf.dtype) * clip), gradients
        )
    return Checked(loss=loss, gradients=gradients, norm=norm, finite=finite, wanted=wanted)


def global_norm(leaves: Sequence[Value], shardings: Sequence[NamedSharding]) -> Value:
    """Euclidean norm of all elements of all arrays, float32 at least: every device sums its
    shards, and one all-reduce the sums of all devices.
    """
    mesh = shardings[0].mesh

    def local(*pieces: Any) -> Any:
        sums = [
            jnp.sum(
                jnp.square(
                    jnp.abs(piece).astype(jnp.promote_types(jnp.abs(piece).dtype, jnp.float32))
                )
            )
            * (_ways(sharding) / mesh.size)
            for piece, sharding in zip(pieces, shardings, strict=True)
        ]
        return jax.lax.psum(sum(sums[1:], sums[0]), mesh.axis_names)

    specs = tuple(sharding.spec for sharding in shardings)
    return jnp.sqrt(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(
            *leaves
        )
    )


def _ways(sharding: NamedSharding) -> int:
    """Number of different pieces of an array."""
    names = [
        name
        for dim in sharding.spec
        if dim is not None
        for name in (dim if isinstance(dim, tuple) else (dim,))
    ]
    return math.prod(sharding.mesh.shape[name] for name in names)


def limited(state: TrainState, limit: float) -> TrainState:
    """The state with a limit for the loss of the steps to come: those above it are skipped."""
    if state.guard is None or state.guard.limit is None:
        raise PlanError(
            "the program has no limit for the loss\nTry: shardlib.compile(...,"
            " guards=shardlib.Guards(spike=True))"
        )
    old = state.guard.limit
    return replace(
        state,
        guard=replace(
            state.guard, limit=jax.device_put(jnp.asarray(limit, old.dtype), old.sharding)
        ),
    )
