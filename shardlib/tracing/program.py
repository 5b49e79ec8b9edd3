"""Traced programs: the order and the names of their equations, element lookups, and repeated
blocks.

Graph, re-evaluation, repeats and folding all walk the same `Program`: a jaxpr with calls of jit
inlined, values numbered, and literals stored as constants. An equation's path is the chain of its
positions, "3/12" for equation 12 of the jit call at position 3. Loops, branches, remat and custom
derivatives stay equations; the paths of their inner programs consist of the path P of the outer
equation and a word:

    scan       P/body/...      boundary ops P/carry/k, P/enter/k, P/exit/k, P/final/k
    while      P/cond/...      P/body/...      boundary ops P/carry/k, P/final/k
    cond       P/branch0/...   P/branch1/...   boundary op P/join/k
    remat, custom_jvp, custom_vjp   P/...

Element lookups in sharded rows:

`jnp.take_along_axis(logits, targets[..., None], -1)` is a gather at computed positions, and its
gradient a scatter-add into an array of zeros as large as the logits. A partitioner gathers whole
rows for either. A masked sum over the row gives the element by element-wise ops, which work on a
sharded row, and so does its gradient:

>>> import jax.numpy as jnp
>>> masked_lookup(jnp.array([[5.0, 7.0]]), jnp.array([[1]]), None)
Array([[7.]], dtype=float32)

Repeated blocks, such as layers unrolled by a Python loop:

The equations of a program become tokens: equal tokens are the same computation on arrays of the
same shape. Unrolled layers are a stretch of the token list that repeats with some period L, that is
token[i] == token[i + L]. The stretch with the largest coverage wins, the shortest period among
equals; its wiring must repeat as well (each operand comes from the same place in the same
repetition, from the same place in the previous one, or from outside). If the stretch is longer than
a whole number of periods, the block may start at several places; the one with the fewest bytes
passed between repetitions is chosen, which is the residual stream between two layers. The equations
before and after it are searched again: an encoder, then a decoder.

>>> tokens = EquationTokens(
...     kinds=(9, 1, 2, 1, 2, 1, 2, 8),
...     heavy=(False, True, False) + (True, False) * 2 + (False,),
...     inputs=((), (0,), (1,), (2,), (3,), (4,), (5,), (6,)),
...     outputs=tuple((i,) for i in range(8)),
...     sizes=(4.0,) * 8,
... )
>>> search(tokens)
(Run(start=1, period=2, count=3),)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from shardlib._jax_compat import open_jaxpr, scan_counts
from shardlib.functions.attention import Form, form_of
from shardlib.graph import Dims
from shardlib.jax_types import Aval, Constant, Eqn, EqnParams, Jaxpr, Value
from shardlib.tracing.layouts import UserLayout, layout_of

#: Calls that are inlined; the name of the parameter with the callee differs.
INLINED: tuple[str, ...] = ("jit", "pjit", "closed_call", "call", "core_call", "core_closed_call")
#: Reductions over named axes, and their equivalents over dims, which `jax.vmap` leaves where it
#: binds the axis.
_REDUCED = {"psum": jnp.sum, "psum_invariant": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}
#: Calls that change how a derivative is taken: the graph contains their equations, re-evaluation
#: keeps the calls.
REMAT: tuple[str, ...] = ("remat2", "remat", "checkpoint")
CUSTOM: tuple[str, ...] = (
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_vmap_call",
    "composite",
)


@dataclass(frozen=True, kw_only=True)
class CustomCall:
    """A custom call (`shardlib.functions`), whose equations are inlined like those of other calls.

    Attributes:
        path: its path.
        form: the form of the custom function.
        inputs, outputs: numbers of its operands and results.
    """

    path: str
    form: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Equation:
    """One equation of a program.

    Attributes:
        eqn: the JAX equation; its variables are meaningless outside its jaxpr, so use `inputs` and
            `outputs`.
        inputs: numbers of the values it reads.
        outputs: numbers of the values it defines.
        scope: name scopes around it.
        call: the outermost custom call that it belongs to, if any.
        within: the inlined calls around it, the innermost first: JAX keeps no line of the caller
            for the equations of a jitted function.
    """

    path: str
    eqn: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: str = ""
    call: CustomCall | None = None
    within: tuple[Eqn, ...] = ()

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def params(self) -> EqnParams:
        """The primitive's parameters."""
        return self.eqn.params

    @property
    def programs(self) -> list[Program]:
        """All its inner programs."""
        return [self.inside(key) for key in jaxprs(self.eqn)]

    def inside(self, key: str = "", *, remat: bool = False) -> Program:
        """One of its inner programs, by its key in `jaxprs`."""
        prefix = f"{self.path}/{key}/" if key else f"{self.path}/"
        within = (self.eqn, *self.within)
        return flatten(jaxprs(self.eqn)[key], prefix, self.scope, remat=remat, within=within)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A jaxpr with jit calls inlined and values numbered.

    Attributes:
        avals: abstract value of every number.
        constants: literals and captured arrays, by number.
        inputs: numbers of the arguments.
        outputs: numbers of the results.
        equations: in execution order.
        frozen: numbers of the inputs that are untrained parameters: trained and frozen layers are
            not repetitions of one block.
        layouts: layouts written in the program, with numbers of the values that have them.
    """

    avals: tuple[Aval, ...]
    constants: dict[int, Value]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    equations: tuple[Equation, ...]
    frozen: frozenset[int] = frozenset()
    layouts: tuple[tuple[UserLayout, int], ...] = ()


def with_frozen(program: Program, positions: Iterable[int]) -> Program:
    """A program in which the inputs at some positions are frozen parameters."""
    return replace(program, frozen=frozenset(program.inputs[position] for position in positions))


class _Numbering:
    """Numbers values while a jaxpr is flattened; equal scalar literals share a number."""

    def __init__(self, inlined: Collection[str]) -> None:
        self.inlined = inlined
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.equations: list[Equation] = []
        self.layouts: list[tuple[UserLayout, int]] = []
        self._literals: dict[tuple[str, str, bool], int] = {}
        self._captured: dict[int, int] = {}

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def literal(self, literal: jex.Literal) -> int:
        if np.ndim(literal.val) > 0:
            return self.captured(literal.val, literal.aval)
        key = (str(literal.aval), repr(literal.val), getattr(literal.aval, "weak_type", False))
        if key not in self._literals:
            self._literals[key] = self.new(literal.aval)
            self.constants[self._literals[key]] = literal.val
        return self._literals[key]

    def captured(self, array: Value, aval: Any) -> int:
        if id(array) not in self._captured:
            self._captured[id(array)] = self.new(aval)
            self.constants[self._captured[id(array)]] = array
        return self._captured[id(array)]

    def walk(
        self,
        jaxpr: Any,
        constants: Sequence[Value],
        arguments: Sequence[int],
        prefix: str,
        scope: str,
        within: tuple[Eqn, ...],
    ) -> list[int]:
        numbers = {
            var: self.captured(array, var.aval)
            for var, array in zip(jaxpr.constvars, constants, strict=True)
        }
        numbers.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> int:
            return self.literal(atom) if isinstance(atom, jex.Literal) else numbers[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            inputs = tuple(map(read, eqn.invars))
            inner_scope = join_scope(scope, str(eqn.source_info.name_stack))
            layout = layout_of(eqn)
            if layout is not None:
                numbers[eqn.outvars[0]] = inputs[0]
                self.layouts.append((layout, inputs[0]))
                continue
            if eqn.primitive.name in _REDUCED and _is_over_dims(eqn):
                inner, _ = open_jaxpr(_reduction(eqn))
                outputs = self.walk(inner, (), inputs, f"{prefix}{index}/", inner_scope, within)
                numbers.update(zip(eqn.outvars, outputs, strict=True))
                continue
            if eqn.primitive.name in self.inlined:
                inner, inner_constants = open_jaxpr(callee(eqn))
                first = len(self.equations)
                outputs = self.walk(
                    inner, inner_constants, inputs, f"{prefix}{index}/", inner_scope, (eqn, *within)
                )
                numbers.update(zip(eqn.outvars, outputs, strict=True))
                form = form_of(eqn)
                if form is not None:
                    call = CustomCall(
                        path=f"{prefix}{index}", form=form, inputs=inputs, outputs=tuple(outputs)
                    )
                    self.equations[first:] = [
                        replace(equation, call=call) for equation in self.equations[first:]
                    ]
            else:
                outputs = [self.new(var.aval) for var in eqn.outvars]
                numbers.update(zip(eqn.outvars, outputs, strict=True))
                self.equations.append(
                    Equation(
                        path=f"{prefix}{index}",
                        eqn=eqn,
                        inputs=inputs,
                        outputs=tuple(outputs),
                        scope=inner_scope,
                        within=within,
                    )
                )
        return list(map(read, jaxpr.outvars))


def _is_over_dims(eqn: Eqn) -> bool:
    """True if a reduction is over dims alone, not over named axes."""
    return not any(isinstance(axis, str) for axis in eqn.params["axes"])


def _reduction(eqn: Eqn) -> Jaxpr:
    """A reduction over dims (or none), expressed in primitives that have rules."""
    reduce, axes = _REDUCED[eqn.primitive.name], tuple(map(int, eqn.params["axes"]))

    def reduced(*arrays: Value) -> list[Value]:
        return [reduce(array, axis=axes).astype(array.dtype) if axes else array for array in arrays]

    return jax.make_jaxpr(reduced)(*(atom.aval for atom in eqn.invars))


def flatten(
    jaxpr: Jaxpr,
    prefix: str = "",
    scope: str = "",
    *,
    remat: bool = False,
    within: tuple[Eqn, ...] = (),
) -> Program:
    """Inlines calls and numbers the values of a jaxpr (closed, or open without constants).

    Args:
        prefix: put before every path; ends in a slash.
        remat: whether remat is inlined too.
        within: the equations around it.
    """
    inner, constants = open_jaxpr(jaxpr)
    numbering = _Numbering((*INLINED, *REMAT) if remat else INLINED)
    inputs = tuple(numbering.new(var.aval) for var in inner.invars)
    outputs = numbering.walk(inner, constants, inputs, prefix, scope, within)
    return Program(
        avals=tuple(numbering.avals),
        constants=numbering.constants,
        inputs=inputs,
        outputs=tuple(outputs),
        equations=tuple(numbering.equations),
        layouts=tuple(numbering.layouts),
    )


def jaxprs(eqn: Eqn) -> dict[str, Jaxpr]:
    """The inner jaxprs of an equation, by the name used in the paths of their equations: "" for the
    callee of a call, "body", "cond", "branch0"; numbers for those of other primitives.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return {"body": params["jaxpr"]}
    if name == "while":
        return {"cond": params["cond_jaxpr"], "body": params["body_jaxpr"]}
    if name == "cond":
        return {f"branch{number}": branch for number, branch in enumerate(params["branches"])}
    if name == "custom_linear_solve":
        solvers = params["jaxprs"]._asdict()
        return {key: jaxpr for key, jaxpr in solvers.items() if jaxpr is not None}
    if name in (*REMAT, *CUSTOM):
        return {"": callee(eqn)}
    return {str(number): jaxpr for number, jaxpr in enumerate(subjaxprs(eqn))}


