"""Marks by which lowering finds a custom call again.

A custom call is that of a jitted function whose name tells its form: what it computes, as a frozen
value. A call of it stays one equation in a traced program, under loops and rematerialisation too.

JAX keeps the name where it makes other functions of such a call: its derivative, the part of it
whose operands are known beforehand (Flax Linen's `nn.scan` looks for constants so), the same for
many operands at once (`jax.vmap`). These are no calls: their operands are others than those that
the function was ever called with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import jax

from shardlib.jax_types import Eqn, Function


class Form(Protocol):
    """What a custom call computes: a frozen value."""

    @property
    def kind(self) -> str:
        """What planning calls it."""
        ...


#: Shape and dtype of every operand of a call.
Signature = tuple[tuple[Any, Any], ...]

_FORMS: dict[str, Form] = {}
_CALLED_WITH: dict[str, set[Signature]] = {}


@lru_cache(maxsize=1024)
def marked(form: Form, function: Function) -> Function:
    """A function as a marked one.

    Args:
        function: (form, *arrays) -> arrays.
    """
    digest = hashlib.sha256(repr(form).encode()).hexdigest()[:8]
    name = f"shardlib_{type(form).__name__.lower()}_{digest}"
    _FORMS[name] = form
    called_with = _CALLED_WITH.setdefault(name, set())

    def call(*arrays: Any) -> Any:
        called_with.add(_signature(arrays))
        return function(form, *arrays)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call)


def form_of(eqn: Eqn) -> Form | None:
    """The form of the custom call that an equation is; None where it is none."""
    name = str(eqn.params.get("name", ""))
    if name not in _FORMS:
        return None
    operands = _signature([atom.aval for atom in eqn.invars])
    return _FORMS[name] if operands in _CALLED_WITH[name] else None


def _signature(arrays: Sequence[Any]) -> Signature:
    return tuple((tuple(array.shape), array.dtype) for array in arrays)
