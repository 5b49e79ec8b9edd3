"""A checkpoint restored as another number of islands, one among them, or as islands that meet in
another way.

Outer parameters are what islands have learned, or else their mean: all islands start from them.
The outer momentum is kept, moments of the optimizers are averaged, and islands beyond those that
were saved draw random numbers of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.annotation.trees.paths import Tree
from shardlib.checkpointing.elastic.origins import (
    OUTER,
    as_one_island,
    combined,
    of_island,
    origin,
)
from shardlib.checkpointing.elastic.residuals import on_the_way, residuals
from shardlib.checkpointing.elastic.source import Source
from shardlib.checkpointing.elastic.told import keeps, told
from shardlib.checkpointing.islands.form import (
    AnyProgram,
    State,
    anew,
    is_of_optimizer,
    without_optimizer,
)
from shardlib.checkpointing.tree import compared, fitted, named_leaves, spec_of
from shardlib.errors import CheckpointError
from shardlib.lowering.islands.compression.program import CompressedProgram
from shardlib.lowering.islands.stacked import local
from shardlib.lowering.islands.start import streams_of, zeros
from shardlib.lowering.islands.state import IslandsState, ResidualState, outer_of
from shardlib.lowering.islands.stored import mesh_of_islands, on_all
from shardlib.lowering.program.program import Program
from shardlib.lowering.runtime.state import TrainState
from shardlib.processes.values import whole
from shardlib.report import Finding

#: What goes before the paths of what the model itself updates.
MODEL = "model_state."


def read_other_number(
    source: Source,
    wanted: State,
    program: AnyProgram | None = None,
    *,
    new_optimizer: bool = False,
) -> tuple[State, tuple[Finding, ...]]:
    """Restores a checkpoint as another number of islands than were saved."""
    like = without_optimizer(wanted) if new_optimizer else wanted
    one = _of_one(like)
    target = named_leaves(one)
    stored = as_one_island(source.about.arrays, target, source.islands)
    findings = compared(
        {p: spec for p, spec in stored.items() if not (new_optimizer and is_of_optimizer(p))},
        {p: spec_of(leaf) for p, leaf in target.items()},
        source.name,
    )
    state: State
    if isinstance(like, IslandsState):
        state = _islands(source, target, one, like, program)
    else:
        paths = [*target]
        arrays = _alike(source, target, paths, program)
        state = jax.tree.structure(one).unflatten([arrays[path] for path in paths])
    if new_optimizer:
        assert program is not None
        state = anew(program, state)
    return state, (*findings, told(source, wanted, new_optimizer=new_optimizer))


def _of_one(state: State) -> TrainState:
    """The abstract state of one island, over the devices of all."""
    if not isinstance(state, IslandsState):
        return state
    mesh = mesh_of_islands(state)
    return jax.tree.map(lambda leaf: on_all(leaf, mesh), state.islands[0])


def _alike(
    source: Source,
    target: Mapping[str, Tree],
    paths: list[str],
    program: AnyProgram | None = None,
) -> dict[str, Any]:
    """Arrays that all islands start with, by path: one out of those of the islands that were saved;
    of random streams those of the first.
    """
    arrays, count = source.about.arrays, source.islands
    origins = {path: origin(path, arrays, count) for path in paths}
    kept = program.stored if isinstance(program, Program) else frozenset[str]()
    found: dict[str, Any] = {}
    for path, array in source.read({p: one.path for p, one in origins.items()}, target):
        leaf = target[path]
        if origins[path].islands > 1:
            first = path.startswith(MODEL)
            array = (
                of_island(array, leaf, 0, count) if first else combined(path, array, leaf, count)
            )
        found[path] = fitted({path: leaf}, {path: array})[path]
        if path in kept:
            assert isinstance(program, Program)
            sums = source.camera.sums({path: array})({path: array})
            found[path] = program.stow(found[path], whole(sums)[0])
    return found


def _islands(
    source: Source,
    target: Mapping[str, Tree],
    one: TrainState,
    like: IslandsState,
    program: AnyProgram | None,
) -> IslandsState:
    """The state of islands that all start alike, but for their random streams."""
    trained = {name: f"params.{name}".rstrip(".") for name in like.trained}
    streams = [path for path in target if path.startswith(MODEL)]
    arrays, outer = _trained(source, target, trained, like)
    others = {*arrays, *(streams if source.islands > 1 else ())}
    arrays |= _alike(source, target, [path for path in target if path not in others])
    models = _models(source, target, streams, len(like.islands)) if source.islands > 1 else []
    states: list[TrainState] = []
    for number, island in enumerate(like.islands):
        mine = {**arrays, **(models[number] if models else {})}
        state = jax.tree.structure(one).unflatten(
            [
                local(mine[path], leaf.sharding)
                for path, leaf in zip(target, jax.tree.leaves(island), strict=True)
            ]
        )
        states.append(state if number < source.islands else streams_of(number, state))
    step = int(arrays["step"])
    if isinstance(program, CompressedProgram):
        first = program.compressed.first()
        exchange = residuals(source, like.trained, len(like.islands), first, step)
    else:
        exchange = _outer(source, like, outer, step)
    return replace(like, islands=tuple(states), exchange=exchange)


def _trained(
    source: Source, target: Mapping[str, Tree], trained: Mapping[str, str], like: IslandsState
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trained parameters by path, and the outer ones by name."""
    wide = dict(zip(like.trained, outer_of(like).params, strict=True)) if keeps(like) else {}
    if wide and source.keeps:
        outer = dict(source.read({name: f"{OUTER}{name}" for name in trained}, wide))
        return {path: _copied(outer[name], target[path]) for name, path in trained.items()}, outer
    params = _alike(source, target, [*trained.values()])
    return params, {name: _copied(params[trained[name]], leaf) for name, leaf in wide.items()}


def _models(
    source: Source, target: Mapping[str, Tree], paths: list[str], islands: int
) -> list[dict[str, Any]]:
    """What the models of the islands go on with: an island that was saved with its own, others with
    that of the first.
    """
    count, found = source.islands, [dict[str, Any]() for _ in range(islands)]
    stored = {path: origin(path, source.about.arrays, count).path for path in paths}
    for path, array in source.read(stored, target):
        leaf = target[path]
        for number, mine in enumerate(found):
            own = of_island(array, leaf, number if number < count else 0, count)
            mine |= fitted({path: leaf}, {path: own})
    return found


def _outer(source: Source, like: IslandsState, params: dict[str, Any], step: int) -> Any:
    """What is outer."""
    if isinstance(like.exchange, ResidualState):
        raise CheckpointError(
            f"{source.name} goes on with compressed gradients, and the first of what they keep is"
            " made by a program\nTry: Checkpoints.restore with the program"
        )
    names = like.trained if keeps(like) else ()
    wanted = dict(zip(names, outer_of(like).momentum, strict=True))
    if source.keeps:
        momentum = dict(source.read({name: f"outer.momentum.{name}" for name in wanted}, wanted))
    else:
        momentum = {name: zeros(leaf) for name, leaf in wanted.items()}
    return replace(
        like.exchange,
        step=np.int32(step),
        params=[params[name] for name in names],
        momentum=[momentum[name] for name in names],
        **on_the_way(source, names, like),
    )


def _copied(array: jax.Array, leaf: Tree) -> jax.Array:
    """The array as another is, in a buffer of its own."""
    return jax.jit(lambda x: jnp.copy(x.astype(leaf.dtype)), out_shardings=leaf.sharding)(array)
