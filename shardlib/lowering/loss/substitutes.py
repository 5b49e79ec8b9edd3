"""What takes the place of a custom call?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax

from shardlib.functions.attention import Attention
from shardlib.functions.experts import ExpertForm
from shardlib.layout import Layout
from shardlib.lowering.context.dispatch import around_devices
from shardlib.lowering.experts.call import on_their_devices
from shardlib.lowering.mesh.collectives import Machine
from shardlib.lowering.reading.custom_calls import Site
from shardlib.planning.plan import ParameterLayout, Plan


def substitute(
    site: Site,
    plan: Plan,
    parameters: Sequence[ParameterLayout | None],
    placements: Mapping[tuple[str, int], Layout],
    machine: Machine,
) -> Callable[..., Sequence[jax.Array]] | None:
    """A program for many devices with the results of a call.

    Args:
        parameters: for each operand the layouts of the parameter that it is; None for others.

    Returns:
        (operands) -> results; None where the equations of the call are left to automatic
    """
    if isinstance(site.call.form, Attention):
        return around_devices(site, plan, placements, machine)
    if isinstance(site.call.form, ExpertForm):
        return on_their_devices(site, plan, parameters, placements, machine)
    return None
