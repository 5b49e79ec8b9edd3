"""The `Plan`: all decisions on how to run a training step, with their predicted cost and the
certificate of the search.

A `Plan` is frozen, hashable, printable and comparable, and converts to and from JSON. It contains
no JAX object, so a plan made on a laptop is the same plan on the pod, and it is part of the lowered
program's identity. Explanations, pictures and further searches are functions of a plan, which its
methods import when called.

The JSON schema follows from the annotations of `Plan` and its parts (`shardlib.untrusted.data`), so
new fields are checked too; decisions must be legal pin values, and layouts must match shapes and
mesh. A checksum shows that a plan was not edited since it was written; it is not a signature. A
plan without one is treated as edited.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from shardlib.compact import compact
from shardlib.cost.pricing import MAX_PLAN_NUMBER, Estimate
from shardlib.decisions.pins import PinMapping, Pins, full_names
from shardlib.decisions.table import Decisions, PinValue, identity, illegal, plain_data
from shardlib.errors import (
    ArgumentError,
    InfeasibleError,
    MissingFileError,
    PinError,
    PlanError,
    TopologyError,
    raise_all,
)
from shardlib.exchanges import Exchange, read_exchange
from shardlib.findings import Finding
from shardlib.layout import ISLAND, Layout, LogicalAxes, MeshShape, Rules
from shardlib.machines.topology import Topology, TopologyLike
from shardlib.machines.topology import topology as find_topology
from shardlib.planner.parts import MESH, ActivationLayout, PricedPlan, Refined
from shardlib.schedules import SCHEDULES
from shardlib.untrusted.data import (
    Form,
    Json,
    JsonMapping,
    JsonObject,
    bounded,
    construct,
    parse_json,
    shown,
)
from shardlib.wings import required

if TYPE_CHECKING:
    from shardlib.planner.answers import (
        Alternative,
        Constraints,
        Kernels,
        Replan,
        RunCost,
        Sensitivity,
    )
    from shardlib.planner.compiler_flags import CompilerFlag, OptionValue
    from shardlib.planner.layouts import AxisSizes, PlanShardings
    from shardlib.planner.parts import Candidate
    from shardlib.planner.workload import Workload
    from shardlib.report.pages import Frame
    from shardlib.report.timelines import Timeline

#: Version of the JSON form; readers refuse others.
FORMAT = 1
#: Default seconds from a failure to the next step: starting processes, reading the newest
#: checkpoint, and compiling.
RESTART_S = 600.0
#: JSON forms of the types of a plan that are not dataclasses.
JSON_FORMS: Mapping[Any, Form] = {
    MeshShape: MESH,
    Layout: Form(plain=tuple[tuple[str, ...], ...], build=lambda dims: Layout(*dims)),
    Rules: Form(plain=tuple[tuple[str, tuple[str, ...]], ...], build=Rules.parse),
    Exchange: Form(plain=Mapping[str, str | int | float], build=partial(read_exchange, "exchange")),
}
MAKE_AGAIN = "make it again with `shardlib plan ... --out plan.json`"
#: Fields of a plan that are not in files.
NOT_STORED = ("source",)


class ChangedPlanError(PlanError):
    """A plan that was edited after it was written."""


@dataclass(frozen=True, kw_only=True)
class FrameworkJob:
    """The training framework for which a plan is made, and the sizes that its configuration needs.

    Attributes:
        name: name of the framework.
        profile: name of the framework profile with which the plan is priced.
        vendor: vendor of the chips.
        batch: examples per step.
        sequence: positions per example; 1 without a sequence.
        layers: layers of the largest layer group; 0 without layers.
        compute_dtype: dtype of the matmuls.
        experts: experts to which tokens are routed; 1 without.
    """

    name: str
    profile: str
    vendor: str
    batch: int
    sequence: int
    layers: int
    compute_dtype: str
    experts: int = 1

    def to_json(self) -> JsonObject:
        """The job as plain data."""
        return dict(self.__dict__)


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """The shardings of one parameter: stored, in compute, of its gradient and optimizer state.

    Attributes:
        path: tree path of the parameter, such as "layers.mlp.up.kernel".
        shape: elements per dim.
        dtype: stored dtype.
        colours: colour per dim; None where the dim has none.
        compute: compute sharding.
        rest: stored sharding, between uses (ZeRO 3: differs from `compute`).
        gradient: sharding of the gradient when the optimizer reads it.
        state: sharding of the optimizer state (ZeRO 1 and 2: differs from `rest`).
        role: see `shardlib.graph.Parameter`. A parameter that is not trained has no gradient and no
            optimizer state; `gradient` and `state` are then those of `compute` and `rest`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    colours: LogicalAxes
    compute: Layout
    rest: Layout
    gradient: Layout
    state: Layout
    role: str = "trained"

    @property
    def trained(self) -> bool:
        """True if the parameter has a gradient and optimizer state."""
        return self.role == "trained"


