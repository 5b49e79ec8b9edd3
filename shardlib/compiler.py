"""The whole story on one page: read the names, trace the loss, search for a plan, lower it.

import optax, shardlib

program = shardlib.compile(Model, loss, optax.adamw(3e-4), batch, topology="cpu:8")
print(program.plan.explain())
state = program.init(seed=0)
state, metrics = program.step(state, batch)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardlib.annotation import activations
from shardlib.annotation.linen import LinenInit
from shardlib.annotation.model import Model
from shardlib.annotation.read import read
from shardlib.annotation.trees.paths import Tree
from shardlib.calibration import measured_cpu
from shardlib.errors import PlanError, TopologyError, TracingError, VerificationError
from shardlib.graph.problem import Problem
from shardlib.graph.rows import Rows
from shardlib.hardware.cluster import Device, cluster
from shardlib.hardware.family import of_size
from shardlib.hardware.topology import Topology
from shardlib.hardware.topology import topology as parse_topology
from shardlib.lowering.collective_matmul.matmuls import matmuls
from shardlib.lowering.collective_matmul.matmuls import operands as activations_of
from shardlib.lowering.loss.interleaving import interleaving
from shardlib.lowering.loss.placing import Placements
from shardlib.lowering.program.arguments import require_arguments
from shardlib.lowering.program.guards import Guards
from shardlib.lowering.program.program import Program, build_program
from shardlib.lowering.reading.custom_calls import custom_operands, operands, sites
from shardlib.lowering.reading.fused_dims import Interleaving
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.lowering.runtime.random_keys import draws
from shardlib.planning.decisions.not_lowered import waits_for
from shardlib.planning.edge.edge import plan_edge as spread
from shardlib.planning.edge.edge_plan import EdgePlan
from shardlib.planning.plan import Plan
from shardlib.planning.planner import ranked, search
from shardlib.planning.questions.counterfactual import priced_on
from shardlib.planning.questions.scaling import Curve, curve
from shardlib.planning.space.workload import Workload, prepare
from shardlib.propagation.placements import placements
from shardlib.report import Finding
from shardlib.rules import Rules
from shardlib.tracing.trace import Traced, abstract, trace
from shardlib.verification.isolation import Limits
from shardlib.verification.refine import refine as refined
from shardlib.verification.refine import wanted_plans
from shardlib.verification.report import Verification
from shardlib.verification.targets import PLATFORMS, require_compiler
from shardlib.verification.verify import verify_program

#: The user's loss: (model, batch) -> scalar, or -> (scalar, dict of metrics).
Loss = Callable[[Any, Any], Any]


def plan(
    init: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    *,
    topology: str | Topology | None = None,
    pin: Mapping[str, Any] | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    refine: int | None = None,
    limits: Limits | None = None,
    lowered: bool = False,
    allow: Mapping[str, Sequence[str]] | None = None,
    rows: str = "prove",
    wrt: Any = None,
) -> Plan:
    """Finds the fastest plan that fits, without touching any device.

    Dtypes of 8 bits, those of products apart, and recomputing a part of the layers of pipeline
    stages are planned and priced, but no program is made of them yet; a plan that decides for one
    of them has a finding "not-lowered".

    Args:
        init: a callable `nnx.Rngs -> nnx.Module`, or `shardlib.linen(...)`, or
            `shardlib.tree(...)`.
        loss: (model, batch) -> scalar or (scalar, metrics). It is that of the whole batch, whatever
            the plan: how it depends on the rows of the batch (a mean, a sum, a ratio of sums, or
            rows that meet before the end) is proven from what it computes, and only what can be
            added up part by part is worked through in parts. See `docs/concepts.md`.
        optimizer: an optax transformation.
        batch: pytree of arrays or `jax.ShapeDtypeStruct` of the global batch.
        topology: "16*h100:8", "v5e:16x16", a topology file, ...; by default all devices of this
            machine.
        pin: decisions fixed by hand, in the words of the plan's JSON.
        batch_axes: pytree of tuples of logical axes, like `batch`; by default the leading dim is
            "batch".
        name: what to call the model.
        refine: how many of the best plans to compile for the topology, ahead of time, before the
            best is chosen by what the compiler makes of them (`plan.refined`); none if left out.
        limits: time and memory that the compiler may take for each.
        lowered: leave out what is not lowered yet, and stages that are not pinned, as `compile`
            does; implied by `refine`.
        rows: "prove" how the loss depends on the rows of the batch; or "mean", with which you say
            that the loss and all metrics are means over rows, and nothing is proven.
        allow: dtypes that the planner may choose beside those of the model, which change its
            numbers: {"moment_dtype": ["bfloat16"], ...}, see `docs/pins.md`.
        wrt: what is trained, in Flax's words: a filter of NNX such as `nnx.LoRAParam`, or for Linen
            and pytrees a predicate (path, leaf) -> bool; all parameters if left out. The rest is
            frozen: stored and used sharded, with no gradient and no optimizer state, see
            `docs/partial_training.md`.

    Raises:
        ShardlibError: of the kind that says what is wrong: annotation, batch, tracing, topology,
            pin, or nothing fits; with `refine` also a compiler that is not installed, or that
            refutes every plan.
    """
    require_arguments(
        "plan", loss=loss, optimizer=optimizer, topology=topology, pin=pin, name=name, allow=allow
    )
    pin = {**(pin or {}), "allow": allow} if allow else pin
    wanted = wanted_plans(refine)
    machine = _topology(topology) if wanted else None
    if machine is not None:
        require_compiler(PLATFORMS[machine.chip.vendor])
    with activations.no_mesh():
        front = _front(init, loss, optimizer, batch, batch_axes, name, rows=rows, wrt=wrt)
        return (
            _searched(front, topology, pin, lowered=lowered)[1]
            if machine is None
            else _refined(front, machine, pin, wanted, loss, optimizer, batch, limits)
        )


def compile(
    init: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    *,
    topology: str | Topology | None = None,
    pin: Mapping[str, Any] | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    plan: Plan | None = None,
    devices: Sequence[jax.Device] | None = None,
    guards: Guards | None = None,
    disk: str | Path | None = None,
    evaluation: Loss | None = None,
    rows: str = "prove",
    wrt: Any = None,
) -> Program:
    """Plans, and lowers the plan to a program that XLA compiles at its first use.

    Args:
        init: see `plan`; so for all others that are not listed.
        loss: (model, batch) -> scalar or (scalar, metrics), of the whole batch. A plan may work
            through the batch in parts, one after the other, and changes no number by it: that the
            loss, every metric and their gradients are means, sums or ratios of sums over the rows
            of the batch is proven from what they compute, and where rows meet before the end (a
            contrastive loss, statistics of the batch) the batch is never divided: a finding names
            the line, and a pin that asks for parts is a `PinError`. `shardlib.WeightedMean(total,
            weight)` says of a ratio of sums what no proof finds.
        rows: "prove" that; or "mean": take the loss and all metrics to be means over rows, with no
            proof.
        plan: a plan to carry out instead of searching for one.
        devices: exactly the devices to use; by default the first ones that JAX sees.
        guards: finite checks, clipped gradients and a scale of the loss as parts of the step; by
            default none.
        disk: folder for optimizer state that the plan puts on disk (`offload=["disk"]`), on a disk
            of every host; by default what `SHARDLIB_DISK_DIR` says, or else the system's folder for
            temporary files.
        evaluation: (model, batch) -> scalar or (scalar, metrics), of `program.evaluate`; by default
            `loss`. NNX models are in `model.eval()` mode there; see `docs/evaluation.md`.

    Raises:
        ShardlibError: as `plan`; also a layout that does not fit, or too few devices.
    """
    require_arguments(
        "compile",
        loss=loss,
        optimizer=optimizer,
        topology=topology,
        pin=pin,
        name=name,
        plan=plan,
        devices=devices,
        guards=guards,
        disk=disk,
        evaluation=evaluation,
    )
    with activations.no_mesh():
        front = _front(init, loss, optimizer, batch, batch_axes, name, rows=rows, wrt=wrt)
        front, chosen = (
            (front, _runnable(plan)) if plan is not None else _searched(front, topology, pin)
        )
        if evaluation is None:
            front = replace(
                front,
                model=replace(
                    front.model,
                    findings=(
                        *front.model.findings,
                        *_evaluated_as_trained(front.model, front.traced),
                    ),
                ),
            )
        return _program(
            front,
            chosen,
            loss,
            optimizer,
            batch,
            devices=devices,
            guards=guards,
            disk=disk,
            evaluation=front.model.evaluated(evaluation or loss),
        )


def verify(
    init: Any,
    loss: Loss | None = None,
    optimizer: optax.GradientTransformation | None = None,
    batch: Tree = None,
    *,
    topology: str | Topology | None = None,
    pin: Mapping[str, Any] | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    plan: Plan | None = None,
    limits: Limits | None = None,
    options: Mapping[str, str | bool | int] | None = None,
    rows: str = "prove",
    wrt: Any = None,
) -> Verification:
    """Compiles the training step with the real compiler of the machine it is planned for, which
    need not be here, and compares.

    Args:
        init: see `plan`; or a `Program`, which then is all that is needed.
        plan: a plan to verify instead of searching for one.
        limits: time and memory that the compiler may take.
        options: options of the compiler, by its own names, for this compilation; one that it does
            not know is a finding.

    Returns:
        What was predicted, what was compiled, and findings; a compiler that fails is a finding.

    Raises:
        ShardlibError: as `compile`; also a compiler that is not installed, with what to install.
    """
    if isinstance(init, Program):
        return verify_program(init, _machine(topology, init.plan), limits, options)
    if loss is None or optimizer is None:
        raise VerificationError(
            "verify(init, loss, optimizer, batch, ...) lacks the loss or the optimizer\nTry: pass"
            " all four, or a Program"
        )
    require_arguments(
        "verify", loss=loss, optimizer=optimizer, topology=topology, pin=pin, name=name, plan=plan
    )
    machine = _machine(topology, plan)
    require_compiler(PLATFORMS[machine.chip.vendor])
    with activations.no_mesh():
        front = _front(init, loss, optimizer, batch, batch_axes, name, rows=rows, wrt=wrt)
        front, chosen = (
            (front, _runnable(plan)) if plan is not None else _searched(front, machine, pin)
        )
        return verify_program(
            _program(front, chosen, loss, optimizer, batch, abstract=True), machine, limits, options
        )


def _program(
    front: _Front,
    plan: Plan,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    **where: Any,
) -> Program:
    """Lowers a plan onto devices or onto a mesh, see `build_program`."""
    traced = front.traced
    return build_program(
        plan,
        front.model,
        front.model.bind(loss),
        optimizer,
        batch,
        placements=_placements(traced, plan, plan.rules),
        around=_placements(traced, plan, _around(traced, plan)) if plan.mesh["stage"] > 1 else None,
        batch_axes={path: axes for path, _, _, axes in traced.problem.batch},
        traced=LossJaxpr(closed_jaxpr=traced.closed_jaxpr, out_tree=traced.out_tree),
        rows=traced.problem.rows,
        interleaving=_interleaving(traced, plan),
        **where,
    )


def _machine(topology: str | Topology | None, plan: Plan | None) -> Topology:
    """The machine that is asked for; it must be the plan's own."""
    machine = _topology(topology if topology is not None or plan is None else plan.topology)
    if plan is not None and machine.name != plan.topology:
        raise VerificationError(
            f"the plan was made for {plan.topology} and cannot be verified on {machine.name}\nTry:"
            f" plan for {machine.name}, or leave out `topology`"
        )
    return machine


