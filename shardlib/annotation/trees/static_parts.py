"""Do two pytrees have the same form, although functions among their static parts were made anew?

`optax.adam(1e-3)`, a lambda and a bound method are other objects each time that they are made, so
two calls of one `init` give states that JAX takes for trees of other structures.

>>> import jax, functools
>>> one, other = (jax.tree_util.Partial(lambda x: x, 1.0) for _ in range(2))
>>> jax.tree.structure(one) == jax.tree.structure(other)
False
>>> static_difference(*map(jax.tree.structure, (one, other)))
''
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jax.tree_util import PyTreeDef

#: Characters of a value that a message shows.
SHOWN = 60


def static_difference(one: PyTreeDef, other: PyTreeDef) -> str:
    """What tells the forms of two pytrees apart; "" where only static parts differ that were made
    anew: functions of the same code, and objects of the same type that compare by identity.

    Args:
        one: structure of the first.
        other: structure of the second.
    """
    if one == other:
        return ""
    first, second = one.node_data(), other.node_data()
    if first is None or second is None:
        return "" if first is second is None else "an array in the place of a node"
    if first[0] is not second[0]:
        return f"{first[0].__name__} in the place of {second[0].__name__}"
    if not _alike(first[1], second[1]):
        return f"{first[0].__name__}: {_shown(first[1])} and {_shown(second[1])}"
    mine, theirs = one.children(), other.children()
    if len(mine) != len(theirs):
        return f"{first[0].__name__} of {len(mine)} parts and of {len(theirs)}"
    return next(filter(None, map(static_difference, mine, theirs)), "")


def _alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, functools.partial):
        return _alike((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    code = getattr(one, "__code__", None)  # a bound method has that of its function
    if code is not None:
        return code is getattr(other, "__code__", None)
    if type(one).__eq__ is object.__eq__:
        return True
    same = one == other
    return same if isinstance(same, bool) else bool(getattr(same, "all", lambda: False)())


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
