"""From decisions to the layout of every parameter and batch array."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from shardlib.axes import BATCH_AXES, COMPUTE_AXES, STORED_AXES, LogicalAxes, MeshShape
from shardlib.cost.items.fused_weights import fused_parameters
from shardlib.graph import Op
from shardlib.graph.problem import Problem
from shardlib.layout import Layout
from shardlib.planning.plan import ParameterLayout
from shardlib.report import Finding, diagnostic
from shardlib.rules import Rules

#: A parameter larger than this that no axis shards deserves a word, bytes.
LARGE_BYTES = 64 * 2**20
#: Rows and columns of a bfloat16 tile in TPU memory, elements (jax-ml/jax
#: docs/pallas/tpu/details.rst: 8 x 128 of 32 bits, 16 x 128 of 16 bits).
ROWS, LANES = 16, 128


def at_rest(
    layout: Layout,
    shape: tuple[int, ...],
    mesh: MeshShape,
    frozen: frozenset[int],
    avoided: frozenset[int] = frozenset(),
) -> Layout:
    """Cuts one more dim of a parameter over the storage axes: the first uncut dim that divides,
    else a cut dim that still divides.

    Pieces along the first dim lie together in memory, so that gathering them moves nothing else.
    Dims whose shards are no whole tiles come last: a TPU pads them, and trades rows between
    neighbours after every reduce-scatter. Where no other dim has whole tiles, columns that would
    as rows come before rows that do not: the compiler then stores the matrix transposed.

    Vectors (scales of norms, biases) are stored replicated: sharding them saves next to nothing,
    and each would cost two collectives a layer.
    """
    added = tuple(axis for axis in STORED_AXES if axis in mesh and axis not in layout.axes)
    if not added:
        return layout
    more = mesh.ways(added)
    dims = [dim for dim, size in enumerate(shape) if dim not in frozen and size > 1]
    fits = [dim for dim in dims if shape[dim] % (mesh.ways(layout[dim]) * more) == 0]
    if len(dims) < 2 or not fits:
        return layout
    best = min(
        fits,
        key=lambda dim: (
            dim in avoided,
            bool(layout[dim]),
            _untiled(dim, shape, shape[dim] // (mesh.ways(layout[dim]) * more)),
            dim,
        ),
    )
    return Layout(*((*axes, *added) if dim == best else axes for dim, axes in enumerate(layout)))


def _untiled(dim: int, shape: tuple[int, ...], size: int) -> int:
    """How far shards of a size along a dim are from whole tiles: 0 where they are whole, 1 where
    they are in a transposed matrix, 2 otherwise.
    """
    last = len(shape) - 1
    if dim < last - 1 or size % (LANES if dim == last else ROWS) == 0:
        return 0
    transposed = dim == last and size % ROWS == 0 and shape[last - 1] % LANES == 0
    return 1 if transposed else 2


def split_rules(rules: Rules, batch: str | None) -> tuple[Rules, Rules | None]:
    """Splits pinned rules into those for compute and those that also say where parameters rest.

    A rule that shards a colour other than the batch over data or fsdp concerns stored parameters
    only; where there is no such rule, there is nothing to say about rest.
    """
    storing = set(BATCH_AXES) - set(COMPUTE_AXES)
    compute = Rules(
        tuple(
            (name, axes if name == batch else tuple(a for a in axes if a in COMPUTE_AXES))
            for name, axes in rules.entries
            if name == batch or set(COMPUTE_AXES) & set(axes) or not axes
        )
    )
    return compute, (
        rules
        if any(name != batch and storing & set(axes) for name, axes in rules.entries)
        else None
    )


def parameter_layouts(
    problem: Problem,
    colours: Mapping[str, LogicalAxes],
    frozen: frozenset[tuple[str, int]],
    mesh: MeshShape,
    rules: Rules,
    zero: int,
    rest_rules: Rules | None = None,
) -> tuple[ParameterLayout, ...]:
    """Layouts of every parameter."""
    found: list[ParameterLayout] = []
    slices, fused = sliced_dims(problem), fused_parameters(problem)
    for parameter in problem.parameters:
        axes = colours[parameter.path]
        stacks = frozenset(dim for path, dim in frozen if path == parameter.path)
        compute = _staged(
            rules.resolve(axes, parameter.shape, mesh).layout, parameter.shape, mesh, stacks
        )
        if rest_rules is not None:
            cut = _staged(
                rest_rules.resolve(axes, parameter.shape, mesh).layout,
                parameter.shape,
                mesh,
                stacks,
            )
        else:
            avoided = slices.get(parameter.path, frozenset())
            if "tensor" in compute.axes:
                avoided |= {d for d in fused.get(parameter.path, ()) if not compute[d]}
            cut = at_rest(compute, parameter.shape, mesh, stacks, avoided)
        rest = cut if zero >= 3 else compute
        gradient, state = (
            (cut if zero >= 2 else compute, cut if zero >= 1 else compute)
            if parameter.trained
            else (compute, rest)
        )
        found.append(
            ParameterLayout(
                path=parameter.path,
                shape=parameter.shape,
                dtype=parameter.dtype,
                colours=axes,
                compute=compute,
                rest=rest,
                gradient=gradient,
                state=state,
                role=parameter.role,
            )
        )
    return tuple(found)


def sliced_dims(problem: Problem) -> dict[str, frozenset[int]]:
    """The dims of which every use of a parameter takes a slice, by path: the rows of a table of
    positions that is longer than the sequence. Sharded, such a dim is gathered whole, where slices
    of the others' shards could be.
    """
    graph = problem.forward
    uses: dict[int, list[Op]] = defaultdict(list)
    for op in graph.ops:
        for value in op.operands:
            uses[value].append(op)
    found: dict[str, frozenset[int]] = {}
    for value in graph.inputs_of("parameter"):
        shape = graph.values[value].shape
        parts = uses[value]
        if parts and all(op.kind in ("slice", "dynamic_slice") for op in parts):
            found[graph.values[value].path] = frozenset(
                dim
                for dim, size in enumerate(shape)
                if all(graph.values[op.results[0]].shape[dim] < size for op in parts)
            )
    return found


def _staged(
    layout: Layout, shape: tuple[int, ...], mesh: MeshShape, stacks: frozenset[int]
) -> Layout:
    """The layout with stacks of layers sharded over the stages, where they divide; an uneven cut
    has no layout.
    """
    return Layout(
        *(
            (
                ("stage",)
                if "stage" in mesh
                and dim in stacks
                and not axes
                and shape[dim] % mesh["stage"] == 0
                else axes
            )
            for dim, axes in enumerate(layout)
        )
    )


def batch_layouts(
    problem: Problem, colours: Mapping[str, LogicalAxes], mesh: MeshShape, rules: Rules
) -> tuple[tuple[str, Layout], ...]:
    """Layout of every batch array: cut along the batch and over the context axis; the tensor axis
    cuts the sequence inside the program.

    Args:
        rules: colour -> mesh axes.
    """
    outer = Rules(
        tuple(
            (name, tuple(axis for axis in axes if axis != "tensor"))
            for name, axes in rules.entries
            if not axes or set(axes) - {"tensor"}
        )
    )
    return tuple(
        (path, outer.resolve(colours[path], shape, mesh).layout)
        for path, shape, _, _ in problem.batch
    )


@diagnostic
def layout_findings(
    layouts: tuple[ParameterLayout, ...], mesh: MeshShape, zero: int, itemsize: Mapping[str, int]
) -> tuple[Finding, ...]:
    """What is worth saying about the layouts: large parameters that nothing shards.

    Args:
        itemsize: bytes of an element, by dtype.
    """
    found: list[Finding] = []
    for p in layouts:
        size = itemsize.get(p.dtype, 4)
        for extent in p.shape:
            size *= extent
        if (
            size >= LARGE_BYTES
            and mesh.devices > mesh["data"]
            and not p.state.axes
            and zero >= (1 if p.trained else 3)
        ):
            found.append(
                Finding(
                    code="replicated-parameter",
                    severity="warning",
                    where=p.path,
                    message=(
                        f"{p.path} {p.shape} is replicated on every device: no dim divides over"
                        f" {mesh}"
                    ),
                    hint="pad the dim to a multiple of the fsdp axis",
                )
            )
    return tuple(found)
