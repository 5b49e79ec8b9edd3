"""The traced loss and its gradient: the only entry from JAX to the planner.

`trace` calls the user's loss once on abstract arrays. The resulting jaxpr is the program that will
run (`Traced.rewrite` evaluates it again, with constraints placed and layers rematerialised); its
graph, and the graphs of value-and-gradient under each remat policy, are the planning problem.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.extend import core as jex

from shardlib import _jax_compat
from shardlib._jax_compat import open_jaxpr, scan_counts
from shardlib.annotation.names import Model, PureLoss
from shardlib.annotation.trees import Tree, origins, path_parts, path_text
from shardlib.errors import (
    AnnotationError,
    ArgumentError,
    BatchError,
    ModelError,
    ShardlibError,
    TracingError,
    raise_all,
)
from shardlib.findings import Finding
from shardlib.functions.attention import Attention
from shardlib.functions.experts import Wanted, found_axes, mapped_finding, whole_batch
from shardlib.graph import (
    KINDS,
    STATE,
    AttentionCalls,
    Dependence,
    FactorRule,
    Graph,
    InputDim,
    MatrixUpdate,
    Op,
    Parameter,
    Problem,
    Region,
    Rows,
    StepGraph,
    Value,
    check,
    elementwise,
    opaque,
    prune,
)
from shardlib.jax_types import Aval, Function, Index, Jaxpr, KeyPath, Leaf
from shardlib.layout import LogicalAxes
from shardlib.propagation.colours import with_fused_dims
from shardlib.tracing.folding import Folded, fold
from shardlib.tracing.layouts import UserLayout
from shardlib.tracing.primitives import TABLE
from shardlib.tracing.program import (
    CUSTOM,
    REMAT,
    CustomCall,
    Equation,
    Program,
    dtype_name,
    flatten,
    forms_of,
    has_matmul,
    literal,
    stacking,
    with_frozen,
)
from shardlib.tracing.rewriting import ValueCallback, Walk, check_policy, evaluate_program
from shardlib.tracing.rows import LossInputs, ResultNames, prove, prove_parts
from shardlib.tracing.rules import Description, RuleInput
from shardlib.tracing.updates import Span, multiplies, same_as_unit, spans
from shardlib.untrusted.data import fit

# --------------------------------------------------------------------------------------------------
# Conversion of a jaxpr to a `Graph`.
#
# Every equation is described by its factor rule; loops and branches become regions with boundary
# ops. All boundary ops of a loop belong to the region of its body; constants of a loop are read
# directly, without an op. The "carry" at the exit of a while loop also reads the loop's condition,
# and the "carry" that joins branches reads the branch index, so that both stay live.

#: A custom call, and the graph values of its operands.
CallOperands = tuple[CustomCall, tuple[int, ...]]


#: A layout written in a program, and the graph value that has it.
LayoutOfValue = tuple[UserLayout, int]


@dataclass(frozen=True, kw_only=True)
class Translated:
    """A program as a graph.

    Attributes:
        calls: the custom calls by path, loops and branches included, with the values of their
            operands.
        values: number of a value of the program, outside of loops and branches -> value of the
            graph.
        layouts: layouts written in the program, with the values that have them.
    """

    graph: Graph
    calls: Mapping[str, CallOperands]
    values: Mapping[int, int]
    layouts: tuple[LayoutOfValue, ...] = ()


def graph_from_jaxpr(closed_jaxpr: jex.ClosedJaxpr, inputs: Sequence[tuple[str, str]]) -> Graph:
    """The graph of a closed jaxpr."""
    return graph_from_program(flatten(closed_jaxpr), inputs)


def graph_from_program(program: Program, inputs: Sequence[tuple[str, str]]) -> Graph:
    """The graph of a program."""
    return translated(program, inputs).graph


def translated(program: Program, inputs: Sequence[tuple[str, str]]) -> Translated:
    """The graph of a program, with its custom calls."""
    builder = _Builder()
    arguments = [
        builder.value(program.avals[number], path=path, role=role)
        for number, (path, role) in zip(program.inputs, inputs, strict=True)
    ]
    outputs = builder.run(program, arguments, 0, builder.numbers)
    graph = Graph(
        values=tuple(builder.values),
        ops=tuple(builder.ops),
        regions=tuple(builder.regions),
        inputs=tuple(arguments),
        outputs=tuple(outputs),
        findings=tuple(builder.findings.values()),
    )
    check(graph)
    return Translated(
        graph=graph, calls=builder.calls, values=builder.numbers, layouts=tuple(builder.layouts)
    )


class _Builder:
    """Collects the parts of one graph."""

    def __init__(self) -> None:
        self.calls: dict[str, CallOperands] = {}
        self.numbers: dict[int, int] = {}
        self.layouts: list[LayoutOfValue] = []
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.regions: list[Region] = [Region(parent=-1, kind="root")]
        self.findings: dict[tuple[str, str, str], Finding] = {}

    def value(self, aval: Aval, path: str = "", role: str = "internal") -> int:
        """Adds a value to the graph."""
        self.values.append(
            Value(
                shape=tuple(getattr(aval, "shape", ())),
                dtype=dtype_name(aval),
                path=path,
                role=role,
            )
        )
        return len(self.values) - 1

    def shapes(self, values: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(self.values[value].shape for value in values)

    def region(self, parent: int, kind: str, trips: int) -> int:
        """Adds a region."""
        self.regions.append(Region(parent=parent, kind=kind, trips=trips))
        return len(self.regions) - 1

    def warn(self, code: str, severity: str, message: str, location: str, hint: str = "") -> None:
        """Adds a finding, unless the same finding exists for the same place."""
        finding = Finding(code=code, severity=severity, message=message, where=location, hint=hint)
        self.findings.setdefault((code, message, location), finding)

    def trips(self, equation: Equation, first: int) -> int:
        """The trip count of a while loop; 1 with a finding if it is unknown."""
        count = counted_trips(equation, first)
        if count is None:
            self.warn(
                "unknown-trip-count",
                "warning",
                "a while loop runs an unknown number of times; its cost is counted once",
                equation.scope or f"equation {equation.path}",
                "use jax.lax.scan or jax.lax.fori_loop with constant bounds",
            )
        return 1 if count is None else count

    def cost(self, region: int, above: int) -> float:
        """FLOPs of a region and everything inside it, per run of the region `above`."""
        total = 0.0
        for op in self.ops:
            trips, ancestor = 1.0, op.region
            while ancestor not in (above, -1) and ancestor != region:
                trips *= self.regions[ancestor].trips
                ancestor = self.regions[ancestor].parent
            total += op.flops * trips if ancestor == region else 0.0
        return total

    def run(
        self,
        program: Program,
        arguments: Sequence[int],
        region: int,
        numbers: dict[int, int] | None = None,
    ) -> list[int]:
        """Adds the ops of a program; returns its results."""
        numbers = {} if numbers is None else numbers
        numbers.update(zip(program.inputs, arguments, strict=True))
        for number in program.constants:
            numbers[number] = self.value(
                program.avals[number], path=literal(program.constants[number]), role="constant"
            )
        for equation in program.equations:
            operands = tuple(numbers[number] for number in equation.inputs)
            call = equation.call
            if call is not None and call.path not in self.calls:
                self.calls[call.path] = call, tuple(map(numbers.__getitem__, call.inputs))
            outputs = self.equation(program, equation, operands, region)
            numbers.update(zip(equation.outputs, outputs, strict=True))
        self.layouts += [(layout, numbers[number]) for layout, number in program.layouts]
        return [numbers[number] for number in program.outputs]

    def equation(
        self, program: Program, equation: Equation, operands: tuple[int, ...], region: int
    ) -> Sequence[int]:
        if equation.name == "scan":
            return self.scan(equation, operands, region)
        if equation.name == "while":
            return self.loop(equation, operands, region)
        if equation.name == "cond":
            return self.branches(equation, operands, region)
        if equation.name in (*REMAT, *CUSTOM):
            return self.run(equation.inside(), operands, region)
        results = tuple(self.value(program.avals[number]) for number in equation.outputs)
        described = self.describe(
            equation,
            RuleInput(
                name=equation.name,
                operands=self.shapes(operands),
                results=self.shapes(results),
                params=equation.params,
            ),
        )
        self.ops.append(
            Op(
                kind=equation.name,
                operands=operands,
                results=results,
                rule=described.rule,
                category=described.category,
                flops=described.flops,
                region=region,
                path=equation.path,
                scope=equation.scope,
            )
        )
        return results

    def describe(self, equation: Equation, call: RuleInput) -> Description:
        primitive = TABLE.get(call.name)
        entry = None if primitive is None else primitive.factors
        if entry is None:
            self.warn(
                "opaque-primitive",
                "warning",
                f"nothing is known about the dims of {call.name!r}; its operands are gathered"
                " whole",
                equation.scope or f"equation {equation.path}",
                "write the computation with other jax.lax operations",
            )
            return Description(opaque(call.operands, call.results), "opaque")
        return entry(call)

    def boundary(
        self,
        kind: str,
        path: str,
        operands: tuple[int, ...],
        result: int,
        rule: FactorRule,
        region: int,
        scope: str,
    ) -> int:
        self.ops.append(
            Op(
                kind=kind,
                operands=operands,
                results=(result,),
                rule=rule,
                category="boundary",
                region=region,
                path=path,
                scope=scope,
            )
        )
        return result

    def carry(
        self, path: str, operands: tuple[int, ...], aval: Aval, region: int, scope: str
    ) -> int:
        """Adds a boundary op: its operands of the result's shape are one value at different times,
        the others are only read.
        """
        result = self.value(aval)
        shape = self.values[result].shape
        rule = elementwise(
            [shape if self.values[value].shape == shape else () for value in operands], shape
        )
        dims = tuple(
            (
                ((),) * len(self.values[value].shape)
                if self.values[value].shape != shape
                else described
            )
            for value, described in zip(operands, rule.operands, strict=True)
        )
        return self.boundary(
            "carry",
            path,
            operands,
            result,
            FactorRule(sizes=rule.sizes, operands=dims, results=rule.results),
            region,
            scope,
        )

    def scan(self, equation: Equation, operands: tuple[int, ...], region: int) -> list[int]:
        constants, carried = scan_counts(equation.params)
        path, scope = equation.path, equation.scope
        program = equation.inside("body")
        body = self.region(region, "scan", int(equation.params["length"]))
        avals = [program.avals[number] for number in program.inputs]
        arguments = list(operands[:constants])
        for k, (init, aval) in enumerate(
            zip(operands[constants : constants + carried], avals[constants:], strict=False)
        ):
            arguments.append(self.carry(f"{path}/carry/{k}", (init,), aval, body, scope))
        for k, (stack, aval) in enumerate(
            zip(operands[constants + carried :], avals[constants + carried :], strict=True)
        ):
            item = self.value(aval)
            stacked_dims, part = stacking(self.values[stack].shape)
            rule = FactorRule(
                sizes=self.values[stack].shape,
                operands=(stacked_dims,),
                results=(part,),
                whole=frozenset({0}),
            )
            arguments.append(
                self.boundary("enter", f"{path}/enter/{k}", (stack,), item, rule, body, scope)
            )
        outputs = self.run(program, arguments, body)
        results = [
            self.carry(
                f"{path}/final/{k}",
                (arguments[constants + k], outputs[k]),
                equation.eqn.outvars[k].aval,
                body,
                scope,
            )
            for k in range(carried)
        ]
        for k, output in enumerate(outputs[carried:]):
            stack = self.value(equation.eqn.outvars[carried + k].aval)
            stacked_dims, part = stacking(self.values[stack].shape)
            rule = FactorRule(
                sizes=self.values[stack].shape,
                operands=(part,),
                results=(stacked_dims,),
                whole=frozenset({0}),
            )
            results.append(
                self.boundary("exit", f"{path}/exit/{k}", (output,), stack, rule, body, scope)
            )
        return results

    def loop(self, equation: Equation, operands: tuple[int, ...], region: int) -> list[int]:
        params, path, scope = equation.params, equation.path, equation.scope
        tests, constants = params["cond_nconsts"], params["body_nconsts"]
        initial = operands[tests + constants :]
        inner = self.region(region, "while", self.trips(equation, tests + constants))
        test = equation.inside("cond")
        program = equation.inside("body")
        avals = [program.avals[number] for number in program.inputs[constants:]]
        state = [
            self.carry(f"{path}/carry/{k}", (init,), aval, inner, scope)
            for k, (init, aval) in enumerate(zip(initial, avals, strict=True))
        ]
        (continues,) = self.run(test, [*operands[:tests], *state], inner)
        outputs = self.run(program, [*operands[tests : tests + constants], *state], inner)
        return [
            self.carry(f"{path}/final/{k}", (before, after, continues), aval, inner, scope)
            for k, (before, after, aval) in enumerate(zip(state, outputs, avals, strict=True))
        ]

    def branches(self, equation: Equation, operands: tuple[int, ...], region: int) -> list[int]:
        index, *arguments = operands
        path, scope = equation.path, equation.scope
        outputs: list[list[int]] = []
        regions: list[int] = []
        for branch in equation.programs:
            regions.append(self.region(region, "branch", 1))
            outputs.append(self.run(branch, arguments, regions[-1]))
        costs = [self.cost(inner, region) for inner in regions]
        for inner in regions:
            if inner != regions[costs.index(max(costs))]:
                self.regions[inner] = Region(parent=region, kind="branch", trips=0)
        return [
            self.carry(f"{path}/join/{k}", (*values, index), var.aval, region, scope)
            for k, (var, *values) in enumerate(zip(equation.eqn.outvars, *outputs, strict=True))
        ]


def counted_trips(equation: Equation, first: int) -> int | None:
    """Trip count of a while loop that counts an integer from one literal to another by ones; None
    for any other loop.
    """
    condition, _ = open_jaxpr(equation.params["cond_jaxpr"])
    body, _ = open_jaxpr(equation.params["body_jaxpr"])
    tests, constants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    if (
        len(condition.eqns) != 1
        or condition.eqns[0].primitive.name != "lt"
        or condition.outvars[0] is not condition.eqns[0].outvars[0]
    ):
        return None
    starts = {var: equation.eqn.invars[first + k] for k, var in enumerate(condition.invars[tests:])}
    starts.update({var: equation.eqn.invars[k] for k, var in enumerate(condition.invars[:tests])})
    bounds = [
        getattr(starts.get(atom, atom), "val", None) if not hasattr(atom, "val") else atom.val
        for atom in condition.eqns[0].invars
    ]
    counter = next(
        (k for k, var in enumerate(condition.invars[tests:]) if var is condition.eqns[0].invars[0]),
        None,
    )
    limit = next(
        (k for k, var in enumerate(condition.invars[tests:]) if var is condition.eqns[0].invars[1]),
        None,
    )
    begin, end = bounds
    if counter is None or begin is None or end is None:
        return None
    steps = [
        e for e in body.eqns if e.outvars[0] is body.outvars[counter] and e.primitive.name == "add"
    ]
    by_ones = any(
        e.invars[0] is body.invars[constants + counter] and getattr(e.invars[1], "val", None) == 1
        for e in steps
    )
    fixed = limit is None or body.outvars[limit] is body.invars[constants + limit]
    return max(0, int(end) - int(begin)) if by_ones and fixed else None


# --------------------------------------------------------------------------------------------------
# Names of the dims of a batch, and its number of tokens.

#: Kinds of NumPy dtypes that are not numbers: strings, objects, dates.
NON_NUMERIC = "SUOMm"
#: (path, shape, dtype name, logical axes) of one batch array, as `Problem.batch` has it.
BatchArray = tuple[str, tuple[int, ...], str, LogicalAxes]
#: Arrays must have fewer elements: counts are 63-bit integers, here and in XLA.
MAX_ELEMENTS = 1 << 63
#: Maximum number of arrays that a message lists.
MAX_LISTED = 4


def describe_batch(batch: Tree, batch_axes: Tree = None) -> tuple[BatchArray, ...]:
    """Names the dims of every array of a batch.

    Args:
        batch_axes: pytree of the same structure, a tuple of names (or None) per array; None for
            names by convention.
    """
    leaves = _arrays(
        [
            (".".join(filter(None, ("batch", path_text(path)))), leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        ]
    )
    check_counts((path, tuple(leaf.shape)) for path, leaf in leaves)
    axes = (
        _by_convention(batch, leaves)
        if batch_axes is None
        else _as_named(batch, batch_axes, leaves)
    )
    return tuple(
        (path, tuple(leaf.shape), leaf.dtype.name, names)
        for (path, leaf), names in zip(leaves, axes, strict=True)
    )


def check_counts(arrays: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raises an error for arrays, by path and shape, with too many elements to count."""
    failures = [
        *dict.fromkeys(
            f"{path}: shape {fit(str(shape), 200)}"
            for path, shape in arrays
            if math.prod(shape) >= MAX_ELEMENTS
        )
    ]
    if failures:
        more = [f"and {len(failures) - MAX_LISTED} more"] if len(failures) > MAX_LISTED else []
        raise_all(
            BatchError,
            "arrays have 2^63 elements or more, which nothing can count",
            [*failures[:MAX_LISTED], *more],
            hint="a smaller batch or sequence",
        )


