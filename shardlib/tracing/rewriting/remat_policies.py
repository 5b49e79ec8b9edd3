"""Remat policies: what a layer saves for its backward pass, and what it makes again.

The words of a plan, and what a layer saves under each:

    "none"    all that its gradient reads, as the layer is written
    "full"    its inputs alone
    "dots"    its inputs, and results of matmuls
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.sharding import AxisType

from shardlib.errors import TracingError
from shardlib.jax_types import Aval, EqnParam, Function
from shardlib.tracing.rewriting.recomputing import recomputed

#: Name of results of matmuls that are made in several pieces.
IN_PIECES = "shardlib: a result of matmuls in shards"


_MATMULS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


_NAMED = jax.checkpoint_policies.save_only_these_names(IN_PIECES)


def results_of_matmuls(primitive: Primitive, *avals: Aval, **params: EqnParam) -> bool:
    """A policy of `jax.checkpoint` that saves results of matmuls, and where those are made in
    shards (in a region that is manual over tensor) the whole alone.
    """
    return _NAMED(primitive, *avals, **params) or (
        _MATMULS(primitive, *avals, **params) and not any(map(_manual_over_tensor, avals))
    )


def _manual_over_tensor(aval: Any) -> bool:
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and any(
        name.partition("_")[0] == "tensor" and kind == AxisType.Manual
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )


#: Name of the layers of stacks that a loop reads by their number: there is no need to keep them.
READ = "shardlib: read from a stack"


#: Name of what a layer under a scan starts from.
LAYER_INPUT = "layer_input"


#: What the backward pass finds saved, per remat policy; "none" leaves the program as written.
POLICIES: Mapping[str, Callable[..., Any] | None] = {
    "full": None,
    "dots": _MATMULS,
}


def check_policy(remat: str | None) -> str:
    """The name of a remat policy."""
    if remat is None or remat == "none" or remat in POLICIES:
        return remat or "none"
    raise TracingError(
        f"{remat!r} is no remat policy\nTry: one of {', '.join(['none', *POLICIES])}"
    )


def rematerialised(
    function: Function,
    remat: str,
    *,
    prevent_cse: bool,
    in_pieces: bool = False,
    offloaded: bool = False,
) -> Function:
    """The function under a remat policy; itself for "none", unless what is saved is offloaded.

    Args:
        function: arrays -> arrays.
    """
    if remat == "none" and not offloaded:
        return function
    if remat == "none":  # nothing is made again
        return jax.checkpoint(function, policy=_offloading(remat), prevent_cse=prevent_cse)
    policy = POLICIES.get(remat)
    saved = (
        _offloading(remat)
        if offloaded
        else results_of_matmuls
        if in_pieces and policy is _MATMULS
        else policy
    )
    return jax.checkpoint(recomputed(function), policy=saved, prevent_cse=prevent_cse)


def _offloading(remat: str) -> Callable[..., Any]:
    """A policy of `jax.checkpoint` that puts in host memory what the policy of that name saves, and
    what a layer starts from.
    """
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
    matmuls = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    if remat == "none":
        moved = matmuls(jax.lax.dot_general_p, dimension_numbers=(((), ()), ((), ())))
        return lambda primitive, *avals, **params: (
            moved if _saved_whole(primitive, avals, params) else False
        )

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        return (matmuls if remat == "dots" and primitive.name == "dot_general" else named)(
            primitive, *avals, **params
        )

    return policy


_ANYTHING = jax.checkpoint_policies.save_anything_except_these_names(READ)


def _saved_whole(primitive: Any, avals: tuple[Any, ...], params: dict[str, Any]) -> bool:
    """Whether a layer that makes nothing again saves what an operation makes: not what it read from
    a stack, and not a value before it is pinned to a layout (see `partly.keeping`).
    """
    return primitive.name != "sharding_constraint" and bool(_ANYTHING(primitive, *avals, **params))
