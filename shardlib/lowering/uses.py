"""Uses of the parameters of a traced loss: contractions, lookups, stacks of layers, custom
calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from shardlib._jax_compat import scan_counts
from shardlib.annotation.model import no_mesh
from shardlib.annotation.names import PureLoss
from shardlib.annotation.trees import Tree
from shardlib.errors import ShardlibError, TracingError
from shardlib.functions.attention import Attention
from shardlib.graph import input_source
from shardlib.jax_types import Aval, Eqn
from shardlib.lowering.contractions import Use, ValueSource, View
from shardlib.lowering.mesh import batch_path
from shardlib.tracing.layouts import NO_MESH, brings_layouts, layout_free
from shardlib.tracing.program import (
    CUSTOM,
    REMAT,
    CustomCall,
    Equation,
    Program,
    flatten,
    has_matmul,
    result_path,
)

# --------------------------------------------------------------------------------------------------
# Parameters that are stacks of layers, tables of lookups, kernels of convolutions, or used in a
# narrower dtype, each identified by the operations that read it:
#
#     scan over {"up": [layers, embed, mlp]}    "12/enter/0" -> parameter "up": one layer per slice
#     table[tokens], table[:length]             a table: read by lookups and slices alone
#     conv(x, kernel)                           a kernel, identified by its shape
#     x @ weight.astype(bfloat16)               a weight in bfloat16, if nothing else reads it


def _takes_rows(program: Program, equation: Equation) -> bool:
    """True if an equation takes whole rows of an array."""
    if equation.name not in ("slice", "dynamic_slice"):
        return False
    before, after = (program.avals[n].shape for n in (equation.inputs[0], equation.outputs[0]))
    return before[1:] == after[1:]


def kernel_shapes(equations: Iterable[Eqn]) -> frozenset[tuple[int, ...]]:
    """Shapes of the kernels of all convolutions among JAX equations and inside of them.

    A kernel that is stored sharded is gathered, and its gradient reduced, in its compute sharding:
    if the gradient of a kernel is sharded over tensor and fsdp while the batch is sharded over a
    third axis, XLA's partitioner gives wrong numbers (seen on CPU with JAX 0.10.2).
    """
    shapes: set[tuple[int, ...]] = set()
    for eqn in equations:
        if eqn.primitive.name == "conv_general_dilated":
            kernel: Any = eqn.invars[1].aval
            shapes.add(tuple(kernel.shape))
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    shapes |= kernel_shapes(inner.eqns)
    return frozenset(shapes)


def narrow_dtypes(program: Program, num_parameters: int) -> dict[int, np.dtype]:
    """The narrower floating dtype to which a parameter, or every layer of it, is cast, if the cast
    is all that reads it. Its gradient has no more precision either.
    """
    dtypes: dict[int, np.dtype] = {}
    indices = {number: i for i, number in enumerate(program.inputs[:num_parameters])}
    _find_casts(program, indices, dtypes)
    return dtypes


def _find_casts(
    program: Program, parameters: Mapping[int, int], dtypes: dict[int, np.dtype]
) -> None:
    readers: dict[int, list[Equation]] = {number: [] for number in parameters}
    for equation in program.equations:
        for number in equation.inputs:
            if number in readers:
                readers[number].append(equation)
    for number, parameter in parameters.items():
        if len(readers[number]) != 1 or number in program.outputs:
            continue
        (reader,) = readers[number]
        if reader.name == "convert_element_type":
            wide, dtype = program.avals[number].dtype, reader.params["new_dtype"]
            if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < wide.itemsize:
                dtypes[parameter] = dtype
        elif (body := _body(reader)) is not None:
            _find_casts(body, {body.inputs[reader.inputs.index(number)]: parameter}, dtypes)


def _body(equation: Equation) -> Program | None:
    """The body of an equation whose operands are the body's inputs, one by one."""
    if equation.name in REMAT:
        return equation.inside()
    if equation.name == "scan":
        return equation.inside("body")
    return None


