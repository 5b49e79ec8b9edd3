"""A traced forward pass as a chain of pieces, the values that cross a cut between them, and the
program of each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from shardlib._jax_compat import scan_counts
from shardlib.annotation.names import Model
from shardlib.annotation.trees import Tree
from shardlib.errors import ModelError
from shardlib.jax_types import Function, Value
from shardlib.serve.edge_plan import EdgePlan
from shardlib.tracing.program import Equation, Program, flatten
from shardlib.tracing.rewriting import bind

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
        """Lists the place where every piece begins, and where the last one ends."""
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
        """Lists the values that are handed on at a place, in order."""
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


# --------------------------------------------------------------------------------------------------
# The programs of stages. The traced forward pass is cut between pieces, as
# `shardlib.serve.edge_plan` names them: what comes before the layers, every layer, what comes
# between layer groups, and what comes after them.
#
# A cut stands in front of an equation, or within a loop over layers after some of them. What is
# made of the batch before it and read after it is handed on; what is made of weights and constants
# alone every stage makes for itself.


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """The program of one stage.

    Attributes:
        program: of `jax.export`: (weights, what is handed in) -> what is handed on, lists of
            arrays; bfloat16 goes as the bits of uint16.
        weights: its part of them.
        taken: shapes and dtypes of what is handed in.
    """

    program: bytes
    weights: tuple[np.ndarray, ...]
    taken: tuple[jax.ShapeDtypeStruct, ...]


def cut(
    model: Model, forward: Function, batch: Tree, weights: tuple[Tree, Tree], plan: EdgePlan
) -> list[StageProgram]:
    """The stages of a plan, in order; the first takes the leaves of a batch, the last gives those
    of the results.

    Args:
        forward: (model, batch) -> any arrays.
    """
    chain = TracedChain.of(model, forward, batch, weights)
    places = chain.places(plan.stages[-1].last + 1)
    inputs = tuple(chain.shapes[key[0]] for key in chain.live(places[0]))
    programs: list[StageProgram] = []
    for stage in plan.stages:
        cut_stage = _stage(chain, places[stage.first], places[stage.last + 1], inputs)
        programs.append(cut_stage[0])
        inputs = cut_stage[1]
    return programs


def _stage(
    chain: TracedChain, first: Place, last: Place, inputs: tuple[jax.ShapeDtypeStruct, ...]
) -> tuple[StageProgram, tuple[jax.ShapeDtypeStruct, ...]]:
    """A stage's program, and what it hands on."""
    parts = chain.weights(first, last)
    taken, handed = chain.live(first), chain.live(last)
    ends = last[0] == len(chain.program.equations)

    def run(weights: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        env: dict[Key, Value] = {
            key: _unpacked(array, chain.dtype(key))
            for key, array in zip(taken, arrays, strict=True)
        }
        stage = _Stage(chain=chain, env=env)
        for (number, start, stop), array in zip(parts, weights, strict=True):
            leaf = chain.leaves[number]
            stage.weights[number] = _unpacked(array, jnp.dtype(leaf.dtype)), start, stop
        stage.run(first, last)
        keys: list[Key] = [(n, "", 0) for n in chain.program.outputs] if ends else handed
        return [_packed(jnp.asarray(stage.handed(key))) for key in keys]

    weights_bits = tuple(_bits(chain.leaves[n][a:b] if b else chain.leaves[n]) for n, a, b in parts)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in weights_bits]
    taken_as = [_packed_shape(shape) for shape in inputs]
    exported = export.export(jax.jit(run), platforms=("cpu", "cuda", "tpu"))(shapes, taken_as)
    program = StageProgram(
        program=bytes(exported.serialize()), weights=weights_bits, taken=tuple(taken_as)
    )
    after = (
        tuple(
            jax.ShapeDtypeStruct(aval.shape, chain.dtype(key))
            for aval, key in zip(exported.out_avals, handed, strict=True)
        )
        if not ends
        else ()
    )
    return program, after