@dataclass(frozen=True, kw_only=True)
class _Front:
    """A model that has been read and traced."""

    model: Model
    traced: Traced


def _front(
    init: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    batch_axes: Tree,
    name: str | None,
    rows: str = "prove",
    wrt: Any = None,
) -> _Front:
    model = read(init, wrt)
    if name is not None:
        model = replace(model, name=name)
    given, traced = model, _traced(model, loss, optimizer, batch, batch_axes, rows)
    model = traced.model
    if isinstance(init, LinenInit) and not activations.rules_in_force():
        ignored = activations.ignored_constraints(
            model.bind(loss), model.params, model.state, abstract(batch)
        )
        model = replace(model, findings=(*model.findings, *ignored))
    if isinstance(init, LinenInit):
        model = replace(model, findings=(*model.findings, *_unchanged(given, model, traced)))
    return _Front(model=model, traced=traced)


def _state_stays(model: Model, traced: Traced) -> bool:
    """Whether a step leaves all state of a model as it is."""
    count, parameters, program = (
        len(jax.tree.leaves(model.state)),
        len(jax.tree.leaves(model.params)),
        traced.program,
    )
    return not count or program.outputs[-count:] == program.inputs[parameters : parameters + count]


def _evaluated_as_trained(model: Model, traced: Traced) -> tuple[Finding, ...]:
    """A finding where evaluations are to use a loss that trains: it draws random numbers, or
    changes the state of a model that has no mode for evaluations.
    """
    what = [
        *(["draws random numbers"] if draws(traced.closed_jaxpr) else []),
        *([] if _state_stays(model, traced) else [f"updates {', '.join(model.state)}"]),
    ]
    if model.has_modes or not what:
        return ()
    return (
        Finding(
            code="evaluation-as-trained",
            severity="warning",
            where="program.evaluate",
            message=f"program.evaluate uses the loss of the step, which {' and '.join(what)}.",
            hint=(
                "shardlib.compile(..., evaluation=loss_without_dropout_and_with_running_averages),"
                " see docs/evaluation.md"
            ),
        ),
    )


