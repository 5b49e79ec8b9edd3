"""Marks by which lowering finds a custom call again.

A custom call is that of a jitted function whose name tells its form: what it computes, as a frozen
value. A call of it stays one equation in a traced program, under loops and rematerialisation too.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, Protocol

import jax

from shardlib.jax_types import Function


class Form(Protocol):
    """What a custom call computes: a frozen value."""

    @property
    def kind(self) -> str:
        """What planning calls it."""
        ...


_FORMS: dict[str, Form] = {}


@lru_cache(maxsize=1024)
def marked(form: Form, function: Function) -> Function:
    """A function as a marked one.

    Args:
        form: frozen, hashable, with a `kind` for planning; the name is made of its text.
        function: (form, *arrays) -> arrays.
    """
    digest = hashlib.sha256(repr(form).encode()).hexdigest()[:8]
    name = f"shardlib_{type(form).__name__.lower()}_{digest}"
    _FORMS[name] = form

    def call(*arrays: Any) -> Any:
        return function(form, *arrays)

    call.__name__ = call.__qualname__ = name
    return jax.jit(call)


def form_of(name: str) -> Form | None:
    """The form that a name stands for; None where it is no custom call's."""
    return _FORMS.get(name)
