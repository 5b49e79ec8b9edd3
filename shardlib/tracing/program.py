"""In which order are the equations of a traced program walked, and what is each one called?

Graph, re-evaluation, repeats and folding all walk the same `Program`: a jaxpr with the calls of jit
inlined, its values numbered, its literals among the constants. An equation's path is the chain of
its positions, "3/12" for equation 12 of the jit call at position 3. Loops, branches, remat and
custom derivatives stay equations here; whoever descends into them gives their inner program the
path of the outer equation and one of these words:

    scan       P/body/...      boundary ops P/carry/k, P/enter/k, P/exit/k, P/final/k
    while      P/cond/...      P/body/...      boundary ops P/carry/k, P/final/k
    cond       P/branch0/...   P/branch1/...   boundary op P/join/k
    remat, custom_jvp, custom_vjp   P/...
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from shardlib._jax_compat import open_jaxpr, scan_counts
from shardlib.functions.marks import Form, form_of
from shardlib.jax_types import Aval, Eqn, EqnParams, Jaxpr, Value
from shardlib.tracing.layouts import OwnLayout, layout_of

#: Calls without a meaning of their own; the parameter that holds the callee differs.
INLINED: tuple[str, ...] = ("jit", "pjit", "closed_call", "call", "core_call", "core_closed_call")
#: Reductions over named axes, and what `jax.vmap` leaves of them where it has the axis: the same
#: over dims.
_REDUCED = {"psum": jnp.sum, "psum_invariant": jnp.sum, "pmax": jnp.max, "pmin": jnp.min}
#: Calls that change how a derivative is taken; the graph looks inside them, re-evaluation keeps
#: them.
REMAT: tuple[str, ...] = ("remat2", "remat", "checkpoint")
CUSTOM: tuple[str, ...] = (
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_vmap_call",
    "composite",
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A custom call (`shardlib.functions`), whose equations are inlined like those of
    others.

    Attributes:
        path: where it stands.
        form: what the function computes.
        inputs: numbers of its operands.
        outputs: numbers of its results.
    """

    path: str
    form: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Equation:
    """One equation of a program.

    Attributes:
        path: where it stands.
        eqn: the JAX equation; its variables are meaningless outside its jaxpr, so use `inputs` and
            `outputs`.
        inputs: numbers of the values it reads.
        outputs: numbers of the values it defines.
        scope: name scopes around it.
        call: the call of a custom call that it belongs to, the outermost one; None outside of
            them.
        within: the calls around it that were inlined, the innermost first: JAX keeps no line of the
            caller for what a jitted function computes.
    """

    path: str
    eqn: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: str = ""
    call: Call | None = None
    within: tuple[Eqn, ...] = ()

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def params(self) -> EqnParams:
        """The primitive's parameters."""
        return self.eqn.params


@dataclass(frozen=True, kw_only=True)
class Program:
    """A jaxpr with jit calls inlined and values numbered.

    Attributes:
        avals: abstract value of every number.
        constants: literals and captured arrays, by number.
        inputs: numbers of the arguments.
        outputs: numbers of the results.
        equations: in execution order.
        frozen: numbers of the inputs that are parameters and not trained: layers that are trained
            repeat no layers that are not.
        layouts: those that the program brings along, with numbers of the values that have them.
    """

    avals: tuple[Aval, ...]
    constants: dict[int, Value]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    equations: tuple[Equation, ...]
    frozen: frozenset[int] = frozenset()
    layouts: tuple[tuple[OwnLayout, int], ...] = ()


def with_frozen(program: Program, positions: Iterable[int]) -> Program:
    """A program some of whose inputs, by position, are frozen parameters."""
    return replace(program, frozen=frozenset(program.inputs[position] for position in positions))


class _Numbering:
    """Numbers values while a jaxpr is flattened; equal scalar literals share a number."""

    def __init__(self, inlined: Collection[str]) -> None:
        self.inlined = inlined
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.equations: list[Equation] = []
        self.layouts: list[tuple[OwnLayout, int]] = []
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
            if eqn.primitive.name in _REDUCED and _over_dims(eqn):
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
                    call = Call(
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


def _over_dims(eqn: Eqn) -> bool:
    """Whether a reduction is over no named axis."""
    return not any(isinstance(axis, str) for axis in eqn.params["axes"])


def _reduction(eqn: Eqn) -> Jaxpr:
    """A reduction over dims, or over nothing, by operations that are known."""
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
    """Numbers a jaxpr (closed or open without constants); `prefix` goes before every path and ends
    in a slash. With `remat`, remat is inlined too; `within` are the equations around it.
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


def callee(eqn: Eqn) -> Jaxpr:
    """The jaxpr that a call equation calls."""
    params = eqn.params
    return next(
        params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if key in params
    )


def join_scope(outer: str, inner: str) -> str:
    """The scope of an equation inside a call; JAX already puts the outer scope in front inside
    jit.
    """
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
    """Whether an equation, or anything it calls, multiplies matrices or convolves."""
    if eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
        return True
    return any(has_matmul(inner) for jaxpr in subjaxprs(eqn) for inner in jaxpr.eqns)


def called(jaxpr: Jaxpr) -> Iterator[tuple[Form, tuple[Aval, ...]]]:
    """The custom calls that a jaxpr calls, in loops and branches too: their forms, and abstract
    values of their operands.
    """
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        form = form_of(eqn)
        if form is not None:
            yield form, tuple(var.aval for var in eqn.invars)
            continue
        for inner in subjaxprs(eqn):
            yield from called(inner)


def result_path(equation: Equation, index: int) -> tuple[str, int] | None:
    """(path, index) of the graph's op that makes a result of an equation; None where the equation
    only passes it on.
    """
    path, eqn = equation.path, equation.eqn
    if equation.name == "scan":
        _, carried = scan_counts(eqn.params)
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
    inner = flatten(callee(eqn), f"{path}/")
    for producer in inner.equations:
        if inner.outputs[index] in producer.outputs:
            return result_path(producer, producer.outputs.index(inner.outputs[index]))
    return None