def _unchanged(given: Model, model: Model, traced: Traced) -> tuple[Finding, ...]:
    """A finding where a step leaves all state of a Linen model as it is, `given` as it was read:
    its loss returns no updates.
    """
    if not jax.tree.leaves(given.state) or not _state_stays(model, traced):
        return ()
    return (
        Finding(
            code="state-unchanged",
            severity="warning",
            where=", ".join(given.state),
            message=(
                f"no step changes the collections {', '.join(given.state)}: the loss returns no"
                " updates of them."
            ),
            hint=(
                "return (loss, updates) with the updates of module.apply(..., mutable=[...]), see"
                " help(shardlib.linen); no matter where they are meant to stay"
            ),
        ),
    )


def _traced(
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    batch_axes: Tree,
    rows: str,
) -> Traced:
    def run() -> Traced:
        return trace(model, loss, batch, batch_axes=batch_axes, optimizer=optimizer, rows=rows)

    if not activations.rules_in_force():
        try:
            return run()
        except TracingError as error:
            if not activations.needs_mesh(error.__cause__):
                raise
    with activations.planning_mesh():
        traced = run()

    def rows_in(parts: int) -> Rows:
        with activations.planning_mesh():
            return traced.rows_in(parts)

    return replace(traced, rows_in=rows_in)


