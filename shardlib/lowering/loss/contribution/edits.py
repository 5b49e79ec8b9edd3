"""What changes in the program of a microbatch, and the run of the program with the changes in it.

Operands are multiplied by powers of the number of microbatches, or replaced by what the whole batch
says beforehand; every equation stays where it is, so that its path does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardlib.annotation.activations import no_mesh
from shardlib.annotation.trees.paths import Tree
from shardlib.layout import Layout
from shardlib.lowering.loss.contribution.rewriting import (
    Place,
    Rewriting,
    dealt_by_rows,
    numbers_of,
    part_of_value,
    times,
)
from shardlib.lowering.loss.contribution.share import Contribution, Share, Whole
from shardlib.lowering.mesh.shardings import named_sharding
from shardlib.lowering.reading.traced_loss import LossJaxpr
from shardlib.lowering.runtime.random_keys import BatchDims
from shardlib.planning.plan import Plan
from shardlib.tracing.program import Program, flatten
from shardlib.tracing.rewriting.dependence import needed
from shardlib.tracing.rewriting.interpreter import evaluate_equations
from shardlib.tracing.rewriting.walk import Walk
from shardlib.tracing.rows.draws import Draw
from shardlib.tracing.rows.handed import Handed
from shardlib.tracing.rows.kinds import Kind
from shardlib.tracing.rows.proof import Proof


@dataclass(frozen=True, kw_only=True, eq=False)
class Edits:
    """What changes in the program of a microbatch.

    Attributes:
        parts: number of microbatches.
        factors: of operands.
        handed: operands that are handed in.
        results: what becomes of each result: a factor, a value that is handed in, or "vouched" for
            a weighted mean; nothing where there is none.
        draws: by path, those that are drawn at the positions of the rows in the whole batch.
    """

    parts: int
    factors: Mapping[Place, float] = field(default_factory=dict)
    handed: Mapping[Place, Handed] = field(default_factory=dict)
    results: tuple[float | Handed | str, ...] = ()
    draws: Mapping[str, Draw] = field(default_factory=dict)

    @staticmethod
    def of(proof: Proof, parts: int, full_loss: Whole, draws: Mapping[str, Draw]) -> Edits:
        """What must be changed in a loss whose terms are sums over rows."""
        analysis = proof.analysis
        assert analysis is not None
        states = len(full_loss.names.states)
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
            draws=draws,
        )

    def __bool__(self) -> bool:
        return bool(
            self.factors
            or self.handed
            or self.draws
            or any(result != 1.0 for result in self.results)
        )

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
        full_loss: Whole,
        share: Share,
        mesh: Mesh | AbstractMesh,
    ) -> Contribution:
        """The changed loss, and what belongs to it."""
        part, dims, shardings = share.traced, share.dims, share.shardings
        closed, vouched = part.closed_jaxpr, sum(result == "vouched" for result in self.results)
        program = flatten(full_loss.traced.closed_jaxpr, remat=True)
        numbers = numbers_of(program, self.values)
        avals = [
            part_of_value(program.avals[number], handed, self.parts)
            for number, handed in zip(numbers, self.values, strict=True)
        ]
        places = [handed.dim for handed in self.values]
        if self.draws:
            avals.append(jax.ShapeDtypeStruct((full_loss.size // self.parts,), jnp.uint32))
            places.append(0)

        def run(arguments: list[Any], handed: list[Any]) -> Any:
            values = dict(zip(self.values, handed, strict=False))
            rewriting = Rewriting(
                factors=self.factors,
                handed=self.handed,
                values=values,
                sums=[],
                draws=self.draws,
                rows=handed[-1] if self.draws else None,
                parts=self.parts,
            )
            outputs, weights = self._results(rewriting.run(closed, arguments, "", ""), rewriting)
            loss, (metrics, state) = jax.tree.unflatten(part.out_tree, outputs)
            return loss, ({"metrics": metrics, "weights": weights} if vouched else metrics, state)

        avals_in = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.in_avals]
        with no_mesh():
            again, shapes = jax.make_jaxpr(run, return_shape=True)(avals_in, avals)
        traced = LossJaxpr(closed_jaxpr=again, out_tree=jax.tree.structure(shapes))
        finish = self.finish(part, vouched)
        if not avals:
            return Contribution(
                traced=traced,
                prologue=lambda state, batch: batch,
                dims=dims,
                shardings=shardings,
                finish=finish,
            )
        inner = {f"batch.0{path.removeprefix('batch')}": dim for path, dim in dims.items()}
        more = {f"batch.1.{index}": dim for index, dim in enumerate(places)}
        rows = _row_axes(plan, dims)
        layouts = tuple(
            Layout(*(rows if dim == place else () for dim in range(len(aval.shape))))
            for place, aval in zip(places, avals, strict=True)
        )
        cut = [named_sharding(mesh, layout) for layout in layouts]
        return Contribution(
            traced=traced,
            prologue=lambda state, batch: (
                batch,
                _made(program, numbers, self, full_loss, state, batch, cut),
            ),
            dims={**inner, **more},
            shardings=(shardings, cut),
            finish=finish,
            handed=layouts,
        )

    def _results(
        self, outputs: list[jax.Array], rewriting: Rewriting
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Results of a microbatch, and the weights of those that are weighted means."""
        values, weights = list[Any](), list[Any]()
        results = self.results or (1.0,) * len(outputs)
        for output, result in zip(outputs, results, strict=True):
            if result == "vouched":
                total, weight = next(
                    (total, weight)
                    for product, total, weight in rewriting.sums
                    if product is output
                )
                values.append(total)
                weights.append(weight.astype(total.dtype))
            elif isinstance(result, Handed):
                values.append(rewriting.values[result])
            else:
                assert isinstance(result, float)
                values.append(times(output, result))
        return values, weights

    def finish(self, part: LossJaxpr, vouched: int) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
        """Divides weighted means, and gives counts and truth values back in their dtypes, which
        means over microbatches are not.

        Returns:
            (results, gradients) of all microbatches -> the same.
        """
        avals = list(part.closed_jaxpr.out_avals)

        def finish(results: Tree, gradients: Tree) -> tuple[Tree, Tree]:
            loss, (metrics, state) = results
            weights = list(metrics["weights"]) if vouched else []
            metrics = metrics["metrics"] if vouched else metrics
            leaves, structure = jax.tree.flatten((loss, metrics))
            divisor = None
            for index, result in enumerate(self.results[: len(leaves)]):
                if result == "vouched":
                    weight = weights.pop(0)
                    divisor = weight if index == 0 else divisor
                    leaves[index] = leaves[index] / weight.astype(leaves[index].dtype)
                elif leaves[index].dtype != avals[index].dtype and not jnp.issubdtype(
                    avals[index].dtype, jnp.inexact
                ):
                    leaves[index] = jnp.round(leaves[index]).astype(avals[index].dtype)
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


