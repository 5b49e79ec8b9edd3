"""Elastic checkpoints: restored as another number of islands, or as islands with another
exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.annotation.trees import Tree
from shardlib.checkpointing.store import OpenCheckpoint
from shardlib.checkpointing.tree import (
    Spec,
    State,
    fitted,
    is_of_optimizer,
    named_leaves,
    raw_abstract,
)
from shardlib.errors import CheckpointError
from shardlib.findings import Finding
from shardlib.islands.compression import CompressedProgram
from shardlib.islands.exchanges import DiLoCo
from shardlib.islands.meeting import local
from shardlib.islands.program import (
    InFlightState,
    IslandsState,
    ResidualState,
    has_outer,
    mesh_of_islands,
    on_all,
    outer_of,
    with_own_streams,
    zeros,
)
from shardlib.layout import ISLAND
from shardlib.lowering.random_keys import is_key
from shardlib.lowering.runtime import TrainState

# --------------------------------------------------------------------------------------------------
# Sources of the arrays of one island in a checkpoint of another number of islands, and the union of
# several.

#: What goes before the paths of arrays of islands, of outer parameters, and of parameters that are
#: not trained.
OF_ISLANDS, OUTER, FROZEN = "islands.", "outer.params.", "frozen."


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The source of an array.

    Attributes:
        path: in the checkpoint.
        islands: whose arrays are stacked there; 1 where it is the array itself.
    """

    path: str
    islands: int = 1


def origin(path: str, arrays: Mapping[str, Spec], islands: int) -> Origin:
    """Returns where an array of one island comes from; of parameters, the outer ones where there
    are some.
    """
    if islands == 1:
        return Origin(path=path)
    kind, _, name = path.partition(".")
    if kind != "params":
        return Origin(path=f"{OF_ISLANDS}{path}", islands=islands)
    for candidate in (f"{OUTER}{name}", f"{FROZEN}{name}"):
        if candidate in arrays:
            return Origin(path=candidate)
    return Origin(path=f"{OF_ISLANDS}params.{name}", islands=islands)


def as_one_island(
    arrays: Mapping[str, Spec], target: Mapping[str, Tree], islands: int
) -> dict[str, Spec]:
    """Returns what a checkpoint would hold of one of its islands alone."""
    if islands == 1:
        return dict(arrays)
    specs = {
        f"params.{path.removeprefix(FROZEN)}".rstrip("."): spec
        for path, spec in arrays.items()
        if path.startswith(FROZEN)
    }
    for path, spec in arrays.items():
        if path.startswith(OF_ISLANDS):
            name = path.removeprefix(OF_ISLANDS).rstrip(".")
            specs[name] = _divided(spec, islands, target.get(name))
    return specs


