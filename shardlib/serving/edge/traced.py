"""A traced forward pass as a chain of pieces, and what crosses a cut between them."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from shardlib._jax_compat import scan_counts
from shardlib.annotation.model import Model, Tree
from shardlib.errors import ModelError
from shardlib.jax_types import Function
from shardlib.tracing.program import Program, flatten

#: A place in the program: in front of this equation, after so many layers of it.
Place = tuple[int, int]
#: A value that is handed on: its number and "", or an equation's and "carry" or "stack" with which.
Key = tuple[int, str, int]


@dataclass(frozen=True, kw_only=True)
class TracedChain:
    """A traced forward pass.

    Attributes:
        program: over the leaves of weights and batch.
        leaves: arrays of the weights, by number in the program.
        batch: numbers of the leaves of the batch.
        shapes: of all values.
        made: numbers that are made of the batch.
        loops: equations that are loops over layers.
        maker: number -> the equation that makes it.
    """

    program: Program
    leaves: dict[int, np.ndarray]
    batch: tuple[int, ...]
    shapes: dict[int, jax.ShapeDtypeStruct]
    made: frozenset[int]
    loops: tuple[int, ...]
    maker: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Model, forward: Function, batch: Tree, weights: tuple[Tree, Tree]
    ) -> TracedChain:
        def run(params: Tree, state: Tree, batch: Tree) -> Tree:
            module = model.evaluating(model.rebuild(params, state))
            return jax.tree.leaves(forward(module, batch))

        program = flatten(jax.make_jaxpr(run)(*weights, batch))
        leaves = jax.tree.leaves(weights)
        numbers = program.inputs
        computed, maker = set(numbers[len(leaves) :]), dict[int, int]()
        for place, equation in enumerate(program.equations):
            maker.update(dict.fromkeys(equation.outputs, place))
            if computed.intersection(equation.inputs):
                computed.update(equation.outputs)
        loops = tuple(
            place
            for place, equation in enumerate(program.equations)
            if equation.name == "scan" and computed.intersection(equation.outputs)
        )
        if not loops:
            raise ModelError(
                "the model has no loop over its layers, so that it cannot be cut\nTry: jax.lax.scan"
                " over the layers"
            )
        return cls(
            program=program,
            leaves=dict(zip(numbers[: len(leaves)], leaves, strict=True)),
            batch=tuple(numbers[len(leaves) :]),
            shapes={
                number: jax.ShapeDtypeStruct(aval.shape, aval.dtype)
                for number, aval in enumerate(program.avals)
                if hasattr(aval, "shape")
            },
            made=frozenset(computed),
            loops=loops,
            maker=maker,
        )

    def places(self, pieces: int) -> list[Place]:
        """Where every piece begins, and where the last one ends."""
        equations, total = self.program.equations, len(self.program.equations)
        layers = sum(equations[loop].params["length"] for loop in self.loops)
        begins = [0, *(loop + 1 for loop in self.loops)]
        gaps = [*zip(begins, [*self.loops, total], strict=True)]
        full = [any(self.made.intersection(e.outputs) for e in equations[a:b]) for a, b in gaps]
        if pieces - layers == len(gaps):  # the plan counts what is made of weights alone, too
            full = [True] * len(gaps)
        places: list[Place] = []
        for number, (start, _) in enumerate(gaps):
            places += [(start, 0)] if full[number] else []
            if number < len(self.loops):
                loop = self.loops[number]
                places += [(loop, layer) for layer in range(equations[loop].params["length"])]
        if len(places) != pieces:
            raise ModelError(
                f"the plan has {pieces} pieces, and the loops of the model make {len(places)}: its"
                " layers are not all in loops\nTry: jax.lax.scan over the layers"
            )
        return [(0, 0), *places[1:], (total, 0)]

    def live(self, position: Place) -> list[Key]:
        """What is handed on at a place, in order."""
        place, layer = position
        equations = self.program.equations
        before = set(self.batch).union(*(set(equation.outputs) for equation in equations[:place]))
        later = {
            number for equation in equations[place + bool(layer) :] for number in equation.inputs
        }
        later.update(self.program.outputs)
        keys: list[Key] = []
        if layer:
            loop = equations[place]
            constants, carried = scan_counts(loop.params)
            later.update(loop.inputs[:constants])
            later.update(loop.inputs[constants + carried :])
            keys += [(place, "carry", k) for k in range(carried)]
            after = {n for equation in equations[place + 1 :] for n in equation.inputs}
            keys += [
                (place, "stack", k)
                for k, number in enumerate(loop.outputs[carried:])
                if number in after or number in self.program.outputs
            ]
        return [(number, "", 0) for number in sorted(before & later & self.made)] + keys

    def dtype(self, key: Key) -> np.dtype:
        """Of a value that is handed on."""
        number, kind, which = key
        if not kind:
            return self.shapes[number].dtype
        loop = self.program.equations[number]
        carried = scan_counts(loop.params)[1]
        return self.shapes[loop.outputs[which + (carried if kind == "stack" else 0)]].dtype

    def weights(self, first: Place, last: Place) -> list[tuple[int, int, int]]:
        """(number, first row, last row + 1) of the leaves that a stage reads; 0, 0 for all rows."""
        rows_by_leaf: dict[int, tuple[int, int]] = {}

        def read(number: int, rows: tuple[int, int] = (0, 0)) -> None:
            if number in self.made:
                return
            if number in self.leaves:
                previous = rows_by_leaf.get(number, rows)
                rows_by_leaf[number] = rows if previous == rows else (0, 0)
            elif number in self.maker:
                for operand in self.program.equations[self.maker[number]].inputs:
                    read(operand)

        for place, start, stop in self.spans(first, last):
            equation = self.program.equations[place]
            if not self.made.intersection(equation.outputs):
                continue
            if place not in self.loops:
                for number in equation.inputs:
                    read(number)
                continue
            constants, carried = scan_counts(equation.params)
            for k, number in enumerate(equation.inputs):
                read(number, (start, stop) if k >= constants + carried else (0, 0))
        if last[0] == len(self.program.equations):
            for number in self.program.outputs:
                read(number)
        return [(number, *rows) for number, rows in sorted(rows_by_leaf.items())]

    def spans(self, first: Place, last: Place) -> list[tuple[int, int, int]]:
        """(equation, first layer, last layer + 1) of what lies between two places."""
        spans: list[tuple[int, int, int]] = []
        for place in range(first[0], min(last[0] + bool(last[1]), len(self.program.equations))):
            params = self.program.equations[place].params
            length = params["length"] if place in self.loops else 0
            start = first[1] if place == first[0] else 0
            stop = last[1] if place == last[0] else length
            spans.append((place, start, stop))
        return spans