def callee(eqn: Eqn) -> Jaxpr:
    """The jaxpr of a call equation."""
    params = eqn.params
    return next(
        params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in params
    )


def join_scope(outer: str, inner: str) -> str:
    """The scope of an equation inside a call; inside jit JAX already prepends the outer scope."""
    return inner if not outer or inner.startswith(outer) else f"{outer}/{inner}".rstrip("/")


def subjaxprs(eqn: Eqn) -> list[Jaxpr]:
    """Every jaxpr among an equation's parameters."""
    jaxprs: list[Any] = []
    for value in eqn.params.values():
        jaxprs += [
            item
            for item in (value if isinstance(value, (tuple, list)) else (value,))
            if hasattr(item, "eqns")
        ]
    return jaxprs


def has_matmul(eqn: Eqn) -> bool:
    """True if an equation, or anything it calls, multiplies matrices or convolves."""
    if eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
        return True
    return any(has_matmul(inner) for jaxpr in subjaxprs(eqn) for inner in jaxpr.eqns)


def forms_of(jaxpr: Jaxpr) -> Iterator[tuple[Form, tuple[Aval, ...]]]:
    """The custom calls of a jaxpr, loops and branches included: (form, abstract operands)."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        form = form_of(eqn)
        if form is not None:
            yield form, tuple(var.aval for var in eqn.invars)
            continue
        for inner in subjaxprs(eqn):
            yield from forms_of(inner)


def result_path(equation: Equation, index: int) -> tuple[str, int] | None:
    """(path, index) of the graph's op that makes a result of an equation; None if the equation only
    forwards it.
    """
    path = equation.path
    if equation.name == "scan":
        _, carried = scan_counts(equation.params)
        return (
            (f"{path}/final/{index}", 0)
            if index < carried
            else (f"{path}/exit/{index - carried}", 0)
        )
    if equation.name == "while":
        return f"{path}/final/{index}", 0
    if equation.name == "cond":
        return f"{path}/join/{index}", 0
    if equation.name not in (*REMAT, *CUSTOM):
        return path, index
    inner = equation.inside()
    for producer in inner.equations:
        if inner.outputs[index] in producer.outputs:
            return result_path(producer, producer.outputs.index(inner.outputs[index]))
    return None


# --------------------------------------------------------------------------------------------------
# Trip counts of while loops, and other facts read from a jaxpr.


def dtype_name(aval: Aval) -> str:
    """JAX's name of a dtype; "key" for PRNG keys, "token" for values with no dtype."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return "token"
    return "key" if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else str(dtype.name)


