"""What a traced function computes: a digest of its jaxpr that is the same in every process, and its
constants apart.

Two jaxprs have the same structure where they do the same operations on values of the same shapes
and dtypes, in the same order; names of functions and variables, shardings and meshes do not count.
Numbers that are written into a jaxpr, a learning rate or the values of a schedule, are its
constants.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from shardlib.annotation.trees.paths import Tree
from shardlib.jax_types import Function

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
SHOWN = 4


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
