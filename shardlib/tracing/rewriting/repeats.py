"""Which layers did the user write out in a Python loop?

The equations of a program become tokens: equal tokens do the same thing to arrays of the same
shape. Layers written one after the other are a stretch of the token list that repeats with some
period L, that is token[i] == token[i + L]. The stretch with the largest coverage wins, the shortest
period among equals; its wiring must repeat as well (each operand comes from the same place in the
same repetition, from the same place in the previous one, or from outside). Where the stretch is
longer than a whole number of periods, the block may start at several places; the one where the
fewest bytes pass from one repetition to the next is taken, which is the residual stream between two
layers. What lies before and after is searched again: an encoder, then a decoder.

>>> tokens = Tokens(
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardlib.jax_types import Aval
from shardlib.tracing.program import CUSTOM, Equation, Program, has_matmul

#: Stretches of one range that are tried, best first, before giving up.
_ATTEMPTS = 24
#: Starting points of one stretch that are tried, cheapest first.
_ROTATIONS = 8

#: Where an operand comes from: ("inside" or "previous", offset, result), ("outside",), or ("older",
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
class Tokens:
    """A program as the search sees it.

    Attributes:
        kinds: equal numbers do the same thing.
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
    made: dict[int, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        producers = {
            number: (position, k)
            for position, numbers in enumerate(self.outputs)
            for k, number in enumerate(numbers)
        }
        object.__setattr__(self, "made", producers)


def find_repeats(program: Program) -> tuple[Run, ...]:
    """The layers of a program that are written out, in order."""
    return search(tokenise(program))


def search(tokens: Tokens) -> tuple[Run, ...]:
    """The repeated stretches of a token list, in order."""
    return _search(tokens, 0, len(tokens.kinds))


def _search(tokens: Tokens, start: int, stop: int) -> tuple[Run, ...]:
    if not any(tokens.heavy[start:stop]):
        return ()
    for begin, period, length in _stretches(tokens, start, stop)[:_ATTEMPTS]:
        run = _fit(tokens, begin, period, length)
        if run is not None:
            return (*_search(tokens, start, run.start), run, *_search(tokens, run.stop, stop))
    return ()


def _stretches(tokens: Tokens, start: int, stop: int) -> list[tuple[int, int, int]]:
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


def _fit(tokens: Tokens, begin: int, period: int, length: int) -> Run | None:
    """The run inside a stretch whose wiring repeats; None where there are no two such
    repetitions.
    """
    count = length // period
    slack = length - count * period
    crossing = _crossing(tokens, begin, period, slack)
    order = sorted(range(slack + 1), key=lambda offset: (crossing[offset], offset))[:_ROTATIONS]
    best: Run | None = None
    for offset in order:
        first, repetitions = _consistent(tokens, begin + offset, period, count)
        if repetitions == count:
            return Run(begin + offset, period, count)
        if repetitions >= 2 and (best is None or repetitions > best.count):
            best = Run(begin + offset + first * period, period, repetitions)
    return best


def _crossing(tokens: Tokens, begin: int, period: int, slack: int) -> np.ndarray:
    """Bytes that pass from the first repetition to the second, for every place where the block may
    start.
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


def _consistent(tokens: Tokens, start: int, period: int, count: int) -> tuple[int, int]:
    """(first, number) of the longest row of repetitions with the same wiring."""
    best = (0, 1)
    first = 0
    while first < count - best[1]:
        begin = start + first * period
        opening = _wiring(tokens, begin, period, begin)
        later: list[Source] | None = None
        reached = first + 1
        while reached < count:
            wiring = _wiring(tokens, start + reached * period, period, begin)
            if not _agrees(opening, wiring) or (later is not None and wiring != later):
                break
            later, reached = wiring, reached + 1
        best = max(best, (first, reached - first), key=lambda row: row[1])
        first = max(first + 1, reached - 1)
    return best


def _agrees(opening: Sequence[Source], later: Sequence[Source]) -> bool:
    """Whether the first repetition fits a later one: what that takes from its predecessor, the
    first takes from outside.
    """
    return all(
        a == b or (a[0] == "outside" and b[0] == "previous")
        for a, b in zip(opening, later, strict=True)
    )


def _wiring(tokens: Tokens, start: int, period: int, begin: int) -> list[Source]:
    """Where the operands of the repetition at `start` come from, in a run that begins at
    `begin`.
    """
    wiring: list[Source] = []
    for position in range(start, start + period):
        for number in tokens.inputs[position]:
            producer, result = tokens.made.get(number, (-1, 0))
            if producer < begin:
                wiring.append(("outside",))
            elif producer >= start:
                wiring.append(("inside", producer - start, result))
            elif producer >= start - period:
                wiring.append(("previous", producer - start + period, result))
            else:
                wiring.append(("older", producer))
    return wiring


def tokenise(program: Program) -> Tokens:
    """A program as tokens; the kind of an equation is its primitive, its parameters and the types
    of its operands, and which of these are frozen parameters.
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
    return Tokens(
        kinds=tuple(kinds),
        heavy=tuple(has_matmul(equation.eqn) for equation in program.equations),
        inputs=tuple(equation.inputs for equation in program.equations),
        outputs=tuple(equation.outputs for equation in program.equations),
        sizes=tuple(_bytes(aval) for aval in program.avals),
        results=program.outputs,
    )


def _params(equation: Equation, texts: dict[int, str]) -> tuple[str, ...]:
    """The parameters as text: jaxprs print with canonical names, functions count by identity, save
    those of derivatives.
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
