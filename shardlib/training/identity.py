"""Digests of everything that determines the numbers of a run: of the traced programs, independent
of names.

    loss        its jaxpr, with custom derivatives, and the constants in it
    optimizer   the jaxprs of its `init` and `update`, without constants; the guards of the step
    lr          the constants in them: learning rates, schedules, decays
    data        the digest of a dataset; of a function, that of its first batch
    seed, model, batch
                the seed; of the model and the batch paths, shapes and dtypes
    exchange    the outer step of islands, with its numbers; not their number

A user's own step (`shardlib.compile_step`) contains all of it: its jaxpr is the loss, and the
constants in it count as `lr`.

Plan, mesh, topology and microbatches are excluded: a run can resume under any. The digests are the
same in every process; other versions of JAX, Flax or optax may trace the same function differently,
and then the versions are part of the message (`run.differences`, which compares).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from shardlib.annotation.trees import Tree, path_text
from shardlib.checkpointing.folder import Owner, claim
from shardlib.data.batches import Rows
from shardlib.errors import ModelError
from shardlib.jax_types import Function
from shardlib.lowering.program import Program
from shardlib.lowering.training_program import TrainingProgram
from shardlib.processes.values import first_decides
from shardlib.training.run import SHOWN, Difference, Opened, RunFolder, unknown_names
from shardlib.untrusted.data import JsonMapping, JsonObject

#: Parameters of operations for layout, name or compilation, which do not change what is computed.
UNSEEN = frozenset(
    {
        "name",
        "debug_info",
        "donated_invars",
        "in_shardings",
        "out_shardings",
        "in_layouts",
        "out_layouts",
        "ctx_mesh",
        "mesh",
        "sharding",
        "out_sharding",
        "keep_unused",
        "inline",
        "compiler_options_kvs",
        "in_positional_semantics",
        "out_positional_semantics",
        "backend",
        "device",
        "devices",
        "srcs",
        "copy_semantics",
        "unconstrained_dims",
        "dst_sharding",
    }
)


#: Operations with Python functions for their derivatives.
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """The comparable part of a jaxpr.

    Attributes:
        structure: digest of the operations.
        constants: digest of the constants.
        numbers: the first elements of each constant, rounded, for messages.
        operations: count of operations by kind.
    """

    structure: str
    constants: str
    numbers: tuple[float, ...]
    operations: Mapping[str, int]


def draw(closed: core.ClosedJaxpr) -> Drawn:
    """The comparable part of a jaxpr."""
    writer = _Writer()
    writer.closed(closed)
    return Drawn(
        structure=writer.structure.hexdigest()[:24],
        constants=writer.constants.hexdigest()[:24],
        numbers=tuple(writer.numbers),
        operations=dict(sorted(writer.operations.items())),
    )


def drawn(function: Function, *arguments: Tree) -> Drawn:
    """The comparable part of the jaxpr of a function for abstract arguments."""
    return draw(jax.make_jaxpr(function)(*arguments))


def with_derivatives(closed: core.ClosedJaxpr, parameters: int) -> core.ClosedJaxpr:
    """The jaxpr itself; if it has custom derivatives, that of its gradient, which contains them."""
    if not has_custom(closed.jaxpr):
        return closed
    function = core.jaxpr_as_fun(closed)
    differentiated = tuple(
        number
        for number, var in enumerate(closed.jaxpr.invars[:parameters])
        if jax.numpy.issubdtype(var.aval.dtype, np.floating)
    )  # pyright: ignore[reportAttributeAccessIssue]
    arguments = [
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars
    ]  # pyright: ignore[reportAttributeAccessIssue]
    return (
        jax.make_jaxpr(
            jax.value_and_grad(lambda *values: function(*values)[0], argnums=differentiated)
        )(*arguments)
        if differentiated
        else closed
    )


def has_custom(jaxpr: core.Jaxpr) -> bool:
    """True if an operation of a jaxpr, at any depth, has a custom derivative."""
    return any(
        eqn.primitive.name in CUSTOM or any(has_custom(inner) for inner in _inner(eqn.params))
        for eqn in jaxpr.eqns
    )


def _inner(value: Any) -> list[core.Jaxpr]:
    if isinstance(value, core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, core.Jaxpr):
        return [value]
    parts = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (tuple, list))
        else ()
    )
    return [jaxpr for part in parts for jaxpr in _inner(part)]


class _Writer:
    """Serialises jaxprs, operations and constants separately."""

    def __init__(self) -> None:
        self.structure, self.constants = hashlib.sha256(), hashlib.sha256()
        self.numbers: list[float] = []
        self.operations: Counter[str] = Counter()

    def say(self, *words: object) -> None:
        self.structure.update(("\0".join(map(str, words)) + "\n").encode())

    def closed(self, closed: core.ClosedJaxpr) -> None:
        self.jaxpr(closed.jaxpr, closed.consts)

    def jaxpr(self, jaxpr: core.Jaxpr, consts: Any = ()) -> None:
        numbers: dict[Any, int] = {}
        for var in (*jaxpr.constvars, *jaxpr.invars):
            self.say("in", numbers.setdefault(var, len(numbers)), _aval(var.aval))
        for const in consts:
            self.constant(const)
        for eqn in jaxpr.eqns:
            self.operations[eqn.primitive.name] += 1
            self.say("op", eqn.primitive.name)
            for atom in eqn.invars:
                self.atom(atom, numbers)
            for name, value in sorted(eqn.params.items()):
                if name not in UNSEEN:
                    self.say("param", name)
                    self.value(value)
            for var in eqn.outvars:
                self.say("out", numbers.setdefault(var, len(numbers)), _aval(var.aval))
        for atom in jaxpr.outvars:
            self.atom(atom, numbers)
        self.say("end")

    def atom(self, atom: Any, numbers: Mapping[Any, int]) -> None:
        if isinstance(atom, core.Literal):
            self.say("literal", _aval(atom.aval))
            self.constant(atom.val)
        else:
            self.say("var", numbers[atom])

    def constant(self, value: Any) -> None:
        """A number or an array; of an array on other processes, only its shape."""
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            self.say("elsewhere", value.dtype, value.shape)
            return
        array = np.asarray(
            jax.random.key_data(value)
            if isinstance(value, jax.Array)
            and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
            else value
        )
        self.say("constant", array.dtype, array.shape)
        self.constants.update(
            f"{array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes()
        )
        if array.dtype.kind in "iufb":
            self.numbers += [float(f"{float(number):.7g}") for number in array.ravel()[:SHOWN]]

    def value(self, value: Any) -> None:
        """A parameter of an operation."""
        if isinstance(value, core.ClosedJaxpr):
            self.closed(value)
        elif isinstance(value, core.Jaxpr):
            self.jaxpr(value)
        elif isinstance(value, (Mesh, AbstractMesh, Sharding, PartitionSpec)):
            self.say("somewhere")
        elif isinstance(value, (np.ndarray, jax.Array)):
            self.constant(value)
        elif isinstance(value, Mapping):
            self.say("mapping", len(value))
            for key in sorted(value, key=str):
                self.say(key)
                self.value(value[key])
        elif isinstance(value, (tuple, list)):
            self.say(type(value).__name__, len(value))
            for part in value:
                self.value(part)
        elif isinstance(value, (set, frozenset)):
            self.say("set", *sorted(map(str, value)))
        elif value is None or isinstance(
            value, (bool, int, float, complex, str, bytes, np.generic, np.dtype, enum.Enum)
        ):
            self.say(type(value).__name__, value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self.say(type(value).__name__)
            self.value(
                {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            )
        elif isinstance(value, type):
            self.say("type", value.__name__)
        else:
            self.say(
                "other", type(value).__name__
            )  # functions, whose derivatives are written out, and values without a stable text


@functools.lru_cache(maxsize=4096)
def _aval(aval: Any) -> str:
    """Shape and dtype of a value, without its sharding."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return type(aval).__name__
    return f"{aval.dtype}{list(aval.shape)}{' weak' if getattr(aval, 'weak_type', False) else ''}"


