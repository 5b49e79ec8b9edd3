"""The public functions: read the names, trace the loss, search for a plan, lower it.

Each step is a file of `shardlib.frontend`. What lowers, compiles and verifies is imported by the
functions that do so: planning does without it.

program = shardlib.compile(Model, loss, optax.adamw(3e-4), batch, topology="cpu:8")
print(program.plan.explain())
state = program.init(seed=0)
state, metrics = program.step(state, batch)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jax
import optax

from shardlib import wings
from shardlib.annotation.model import Init, no_mesh
from shardlib.annotation.trees import Filter, Tree
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import PlanError, VerificationError
from shardlib.frontend import choice
from shardlib.frontend.choice import machine_of, machine_of_plan
from shardlib.frontend.model import Loss, read_and_trace, require_arguments
from shardlib.machines.topology import TopologyLike, devices_of
from shardlib.planner.plan import Plan
from shardlib.tracing.layouts import ambient_mesh, layout_free

if TYPE_CHECKING:
    from shardlib.lowering.program import Options, Program
    from shardlib.lowering.step import Guards
    from shardlib.lowering.training_program import TrainingProgram
    from shardlib.verification.isolation import Limits
    from shardlib.verification.report import Verification


def plan(
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    *,
    topology: TopologyLike | None = None,
    pin: PinMapping | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    refine: int | None = None,
    limits: Limits | None = None,
    allow: Mapping[str, Sequence[str]] | None = None,
    rows: str = "prove",
    wrt: Filter = None,
    framework: str | None = None,
    honour: str = "hints",
) -> Plan:
    """Finds the fastest plan that fits, without touching any device, `refine` apart.

    What is searched is what runs: `compile`, `verify` and `train` search the same plans, and a
    program can be made of each. A pin of what has no lowering is an error, see `docs/pins.md`.

    Args:
        init: a callable `nnx.Rngs -> nnx.Module`, or `shardlib.linen(...)`, or
            `shardlib.tree(...)`.
        loss: (model, batch) -> scalar or (scalar, metrics). It is that of the whole batch, whatever
            the plan: how it depends on the rows of the batch (a mean, a sum, a ratio of sums, or
            rows combined in another way) is proven from what it computes, and only what can be
            added up part by part is worked through in parts. See `docs/concepts.md`.
        optimizer: an optax transformation.
        batch: pytree of arrays or `jax.ShapeDtypeStruct` of the global batch.
        topology: "16*h100:8", "v5e:16x16", a topology file, ...; or a `jax.sharding.Mesh` or a list
            of devices, which are the machine (`pin={"mesh": mesh.shape}` fixes its axes, too); by
            default all devices of this machine.
        pin: decisions fixed by hand, in the words of the plan's JSON (`docs/pins.md`); None fixes
            none.
        batch_axes: pytree of tuples of logical axes, like `batch`; by default the leading dim is
            "batch", and the second dim of integer arrays of rank 2 is "seq".
        name: what to call the model in the plan; by default that of its constructor or class.
        refine: how many of the best plans to compile for the topology, ahead of time, before the
            best is chosen by what the compiler makes of them (`plan.refined`); none if left out.
            Where the devices of the topology are attached to this process, simulated CPU devices
            too, those within a third of the best are run for a few steps in turns, and the fastest
            is chosen.
        limits: seconds and bytes of memory that the compiler may take for each; only used with
            `refine`.
        allow: dtypes that the planner may choose beside those of the model, which change its
            numbers: {"moment_dtype": ["bfloat16"], ...}, one or several, see `docs/pins.md`.
        rows: "prove" how the loss depends on the rows of the batch; or "mean", with which you say
            that the loss and all metrics are means over rows, and nothing is proven.
        wrt: what is trained, in Flax's words: a filter of NNX such as `nnx.LoRAParam`, or for Linen
            and pytrees a predicate (path, leaf) -> bool; all parameters if left out. The rest is
            frozen: stored and used sharded, with no gradient and no optimizer state, see
            `docs/partial_training.md`.
        framework: the training framework that will run the plan, such as "megatron-core": it is
            priced for it and keeps to what it can do, see `docs/frameworks.md`.
        honour: what layouts are that the program brings along (`with_sharding_constraint`,
            `reshard`, `out_sharding=`, `shard_map`): "hints", which are not imposed, and listed in
            a finding with what each would cost; or "pins". See `docs/your_model.md`.

    Returns:
        The plan, with estimate, certificate and findings; it can be asked on (`why_not`, ...).

    Raises:
        ArgumentError: arguments of another kind than is asked for; all of them are listed.
        AnnotationError: `init` is nothing that can be read, names do not fit its arrays, or `wrt`
            fits none of its parameters.
        BatchError: `batch_axes` do not fit `batch`, or it has no rows.
        TracingError: the loss or the initialiser cannot be traced.
        TopologyError: the topology does not parse, or none is given and here are accelerators.
        MissingFileError: the topology names a file that is not there.
        PinError: a pin is misspelt, out of range, contradicts another or is none of `framework`, or
            the pins allow no plan.
        InfeasibleError: nothing fits the memory of a device; the message names what to relax.
        MissingPackageError: with `refine`, the compiler of the topology is not installed.
        PlanError: `refine` is not an integer of at least 0, or asked for with `framework`.
        VerificationError: with `refine`, no plan that was compiled survived.
    """
    require_arguments(
        "plan",
        loss=loss,
        optimizer=optimizer,
        batch=batch,
        topology=topology,
        pin=pin,
        name=name,
        limits=limits,
        allow=allow,
        framework=framework,
    )
    pin = with_allowed(pin, allow)
    compiled = wanted(refine, framework, pin)
    if compiled:
        from shardlib.frontend import verified as compiled_choice

        machine = compiled_choice.with_compiler(machine_of(topology))
    ambient = ambient_mesh()
    with no_mesh():
        batch = choice.island_batch(batch, batch_axes, None, pin)
        traced = read_and_trace(
            init,
            loss,
            optimizer,
            batch,
            batch_axes,
            name,
            rows=rows,
            wrt=wrt,
            ambient=ambient,
            honour=honour,
        )
        if compiled:
            pin = choice.honoured(traced, machine, pin)
            found = compiled_choice.refined_by_compiler(traced, machine, pin, compiled, limits)
            return choice.with_model(found, traced)
        return choice.searched(traced, topology, pin, framework=framework)[1]


def compile(
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    *,
    topology: TopologyLike | None = None,
    pin: PinMapping | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    plan: Plan | None = None,
    devices: Sequence[jax.Device] | None = None,
    guards: Guards | None = None,
    disk: str | Path | None = None,
    evaluation: Loss | None = None,
    rows: str = "prove",
    wrt: Filter = None,
    honour: str = "hints",
    compiler_options: Options | None = None,
) -> Program:
    """Plans, and lowers the plan to a program that XLA compiles at its first use.

    Args:
        init: a callable `nnx.Rngs -> nnx.Module`, or `shardlib.linen(...)`, or
            `shardlib.tree(...)`.
        loss: (model, batch) -> scalar or (scalar, metrics), of the whole batch. A plan may work
            through the batch in parts, one after the other, and changes no number by it: that the
            loss, every metric and their gradients are means, sums or ratios of sums over the rows
            of the batch is proven from what they compute, and where rows meet before the end (a
            contrastive loss, statistics of the batch) the batch is never divided: a finding names
            the line, and a pin that asks for parts is a `PinError`. `shardlib.WeightedMean(total,
            weight)` says of a ratio of sums what no proof finds.
        optimizer: an optax transformation.
        batch: pytree of arrays or `jax.ShapeDtypeStruct` of the global batch; `step` takes such
            batches.
        topology: what to plan for, see `plan`; by default all devices of this machine. A program
            runs on the devices that it names. With `plan`, only they are used.
        pin: decisions fixed by hand, see `plan`. Not used with `plan`.
        batch_axes: logical axes of the batch, see `plan`.
        name: what to call the model.
        plan: a plan to carry out instead of searching for one.
        devices: exactly the devices to use; by default the first ones that JAX sees.
        guards: finite checks, clipped gradients and a scale of the loss as parts of the step; by
            default none.
        disk: folder for optimizer state that the plan puts on disk (`offload=["disk"]`), on a disk
            of every host; by default what `SHARDLIB_DISK_DIR` says, or else the system's folder for
            temporary files.
        evaluation: (model, batch) -> scalar or (scalar, metrics), of `program.evaluate`; by default
            `loss`. NNX models are in `model.eval()` mode there; see `docs/evaluation.md`.
        rows: "prove" that; or "mean": take the loss and all metrics to be means over rows, with no
            proof.
        wrt: what is trained, see `plan`; all parameters if left out.
        honour: "hints" or "pins", see `plan`.
        compiler_options: options of the compiler for the step, by its own names; by default those
            of the plan (`plan.compiler_options`), on the devices that it was made for.

    Returns:
        The program; nothing is compiled or allocated before its first use. With an exchange it is
        an `IslandsProgram`: `init`, `step`, `put`, `evaluate` and `module` are the same.

    Raises:
        ShardlibError: as `plan` without `refine`, of the same kinds.
        PlanError: `plan` decides for something that has no lowering yet, or gradients cannot be
            exchanged under these `guards`.
        LayoutError: the plan does not fit the model.
        TopologyError: there are fewer devices than the plan needs, or `devices` are not as many.
        BatchError: the plan does not fit the batch.
        DiskError: the folder `disk` cannot be written.
    """
    require_arguments(
        "compile",
        loss=loss,
        optimizer=optimizer,
        batch=batch,
        topology=topology,
        pin=pin,
        name=name,
        plan=plan,
        devices=devices,
        guards=guards,
        disk=disk,
        evaluation=evaluation,
        compiler_options=compiler_options,
    )
    from shardlib.frontend.lowered import evaluated_as_trained, lower

    ambient = ambient_mesh()
    with no_mesh():
        batch = choice.island_batch(batch, batch_axes, plan, pin)
        traced = read_and_trace(
            init,
            loss,
            optimizer,
            batch,
            batch_axes,
            name,
            rows=rows,
            wrt=wrt,
            ambient=ambient,
            honour=honour,
        )
        traced, chosen = choice.given_or_searched(traced, plan, topology, pin)
        if evaluation is None:
            traced = evaluated_as_trained(traced)
        lowering = (
            lower if chosen.exchange.islands == 1 else wings.islands("lowering").lower_islands
        )
        program = lowering(
            traced,
            chosen,
            devices=first_devices(topology, devices, chosen.mesh.devices * chosen.exchange.islands),
            guards=guards,
            disk=disk,
            evaluation=(
                traced.model.evaluated(loss)
                if evaluation is None
                else layout_free(traced.model.evaluated(evaluation), ambient)
            ),
            evaluation_user_loss=evaluation or loss,
            compiler_options=compiler_options,
        )
        return replace(program, verifier=_verified)


def _verified(program: Program, limits: Limits | None, options: Options | None) -> Verification:
    """Runs the verification of a program."""
    from shardlib.frontend.verified import verified_program

    return verified_program(program, machine_of_plan(None, program.plan), limits, options)


def verify(
    init: Init | TrainingProgram,
    loss: Loss | None = None,
    optimizer: optax.GradientTransformation | None = None,
    batch: Tree = None,
    *,
    topology: TopologyLike | None = None,
    pin: PinMapping | None = None,
    batch_axes: Tree = None,
    name: str | None = None,
    plan: Plan | None = None,
    limits: Limits | None = None,
    options: Options | None = None,
    rows: str = "prove",
    wrt: Filter = None,
    honour: str = "hints",
) -> Verification:
    """Compiles the training step with the real compiler of the machine it is planned for, which
    need not be here, and compares.

    Args:
        init: see `plan`; or a program, also one of `compile_step`, which then is all that is
            needed, `topology`, `limits` and `options` apart.
        loss: see `compile`.
        optimizer: an optax transformation.
        batch: the global batch, see `plan`.
        topology: what to compile for; by default that of `plan` or of the program, or this machine.
            It must be the one that the plan was made for.
        pin: decisions fixed by hand, see `plan`.
        batch_axes: logical axes of the batch, see `plan`.
        name: what to call the model.
        plan: a plan to verify instead of searching for one.
        limits: seconds and bytes of memory that the compiler may take.
        options: options of the compiler, by its own names, for this compilation; by default those
            of the plan. One that it does not know is a finding.
        rows: "prove" or "mean", see `plan`.
        wrt: what is trained, see `plan`.
        honour: "hints" or "pins", see `plan`.

    Returns:
        What was predicted, what was compiled, and findings; a compiler that fails is a finding.

    Raises:
        ShardlibError: as `compile`, of the same kinds.
        MissingPackageError: the compiler is not installed; the message says what to install.
        VerificationError: the loss or the optimizer is missing, or the plan was made for another
            topology.
    """
    from shardlib.frontend.verified import verified, verified_program, with_compiler
    from shardlib.lowering.training_program import is_program

    if is_program(init):
        return verified_program(init, machine_of_plan(topology, init.plan), limits, options)
    if loss is None or optimizer is None:
        raise VerificationError(
            "verify(init, loss, optimizer, batch, ...) lacks the loss or the optimizer\nTry: pass"
            " all four, or a Program"
        )
    require_arguments(
        "verify",
        loss=loss,
        optimizer=optimizer,
        batch=batch,
        topology=topology,
        pin=pin,
        name=name,
        plan=plan,
    )
    machine = with_compiler(machine_of_plan(topology, plan))
    ambient = ambient_mesh()
    with no_mesh():
        batch = choice.island_batch(batch, batch_axes, plan, pin)
        traced = read_and_trace(
            init,
            loss,
            optimizer,
            batch,
            batch_axes,
            name,
            rows=rows,
            wrt=wrt,
            ambient=ambient,
            honour=honour,
        )
        traced, chosen = choice.given_or_searched(traced, plan, machine, pin)
        return verified(traced, chosen, machine, limits, options)


def first_devices(
    topology: TopologyLike | None, devices: Sequence[jax.Device] | None, count: int
) -> Sequence[jax.Device] | None:
    """The devices that a program uses: those that are given, or the first that the topology names;
    None for the first that JAX sees.

    Args:
        devices: exactly those to use; None for no such wish.
    """
    if devices is not None:
        return devices
    named = devices_of(topology)
    return None if named is None else named[:count]


def with_allowed(
    pin: PinMapping | Pins | None, allow: Mapping[str, str | Sequence[str]] | None
) -> PinMapping | None:
    """Pins with dtypes that the planner may choose.

    Args:
        allow: dtypes, one or several, by what has one; None allows no others.
    """
    if isinstance(pin, Pins):  # functions that take pins take them read, too
        return cast("PinMapping", pin.changed(Pins.parse({"allow": allow or {}})))
    return {**(pin or {}), "allow": allow} if allow else pin


def wanted(refine: int | None, framework: str | None, pin: PinMapping | None = None) -> int:
    """Returns how many plans to compile; none of a framework, which runs its own programs, or of
    islands.

    Args:
        framework: the training framework; None for programs of shardlib.
    """
    count = _plans_to_compile(refine)
    if framework is not None and count:
        raise PlanError(
            f"refine is about programs that shardlib makes, and {framework} runs its"
            " own\nTry: leave out one of the two"
        )
    if count and Pins.parse(pin).exchange.islands > 1:
        raise PlanError(
            "refine is about the plans of one island, and an exchange is pinned\nTry: refine=0, and"
            " shardlib.verify, which compiles a step and a meeting; or refine without the exchange"
        )
    return count


def _plans_to_compile(refine: object) -> int:
    """The number of plans to compile; 0 for none."""
    if refine is None:
        return 0
    if isinstance(refine, bool) or not isinstance(refine, int) or refine < 0:
        raise PlanError(
            f"refine is {refine!r}; it is the number of plans to compile\nTry: refine=3, or"
            " refine=0 for none"
        )
    return refine