def _searched(
    front: _Front,
    topology: str | Topology | None,
    pin: Mapping[str, Any] | None,
    *,
    lowered: bool = True,
) -> tuple[_Front, Plan]:
    """The plan, and what it was made for: a loss that is another one for a microbatch of the plan
    than for the batch is taken for one whose rows meet.
    """
    machine = _topology(topology)
    found = search(front.traced.problem, machine, pin, lowered=lowered)
    rows = front.traced.rows_in(found.microbatches) if found.microbatches > 1 else None
    if rows is not None and not rows.splits:
        front = replace(
            front, traced=replace(front.traced, problem=replace(front.traced.problem, rows=rows))
        )
        found = search(front.traced.problem, machine, pin, lowered=lowered)
    return front, (_runnable(found) if lowered else found).with_findings(*front.model.findings)


def _runnable(plan: Plan) -> Plan:
    """The plan, if a program can be made of it."""
    waits = waits_for(plan)
    if waits:
        raise PlanError(
            f"the plan has no lowering yet: it decides for {', '.join(waits)}\nTry:"
            " shardlib.plan(..., lowered=True), which leaves them out, or other pins"
        )
    return plan


def _refined(
    front: _Front,
    machine: Topology,
    pin: Mapping[str, Any] | None,
    wanted: int,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    limits: Limits | None,
) -> Plan:
    """The best of the first `wanted` plans that the compiler of the machine confirms."""

    def compiled(candidate: Plan) -> Verification:
        return verify_program(
            _program(front, candidate, loss, optimizer, batch, abstract=True), machine, limits
        )

    return refined(
        ranked(front.traced.problem, machine, pin, lowered=True), wanted, machine, compiled
    ).with_findings(*front.model.findings)


def _topology(spec: str | Topology | None) -> Topology:
    if spec is None:
        return (
            measured_cpu(jax.local_device_count())
            if jax.default_backend() == "cpu"
            else _local_accelerators()
        )
    parsed = parse_topology(spec)
    return (
        measured_cpu(parsed.devices)
        if isinstance(spec, str) and parsed.name.startswith("cpu:")
        else parsed
    )


def _local_accelerators() -> Topology:
    kinds = sorted({device.device_kind for device in jax.devices()})
    raise TopologyError(
        f"no topology was given, and the devices here are {len(jax.devices())} of"
        f' {", ".join(kinds)}\nTry: name it, e.g. topology="h100:8" or topology="v5e:2x4"'
    )


def _placements(traced: Traced, plan: Plan, rules: Rules) -> Placements:
    load, parameters = _load(traced, plan), _parameters(traced)
    wanted = operands(sites(traced.program, parameters)) | custom_operands(
        traced.program, parameters
    )
    if plan.collective_matmul == "loop":
        wanted |= activations_of(matmuls(traced.program, parameters))
    return placements(
        traced.problem.forward,
        load.colouring.forward,
        rules,
        plan.mesh,
        load.colouring.batch_colour,
        wanted,
    )


def _parameters(traced: Traced) -> int:
    """Arrays among the params of a model."""
    return len(jax.tree.leaves(traced.in_tree.unflatten(range(traced.in_tree.num_leaves))[0]))


