"""A call of `shardlib.functions.experts.visit`, over devices that have parts of the tokens and of
the experts each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardlib.errors import PlanError, ShardlibError
from shardlib.functions.experts import ExpertForm
from shardlib.hardware.topology import topology
from shardlib.layout import Layout
from shardlib.lowering.experts.grouped import Grouped
from shardlib.lowering.experts.groups import Where
from shardlib.lowering.experts.overflow_rounds import KEPT
from shardlib.lowering.experts.remat_names import saving
from shardlib.lowering.experts.routed import routed
from shardlib.lowering.mesh.collectives import Cuts, Machine
from shardlib.lowering.reading.custom_calls import Site
from shardlib.lowering.weights.reduction import Reduction
from shardlib.planning.plan import ParameterLayout, Plan
from shardlib.tracing.rewriting.recomputing import recomputes

#: What the matrices of experts, and tokens that tensor shards, are called where they are whole.
GATHERED = "shardlib_gathered"
#: Which dim of an expert's matrices [E, D, F] (up, gate) or [E, F, D] (down) is the hidden one.
_HIDDEN = {"up": 2, "down": 1, "gate": 2}


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """How one operand of experts comes, and how it is used.

    Attributes:
        rest: how it is sharded as it comes.
        gathered: mesh axes by dim that it is gathered over before use, the minor ones.
    """

    rest: Cuts
    gathered: Cuts

    @staticmethod
    def of(
        parameter: ParameterLayout | None,
        dims: Sequence[int | None],
        shape: Sequence[int],
        compute: Cuts,
        machine: Machine,
    ) -> Matrices:
        """An operand that is a parameter, or a layer of it, comes as that rests; another one as it
        is wanted.

        Args:
            parameter: layouts of it; None for an operand that is none.
            dims: dim of the parameter that each dim of the operand is; None where it is none.
        """
        stored: Cuts = (
            {}
            if parameter is None
            else {
                dim: parameter.rest[source] for dim, source in enumerate(dims) if source is not None
            }
        )
        fits = parameter is not None and all(
            stored.get(dim, ())[: len(compute.get(dim, ()))] == compute.get(dim, ())
            and shape[dim] % machine.ways(stored.get(dim, ())) == 0
            for dim in range(3)
        )
        if not fits or (
            parameter is not None
            and {axis for axes in stored.values() for axis in axes}
            != set(parameter.rest.axes) - {"stage"}
        ):
            stored = compute
        return Matrices(
            rest=stored,
            gathered={dim: axes[len(compute.get(dim, ())) :] for dim, axes in stored.items()},
        )

    def whole(self, array: jax.Array, machine: Machine) -> jax.Array:
        """The operand as it is used; inside of the region. Its gradient is scattered as other
        gradients are (`shardlib.lowering.weights.gradients`).
        """
        back = Reduction(
            scattered={dim: axes for dim, axes in self.gathered.items() if axes}, summed=()
        )

        def forward(array: jax.Array) -> jax.Array:
            for dim, axes in self.gathered.items():
                array = machine.gathered(array, dim, axes)
            return array

        run = jax.custom_vjp(forward)
        run.defvjp(
            lambda array: (forward(array), None),
            lambda _, cotangent: (back.apply(cotangent, machine, stacked=True),),
        )
        return run(array)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """How a call is sharded.

    Attributes:
        form: what experts compute.
        where: on which axes.
        tokens: mesh axes that shard batch and sequence of the tokens.
        over: mesh axes that shard the hidden width, over which results are added up.
        scattered: whether they shard the sequence of tokens and results outside.
        matrices: up, down, and gate where there is one.
    """

    form: ExpertForm
    where: Where
    tokens: tuple[tuple[str, ...], ...]
    over: tuple[str, ...]
    scattered: bool
    matrices: tuple[Matrices, ...]

    def local(
        self,
        machine: Machine,
        x: jax.Array,
        weights: jax.Array,
        chosen: jax.Array,
        *parameters: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """What one device does, inside of the manual region."""

        def run(
            x: jax.Array, weights: jax.Array, chosen: jax.Array, *parameters: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            used = [
                checkpoint_name(matrices.whole(array, machine), GATHERED)
                for matrices, array in zip(self.matrices, parameters, strict=True)
            ]
            # Gathered here, and not on the way in, tokens are gathered in their own dtype, the
            # backward pass keeps shards of them, and their gradient is scattered.
            if self.scattered:
                x = checkpoint_name(jax.lax.all_gather(x, self.over, axis=1, tiled=True), GATHERED)
            return routed(self.form, self.where, x, weights, chosen, *used)

        # The backward pass gathers matrices and tokens again, since those of all layers are the
        # whole model; but for a layer that is rematerialised, of which it finds what that has
        # gathered.
        result, dropped = saving(run, KEPT, *([GATHERED] if recomputes() else []))(
            x, weights, chosen, *parameters
        )
        if not self.over:
            return result, dropped
        return (
            jax.lax.psum_scatter(result, self.over, scatter_dimension=1, tiled=True)
            if self.scattered
            else jax.lax.psum(result, self.over)
        ), dropped


def on_their_devices(
    site: Site,
    plan: Plan,
    parameters: Sequence[ParameterLayout | None],
    placements: Mapping[tuple[str, int], Layout],
    machine: Machine,
) -> Callable[..., Sequence[jax.Array]] | None:
    """What takes the place of a call of experts; None where that is left to automatic partitioning,
    which gathers all tokens.

    Args:
        parameters: layouts of the parameters that the operands are; None for others.
    """
    layout, grouped = placements.get(site.key(0)), _grouped(plan, machine)
    if (
        plan.mesh.devices == plan.mesh["stage"] and grouped.kind == "blocks"
        # one device has all of a layer; as it is written, the call would multiply all rows with all
        # matrices
    ):
        return lambda *arrays: list(
            routed(site.call.form, Where(expert=(), ways=1, grouped=grouped), *arrays)
        )
    if plan.experts == "none":
        return None
    if layout is None or len(layout) < 2:
        raise PlanError(
            f"experts={plan.experts!r} needs to know how the tokens of {site.call.path} are"
            " sharded, and the plan has no layout of them\nTry: tokens [batch, sequence, features],"
            " or experts='none'"
        )
    placed = _placed(site, parameters, layout, grouped, machine)
    batch, sequence = placed.tokens
    rows, after = (
        PartitionSpec(*(axes or None for axes in (batch, along)[: len(layout) - 1]))
        for along in (sequence, (*sequence, *placed.over) if placed.scattered else sequence)
    )
    specs = (after, rows, rows, *(machine.spec(matrices.rest, 3) for matrices in placed.matrices))
    run = machine.manual(
        lambda *local: placed.local(machine, *local), specs, (after, PartitionSpec())
    )

    def call(*arrays: jax.Array) -> list[jax.Array]:
        # In the dtype of use matrices are gathered, and their gradients added up, as those of other
        # weights are.
        return list(run(*arrays[:3], *(array.astype(arrays[0].dtype) for array in arrays[3:])))

    return call


def _placed(
    site: Site,
    parameters: Sequence[ParameterLayout | None],
    tokens: Layout,
    grouped: Grouped,
    machine: Machine,
) -> Placed:
    """How a call is sharded, see `on_their_devices`; `tokens` is the layout of its tokens."""
    form = site.call.form
    shared, hidden = _axes_of_matrices(site, parameters[3], machine)
    along = (
        ()
        if form.capacity is not None or len(tokens) < 3
        else tuple(axis for axis in tokens[1] if axis not in hidden and axis != "tensor")
    )  # capacities count tokens in the order of the whole sequence
    batch, sequence = machine.parts(tokens[0]), machine.parts(along)
    expert_axes = Where(
        expert=machine.parts(shared),
        ways=machine.ways(shared),
        every=(*batch, *sequence),
        grouped=grouped,
    )
    return Placed(
        form=form,
        where=expert_axes,
        tokens=(batch, sequence),
        over=machine.parts(hidden),
        scattered=bool(hidden) and len(tokens) > 2 and tokens[1] == (*along, *hidden),
        matrices=tuple(
            Matrices.of(
                parameters[3 + k],
                () if (view := site.views[3 + k]) is None else view.dims,
                site.avals[3 + k].shape,
                {0: shared, _HIDDEN[name]: hidden},
                machine,
            )
            for k, name in enumerate(("up", "down", "gate")[: len(site.avals) - 3])
        ),
    )


def _axes_of_matrices(
    site: Site, up: ParameterLayout | None, machine: Machine
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that experts are shared out over, and those that shard their hidden width."""
    view, shape = site.views[3], site.avals[3].shape
    if up is None or view is None:
        return (), ()
    experts, _, width = (() if source is None else up.compute[source] for source in view.dims)
    experts_size, tensor = machine.ways(("expert",)), machine.ways(("tensor",))
    return (
        tuple(
            axis
            for axis in experts
            if axis == "expert" and experts_size > 1 and shape[0] % experts_size == 0
        ),
        tuple(axis for axis in width if axis == "tensor" and shape[2] % tensor == 0),
    )


def _grouped(plan: Plan, machine: Machine) -> Grouped:
    """How rows are multiplied with the matrices of their groups: TPUs have a kernel for it."""
    try:
        tpu = topology(plan.topology).chip.vendor == "google"
    except ShardlibError:  # a topology of the user's
        tpu = machine.torus
    return Grouped(kind="ragged" if tpu else "blocks")