@dataclass(kw_only=True)
class _Stage:
    """A stage while it is traced."""

    chain: TracedChain
    env: dict[Key, Value]
    weights: dict[int, tuple[jax.Array, int, int]] = field(default_factory=dict)

    def value(self, number: int) -> Value:
        """A value of the program."""
        if (number, "", 0) in self.env:
            return self.env[number, "", 0]
        if number in self.weights:
            return self.weights[number][0]
        program = self.chain.program
        if number in program.constants:
            return program.constants[number]
        equation = program.equations[self.chain.maker[number]]  # of weights and constants alone
        self._store(equation, bind(equation, [self.value(operand) for operand in equation.inputs]))
        return self.env[number, "", 0]

    def handed(self, key: Key) -> Value:
        """A value that is handed on."""
        return self.env[key] if key[1] else self.value(key[0])

    def _store(self, equation: Equation, results: Sequence[Value]) -> None:
        self.env.update(
            {(n, "", 0): result for n, result in zip(equation.outputs, results, strict=True)}
        )

    def run(self, first: Place, last: Place) -> None:
        """Computes what lies between two places."""
        for place, start, stop in self.chain.spans(first, last):
            equation = self.chain.program.equations[place]
            if place in self.chain.loops:
                self._layers(place, equation, start, stop)
            elif self.chain.made.intersection(equation.outputs):
                self._store(equation, bind(equation, [self.value(n) for n in equation.inputs]))

    def _layers(self, place: int, equation: Equation, start: int, stop: int) -> None:
        params, length = equation.params, equation.params["length"]
        constants, carried = scan_counts(params)
        if params["reverse"]:
            raise ModelError("a loop over layers that goes backwards cannot be cut")
        inputs = equation.inputs
        fixed = [self.value(number) for number in inputs[:constants]]
        begun = [
            self.env[place, "carry", k] if start else self.value(number)
            for k, number in enumerate(inputs[constants : constants + carried])
        ]
        rows = [self._rows(number, start, stop) for number in inputs[constants + carried :]]
        begun = [
            jnp.asarray(array, self.chain.shapes[number].dtype)
            for array, number in zip(begun, equation.outputs, strict=False)
        ]
        results = bind(equation, [*fixed, *begun, *rows], length=stop - start)
        stacks = results[carried:]
        if start:
            stacks = [
                jnp.concatenate([self.env[place, "stack", k], stack])
                if (place, "stack", k) in self.env
                else stack
                for k, stack in enumerate(stacks)
            ]
        if stop == length:
            self._store(equation, [*results[:carried], *stacks])
        self.env.update({(place, "carry", k): result for k, result in enumerate(results[:carried])})
        self.env.update({(place, "stack", k): stack for k, stack in enumerate(stacks)})

    def _rows(self, number: int, start: int, stop: int) -> Value:
        if number in self.weights:
            leaf, first, last = self.weights[number]
            return leaf[start - first : stop - first] if last else leaf[start:stop]
        return jnp.asarray(self.value(number))[start:stop]


def _bits(array: Any) -> np.ndarray:
    bits = np.asarray(array, order="C")
    return bits.view(np.uint16) if bits.dtype == jnp.bfloat16 else bits


def _packed(array: jax.Array) -> jax.Array:
    half = array.dtype == jnp.bfloat16
    return jax.lax.bitcast_convert_type(array, jnp.uint16) if half else array


def _unpacked(array: jax.Array, dtype: np.dtype) -> jax.Array:
    half = dtype == jnp.bfloat16
    return jax.lax.bitcast_convert_type(array, jnp.bfloat16) if half else array


def _packed_shape(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    dtype = jnp.uint16 if shape.dtype == jnp.bfloat16 else shape.dtype
    return jax.ShapeDtypeStruct(shape.shape, dtype)