def _interleaving(traced: Traced, plan: Plan) -> Interleaving:
    names, problem = _load(traced, plan).colouring.forward, traced.problem
    return interleaving(
        problem.forward, problem.pieces, names, plan, traced.program, _parameters(traced)
    )


def _around(traced: Traced, plan: Plan) -> Rules:
    """The rules outside of the layers of a pipeline: the stages cut the sequence, inside of what
    cuts it already.
    """
    sequence = _load(traced, plan).colouring.sequence_colour
    if sequence is None:
        return plan.rules
    entries: list[tuple[str, tuple[str, ...]]] = []
    for name, axes in plan.rules.entries:
        if name == sequence and axes:
            entries.append(
                (name, (*axes, "stage"))
            )  # where that does not divide, the next one holds
        entries.append((name, axes))
    return Rules((*entries, (sequence, ("stage",))))


def _load(traced: Traced, plan: Plan) -> Workload:
    return (
        plan.source.load
        if plan.source is not None and plan.source.load.problem is traced.problem
        else prepare(traced.problem)
    )


def problem(
    init: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    *,
    batch_axes: Tree = None,
    name: str | None = None,
    wrt: Any = None,
    rows: str = "prove",
) -> Problem:
    """Traces a model without planning it; see `plan` for the arguments."""
    require_arguments("problem", loss=loss, optimizer=optimizer, name=name)
    with activations.no_mesh():
        return _front(
            init, loss, optimizer, batch, batch_axes, name, rows=rows, wrt=wrt
        ).traced.problem


def plan_edge(
    init: Any,
    forward: Callable[[Any, Any], Any],
    batch: Tree,
    *,
    devices: str | Path | Sequence[Device],
    batch_axes: Tree = None,
    name: str | None = None,
) -> EdgePlan:
    """Spreads a model over a chain of unlike devices for inference: runs of layers, in the order
    and on the devices with the highest throughput.

    Args:
        init: see `plan`; so for all others that are not listed.
        forward: (model, batch) -> any arrays: what inference computes.
        batch: one batch as it goes through the devices.
        devices: a TOML file, see `shardlib.hardware.cluster`, or devices.

    Raises:
        ShardlibError: of the kind that says what is wrong: annotation, batch, tracing, devices, or
            a model that the devices do not hold.
    """
    listed = cluster(devices)

    def run(model: Any, batch: Any) -> Any:
        return jnp.zeros(()), {"results": forward(model, batch)}

    return spread(
        problem(init, run, optax.identity(), batch, batch_axes=batch_axes, name=name, rows="mean"),
        listed,
    )


def scale(
    init: Any,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree | Callable[[int], Tree],
    *,
    topology: str | Topology,
    devices: Sequence[int],
    pin: Mapping[str, Any] | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    wrt: Any = None,
    rows: str = "prove",
) -> Curve:
    """The best plan for every number of devices of a family of machines.

    Args:
        init: see `plan`; so for all others that are not listed.
        batch: the global batch, for strong scaling: the model is traced once; or a function from a
            number of devices to the batch, for weak scaling: it is traced once per number.
        topology: a member of the family, "16*h100:8" or "v5e:16x16" (`shardlib.hardware.family`).
        devices: how many devices, several numbers.

    Raises:
        ShardlibError: as `plan`; machines that do not hold the model are points of the curve.
    """
    require_arguments(
        "scale", loss=loss, optimizer=optimizer, topology=topology, pin=pin, name=name
    )
    machines = [of_size(topology, number) for number in devices]
    weak = callable(batch)
    traced: dict[int, Problem] = {}
    fastest: dict[int, Plan] = {}

    def planned(machine: Topology) -> Plan:
        key = machine.devices if weak else 0
        if key not in traced:
            traced[key] = problem(
                init,
                loss,
                optimizer,
                batch(key) if callable(batch) else batch,
                batch_axes=batch_axes,
                name=name,
                wrt=wrt,
                rows=rows,
            )
        best = fastest.get(key)
        found = search(
            traced[key],
            machine,
            pin,
            load=best.source.load if best is not None and best.source is not None else None,
        )
        if best is not None and best.estimate.step_seconds < found.estimate.step_seconds:
            found = (
                priced_on(best, machine) or found
            )  # a part of the machine is faster than all of it
        fastest[key] = found
        return found

    found = curve(name or "the model", "weak" if weak else "strong", machines, planned)
    model = next(iter(traced.values())).model if traced else found.model
    return replace(found, model=model)
