"""The folder of a run: who owns it, what is trained in it, whether that has changed, and how it is
doing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import functools
import hashlib
import json
import os
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from etils import epath
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from shardlib.annotation.trees import Tree, path_text
from shardlib.checkpointing.folder import Claim, Folder, Owner, claim, described
from shardlib.cost.estimate import Estimate
from shardlib.data.batches import Rows
from shardlib.errors import MissingFileError, ModelError, RunError, raise_all
from shardlib.frontend.step_program import StepProgram
from shardlib.jax_types import Function
from shardlib.lowering.islands.program import first_of
from shardlib.lowering.program import Program
from shardlib.planner.plan import Plan
from shardlib.processes.place import ENDED, Heartbeat, Observer, read_heartbeat, write_whole
from shardlib.processes.values import first_decides
from shardlib.training.measures import by_step, in_words, number, read_records
from shardlib.training.states import AnyProgram
from shardlib.untrusted.data import JsonMapping, JsonObject, read_regular, shown

#: Earlier names of its parts are found by `shardlib._moved`.
__path__: list[str] = []

# --------------------------------------------------------------------------------------------------
# Differences between what is trained and what a run was begun with, from what `identity.py` has
# traced; imports no JAX.

#: What can be another than before.
NAMES = ("loss", "optimizer", "lr", "data", "seed", "model", "batch", "exchange")
#: What allows to go on from checkpoints of which nobody has written down what they are of.
UNKNOWN = "identity"
#: Packages that write down what is traced.
PACKAGES = ("jax", "flax", "optax")
#: Differences of one kind that a message shows.
SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What another process of the run meant otherwise.

    Attributes:
        name: what it is called where it is allowed: "loss".
        text: what is different, in words.
    """

    name: str
    text: str


def unknown_names(allow: Sequence[str], identity: JsonMapping) -> list[str]:
    """What is wrong with the names of what may be another; nothing where nothing is."""
    words = dict.fromkeys((*NAMES, *identity, UNKNOWN))
    unknown = sorted({*allow} - {*words})
    if not unknown:
        return []
    return [f"allow_changes has {', '.join(map(repr, unknown))}; known are {', '.join(words)}"]


def versions() -> dict[str, str]:
    """Versions of what traces."""
    return {name: metadata.version(name) for name in PACKAGES}


def differences(
    known: JsonMapping,
    wanted: JsonMapping,
    before: JsonMapping,
    now: JsonMapping,
) -> list[Difference]:
    """What of a run is not as it was traced before."""
    others = [
        f"{name} {before.get(name, 'of an unknown version')} -> {version}"
        for name, version in now.items()
        if before.get(name) != version
    ]
    hint = (
        f"; it was traced by other versions ({', '.join(others)}), which may write the same down"
        " otherwise"
        if others
        else ""
    )
    found: list[Difference] = []
    for name, value in wanted.items():
        old = known.get(name, _BEFORE.get(name) if known else None)
        if (
            isinstance(old, Mapping)
            and _plain(old) != _plain(value)
            and not (name in _WORDS and old.get("digest") == value.get("digest"))
        ):
            found.append(
                Difference(
                    name=name,
                    text=_differences_text(name, old, value)
                    + (hint if name in ("loss", "optimizer", "lr") else ""),
                )
            )
    return found


#: What runs are that were begun before it was written down.
_BEFORE = {"exchange": {"value": "exact"}}
_WORDS = {
    "loss": "the loss computes something else",
    "optimizer": "the optimizer is another, or has other guards",
    "lr": "numbers of the optimizer are others",
    "data": "the data are others",
    "model": "the model has other arrays",
}


def _differences_text(name: str, old: JsonMapping, new: JsonMapping) -> str:
    if name not in _WORDS:
        return f"{name} is {_short(new)}, the run has {_short(old)}"
    more = _operations(old.get("operations"), new.get("operations")) or _numbers(
        old.get("constants"), new.get("constants")
    )
    return f"{name}: {_WORDS[name]}{f' ({more})' if more else ''}"


