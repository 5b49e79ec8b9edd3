"""A quote as arrays: what a price depends on, so that it can be asked again under other figures a
thousand times faster than by tracing, and without the traced model.

The price of a plan is a sum of kernels and collectives before anything is hidden. Of every distinct
kernel there are three numbers - seconds of its matrix work at the full peak, of its vector work, of
its traffic at the full bandwidth - and how often each segment of the step runs it; of collectives
their counts and bytes. A figure of `shardlib.cost.roofline.Efficiency` divides or scales
columns of that table, and the rest is the cost model's own `sums` and `combine`. The result is that
of `Quote.seconds` but for rounding, which `tests/benchmarks/test_published_unseen.py` holds for random figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.published.pricing import Quote
from benchmarks.published.unseen.kernels import FITTED, UNIT, Columns, Kernels, kernels_of
from shardlib.cost.collectives import LinkCosts
from shardlib.cost.framework import FrameworkProfile
from shardlib.cost.pricing import combine
from shardlib.cost.stages import Meshes, ModelFacts, Plans, step_costs
from shardlib.cost.tables import (
    ROWS,
    KernelSeconds,
    LaunchSeconds,
    Measure,
    Pricer,
    coefficients,
    evaluate,
)
from shardlib.cost.terms import Degrees, Item
from shardlib.decisions.table import Decisions
from shardlib.machines.topology import Topology, place
from shardlib.propagation.colours import Choice

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Tallied:
    """A quote without its model.

    Attributes:
        topology: the machine, of boundless memory.
        stack, model, how: the software, the layers, and the decisions.
        kernels: the kernels.
        fixed: quantities of the step that no figure changes, array [segments, rows, 1].
        launches: launches by the host, of the same shape.
        rest: quantities of what is stored.
        used: names of the figures that the price depends on.
        factor: seconds of the quote over those of the arrays.
    """

    topology: Topology
    stack: FrameworkProfile
    model: ModelFacts
    how: Decisions
    kernels: Kernels
    fixed: Array
    launches: Array
    rest: Array
    used: tuple[str, ...]
    factor: float = 1.0
    _links: dict[tuple[float, float], Meshes] = field(
        default_factory=dict[tuple[float, float], Meshes], compare=False, repr=False
    )

    def seconds(self, values: Mapping[str, Any]) -> float:
        """Predicted seconds of a step with some figures replaced, as `Quote.seconds`."""
        return float(self.many([values])[0])

    def many(self, settings: Sequence[Mapping[str, Any]]) -> Array:
        """Predicted seconds of a step under several settings of the figures that are fitted; all
        others are those of the first.
        """
        pricer = Pricer(replace(self.topology, efficiency=settings[0]), self.stack)
        of = _columns(settings, pricer)
        kernels = self.kernels.seconds(of, pricer.topology.chip.launch_s, self.stack.unfused_loss)
        work = self.fixed + self.launches * of["dispatch_s"]
        work = work + (self.kernels.times @ kernels).reshape(work.shape)
        c = self._places(of)
        totals = combine(
            step_costs(
                work, self.rest[..., np.zeros(len(c), dtype=np.int64)], [], self.model, pricer, c
            ),
            Plans(decisions=self.how, model=self.model, pricer=pricer, meshes=c),
        )
        parts, figures = totals.seconds, pricer.efficiency
        slots = c.micro + self.how.accumulation * (c.stage - 1)
        return self.factor * (
            totals.step_seconds
            + parts["optimizer"] * (figures.update_share / of["optimizer"] - 1)
            + (of["microbatch_s"] - figures.microbatch_s) * slots
        )

    def _places(self, of: Columns) -> Meshes:
        """The candidate once for each setting, with the links as fast as that says."""
        found: list[Meshes] = []
        for key in zip(of["fast"].tolist(), of["slow"].tolist(), strict=True):
            if key not in self._links:
                values = {"fast": key[0], "slow": key[1]}
                pricer = Pricer(replace(self.topology, efficiency=values), self.stack)
                self._links[key] = _candidate(self.how, pricer)
            found.append(self._links[key])
        first, count = found[0], len(found)
        at = np.zeros(count, dtype=np.int64)
        degrees = first.degrees.take(at)
        joined = LinkCosts(
            latency=np.concatenate([one.links.latency for one in found], axis=1),
            per_byte=np.concatenate([one.links.per_byte for one in found], axis=1),
        )
        return Meshes(
            sizes={axis: size[at] for axis, size in first.sizes.items()},
            micro=first.micro[at],
            links=joined,
            degrees=degrees,
            degrees_index=np.arange(count),
        )

    def figures(self) -> tuple[str, ...]:
        """Figures that the price depends on."""
        return self.used


def _columns(settings: Sequence[Mapping[str, Any]], pricer: Pricer) -> Columns:
    """Every figure that is fitted as an array over the settings."""
    own = pricer.efficiency
    found = {
        name: np.array([float(one.get(name, getattr(own, name)) or 0.0) for one in settings])
        for name in FITTED
    }
    for name, other in (("eight_bit", "matmul"), ("gather", "memory"), ("optimizer", "memory")):
        said = getattr(own, name)
        if name != "eight_bit":
            found[name] = found[other] if said is None else np.full(len(settings), float(said))
        elif said is None:
            found[name] = np.where(found[name] > 0, found[name], found[other])
    return found


def tallied(quote: Quote, figures: Mapping[str, Any]) -> Tallied:
    """The quote as arrays; `figures` are those of the chip that are never fitted, such as tiles of
    matmuls. Where some layers rematerialise alone, or values are in host memory, it is the plan in
    which all do and none are, scaled to the price of the quote under `figures`.
    """
    how, load, choice = quote.candidate.decisions, quote.load, quote.candidate.choice
    if how.remat_layers or how.offload:
        plain = replace(how, remat_layers=0, offload=())
        alike = replace(quote, candidate=replace(quote.candidate, decisions=plain))
        found = tallied(alike, figures)
        setting = {**figures, "misaligned": figures.get("misaligned", 1.0)}
        return replace(found, factor=quote.seconds(setting) / found.seconds(setting))
    pricer = Pricer(replace(quote.topology, efficiency={**figures, **UNIT}), load.profile)
    c, classes = _candidate(how, pricer), len(load.layer_counts)
    work = load.programs[how.remat, quote.candidate.routes].work
    kernels, parts, hosts = _split(work, choice, load.profile, classes)
    fixed, launches = (np.zeros((classes + 2) * ROWS) for _ in range(2))
    for row, measure, amount in parts:
        fixed[row] += amount * _value(measure, c.degrees, pricer)
    for row, amount in hosts:
        launches[row] += amount
    shape = classes + 2, ROWS, 1
    return Tallied(
        topology=quote.topology,
        stack=load.profile,
        model=load.model,
        how=how,
        kernels=kernels_of(kernels, c.degrees, pricer, (classes + 2) * ROWS),
        fixed=fixed.reshape(shape),
        launches=launches.reshape(shape),
        rest=pricer.tally_terms(
            ((item.segment, term) for item in load.stored for term in item.terms(choice)),
            c.degrees,
            classes,
        ),
        used=quote.figures(),
    )


def _candidate(how: Decisions, pricer: Pricer) -> Meshes:
    placed = place(how.mesh, pricer.topology, how.axis_order)
    assert placed is not None, "the candidate was priced on this machine"
    return Meshes.placed([(how.mesh, placed)], [how.microbatches], pricer.topology)


def _split(
    items: list[Item], choice: Choice, stack: FrameworkProfile, classes: int
) -> tuple[
    dict[KernelSeconds, list[tuple[int, float]]],
    list[tuple[int, Measure, float]],
    list[tuple[int, float]],
]:
    """Charges of items: (row, times) by kernel; (row, measure, amount) of what no figure changes;
    (row, launches) of the host.
    """
    kernels: dict[KernelSeconds, list[tuple[int, float]]] = {}
    parts: list[tuple[int, Measure, float]] = []
    hosts: list[tuple[int, float]] = []
    for item in items:
        for term in item.terms(choice):
            for row, measure, amount in coefficients(item.segment, term, stack):
                at = item.segment % (classes + 2) * ROWS + row
                if isinstance(measure, KernelSeconds):
                    kernels.setdefault(measure, []).append((at, amount))
                elif any(
                    isinstance(multiplier, LaunchSeconds) for multiplier in measure.multipliers
                ):
                    hosts.append((at, amount))
                else:
                    parts.append((at, measure, amount))
    return kernels, parts, hosts


def _value(measure: Measure, degrees: Degrees, pricer: Pricer) -> float:
    assert not isinstance(measure, KernelSeconds)
    return float(evaluate(measure, degrees, pricer.efficiency)[0])
