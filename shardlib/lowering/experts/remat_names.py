"""What does the backward pass of a function find?"""

from __future__ import annotations

import jax

from shardlib.jax_types import Function


def saving(run: Function, *names: str) -> Function:
    """A function of which the backward pass finds the arguments and what has one of the names
    (`jax.ad_checkpoint.checkpoint_name`), and nothing else, under any policy of a `jax.checkpoint`
    around it.

    Left to `jax.checkpoint` alone, a policy around it that saves everything would save the rest as
    well.
    """
    lean = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(*names))
    call = jax.custom_vjp(run)
    call.defvjp(lambda *arrays: jax.vjp(lean, *arrays), lambda pull, cotangents: pull(cotangents))
    return call
