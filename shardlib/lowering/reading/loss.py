"""A traced loss, read once: its parameter uses, custom calls, loops and tables.

    reading = LossReading(program=flatten(jaxpr), parameters=3)
    reading.uses["4/body/7"]        the matmul that uses a parameter, and how
    reading.calls["9"]              a custom call, such as attention
    reading.slices["4/enter/0"]     the stacked parameter of which a scan takes one layer a time

Every fact is made when it is first asked for, and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardlib.lowering.reading.custom_calls import (
    Site,
    Source,
    Step,
    custom_operands,
    operands,
    sites,
    steps,
)
from shardlib.lowering.reading.parameter_roles import (
    convolved,
    looked_up,
    narrowed,
    stacked_parameters,
)
from shardlib.lowering.reading.parameter_uses import ADDITION, SLICES, weight_uses
from shardlib.lowering.reading.use import Use
from shardlib.tracing.program import Program


@dataclass(frozen=True, kw_only=True, eq=False)
class LossReading:
    """What is known of a loss.

    Attributes:
        program: the loss, flattened.
        parameters: how many of its first inputs are parameters.
    """

    program: Program
    parameters: int

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Its equations in order, those of layers and under rematerialisation too."""
        return tuple(steps(self.program, self.parameters))

    @cached_property
    def uses(self) -> Mapping[str, Use]:
        """The matmuls, convolutions and lookups of parameters, by path."""
        return {
            path: use
            for path, use in self._all_uses.items()
            if use.equation.name not in (*SLICES, ADDITION)
        }

    @cached_property
    def sliced(self) -> Mapping[str, Use]:
        """The slices that are taken of parameters, by path."""
        return {path: use for path, use in self._all_uses.items() if use.equation.name in SLICES}

    @cached_property
    def added(self) -> Mapping[str, Use]:
        """The additions of matrices to activations with more dims, by path."""
        uses = self._all_uses.items()
        return {path: use for path, use in uses if use.equation.name == ADDITION}

    @cached_property
    def _all_uses(self) -> Mapping[str, Use]:
        return weight_uses(self.program, self.parameters)

    @cached_property
    def calls(self) -> Mapping[str, Site]:
        """The custom calls, by path."""
        return sites(self.steps)

    @cached_property
    def slices(self) -> Mapping[str, int]:
        """Path of a slice of a scan -> the stacked parameter that it is one layer of."""
        return stacked_parameters(self.program, self.parameters)

    @cached_property
    def tables(self) -> frozenset[int]:
        """The parameters that are read by lookups alone."""
        return looked_up(self.program, self.parameters)

    @cached_property
    def kernels(self) -> frozenset[tuple[int, ...]]:
        """Shapes of the kernels of convolutions."""
        return convolved(equation.eqn for equation in self.program.equations)

    @cached_property
    def narrowed(self) -> Mapping[int, np.dtype]:
        """The parameters of which all that is read is in a narrower dtype -> that dtype."""
        return narrowed(self.program, self.parameters)

    @cached_property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """Traced dtype of each parameter."""
        inputs = self.program.inputs[: self.parameters]
        return tuple(self.program.avals[number].dtype for number in inputs)

    @cached_property
    def operands(self) -> Mapping[Source, Source]:
        """Where placements have the layouts of operands of custom calls, and of functions with a
        derivative of their own that multiply matrices -> what makes them.
        """
        return operands(self.calls) | custom_operands(self.steps)
