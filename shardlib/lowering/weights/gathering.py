"""An operation gets the weight that it uses, as the plan has it in use.

A weight that is stored sharded is gathered where it is used, in the dtype of use, and again in the
backward pass: what is kept between the two are its shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlib.lowering.mesh.collectives import Cuts, Machine
from shardlib.lowering.reading.parameter_uses import Use
from shardlib.planning.decisions.plan_data import ParameterLayout


def in_use(use: Use, parameter: ParameterLayout, machine: Machine) -> Callable[[Any], Any]:
    """Gathers an operand that rests in pieces, as the plan has its parameter in use.

    Where the pieces at rest are no pieces of the operand, the compiler is left to find a way.
    """
    if parameter.rest == parameter.compute:
        return lambda operand: operand
    known = [(dim, source) for dim, source in enumerate(use.view.dims) if source is not None]
    held: Cuts = {dim: parameter.compute[source] for dim, source in known}
    rest: Cuts = {dim: parameter.rest[source] for dim, source in known}
    if {axis for cut in held.values() for axis in cut} != set(parameter.compute.axes):
        return lambda operand: operand
    in_pieces = {axis for cut in rest.values() for axis in cut} == set(parameter.rest.axes)
    return machine.gather(use.shape, rest if in_pieces else None, held)