def _short(value: Mapping[str, Any]) -> str:
    text = ", ".join(map(str, value.values()))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _operations(old: Any, new: Any) -> str:
    """Which operations there are more or less of."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return ""
    counts = {
        name: _count(new.get(name)) - _count(old.get(name))
        for name in sorted({*old, *new}, key=str)
    }
    changed = [
        f"{abs(count)} {name} {'more' if count > 0 else 'less'}"
        for name, count in counts.items()
        if count
    ]
    return ", ".join(changed[:SHOWN]) + (
        f" and {len(changed) - SHOWN} more kinds" if len(changed) > SHOWN else ""
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _numbers(old: Any, new: Any) -> str:
    """Which numbers are others, where there are as many."""
    if not isinstance(old, list) or not isinstance(new, list) or len(old) != len(new):
        return ""
    changed = [
        f"{two!r} in place of {one!r}" for one, two in zip(old, new, strict=True) if one != two
    ]
    return ", ".join(dict.fromkeys(changed[:SHOWN])) + (
        f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    )


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


# --------------------------------------------------------------------------------------------------
# What a traced function computes: a digest of its jaxpr that is the same in every process, and its
# constants apart.
#
# Two jaxprs have the same structure where they do the same operations on values of the same shapes
# and dtypes, in the same order; names of functions and variables, shardings and meshes do not
# count. Numbers that are written into a jaxpr, a learning rate or the values of a schedule, are
# its constants.

#: Parameters of operations that say where something is, what it is called, or how it is compiled,
#: and not what is computed.
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
#: Operations that carry functions of Python for their derivatives.
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
#: Elements of a constant that are kept to be shown.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A jaxpr, as far as two can be compared.

    Attributes:
        structure: digest of what is done.
        constants: digest of the numbers in it.
        numbers: the first elements of each of these, rounded, to be shown.
        operations: how many of each kind there are.
    """

    structure: str
    constants: str
    numbers: tuple[float, ...]
    operations: Mapping[str, int]


def draw(closed: core.ClosedJaxpr) -> Drawn:
    """A jaxpr, as far as two can be compared."""
    writer = _Writer()
    writer.closed(closed)
    return Drawn(
        structure=writer.structure.hexdigest()[:24],
        constants=writer.constants.hexdigest()[:24],
        numbers=tuple(writer.numbers),
        operations=dict(sorted(writer.operations.items())),
    )


def drawn(function: Function, *arguments: Tree) -> Drawn:
    """What a function does with abstract arguments."""
    return draw(jax.make_jaxpr(function)(*arguments))


def with_derivatives(closed: core.ClosedJaxpr, parameters: int) -> core.ClosedJaxpr:
    """The jaxpr itself; where it has operations with derivatives of their own, that of its
    gradient, in which they stand.
    """
    if not has_custom(closed.jaxpr):
        return closed
    function = core.jaxpr_as_fun(closed)
    wanted = tuple(
        number
        for number, var in enumerate(closed.jaxpr.invars[:parameters])
        if jax.numpy.issubdtype(var.aval.dtype, np.floating)
    )  # pyright: ignore[reportAttributeAccessIssue]
    arguments = [
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars
    ]  # pyright: ignore[reportAttributeAccessIssue]
    return (
        jax.make_jaxpr(jax.value_and_grad(lambda *values: function(*values)[0], argnums=wanted))(
            *arguments
        )
        if wanted
        else closed
    )


def has_custom(jaxpr: core.Jaxpr) -> bool:
    """Whether an operation of a jaxpr, however deep, has a derivative of its own."""
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
    return [found for part in parts for found in _inner(part)]


