"""What is being trained, as far as it decides the numbers: taken from what is traced, not from what
somebody calls it.

    loss        its jaxpr, with derivatives that are written by hand, and the numbers in it
    optimizer   the jaxprs of its `init` and `update`, without their numbers; the guards of the step
    lr          the numbers in them: learning rates, schedules, decays
    data        the digest of a dataset; of a function, that of its first batch
    seed, model, batch
                as they are; of the model and the batch paths, shapes and dtypes
    exchange    how islands meet, with its numbers; not how many there are

A step of the user's own (`shardlib.compile_step`) has all of it inside: its jaxpr is the loss, and
the numbers in it count as `lr`.

Plan, mesh, topology and microbatches are not among them: a run goes on under any. The digests are
the same in every process; other versions of JAX, Flax or optax may write the same function down
otherwise, and then the versions are a part of the message (`differences.py`, which compares).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.data.batches.loader import Rows
from shardlib.frontend.steps.step_program import StepProgram
from shardlib.lowering.islands.learned import first_of
from shardlib.lowering.program.program import Program
from shardlib.training.run.graph import Drawn, draw, drawn, with_derivatives
from shardlib.training.states.programs import AnyProgram
from shardlib.untrusted.json_types import JsonObject

#: Numbers of an optimizer that are kept to be shown.
NUMBERS = 64


def traced(
    programs: Sequence[tuple[int, AnyProgram]], data: Rows | Callable[[int], Tree], seed: int
) -> JsonObject:
    """What is traced, as plain data."""
    program = programs[0][1]
    if isinstance(program, StepProgram):
        return _of_step(program, data, seed)
    model = first_of(program).model
    losses = [_loss(one) for _, one in programs]
    return {
        "loss": {
            "digest": _hash(
                [(before, *one.digests) for (before, _), one in zip(programs, losses, strict=True)]
            ),
            "operations": dict(losses[0].operations),
            "constants": list(losses[0].numbers),
            "untraceable": losses[0].untraceable,
        },
        **_optimizer(first_of(program)),
        "data": {"digest": _data(data)},
        "seed": {"value": seed},
        "model": {"digest": _hash(_shapes((model.params, model.state)))},
        "batch": {"arrays": {str(before): _shapes(one.rows) for before, one in programs}},
        "exchange": {"value": _exchange(program)},
    }


def _of_step(program: StepProgram, data: Rows | Callable[[int], Tree], seed: int) -> JsonObject:
    """What is traced of a step that has everything inside."""
    found = draw(program.traced.closed)
    return {
        "loss": {
            "digest": _hash(found.structure),
            "operations": dict(found.operations),
            "constants": [],
            "untraceable": "",
        },
        "optimizer": {"digest": "inside of the step", "operations": {}},
        "lr": {"digest": _hash(found.constants), "constants": list(found.numbers[:NUMBERS])},
        "data": {"digest": _data(data)},
        "seed": {"value": seed},
        "model": {"digest": _hash(_shapes(program.traced.state))},
        "batch": {"arrays": {"0": _shapes(program.batch)}},
        "exchange": {"value": _exchange(program)},
    }


def _exchange(program: AnyProgram) -> str:
    """How islands meet, however many there are."""
    numbers = program.plan.exchange.to_json()
    kind = str(numbers.pop("kind"))
    numbers.pop("islands", None)
    return " ".join([kind, *(f"{name}={value}" for name, value in numbers.items())])


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """A loss: digests, operations, first numbers, and why its derivatives by hand are not among
    that, where they are not.
    """

    digests: tuple[str, ...]
    operations: Mapping[str, int]
    numbers: tuple[float, ...] = ()
    untraceable: str = ""


def _loss(program: AnyProgram) -> _Loss:
    if isinstance(program, StepProgram) or program.source is None:
        return _Loss(digests=("not traced",), operations={})
    closed = program.source.closed_jaxpr
    parameters = len(jax.tree.leaves(first_of(program).model.params))
    first = draw(closed)
    untraceable, second = "", first
    try:
        differentiated = with_derivatives(closed, parameters)
        second = first if differentiated is closed else draw(differentiated)
    except (
        Exception
    ) as error:  # whatever a user's own derivative, or JAX, raises outside of the step
        untraceable = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return _Loss(
        digests=(first.structure, second.structure, first.constants, second.constants),
        operations=first.operations,
        numbers=first.numbers[:NUMBERS],
        untraceable=untraceable,
    )


def _optimizer(program: Program) -> JsonObject:
    """What the optimizer does, and its numbers apart."""
    params, optimizer = program.model.params, optax.with_extra_args_support(program.optimizer)
    state = jax.eval_shape(optimizer.init, params)
    loss = jax.ShapeDtypeStruct((), np.float32)
    both: list[Drawn] = [
        drawn(optimizer.init, params),
        drawn(
            lambda gradients, before, local, value: optimizer.update(
                gradients, before, local, value=value
            ),
            params,
            state,
            params,
            loss,
        ),
    ]
    operations = {
        name: sum(one.operations.get(name, 0) for one in both)
        for name in sorted({name for one in both for name in one.operations})
    }
    numbers = [number for one in both for number in one.numbers]
    return {
        "optimizer": {
            "digest": _hash([*(one.structure for one in both), repr(program.parts.guards)]),
            "operations": operations,
        },
        "lr": {"digest": _hash([one.constants for one in both]), "constants": numbers[:NUMBERS]},
    }


def _data(data: Any) -> str:
    """What examples there are."""
    known = getattr(data, "digest", None)
    if isinstance(known, str):
        return known
    first = data(0) if callable(data) else data.rows(0, [0])
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(first):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            total.update(f"{path_text(path)} {leaf.dtype} {leaf.shape} elsewhere ".encode())
            continue
        array = np.asarray(leaf)
        total.update(
            f"{path_text(path)} {array.dtype} {array.shape} ".encode()
            + np.ascontiguousarray(array).tobytes()
        )
    return f"first batch {total.hexdigest()[:16]}"


def _shapes(tree: Tree) -> list[str]:
    return [
        f"{path_text(path)} {leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:24]