def stacked_parameters(program: Program, num_parameters: int) -> dict[str, int]:
    """The stacked parameters of which slices of scans are layers.

    Returns:
        Path of a slice, "12/enter/0" -> index of the parameter; only for parameters that nothing
        else reads.
    """
    slices: dict[str, int] = {}
    reads: Counter[int] = Counter()
    indices = {number: i for i, number in enumerate(program.inputs[:num_parameters])}
    _find_slices(program, indices, slices, reads)
    return {path: parameter for path, parameter in slices.items() if reads[parameter] == 1}


def _find_slices(
    program: Program, parameters: Mapping[int, int], slices: dict[str, int], reads: Counter[int]
) -> None:
    for equation in program.equations:
        inner: dict[int, int] = {}
        if equation.name in REMAT:
            inner = {
                position: parameters[number]
                for position, number in enumerate(equation.inputs)
                if number in parameters
            }
            body = equation.inside()
            _find_slices(
                body,
                {body.inputs[position]: parameter for position, parameter in inner.items()},
                slices,
                reads,
            )
            continue
        reads.update(parameters[number] for number in equation.inputs if number in parameters)
        if equation.name == "scan":
            first = sum(scan_counts(equation.params))
            slices.update(
                {
                    f"{equation.path}/enter/{k}": parameters[number]
                    for k, number in enumerate(equation.inputs[first:])
                    if number in parameters
                }
            )
    reads.update(parameters[number] for number in program.outputs if number in parameters)


# --------------------------------------------------------------------------------------------------
# Operations that use a parameter, with the correspondence of their dims.
#
# A parameter is followed through casts, transpositions and reshapes, and into the layers of a
# scan, to the matmul, convolution, lookup or slice that uses it. Its gradient is computed there,
# and so can be reduced there (`lowering/weights.py`).

#: An operation that adds a parameter to an activation.
ADDITION = "add"
#: Operations that take a part of a parameter.
SLICES: frozenset[str] = frozenset({"slice", "dynamic_slice"})
_LINEAR: frozenset[str] = frozenset({"dot_general", "conv_general_dilated", "gather", *SLICES})
_SAME_DIMS = frozenset({"convert_element_type", "copy", "copy_p", "reduce_precision"})


def weight_uses(equations: Iterable[LossEquation]) -> Mapping[str, Use]:
    """The matmuls, convolutions, lookups and slices of parameters, and additions of matrices to
    activations that have more dims.

    Returns:
        Path of the equation -> how it uses a parameter; equations with several parameters among
        their operands are left out.
    """
    uses: dict[str, Use] = {}
    # Matrices broadcast to more dims, which may be cast before they are added.
    broadcasts: dict[tuple[int, int], View] = {}
    for entry in equations:
        equation, operands, program = (entry.equation, entry.parameter_operands, id(entry.program))
        if not operands:
            operands = tuple(
                (position, broadcasts[program, number])
                for position, number in enumerate(equation.inputs)
                if (program, number) in broadcasts
            )
            if equation.name == ADDITION and len(operands) == 1:
                uses[equation.path] = Use(
                    equation=equation, position=operands[0][0], view=operands[0][1]
                )
            elif equation.name in _SAME_DIMS and operands:
                broadcasts[program, equation.outputs[0]] = operands[0][1]
        elif equation.name == "broadcast_in_dim" and (view := _with_more_dims(entry)):
            broadcasts[program, equation.outputs[0]] = view
        elif equation.name in _LINEAR and len(operands) == 1:
            uses[equation.path] = Use(
                equation=equation,
                position=operands[0][0],
                view=operands[0][1],
                rows_dtype=_cast(entry.program, equation),
            )
    return uses


def _with_more_dims(entry: LossEquation) -> View | None:
    """The view of a matrix that is broadcast to more dims of size 1; None for anything else."""
    params, view, aval = (entry.equation.params, entry.views[0], entry.equation.eqn.invars[0].aval)
    if view is None or len(entry.views) != 1 or sum(size > 1 for size in aval.shape) < 2:
        return None
    sources = dict(zip(params["broadcast_dimensions"], range(aval.ndim), strict=True))
    if any(
        size != (aval.shape[sources[dim]] if dim in sources else 1)
        for dim, size in enumerate(params["shape"])
    ):
        return None
    dims = range(len(params["shape"]))
    return replace(
        view, dims=tuple(view.dims[sources[dim]] if dim in sources else None for dim in dims)
    )


