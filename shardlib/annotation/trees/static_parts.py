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


def static_difference(left: PyTreeDef, right: PyTreeDef) -> str:
    """What tells the forms of two pytrees apart; "" where only static parts differ that were made
    anew: functions of the same code, and objects of the same type that compare by identity.
    """
    if left == right:
        return ""
    first, second = left.node_data(), right.node_data()
    if first is None or second is None:
        return "" if first is second is None else "an array in the place of a node"
    if first[0] is not second[0]:
        return f"{first[0].__name__} in the place of {second[0].__name__}"
    if not _alike(first[1], second[1]):
        return f"{first[0].__name__}: {_shown(first[1])} and {_shown(second[1])}"
    left_children, theirs = left.children(), right.children()
    if len(left_children) != len(theirs):
        return f"{first[0].__name__} of {len(left_children)} parts and of {len(theirs)}"
    return next(filter(None, map(static_difference, left_children, theirs)), "")


def _alike(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    if isinstance(left, functools.partial):
        return _alike(
            (left.func, left.args, left.keywords), (right.func, right.args, right.keywords)
        )
    code = getattr(left, "__code__", None)  # a bound method has that of its function
    if code is not None:
        return code is getattr(right, "__code__", None)
    if type(left).__eq__ is object.__eq__:
        return True
    same = left == right
    return same if isinstance(same, bool) else bool(getattr(same, "all", lambda: False)())


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
