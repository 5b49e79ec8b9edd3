"""The value that everything else is about: one complete decision on how to run a training step.

A `Plan` is frozen, hashable, printable and comparable; JSON goes both ways. It contains no JAX
object, so a plan made on a laptop is the same plan on the pod, and it is part of the lowered
program's identity.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from shardlib.decisions.pin_words import aliased
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.decisions.readers import PinValue
from shardlib.errors import ArgumentError, InfeasibleError, PinError, PlanError
from shardlib.hardware.topology import Topology, TopologyLike
from shardlib.planning.answers.alternative import Alternative
from shardlib.planning.answers.answers import Answers
from shardlib.planning.answers.constraint import Constraints
from shardlib.planning.answers.kernels import Kernels
from shardlib.planning.answers.relocation import Replan
from shardlib.planning.answers.shadow_prices import Sensitivity
from shardlib.planning.decisions.candidate import Candidate
from shardlib.planning.decisions.plan_data import plan_to_data
from shardlib.planning.decisions.stored import read
from shardlib.planning.emission.emit import emit
from shardlib.planning.emission.shardings import AxisSizes, PlanShardings, plan_shardings
from shardlib.planning.pictures.shown_plan import ShownPlan
from shardlib.planning.pictures.timelines import ShownTimeline, shown
from shardlib.planning.space.workload import Workload
from shardlib.planning.text.predicted_timeline import predicted
from shardlib.untrusted import parse_json
from shardlib.untrusted.json_types import Json


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A plan that fits, in its place among all that do.

    Attributes:
        candidate: what it decides.
        seconds: predicted time of a step.
        peak_bytes: predicted bytes per device.
        make: builds the plan; its gap is how much slower than the fastest it is predicted to be.
    """

    candidate: Candidate
    seconds: float
    peak_bytes: float
    make: Callable[[], Plan]


class Source(Protocol):
    """What a plan was made from, and the questions that it can therefore answer;
    `shardlib.planning.planner` has it.

    Attributes:
        load, topology, pins: the prepared problem, the machine, and decisions fixed by hand.
        written: (plan, mode of its mesh axes) -> a file of plain JAX; None where the model is not
            at hand.
    """

    @property
    def load(self) -> Workload: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def pins(self) -> Pins: ...

    @property
    def written(self) -> Callable[[Plan, str], str] | None: ...
    def under(self, pins: Pins) -> Source:
        """The same problem under other pins."""
        ...

    def search(self, topology: Topology, pins: Pins) -> Plan:
        """The best plan for the same problem, see `shardlib.planning.planner.search`."""
        ...

    def ranked(self, topology: Topology, *, slack: float, front: bool = False) -> Iterator[Ranked]:
        """Plans for the same problem under the same pins, see
        `shardlib.planning.planner.ranked`.
        """
        ...

    def on_all_devices(self) -> Plan:
        """The best plan that leaves no device idle."""
        ...

    def why_not(self, pin: PinMapping) -> Plan:
        """The best plan under other pins."""
        ...

    def alternatives(self, plan: Plan, count: int) -> tuple[Alternative, ...]:
        """See `Plan.alternatives`."""
        ...

    def constraints(self, plan: Plan) -> Constraints:
        """See `Plan.constraints`."""
        ...

    def sensitivity(self, plan: Plan) -> Sensitivity:
        """See `Plan.sensitivity`."""
        ...

    def kernels(self, plan: Plan) -> Kernels:
        """See `Plan.kernels`."""
        ...

    def replan(
        self, plan: Plan, topology: TopologyLike, *, lost: Iterable[int], anew: bool
    ) -> Replan[Plan]:
        """See `Plan.replan`."""
        ...