def view_of_result(
    equation: Equation, operands: list[View | None], program: Program
) -> View | None:
    """The view of a parameter that the result of an equation is, or None.

    Args:
        operands: views of its operands; None for those that are not views.
    """
    if len(operands) != 1 or operands[0] is None:
        return None
    dims = _dims(equation, operands[0].dims, program.avals[equation.inputs[0]].shape)
    return None if dims is None else replace(operands[0], dims=dims)


def _cast(program: Program, equation: Equation) -> Any:
    """The narrower floating dtype to which the result of a lookup or slice is cast, if nothing else
    reads it; otherwise None.
    """
    if equation.name not in ("gather", *SLICES) or equation.outputs[0] in program.outputs:
        return None
    readers = [reader for reader in program.equations if equation.outputs[0] in reader.inputs]
    wide = program.avals[equation.outputs[0]].dtype
    if (
        len(readers) != 1
        or readers[0].name != "convert_element_type"
        or not jnp.issubdtype(wide, jnp.floating)
    ):
        return None
    narrow = readers[0].params["new_dtype"]
    return (
        narrow if jnp.issubdtype(narrow, jnp.floating) and narrow.itemsize < wide.itemsize else None
    )


def _dims(
    equation: Equation, dims: tuple[int | None, ...], shape: tuple[int, ...]
) -> tuple[int | None, ...] | None:
    """The dims of the result of an equation that only rearranges its operand; otherwise None."""
    params: dict[str, Any] = equation.params
    if equation.name in _SAME_DIMS:
        return dims
    if equation.name == "transpose":
        return tuple(dims[i] for i in params["permutation"])
    if equation.name == "squeeze":
        return tuple(dim for i, dim in enumerate(dims) if i not in params["dimensions"])
    if equation.name == "reshape" and params.get("dimensions") is None:
        return _reshaped(dims, shape, tuple(params["new_sizes"]))
    return None


