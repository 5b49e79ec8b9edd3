"""A plan, or a program, against what the compiler makes of it, for one island or for several."""

from __future__ import annotations

from dataclasses import replace

from shardlib.exchanges.values import Exact
from shardlib.frontend.compiled_choice import priced_as_compiled
from shardlib.frontend.islands import require_carried
from shardlib.frontend.lowered import lower
from shardlib.frontend.traced_model import TracedModel
from shardlib.hardware.islands import island_of
from shardlib.hardware.topology import Topology
from shardlib.lowering.islands.program import IslandsProgram
from shardlib.lowering.program.program import Options, Program
from shardlib.planning.islands.spread import of_one_island, on_islands
from shardlib.planning.plan import Plan
from shardlib.verification.islands import verify_islands
from shardlib.verification.isolation import Limits
from shardlib.verification.report import Verification
from shardlib.verification.verify import verify_program


def verified(
    model: TracedModel,
    plan: Plan,
    machine: Topology,
    limits: Limits | None,
    options: Options | None,
) -> Verification:
    """A plan against what the compiler makes of its step, and of the meetings of its islands."""
    exchange = plan.exchange
    if isinstance(exchange, Exact):
        program = lower(model, priced_as_compiled(model, plan, machine), abstract=True)
        return verify_program(program, machine, limits, options)
    require_carried(model, plan, exchange)
    island = island_of(machine, exchange.islands)
    inner = priced_as_compiled(model, of_one_island(plan), island)
    priced = replace(plan, estimate=on_islands(inner, exchange, machine).estimate)
    step = lower(model, inner, abstract=True)
    return verify_islands(priced, exchange, step, machine, limits, options)


def verified_program(
    program: Program | IslandsProgram,
    machine: Topology,
    limits: Limits | None,
    options: Options | None,
) -> Verification:
    """The same of a program."""
    if isinstance(program, IslandsProgram):
        plan, step = program.plan, program.programs[0]
        return verify_islands(plan, program.exchange, step, machine, limits, options)
    return verify_program(program, machine, limits, options)