def literal(constant: Constant) -> str:
    """The text of an integer constant, which distinguishes for example two attention windows; ""
    for every other constant.
    """
    scalar = np.shape(constant) == ()
    is_integer = scalar and jax.dtypes.issubdtype(jnp.result_type(constant), np.integer)
    return str(int(np.asarray(constant))) if is_integer else ""


def stacking(shape: tuple[int, ...]) -> tuple[Dims, Dims]:
    """Dims of a stack and of one item of it."""
    stack_dims: Dims = tuple((i,) if size > 1 else () for i, size in enumerate(shape))
    return stack_dims, stack_dims[1:]


#: Maximum number of elements looked up in a row at once: each reads the whole row.
MAX_LOOKUPS = 8


def is_element_lookup(equation: Equation) -> bool:
    """True if a gather takes a few single elements of each row along the last dim."""
    if equation.name != "gather":
        return False
    numbers, operand = equation.params["dimension_numbers"], equation.eqn.invars[0].aval
    indices, rows = equation.eqn.invars[1].aval, operand.ndim - 1
    return (
        rows > 0
        and jnp.issubdtype(operand.dtype, jnp.floating)
        and operand.shape[rows] > MAX_LOOKUPS
        and numbers.operand_batching_dims == tuple(range(rows))
        and numbers.start_indices_batching_dims == tuple(range(rows))
        and numbers.collapsed_slice_dims == numbers.start_index_map == (rows,)
        and not numbers.offset_dims
        and set(equation.params["slice_sizes"]) == {1}
        and indices.ndim == rows + 2
        and indices.shape[rows] <= MAX_LOOKUPS
    )


