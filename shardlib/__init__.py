"""shardlib: a sharding compiler front end for JAX. Annotate once, plan in a second, run anywhere.

    program = shardlib.compile(init, loss, optimizer, batch, topology="cpu:8")
    print(program.plan.explain())
    state = program.init(seed=0)
    state, metrics = program.step(state, batch)

The house, from the ground up; a file imports only from its own room or from lower floors, and there
is no JAX below floor 5:

    0  errors, untrusted, compact                what can go wrong; data from elsewhere; short reprs
    1  axes, layout, rules, collective, report   the small values that everything else speaks
       hardware                                  chips, link tiers, the spelling of topologies
       schedules                                 who does what when in a pipeline
       exchanges                                 how islands meet
    2  graph                                     what a program computes
       decisions                                 the table of what a plan decides
    3  propagation                               names flow through the graph
       cost                                      seconds and bytes
    4  planning                                  the Plan, the search for it, its words
    5  annotation, tracing                       read the user's names; jaxpr -> Graph
       functions                                 custom calls, lowered in other forms
       processes                                 processes that agree, are watched and end together
       jax_types                                 JAX's values, by the names that signatures use
    6  lowering                                  Plan -> one `jax.jit` program
       calibration                               rates of this machine
    7  verification                              the real compilers as judges
       explanation                               HTML, SVG, traces
    8  compiler                                  the whole story on one page
       frontend                                  its steps, one a file
    9  models                                    reference models
       booking                                   which machine ends a run in time, and what it costs
       data                                      documents, tokens, batches
       checkpointing                             states on disk, for any mesh
       doctor                                    what keeps hosts from training together
       launching                                 processes that join, jobs on engines
       servers                                   workers and parameter servers, with no barrier
       federated                                 clients that keep their rows, with Flower
       serving                                   a model answers, over a cache of keys and values
       training                                  the training loop, and what it survives
    10 cli                                       the command line

Names are imported when they are first used: `import shardlib` loads neither JAX nor NumPy, and
nothing here touches a device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlib.annotation.linen import linen
    from shardlib.annotation.tree import tree
    from shardlib.axes import MeshShape
    from shardlib.collective import Collective
    from shardlib.compiler import compile, plan, verify
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
    from shardlib.exchanges.asynchronous import Asynchronous
    from shardlib.exchanges.compressed import Compressed
    from shardlib.exchanges.compressors import PowerSGD, Quantised, Sign, TopK
    from shardlib.exchanges.diloco import DiLoCo
    from shardlib.exchanges.gossip import Gossip
    from shardlib.exchanges.values import Exact
    from shardlib.frontend.edge import plan_edge
    from shardlib.frontend.scale import scale
    from shardlib.frontend.serving import plan_serving
    from shardlib.frontend.steps.compiled import compile_step
    from shardlib.frontend.steps.gradients import value_and_grad
    from shardlib.frontend.steps.parallel import parallelize
    from shardlib.functions.attention import attention
    from shardlib.functions.experts import visit
    from shardlib.functions.mean import WeightedMean
    from shardlib.functions.routing import balance_loss, route
    from shardlib.hardware import Topology, topology
    from shardlib.launching.joining import join
    from shardlib.layout import Layout
    from shardlib.lowering.islands.program import IslandsProgram
    from shardlib.lowering.program.guards import Guards
    from shardlib.lowering.program.program import Program
    from shardlib.lowering.runtime.state import TrainState
    from shardlib.planning.plan import ChangedPlanError, ParameterLayout, Plan
    from shardlib.report import Finding
    from shardlib.rules import Rules
    from shardlib.serving.verified import verify_serving
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
    "compile": "shardlib.compiler",
    "plan": "shardlib.compiler",
    "compile_step": "shardlib.frontend.steps.compiled",
    "parallelize": "shardlib.frontend.steps.parallel",
    "value_and_grad": "shardlib.frontend.steps.gradients",
    "plan_edge": "shardlib.frontend.edge",
    "plan_serving": "shardlib.frontend.serving",
    "scale": "shardlib.frontend.scale",
    "verify": "shardlib.compiler",
    "verify_serving": "shardlib.serving.verified",
    "topology": "shardlib.hardware",
    "linen": "shardlib.annotation.linen",
    "attention": "shardlib.functions.attention",
    "WeightedMean": "shardlib.functions.mean",
    "visit": "shardlib.functions.experts",
    "route": "shardlib.functions.routing",
    "balance_loss": "shardlib.functions.routing",
    "tree": "shardlib.annotation.tree",
    "Plan": "shardlib.planning.plan",
    "ChangedPlanError": "shardlib.planning.plan",
    "ParameterLayout": "shardlib.planning.plan",
    "Estimate": "shardlib.cost.estimate",
    "Seconds": "shardlib.cost.estimate",
    "DeviceBytes": "shardlib.cost.estimate",
    "Guards": "shardlib.lowering.program.guards",
    "Program": "shardlib.lowering.program.program",
    "TrainState": "shardlib.lowering.program.program",
    "Asynchronous": "shardlib.exchanges.asynchronous",
    "Compressed": "shardlib.exchanges.compressed",
    "PowerSGD": "shardlib.exchanges.compressors",
    "Quantised": "shardlib.exchanges.compressors",
    "Sign": "shardlib.exchanges.compressors",
    "TopK": "shardlib.exchanges.compressors",
    "DiLoCo": "shardlib.exchanges.diloco",
    "Gossip": "shardlib.exchanges.gossip",
    "Exact": "shardlib.exchanges.values",
    "IslandsProgram": "shardlib.lowering.islands.program",
    "Topology": "shardlib.hardware",
    "Collective": "shardlib.collective",
    "Finding": "shardlib.report",
    "Layout": "shardlib.layout",
    "MeshShape": "shardlib.axes",
    "Rules": "shardlib.rules",
    "Verification": "shardlib.verification.report",
    "Settings": "shardlib.training.settings",
    "fit": "shardlib.training.fit",
    "join": "shardlib.launching.joining",
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardlib' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