def source_of(plan: Plan) -> Source:
    """What the plan was made from.

    Raises:
        PlanError: the plan was read from a file and carries no model.
    """
    if plan.source is None:
        raise PlanError(
            "this plan was read from a file and does not carry its model\nTry: the command line"
            " (`shardlib explain plan.json ...`), which traces the model again; or plan again"
        )
    return plan.source


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(ShownPlan):
    """A complete decision for one model, batch and topology; what it consists of is listed at
    `PlanData`.

    Attributes:
        source: the prepared problem and the questions it answers; not part of the value, and absent
            from JSON.
    """

    source: Source | None = field(default=None, compare=False, repr=False)

    def why_not(self, **pin: PinValue) -> str:
        """What the best plan under other pins would cost: `plan.why_not(tensor=16)`,
        `plan.why_not(remat="full")`.

        Args:
            pin: decisions by their words, as for `shardlib.plan`; a mesh axis by its own name. They
                take the place of pins of the same words, an axis that of all; other pins stay.

        Returns:
            The difference to this plan as text, or why there is no such plan.

        Raises:
            PinError: a pin is misspelt, contradicts a pin of this plan that stays, or allows no
                plan; or the plan was read from a file and does not carry its model.
        """
        if self.source is None:
            raise PinError(
                "this plan was read from a file and does not carry its model\nTry: `shardlib"
                " explain plan.json --why-not ...`, or plan again"
            )
        try:
            other = self.source.why_not(aliased(pin))
        except InfeasibleError as error:
            return str(error)
        return self.diff(other)

    def alternatives(self, count: int = 10) -> tuple[Alternative, ...]:
        """The plans that come next, the fastest first, with what each decides differently; equally
        fast ones are one entry.

        Args:
            count: how many at most, up to 1000: each becomes a whole plan.

        Returns:
            The alternatives, each with its seconds a step and peak bytes per device.

        Raises:
            ArgumentError: `count` is no integer from 0 to 1000.
            PlanError: the plan was read from a file and does not carry its model.
        """
        return source_of(self).alternatives(self, count)

    def constraints(self) -> Constraints:
        """What holds the plan back: memory, pins, and sizes that divide no further.

        Returns:
            The constraints, the one that costs most first, with the seconds of a step without it;
            `print` shows them as text.

        Raises:
            PlanError: the plan was read from a file and does not carry its model.
        """
        return source_of(self).constraints(self)

    def sensitivity(self) -> Sensitivity:
        """What more memory and faster links are worth, and the regret if a figure of the machine is
        a tenth lower.

        Returns:
            Shadow prices of memory and links, and shocks with the seconds of a step that each
            loses; `print` shows them as text.

        Raises:
            PlanError: the plan was read from a file and does not carry its model.
        """
        return source_of(self).sensitivity(self)

    def kernels(self) -> Kernels:
        """The kernels of a step beside the roofline of the chip; `print` shows the slowest.

        Raises:
            PlanError: the plan was read from a file and does not carry its model.
        """
        return source_of(self).kernels(self)

    def _asked(self) -> Answers:
        return Answers(kernels=None if self.source is None else self.kernels())

    def timeline(self) -> ShownTimeline:
        """When each pipeline stage does what, in predicted seconds, and what islands exchange, in
        the order of use; `print` writes it, `svg()` draws it.

        Raises:
            PlanError: the plan has no stages and no such exchange, has `remat_classes`, or was
                written before estimates knew what a stage does.
        """
        forward = None if self.source is None else self.source.load.problem.forward
        return shown(predicted(self, forward))

    def replan(
        self, topology: TopologyLike, *, lost: Iterable[int] = (), anew: bool = False
    ) -> Replan[Plan]:
        """The best plan for the same global batch on another machine, such as this one without some
        hosts, and what must move.

        Args:
            topology: the machine that is left, a spelling or a value.
            lost: numbers of the devices of the old machine that are gone; by default the last ones.
            anew: search the whole space; otherwise remat policy, schedule and the like stay as long
                as that fits, which is quicker.

        Returns:
            The new plan, and for every array the bytes that each device must receive; `print` shows
            it as text.

        Raises:
            PlanError: the plan was read from a file and does not carry its model.
            TopologyError: the topology does not parse, or `lost` are none of the old machine.
            PinError: pins of the plan allow no plan there.
            InfeasibleError: nothing fits there.
        """
        return source_of(self).replan(self, topology, lost=lost, anew=anew)

    def emit(self, form: str | None = None, *, mode: str = "auto") -> str:
        """The configuration of the plan's framework, or the plan as a file of plain JAX
        (`docs/frameworks.md`).

        Args:
            form: "jax" for a Python file with the mesh, the sharding of every array by path,
                constraints of activations by name and the remat policy, which needs no shardlib;
                None for the configuration of the framework that the plan is made for.
            mode: of the mesh axes in such a file: "auto", or "explicit" for a step that takes and
                gives arrays with their shardings in their types, for programs in JAX's explicit
                mode.

        Raises:
            ArgumentError: another mode.
            PlanError: there is no framework, or it has no words for the plan; or the plan has what
                plain JAX cannot express, or carries no model; all reasons are listed.
        """
        if mode not in ("auto", "explicit"):
            raise ArgumentError(f"mode is {mode!r}\nTry: 'auto' or 'explicit'")
        if form is None:
            return emit(self)
        if form != "jax":
            raise PlanError(f"no plan is written as {form!r}\nTry: 'jax'")
        if self.framework is not None:
            raise PlanError(
                f"the plan is made for {self.framework.name}\nTry: plan.emit(), or a plan without"
                " framework="
            )
        written = source_of(self).written
        if written is None:
            raise PlanError(
                "only plans of a model and its loss, or of a step, are written as plain JAX\nTry:"
                " shardlib.plan(init, loss, ...).emit('jax'), or"
                " shardlib.compile_step(init, step, ...).plan.emit('jax')"
            )
        return written(self, mode)

    def shardings(self, mesh: AxisSizes) -> PlanShardings:
        """The sharding of every parameter, gradient, optimizer state and array of the batch by
        path, over a mesh of the user's.

        Args:
            mesh: a `jax.sharding.Mesh`, or an abstract one, that has the axes of the plan that are
                larger than 1 (`jax.make_mesh((4, 2), ("fsdp", "tensor"))`); others are free.

        Raises:
            LayoutError: the mesh lacks axes of the plan, or has them in other sizes.
        """
        return plan_shardings(self, mesh)

    def to_json(self) -> str:
        """The plan as JSON text, with a checksum of its content; `from_json` gives an equal
        plan.
        """
        return json.dumps(plan_to_data(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, *, changed: bool = False) -> Plan:
        """Reads a plan.

        A plan that was changed since `to_json` wrote it is refused: its estimate, its search and
        its findings are about the plan as it was.

        Args:
            text: what `to_json` gave.
            changed: take it all the same, with a finding that says so. Its values still have to be
                values of a plan.

        Returns:
            An equal plan, but for `source`: it cannot be asked what needs the model.

        Raises:
            PlanError: the text is no plan of this format, it was changed, or values that no plan
                has; all of them are listed.
        """
        hint = "the text itself, as shardlib.Plan.from_json(Path('plan.json').read_text())"
        return plan_from_data(parse_json(text, "the plan", PlanError, hint=hint), changed=changed)


def plan_from_data(data: Json, *, changed: bool = False) -> Plan:
    """Reads what `plan_to_data` wrote; see `Plan.from_json`.

    Args:
        data: the plan as plain lists, dicts, strings and numbers.
        changed: take a plan that was changed since, with a finding that says so.

    Raises:
        PlanError: it is no plan of this format, it was changed since, or values that no plan has;
            all of them are listed.
    """
    return read(Plan, data, changed=changed)
