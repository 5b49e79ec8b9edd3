"""The best plan for every number of devices of a family of machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import optax

from shardlib.annotation.read import Init
from shardlib.annotation.trees.paths import Tree
from shardlib.annotation.trees.wrt import Filter
from shardlib.decisions.pins import PinMapping
from shardlib.errors import PinError, TopologyError
from shardlib.frontend.arguments import require_arguments
from shardlib.frontend.islands import exchange_of, rows_of_one
from shardlib.frontend.traced_model import Loss, problem
from shardlib.graph.problem import Problem
from shardlib.hardware.family import of_size
from shardlib.hardware.topology import Topology, TopologyLike
from shardlib.planning.plan import Plan
from shardlib.planning.planner import search
from shardlib.planning.questions.counterfactual import priced_on
from shardlib.planning.questions.scaling import Curve, curve


def scale(
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree | Callable[[int], Tree],
    *,
    topology: TopologyLike,
    devices: Sequence[int],
    pin: PinMapping | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    wrt: Filter = None,
    rows: str = "prove",
) -> Curve:
    """The best plan for every number of devices of a family of machines.

    Args:
        init: a model, see `shardlib.plan`; so all that says no more here.
        loss: (model, batch) -> scalar or (scalar, metrics).
        optimizer: an optax transformation.
        batch: the global batch, for strong scaling: the model is traced once; or a function from a
            number of devices to the batch, for weak scaling: it is traced once per number.
        topology: a member of the family, "16*h100:8" or "v5e:16x16" (`shardlib.hardware.family`).
        devices: numbers of devices, in any order; one point of the curve each.
        pin: decisions fixed by hand, in the plan of every point.
        batch_axes: logical axes of the batch.
        name: what to call the model.
        wrt: what is trained.
        rows: "prove" or "mean", how the loss depends on the rows of the batch.

    Returns:
        The curve: a point for every number of devices, ascending, with its plan; one where no plan
        fits or the pins allow none says why. `print` shows it as a table.

    Raises:
        ShardlibError: as `shardlib.plan`, `InfeasibleError` apart.
        TopologyError: the topology does not parse, or its family has no machine of that size.
    """
    require_arguments(
        "scale",
        loss=loss,
        optimizer=optimizer,
        batch=batch,
        topology=topology,
        pin=pin,
        name=name,
    )
    machines = [of_size(topology, number) for number in devices]
    weak, exchange = callable(batch), exchange_of(None, pin)
    traced: dict[int, Problem] = {}
    fastest: dict[int, Plan] = {}

    def planned(machine: Topology) -> Plan:
        key = machine.devices if weak else 0
        if key not in traced:
            traced[key] = problem(
                init,
                loss,
                optimizer,
                rows_of_one(batch(key) if callable(batch) else batch, batch_axes, exchange),
                batch_axes=batch_axes,
                name=name,
                wrt=wrt,
                rows=rows,
            )
        best = fastest.get(key)
        load = best.source.load if best is not None and best.source is not None else None
        try:
            found = search(traced[key], machine, pin, load=load)
        except TopologyError as error:
            if exchange.islands == 1:
                raise
            raise PinError(str(error)) from error  # islands are no parts of this machine
        if (
            best is not None
            and exchange.islands == 1
            and best.estimate.step_seconds < found.estimate.step_seconds
        ):
            found = (
                priced_on(best, machine) or found
            )  # a part of the machine is faster than all of it
        fastest[key] = found
        return found

    found = curve(name or "the model", "weak" if weak else "strong", machines, planned)
    model = next(iter(traced.values())).model if traced else found.model
    return replace(found, model=model)
