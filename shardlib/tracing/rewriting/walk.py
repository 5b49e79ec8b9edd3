"""What is done to the values of a program on the way, when it is run again.

A walk places values, runs some equations otherwise, and says which layers are rematerialised:

    Walk(place=lambda path, index, value: constrain(value))      # every value, by (path, index)
    Walk(run=lambda equation, operands: [...])                   # in place of an equation
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardlib.errors import TracingError
from shardlib.jax_types import Value
from shardlib.tracing.program import (
    CUSTOM,
    Equation,
    result_path,
)

#: (path of an op of the graph, index of its result, value) -> the value to go on with.
Place = Callable[[str, int, Any], Any]


#: (equation, its operands) -> its results, or None to run it as it is.
Run = Callable[[Equation, Sequence[Any]], "list[Any] | None"]


@dataclass(frozen=True, kw_only=True)
class Together:
    """Equations that run as one, where the first of them stands; what they read may not depend on
    any of them.

    Attributes:
        paths: where they stand, in order.
        run: the operands of each -> the one result of each.
    """

    paths: tuple[str, ...]
    run: Callable[[Sequence[Sequence[Value]]], Sequence[Value]]

    def members(
        self, equations: Sequence[Equation], available: Collection[int]
    ) -> tuple[list[Equation], dict[str, Equation]]:
        """The equations themselves, and by path those that make what else they read."""
        members = [equation for equation in equations if equation.path in self.paths]
        if len(members) < len(self.paths):
            raise TracingError(
                f"equations {', '.join(self.paths)} run as one and do not stand in one program"
            )
        makers = {number: equation for equation in equations for number in equation.outputs}
        early: dict[str, Equation] = {}
        waiting = [number for member in members for number in member.inputs]
        while waiting:
            number = waiting.pop()
            if number not in available and makers[number].path not in early:
                early[makers[number].path] = makers[number]
                waiting += makers[number].inputs
        return members, early


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What is done to the values on the way.

    Attributes:
        place: called on every value that an op of the graph makes; None leaves all values alone.
        run: asked first to run an equation that is no loop, branch or remat; None runs all as they
            are.
        calls: what runs in place of custom calls, by path: operands -> results.
        together: equations that run as one, by the path of each.
        beside: by path, (operands, array) -> result of an equation that takes an array beside its
            operands.
        arrays: those arrays, by path, with a leading dim for every scan around the equation, the
            outermost first.
        remat: policy for repeated layers; "none" leaves the program as written.
        apart: by path of a scan, or of the first equation of layers that are written out: the
            policy and how many of the layers follow it, the first ones; the others keep all.
        offloaded: whether what the backward pass finds saved of layers under a scan waits for it in
            host memory.
        inside: whether the walk is inside a rematerialised layer, where the program's own remat is
            dropped.
    """

    place: Place | None = None
    run: Run | None = None
    calls: Mapping[str, Callable[..., Sequence[Value]]] = field(default_factory=dict)
    together: Mapping[str, Together] = field(default_factory=dict)
    beside: Mapping[str, Callable[[Sequence[Value], Value], Value]] = field(default_factory=dict)
    arrays: Mapping[str, Value] = field(default_factory=dict)
    remat: str = "none"
    apart: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    offloaded: bool = False
    inside: bool = False

    def policy(self, path: str, layers: int) -> tuple[str, int]:
        """The policy of the repeated layers at a path, and how many of them follow it."""
        policy, count = self.apart.get(path, (self.remat, layers))
        return (policy, count) if count else ("none", layers)

    def put(self, path: str, index: int, value: Value) -> Value:
        """The value after `place`."""
        return value if self.place is None else self.place(path, index, value)

    def placed(self, equation: Equation, results: Sequence[Value]) -> Sequence[Value]:
        """The results of an equation that is no loop, branch or remat after `place`."""
        if self.place is None:
            return results
        paths = [
            result_path(equation, index) if equation.name in CUSTOM else (equation.path, index)
            for index in range(len(results))
        ]
        return [
            value if path is None else self.put(*path, value)
            for path, value in zip(paths, results, strict=True)
        ]

    def layer(self) -> Walk:
        """The walk inside a layer that is rematerialised as a whole."""
        return replace(self, remat="none", apart={}, offloaded=False, inside=True)

    def as_written(self) -> Walk:
        """The walk inside something that is repeated within a layer."""
        return replace(self, remat="none", apart={}, offloaded=False, inside=False)
