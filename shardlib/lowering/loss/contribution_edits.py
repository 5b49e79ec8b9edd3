"""What changes in the program of a microbatch, and the run of the program with the changes in it.

Operands are multiplied by powers of the number of microbatches, or replaced by what the whole batch
says beforehand; every equation stays where it is, so that its path does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib._jax_compat import in_mesh, open_jaxpr
from shardlib.annotation.activations import no_mesh
from shardlib.annotation.trees.paths import Tree
from shardlib.functions.marks import form_of
from shardlib.functions.mean import WeightedMeanForm
from shardlib.graph.rows import Rows
from shardlib.layout import Layout
from shardlib.lowering.mesh.device_mesh import logical_mesh
from shardlib.lowering.mesh.shardings import named_sharding
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.planning.plan import Plan
from shardlib.tracing.program import INLINED, REMAT, Program, callee, flatten
from shardlib.tracing.rewriting.dependence import needed
from shardlib.tracing.rewriting.interpreter import evaluate_equations
from shardlib.tracing.rewriting.walk import Walk
from shardlib.tracing.rows.handed import Handed
from shardlib.tracing.rows.kinds import Kind
from shardlib.tracing.rows.proof import Inputs, Names, Proof

#: Operand of an equation, by (path, index).
Place = tuple[str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Edits:
    """What changes in the program of a microbatch.

    Attributes:
        parts: number of microbatches.
        factors: of operands.
        handed: operands that are handed in.
        results: what becomes of each result: a factor, a value that is handed in, or "vouched" for
            a weighted mean.
    """

    parts: int
    factors: Mapping[Place, float]
    handed: Mapping[Place, Handed]
    results: tuple[float | Handed | str, ...]

    @staticmethod
    def of(proof: Proof, parts: int, whole: Whole) -> Edits:
        analysis = proof.analysis
        assert analysis is not None
        states = len(whole.names.states)
        results = [_result(kind, parts) for kind in proof.kinds[: len(proof.kinds) - states]] + [
            1.0
        ] * states
        return Edits(
            parts=parts,
            factors={
                place: _factor(exponent, parts) for place, exponent in analysis.scales.items()
            },
            handed=dict(analysis.handed),
            results=tuple(results),
        )

    def __bool__(self) -> bool:
        return bool(self.factors or self.handed or any(result != 1.0 for result in self.results))

    @property
    def values(self) -> tuple[Handed, ...]:
        """What is handed in, each once."""
        return tuple(
            dict.fromkeys(
                (
                    *self.handed.values(),
                    *(result for result in self.results if isinstance(result, Handed)),
                )
            )
        )

    def applied(
        self,
        plan: Plan,
        whole: Whole,
        share: Share,
        mesh: Mesh | AbstractMesh,
    ) -> Contribution:
        """The changed loss, and what belongs to it."""
        part, dims, shardings, under = share.traced, share.dims, share.shardings, share.under
        closed, vouched = part.closed_jaxpr, sum(result == "vouched" for result in self.results)
        program = flatten(whole.traced.closed_jaxpr, remat=True)
        numbers = _numbers(program, self.values)
        avals = [
            _part_of(program.avals[number], handed, self.parts)
            for number, handed in zip(numbers, self.values, strict=True)
        ]

        def run(arguments: list[Any], handed: list[Any]) -> Any:
            values = dict(zip(self.values, handed, strict=True))
            rewriting = _Rewriting(edits=self, values=values, sums=[])
            outputs, weights = self._results(rewriting.run(closed, arguments, "", ""), rewriting)
            loss, (metrics, state) = jax.tree.unflatten(part.out_tree, outputs)
            return loss, ({"metrics": metrics, "weights": weights} if vouched else metrics, state)

        given = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.in_avals]
        with no_mesh() if under is None else in_mesh(logical_mesh(under)):
            again, shapes = jax.make_jaxpr(run, return_shape=True)(given, avals)
        traced = LossJaxpr(closed_jaxpr=again, out_tree=jax.tree.structure(shapes))
        finish = self.finish(part, vouched)
        if not numbers:
            return Contribution(
                traced=traced,
                prologue=lambda batch: batch,
                dims=dims,
                shardings=shardings,
                finish=finish,
            )
        inner = {f"batch.0{path.removeprefix('batch')}": dim for path, dim in dims.items()}
        more = {f"batch.1.{at}": handed.dim for at, handed in enumerate(self.values)}
        cut = [
            named_sharding(
                mesh,
                (
                    Layout()
                    if handed.dim is None
                    else Layout(*((),) * handed.dim, _row_axes(plan, dims))
                ),
            )
            for handed in self.values
        ]
        return Contribution(
            traced=traced,
            prologue=lambda batch: (batch, _made(program, numbers, self, whole.inputs, batch, cut)),
            dims={**inner, **more},
            shardings=(shardings, cut),
            finish=finish,
        )

    def _results(self, outputs: list[Any], rewriting: _Rewriting) -> tuple[list[Any], list[Any]]:
        """Results of a microbatch, and the weights of those that are weighted means."""
        found, weights = list[Any](), list[Any]()
        for output, result in zip(outputs, self.results, strict=True):
            if result == "vouched":
                total, weight = next(
                    (total, weight) for made, total, weight in rewriting.sums if made is output
                )
                found.append(total)
                weights.append(weight.astype(total.dtype))
            elif isinstance(result, Handed):
                found.append(rewriting.values[result])
            else:
                assert isinstance(result, float)
                found.append(_times(output, result))
        return found, weights

    def finish(self, part: LossJaxpr, vouched: int) -> Callable[[Any, Tree], tuple[Any, Tree]]:
        """Divides weighted means, and gives counts and truth values back in their dtypes, which
        means over microbatches are not.
        """
        avals = list(part.closed_jaxpr.out_avals)

        def finish(results: Any, gradients: Tree) -> tuple[Any, Tree]:
            loss, (metrics, state) = results
            weights = list(metrics["weights"]) if vouched else []
            metrics = metrics["metrics"] if vouched else metrics
            leaves, structure = jax.tree.flatten((loss, metrics))
            divisor = None
            for at, result in enumerate(self.results[: len(leaves)]):
                if result == "vouched":
                    weight = weights.pop(0)
                    divisor = weight if at == 0 else divisor
                    leaves[at] = leaves[at] / weight.astype(leaves[at].dtype)
                elif not jnp.issubdtype(avals[at].dtype, jnp.inexact):
                    leaves[at] = jnp.round(leaves[at]).astype(avals[at].dtype)
            loss, metrics = structure.unflatten(leaves)
            if divisor is not None:
                gradients = jax.tree.map(
                    lambda gradient: (gradient / divisor.astype(gradient.dtype)).astype(
                        gradient.dtype
                    ),
                    gradients,
                )
            return (loss, (metrics, state)), gradients

        return finish


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rewriting:
    """A run of the program of a microbatch with some of its operands changed; every equation stays
    where it is, so that its path does.

    Attributes:
        edits: the changes.
        values: what is handed in.
        sums: (result, total, weight) of every weighted mean.
    """

    edits: Edits
    values: Mapping[Handed, Any]
    sums: list[tuple[Any, Any, Any]]

    def run(self, jaxpr: Any, arguments: Sequence[Any], prefix: str, scope: str) -> list[Any]:
        """Results of a jaxpr."""
        inner, constants = open_jaxpr(jaxpr)
        env = dict(zip(inner.constvars, constants, strict=True))
        env.update(zip(inner.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex.Literal) else env[atom]

        for index, eqn in enumerate(inner.eqns):
            path, operands = f"{prefix}{index}", [read(atom) for atom in eqn.invars]
            here = str(eqn.source_info.name_stack)
            within = here[len(scope) :].lstrip("/") if scope and here.startswith(scope) else here
            with jax.named_scope(within) if within else nullcontext():
                results = self._equation(eqn, operands, path, here)
            if isinstance(form_of(str(eqn.params.get("name", ""))), WeightedMeanForm):
                self.sums.append((results[0], operands[0], operands[1]))
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in inner.outvars]

    def _equation(self, eqn: Any, operands: list[Any], path: str, scope: str) -> Sequence[Any]:
        name = eqn.primitive.name
        if (name in INLINED or name in REMAT) and self._changed(path):
            return self._call(eqn, operands, path, scope)
        for at, variable in enumerate(eqn.invars):
            handed = self.edits.handed.get((path, at))
            if handed is not None:
                operands[at] = self.values[handed]
                assert (operands[at].shape, operands[at].dtype) == (
                    variable.aval.shape,
                    variable.aval.dtype,
                ), (path, at, operands[at], variable.aval)
        factors = {
            at: self.edits.factors[path, at]
            for at in range(len(operands))
            if (path, at) in self.edits.factors
        }
        if not factors:
            return _bound(eqn, operands)
        return jax.jit(
            lambda *given: tuple(
                _bound(eqn, [_times(leaf, factors.get(at, 1.0)) for at, leaf in enumerate(given)])
            )
        )(*operands)

    def _changed(self, path: str) -> bool:
        return any(
            place.startswith(f"{path}/") for place, _ in (*self.edits.handed, *self.edits.factors)
        )

    def _call(self, eqn: Any, operands: list[Any], path: str, scope: str) -> Sequence[Any]:
        """A call with changes inside."""

        def inside(*given: Any) -> tuple[Any, ...]:
            return tuple(self.run(callee(eqn), given, f"{path}/", scope))

        if eqn.primitive.name in REMAT:
            return jax.checkpoint(
                inside,
                policy=eqn.params.get("policy"),
                prevent_cse=eqn.params.get("prevent_cse", True),
            )(*operands)
        inside.__name__ = inside.__qualname__ = str(eqn.params.get("name", "inside"))
        return jax.jit(inside)(*operands)


def _bound(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def _times(leaf: Any, factor: float) -> Any:
    return leaf if factor == 1.0 else leaf * jnp.asarray(factor, jnp.result_type(leaf))


def _factor(exponent: Fraction, parts: int) -> float:
    return float(parts) ** float(exponent)


def _result(kind: Kind, parts: int) -> float | Handed | str:
    """What makes the mean over microbatches of a result that of the whole batch."""
    if kind.vouched:
        return "vouched"
    if kind.family == "data":
        assert kind.origin is not None
        return Handed(origin=kind.origin)
    assert kind.family in ("free", "sum") and kind.power is not None, kind
    return _factor(kind.power + (1 if kind.family == "sum" else 0), parts)


def _numbers(program: Program, values: Sequence[Handed]) -> list[int]:
    """The numbers of values in the whole batch's program."""
    made = {
        (equation.path, at): number
        for equation in program.equations
        for at, number in enumerate(equation.outputs)
    }
    return [made[handed.origin] for handed in values]