class _Writer:
    """Writes jaxprs down, what is done and the numbers apart."""

    def __init__(self) -> None:
        self.structure, self.constants = hashlib.sha256(), hashlib.sha256()
        self.numbers: list[float] = []
        self.operations: Counter[str] = Counter()

    def say(self, *words: object) -> None:
        self.structure.update(("\0".join(map(str, words)) + "\n").encode())

    def closed(self, closed: core.ClosedJaxpr) -> None:
        self.jaxpr(closed.jaxpr, closed.consts)

    def jaxpr(self, jaxpr: core.Jaxpr, consts: Any = ()) -> None:
        known: dict[Any, int] = {}
        for var in (*jaxpr.constvars, *jaxpr.invars):
            self.say("in", known.setdefault(var, len(known)), _aval(var.aval))
        for const in consts:
            self.constant(const)
        for eqn in jaxpr.eqns:
            self.operations[eqn.primitive.name] += 1
            self.say("op", eqn.primitive.name)
            for atom in eqn.invars:
                self.atom(atom, known)
            for name, value in sorted(eqn.params.items()):
                if name not in UNSEEN:
                    self.say("param", name)
                    self.value(value)
            for var in eqn.outvars:
                self.say("out", known.setdefault(var, len(known)), _aval(var.aval))
        for atom in jaxpr.outvars:
            self.atom(atom, known)
        self.say("end")

    def atom(self, atom: Any, known: Mapping[Any, int]) -> None:
        if isinstance(atom, core.Literal):
            self.say("literal", _aval(atom.aval))
            self.constant(atom.val)
        else:
            self.say("var", known[atom])

    def constant(self, value: Any) -> None:
        """A number, or an array of them; of an array that other processes hold, its shape."""
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
            )  # functions, whose derivatives are written out, and what has no words of its own


@functools.lru_cache(maxsize=4096)
def _aval(aval: Any) -> str:
    """Shape and dtype of a value, without where it is."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return type(aval).__name__
    return f"{aval.dtype}{list(aval.shape)}{' weak' if getattr(aval, 'weak_type', False) else ''}"


# --------------------------------------------------------------------------------------------------
# What is being trained, as far as it decides the numbers: taken from what is traced, not from what
# somebody calls it.
#
#     loss        its jaxpr, with derivatives that are written by hand, and the numbers in it
# optimizer   the jaxprs of its `init` and `update`, without their numbers; the guards of the step
#     lr          the numbers in them: learning rates, schedules, decays
#     data        the digest of a dataset; of a function, that of its first batch
#     seed, model, batch
#                 as they are; of the model and the batch paths, shapes and dtypes
#     exchange    how islands meet, with its numbers; not how many there are
#
# A step of the user's own (`shardlib.compile_step`) has all of it inside: its jaxpr is the loss,
# and the numbers in it count as `lr`.
#
# Plan, mesh, topology and microbatches are not among them: a run goes on under any. The digests
# are the same in every process; other versions of JAX, Flax or optax may write the same function
# down otherwise, and then the versions are a part of the message (`differences.py`, which
# compares).

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


# --------------------------------------------------------------------------------------------------
# What `run.json` says of a run, read and compared with what is wanted now.

#: Of `run.json`.
FORMAT = 1


class OtherRunError(RunError):
    """A folder that holds another run; the differences are listed."""


def read_manifest(path: Path) -> JsonObject | None:
    """All of a `run.json`; None where there is none."""
    try:
        data = json.loads(read_regular(path).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        why = "it is a folder" if isinstance(error, IsADirectoryError) else error.strerror or error
        raise _undescribed(path, f"it cannot be read: {why}") from error
    except UnicodeDecodeError as error:
        raise _undescribed(path, "its bytes are no text (UTF-8)") from error
    except RecursionError as error:
        raise _undescribed(path, "it is nested too deeply") from error
    except ValueError as error:
        raise _undescribed(path, "it is empty, cut off, or something else than JSON") from error
    wrong = _wrong(data)
    if wrong:
        raise _undescribed(path, wrong)
    if data["format"] != FORMAT:
        raise RunError(
            f"{path} is of format {shown(data['format'])}; this version reads"
            f" {FORMAT}\nTry: the version of shardlib that wrote it, or another folder. Nothing"
            " was changed"
        )
    return data


def _undescribed(path: Path, why: str) -> RunError:
    return RunError(
        f"{path} is no description of a run: {why}\nTry: a copy of that file, if there"
        " is one, or another folder; to keep the checkpoints beside it, which need no repair,"
        f" rename it and go on with --allow-changes {UNKNOWN}. Nothing was changed"
    )


def unknown_checkpoints(
    manifest: Path, saved: Sequence[int], allow: Sequence[str]
) -> tuple[Difference, ...]:
    """What there is to say of checkpoints that stand in a folder without `run.json`; nothing
    where there are none.
    """
    if not saved:
        return ()
    what = (
        f"{manifest.parent} has checkpoints, the newest of step {saved[-1]}, and no"
        f" {manifest.name}: nobody knows of what run they are"
    )
    if UNKNOWN not in allow:
        raise RunError(
            f"{what}\nTry: a copy of {manifest.name}, if there is one, or another folder;"
            f" where they are known to be of this very run, --allow-changes {UNKNOWN}, or "
            f'Settings(allow_changes=("{UNKNOWN}",)). Nothing was changed'
        )
    return (
        Difference(
            name=UNKNOWN,
            text=f"{what}; they were taken for those of the run that is written down now",
        ),
    )


def allowed_differences(
    path: Path,
    known: JsonMapping,
    wanted: JsonMapping,
    trace: JsonMapping | None,
    allow: Sequence[str],
) -> list[Difference]:
    """Differences between a run and what is wanted now that are allowed.

    Args:
        trace: what is traced; None where that is not known yet.
    """
    words = [
        Difference(name=word, text=text)
        for word in {**known["run"], **wanted}
        for text in _unlike(word, known["run"].get(word), wanted.get(word))
    ]
    told = {one.name for one in words}
    traced = (
        differences(known.get("traced", {}), trace or {}, known.get("versions", {}), versions())
        if trace
        else []
    )
    found = [*words, *(one for one in traced if one.name not in told)]
    if any(one.name not in allow for one in found):
        names = ",".join(dict.fromkeys(one.name for one in found))
        raise_all(
            OtherRunError,
            f"{path} holds another run",
            [one.text for one in found if one.name not in allow],
            hint=(
                "another folder, or what the run was begun with; to go on with these changes"
                f" on purpose, --allow-changes {names}, or Settings(allow_changes=...). Nothing"
                " was changed"
            ),
        )
    return found


def _wrong(data: Any) -> str:
    """What is wrong with the plain data of a description; nothing where it is one."""
    if not isinstance(data, dict):
        return "it is JSON, and no object"
    missing = [name for name in ("format", "run") if name not in data]
    if missing:
        return f"it does not say its {' and '.join(missing)}"
    broken = [
        name for name in ("run", "traced", "versions") if not isinstance(data.get(name, {}), dict)
    ]
    return (
        f"its {' and '.join(broken)} {'are' if len(broken) > 1 else 'is'} no object"
        if broken
        else ""
    )


def _unlike(word: str, known: Any, wanted: Any) -> list[str]:
    """How two values differ; of objects, which of their fields do."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        return [
            text
            for key in {**known, **wanted}
            for text in _unlike(f"{word}.{key}", known.get(key), wanted.get(key))
        ]
    return (
        [f"{word} is {_manifest_text(wanted)}, the run has {_manifest_text(known)}"]
        if _manifest_text(known) != _manifest_text(wanted)
        else []
    )