@dataclass(frozen=True, kw_only=True)
class Link:
    """A part of a mesh axis: positions along one dim of one link tier.

    Attributes:
        kind: kind of the tier: "torus", "mesh", "switch", "network" or "memory".
        ways: number of positions.
    """

    kind: str
    ways: int


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A plan that was not chosen, and why.

    Attributes:
        summary: its decisions other than the mesh, in a few words.
        reason: "slower" or "memory"; "bound" in older plan files.
        step_seconds: predicted step time, or its lower bound where `reason` is "bound".
        peak_bytes: predicted bytes per device; 0 where not evaluated.
    """

    mesh: MeshShape
    summary: str
    reason: str
    step_seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Search:
    """The certificate of a search.

    Attributes:
        evaluations: number of plans priced exactly.
        candidates: number of plans that were priced, plus number of entries (meshes with
            microbatches) that a bound excludes.
        lower_bound: seconds that no plan of the space can beat.
        gap: (chosen - lower_bound) / chosen; 0 is optimal within the cost model.
        seconds: wall time of the search.
        rejected: the best plan of each other mesh, fastest first.
        counts: number of plans or entries by outcome.
        landscape: priced plans, spread over time and memory, fastest first; includes all that need
            less memory than every faster one, to about 2%.
    """

    evaluations: int = 0
    candidates: int = 0
    lower_bound: float = 0.0
    gap: float = 0.0
    seconds: float = 0.0
    rejected: tuple[Rejected, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    landscape: tuple[PricedPlan, ...] = ()

    __repr__ = compact


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A plan that fits, as an entry of a ranking.

    Attributes:
        seconds: predicted step time.
        peak_bytes: predicted bytes per device.
        build: builds the plan; its gap is the fraction of its step time by which it is slower than
            the fastest plan.
    """

    candidate: Candidate
    seconds: float
    peak_bytes: float
    build: Callable[[], Plan]


class Source(Protocol):
    """The problem from which a plan was made, and searches for it; implemented by
    `shardlib.planner.search.PlanSource`.

    Attributes:
        workload, topology, pins: the prepared problem, the machine, and decisions fixed by hand.
        plain_jax: (plan, mode of its mesh axes) -> source of a plain JAX file; None where the model
            is not available.
    """

    @property
    def workload(self) -> Workload: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def pins(self) -> Pins: ...

    @property
    def plain_jax(self) -> Callable[[Plan, str], str] | None: ...
    def with_pins(self, pins: Pins) -> Source:
        """The same problem under other pins."""
        ...

    def search(self, topology: Topology, pins: Pins) -> Plan:
        """The best plan for the same problem, see `shardlib.planner.search.search`."""
        ...

    def ranked(self, topology: Topology, *, slack: float, pareto: bool = False) -> Iterator[Ranked]:
        """Plans for the same problem under the same pins, see `shardlib.planner.search.ranked`."""
        ...

    def on_all_devices(self) -> Plan:
        """The best plan that leaves no device idle."""
        ...

    def why_not(self, pin: PinMapping) -> Plan:
        """The best plan under other pins."""
        ...