def _part_of(aval: Any, handed: Handed, parts: int) -> jax.ShapeDtypeStruct:
    """What a microbatch gets of a value."""
    shape = tuple(aval.shape)
    if handed.dim is not None:
        shape = (*shape[: handed.dim], shape[handed.dim] // parts, *shape[handed.dim + 1 :])
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _row_axes(plan: Plan, dims: Mapping[str, int | None]) -> tuple[str, ...]:
    """The mesh axes that shard the rows of the batch."""
    layouts = dict(plan.batch_layouts)
    found = [
        tuple(layouts[path])[dim]
        for path, dim in dims.items()
        if isinstance(dim, int) and path in layouts and dim < len(tuple(layouts[path]))
    ]
    return found[0] if found else ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Contribution:
    """The loss of a microbatch as its contribution to that of the whole batch.

    Attributes:
        traced: the loss of a microbatch, over the leaves of (params, state, batch with what is
            handed in).
        prologue: batch -> batch with what is handed in.
        dims: for each array of that batch, by path, its dim of rows.
        shardings: of each array of that batch.
        finish: ((loss, (metrics, state)), gradients), averaged over the microbatches -> the same
            for the whole batch.
    """

    traced: LossJaxpr
    prologue: Callable[[Tree], Tree]
    dims: Mapping[str, int | None]
    shardings: Tree
    finish: Callable[[Any, Tree], tuple[Any, Tree]]


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The whole batch's program, and what its inputs are.

    Attributes:
        traced: the loss of the whole batch.
        rows: how it depends on the rows, where that has been proven.
        inputs, names: see `shardlib.tracing.rows.proof`.
        size: number of rows.
    """

    traced: LossJaxpr
    rows: Rows
    inputs: Inputs
    names: Names
    size: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """The loss of a microbatch as it was traced.

    Attributes:
        traced: it.
        dims: for each array of the batch, by path, its dim of rows.
        shardings: of each array of the batch.
        under: the mesh that it was traced under; None for none.
    """

    traced: LossJaxpr
    dims: Mapping[str, int | None]
    shardings: Tree
    under: Mesh | AbstractMesh | None


def _dealt(leaf: Any, handed: Handed, parts: int) -> Any:
    """A value in an order of which every part-th element of the dim of rows makes a part: whole
    rows of several elements each.
    """
    if handed.dim is None or handed.inner == 1:
        return leaf
    before, after = leaf.shape[: handed.dim], leaf.shape[handed.dim + 1 :]
    rows = leaf.reshape(*before, -1, parts, handed.inner, *after)
    return jnp.swapaxes(rows, handed.dim + 1, handed.dim + 2).reshape(leaf.shape)


def _made(
    program: Program,
    numbers: Sequence[int],
    edits: Edits,
    inputs: Inputs,
    batch: Tree,
    cut: Sequence[NamedSharding],
) -> list[Any]:
    """What the whole batch says beforehand. It depends on neither parameters nor state, so that
    zeros stand for these where a loop makes other things too.
    """
    leaves, first = jax.tree.leaves(batch), inputs.parameters + inputs.states
    equations, reads = needed(program.equations, numbers)
    env = dict(program.constants)
    for at, number in enumerate(program.inputs):
        if number in reads or number in numbers:
            aval = program.avals[number]
            env[number] = leaves[at - first] if at >= first else jnp.zeros(aval.shape, aval.dtype)
    evaluate_equations(
        equations,
        env,
        Walk(
            run=lambda equation, operands: (
                list(operands) if equation.name == "sharding_constraint" else None
            )
        ),
    )
    found = [jax.lax.stop_gradient(env[number]) for number in numbers]
    return [
        jax.lax.with_sharding_constraint(_dealt(leaf, handed, edits.parts), sharding)
        for leaf, handed, sharding in zip(found, edits.values, cut, strict=True)
    ]


def as_it_is(traced: LossJaxpr, dims: Mapping[str, int | None], shardings: Tree) -> Contribution:
    """A loss whose mean over microbatches is that of the whole batch."""
    return Contribution(
        traced=traced,
        prologue=lambda batch: batch,
        dims=dims,
        shardings=shardings,
        finish=lambda results, gradients: (results, gradients),
    )
