"""A function of arrays as a compiled program that reads what it needs, and returns nothing that its
caller has already.

What a pass forward remembers is in part what it was given: such arrays are kept by whoever called,
not copied by the program. The same goes for a result that is asked for twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardlib._jax_compat import in_mesh, runnable
from shardlib.tracing.program import Equation, Program, flatten
from shardlib.tracing.rewriting.binding import bind
from shardlib.tracing.rewriting.dependence import needed

#: Arrays in some order.
Arrays = list[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """A traced function.

    Attributes:
        program: its jaxpr.
        equations: those that its results need.
        inputs: abstract arrays that it takes, with their shardings.
        reads: positions of those that it reads.
        made: positions of results that it makes, each result once.
        sources: for every result, (whether it is made, its position in `made` or among the inputs).
    """

    program: Program
    equations: tuple[Equation, ...]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    reads: tuple[int, ...]
    made: tuple[int, ...]
    sources: tuple[tuple[bool, int], ...]

    @staticmethod
    def of(
        function: Callable[..., Arrays], inputs: Sequence[jax.ShapeDtypeStruct], mesh: Mesh
    ) -> Draft:
        """Traces a function."""
        with in_mesh(mesh):
            return Draft.of_program(flatten(jax.make_jaxpr(function)(*inputs)), inputs)

    @staticmethod
    def of_program(program: Program, inputs: Sequence[jax.ShapeDtypeStruct]) -> Draft:
        """Of what has been traced: those of its equations that its outputs need."""
        positions = {number: k for k, number in enumerate(program.inputs)}
        fresh = list(dict.fromkeys(number for number in program.outputs if number not in positions))
        places = {number: place for place, number in enumerate(fresh)}
        equations, reads = needed(program.equations, fresh)
        return Draft(
            program=program,
            equations=tuple(equations),
            inputs=tuple(inputs),
            reads=tuple(k for k, number in enumerate(program.inputs) if number in reads),
            made=tuple(program.outputs.index(number) for number in fresh),
            sources=tuple(
                (False, positions[number]) if number in positions else (True, places[number])
                for number in program.outputs
            ),
        )

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of all results."""
        avals = [self.program.avals[number] for number in self.program.outputs]
        return tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)

    @property
    def on_host(self) -> tuple[bool, ...]:
        """Of all results, whether they are in host memory."""
        avals = [self.program.avals[number] for number in self.program.outputs]
        return tuple(aval.memory_space == jax.memory.Space.Host for aval in avals)

    def without(self, dropped: Collection[int]) -> Draft:
        """The same function without inputs that it does not read."""
        left = [k for k in range(len(self.inputs)) if k not in dropped]
        place = {k: position for position, k in enumerate(left)}
        return replace(
            self,
            program=replace(self.program, inputs=tuple(self.program.inputs[k] for k in left)),
            inputs=tuple(self.inputs[k] for k in left),
            reads=tuple(place[k] for k in self.reads),
            sources=tuple((fresh, k if fresh else place[k]) for fresh, k in self.sources),
        )

    def compiled(
        self,
        name: str,
        mesh: Mesh,
        *,
        shardings: Sequence[NamedSharding | None] = (),
        donated: Sequence[int] = (),
    ) -> Executable:
        """Compiles it.

        Args:
            shardings: of the results that have to have one; None leaves one to the compiler.
        """
        requested = [*shardings, *[None] * (len(self.sources) - len(shardings))]

        def run(*read: Any) -> Arrays:
            env = {
                **self.program.constants,
                **{self.program.inputs[k]: leaf for k, leaf in zip(self.reads, read, strict=True)},
            }
            for equation in self.equations:
                env.update(
                    zip(
                        equation.outputs,
                        bind(equation, [env[number] for number in equation.inputs]),
                        strict=True,
                    )
                )
            return [env[self.program.outputs[k]] for k in self.made]

        run.__name__ = run.__qualname__ = name
        taken = tuple(position for position, k in enumerate(self.reads) if k in set(donated))
        with in_mesh(mesh):
            jitted = jax.jit(
                run, donate_argnums=taken, out_shardings=[requested[k] for k in self.made]
            )
            arguments = tuple(self.inputs[k] for k in self.reads)
            compiled = jitted.lower(*arguments).compile()
        return Executable(
            call=compiled,
            run=runnable(jitted, compiled, arguments, mesh),
            reads=self.reads,
            sources=self.sources,
            draft=self,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Executable:
    """A compiled program.

    Attributes:
        call: the program.
        run: what runs it.
        reads, sources, draft: see `Draft`.
    """

    call: jax.stages.Compiled
    run: Callable[..., Any]
    reads: tuple[int, ...]
    sources: tuple[tuple[bool, int], ...]
    draft: Draft

    def __call__(self, inputs: Sequence[jax.Array]) -> Arrays:
        """Results, for all inputs; those that are not read may be anything."""
        results = self.run(*[inputs[k] for k in self.reads])
        return [results[k] if fresh else inputs[k] for fresh, k in self.sources]

    @property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        """Abstract results, with their shardings."""
        output_shardings = jax.tree.leaves(self.call.output_shardings)
        shardings = [
            output_shardings[k] if fresh else self.draft.inputs[k].sharding
            for fresh, k in self.sources
        ]
        return [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(self.draft.results, shardings, strict=True)
        ]