def source_of(plan: Plan) -> Source:
    """The source of a plan; raises PlanError where the plan was read from a file."""
    if plan.source is None:
        raise PlanError(
            "this plan was read from a file and does not carry its model\nTry: the command line"
            " (`shardlib explain plan.json ...`), which traces the model again; or plan again"
        )
    return plan.source


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Decisions):
    """A complete decision for one model, batch and topology: all of `Decisions`, what they apply
    to, and what follows from them.

    Attributes:
        mesh, rules: as in `Decisions`, but required. `rules` map colours to mesh axes in compute,
            as a priority list (see `shardlib.layout`).
        model: display name of the model.
        topology: spelling of the topology.
        framework: the training framework that runs the plan; None for programs of shardlib.
        origin: (key, value) pairs with which the command line can trace the model again.
        placement: for every axis the links along which it runs, the major one first; see
            `shardlib.machines.topology`.
        parameters: layout of every parameter, in the order of the model's tree.
        batch_layouts: (path, layout) of every array of the batch.
        activations: layouts of the main activations of a step, in program order.
        estimate: predicted cost.
        search: certificate of the search.
        refined: figures of the compiler, with `shardlib.plan(..., refine=K)`; the estimate stays
            the prediction.
        findings: notes and warnings for the user.
        source: the prepared problem and the searches for it; not part of the value, and absent from
            JSON.
    """

    model: str = field()
    topology: str = field()
    framework: FrameworkJob | None = None
    origin: tuple[tuple[str, str], ...] = ()
    mesh: MeshShape = field()
    rules: Rules = field()
    placement: tuple[tuple[str, tuple[Link, ...]], ...] = ()
    parameters: tuple[ParameterLayout, ...] = ()
    batch_layouts: tuple[tuple[str, Layout], ...] = ()
    activations: tuple[ActivationLayout, ...] = ()
    estimate: Estimate
    search: Search = Search()
    refined: Refined | None = None
    findings: tuple[Finding, ...] = ()
    source: Source | None = field(default=None, compare=False, repr=False)

    @property
    def decisions(self) -> JsonObject:
        """The decisions alone, as pin values."""
        return plain_data(self)

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that identify the decisions, the model and the topology."""
        identifying = {
            "model": self.model,
            "topology": self.topology,
            **identity(self),
            **({"framework": self.framework.to_json()} if self.framework else {}),
            "parameters": [
                [
                    p.path,
                    list(p.shape),
                    p.rest.to_json(),
                    p.state.to_json(),
                    *(() if p.trained else (p.role,)),
                ]
                for p in self.parameters
            ],
        }
        return hashlib.sha256(json.dumps(identifying, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def compiler_flags(self) -> tuple[CompilerFlag, ...]:
        """Options of the compiler that the plan's programs are compiled with, with their reasons
        (`docs/flags.md`).
        """
        from shardlib.planner.compiler_flags import compiler_flags

        return compiler_flags(self)

    @property
    def compiler_options(self) -> dict[str, OptionValue]:
        """The same as `jax.jit(compiler_options=...)` takes them."""
        return {flag.name: flag.value for flag in self.compiler_flags}

    def with_findings(self, *findings: Finding) -> Self:
        """The same plan with more findings.

        Args:
            findings: added after those of the plan.
        """
        return replace(self, findings=(*self.findings, *findings))

    def __repr__(self) -> str:
        from shardlib.report.text import plan_line

        return plan_line(self)

    def _repr_html_(self) -> str:
        from shardlib.report.text import plan_card

        return plan_card(self)

    def _repr_svg_(self) -> str | None:
        try:
            return self.svg()
        except (PlanError, TopologyError, MissingFileError):  # notebooks fall back to HTML
            return None

    def explain(self) -> str:
        """The decisions of the plan, their reasons and their costs, as text.

        Returns:
            Several paragraphs and tables, of at most 100 columns.
        """
        from shardlib.report.text import explain

        return explain(self)

    def diff(self, other: Plan) -> str:
        """The differences to another plan in decisions and costs, as text of at most 100 columns.

        Args:
            other: a plan of any model or topology.
        """
        from shardlib.report.changes import diff

        return diff(self, other)

    def run_cost(
        self,
        tokens: float,
        *,
        price: float | None = None,
        mtbf: float | None = None,
        restart: float = RESTART_S,
    ) -> RunCost:
        """The cost of a run of `tokens` tokens: days, device-hours, money, energy, and the expected
        cost of failures at the best interval between saves; `print` shows it.

        Args:
            tokens: tokens of the whole run.
            price: price per device-hour, in your currency; None for none.
            mtbf: seconds between two failures of the whole machine; None without failures.
            restart: seconds from a failure to the next step.

        Raises:
            ArgumentError: numbers that are not positive; or failures so frequent that no run ends.
            TopologyError, MissingFileError: the plan's topology is a file that does not exist here.
        """
        from shardlib.planner.answers import run_cost

        return run_cost(
            self,
            find_topology(self.topology),
            tokens=tokens,
            price=price,
            mtbf=mtbf,
            restart=restart,
        )

    def show(self, path: str | Path | None = None, *, browser: bool = True) -> Path:
        """Writes the plan as a self-contained web page, and opens it.

        Args:
            path: path of the file; None for a new one in a temporary folder.
            browser: True to open it in a browser on this machine.

        Returns:
            The path of the page.

        Raises:
            ArgumentError: the file cannot be written.
        """
        from shardlib.report.pages import write_page

        return write_page(
            self, path, browser=browser, kernels=None if self.source is None else self.kernels()
        )

    def grid(self) -> Frame:
        """The arrays of the plan as grids, which a notebook shows: which part a device holds, as it
        is stored, after its gathers, and before and after each collective.
        """
        from shardlib.report.pages import grid

        return grid(self)

    def svg(self) -> str:
        """The plan on its machine as one self-contained SVG document.

        It shows the figures, the links with the mesh axes along them, and the step with its
        collectives.

        Raises:
            PlanError: the mesh cannot be placed on the machine.
            TopologyError, MissingFileError: the plan's topology is a file that does not exist here.
        """
        from shardlib.report.pages import plan_svg

        return plan_svg(self, find_topology(self.topology))

    def timeline(self) -> Timeline:
        """The work of each pipeline stage over time, in predicted seconds, and the exchanges
        between islands, in order of use; `print` writes it, `svg()` draws it.

        Raises:
            PlanError: the plan has no stages and no such exchange, has `remat_classes`, or was
                written by a version whose estimates have no times per stage.
        """
        from shardlib.report.timelines import predicted

        forward = None if self.source is None else self.source.workload.problem.forward
        return predicted(self, forward)

    def why_not(self, *unnamed: object, **pin: PinValue) -> str:
        """The best plan under other pins, and its cost: `plan.why_not(tensor=16)`,
        `plan.why_not(remat="full")`.

        Args:
            unnamed: refused; pins are keywords.
            pin: decisions by name, as for `shardlib.plan`; a mesh axis by its own name. They
                replace pins of the same name (an axis replaces that axis); other pins stay.

        Returns:
            The difference to this plan as text, or the reason why there is no such plan.

        Raises:
            ArgumentError: a value without the name of its decision.
            PinError: a pin is misspelt, contradicts a pin of this plan that stays, or allows no
                plan; or the plan was read from a file and does not carry its model.
        """
        require_named("why_not", unnamed)
        if self.source is None:
            raise PinError(
                "this plan was read from a file and does not carry its model\nTry: `shardlib"
                " explain plan.json --why-not ...`, or plan again"
            )
        try:
            alternative = self.source.why_not(full_names(pin))
        except InfeasibleError as error:
            return str(error)
        return self.diff(alternative)

    def alternatives(self, count: int = 10) -> tuple[Alternative, ...]:
        """The next-best plans, fastest first, with the decisions in which each differs; equally
        fast ones are one entry.

        Args:
            count: maximum number, up to 1000; each becomes a whole plan.

        Returns:
            The alternatives, each with its step time and peak bytes per device.

        Raises:
            ArgumentError: `count` is not an integer from 0 to 1000.
            PlanError: the plan was read from a file and does not carry its model.
        """
        from shardlib.planner.questions import alternatives

        return alternatives(self, count)

    def constraints(self) -> Constraints:
        """The limits that keep the plan from being faster: memory, pins, and sizes that do not
        divide further.

        Returns:
            The constraints, the most expensive first, with the step time without each; `print`
            shows them as text.

        Raises:
            PlanError: the plan was read from a file and does not carry its model.
        """
        from shardlib.planner.questions import constraints

        return constraints(self)

    def sensitivity(self) -> Sensitivity:
        """The value of more memory and faster links, and the regret if a figure of the machine is a
        tenth lower.

        Returns:
            Shadow prices of memory and links, and shocks with the seconds per step that each loses;
            `print` shows them as text.

        Raises:
            PlanError: the plan was read from a file and does not carry its model.
        """
        from shardlib.planner.questions import sensitivity

        return sensitivity(self)

    def kernels(self) -> Kernels:
        """The kernels of a step on the roofline of the chip; `print` shows the slowest.

        Raises:
            PlanError: the plan was read from a file and does not carry its model.
        """
        from shardlib.planner.questions import kernels

        return kernels(self)

    def replan(
        self, topology: TopologyLike, *, lost: Iterable[int] = (), anew: bool = False
    ) -> Replan:
        """The best plan for the same global batch on another machine, such as this one without some
        hosts, and the data that must move.

        Args:
            topology: the remaining machine, a spelling or a value.
            lost: device numbers of the old machine that are gone; by default the last ones.
            anew: search the whole space; otherwise remat policy, schedule and the like stay as long
                as that fits, which is quicker.

        Returns:
            The new plan, and for every array the bytes that each device receives; `print` shows it
            as text.

        Raises:
            PlanError: the plan was read from a file and does not carry its model.
            TopologyError: the topology does not parse, or `lost` has devices that the old machine
                does not have.
            PinError: pins of the plan allow no plan there.
            InfeasibleError: nothing fits there.
        """
        from shardlib.planner.scaling import replan

        return replan(self, topology, lost=lost, anew=anew)

    def emit(self, form: str | None = None, *, mode: str = "auto") -> str:
        """The configuration of the plan's framework, or the plan as a plain JAX file
        (`docs/frameworks.md`).

        Args:
            form: "jax" for a Python file, independent of shardlib, with the mesh, the sharding of
                every array by path, constraints of activations by name and the remat policy; None
                for the configuration of the framework for which the plan is made.
            mode: type of the mesh axes in such a file: "auto", or "explicit" for a step that takes
                and returns arrays with shardings in their types, for programs in JAX's explicit
                mode.

        Raises:
            ArgumentError: another mode.
            PlanError: there is no framework, or it cannot express the plan; or the plan has what
                plain JAX cannot express, or carries no model; all reasons are listed.
        """
        if mode not in ("auto", "explicit"):
            raise ArgumentError(f"mode is {mode!r}\nTry: 'auto' or 'explicit'")
        if form is None:
            module = required("shardlib.frameworks.configurations", "the configuration of a plan")
            return module.configuration(self)
        if form != "jax":
            raise PlanError(f"no plan is written as {form!r}\nTry: 'jax'")
        if self.framework is not None:
            raise PlanError(
                f"the plan is made for {self.framework.name}\nTry: plan.emit(), or a plan without"
                " framework="
            )
        plain_jax = source_of(self).plain_jax
        if plain_jax is None:
            raise PlanError(
                "only plans of a model and its loss, or of a step, are written as plain JAX\nTry:"
                " shardlib.plan(init, loss, ...).emit('jax'), or"
                " shardlib.compile_step(init, step, ...).plan.emit('jax')"
            )
        return plain_jax(self, mode)

    def shardings(self, mesh: AxisSizes) -> PlanShardings:
        """The sharding of every parameter, gradient, optimizer state and array of the batch by
        path, over a mesh of the user's.

        Args:
            mesh: a `jax.sharding.Mesh`, or an abstract one, that has the axes of the plan that are
                larger than 1 (`jax.make_mesh((4, 2), ("fsdp", "tensor"))`); it may have other axes
                too.

        Raises:
            LayoutError: the mesh lacks axes of the plan, or has them in other sizes.
        """
        from shardlib.planner.layouts import plan_shardings

        return plan_shardings(self, mesh)

    def to_json(self) -> str:
        """The plan as JSON text, with a checksum of its content; `from_json` gives an equal
        plan.
        """
        return json.dumps(plan_to_data(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, *, changed: bool = False) -> Plan:
        """Reads a plan.

        A plan that was edited after `to_json` wrote it is refused: its estimate, search and
        findings belong to the plan as it was.

        Args:
            text: output of `to_json`.
            changed: accept an edited plan, with a finding that says so. Its values must still be
                legal.

        Returns:
            An equal plan without `source`, so methods that need the model raise.

        Raises:
            PlanError: the text is not a plan of this format, was edited, or has illegal values; all
                of them are listed.
        """
        hint = "the text itself, as shardlib.Plan.from_json(Path('plan.json').read_text())"
        return plan_from_data(parse_json(text, "the plan", PlanError, hint=hint), changed=changed)


def require_named(method: str, unnamed: tuple[object, ...]) -> None:
    """Refuses pins without names, such as those of `plan.why_not(16)`."""
    if unnamed:
        raise ArgumentError(
            f"{method} takes pins by name; {shown(unnamed[0])} has none"
            f"\nTry: plan.{method}(tensor=16)"
        )


def plan_to_data(plan: Plan) -> JsonObject:
    """The plan as plain lists, dicts, strings and numbers."""
    data = _content(plan)
    return {**data, "checksum": checksum(data)}


def checksum(content: JsonMapping) -> str:
    """SHA-256 of a plan as plain data without its own checksum; independent of key order and of the
    spelling of whole numbers (1 or 1.0).
    """
    return hashlib.sha256(
        json.dumps(
            _canonical({key: value for key, value in content.items() if key != "checksum"}),
            sort_keys=True,
            separators=(",", ":"),
        ).encode()
    ).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _canonical(entry) for key, entry in cast("Mapping[str, Any]", value).items()}
    return (
        [_canonical(entry) for entry in cast("list[Any]", value)]
        if isinstance(value, list | tuple)
        else value
    )


def _content(plan: Plan) -> JsonObject:
    return {
        "format": FORMAT,
        "digest": plan.digest,
        "model": plan.model,
        "topology": plan.topology,
        **plan.decisions,
        "placement": {
            axis: [[link.kind, link.ways] for link in links] for axis, links in plan.placement
        },
        "estimate": plan.estimate.to_json(),
        "search": {
            "gap": plan.search.gap,
            "seconds": plan.search.seconds,
            "evaluations": plan.search.evaluations,
            "candidates": plan.search.candidates,
            "lower_bound": plan.search.lower_bound,
            "counts": dict(plan.search.counts),
            "rejected": [
                {
                    "mesh": dict(r.mesh),
                    "summary": r.summary,
                    "reason": r.reason,
                    "step_seconds": r.step_seconds,
                    "peak_bytes": r.peak_bytes,
                }
                for r in plan.search.rejected
            ],
            "landscape": [point.to_json() for point in plan.search.landscape],
        },
        "refined": plan.refined.to_json() if plan.refined else None,
        "parameters": [
            {
                "path": p.path,
                "shape": list(p.shape),
                "dtype": p.dtype,
                "colours": list(p.colours),
                "compute": p.compute.to_json(),
                "rest": p.rest.to_json(),
                "gradient": p.gradient.to_json(),
                "state": p.state.to_json(),
                **({} if p.trained else {"role": p.role}),
            }
            for p in plan.parameters
        ],
        "batch_layouts": [[path, layout.to_json()] for path, layout in plan.batch_layouts],
        "activations": [activation.to_json() for activation in plan.activations],
        "findings": [finding.to_json() for finding in plan.findings],
        "origin": dict(plan.origin),
        **({"framework": plan.framework.to_json()} if plan.framework else {}),
    }


def plan_from_data(data: Json, *, changed: bool = False) -> Plan:
    """Reads the output of `plan_to_data`; see `Plan.from_json`."""
    data_format: object = (
        cast("Mapping[str, Any]", data).get("format")
        if isinstance(data, Mapping)
        else type(data).__name__
    )
    if isinstance(data_format, str) and data_format.startswith("serving-"):
        raise PlanError(
            "this plans a server, and no training\nTry: shardlib explain FILE; or shardlib plan"
            " MODEL --serve for another machine"
        )
    if not isinstance(data, Mapping) or isinstance(data_format, bool) or data_format != FORMAT:
        raise PlanError(
            f"this is not a plan of format {FORMAT} (found {shown(data_format)}); make it with"
            " `shardlib plan ... --out plan.json`"
        )
    table = cast("Mapping[str, Any]", data)
    plan = _without_default_order(
        construct(
            Plan,
            {key: value for key, value in table.items() if key not in NOT_STORED},
            "the plan",
            PlanError,
            forms=JSON_FORMS,
            least=0.0,
            most=MAX_PLAN_NUMBER,
            hint=MAKE_AGAIN,
        )
    )
    faults = _faults(plan)
    if faults:
        raise_all(PlanError, "the plan is not usable", bounded(faults), hint=MAKE_AGAIN)
    return plan.with_findings(*_checksum_findings(plan, table, changed))


def _without_default_order(plan: Plan) -> Plan:
    """Drops `axis_order` where it is the usual order."""
    return replace(plan, axis_order=()) if plan.axis_order == tuple(plan.mesh) else plan


def _checksum_findings(plan: Plan, data: JsonMapping, changed: bool) -> list[Finding]:
    """Findings about the checksum of the plan.

    Raises:
        ChangedPlanError: the plan was changed, and that is not allowed.
    """
    stored_sum = data.get("checksum")
    if stored_sum is not None and stored_sum == checksum(data):
        return []
    if not changed:
        what = (
            "the plan has no checksum, with which every plan is written: somebody has changed it,"
            " or made it by hand"
            if stored_sum is None
            else (
                "the plan was changed since it was written: it is not what its checksum was made of"
            )
        )
        raise ChangedPlanError(
            f"{what}, so that its estimate and findings may be those of another plan\nTry:"
            f" {MAKE_AGAIN}, with --pin for decisions of your own; or take it as it is: --changed,"
            " or Plan.from_json(text, changed=True)"
        )
    change = "The plan was changed since it was written;"
    if stored_sum is None:
        same = data.get("digest") == plan.digest
        decided = "are those of its digest, and" if same else "are not those of its digest;"
        change = f"The plan has no checksum: its decisions {decided}"
    return [
        Finding(
            code="plan-unchecked" if stored_sum is None else "plan-changed",
            severity="warning",
            where="checksum",
            hint=MAKE_AGAIN,
            message=f"{change} its estimate, search and findings may be those of another plan.",
        )
    ]


def _faults(plan: Plan) -> list[str]:
    """Values of the right types that are illegal in a plan."""
    faults = illegal(plan.decisions)
    if (peak := plan.estimate.peak_flops_per_s) <= 0:
        faults.append(f"estimate.peak_flops_per_s is {peak}; it is positive")
    if plan.axis_order and {*plan.axis_order} | ({ISLAND.name} & {*plan.mesh}) != {*plan.mesh}:
        faults.append(
            f"axis_order is {shown(plan.axis_order)}; it names axes of the mesh {plan.mesh},"
            " each once"
        )
    faults += _misfits(plan)
    faults += [
        f"placement is of {shown(axis)}, which is not an axis of the mesh {plan.mesh}"
        for axis, _ in plan.placement
        if axis not in plan.mesh
    ]
    for p in plan.parameters:
        layouts = [(key, getattr(p, key)) for key in ("compute", "rest", "gradient", "state")]
        faults += _layout_faults("parameter", p.path, p.colours, p.shape, layouts)
    for a in plan.activations:
        layouts = [("held", a.held), *(("a move", move.layout) for move in a.moves)]
        faults += _layout_faults("activation", a.name, a.colours, a.shape, layouts)
    return faults


def _misfits(plan: Plan) -> list[str]:
    """Faults of the mesh against the topology, the schedule and the batch.

    A topology file may be another one by now, or be missing, so only spelled topologies count.
    """
    faults: list[str] = []
    if not plan.topology.strip().endswith(".toml"):
        with suppress(TopologyError):
            if plan.mesh.devices > (devices := find_topology(plan.topology).devices):
                faults.append(
                    f"mesh is {plan.mesh}, which has {plan.mesh.devices} devices, and the topology"
                    f" {shown(plan.topology)} has {devices}"
                )
    schedule, stages = SCHEDULES.get(plan.schedule), plan.mesh["stage"]
    if schedule and schedule.staged != (stages > 1):
        faults.append(f"schedule is {plan.schedule!r}, and the mesh has stage={stages}")
    batch = str(plan.framework.batch) if plan.framework else dict(plan.origin).get("batch", "")
    if batch.isdecimal() and len(batch) < 19 and int(batch) % max(plan.microbatches, 1):
        faults.append(
            f"microbatches is {plan.microbatches}, which does not divide the batch of {batch}"
        )
    return faults


def _layout_faults(
    what: str,
    name: str,
    colours: LogicalAxes,
    shape: tuple[int, ...],
    layouts: Iterable[tuple[str, Layout]],
) -> list[str]:
    """Faults of an array's colours and layouts: a number of dims other than that of the array."""
    dims = len(shape)
    faults = [
        f"{which} of {shown(name)} is {layout}, which has {len(layout)} dims, and the {what} has"
        f" {dims}"
        for which, layout in layouts
        if len(layout) != dims
    ]
    if len(colours) != dims:
        faults.append(f"{shown(name)} has {len(colours)} colours for {dims} dims")
    return faults
