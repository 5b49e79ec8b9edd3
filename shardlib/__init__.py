"""shardlib: a sharding compiler front end for JAX. Annotate once, plan in a second, run anywhere.

    program = shardlib.compile(init, loss, optimizer, batch, topology="cpu:8")
    print(program.plan.explain())
    state = program.init(seed=0)
    state, metrics = program.step(state, batch)

The packages, from the ground up; a file imports only from its own layer or from lower ones, and
there is no JAX below the doors (`tool.importlinter` in pyproject.toml):

    errors, untrusted, compact   what can go wrong; data from elsewhere; short reprs
    wings                        what the core uses of packages that may be missing
    layout, rules, collective, findings
                                 the small values that everything else speaks
    machines                     chips, link tiers, the spelling of topologies
    schedules                    who does what when in a pipeline
    exchanges                    how islands exchange
    graph                        what a program computes
    decisions                    the table of what a plan decides
    propagation, cost            names flow through the graph; seconds and bytes
    planner, report              the Plan and the search for it; its text and pictures
    annotation, tracing          JAX's door in: the user's names, jaxpr -> Graph
    functions, processes         custom calls; processes that agree and end together
    lowering, calibration        JAX's door out: Plan -> one `jax.jit` program; rates of a machine
    verification                 the real compilers as judges
    api, frontend                the whole story on one page, and its steps
    models, data, checkpointing, training
                                 reference models, batches, states on disk, the training loop
    cli                          the command line
    launch, serve, islands       wings, which the core does not know: jobs on many hosts and what to
                                 book, models that answer, islands and servers over TCP

Names are imported when they are first used: `import shardlib` loads neither JAX nor NumPy, and
nothing here touches a device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardlib import _moved, wings

if TYPE_CHECKING:
    from shardlib.annotation.flax import linen
    from shardlib.annotation.tree import tree
    from shardlib.api import compile, plan, verify
    from shardlib.collective import Collective
    from shardlib.cost.estimate import DeviceBytes, Estimate, Seconds
    from shardlib.errors import (
        AnnotationError,
        ArgumentError,
        BatchError,
        CheckpointError,
        DataError,
        DiskError,
        InfeasibleError,
        LaunchError,
        LayoutError,
        MissingFileError,
        MissingPackageError,
        ModelError,
        OwnedError,
        PinError,
        PlanError,
        RuleError,
        RunError,
        ShardlibError,
        StateError,
        StoppedError,
        TopologyError,
        TracingError,
        TrainingError,
        VerificationError,
    )
    from shardlib.exchanges import Exact
    from shardlib.findings import Finding
    from shardlib.frontend.gradients import value_and_grad
    from shardlib.frontend.steps import compile_step, parallelize
    from shardlib.frontend.verified import scale
    from shardlib.functions.attention import attention
    from shardlib.functions.experts import visit
    from shardlib.functions.losses import WeightedMean
    from shardlib.functions.routing import balance_loss, route
    from shardlib.islands.exchanges import (
        Asynchronous,
        Compressed,
        DiLoCo,
        Gossip,
        PowerSGD,
        Quantised,
        Sign,
        TopK,
    )
    from shardlib.islands.program import IslandsProgram
    from shardlib.launch.joining import join
    from shardlib.layout import Layout, MeshShape
    from shardlib.lowering.program import Program
    from shardlib.lowering.runtime import TrainState
    from shardlib.lowering.step import Guards
    from shardlib.machines.topology import Topology, topology
    from shardlib.planner.plan import ChangedPlanError, ParameterLayout, Plan
    from shardlib.rules import Rules
    from shardlib.serve.checks import verify_serving
    from shardlib.serve.frontend import plan_edge, plan_serving
    from shardlib.training.fit import fit
    from shardlib.training.settings import Settings
    from shardlib.verification.report import Verification

__version__ = "0.1.0"

_ERRORS = (
    "AnnotationError",
    "ArgumentError",
    "BatchError",
    "CheckpointError",
    "DataError",
    "DiskError",
    "InfeasibleError",
    "LaunchError",
    "LayoutError",
    "MissingFileError",
    "MissingPackageError",
    "ModelError",
    "OwnedError",
    "PinError",
    "PlanError",
    "RuleError",
    "RunError",
    "ShardlibError",
    "StateError",
    "StoppedError",
    "TopologyError",
    "TracingError",
    "TrainingError",
    "VerificationError",
)
#: Public name -> the module that defines it.
_HOME = {
    "compile": "shardlib.api",
    "plan": "shardlib.api",
    "compile_step": "shardlib.frontend.steps",
    "parallelize": "shardlib.frontend.steps",
    "value_and_grad": "shardlib.frontend.gradients",
    "plan_edge": "shardlib.serve.frontend",
    "plan_serving": "shardlib.serve.frontend",
    "scale": "shardlib.frontend.verified",
    "verify": "shardlib.api",
    "verify_serving": "shardlib.serve.checks",
    "topology": "shardlib.machines",
    "linen": "shardlib.annotation.flax",
    "attention": "shardlib.functions.attention",
    "WeightedMean": "shardlib.functions.losses",
    "visit": "shardlib.functions.experts",
    "route": "shardlib.functions.routing",
    "balance_loss": "shardlib.functions.routing",
    "tree": "shardlib.annotation.tree",
    "Plan": "shardlib.planner.plan",
    "ChangedPlanError": "shardlib.planner.plan",
    "ParameterLayout": "shardlib.planner.plan",
    "Estimate": "shardlib.cost.estimate",
    "Seconds": "shardlib.cost.estimate",
    "DeviceBytes": "shardlib.cost.estimate",
    "Guards": "shardlib.lowering.step",
    "Program": "shardlib.lowering.program",
    "TrainState": "shardlib.lowering.program",
    "Asynchronous": "shardlib.islands.exchanges",
    "Compressed": "shardlib.islands.exchanges",
    "PowerSGD": "shardlib.islands.exchanges",
    "Quantised": "shardlib.islands.exchanges",
    "Sign": "shardlib.islands.exchanges",
    "TopK": "shardlib.islands.exchanges",
    "DiLoCo": "shardlib.islands.exchanges",
    "Gossip": "shardlib.islands.exchanges",
    "Exact": "shardlib.exchanges",
    "IslandsProgram": "shardlib.islands.program",
    "Topology": "shardlib.machines",
    "Collective": "shardlib.collective",
    "Finding": "shardlib.findings",
    "Layout": "shardlib.layout",
    "MeshShape": "shardlib.layout",
    "Rules": "shardlib.rules",
    "Verification": "shardlib.verification.report",
    "Settings": "shardlib.training.settings",
    "fit": "shardlib.training.fit",
    "join": "shardlib.launch.joining",
    **dict.fromkeys(_ERRORS, "shardlib.errors"),
}

__all__ = [
    "AnnotationError",
    "ArgumentError",
    "Asynchronous",
    "BatchError",
    "ChangedPlanError",
    "CheckpointError",
    "Collective",
    "Compressed",
    "DataError",
    "DeviceBytes",
    "DiLoCo",
    "DiskError",
    "Estimate",
    "Exact",
    "Finding",
    "Gossip",
    "Guards",
    "InfeasibleError",
    "IslandsProgram",
    "LaunchError",
    "Layout",
    "LayoutError",
    "MeshShape",
    "MissingFileError",
    "MissingPackageError",
    "ModelError",
    "OwnedError",
    "ParameterLayout",
    "PinError",
    "Plan",
    "PlanError",
    "PowerSGD",
    "Program",
    "Quantised",
    "RuleError",
    "Rules",
    "RunError",
    "Seconds",
    "Settings",
    "ShardlibError",
    "Sign",
    "StateError",
    "StoppedError",
    "TopK",
    "Topology",
    "TopologyError",
    "TracingError",
    "TrainState",
    "TrainingError",
    "Verification",
    "VerificationError",
    "WeightedMean",
    "__version__",
    "attention",
    "balance_loss",
    "compile",
    "compile_step",
    "fit",
    "join",
    "linen",
    "parallelize",
    "plan",
    "plan_edge",
    "plan_serving",
    "route",
    "scale",
    "topology",
    "tree",
    "value_and_grad",
    "verify",
    "verify_serving",
    "visit",
]


_moved.install()


def __getattr__(name: str) -> Any:
    if f"shardlib.{name}" in _moved.MOVED:
        return importlib.import_module(f"shardlib.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'shardlib' has no attribute {name!r}")
    return getattr(wings.required(_HOME[name], f"shardlib.{name}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