def _factor(exponent: Fraction, parts: int) -> float:
    return float(parts) ** float(exponent)


def _result(kind: Kind, parts: int) -> float | Handed | str:
    """What makes the mean over microbatches of a result that of the whole batch."""
    if kind.vouched:
        return "vouched"
    if kind.family == "data":
        assert kind.origin is not None
        return Handed(origin=kind.origin)
    assert kind.family in ("free", "sum", "row") and kind.power is not None, kind
    return _factor(kind.power + (1 if kind.family == "sum" else 0), parts)


def _row_axes(plan: Plan, dims: BatchDims) -> tuple[str, ...]:
    """The mesh axes that shard the rows of the batch."""
    layouts = dict(plan.batch_layouts)
    axes = [
        tuple(layouts[path])[dim]
        for path, dim in dims.items()
        if isinstance(dim, int) and path in layouts and dim < len(tuple(layouts[path]))
    ]
    return axes[0] if axes else ()


def _made(
    program: Program,
    numbers: Sequence[int],
    edits: Edits,
    full_loss: Whole,
    state: Tree,
    batch: Tree,
    cut: Sequence[NamedSharding],
) -> list[jax.Array]:
    """What the whole batch says beforehand, and the positions of its rows where a microbatch draws.
    Nothing of it depends on parameters, so that zeros stand for these where a loop makes other
    things too.
    """
    first = full_loss.inputs.parameters
    leaves = [*jax.tree.leaves(state)[: full_loss.inputs.states], *jax.tree.leaves(batch)]
    equations, reads = needed(program.equations, numbers)
    env = dict(program.constants)
    for index, number in enumerate(program.inputs):
        if number in reads or number in numbers:
            aval = program.avals[number]
            env[number] = (
                leaves[index - first] if index >= first else jnp.zeros(aval.shape, aval.dtype)
            )
    evaluate_equations(
        equations,
        env,
        Walk(
            run=lambda equation, operands: (
                list(operands) if equation.name == "sharding_constraint" else None
            )
        ),
    )
    handed_over = [
        dealt_by_rows(jax.lax.stop_gradient(env[number]), handed, edits.parts)
        for number, handed in zip(numbers, edits.values, strict=True)
    ]
    if edits.draws:
        handed_over.append(jnp.arange(full_loss.size, dtype=jnp.uint32))
    return [
        jax.lax.with_sharding_constraint(leaf, sharding)
        for leaf, sharding in zip(handed_over, cut, strict=True)
    ]
