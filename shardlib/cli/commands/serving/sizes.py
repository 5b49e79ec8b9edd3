"""How much room a served model has: from options, or from a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardlib.cli.numbers import duration
from shardlib.errors import ArgumentError, PlanError
from shardlib.planning.units.quantity import seconds_text

if TYPE_CHECKING:
    from shardlib.planning.serving.serving_plan import ServingPlan
    from shardlib.serving.scheduling.capacity import Capacity
    from shardlib.serving.served import Served

#: Tokens of a request at most, unless somebody asks for more.
LONGEST = 4096
#: Options that a plan takes the place of.
BY_PLAN = ("groups", "slots", "page", "pages", "budget", "prefixes")


@dataclass(frozen=True, kw_only=True)
class Room:
    """How much each model has room for."""

    topology: Annotated[
        str | None,
        typer.Option(
            "--topology", "-t", help="Devices that share each model; cpu:N simulates N. [one]"
        ),
    ] = None
    groups: Annotated[
        int, typer.Option("--groups", min=1, help="Groups of devices, each with its own requests.")
    ] = 1
    longest: Annotated[
        int | None,
        typer.Option("--longest", help="Tokens of prompt and answer. [the model's, at most 4096]"),
    ] = None
    slots: Annotated[int, typer.Option("--slots", help="Requests served at a time.")] = 8
    page: Annotated[int, typer.Option("--page", help="Tokens of a page of the cache.")] = 16
    pages: Annotated[
        int | None, typer.Option("--pages", help="Of the cache. [half of what slots could fill]")
    ] = None
    budget: Annotated[
        int | None, typer.Option("--budget", help="Tokens of a step at most. [64, or --slots]")
    ] = None
    prefixes: Annotated[
        bool, typer.Option("--prefixes/--no-prefixes", help="Share what prompts begin with.")
    ] = True


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan that says how much room there is, in place of such options."""

    plan: Annotated[
        Path | None, typer.Option("--plan", help="As `shardlib plan MODEL --serve --out` wrote it.")
    ] = None
    ttft: Annotated[
        str | None,
        typer.Option("--ttft", metavar="500ms", help="Plan for a first token in this time."),
    ] = None
    tpot: Annotated[
        str | None,
        typer.Option("--tpot", metavar="30ms", help="Plan for a next token in this time."),
    ] = None
    prompt: Annotated[
        int | None, typer.Option("--prompt", min=1, help="Tokens of a usual prompt, for the plan.")
    ] = None
    output: Annotated[
        int | None, typer.Option("--output", min=1, help="Tokens of a usual answer, for the plan.")
    ] = None

    @property
    def wanted(self) -> bool:
        """Whether any of this was asked for."""
        return any(value is not None for value in vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How a model is served.

    Attributes:
        capacity: requests and tokens, of a group.
        tensor: devices that share every layer.
        groups: of so many devices.
        says: the plan behind it, in words; empty where there is none.
    """

    capacity: Capacity
    tensor: int
    groups: int
    says: str = ""


def devices_of(space: Room) -> int:
    """Devices that each model has; simulated ones are there afterwards."""
    if space.topology is None:
        if space.groups > 1:
            raise ArgumentError(
                f"--groups {space.groups} shares devices out\nTry: --topology cpu:{space.groups}"
            )
        return 1
    from shardlib.hardware import topology as find_topology

    topology = find_topology(space.topology)
    if topology.devices % space.groups:
        raise ArgumentError(
            f"{space.groups} groups do not divide the {topology.devices} devices of {topology.name}"
        )
    if topology.name.startswith("cpu:"):
        from shardlib.processes.devices import simulate_cpu_devices

        simulate_cpu_devices(topology.devices)
    return topology.devices


def sizes_of(served: Served, space: Room, planned: Planned, devices: int) -> Sizes:
    """How a model is served."""
    from shardlib.serving.scheduling.capacity import Capacity

    longest = space.longest or min(served.longest, LONGEST)
    if longest > served.longest:
        raise ArgumentError(
            f"--longest {longest} is more than the {served.longest} tokens that {served.name}"
            " looks at"
        )
    if planned.wanted:
        options = [f"--{name}" for name in BY_PLAN if getattr(space, name) != getattr(Room(), name)]
        if options:
            raise PlanError(
                f"a plan says what {', '.join(options)} would\nTry: leave {', '.join(options)} out"
            )
        plan = _plan(served, space, planned, longest)
        _require_own(plan, served)
        _require_room(plan, served)
        return _planned(plan, devices, longest)
    capacity = Capacity(
        longest=longest,
        slots=space.slots,
        page=space.page,
        pages=space.pages,
        budget=space.budget,
        prefixes=space.prefixes,
    )
    return Sizes(capacity=capacity, tensor=devices // space.groups, groups=space.groups)


def _require_own(plan: ServingPlan, served: Served) -> None:
    """Refuses a plan that was made for another model."""
    import jax

    from shardlib.annotation.read import read

    model = read(served.init)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves((model.params, model.state)))
    if plan.parameters != count:
        raise PlanError(
            f"the plan is for {plan.model}, which has {plan.parameters:,} parameters, and"
            f" {served.name} has {count:,}\nTry: shardlib plan MODEL --serve for the model that is"
            " served, or --ttft and --tpot in place of --plan"
        )


def _require_room(plan: ServingPlan, served: Served) -> None:
    """Refuses a plan of longer requests, or smaller weights, than the model has."""
    import jax

    from shardlib.annotation.read import read

    if plan.workload.tokens > served.longest:
        raise PlanError(
            f"the plan is for requests of {plan.workload.tokens:,} tokens, and {served.name} looks"
            f" at {served.longest:,}\nTry: shardlib plan MODEL --serve with a smaller --prompt and"
            " --output"
        )
    leaves = jax.tree.leaves(read(served.init).params)
    wide = {str(leaf.dtype) for leaf in leaves if leaf.dtype.itemsize > 2}
    if wide and "bf16" in (plan.workload.weights, plan.workload.cache):
        raise PlanError(
            f"the plan stores bf16, and {served.name} is {'/'.join(sorted(wide))}, which is served"
            " as it is\nTry: shardlib plan MODEL --serve --weights model --cache model"
        )


def _planned(plan: ServingPlan, devices: int, longest: int) -> Sizes:
    from shardlib.serving.scheduling.capacity import Capacity

    choice = plan.choice
    if choice.tensor * choice.replicas > devices:
        raise PlanError(
            f"the plan has {choice.replicas} replicas of {choice.tensor} devices, and there are"
            f" {devices}\nTry: --topology {plan.topology}"
        )
    return Sizes(
        capacity=Capacity.of(plan, longest=max(longest, plan.workload.tokens)),
        tensor=choice.tensor,
        groups=choice.replicas,
        says=(
            f"planned: {choice.replicas} x tensor {choice.tensor}, {choice.batch} requests at a"
            f" time on each; first token in {seconds_text(plan.estimate.ttft_seconds)}, next in"
            f" {seconds_text(plan.estimate.tpot_seconds)}"
        ),
    )


def _plan(served: Served, space: Room, planned: Planned, longest: int) -> ServingPlan:
    if planned.plan is not None:
        if planned.ttft or planned.tpot:
            raise PlanError("--plan is a plan already\nTry: leave --ttft and --tpot out")
        from shardlib.cli.output import read_text
        from shardlib.planning.serving.serving_plan import ServingPlan

        hint = "shardlib plan MODEL --serve --topology T --out plan.json"
        return ServingPlan.from_json(read_text(planned.plan, "plan", hint, PlanError).decode())
    import shardlib

    output = planned.output or max(1, longest // 4)
    return shardlib.plan_serving(
        served.init,
        served.forward,
        topology=space.topology or "cpu:1",
        prompt=planned.prompt or max(1, longest - output),
        output=output,
        ttft=None if planned.ttft is None else duration(planned.ttft, "--ttft"),
        tpot=None if planned.tpot is None else duration(planned.tpot, "--tpot"),
        weights="model",
        cache="model",
        name=served.name,
    )
