"""Programs that need two edits at once: each alone moves the communication and removes none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib
from shardlib.diagnosis import diagnose
from shardlib.diagnosis.edits import Edit
from shardlib.diagnosis.source import Frame
from tests.diagnosis.causes import MESH, array, transposition

pytestmark = pytest.mark.long
OTHER = NamedSharding(MESH, P(None, "data"))
ROWS, COLUMNS = array((256, 256), "data"), array((256, 256), None, "data")


def two_layouts(x):
    y = with_sharding_constraint(x * 2, OTHER)
    z = with_sharding_constraint(jnp.tanh(y), OTHER)
    return z + 1, x + 1


def two_layouts_gradient(t):
    x = jnp.ones_like(t)
    return jax.vjp(lambda x: two_layouts(x)[0], x)[1](t)[0], t + 1


def stored_and_laid_out(x):
    y = with_sharding_constraint(jnp.tanh(x), OTHER)
    return y + 1


def stored_and_laid_out_gradient(x, t):
    return jax.vjp(stored_and_laid_out, x)[1](t)[0]


FIRST, SECOND = "y = x * 2", "z = jnp.tanh(y)"
ONE = "y = jnp.tanh(x)"
BOTH = {"x, t: jax.P('data')"}


@pytest.mark.parametrize(
    ("function", "arguments", "texts"),
    [
        (two_layouts, (ROWS,), {FIRST, SECOND}),
        (two_layouts_gradient, (ROWS,), {FIRST, SECOND}),
        (stored_and_laid_out, (COLUMNS,), {ONE, "x: jax.P('data')"}),
        (stored_and_laid_out_gradient, (COLUMNS, COLUMNS), {ONE, "x, t: jax.P('data')"}),
    ],
)
def test_two_edits_at_once(
    function: Callable[..., Any], arguments: tuple[Any, ...], texts: set[str]
) -> None:
    diagnosis = shardlib.why(function, *arguments, topology="cpu:8", out_shardings=P("data"))
    *_, cure = diagnosis.cures  # with JAX 0.12 `x` alone takes half of one program's bytes away
    assert len(cure.edits) == 2 and cure.bytes[1] == 0
    changed = {change.text for one in diagnosis.cures for change in one.changes}
    apart = texts - BOTH | {"x: jax.P('data')", "t: jax.P('data')"}
    assert changed in ((texts, apart) if texts & BOTH else (texts,))


@pytest.mark.parametrize("cures", [1, 4])
def test_what_of_a_pair_is_not_needed_is_dropped(
    cures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument alone avoids what the pair avoids."""
    line = transposition.__code__.co_firstlineno + 1
    needed = Edit(spec=((), ("data",)), arguments=(0,), name="x")
    idle = Edit(
        spec=(("data",), ()),
        frame=Frame(transposition.__code__.co_filename, line, 11, line, 18),
        shape=(256, 256),
    )
    monkeypatch.setattr(
        diagnose._Work, "trials", lambda *arguments: iter(arguments[-1]([(needed, idle)]))
    )
    diagnosis = shardlib.why(
        transposition, ROWS, topology="cpu:8", out_shardings=P("data"), cures=cures
    )
    (cure,) = diagnosis.cures
    assert cure.edits == (needed,) and cure.bytes[1] == 0
    assert diagnosis.tried == 3