#: Number of optimizer constants kept for messages.
NUMBERS = 64


def traced(
    programs: Sequence[tuple[int, TrainingProgram]], data: Rows | Callable[[int], Tree], seed: int
) -> JsonObject:
    """The digests of the traced programs, as plain data."""
    program = programs[0][1]
    loss_program = program.loss_program
    if loss_program is None:
        return _of_step(program, data, seed)
    losses = [_loss(program_of_island) for _, program_of_island in programs]
    return {
        "loss": {
            "digest": _hash(
                [
                    (before, *program_of_island.digests)
                    for (before, _), program_of_island in zip(programs, losses, strict=True)
                ]
            ),
            "operations": dict(losses[0].operations),
            "constants": list(losses[0].numbers),
            "untraceable": losses[0].untraceable,
        },
        **_optimizer(loss_program),
        "data": {"digest": _data(data)},
        "seed": {"value": seed},
        "model": {"digest": _hash(_shapes((loss_program.model.params, loss_program.model.state)))},
        "batch": {
            "arrays": {
                str(before): _shapes(program_of_island.rows)
                for before, program_of_island in programs
            }
        },
        "exchange": {"value": _exchange(program)},
    }


def _of_step(program: TrainingProgram, data: Rows | Callable[[int], Tree], seed: int) -> JsonObject:
    """The digests of a user's own step."""
    assert program.source is not None
    drawing = draw(program.source.closed_jaxpr)
    return {
        "loss": {
            "digest": _hash(drawing.structure),
            "operations": dict(drawing.operations),
            "constants": [],
            "untraceable": "",
        },
        "optimizer": {"digest": "inside of the step", "operations": {}},
        "lr": {"digest": _hash(drawing.constants), "constants": list(drawing.numbers[:NUMBERS])},
        "data": {"digest": _data(data)},
        "seed": {"value": seed},
        "model": {"digest": _hash(_shapes(program.state))},
        "batch": {"arrays": {"0": _shapes(program.batch)}},
        "exchange": {"value": _exchange(program)},
    }