def masked_lookup(rows: Value, indices: Value, outside: float | None) -> Value:
    """Elements of rows, [..., n] of [..., size].

    Args:
        indices: int [..., n].
        outside: result for an index out of range; None clips the index.
    """
    size = rows.shape[-1]
    positions = jnp.clip(indices, 0, size - 1) if outside is None else indices
    hits = positions[..., None] == jnp.arange(size, dtype=indices.dtype)
    elements = jnp.sum(jnp.where(hits, rows[..., None, :], jnp.zeros((), rows.dtype)), axis=-1)
    if outside is None:
        return elements
    inside = (indices >= 0) & (indices < size)
    return jnp.where(inside, elements, jnp.asarray(outside, rows.dtype))


def by_masking(equation: Equation, operands: Sequence[Value]) -> list[Value] | None:
    """Evaluates an element lookup as a masked sum over the row; None for any other equation."""
    if not is_element_lookup(equation):
        return None
    rows, indices = operands
    fill, mode = equation.params["fill_value"], equation.params["mode"]
    outside = (
        (float("nan") if fill is None else fill)
        if mode == jax.lax.GatherScatterMode.FILL_OR_DROP
        else None
    )
    return [masked_lookup(jnp.asarray(rows), jnp.asarray(indices)[..., 0], outside)]