def _manifest_text(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


# --------------------------------------------------------------------------------------------------
# Whether the folder of a run can be written, and what helps where it cannot.


def probe(path: Path) -> None:
    """Looks whether the folder can be made, or written to, before anything takes time; what
    this makes for it is gone afterwards.
    """
    place = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    trial = place / f".shardlib-{secrets.token_hex(8)}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        error.filename = str(place)
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> RunError:
    """The error where something of the folder could not be written: what stands in the way, and
    what helps.
    """
    what = [
        str(name) for name in (error.filename2, error.filename) if name and str(name) != str(path)
    ][:1]
    where = f" ({what[0]})" if what else ""
    return RunError(
        f"the folder of the run, {path}, cannot be written:"
        f" {error.strerror or error}{where}\nTry:"
        f" {_remedy(error, what[0] if what else str(path))}"
    )


def _remedy(error: OSError, what: str) -> str:
    """What helps where something cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or another folder"
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP):
        return (
            f"move {what} away, which is something else than what a run has there; or another"
            " folder"
        )
    return "another folder, or other permissions"


# --------------------------------------------------------------------------------------------------
# The folder of a run: what is in it, and whether this process may go on with it.
#
#     run.json         what is trained, in words and as digests of what is traced
#                      (`shardlib.training.run`), and what was changed on purpose
#     plan.json        the plan of the newest process
#     metrics.jsonl    a line a step (`shardlib.training.measures`)
#     checkpoints/     `shardlib.checkpointing`; in `owner/` there, who may write to the run
#     heartbeat/       a file a process (`shardlib.processes.place`)
#     tensorboard/     event files
#     compiled/        programs that XLA compiled, so that a process that starts again need not
#     profiles/        traces, on demand
#
# A run is what `run.json` says. Who opens the folder for another model, another loss, other data
# or another batch is told so and nothing is touched: its checkpoints would be of no use, or its
# loss curve would no longer be one. Who means it names what may be another; that is done and
# written down, with what was there before.


@dataclass(frozen=True, kw_only=True)
class Opened:
    """How a folder was found.

    Attributes:
        known: whether the run was there already.
        changes: what is another than before, on purpose.
        untraced: whether nobody had written down what is traced; it is, from now on.
    """

    known: bool
    changes: tuple[Difference, ...] = ()
    untraced: bool = False


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        path: where it is.
    """

    path: Path

    @property
    def manifest(self) -> Path:
        """What is trained."""
        return self.path / "run.json"

    @property
    def plan(self) -> Path:
        """The plan of the newest process."""
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        """A line a step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """States."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def compiled(self) -> Path:
        """Compiled programs."""
        return self.path / "compiled"

    @property
    def profiles(self) -> Path:
        """Traces."""
        return self.path / "profiles"

    def saved(self) -> tuple[int, ...]:
        """Steps of the whole checkpoints, the oldest first."""
        return Folder(path=epath.Path(self.checkpoints)).steps()

    def heartbeat(self, rank: int) -> Path:
        """The file of one process."""
        return self.path / "heartbeat" / f"rank-{rank}.json"

    def heartbeats(self) -> list[Heartbeat]:
        """What the processes of the run say, by rank."""
        found = (
            read_heartbeat(path) for path in sorted((self.path / "heartbeat").glob("rank-*.json"))
        )
        return sorted((beat for beat in found if beat is not None), key=lambda beat: beat.rank)

    def open(
        self,
        identity: JsonMapping,
        trace: JsonMapping | None = None,
        allow: Sequence[str] = (),
    ) -> Opened:
        """Makes the folder, or checks that it is that of this run; for its owner."""
        wanted = json.loads(json.dumps(identity))
        try:
            known = read_manifest(self.manifest)
            if known is None:
                unknown = unknown_checkpoints(self.manifest, self.saved(), allow)
                self._make(wanted, trace or {}, unknown, allow)
                return Opened(known=False, changes=unknown)
            changes = allowed_differences(self.path, known, wanted, trace, allow)
            if changes or (trace is not None and "traced" not in known):
                self._change(known, wanted, trace, changes)
        except OSError as error:
            raise self.unwritable(error) from error
        return Opened(
            known=True, changes=tuple(changes), untraced=trace is not None and "traced" not in known
        )

    def write_plan(self, text: str) -> None:
        """Keeps the plan of this process."""
        try:
            write_whole(self.plan, text)
        except OSError as error:
            raise self.unwritable(error) from error

    def check(
        self,
        identity: JsonMapping,
        trace: JsonMapping | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        """Looks at a part of what two processes have in common, before anything takes time; a
        folder without a run is fine, and nothing is touched.
        """
        known = read_manifest(self.manifest)
        if known is None:
            unknown_checkpoints(self.manifest, self.saved(), allow)
        else:
            wanted = json.loads(json.dumps(identity))
            allowed_differences(
                self.path,
                {**known, "run": {word: known["run"].get(word) for word in wanted}},
                wanted,
                trace,
                allow,
            )

    def identity(self) -> JsonObject | None:
        """What is trained, as it was written down; None where there is no run."""
        known = read_manifest(self.manifest)
        return known["run"] if known is not None else None

    def changed(self) -> frozenset[str]:
        """Names of what was changed on purpose since the run was begun."""
        changes = (read_manifest(self.manifest) or {}).get("changes", [])
        return (
            frozenset(
                name
                for change in changes
                if isinstance(change, Mapping)
                for name in change.get("names", ())
                if isinstance(name, str)
            )
            if isinstance(changes, list)
            else frozenset()
        )

    def require(self) -> JsonObject:
        """What is trained."""
        found = self.identity() if self.path.is_dir() else None
        if found is None:
            raise MissingFileError(
                f"there is no run in {self.path}\nTry: a folder that was given to `shardlib train"
                " --run`"
            )
        return found

    def unwritable(self, error: OSError) -> RunError:
        """The error where something of the folder could not be written."""
        return unwritable(self.path, error)

    def probe(self) -> None:
        """Looks whether the folder can be made, or written to, before anything takes time; what
        this makes for it is gone afterwards.
        """
        probe(self.path)

    def _make(
        self,
        identity: JsonMapping,
        trace: JsonMapping,
        unknown: Sequence[Difference],
        allow: Sequence[str],
    ) -> None:
        for folder in (self.path, self.checkpoints, self.path / "heartbeat"):
            folder.mkdir(parents=True, exist_ok=True)
        changes = [self._entry(dict.fromkeys((UNKNOWN, *allow)), unknown, {})] if unknown else []
        self._write(
            {
                "format": FORMAT,
                "run": dict(identity),
                **({"traced": dict(trace), "versions": versions()} if trace else {}),
                **({"changes": changes} if changes else {}),
            }
        )

    def _change(
        self,
        known: JsonMapping,
        wanted: JsonMapping,
        trace: JsonMapping | None,
        changes: Sequence[Difference],
    ) -> None:
        """Writes down what the run is from now on, and what it was."""
        before = {name: known[name] for name in ("run", "traced", "versions") if name in known}
        history = known["changes"] if isinstance(known.get("changes"), list) else []
        entry = self._entry(dict.fromkeys(one.name for one in changes), changes, before)
        self._write(
            {
                **known,
                "run": dict(wanted),
                **({"traced": dict(trace), "versions": versions()} if trace else {}),
                **({"changes": [*history, entry]} if changes else {}),
            }
        )

    def _entry(
        self, names: Iterable[str], changes: Sequence[Difference], before: JsonMapping
    ) -> JsonObject:
        """What is written down of changes on purpose."""
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "after_step": max(self.saved(), default=0),
            "names": list(names),
            "differences": [one.text for one in changes],
            "before": dict(before),
        }

    def _write(self, data: JsonMapping) -> None:
        write_whole(self.manifest, json.dumps(data, indent=1) + "\n")


# --------------------------------------------------------------------------------------------------
# The folder of a run in the hands of one job: its owner, and what is trained in it.


@dataclass(frozen=True, kw_only=True)
class Held:
    """A folder that this job may write to. The first of its processes owns it for all of them.

    Attributes:
        owner: in the first process; None in the others.
        trace: what is traced.
        changes: what is another than before, on purpose.
        texts: what there is to say about it.
    """

    owner: Owner | None
    trace: JsonMapping
    changes: tuple[Difference, ...] = ()
    texts: tuple[str, ...] = ()

    @staticmethod
    def of(
        folder: RunFolder,
        programs: Sequence[tuple[int, Program]],
        data: Rows | Callable[[int], Tree],
        seed: int,
        identity: JsonMapping,
        allow: Sequence[str],
        stack: contextlib.ExitStack,
        say: Callable[[str], None],
    ) -> Held:
        """Takes a folder into hand until the end of `stack`; to be called by all processes of the
        job. That it has to wait is said to `say`.
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
            found = folder.open(identity, trace, allow)
            folder.write_plan(programs[0][1].plan.to_json())
            return owner, found

        taken = first_decides("folder of the run", take)
        if taken is None:
            return Held(owner=None, trace=trace)
        owner, found = taken
        texts = [
            f"a change on purpose, written down in {folder.manifest}: {one.text}"
            for one in found.changes
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
            if found.untraced
            else []
        )
        texts += (
            [
                f"an earlier start of the run in {folder.path} ended before its first"
                " whole checkpoint: it begins anew. Saving more often (save_every, --save-every)"
                " loses less"
            ]
            if found.known and not folder.saved()
            else []
        )
        return Held(owner=owner, trace=trace, changes=found.changes, texts=tuple(texts))


# --------------------------------------------------------------------------------------------------
# How a run is doing: what its folder says, for `shardlib status RUN`; no process of the run is
# asked, and JAX is not imported.

#: Seconds without a heartbeat after which a process counts as gone.
SILENT = 15.0
#: Seconds that processes of other machines are watched for a sign of life.
WATCHED = 5.0
#: Seconds between two looks at them.
LOOK_EVERY = 0.1
#: Steps whose median makes the figures.
RECENT = 100


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast the last steps were.

    Attributes:
        step_seconds: median; 0 where there is no step.
        tokens_per_second: the same.
        data_share: part of the step's time spent waiting for batches.
        predicted_seconds: of a step, by the plan; 0 where there is none.
        mfu: model FLOPs utilisation at the measured time; 0 where the plan predicts none.
        busy: share of the processors that other programs used; None where nobody knows.
    """

    step_seconds: float
    tokens_per_second: float
    data_share: float
    predicted_seconds: float
    mfu: float
    busy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run, seen from outside.

    Attributes:
        run: its folder.
        state: "training", "stuck" (a process lives, and its phase lasts), "stopped", "failed" (no
            process, and no word of an end), "finished" or "new".
        step: newest step whose loss is known.
        steps: that it is to do; 0 where nobody said.
        loss: of that step.
        checkpoints: steps of the committed checkpoints.
        pace: of the last steps.
        processes: heartbeats of those whose loop goes on, by rank, and for how many seconds each
            has been silent; of those of other machines as long as somebody watched.
        owner: who may write to the folder, and has not given it back; None where nobody may.
        events: the last ones.
    """

    run: str
    state: str
    step: int
    steps: int
    loss: float | None
    checkpoints: tuple[int, ...]
    pace: Pace
    processes: tuple[tuple[Heartbeat, float], ...]
    events: tuple[JsonMapping, ...]
    owner: Claim | None = None

    def to_json(self) -> JsonObject:
        """The status as plain data."""
        return {
            "run": self.run,
            "state": self.state,
            "step": self.step,
            "steps": self.steps,
            "loss": self.loss,
            "checkpoints": [*self.checkpoints],
            "step_seconds": self.pace.step_seconds,
            "tokens_per_second": self.pace.tokens_per_second,
            "data_share": self.pace.data_share,
            "others_busy": self.pace.busy,
            "predicted_seconds": self.pace.predicted_seconds,
            "mfu": self.pace.mfu,
            "processes": [
                {
                    "rank": beat.rank,
                    "pid": beat.pid,
                    "step": beat.step,
                    "phase": beat.phase,
                    "phase_seconds": beat.lasts,
                    "silent_seconds": age,
                }
                for beat, age in self.processes
            ],
            "owner": asdict(self.owner) if self.owner is not None else None,
            "events": [dict(event) for event in self.events],
        }

    def __str__(self) -> str:
        of = f" of {self.steps}" if self.steps else ""
        loss = f", loss {self.loss:.4f}" if self.loss is not None else ""
        lines = [f"{self.run}: {self.state}, step {self.step}{of}{loss}"]
        if self.pace.step_seconds:
            others = f", while {text}" if (text := in_words(self.pace.busy)) else ""
            predicted = (
                f" ({self.pace.step_seconds / self.pace.predicted_seconds:.2f} x predicted{others})"
                if self.pace.predicted_seconds
                else ""
            )
            lines.append(
                f"  {self.pace.step_seconds * 1e3:,.1f} ms a step{predicted},"
                f" {self.pace.tokens_per_second:,.0f} tokens/s, MFU {_mfu(self.pace.mfu)},"
                f" {self.pace.data_share:.1%} of the time waiting for data"
            )
        kept = ", ".join(map(str, self.checkpoints)) or "none yet"
        lines.append(f"  checkpoints: {kept}")
        lines += [
            f"  rank {beat.rank} (process {beat.pid}): {beat.phase} since {beat.lasts:.0f} s, seen"
            f" {age:.0f} s ago"
            for beat, age in self.processes
        ]
        lines += [f"  {_event(event)}" for event in self.events]
        return "\n".join(lines)


def status(path: str | Path, *, events: int = 5) -> Status:
    """Reads the folder of a run."""
    folder = RunFolder(Path(path))
    run = folder.require()
    records = read_records(folder.metrics)
    done = [*by_step(records).values()][-RECENT:]
    told = [record for record in records if "event" in record]
    beats = _beats(folder)
    estimate = None
    with contextlib.suppress(
        OSError, ValueError, RecursionError
    ):  # a plan that another version wrote predicts nothing here
        estimate = Plan.from_json(read_regular(folder.plan)).estimate
    return Status(
        run=str(path),
        state=_state(told, beats, bool(done)),
        step=done[-1]["step"] if done else 0,
        steps=steps if isinstance(steps := run.get("steps"), int) else 0,
        loss=done[-1]["loss"] if done else None,
        checkpoints=folder.saved(),
        pace=_pace(done, estimate),
        processes=beats,
        events=tuple(told[-events:]),
        owner=described(folder.checkpoints),
    )


def _pace(done: Sequence[JsonMapping], estimate: Estimate | None) -> Pace:
    """The pace of the steps that are known, beside what the plan predicts."""
    predicted = estimate.step_seconds if estimate is not None else 0.0
    if not done:
        return Pace(
            step_seconds=0.0,
            tokens_per_second=0.0,
            data_share=0.0,
            predicted_seconds=predicted,
            mfu=0.0,
            busy=_busy(done),
        )
    seconds = statistics.median(number(record, "seconds") for record in done)
    return Pace(
        step_seconds=seconds,
        tokens_per_second=statistics.median(number(record, "tokens_per_second") for record in done),
        data_share=(
            sum(number(record, "data_seconds") for record in done)
            / max(sum(number(record, "seconds") for record in done), 1e-9)
        ),
        predicted_seconds=predicted,
        mfu=estimate.mfu * predicted / seconds if estimate is not None and seconds else 0.0,
        busy=_busy(done),
    )


def _mfu(share: float) -> str:
    """Model FLOPs utilisation in words; a measured one says nothing where the peak was taken too
    low.

    >>> _mfu(0.412), _mfu(1.3)
    ('41.2%', 'unknown (the steps do more than the peak of which the plan knows)')
    """
    if share > 1:
        return "unknown (the steps do more than the peak of which the plan knows)"
    return f"{share:.1%}"


def _busy(done: Sequence[JsonMapping]) -> float | None:
    known = [number(record, "others_busy") for record in done if "others_busy" in record]
    return statistics.fmean(known) if known else None


def _beats(folder: RunFolder) -> tuple[tuple[Heartbeat, float], ...]:
    """Heartbeats of loops that go on, and how long each has been silent: those of this machine say
    it themselves, others are watched until all of them have changed, or for `WATCHED` seconds.
    """
    found = [beat for beat in folder.heartbeats() if beat.phase != ENDED]
    silent = {beat.rank: age for beat in found if (age := beat.age()) is not None}
    others, observer, end = (
        [beat for beat in found if beat.rank not in silent],
        Observer(),
        time.monotonic() + WATCHED,
    )
    first = {beat.rank: beat for beat in others}
    while others and time.monotonic() < end:
        others = [
            beat for beat in folder.heartbeats() if beat.rank in first and beat.phase != ENDED
        ]
        silent |= {beat.rank: observer.silent(beat.rank, beat) for beat in others}
        if all(beat != first[beat.rank] for beat in others):
            break
        time.sleep(LOOK_EVERY)
    still = {beat.rank for beat in others if beat == first[beat.rank]}
    return tuple(
        (
            beat,
            (
                max(silent.get(beat.rank, 0.0), SILENT)
                if beat.rank in still
                else silent.get(beat.rank, 0.0)
            ),
        )
        for beat in found
    )


def _state(told: list[JsonObject], beats: tuple[tuple[Heartbeat, float], ...], begun: bool) -> str:
    alive = [beat for beat, age in beats if age < SILENT and _lives(beat)]
    last = told[-1]["event"] if told else ""
    if alive:
        return "training"
    if any(beat.age() is not None and _lives(beat) for beat, _ in beats):
        return "stuck"
    return last if last in ("finished", "stopped") else "failed" if begun or beats else "new"


def _lives(beat: Heartbeat) -> bool:
    """Whether there is such a process; of another machine nobody knows, and its heartbeat
    counts.
    """
    if beat.age() is None:
        return True
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _event(event: JsonMapping) -> str:
    more = ", ".join(
        f"{name} {value}" for name, value in event.items() if name not in ("event", "step", "time")
    )
    return f"step {event['step']}: {event['event']}{': ' + more if more else ''}"
