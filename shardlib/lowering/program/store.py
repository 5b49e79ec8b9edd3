"""How a program stores its parameters and the optimizer's state: shardings, dtypes, memory."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from shardlib.annotation.model import Model
from shardlib.annotation.trees.paths import Tree
from shardlib.layout import Layout
from shardlib.lowering.host_memory.offload import offloading
from shardlib.lowering.mesh import shardings
from shardlib.lowering.mesh.precision import Precision, stored
from shardlib.lowering.program.guards import Guards
from shardlib.lowering.program.update.parts import Kept
from shardlib.lowering.runtime.state import TrainState
from shardlib.planning.plan import Plan
from shardlib.report import Finding


@dataclass(frozen=True, kw_only=True)
class Store:
    """How parameters and the optimizer's state are stored.

    Attributes:
        params, trained: shardings of all parameters, and of the trained ones.
        trained_params: abstract.
        precision: the dtypes of the plan.
        optimizer: the user's, with its state in these dtypes.
        opt_state: abstract.
        opt_shardings: of the optimizer's state, with the memory that it is stored in.
        findings: what the user should know about it.
    """

    params: shardings.ParameterShardings
    trained: shardings.ParameterShardings
    trained_params: Tree
    precision: Precision
    optimizer: optax.GradientTransformation
    opt_state: Tree
    opt_shardings: Tree
    findings: tuple[Finding, ...]

    @property
    def parameters(self) -> int:
        """How many parameters there are."""
        return len(jax.tree.leaves(self.params.compute))


def store_of(
    plan: Plan,
    model: Model,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
) -> Store:
    """How a plan stores the parameters of a model and the state of an optimizer."""
    params, precision = shardings.parameter_shardings(plan, model, mesh), Precision.of(plan)
    trained, cuts = model.partition.trained(model.params), params.of(model.partition)
    in_dtypes = stored(optimizer, trained, precision)
    opt_state = jax.eval_shape(in_dtypes.init, trained)
    on_devices, findings = shardings.optimizer_shardings(opt_state, trained, cuts.state, mesh)
    offloaded, offload_findings = offloading(plan, opt_state, trained, on_devices, mesh)
    return Store(
        params=params,
        trained=cuts,
        trained_params=trained,
        precision=precision,
        optimizer=in_dtypes,
        opt_state=opt_state,
        opt_shardings=offloaded,
        findings=(*findings, *offload_findings),
    )


def abstract_state(
    plan: Plan,
    model: Model,
    store: Store,
    mesh: Mesh | AbstractMesh,
    guards: Guards | None,
    kept: Kept,
) -> TrainState:
    """The state of a program, each leaf with its sharding; what the plan has no layout for is
    replicated.
    """
    replicated = shardings.named_sharding(mesh, Layout())

    def everywhere(tree: Tree) -> Tree:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), tree
        )

    return TrainState(
        step=jax.ShapeDtypeStruct((), np.int32, sharding=replicated),
        params=shardings.with_shardings(
            model.partition.mapped(store.precision.resting, model.params), store.params.rest
        ),
        model_state=shardings.with_shardings(
            model.state, shardings.state_shardings(plan, model.state, mesh)
        ),
        opt_state=shardings.with_shardings(store.opt_state, store.opt_shardings),
        guard=None if guards is None else everywhere(jax.eval_shape(guards.first)),
        exchange=kept,
    )