#: Number of stretches of one range that are tried, best first.
_ATTEMPTS = 24
#: Number of starting points of one stretch that are tried, cheapest first.
_ROTATIONS = 8

#: Origin of an operand: ("inside" or "previous", offset, result), ("outside",), or ("older",
#: position), which cannot repeat.
Source = tuple[Any, ...]


@dataclass(frozen=True)
class Run:
    """Equations [start, start + period * count) are `count` repetitions of one block."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """Index after the last equation."""
        return self.start + self.period * self.count


@dataclass(frozen=True, kw_only=True)
class EquationTokens:
    """A program as input of the search.

    Attributes:
        kinds: equal numbers for equal computations.
        heavy: whether the equation multiplies matrices.
        inputs: value numbers that each equation reads.
        outputs: value numbers that each equation defines.
        sizes: bytes per value number.
        results: value numbers that the program returns.
    """

    kinds: tuple[int, ...]
    heavy: tuple[bool, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    sizes: tuple[float, ...]
    results: tuple[int, ...] = ()
    producers: dict[int, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        producers = {
            number: (position, k)
            for position, numbers in enumerate(self.outputs)
            for k, number in enumerate(numbers)
        }
        object.__setattr__(self, "producers", producers)


def find_repeats(program: Program) -> tuple[Run, ...]:
    """The unrolled layers of a program, in order."""
    return search(tokenise(program))


def search(tokens: EquationTokens) -> tuple[Run, ...]:
    """The repeated stretches of a token list, in order."""
    return _search(tokens, 0, len(tokens.kinds))


def _search(tokens: EquationTokens, start: int, stop: int) -> tuple[Run, ...]:
    if not any(tokens.heavy[start:stop]):
        return ()
    for begin, period, length in _stretches(tokens, start, stop)[:_ATTEMPTS]:
        run = _fit(tokens, begin, period, length)
        if run is not None:
            return (*_search(tokens, start, run.start), run, *_search(tokens, run.stop, stop))
    return ()


def _stretches(tokens: EquationTokens, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(begin, period, tokens) of the longest stretch with matmuls for every period, best first."""
    kinds = np.asarray(tokens.kinds[start:stop])
    heavy = np.concatenate([[0], np.cumsum(tokens.heavy[start:stop])])
    stretches: list[tuple[int, int, int, int]] = []
    for period in range(1, len(kinds) // 2 + 1):
        same = kinds[:-period] == kinds[period:]
        breaks = np.flatnonzero(~same)
        edges = np.concatenate([[-1], breaks, [len(same)]])
        lengths, begins = np.diff(edges) - 1, edges[:-1] + 1
        fits = np.flatnonzero(lengths >= period)
        fits = fits[heavy[begins[fits] + period] > heavy[begins[fits]]]
        if len(fits):
            best = fits[int(np.argmax(lengths[fits]))]
            length, begin = int(lengths[best]), int(begins[best])
            stretches.append(
                (-(length // period + 1) * period, period, begin + start, length + period)
            )
    return [(begin, period, length) for _, period, begin, length in sorted(stretches)]


def _fit(tokens: EquationTokens, begin: int, period: int, length: int) -> Run | None:
    """The run inside a stretch whose wiring repeats; None if fewer than two repetitions agree."""
    count = length // period
    slack = length - count * period
    passed = _bytes_between(tokens, begin, period, slack)
    order = sorted(range(slack + 1), key=lambda offset: (passed[offset], offset))[:_ROTATIONS]
    best: Run | None = None
    for offset in order:
        first, repetitions = _consistent(tokens, begin + offset, period, count)
        if repetitions == count:
            return Run(begin + offset, period, count)
        if repetitions >= 2 and (best is None or repetitions > best.count):
            best = Run(begin + offset + first * period, period, repetitions)
    return best


def _bytes_between(tokens: EquationTokens, begin: int, period: int, slack: int) -> np.ndarray:
    """Bytes passed from the first repetition to the second, for every possible start of the
    block.
    """
    last: dict[int, int] = {}
    for position in range(begin, min(begin + 3 * period, len(tokens.inputs))):
        for number in tokens.inputs[position]:
            last[number] = position
    change = np.zeros(2 * period + slack + 2)
    for position in range(begin, min(begin + period + slack, len(tokens.outputs))):
        for number in tokens.outputs[position]:
            until = min(last.get(number, position), position + period)
            change[position - begin + 1] += tokens.sizes[number]
            change[min(until - begin, 2 * period + slack) + 1] -= tokens.sizes[number]
    return np.cumsum(change)[period : period + slack + 1]


def _consistent(tokens: EquationTokens, start: int, period: int, count: int) -> tuple[int, int]:
    """(first, count) of the longest sequence of repetitions with the same wiring."""
    best = (0, 1)
    first = 0
    while first < count - best[1]:
        begin = start + first * period
        opening = _wiring(tokens, begin, period, begin)
        later: list[Source] | None = None
        stop = first + 1
        while stop < count:
            wiring = _wiring(tokens, start + stop * period, period, begin)
            if not _agrees(opening, wiring) or (later is not None and wiring != later):
                break
            later, stop = wiring, stop + 1
        best = max(best, (first, stop - first), key=lambda row: row[1])
        first = max(first + 1, stop - 1)
    return best


def _agrees(opening: Sequence[Source], later: Sequence[Source]) -> bool:
    """True if the first repetition matches a later one; operands that come from the predecessor in
    the later one come from outside in the first.
    """
    return all(
        a == b or (a[0] == "outside" and b[0] == "previous")
        for a, b in zip(opening, later, strict=True)
    )


def _wiring(tokens: EquationTokens, start: int, period: int, begin: int) -> list[Source]:
    """The origins of the operands of the repetition at `start`, in a run that begins at `begin`."""
    wiring: list[Source] = []
    for position in range(start, start + period):
        for number in tokens.inputs[position]:
            producer, result = tokens.producers.get(number, (-1, 0))
            if producer < begin:
                wiring.append(("outside",))
            elif producer >= start:
                wiring.append(("inside", producer - start, result))
            elif producer >= start - period:
                wiring.append(("previous", producer - start + period, result))
            else:
                wiring.append(("older", producer))
    return wiring


def tokenise(program: Program) -> EquationTokens:
    """A program as tokens. The kind of an equation is its primitive, its parameters, the types of
    its operands, and which of these are frozen parameters.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    texts: dict[int, str] = {}
    types = [
        f"{aval}{' frozen' if number in program.frozen else ''}"
        for number, aval in enumerate(program.avals)
    ]
    kinds: list[int] = []
    for equation in program.equations:
        key = (
            equation.name,
            tuple(types[n] for n in equation.inputs),
            tuple(types[n] for n in equation.outputs),
            _params(equation, texts),
        )
        kinds.append(numbers.setdefault(key, len(numbers)))
    return EquationTokens(
        kinds=tuple(kinds),
        heavy=tuple(has_matmul(equation.eqn) for equation in program.equations),
        inputs=tuple(equation.inputs for equation in program.equations),
        outputs=tuple(equation.outputs for equation in program.equations),
        sizes=tuple(_bytes(aval) for aval in program.avals),
        results=program.outputs,
    )


def _params(equation: Equation, texts: dict[int, str]) -> tuple[str, ...]:
    """The parameters as text: jaxprs print with canonical names, functions compare by identity
    except derivative rules.
    """
    texts_of_params: list[str] = []
    for key, value in sorted(equation.params.items()):
        if hasattr(value, "eqns"):
            texts.setdefault(
                id(value), f"{value} {[id(constant) for constant in getattr(value, 'consts', ())]}"
            )
            texts_of_params.append(f"{key}={texts[id(value)]}")
        elif not callable(value):
            texts_of_params.append(f"{key}={re.sub(' at 0x[0-9a-f]+', '', str(value))}")
        elif equation.name not in CUSTOM:
            texts_of_params.append(f"{key}={id(value)}")
    return tuple(texts_of_params)


def _bytes(aval: Aval) -> float:
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    return float(np.prod(shape, dtype=float)) * getattr(dtype, "itemsize", 4)