def _exchange(program: TrainingProgram) -> str:
    """The exchange of islands, without their number."""
    numbers = program.plan.exchange.to_json()
    kind = str(numbers.pop("kind"))
    numbers.pop("islands", None)
    return " ".join([kind, *(f"{name}={value}" for name, value in numbers.items())])


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """Digests, operations and first constants of a loss, and the reason if its custom derivatives
    could not be traced.
    """

    digests: tuple[str, ...]
    operations: Mapping[str, int]
    numbers: tuple[float, ...] = ()
    untraceable: str = ""


def _loss(program: TrainingProgram) -> _Loss:
    if program.source is None or program.loss_program is None:
        return _Loss(digests=("not traced",), operations={})
    closed = program.source.closed_jaxpr
    parameters = len(jax.tree.leaves(program.loss_program.model.params))
    first = draw(closed)
    untraceable, second = "", first
    try:
        differentiated = with_derivatives(closed, parameters)
        second = first if differentiated is closed else draw(differentiated)
    except (
        Exception
    ) as error:  # any error of a user's own derivative, or of JAX, outside of the step
        untraceable = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return _Loss(
        digests=(first.structure, second.structure, first.constants, second.constants),
        operations=first.operations,
        numbers=first.numbers[:NUMBERS],
        untraceable=untraceable,
    )


def _optimizer(program: Program) -> JsonObject:
    """The digest of the optimizer, and of its constants separately."""
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
        name: sum(drawing.operations.get(name, 0) for drawing in both)
        for name in sorted({name for drawing in both for name in drawing.operations})
    }
    numbers = [number for drawing in both for number in drawing.numbers]
    return {
        "optimizer": {
            "digest": _hash([*(drawing.structure for drawing in both), repr(program.parts.guards)]),
            "operations": operations,
        },
        "lr": {
            "digest": _hash([drawing.constants for drawing in both]),
            "constants": numbers[:NUMBERS],
        },
    }


def _data(data: Any) -> str:
    """The digest of the examples."""
    digest = getattr(data, "digest", None)
    if isinstance(digest, str):
        return digest
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


@dataclass(frozen=True, kw_only=True)
class OwnedFolder:
    """A run folder that this job may write to. The first of its processes owns it for all of them.

    Attributes:
        owner: in the first process; None in the others.
        trace: digests of the traced programs.
        changes: allowed differences from the stored run.
        texts: messages about it.
    """

    owner: Owner | None
    trace: JsonMapping
    changes: tuple[Difference, ...] = ()
    texts: tuple[str, ...] = ()

    @staticmethod
    def of(
        folder: RunFolder,
        programs: Sequence[tuple[int, TrainingProgram]],
        data: Rows | Callable[[int], Tree],
        seed: int,
        identity: JsonMapping,
        allow: Sequence[str],
        stack: contextlib.ExitStack,
        say: Callable[[str], None],
    ) -> OwnedFolder:
        """Claims a folder until the end of `stack`; must be called by all processes of the job.
        Waiting is reported to `say`.
        """
        for wrong in unknown_names(allow, identity):
            raise ModelError(wrong)
        trace = traced(programs, data, seed)

        def take() -> tuple[Owner, Opened]:
            folder.check(identity, trace, allow)
            try:
                owner = claim(folder.checkpoints, what=str(folder.path), say=say)
            except OSError as error:
                raise folder.unwritable(error) from error
            stack.callback(owner.release)
            opened = folder.open(identity, trace, allow)
            folder.write_plan(programs[0][1].plan.to_json())
            return owner, opened

        taken = first_decides("folder of the run", take)
        if taken is None:
            return OwnedFolder(owner=None, trace=trace)
        owner, opened = taken
        texts = [
            f"a change on purpose, written down in {folder.manifest}: {change.text}"
            for change in opened.changes
        ]
        untraceable = trace["loss"]["untraceable"]
        texts += (
            [
                "derivatives of the loss that are written by hand do not count for what this run"
                f" is: they cannot be traced by themselves ({untraceable})"
            ]
            if untraceable
            else []
        )
        texts += (
            [
                "what this run computes was not written down before; from now on it is what this"
                " process traces"
            ]
            if opened.untraced
            else []
        )
        texts += (
            [
                f"an earlier start of the run in {folder.path} ended before its first"
                " whole checkpoint: it begins anew. Saving more often (save_every, --save-every)"
                " loses less"
            ]
            if opened.known and not folder.saved()
            else []
        )
        return OwnedFolder(owner=owner, trace=trace, changes=opened.changes, texts=tuple(texts))