def _divided(spec: Spec, islands: int, like: Tree | None) -> Spec:
    first, *others = spec.shape
    scalar = first == islands and (like is None or np.ndim(like) == 0)
    return replace(spec, shape=(*others,) if scalar else (first // islands, *others))


def of_island(array: jax.Array, leaf: Tree, number: int, islands: int) -> jax.Array:
    """The array of one island, as it is stored."""
    raw = raw_abstract(leaf)
    return jax.jit(
        lambda x: jnp.copy(x.reshape(islands, *raw.shape)[number]), out_shardings=raw.sharding
    )(array)


def combined(path: str, array: jax.Array, leaf: Tree, islands: int) -> jax.Array:
    """One array of those of all islands: of numbers the mean, of counts the largest, of what guards
    carry the smallest, of all else that of the first island.
    """
    raw = raw_abstract(leaf)

    def made(x: Any) -> Any:
        x = x.reshape(islands, *raw.shape)
        if path.startswith("guard."):
            return x.min(0)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            wide = jnp.promote_types(x.dtype, jnp.float32)
            return x.astype(wide).mean(0).astype(x.dtype)
        return x.max(0) if np.ndim(leaf) == 0 and not is_key(leaf) else x[0]

    numbers = jnp.issubdtype(array.dtype, jnp.inexact) or np.ndim(leaf) == 0
    if (
        is_of_optimizer(path)
        and not numbers
        and not is_key(leaf)
        and not _origins_alike(array, islands)
    ):
        raise CheckpointError(
            f"{path} has other integers on each of the {islands} islands of the checkpoint, and"
            " nothing says what their mean is\nTry: the same number of islands, or"
            " restore(program, parameters_only=True), which starts the optimizer anew"
        )
    return jax.jit(made, out_shardings=raw.sharding)(array)


def _origins_alike(array: jax.Array, islands: int) -> bool:
    def same(x: Any) -> Any:
        parts = x.reshape(islands, -1)
        return (parts == parts[:1]).all()

    return bool(jax.jit(same)(array))


# --------------------------------------------------------------------------------------------------
# Residuals and outer gradients in flight, for another number of islands.
#
# All islands update by the mean of what they send, so each goes on with the mean of what the
# islands did not send, or what is on the way: what is still to come is as much as before.


def residuals(
    source: WrittenByOthers, names: Sequence[str], islands: int, first: ResidualState, step: int
) -> ResidualState:
    """Returns what is kept of gradients: that of the checkpoint where it has some, and what there
    is before the first step where not.
    """
    return ResidualState(
        step=np.int32(step),
        residual=_means(source, "residual", names, first.residual, islands),
        momentum=_means(source, "momentum", names, first.momentum, islands),
        factors=_factors(source, names, first.factors),
    )


def on_the_way(
    source: WrittenByOthers, names: Sequence[str], like: IslandsState
) -> dict[str, Tree]:
    """Returns what is on the way between islands, by the fields that have it; nothing where islands
    do not meet with a delay.
    """
    flying = like.exchange
    if not isinstance(flying, InFlightState):
        return {}
    first = [zeros(array) for array in flying.sent]
    sent, sent_at, place = (
        _means(source, "sent", names, first, len(like.islands)),
        0,
        "outer.sent_at",
    )
    if sent is not first and place in source.checkpoint.about.arrays:
        sent_at = dict(source.checkpoint.read({place: place}, {place: flying.sent_at}))[place]
    return {"sent": sent, "sent_at": np.int32(int(sent_at))}


def _means(
    source: WrittenByOthers, field: str, names: Sequence[str], first: list[jax.Array], islands: int
) -> list[jax.Array]:
    """An array for each parameter: of all islands the mean of those that were saved."""
    paths = _paths(source, field, names) if first else {}
    if not first or len(paths) < len(first):
        return first
    ones = {name: _one(array, islands) for name, array in zip(names, first, strict=True)}
    means = {
        name: combined(field, array, ones[name], source.islands)
        for name, array in source.checkpoint.read(paths, ones)
    }
    return [_repeated(means[name], array) for name, array in zip(names, first, strict=True)]


def _factors(
    source: WrittenByOthers, names: Sequence[str], first: list[jax.Array]
) -> list[jax.Array]:
    """Q of each parameter, that of the checkpoint where the rank is the same."""
    paths = _paths(source, "factors", names) if first else {}
    fit = {
        name: path
        for (name, path), array in zip(paths.items(), first, strict=False)
        if tuple(source.checkpoint.about.arrays[path].shape) == array.shape
    }
    if not first or len(fit) < len(first):
        return first
    factors = dict(source.checkpoint.read(fit, dict(zip(names, first, strict=True))))
    return [factors[name] for name in names]


def _paths(source: WrittenByOthers, field: str, names: Sequence[str]) -> dict[str, str]:
    paths = {name: f"outer.{field}.{name}" for name in names}
    return {name: path for name, path in paths.items() if path in source.checkpoint.about.arrays}


def _one(array: jax.Array, islands: int) -> Tree:
    """Returns what one island has of an array of all, abstract, and alike on all."""
    assert isinstance(array.sharding, NamedSharding)
    first, *others = array.sharding.spec
    inner = tuple(axis for axis in first if axis != ISLAND.name) if isinstance(first, tuple) else ()
    sharding = NamedSharding(array.sharding.mesh, PartitionSpec(inner or None, *others))
    shape = (array.shape[0] // islands, *array.shape[1:])
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)


def _repeated(array: jax.Array, like: jax.Array) -> jax.Array:
    """The same array for every island."""
    count = like.shape[0] // array.shape[0]
    repeat = jax.jit(lambda x: jnp.concatenate([x] * count), out_shardings=like.sharding)
    return repeat(array)


# --------------------------------------------------------------------------------------------------
# Descriptions of the changes to a checkpoint that is restored as other islands.


def restart_finding(source: WrittenByOthers, target: State, *, new_optimizer: bool) -> Finding:
    """A finding that says what a checkpoint becomes."""
    before = source.islands
    after = len(target.islands) if isinstance(target, IslandsState) else 1
    of = "one island" if before == 1 else f"{before} islands"
    goes_on = f"goes on as {after}" if before != after else "goes on as islands that meet otherwise"
    sentences = [f"The checkpoint of step {source.checkpoint.about.step} is of {of} and {goes_on}."]
    if before == 1:
        sentences.append("All start from its parameters and its optimizer.")
    else:
        sentences.append(f"They start from {_start(source)}.")
    if before > 1 and not new_optimizer:
        sentences.append("Moments of optimizers are means.")
    if isinstance(target, IslandsState) and target.keeps:
        sentences.append(f"The outer momentum {'is kept' if source.keeps else 'starts at zero'}.")
    if after > before:
        sentences.append(f"Random streams of islands from number {before + 1} on are new.")
    return Finding(
        code="other-number-of-islands" if before != after else "other-exchange",
        severity="warning",
        where="exchange",
        message=" ".join(sentences),
    )


def _start(source: WrittenByOthers) -> str:
    """Returns where islands start: how far back their last meeting is, where that is known."""
    if not source.keeps:
        return "the mean of the islands' parameters"
    plan, _ = source.checkpoint.about.read_plan()
    exchange = plan.exchange if plan is not None else None
    lost = ""
    if isinstance(exchange, DiLoCo) and exchange.fragments > 1:
        lost = "; what islands did since a parameter met is left out"
    elif isinstance(exchange, DiLoCo) and (since := source.checkpoint.about.step % exchange.every):
        lost = f", {since} steps ago: what islands did since is left out"
    return f"the outer parameters, those of the last meeting{lost}"


# --------------------------------------------------------------------------------------------------
# A checkpoint restored as another number of islands, one among them, or as islands that meet in
# another way.
#
# Outer parameters are what islands have learned, or else their mean: all islands start from them.
# The outer momentum is kept, moments of the optimizers are averaged, and islands beyond those that
# were saved draw random numbers of their own.

#: What goes before the paths of what the model itself updates.
MODEL = "model_state."


@dataclass(frozen=True, kw_only=True)
class WrittenByOthers:
    """A checkpoint of another number of islands, or of islands with another exchange; see
    `shardlib.checkpointing.store.Written`.
    """

    checkpoint: OpenCheckpoint

    @property
    def islands(self) -> int:
        """Number of islands that were saved."""
        step = self.checkpoint.about.arrays.get(f"{OF_ISLANDS}step")
        return step.shape[0] if step is not None and step.shape else 1

    @property
    def keeps(self) -> bool:
        """True if parameters are outer in it."""
        return has_outer(self.checkpoint.about.arrays, "params")

    def target(self, like: State) -> Tree:
        """See `Written`: the state of one island, over the devices of all."""
        return _of_one(like)

    def arrays(self, target: Mapping[str, Tree]) -> Mapping[str, Spec]:
        """See `Written`: those of one island."""
        return as_one_island(self.checkpoint.about.arrays, target, self.islands)

    def state(self, like: State, target: Tree) -> State:
        """See `Written`."""
        named = named_leaves(target)
        if isinstance(like, IslandsState):
            return _islands(self, named, target, like)
        arrays = _other_number_alike(self, named, [*named])
        return jax.tree.structure(target).unflatten([arrays[path] for path in named])

    def findings(self, like: State, *, new_optimizer: bool) -> tuple[Finding, ...]:
        """See `Written`."""
        return (restart_finding(self, like, new_optimizer=new_optimizer),)


def _of_one(state: State) -> TrainState:
    """The abstract state of one island, over the devices of all."""
    if not isinstance(state, IslandsState):
        return state
    mesh = mesh_of_islands(state)
    return jax.tree.map(lambda leaf: on_all(leaf, mesh), state.islands[0])


def _other_number_alike(
    source: WrittenByOthers, target: Mapping[str, Tree], paths: list[str]
) -> dict[str, Any]:
    """Arrays that all islands start with, by path: one out of those of the islands that were saved;
    of random streams those of the first.
    """
    count = source.islands
    origins = {path: origin(path, source.checkpoint.about.arrays, count) for path in paths}
    arrays_by_path: dict[str, Any] = {}
    for path, array in source.checkpoint.read(
        {path: place.path for path, place in origins.items()}, target
    ):
        leaf = target[path]
        if origins[path].islands > 1:
            first = path.startswith(MODEL)
            array = (
                of_island(array, leaf, 0, count) if first else combined(path, array, leaf, count)
            )
        arrays_by_path[path] = source.checkpoint.placed(path, array, leaf)
    return arrays_by_path


def _islands(
    source: WrittenByOthers, target: Mapping[str, Tree], one: TrainState, like: IslandsState
) -> IslandsState:
    """The state of islands that all start alike, but for their random streams."""
    trained = {name: f"params.{name}".rstrip(".") for name in like.trained}
    streams = [path for path in target if path.startswith(MODEL)]
    arrays, outer = _trained(source, target, trained, like)
    others = {*arrays, *(streams if source.islands > 1 else ())}
    arrays |= _other_number_alike(source, target, [path for path in target if path not in others])
    models = _models(source, target, streams, len(like.islands)) if source.islands > 1 else []
    states: list[TrainState] = []
    for number, island in enumerate(like.islands):
        own_arrays = {**arrays, **(models[number] if models else {})}
        state = jax.tree.structure(one).unflatten(
            [
                local(own_arrays[path], leaf.sharding)
                for path, leaf in zip(target, jax.tree.leaves(island), strict=True)
            ]
        )
        states.append(state if number < source.islands else with_own_streams(number, state))
    step = int(arrays["step"])
    program = source.checkpoint.program
    if isinstance(program, CompressedProgram):
        first = program.first_residuals()
        exchange = residuals(source, like.trained, len(like.islands), first, step)
    else:
        exchange = _outer(source, like, outer, step)
    return replace(like, islands=tuple(states), exchange=exchange)


def _trained(
    source: WrittenByOthers,
    target: Mapping[str, Tree],
    trained: Mapping[str, str],
    like: IslandsState,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trained parameters by path, and the outer ones by name."""
    wide = dict(zip(like.trained, outer_of(like).params, strict=True)) if like.keeps else {}
    if wide and source.keeps:
        outer = dict(source.checkpoint.read({name: f"{OUTER}{name}" for name in trained}, wide))
        return {path: _copied(outer[name], target[path]) for name, path in trained.items()}, outer
    params = _other_number_alike(source, target, [*trained.values()])
    return params, {name: _copied(params[trained[name]], leaf) for name, leaf in wide.items()}


def _models(
    source: WrittenByOthers, target: Mapping[str, Tree], paths: list[str], islands: int
) -> list[dict[str, Any]]:
    """Returns what the models of the islands go on with: an island that was saved with its own,
    others with that of the first.
    """
    count, models = source.islands, [dict[str, Any]() for _ in range(islands)]
    stored = {path: origin(path, source.checkpoint.about.arrays, count).path for path in paths}
    for path, array in source.checkpoint.read(stored, target):
        leaf = target[path]
        for number, model in enumerate(models):
            stream = of_island(array, leaf, number if number < count else 0, count)
            model[path] = fitted(stream, leaf)
    return models


def _outer(source: WrittenByOthers, like: IslandsState, params: dict[str, Any], step: int) -> Any:
    """Returns what is outer."""
    if isinstance(like.exchange, ResidualState):
        raise CheckpointError(
            f"{source.checkpoint.name} goes on with compressed gradients, and the first of what"
            " they keep is made by a program\nTry: Checkpoints.restore with the program"
        )
    names = like.trained if like.keeps else ()
    momenta = dict(zip(names, outer_of(like).momentum, strict=True))
    if source.keeps:
        momentum = dict(
            source.checkpoint.read({name: f"outer.momentum.{name}" for name in momenta}, momenta)
        )
    else:
        momentum = {name: zeros(leaf) for name, leaf in momenta.items()}
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
