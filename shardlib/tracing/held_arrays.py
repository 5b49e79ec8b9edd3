"""Arrays that a model holds where nobody sees them: in functions and in static fields.

They are made while an initialiser is traced, and are no numbers yet when a loss uses them.
"""

from __future__ import annotations

import jax.extend.core as jex
from jax.core import Tracer

from shardlib import _jax_compat
from shardlib.errors import TracingError


def require_none(closed: jex.ClosedJaxpr, model: str) -> jex.ClosedJaxpr:
    """The loss as it was traced, refused where it uses such arrays."""
    captured = [
        f"{constant.dtype}{list(constant.shape)}"
        for constant in _jax_compat.open_jaxpr(closed)[1]
        if isinstance(constant, Tracer)
    ]
    if captured:
        raise TracingError(
            f"the loss uses arrays that model {model!r} holds in functions or static fields,"
            " where an initialiser that is traced leaves no numbers:"
            f" {', '.join(captured[:8])}\nTry: NumPy for such constants; or make the module once,"
            " outside of init, let init return its arrays alone, and put them together in the loss"
        )
    return closed
