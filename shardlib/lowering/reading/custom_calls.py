"""Which custom calls does a loss have, and how are their operands laid out?

A custom call (`shardlib.functions`) is lowered as a whole: a program for many devices takes the
place of the equations of its call. For that, it must be known how the plan shards the operands, and
which of them are parameters, that come as they rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlib._jax_compat import scan_counts
from shardlib.functions.attention import Attention
from shardlib.graph.graph import input_source
from shardlib.jax_types import Aval
from shardlib.lowering.reading.parameter_uses import seen_through
from shardlib.lowering.reading.use import View
from shardlib.tracing.program import (
    CUSTOM,
    REMAT,
    Call,
    Equation,
    Program,
    callee,
    flatten,
    has_matmul,
    result_path,
)

#: (path of an equation, index of its result), as `place` is told them.
Source = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A custom call.

    Attributes:
        call: the call.
        avals: abstract values of its operands.
        results: abstract values of its results.
        makers: what makes each result, where the call runs as it is written; None for constants.
        sources: what makes each operand, or which input of the loss it is; None for constants.
        views: for each operand the parameter that it is, or a layer of it; None for others.
    """

    call: Call
    avals: tuple[Aval, ...]
    results: tuple[Aval, ...]
    makers: tuple[Source | None, ...]
    sources: tuple[Source | None, ...]
    views: tuple[View | None, ...]

    def key(self, operand: int) -> Source:
        """Where placements have the layout of an operand."""
        return f"{self.call.path}/operand", operand


def sites(walked: Iterable[Step]) -> dict[str, Site]:
    """The calls of a loss, by path; in bodies of scans and under rematerialisation too, but not in
    other loops and branches.
    """
    return {step.site.call.path: step.site for step in walked if step.site is not None}


def operands(sites: Mapping[str, Site]) -> dict[Source, Source]:
    """Where placements have the layouts of all operands, and of results of attention -> what makes
    them.

    Results of attention come laid out by heads; what reads them, and keeps them for the backward
    pass, has them as the plan does.
    """
    read = {
        site.key(k): source
        for site in sites.values()
        for k, source in enumerate(site.sources)
        if source is not None
    }
    results = {
        maker: maker
        for site in sites.values()
        for maker in site.makers
        if maker is not None and isinstance(site.call.form, Attention)
    }
    return read | results


def custom_operands(walked: Iterable[Step]) -> dict[Source, Source]:
    """Where placements have the layouts of the operands of functions with a derivative of their own
    that multiply matrices -> what makes them.

    Such a function runs as it is, with rules that no layout can be given inside; so it gets its
    operands as the plan has them in use.
    """
    return {
        (f"{step.equation.path}/operand", k): source
        for step in walked
        if step.equation.name in CUSTOM and has_matmul(step.equation.eqn)
        for k, source in enumerate(step.sources)
        if source is not None
    }


@dataclass(frozen=True, kw_only=True)
class Step:
    """An equation on the way through a loss.

    Attributes:
        program: the program that it stands in: the loss, the body of a loop, or what is
            rematerialised.
        equation: the equation.
        sources: what makes each operand; None where nothing is known.
        views: for each operand the parameter that it is, or a layer of it; None for others.
        site: the custom call that begins with the equation; None where none does.
    """

    program: Program
    equation: Equation
    sources: tuple[Source | None, ...]
    views: tuple[View | None, ...]
    site: Site | None

    @property
    def operands(self) -> tuple[tuple[int, View], ...]:
        """The operands that are parameters, or layers of them: (position, which one)."""
        return tuple(
            (position, view) for position, view in enumerate(self.views) if view is not None
        )


def steps(program: Program, parameters: int) -> Iterator[Step]:
    """The equations of a loss in order, those of bodies of scans and under rematerialisation
    too.
    """
    return _steps(
        program,
        {number: input_source(k) for k, number in enumerate(program.inputs)},
        {
            number: View(parameter=i, dims=tuple(range(len(program.avals[number].shape))))
            for i, number in enumerate(program.inputs[:parameters])
        },
    )


def _steps(
    program: Program, sources: Mapping[int, Source], views: Mapping[int, View]
) -> Iterator[Step]:
    sources, views, begun = dict(sources), dict(views), set[str]()
    for equation in program.equations:
        yield Step(
            program=program,
            equation=equation,
            sources=tuple(sources.get(number) for number in equation.inputs),
            views=tuple(views.get(number) for number in equation.inputs),
            site=_begun(program, equation, sources, views, begun),
        )
        for index, number in enumerate(equation.outputs):
            maker = result_path(equation, index)
            if maker is not None:
                sources[number] = maker
        view = seen_through(equation, [views.get(n) for n in equation.inputs], program)
        if view is not None:
            views[equation.outputs[0]] = view
        if equation.name in REMAT:
            body = flatten(callee(equation.eqn), f"{equation.path}/", equation.scope)
            yield from _steps(
                body,
                _inside(body.inputs, equation.inputs, sources),
                _inside(body.inputs, equation.inputs, views),
            )
        elif equation.name == "scan":
            yield from _scanned(equation, sources, views)


def _begun(
    program: Program,
    equation: Equation,
    sources: Mapping[int, Source],
    views: Mapping[int, View],
    begun: set[str],
) -> Site | None:
    """The call that begins with an equation, which is then among those that have begun."""
    call = equation.call
    if call is None or call.path in begun:
        return None
    begun.add(call.path)
    return Site(
        call=call,
        avals=tuple(program.avals[number] for number in call.inputs),
        results=tuple(program.avals[number] for number in call.outputs),
        makers=_makers(program, call),
        sources=tuple(sources.get(number) for number in call.inputs),
        views=tuple(views.get(number) for number in call.inputs),
    )


def _makers(program: Program, call: Call) -> tuple[Source | None, ...]:
    """What makes the results of a call."""
    makers = {
        number: result_path(equation, index)
        for equation in program.equations
        if equation.call is not None and equation.call.path == call.path
        for index, number in enumerate(equation.outputs)
    }
    return tuple(makers.get(number) for number in call.outputs)


def _scanned(
    equation: Equation, sources: Mapping[int, Source], views: Mapping[int, View]
) -> Iterator[Step]:
    constants, carried = scan_counts(equation.params)
    body = flatten(equation.params["jaxpr"], f"{equation.path}/body/", equation.scope)
    kinds = [
        *((("carry", k)) for k in range(carried)),
        *(("enter", k) for k in range(len(body.inputs) - constants - carried)),
    ]
    inner = _inside(body.inputs[:constants], equation.inputs[:constants], sources)
    inner |= {
        number: (f"{equation.path}/{kind}/{k}", 0)
        for number, (kind, k) in zip(body.inputs[constants:], kinds, strict=True)
    }
    inner_views = _inside(body.inputs[:constants], equation.inputs[:constants], views)
    first = constants + carried
    inner_views |= {
        number: replace(
            view, dims=view.dims[1:], lengths=(*view.lengths, equation.params["length"])
        )
        for number, view in _inside(body.inputs[first:], equation.inputs[first:], views).items()
    }
    yield from _steps(body, inner, inner_views)


def _inside(
    inner: Sequence[int], outer: Sequence[int], by_number: Mapping[int, Any]
) -> dict[int, Any]:
    return {
        to: by_number[number]
        for to, number in zip(inner, outer, strict=True)
        if number in by_number
    }