def _arrays(leaves: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The leaves of a batch, with numbers as arrays."""
    arrays: list[tuple[str, Any]] = []
    failures: list[str] = []
    for path, leaf in leaves:
        try:
            array = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        except (TypeError, ValueError):
            failures.append(f"{path} is a {type(leaf).__name__}")
            continue
        if getattr(array.dtype, "kind", "") in NON_NUMERIC and not jax.dtypes.issubdtype(
            array.dtype, jax.dtypes.prng_key
        ):
            failures.append(f"{path} is an array of {array.dtype}")
        arrays.append((path, array))
    if failures:
        raise_all(
            BatchError,
            "the batch holds what is not an array of numbers or random keys",
            failures,
            hint="leave it out of the batch; tokens are integers",
        )
    return arrays


def require_rows(described: tuple[BatchArray, ...]) -> None:
    """Raises an error for a batch without rows."""
    empty = [
        f"{path}: shape {shape}"
        for path, shape, _, axes in described
        if any(size == 0 and name == "batch" for size, name in zip(shape, axes, strict=True))
    ]
    if empty:
        raise_all(BatchError, "the batch has no rows", empty, hint="a batch of at least one row")


def _by_convention(batch: Tree, leaves: list[tuple[str, Any]]) -> list[LogicalAxes]:
    rows = {leaf.shape[0] for _, leaf in leaves if leaf.shape and not _is_key(leaf)}
    sizes = rows or {leaf.shape[0] for _, leaf in leaves if leaf.shape}
    if len(sizes) > 1:
        raise_all(
            BatchError,
            'the leading dims of the batch differ in size, so they cannot all be "batch"',
            [f"{path}: shape {tuple(leaf.shape)}" for path, leaf in leaves],
            hint=_which_rows(batch, [leaf for _, leaf in leaves]),
        )
    return [
        (
            (None,) * len(leaf.shape)
            if _is_key(leaf) and leaf.shape[:1] != (*sizes,)
            else _conventional(leaf)
        )
        for _, leaf in leaves
    ]


def _which_rows(batch: Tree, leaves: list[Any]) -> str:
    """Suggestion for naming the row dims of a batch; takes the commonest leading size as that of
    rows.
    """
    sizes = Counter(leaf.shape[0] for leaf in leaves if leaf.shape and not _is_raw_key(leaf))
    common_size = sizes.most_common(1)[0][0] if sizes else 0
    names = [
        ("batch" if leaf.shape[:1] == (common_size,) else None, *(None,) * len(leaf.shape[1:]))
        if leaf.shape
        else ()
        for leaf in leaves
    ]
    axes = jax.tree.unflatten(jax.tree.structure(batch), names)
    advice = f"name the dims, for example batch_axes={fit(_spelled(axes), 600)}"
    if any(map(_is_raw_key, leaves)):
        return f"{advice}; a jax.random.PRNGKey belongs to no row, and jax.random.key needs no name"
    return f"{advice}, where the {common_size} are the rows"


def _spelled(axes: Tree) -> str:
    """Logical names in the form in which the user writes them, with the fields of the batch's own
    types.
    """
    if isinstance(axes, Mapping):
        return f"{{{', '.join(f'{key!r}: {_spelled(entry)}' for key, entry in axes.items())}}}"
    fields = getattr(axes, "_fields", ())
    if not fields and dataclasses.is_dataclass(axes):
        fields = tuple(field.name for field in dataclasses.fields(axes))
    if fields:
        parts = ", ".join(f"{name}={_spelled(getattr(axes, name))}" for name in fields)
        return f"{type(axes).__name__}({parts})"
    if isinstance(axes, list):
        return f"[{', '.join(map(_spelled, axes))}]"
    return repr(axes)


def _is_raw_key(leaf: Any) -> bool:
    """True if an array may be the integers of one random key."""
    return leaf.dtype == jnp.uint32 and leaf.shape in ((2,), (4,))


def _is_key(leaf: Any) -> bool:
    """True for an array of typed random keys: as many keys as rows are one per row, others belong
    to the whole batch.
    """
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _conventional(leaf: Any) -> LogicalAxes:
    second = "seq" if len(leaf.shape) == 2 and jnp.issubdtype(leaf.dtype, jnp.integer) else None
    return ("batch", second, *(None,) * len(leaf.shape))[: len(leaf.shape)]


def _as_named(batch: Tree, batch_axes: Tree, leaves: list[tuple[str, Any]]) -> list[LogicalAxes]:
    structure = jax.tree.structure(batch)
    try:
        names_by_leaf = structure.flatten_up_to(batch_axes)
    except ValueError as error:
        raise BatchError(
            f"batch_axes has another structure than the batch, {structure}: {error}\n"
            "Try: one tuple of names per array, in the same dicts and lists as the batch"
        ) from error
    failures: list[str] = []
    for (path, leaf), names in zip(leaves, names_by_leaf, strict=True):
        if names is not None and (isinstance(names, str) or not isinstance(names, (tuple, list))):
            failures.append(f"{path}: {names!r} is not a tuple of names")
        elif names is not None and len(names) != len(leaf.shape):
            failures.append(
                f"{path}: {len(names)} names {tuple(names)} for shape {tuple(leaf.shape)}"
            )
        elif names is not None and not all(name is None or isinstance(name, str) for name in names):
            failures.append(f"{path}: {tuple(names)} holds something that is not a name")
        elif names is not None and (
            twice := sorted(
                {name for name in names if name is not None and list(names).count(name) > 1}
            )
        ):
            failures.append(
                f"{path}: {', '.join(map(repr, twice))} names two dims of {tuple(names)}"
            )
    if failures:
        raise_all(
            BatchError,
            "batch_axes does not fit the batch",
            failures,
            hint="give one name, or None, per dim",
        )
    return [
        (None,) * len(leaf.shape) if names is None else tuple(names)
        for (_, leaf), names in zip(leaves, names_by_leaf, strict=True)
    ]


def tokens_of(batch: tuple[BatchArray, ...]) -> int:
    """Tokens of a batch: elements of the first integer array of rank 2, else the leading size of
    the first array.
    """
    for _, shape, dtype, _ in batch:
        if len(shape) == 2 and dtype.startswith(("int", "uint")):
            return shape[0] * shape[1]
    return next((shape[0] for _, shape, _, _ in batch if shape), 1)


# --------------------------------------------------------------------------------------------------
# The parameters of a traced model: their axes, and the optimizer state that belongs to each.


def described_parameters(
    model: Model, optimizer: optax.GradientTransformation | None
) -> tuple[Parameter, ...]:
    """The parameters of a model for the planner in tree order, then the model state that a step
    updates.

    Args:
        optimizer: optax transformation, whose state is counted for each parameter.
    """
    leaves = [(path or "params", leaf) for path, leaf in with_paths(abstract(model.params), "")]
    roles = ["trained" if trained else "frozen" for trained in model.partition.flags]
    extra, arrays = _state_bytes(
        model,
        optimizer,
        [leaf for leaf, role in zip(leaves, roles, strict=True) if role == "trained"],
    )
    updated = [
        (path, leaf) for path, leaf in with_paths(abstract(model.state), STATE) if trainable(leaf)
    ]
    named_axes = {
        **model.axes,
        **{f"{STATE}.{path}": axes for path, axes in model.state_axes.items()},
    }
    failures: list[str] = []
    parameters: list[Parameter] = []
    for (path, leaf), role in zip(
        [*leaves, *updated], [*roles, *["updated"] * len(updated)], strict=True
    ):
        axes: LogicalAxes = tuple(named_axes.get(path, (None,) * len(leaf.shape)))
        if len(axes) != len(leaf.shape):
            failures.append(f"{path}: {len(axes)} names {axes} for shape {tuple(leaf.shape)}")
            continue
        parameters.append(
            Parameter(
                path=path,
                shape=tuple(leaf.shape),
                dtype=dtype_name(leaf),
                axes=axes,
                state_bytes_per_element=extra.get(path, 0) / max(1, math.prod(leaf.shape)),
                state_arrays=arrays[path],
                role=role,
            )
        )
    if failures:
        raise_all(
            AnnotationError,
            "logical axes do not fit the parameters",
            failures,
            hint="give one name, or None, per dim",
        )
    return tuple(parameters)


def _state_bytes(
    model: Model,
    optimizer: optax.GradientTransformation | None,
    leaves: Sequence[tuple[str, jax.ShapeDtypeStruct]],
) -> tuple[Counter[str], Counter[str]]:
    """Bytes and number of arrays of optimizer state of a parameter's shape, per parameter: state
    leaves whose path ends with the parameter's.
    """
    total: Counter[str] = Counter()
    arrays: Counter[str] = Counter()
    if optimizer is None:
        return total, arrays
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves}
    for path, leaf in with_paths(
        jax.eval_shape(optimizer.init, model.partition.trained(abstract(model.params))), ""
    ):
        parts = path.split(".")
        owner = next(
            (
                tail
                for i in range(len(parts))
                if shapes.get(tail := ".".join(parts[i:])) == tuple(leaf.shape)
            ),
            None,
        )
        if owner is not None:
            total[owner] += math.prod(leaf.shape) * leaf.dtype.itemsize
            arrays[owner] += 1
    return total, arrays


# --------------------------------------------------------------------------------------------------
# The optimizer's update as a program, and the matrix updates in it (`shardlib.tracing.updates`).


@dataclass(frozen=True, kw_only=True)
class TracedUpdate:
    """An optimizer's update.

    Attributes:
        program: (gradients, state, parameters, loss) -> (updates, state).
        out_tree: structure of its results.
        spans: its matrix updates, each with that of one matrix.
        unit: the update of one matrix per parameter: traced with stacks of length 1.
        coupled: parameters whose products depend on those of others.
        findings: findings of tracing.
    """

    program: Program
    out_tree: jax.tree_util.PyTreeDef
    spans: tuple[tuple[Span, Span], ...]
    unit: Program
    coupled: tuple[str, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def facts(self) -> tuple[MatrixUpdate, ...]:
        """The matrix updates for the planner."""
        return tuple(replace(span.facts, alike=unit.digest(self.unit)) for span, unit in self.spans)


def trace_update(optimizer: optax.GradientTransformation, params: Tree) -> TracedUpdate:
    """Traces the update of an optimizer.

    Args:
        params: the trained parameters, arrays or abstract.
    """
    params = abstract(params)
    program, out_tree, graph, owners = _traced_update(optimizer, params)
    shapes = {path: tuple(leaf.shape) for path, leaf in with_paths(params, "")}
    listed, coupled = spans(program, graph.graph, graph.values, owners, shapes)
    stacks = {span.path: span.facts.stack for span in listed}

    def unit(path: KeyPath, leaf: Any) -> Any:
        stack = stacks.get(path_text(path), ())
        shape = tuple(1 if dim in stack else size for dim, size in enumerate(leaf.shape))
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    if not any(stacks.values()):
        unit_program, units = program, listed
    else:
        unit_params = jax.tree_util.tree_map_with_path(unit, params)
        unit_program, _, unit_graph, owners = _traced_update(optimizer, unit_params)
        unit_shapes = {path: tuple(leaf.shape) for path, leaf in with_paths(unit_params, "")}
        units, _ = spans(unit_program, unit_graph.graph, unit_graph.values, owners, unit_shapes)
    pairs, others = same_as_unit(listed, units)
    return TracedUpdate(
        program=program,
        out_tree=out_tree,
        spans=tuple(pairs),
        unit=unit_program,
        coupled=(*coupled, *others),
        findings=graph.graph.findings,
    )


def trace_matrix_updates(
    optimizer: optax.GradientTransformation, params: Tree
) -> TracedUpdate | None:
    """`trace_update` of an optimizer that multiplies matrices; None for any other."""
    if not multiplies(_update_jaxpr(optimizer, abstract(params))[0].jaxpr):
        return None
    return trace_update(optimizer, params)


def _update_jaxpr(
    optimizer: optax.GradientTransformation, params: Tree
) -> tuple[jex.ClosedJaxpr, Tree, Tree]:
    """(gradients, state, parameters, loss) -> (updates, state) of an optimizer, its abstract
    arguments and results.
    """
    update = optax.with_extra_args_support(optimizer).update
    state = abstract(jax.eval_shape(optimizer.init, params))
    arguments = (params, state, params, jax.ShapeDtypeStruct((), jnp.float32))
    closed, out = jax.make_jaxpr(
        lambda gradients, state, params, loss: update(gradients, state, params, value=loss),
        return_shape=True,
    )(*arguments)
    return closed, arguments, out


def _traced_update(
    optimizer: optax.GradientTransformation, params: Tree
) -> tuple[Program, jax.tree_util.PyTreeDef, Translated, list[str | None]]:
    """The update as a program and as a graph, the structure of its results, and the parameter that
    each input belongs to.
    """
    closed, arguments, out = _update_jaxpr(optimizer, params)
    paths = {path for path, _ in with_paths(params, "")}
    inputs = [path for path, _ in with_paths(arguments, "")]
    program = flatten(closed)
    graph = translated(program, [(path, "state") for path in inputs])
    return program, jax.tree.structure(out), graph, [_owner(path, paths) for path in inputs]


def matrix_updates(
    model: Model, optimizer: optax.GradientTransformation | None
) -> tuple[tuple[MatrixUpdate, ...], tuple[Finding, ...]]:
    """The parameters whose matrices the optimizer multiplies, and findings about its update."""
    if optimizer is None:
        return (), ()
    try:
        traced = trace_matrix_updates(optimizer, model.partition.trained(model.params))
    except Exception as error:  # whatever the user's update raises without numbers
        return (), (
            Finding(
                code="optimizer-untraced",
                severity="warning",
                where="optimizer",
                message=(
                    "the optimizer's update cannot be traced with abstract gradients"
                    f" ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    "): it is priced by the bytes of its state"
                ),
                hint="an update whose shapes and branches do not depend on numbers",
            ),
        )
    if traced is None:
        return (), ()
    findings = tuple(
        replace(finding, where=f"optimizer, {finding.where}")
        for finding in traced.findings
        if finding.code == "unknown-trip-count" and traced.spans
    )
    if traced.coupled:
        findings += (
            Finding(
                code="optimizer-coupled",
                severity="info",
                where="optimizer",
                message=(
                    "the optimizer's products of some parameters depend on each other or on how"
                    f" many matrices there are: {', '.join(traced.coupled[:8])}; they are not"
                    " priced, and the partitioner decides their layout"
                ),
                hint="an update of each parameter by itself",
            ),
        )
    return traced.facts, findings


def _owner(path: str, paths: Collection[str]) -> str | None:
    """The parameter whose path the path of an input ends with."""
    parts = path.split(".")
    return next((tail for i in range(len(parts)) if (tail := ".".join(parts[i:])) in paths), None)


def trainable(leaf: Leaf) -> bool:
    """True if a leaf can have a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def with_paths(tree: Tree, prefix: str) -> list[tuple[str, Tree]]:
    """(dotted path, leaf) in tree order; `prefix` goes before every path."""
    return [
        (".".join(filter(None, (prefix, path_text(path)))), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def named_inputs(model: Model, shapes: tuple[Tree, Tree, Tree]) -> list[tuple[str, str]]:
    """(path, role) of every input: parameters have their own path, state and batch a prefix.
    Floating-point state has the role of frozen parameters.
    """
    params, state, batch = shapes
    inputs = [
        (path or "params", "parameter" if trained else "frozen")
        for (path, _), trained in zip(with_paths(params, ""), model.partition.flags, strict=True)
    ]
    inputs += [
        (path, "frozen" if trainable(leaf) else "state") for path, leaf in with_paths(state, STATE)
    ]
    return inputs + [(path, "batch") for path, _ in with_paths(batch, "batch")]


def abstract(tree: Tree) -> Tree:
    """The `abstract_leaf` of each leaf of a tree."""
    return jax.tree.map(abstract_leaf, tree)


def abstract_leaf(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, or of a number, as JAX takes it and without sharding: 64-bit
    numbers of NumPy become 32-bit.
    """
    array = leaf if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else jnp.asarray(leaf)
    typed_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
    dtype = array.dtype if typed_key else jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.ShapeDtypeStruct(array.shape, dtype)


def constant_state(jaxpr: Jaxpr, shapes: tuple[Tree, Tree, Tree]) -> frozenset[str]:
    """Paths of floating-point arrays of model state that the loss returns unchanged."""
    leaves, first = with_paths(shapes[1], ""), len(jax.tree.leaves(shapes[0]))
    results = origins(jaxpr)
    state = enumerate(results[len(results) - len(leaves) :], first)
    return frozenset(
        path
        for (path, leaf), (number, origin) in zip(leaves, state, strict=True)
        if origin == number and trainable(leaf)
    )


def function_name(function: Function) -> str:
    return repr(getattr(function, "__qualname__", type(function).__name__))


# --------------------------------------------------------------------------------------------------
# Arrays hidden in a model: in functions and in static fields.
#
# They are made while an initialiser is traced, and have no values when a loss uses them.


def require_no_tracers(closed: jex.ClosedJaxpr, model: str) -> jex.ClosedJaxpr:
    """The traced loss; raises an error if it uses such arrays."""
    captured = [
        f"{constant.dtype}{list(constant.shape)}"
        for constant in _jax_compat.open_jaxpr(closed)[1]
        if isinstance(constant, Tracer)
    ]
    if captured:
        raise TracingError(
            f"the loss uses arrays that model {model!r} holds in functions or static fields,"
            " where an initialiser that is traced leaves no numbers:"
            f" {', '.join(captured[:8])}\nTry: NumPy for such constants; or make the module once,"
            " outside of init, let init return its arrays alone, and put them together in the loss"
        )
    return closed


# --------------------------------------------------------------------------------------------------
# A forward pass for the planner, without a loss and its gradient.

#: Rows and tokens of the batch for which weights are laid out; layouts hardly depend on them.
SERVED_ROWS, SERVED_TOKENS = 8, 32


def forward_problem(
    model: Model, forward: Callable[[Tree, jax.Array], jax.Array], *, rows: int, tokens: int
) -> Problem:
    """The planning problem of a forward pass; it has no step graphs.

    Args:
        forward: (model, int32 tokens [rows, tokens]) -> logits.
    """

    def run(params: Tree, state: Tree, tokens: jax.Array) -> jax.Array:
        return forward(model.evaluating(model.rebuild(params, state)), tokens)

    batch = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    shapes = (abstract(model.params), abstract(model.state), batch)
    described = describe_batch(batch)
    return Problem(
        model=model.name,
        forward=graph_from_program(
            flatten(jax.make_jaxpr(run)(*shapes)), named_inputs(model, shapes)
        ),
        steps={},
        parameters=described_parameters(model, None),
        batch=described,
        tokens=tokens_of(described),
    )


def served_problem(
    model: Model, forward: Callable[[Tree, jax.Array], jax.Array], *, longest: int
) -> Problem:
    """The forward pass from which serving programs lay out weights."""
    try:
        return forward_problem(model, forward, rows=SERVED_ROWS, tokens=min(longest, SERVED_TOKENS))
    except ModelError:  # some models need whole blocks of tokens
        return forward_problem(model, forward, rows=SERVED_ROWS, tokens=longest)


# --------------------------------------------------------------------------------------------------
# Dependence of a loss on the rows of its batch, from a trace for another number of rows.


def proven_rows(
    model: Model,
    loss: Callable[..., Tree],
    shapes: tuple[Tree, Tree, Tree],
    closed: jex.ClosedJaxpr,
    out_shape: Tree,
    described: Sequence[BatchArray],
    rows: str,
) -> Callable[[int], Rows]:
    """A function from a number of microbatches to the dependence of the loss on rows: from the
    trace of one microbatch, or for 1, of a batch of another size.
    """
    if rows not in ("prove", "mean"):
        raise ArgumentError(
            f"rows is {rows!r} and neither 'prove' nor 'mean'\nTry: 'prove', or 'mean' for a loss"
            " that is the mean over the rows of a batch, which then is not checked"
        )
    dims, sizes = rows_of(described)
    if rows == "mean" or len(sizes) == 0:
        return lambda _: Rows(loss=Dependence(kind="mean"), asserted=True)
    if len(sizes) > 1:
        return lambda _: Rows(
            loss=Dependence(
                kind="coupled",
                why=(
                    "arrays of the batch have different numbers of rows,"
                    f" {', '.join(map(str, sizes))}"
                ),
            )
        )
    (size,), (params, state, batch) = sizes, shapes
    inputs = LossInputs(
        parameters=len(jax.tree.leaves(params)), states=len(jax.tree.leaves(state)), dims=dims
    )
    names = result_names(out_shape)

    def retraced(number: int) -> Any:
        return jax.make_jaxpr(model.bind(loss))(params, state, with_rows(batch, dims, number))

    return lambda parts: (
        prove(closed, retraced, inputs, names, size).rows
        if parts == 1
        else prove_parts(closed, retraced, inputs, names, size, parts)
    )


def rows_of(described: Sequence[BatchArray]) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """The row dim of each array of a batch (None if it has none), and the numbers of rows that
    occur.
    """
    dims = tuple(axes.index("batch") if "batch" in axes else None for _, _, _, axes in described)
    return dims, tuple(
        sorted(
            {
                shape[dim]
                for dim, (_, shape, _, _) in zip(dims, described, strict=True)
                if dim is not None
            }
        )
    )


def result_names(out_shape: Tree) -> ResultNames:
    """Names of the results of a loss, for (loss, (metrics, state))."""
    _, (metrics, state) = out_shape
    return ResultNames(
        metrics=tuple(path for path, _ in with_paths(metrics, "")),
        states=tuple(path for path, _ in with_paths(state, "")),
    )


def with_rows(batch: Tree, dims: Sequence[int | None], number: int) -> Tree:
    """A batch with another number of rows.

    Args:
        dims: row dim of each leaf; None if it has none.
    """
    leaves, structure = jax.tree.flatten(batch)

    def sized(leaf: Any, dim: int | None) -> Any:
        return (
            leaf
            if dim is None
            else jax.ShapeDtypeStruct(
                (*leaf.shape[:dim], number, *leaf.shape[dim + 1 :]), leaf.dtype
            )
        )

    return structure.unflatten([sized(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)])


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A loss as a program.

    Attributes:
        closed_jaxpr: the `PureLoss` over the leaves of params, then state, then batch.
        program: the same with jit calls inlined and values numbered.
        in_tree: structure of (params, state, batch).
        out_tree: structure of (loss, (metrics, new state)).
        problem: the planning problem.
        model: the model, with state that its loss does not change moved to its parameters.
        rows_in: number of microbatches -> dependence of the results on rows, from the trace of one
            microbatch (traces when called).
        layouts: layouts written in the loss, with values of `problem.forward`.
    """

    closed_jaxpr: jex.ClosedJaxpr
    program: Program
    in_tree: jax.tree_util.PyTreeDef
    out_tree: jax.tree_util.PyTreeDef
    problem: Problem
    model: Model
    rows_in: Callable[[int], Rows]
    layouts: tuple[LayoutOfValue, ...] = ()

    def rewrite(self, on_value: ValueCallback | None = None, remat: str = "none") -> PureLoss:
        """The loss, evaluated again with a callback on every value.

        Returns:
            (params, state, batch) -> (loss, (metrics, new state)), for arrays of the traced shapes.
        """
        walk = Walk(on_value=on_value, remat=check_policy(remat))

        def rewritten(params: Tree, state: Tree, batch: Tree) -> Any:
            leaves, tree = jax.tree.flatten((params, state, batch))
            self._check(leaves, tree)
            return jax.tree.unflatten(self.out_tree, evaluate_program(self.program, leaves, walk))

        return rewritten

    def _check(self, leaves: Sequence[Aval], tree: jax.tree_util.PyTreeDef) -> None:
        if tree != self.in_tree:
            raise TracingError(
                "the loss was traced for (params, state, batch) of structure\n "
                f" {self.in_tree}\nand called with\n  {tree}"
            )
        values = [self.problem.forward.values[index] for index in self.problem.forward.inputs]
        failures = [
            f"{value.path}: {value.dtype}{list(value.shape)} traced,"
            f" {dtype_name(leaf)}{list(jnp.shape(leaf))} given"
            for value, leaf in zip(values, leaves, strict=True)
            if (value.shape, value.dtype) != (jnp.shape(leaf), dtype_name(leaf))
        ]
        if failures:
            raise_all(
                TracingError,
                "arrays differ from those that the loss was traced for",
                failures,
                hint="trace again for the new shapes",
            )


def trace(
    model: Model,
    loss: Callable[..., Tree],
    batch: Tree,
    *,
    batch_axes: Tree = None,
    optimizer: optax.GradientTransformation | None = None,
    policies: Sequence[str] = ("none", "full", "dots"),
    rows: str = "prove",
) -> Traced:
    """Traces a loss and its gradient.

    Args:
        batch_axes: pytree of tuples of logical names, like `batch`; by default the leading dim is
            "batch", and the second dim of integer arrays of rank 2 is "seq".
        optimizer: an optax transformation, for the bytes of its state.
    """
    described = describe_batch(batch, batch_axes)
    require_rows(described)
    shapes = (abstract(model.params), abstract(model.state), abstract(batch))
    model, mapped, closed, out_shape = _trace_loss(model, loss, shapes)
    frozen = freeze(model, constant_state(closed, shapes))
    if frozen is not model:
        model, shapes = (frozen, (abstract(frozen.params), abstract(frozen.state), shapes[2]))
        model, _, closed, out_shape = _trace_loss(model, loss, shapes)
    program = flatten(closed)
    inputs = named_inputs(model, shapes)
    translation = translated(program, inputs)
    forward = replace(
        translation.graph, findings=(*translation.graph.findings, *mapped_finding(mapped))
    )
    check_counts(
        (value.path or f"a value of {model.name}", value.shape) for value in forward.values
    )
    count = len(jax.tree.leaves(shapes[0]))
    program = with_frozen(
        program, [i for i, trained in enumerate(model.partition.flags) if not trained]
    )
    folded = fold(
        program,
        *(
            {i for i, (_, role) in enumerate(inputs[:count]) if role == own_role}
            for own_role in ("parameter", "frozen")
        ),
    )
    repeated = bool(folded.loops) or any(
        e.name == "scan" and has_matmul(e.eqn) for e in program.equations
    )
    steps = {
        policy: _step(folded, inputs, policy)
        for policy in map(check_policy, policies)
        if policy == "none" or repeated
    }
    proven = proven_rows(model, loss, shapes, closed, out_shape, described, rows)
    updates, about_updates = matrix_updates(model, optimizer)
    forward = replace(forward, findings=(*forward.findings, *about_updates))
    problem = Problem(
        model=model.name,
        forward=forward,
        steps=steps,
        parameters=described_parameters(model, optimizer),
        batch=described,
        state_bytes=sum(forward.values[i].bytes for i in forward.inputs_of("state")),
        tokens=tokens_of(described),
        compute_dtype=compute_dtype(forward),
        functions=frozenset(form.kind for form, _ in forms_of(closed)),
        attention=_attention_calls(closed),
        rows=proven(1),
        updates=updates,
    )
    return Traced(
        closed_jaxpr=closed,
        program=program,
        in_tree=jax.tree.structure(shapes),
        out_tree=jax.tree.structure(out_shape),
        problem=with_fused_dims(problem),
        model=model,
        rows_in=proven,
        layouts=translation.layouts,
    )


def _trace_loss(
    model: Model, loss: Callable[..., Tree], shapes: tuple[Tree, Tree, Tree]
) -> tuple[Model, tuple[str, ...], Any, Any]:
    """The model with its mapped axes bound, their names, the jaxpr and the abstract results."""

    def traced(mapped: tuple[str, ...]) -> Any:
        bound = model
        if mapped:
            bound = replace(model, bind=lambda loss: whole_batch(model.bind(loss), mapped))
        return bound, mapped, *jax.make_jaxpr(bound.bind(loss), return_shape=True)(*shapes)

    try:
        bound, mapped, closed, out_shape = found_axes(traced)
    except ShardlibError:
        raise
    except Exception as error:
        if not jax.tree.leaves(shapes[2]):
            raise BatchError(
                f"the batch has no rows: it holds no arrays, and the loss {function_name(loss)} of"
                f" model {model.name!r} could not be traced with it: {type(error).__name__}:"
                f" {error}\nTry: a batch of at least one row"
            ) from error
        arrays = ", ".join(
            f"{path} {dtype_name(leaf)}{list(leaf.shape)}"
            for path, leaf in with_paths(shapes[2], "batch")
        )
        raise TracingError(
            f"the loss {function_name(loss)} of model {model.name!r} could not be traced:"
            f" {type(error).__name__}: {error}\nIt was called with the model and a batch of"
            f" {arrays or 'no arrays'}."
        ) from error
    value = out_shape[0]
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        raise TracingError(
            f"the loss {function_name(loss)} returned {dtype_name(value)}{list(value.shape)};"
            " a loss is one floating-point number\nTry: take the mean, jnp.mean(...)"
        )
    return bound, mapped, require_no_tracers(closed, model.name), out_shape


def _attention_calls(closed: jex.ClosedJaxpr) -> AttentionCalls:
    """The kernel requirements of the attention calls."""
    calls = [
        Wanted.by(form, avals) for form, avals in forms_of(closed) if isinstance(form, Attention)
    ]
    return AttentionCalls(
        without=tuple(
            (kind, why)
            for kind in KINDS
            for why in [call.why_not(kind) for call in calls if call.why_not(kind)][:1]
        ),
        width=max((call.widest for call in calls), default=0),
    )


def _step(folded: Folded, inputs: Sequence[tuple[str, str]], policy: str) -> StepGraph:
    """The graph of value-and-gradient under one remat policy."""
    sources = [
        InputDim(paths=tuple(inputs[i][0] for i in positions), stacked=index in folded.stacks)
        for index, positions in enumerate(folded.inputs)
    ]
    roles = [inputs[positions[0]][1] for positions in folded.inputs]
    trained = [index for index, role in enumerate(roles) if role == "parameter"]

    def value(parameters: list[Any], others: list[Any]) -> tuple[Any, list[Any]]:
        ours, theirs = iter(parameters), iter(others)
        args = [next(ours) if role == "parameter" else next(theirs) for role in roles]
        first, *others_results = folded.evaluate(args, remat=policy)
        return first, others_results

    def step(*args: Any) -> tuple[Any, Any]:
        parameters = [args[i] for i in trained]
        others = [arg for arg, role in zip(args, roles, strict=True) if role != "parameter"]
        return jax.value_and_grad(value, has_aux=True)(parameters, others)

    try:
        closed = jax.make_jaxpr(step)(*folded.avals())
    except ShardlibError:
        raise
    except Exception as error:
        raise TracingError(
            f"the gradient of the loss could not be traced: {type(error).__name__}: {error}"
        ) from error
    graph = prune(
        graph_from_jaxpr(
            closed, [(source.paths[0], role) for source, role in zip(sources, roles, strict=True)]
        )
    )
    check(graph)
    return StepGraph(
        graph=graph,
        inputs=tuple(sources),
        gradients=graph.outputs[len(graph.outputs) - len(trained) :],
    )


def compute_dtype(graph: Graph) -> str:
    """Dtype of the operands of the matmuls and convolutions with the most FLOPs."""
    flops: Counter[str] = Counter()
    for op in graph.ops:
        if op.category in ("matmul", "convolution"):
            flops[graph.values[op.operands[0]].dtype] += int(op.flops * graph.trips(op.region))
    return flops.most_common(1)[0][0] if flops else "float32"


# --------------------------------------------------------------------------------------------------
# Arrays that are not trained and that no loss changes: teachers, buffers, statistics in evaluation.
#
# Front ends return them as model state. `freeze` makes them untrained parameters, so that they are
# sharded, stored and gathered like parameters; the remaining state is updated by the loss, random
# streams, or integers.


def freeze(model: Model, paths: Collection[str]) -> Model:
    """The model with some of its state moved to its parameters, untrained."""
    moved = _movable(model, paths)
    if not moved:
        return model
    moved_state = _MovedState(params=model.params, state=model.state, moved=moved)

    def init(seed: Index) -> tuple[Tree, Tree]:
        return moved_state.after_move(*model.init(seed))

    def bind(loss: Callable[..., Tree]) -> PureLoss:
        pure = model.bind(loss)

        def run(params: Tree, state: Tree, batch: Tree) -> Tree:
            value, (metrics, after) = pure(*moved_state.before_move(params, state), batch)
            return value, (metrics, moved_state.remaining(after))

        return run

    params, state = moved_state.after_move(model.params, model.state)
    return replace(
        model,
        init=init,
        params=params,
        state=state,
        bind=bind,
        rebuild=lambda params, state: model.rebuild(*moved_state.before_move(params, state)),
        frozen=model.frozen | moved,
        axes={
            **model.axes,
            **{path: axes for path, axes in model.state_axes.items() if path in moved},
        },
        state_axes={path: axes for path, axes in model.state_axes.items() if path not in moved},
    )


@dataclass(frozen=True, kw_only=True)
class _MovedState:
    """Trees of params and state, before and after some leaves of the state have moved.

    Attributes:
        params, state: abstract, before.
        moved: dotted paths of the state.
    """

    params: Tree
    state: Tree
    moved: frozenset[str]

    def after_move(self, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """The trees after the move."""
        moved_leaves = [
            (path, leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
            if path_text(path) in self.moved
        ]
        return _grafted(params, moved_leaves), self.remaining(state)

    def remaining(self, state: Tree) -> Tree:
        """The state after the move."""
        return _without(state, self.moved, "")

    def before_move(self, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """The trees before the move, from those after it."""
        params_by_path, theirs = _by_path(params), _by_path(state)
        ours = [leaf for path, leaf in params_by_path.items() if path not in self.moved]
        return self._params.unflatten(ours), self._state[1].unflatten(
            [
                params_by_path[path] if path in self.moved else theirs[path]
                for path in self._state[0]
            ]
        )

    @cached_property
    def _params(self) -> Any:
        return jax.tree.structure(self.params)

    @cached_property
    def _state(self) -> tuple[tuple[str, ...], Any]:
        return tuple(_by_path(self.state)), jax.tree.structure(self.state)


def _movable(model: Model, paths: Collection[str]) -> frozenset[str]:
    """The paths that go through dicts only, in state and params, to a free place."""
    movable = set[str]()
    for path, _ in jax.tree_util.tree_leaves_with_path(model.state):
        if (
            path_text(path) in paths
            and all(isinstance(key, jax.tree_util.DictKey) for key in path)
            and _free(model.params, path_parts(path))
        ):
            movable.add(path_text(path))
    distinct = all(
        len(_by_path(tree)) == len(jax.tree.leaves(tree)) for tree in (model.params, model.state)
    )
    return frozenset(movable.difference(_by_path(model.params))) if distinct else frozenset()


def _free(tree: Any, keys: KeyPath) -> bool:
    for key in keys:
        if type(tree) is not dict or any(type(sibling) is not type(key) for sibling in tree):
            return False
        if key not in tree:
            return True
        tree = tree[key]
    return False


def _grafted(tree: Tree, leaves: list[tuple[tuple[Any, ...], Any]]) -> Tree:
    """Nested dicts with leaves added."""
    for path, leaf in leaves:
        tree = _put(tree, path_parts(path), leaf)
    return tree


def _put(tree: Mapping[Any, Any], keys: KeyPath, leaf: Any) -> dict[Any, Any]:
    first, *inner_keys = keys
    return {
        **tree,
        first: _put(tree.get(first, {}), tuple(inner_keys), leaf) if inner_keys else leaf,
    }


def _without(tree: Any, removed: Collection[str], prefix: str) -> Any:
    """Nested dicts with leaves, and dicts that become empty, removed."""
    if type(tree) is not dict:
        return tree
    remaining: dict[Any, Any] = {}
    for key, branch in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if path in removed and type(branch) is not dict:
            continue
        inner = _without(branch, removed, path)
        if type(branch) is not dict or inner or not branch:
            remaining[key] = inner
    return remaining


def _by_path(tree: Tree) -> dict[str, Any]:
    return {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
