"""The meetings of islands, as their plan has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib.annotation.trees.paths import path_text
from shardlib.axes import ISLAND
from shardlib.exchanges.values import Meets
from shardlib.lowering.islands.meeting.meeting import Meeting, Shared
from shardlib.lowering.islands.stacked import stacked_sharding
from shardlib.lowering.mesh.pinning import held
from shardlib.lowering.program.program import Program
from shardlib.planning.islands.meeting import fragments_of


def meetings_of(
    exchange: Meets, program: Program, mesh: Mesh | AbstractMesh
) -> tuple[Meeting, ...]:
    """All meetings that differ."""
    return tuple(
        Meeting(exchange=exchange, number=number, mesh=mesh, about=about)
        for number, about in enumerate(shared_of(exchange, program))
    )


def shared_of(exchange: Meets, program: Program) -> list[list[Shared]]:
    """The parameters of each meeting."""
    trained = program.model.partition.trained(program.state.params)
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    states = jax.tree.leaves(program.parts.params.state)
    shared = {
        path_text(path): Shared(place=place, leaf=leaf, state=state)
        for place, ((path, leaf), state) in enumerate(zip(leaves, states, strict=True))
    }
    plan = program.plan
    return [
        [shared[part.parameter.path].of(part.rows) for part in fragment]
        for fragment in fragments_of(plan.parameters, plan.mesh, exchange)
    ]


def mean_parameters(meeting: Meeting, thetas: list[jax.Array]) -> list[jax.Array]:
    """The mean of the parameters of all islands, sharded as optimizer state is and alike on all
    islands.
    """
    mesh = meeting.mesh
    stacks = [stacked_sharding(one.state, mesh) for one in meeting.about]
    alike = [NamedSharding(mesh, one.state.spec) for one in meeting.about]

    def mean(mine: list[jax.Array]) -> list[jax.Array]:
        return [
            jax.lax.pmean(own.astype(jnp.float32), ISLAND.name).reshape(
                own.shape if one.leaf.ndim else ()
            )
            for one, own in zip(meeting.about, mine, strict=True)
        ]

    def function(thetas: list[jax.Array]) -> list[jax.Array]:
        return jax.shard_map(
            mean,
            mesh=mesh,
            in_specs=([one.spec for one in stacks],),
            out_specs=[one.spec for one in alike],
            check_vma=False,
        )([held(theta, own) for theta, own in zip(thetas, stacks, strict=True)])

    return jax.jit(function)(thetas)


def replaced(arrays: list[jax.Array], places: list[int], new: list[jax.Array]) -> list[jax.Array]:
    """Arrays with others in some places."""
    changed = dict(zip(places, new, strict=True))
    return [changed.get(place, array) for place, array in enumerate(arrays)]