def _reshaped(
    dims: tuple[int | None, ...], before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[int | None, ...]:
    """The dims after a reshape: dims that begin at the same stride, where one size is a multiple of
    the other, share their major part.

    >>> _reshaped((0, 1), (8, 12), (8, 3, 4)), _reshaped((0, 1, 2), (8, 3, 4), (24, 4))
    ((0, 1, None), (0, 2))
    >>> _reshaped((0, 1), (8, 12), (12, 8))
    (None, None)
    """
    starts: dict[int, tuple[int, int | None]] = {}
    outer_size = 1
    for dim, size in zip(dims, before, strict=True):
        if size > 1:
            starts[outer_size] = size, dim
        outer_size *= size
    dims_after: list[int | None] = []
    outer_size = 1
    for size in after:
        before_size, dim = starts.get(outer_size, (0, None))
        dims_after.append(
            dim
            if size > 1 and before_size and (before_size % size == 0 or size % before_size == 0)
            else None
        )
        outer_size *= size
    return tuple(dims_after)


# --------------------------------------------------------------------------------------------------
# Custom calls of a loss, and the layouts of their operands.
#
# A custom call (`shardlib.functions`) is lowered as a whole: a program for many devices replaces
# the equations of its call. This needs the layouts of the operands, and which of them are
# parameters, which enter in their stored sharding.


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """A custom call.

    Attributes:
        avals: abstract values of its operands.
        results: abstract values of its results.
        producers: the source of each result in the call's own equations; None for constants.
        sources: the source of each operand, an equation or an input of the loss; None for
            constants.
        views: for each operand, the parameter that it is, or is a layer of; None for others.
    """

    call: CustomCall
    avals: tuple[Aval, ...]
    results: tuple[Aval, ...]
    producers: tuple[ValueSource | None, ...]
    sources: tuple[ValueSource | None, ...]
    views: tuple[View | None, ...]

    def layout_key(self, operand: int) -> ValueSource:
        """The key of an operand's layout among those of values."""
        return f"{self.call.path}/operand", operand


@dataclass(frozen=True, kw_only=True)
class LossEquation:
    """An equation of a loss.

    Attributes:
        program: the program that contains it: the loss, the body of a loop, or a rematerialised
            function.
        sources: the source of each operand; None if unknown.
        views: for each operand, the parameter that it is, or is a layer of; None for others.
        site: the custom call whose first equation it is, or None.
    """

    program: Program
    equation: Equation
    sources: tuple[ValueSource | None, ...]
    views: tuple[View | None, ...]
    site: CallSite | None

    @property
    def parameter_operands(self) -> tuple[tuple[int, View], ...]:
        """(position, parameter) of the operands that are parameters, or layers of them."""
        return tuple(
            (position, view) for position, view in enumerate(self.views) if view is not None
        )


def loss_equations(program: Program, num_parameters: int) -> Iterator[LossEquation]:
    """The equations of a loss in order, including those in bodies of scans and under
    rematerialisation.
    """
    return _equations(
        program,
        {number: input_source(k) for k, number in enumerate(program.inputs)},
        {
            number: View(parameter=i, dims=tuple(range(len(program.avals[number].shape))))
            for i, number in enumerate(program.inputs[:num_parameters])
        },
    )


def _equations(
    program: Program, sources: Mapping[int, ValueSource], views: Mapping[int, View]
) -> Iterator[LossEquation]:
    sources, views, seen = dict(sources), dict(views), set[str]()
    for equation in program.equations:
        yield LossEquation(
            program=program,
            equation=equation,
            sources=tuple(sources.get(number) for number in equation.inputs),
            views=tuple(views.get(number) for number in equation.inputs),
            site=_call_starting(program, equation, sources, views, seen),
        )
        for index, number in enumerate(equation.outputs):
            producer = result_path(equation, index)
            if producer is not None:
                sources[number] = producer
        view = view_of_result(equation, [views.get(n) for n in equation.inputs], program)
        if view is not None:
            views[equation.outputs[0]] = view
        if equation.name in REMAT:
            body = equation.inside()
            yield from _equations(
                body,
                _inner(body.inputs, equation.inputs, sources),
                _inner(body.inputs, equation.inputs, views),
            )
        elif equation.name == "scan":
            yield from _body_equations(equation, sources, views)


def _call_starting(
    program: Program,
    equation: Equation,
    sources: Mapping[int, ValueSource],
    views: Mapping[int, View],
    seen: set[str],
) -> CallSite | None:
    """The call whose first equation it is, if any; adds the call to `seen`."""
    call = equation.call
    if call is None or call.path in seen:
        return None
    seen.add(call.path)
    return CallSite(
        call=call,
        avals=tuple(program.avals[number] for number in call.inputs),
        results=tuple(program.avals[number] for number in call.outputs),
        producers=_producers(program, call),
        sources=tuple(sources.get(number) for number in call.inputs),
        views=tuple(views.get(number) for number in call.inputs),
    )


def _producers(program: Program, call: CustomCall) -> tuple[ValueSource | None, ...]:
    """The sources of the results of a call."""
    producers = {
        number: result_path(equation, index)
        for equation in program.equations
        if equation.call is not None and equation.call.path == call.path
        for index, number in enumerate(equation.outputs)
    }
    return tuple(producers.get(number) for number in call.outputs)


def _body_equations(
    equation: Equation, sources: Mapping[int, ValueSource], views: Mapping[int, View]
) -> Iterator[LossEquation]:
    constants, carried = scan_counts(equation.params)
    body = equation.inside("body")
    kinds = [
        *((("carry", k)) for k in range(carried)),
        *(("enter", k) for k in range(len(body.inputs) - constants - carried)),
    ]
    inner = _inner(body.inputs[:constants], equation.inputs[:constants], sources)
    inner |= {
        number: (f"{equation.path}/{kind}/{k}", 0)
        for number, (kind, k) in zip(body.inputs[constants:], kinds, strict=True)
    }
    inner_views = _inner(body.inputs[:constants], equation.inputs[:constants], views)
    first = constants + carried
    inner_views |= {
        number: replace(
            view, dims=view.dims[1:], lengths=(*view.lengths, equation.params["length"])
        )
        for number, view in _inner(body.inputs[first:], equation.inputs[first:], views).items()
    }
    yield from _equations(body, inner, inner_views)


def _inner(
    inner: Sequence[int], outer: Sequence[int], by_number: Mapping[int, Any]
) -> dict[int, Any]:
    """A mapping of values as one of the inputs of an inner program.

    Args:
        inner, outer: these inputs, and the operands that they are.
    """
    return {
        number: by_number[operand]
        for number, operand in zip(inner, outer, strict=True)
        if operand in by_number
    }


# --------------------------------------------------------------------------------------------------
# Facts about a traced loss: its parameter uses, custom calls, loops and tables.
#
#     facts = LossFacts(program=flatten(jaxpr), num_parameters=3)
#     facts.uses["4/body/7"]               the use of a parameter by a matmul
#     facts.calls["9"]                     a custom call, such as attention
#     facts.stacked_slices["4/enter/0"]    the stacked parameter that a scan slices layer by layer
#
# Every fact is computed once, at its first use.


@dataclass(frozen=True, kw_only=True, eq=False)
class LossFacts:
    """Facts about a traced loss.

    Attributes:
        program: the loss, flattened.
        num_parameters: number of parameters, which are its first inputs.
    """

    program: Program
    num_parameters: int

    @cached_property
    def equations(self) -> tuple[LossEquation, ...]:
        """Its equations in order, including those of layers and under rematerialisation."""
        return tuple(loss_equations(self.program, self.num_parameters))

    @cached_property
    def uses(self) -> Mapping[str, Use]:
        """The matmuls, convolutions and lookups of parameters, by path."""
        return {
            path: use
            for path, use in self._all_uses.items()
            if use.equation.name not in (*SLICES, ADDITION)
        }

    @cached_property
    def slice_uses(self) -> Mapping[str, Use]:
        """The slices of parameters, by path."""
        return {path: use for path, use in self._all_uses.items() if use.equation.name in SLICES}

    @cached_property
    def additions(self) -> Mapping[str, Use]:
        """The additions of matrices to activations with more dims, by path."""
        uses = self._all_uses.items()
        return {path: use for path, use in uses if use.equation.name == ADDITION}

    @cached_property
    def _all_uses(self) -> Mapping[str, Use]:
        return weight_uses(self.equations)

    @cached_property
    def calls(self) -> Mapping[str, CallSite]:
        """The custom calls, by path; including those in bodies of scans and under
        rematerialisation, but not in other loops and branches.
        """
        return {entry.site.call.path: entry.site for entry in self.equations if entry.site}

    @cached_property
    def stacked_slices(self) -> Mapping[str, int]:
        """Path of a slice of a scan -> the stacked parameter that it is one layer of."""
        return stacked_parameters(self.program, self.num_parameters)

    @cached_property
    def lookup_tables(self) -> frozenset[int]:
        """The parameters that only lookups or slices of rows read. Their gathered form is not
        needed for the backward pass.

        A slice of sharded rows makes XLA's partitioner permute rows between devices, with pairs of
        devices that GPUs reject (JAX 0.10.2).
        """
        tables: set[int] = set()
        others: set[int] = set(self.program.outputs)
        for equation in self.program.equations:
            lookup = equation.name == "gather" or _takes_rows(self.program, equation)
            tables.update(equation.inputs[:1] if lookup else ())
            others.update(equation.inputs[1:] if lookup else equation.inputs)
        inputs = self.program.inputs[: self.num_parameters]
        return frozenset(i for i, number in enumerate(inputs) if number in tables - others)

    @cached_property
    def kernel_shapes(self) -> frozenset[tuple[int, ...]]:
        """Shapes of the kernels of convolutions."""
        return kernel_shapes(equation.eqn for equation in self.program.equations)

    @cached_property
    def narrow_dtypes(self) -> Mapping[int, np.dtype]:
        """The parameters that are only read in a narrower dtype -> that dtype."""
        return narrow_dtypes(self.program, self.num_parameters)

    @cached_property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """Traced dtype of each parameter."""
        inputs = self.program.inputs[: self.num_parameters]
        return tuple(self.program.avals[number].dtype for number in inputs)

    @cached_property
    def call_sources(self) -> dict[ValueSource, ValueSource]:
        """Keys of the layouts of operands of custom calls, and of results of
        attention -> their sources.

        Results of attention are sharded by heads; operations that read them, and save them for the
        backward pass, have them in the plan's layout.
        """
        operands = {
            site.layout_key(k): source
            for site in self.calls.values()
            for k, source in enumerate(site.sources)
            if source is not None
        }
        results = {
            producer: producer
            for site in self.calls.values()
            for producer in site.producers
            if producer is not None and isinstance(site.call.form, Attention)
        }
        return operands | results

    @cached_property
    def operand_sources(self) -> Mapping[ValueSource, ValueSource]:
        """`call_sources`, with the operands of functions with custom derivatives that contain
        matmuls. Such a function runs as a whole, without layouts inside, so it gets its operands in
        the plan's compute shardings.
        """
        return self.call_sources | {
            (f"{entry.equation.path}/operand", k): source
            for entry in self.equations
            if entry.equation.name in CUSTOM and has_matmul(entry.equation.eqn)
            for k, source in enumerate(entry.sources)
            if source is not None
        }


# --------------------------------------------------------------------------------------------------
# The loss as a jaxpr, over the leaves of (params, state, batch).


@dataclass(frozen=True, kw_only=True)
class LossJaxpr:
    """A loss as a jaxpr.

    Attributes:
        closed_jaxpr: over the leaves of (params, state, batch).
        out_tree: structure of (loss, (metrics, state)).
    """

    closed_jaxpr: jex.ClosedJaxpr
    out_tree: jax.tree_util.PyTreeDef

    @cached_property
    def program(self) -> Program:
        """The loss, flattened."""
        return flatten(self.closed_jaxpr)

    def facts(self, num_parameters: int) -> LossFacts:
        """Facts about the loss, whose first inputs are the parameters; computed once."""
        return self._facts.setdefault(
            num_parameters, LossFacts(program=self.program, num_parameters=num_parameters)
        )

    @cached_property
    def _facts(self) -> dict[int, LossFacts]:
        return {}


def trace_loss(
    loss: PureLoss, params: Tree, state: Tree, batch: Tree, *, what: str = "one microbatch,"
) -> LossJaxpr:
    """Traces a loss, without its own layouts."""

    def traced(loss: PureLoss) -> tuple[jex.ClosedJaxpr, Tree]:
        with no_mesh():
            return jax.make_jaxpr(loss, return_shape=True)(params, state, batch)

    def without_layouts() -> tuple[jex.ClosedJaxpr, Tree]:
        return traced(layout_free(loss, NO_MESH))

    try:
        try:
            closed_jaxpr, shapes = traced(loss)
            if brings_layouts(closed_jaxpr):
                closed_jaxpr, shapes = without_layouts()
        except ShardlibError:
            raise
        except Exception:  # mesh axes without a mesh in context
            closed_jaxpr, shapes = without_layouts()
    except ShardlibError:
        raise
    except Exception as error:
        arrays = ", ".join(
            f"{batch_path(path)} {leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        )
        raise TracingError(
            f"the loss does not trace for {what} {arrays}: {type(error).__name__}: {error}"
        ) from error
    return LossJaxpr(closed_jaxpr=closed_jaxpr, out_tree=jax.tree.structure(shapes))


def same_program(first: LossJaxpr, second: LossJaxpr) -> bool:
    """True if two traces have the same equations at the same paths, whatever their shapes."""
    return [(e.path, e.name) for e in first.program.equations] == [
        (e.path, e.name) for e in second.program.equations
    ]
