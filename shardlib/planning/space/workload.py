"""A problem prepared for pricing: coloured, split into items, for the compiler of one vendor's
chips. Shared by all searches of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardlib.compact import compact
from shardlib.cost.items.stored_parameters import parameter_segments, stored_items
from shardlib.cost.pricing.sums import Model
from shardlib.cost.step.routed_experts import expert_colour
from shardlib.cost.step.step_facts import Facts
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.cost.terms.framework_profiles import XLA
from shardlib.cost.terms.frameworks import Framework
from shardlib.cost.terms.terms import Item
from shardlib.decisions.dtypes import Dtypes
from shardlib.graph.graph import ITEMSIZE
from shardlib.graph.problem import Problem
from shardlib.planning.decisions.dtypes import under
from shardlib.planning.space.cost_tables import Ledger
from shardlib.planning.space.programs import Program, program_of
from shardlib.planning.space.remat_policies import names_of_classes
from shardlib.propagation.colours import Colouring, colour
from shardlib.propagation.ties import stack_dims


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A problem prepared for pricing.

    Attributes:
        problem: the model.
        vendor: of the chips that the kernels are for.
        colouring: its colours.
        frozen: (path, dim) that count layers.
        expert: colour of experts that tokens can be routed to; None without.
        programs: by remat policy and by whether tokens are routed.
        rest: items of stored parameters.
        model: layers, and bytes of the batch.
        profile: the software.
        framework: what it is the profile of, and can do; None for programs of shardlib.
        beside: the same problem under a profile that computes attention otherwise, whose tallies
            are shared.
    """

    problem: Problem
    vendor: str
    colouring: Colouring
    frozen: frozenset[tuple[str, int]]
    expert: str | None
    programs: Mapping[tuple[str, bool], Program]
    rest: list[Item]
    model: Model
    profile: FrameworkProfile = XLA
    framework: Framework | None = None
    beside: Workload | None = None

    __repr__ = compact

    @cached_property
    def ledger(self) -> Ledger:
        """The tallies of all programs, made as they are asked for and shared by all searches."""
        work = {key: program.work for key, program in self.programs.items()}

        def points() -> dict[tuple[str, bool], tuple[list[Item], ...]]:
            return {key: program.points for key, program in self.programs.items()}

        beside = None
        if self.beside is not None and self.profile == replace(
            self.beside.profile, attention=self.profile.attention
        ):
            beside = self.beside.ledger
        return Ledger(
            work,
            points,
            self.rest,
            len(self.counts),
            self.profile,
            self._fixed,
            beside=beside,
        )

    @property
    def _fixed(self) -> frozenset[str]:
        """Colours that other axes than tensor shard."""
        return frozenset({self.colouring.batch_colour or "", self.colouring.sequence_colour or ""})

    @cached_property
    def moments(self) -> Ledger:
        """The tallies of every program's moments, by moment what is saved and then its points; its
        measures are in the book of `ledger`.
        """
        return self._of(
            {
                key: tuple(
                    items for moment in program.moments for items in (moment.stacks, *moment.points)
                )
                for key, program in self.programs.items()
            }
        )

    @cached_property
    def stacks(self) -> Ledger:
        """The tallies of what every program's loops over layers have saved when the forward pass
        ends; its measures are in the book of `ledger`.
        """
        return self._of(
            {key: (program.moments[0].stacks,) for key, program in self.programs.items()}
        )

    def _of(self, points: dict[tuple[str, bool], tuple[list[Item], ...]]) -> Ledger:
        return Ledger(
            {}, lambda: points, [], len(self.counts), self.profile, self._fixed, beside=self.ledger
        )

    @cached_property
    def by_class(self) -> bool:
        """Whether layer groups can follow remat policies of their own: where there are
        several, and all programs have the same loops.
        """
        loops = {program.loops for program in self.programs.values()}
        return len(loops) == 1 and () not in loops

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """What people call each class: what the paths of its parameters begin with, or its place
        among the classes.
        """
        first = next(iter(self.programs.values()))
        segments = parameter_segments(first.facts)
        return names_of_classes(
            [
                [path for path, segment in segments.items() if segment == k]
                for k in range(len(self.counts))
            ]
        )

    def under(self, dtypes: Dtypes, attention: str = "traced") -> Workload:
        """The same model as other decisions change what is computed, prepared once.

        Args:
            dtypes: in other dtypes (`shardlib.planning.decisions.dtypes`).
        """
        kind = (
            "traced"
            if attention == "traced" or self.profile.attention != "traced"
            else "blocks"
            if attention == "blocks"
            else "fused"
        )
        if (dtypes, kind) not in self._under:
            problem, profile = under(dtypes, self.problem, self.profile)
            changed = profile if kind == "traced" else replace(profile, attention=kind)
            prepared_other = self._under.get((dtypes, "fused" if kind == "blocks" else "blocks"))
            if kind == "traced" and not dtypes:
                workload = self
            elif kind != "traced" and prepared_other is not None:
                workload = prepared_other.attending(kind)
            else:
                beside = None if dtypes else self
                workload = prepare(problem, self.vendor, changed, self.framework, beside)
            self._under[dtypes, kind] = workload
        return self._under[dtypes, kind]

    def attending(self, kind: str) -> Workload:
        """The same model whose attention is computed by another kernel, in whose memory alone it
        differs.
        """
        profile = replace(self.profile, attention=kind)
        programs = {
            key: replace(program, profile=profile) for key, program in self.programs.items()
        }
        return replace(self, profile=profile, programs=programs, beside=self)

    @cached_property
    def _under(self) -> dict[tuple[Dtypes, str], Workload]:
        return {}

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each class."""
        return self.model.counts


def prepare(
    problem: Problem,
    vendor: str = "nvidia",
    profile: FrameworkProfile = XLA,
    framework: Framework | None = None,
    beside: Workload | None = None,
) -> Workload:
    """Colours a problem and splits its cost into items.

    Args:
        framework: what the profile is of; None for programs of shardlib.
    """
    colouring = colour(problem) if beside is None else beside.colouring
    frozen = frozenset(stack_dims(problem)) if beside is None else beside.frozen
    first = next(iter(problem.steps))
    expert = expert_colour(problem.steps[first].graph, colouring.steps[first])
    programs = {
        (policy, routes): program_of(
            problem, colouring, frozen, profile, vendor, policy=policy, routes=routes
        )
        for policy in problem.steps
        for routes in ((False, True) if expert else (False,))
    }
    facts = programs[first, False].facts
    segments = parameter_segments(facts)
    batch_bytes = float(
        sum(math.prod(shape) * ITEMSIZE.get(dtype, 4) for _, shape, dtype, _ in problem.batch)
        + sum(rows.bytes for _, rows in problem.rows.by_row)
    )
    return Workload(
        problem=problem,
        vendor=vendor,
        colouring=colouring,
        frozen=frozen,
        expert=expert,
        programs=programs,
        rest=stored_items(problem.parameters, colouring.parameters, frozen, segments),
        profile=profile,
        framework=framework,
        beside=beside,
        model=Model(
            counts=facts.layers.counts,
            batch_bytes=batch_bytes,
            state_bytes=problem.state_bytes,
            largest_end=_largest_end(problem, segments),
            reduction=_reduction(profile, problem),
            working=_working(problem),
            head_layers=_head_layers(facts),
        ),
    )


def _largest_end(problem: Problem, segments: Mapping[str, int]) -> float:
    """The largest share that one array has of the parameters outside of all layers: about 1/2 with
    an embedding and a head, 1 where one array is both.
    """
    sizes = [
        float(math.prod(parameter.shape))
        for parameter in problem.parameters
        if parameter.path not in segments
    ]
    return max(sizes) / sum(sizes) if sizes else 1.0


def _working(problem: Problem) -> float:
    """Bytes of a parameter as matmuls read it, over those as stored."""
    elements = [float(math.prod(parameter.shape)) for parameter in problem.parameters]
    stored_bytes = sum(
        size * ITEMSIZE[parameter.dtype]
        for size, parameter in zip(elements, problem.parameters, strict=True)
    )
    return sum(elements) * ITEMSIZE[problem.compute_dtype] / stored_bytes if stored_bytes else 1.0


def _head_layers(facts: Facts) -> float:
    """Work of the matmuls of weights outside of all layers, over that of the layers' mean."""
    flops = [0.0, 0.0]
    for op in facts.graph.ops:
        if op.category == "matmul" and (
            facts.weights.keys() & set(op.operands) or facts.gradients & set(op.results)
        ):
            inside = facts.layers.segment(op.region) >= 0
            flops[inside] += op.flops * facts.graph.trips(op.region)
    return flops[0] * sum(facts.layers.counts) / flops[1] if flops[1] else 0.0


def _reduction(profile: FrameworkProfile, problem: Problem) -> float:
    """Bytes of a gradient in communication under a profile over those as traced, in the dtype of
    the matmuls.
    """
    return (
        ITEMSIZE[profile.reduction_dtype] / ITEMSIZE[problem.compute_dtype]
        if profile.reduction_dtype
        else 1.0
    )
