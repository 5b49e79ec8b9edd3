"""The parts of a plan: candidates of the search, main activations, trials of the compiler, dtypes,
and pinned rules.

A plan has the dtypes of the traced model, since others change the numbers that a program computes,
unless the user pins or allows others; then each dtype is a decision. A combination of dtypes is
priced as another problem under another profile: stored dtypes are in the graph, those of layers'
products, communicated gradients and accumulated gradients in the profile
(`shardlib.cost.framework`), and moments are bytes of optimizer state.

>>> dtype_combinations((("moment_dtype", "bfloat16"),), (("reduction_dtype", ("bfloat16",)),))
[(('moment_dtype', 'bfloat16'),), (('reduction_dtype', 'bfloat16'), ('moment_dtype', 'bfloat16'))]
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import cast

from shardlib.compact import plain_fields
from shardlib.cost.framework import FrameworkProfile
from shardlib.cost.pricing import MAX_PLAN_NUMBER, Seconds
from shardlib.cost.variants import RematLayers
from shardlib.decisions.pins import Pins
from shardlib.decisions.table import DTYPES, TABLE, Allowed, Decisions, Dtypes
from shardlib.errors import PinError, PlanError, raise_all
from shardlib.graph import ITEMSIZE, Parameter, Problem, StepGraph, check
from shardlib.layout import Collective, Layout, LogicalAxes, MeshShape, Rules
from shardlib.propagation.colours import Choice, Colouring
from shardlib.schedules import NONE, named
from shardlib.untrusted.data import Form, JsonMapping, JsonObject, construct

# --------------------------------------------------------------------------------------------------
# Layouts of the main activations of a step: as produced, between operations, and as read.


@dataclass(frozen=True, kw_only=True)
class Move:
    """A collective on an activation.

    Attributes:
        kind: as in `shardlib.layout.KINDS`.
        axes: mesh axes of the collective.
        of: the weights, or the attention, that read the activation after the collective, or whose
            result it is before it.
        layout: sharding on the other side of the collective than `ActivationLayout.held`.
        before: True if `layout` is before the collective, as for partial sums.
    """

    kind: str
    axes: tuple[str, ...]
    of: tuple[str, ...]
    layout: Layout
    before: bool = False

    def to_json(self) -> JsonObject:
        """The move as plain data."""
        return plain_fields(self)


@dataclass(frozen=True, kw_only=True)
class ActivationLayout:
    """The sharding of one activation of the whole batch; a step with microbatches has a part of it
    at a time.

    Attributes:
        name: its producer or its reader, such as "output of layers.mlp.up".
        shape: elements per dim.
        dtype: JAX name of the dtype.
        colours: colour per dim; None where the dim has none.
        count: number of such activations per forward and backward pass, such as one per layer.
        held: sharding between operations.
        moves: the collectives that produce this sharding, and those that reshard it for its
            readers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    colours: LogicalAxes
    held: Layout
    count: int = 1
    moves: tuple[Move, ...] = ()

    def to_json(self) -> JsonObject:
        """The layout as plain data."""
        return plain_fields(self)


def joined_names(names: Iterable[str]) -> str:
    """Joins dotted names, with their common prefix once.

    >>> joined_names(["layers.mlp.up", "layers.mlp.gate", "layers.mlp.up"])
    'layers.mlp.up/gate'
    >>> joined_names(["head", "layers.mlp.up"])
    'head, layers.mlp.up'
    """
    distinct = list(dict.fromkeys(names))
    prefixes = {name.rpartition(".")[0] for name in distinct}
    if len(distinct) > 1 and len(prefixes) == 1 and (prefix := prefixes.pop()):
        return f"{prefix}." + "/".join(name.rpartition(".")[2] for name in distinct)
    return ", ".join(distinct)


# --------------------------------------------------------------------------------------------------
# A candidate: one point of the space of plans, in the form of the search.
#
# It has the `Decisions` of its future plan, three of them in another form: sharding as a `Choice`
# of colours, the policies of layer groups by the index of the group, and routing to experts as a
# flag.

_CONTEXT = {"all-gather": "", "ring": "ring attention", "ulysses": "heads exchanged"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan of the space, or the common part of many before mesh and microbatches are known.

    Attributes:
        decisions: the decisions, except those in the other attributes, `rules`, `sequence_parallel`
            and `experts`. `remat_layers` counts layers of the fullest stage; where layer groups
            differ, `remat` is the policy of the most layers and `remat_layers` counts all that are
            rematerialised. Without a context axis, `context` is that of the space.
        choice: the sharded colours.
        group_policies: (policy, number of layers of the fullest stage) of each layer group, where
            groups differ; () where they do not.
        routes: True if tokens are routed to experts on other devices.
    """

    decisions: Decisions
    choice: Choice
    group_policies: RematLayers = ()
    routes: bool = False

    @property
    def mesh(self) -> MeshShape:
        """Sizes of the mesh axes."""
        return self.decisions.mesh

    def on_mesh(self, mesh: MeshShape, microbatches: int, order: tuple[str, ...]) -> Candidate:
        """The candidate on a mesh, without decisions for axes that the mesh does not have."""
        staged = "stage" in mesh
        decisions = self.decisions
        return replace(
            self,
            choice=self.choice if "context" in mesh else replace(self.choice, context=None),
            decisions=replace(
                decisions,
                mesh=mesh,
                microbatches=microbatches,
                axis_order=order,
                context=decisions.context if "context" in mesh else "all-gather",
                schedule=decisions.schedule if staged else NONE.name,
                virtual_stages=decisions.virtual_stages if staged else 1,
                accumulation=decisions.accumulation if staged else 1,
            ),
        )

    def replace(self, **changes: object) -> Candidate:
        """The candidate with other decisions."""
        return replace(self, decisions=replace(self.decisions, **changes))

    @property
    def summary(self) -> str:
        """The decisions other than the mesh, in a few words."""
        decisions, order = self.decisions, self.decisions.axis_order
        parts = [
            f"tensor shards {_joined(self.choice.tensor)}" if self.choice.tensor else "",
            "sequence parallel" if self.choice.sequence else "",
            "collective matmul" if decisions.collective_matmul == "loop" else "",
            f"ZeRO {decisions.zero}" if decisions.zero else "",
            self._remat,
            microbatches_text(decisions.microbatches, decisions.accumulation)
            if decisions.microbatches > 1
            else "",
            named(decisions.schedule).label(decisions.virtual_stages),
            "weights gathered once" if decisions.gather == "once" else "",
            _CONTEXT[decisions.context] if "context" in decisions.mesh else "",
            "routed experts" if self.routes else "",
            _offload_text(decisions.offload),
            dtypes_text(decisions.dtypes),
            f"{order[0]} outermost, {order[-1]} innermost" if order else "",
        ]
        return ", ".join(part for part in parts if part)

    @property
    def _remat(self) -> str:
        if self.decisions.remat == "none":
            return ""
        if self.group_policies:
            return (
                "remat "
                + " and ".join(
                    f"{policy} of {number} layers" if number else "none"
                    for policy, number in self.group_policies
                )
                + " a stage, by layer group"
            )
        layers = self.decisions.remat_layers
        return f"remat {self.decisions.remat}" + (
            f" of {layers} layer{'s' if layers > 1 else ''} a stage" if layers else ""
        )

    def simplicity(self) -> tuple[object, ...]:
        """Sort key for equally fast plans, the simplest first."""
        decisions = self.decisions
        return (
            bool(decisions.axis_order),
            decisions.mesh.devices,
            len(decisions.mesh),
            decisions.mesh["context"],
            decisions.microbatches,
            decisions.remat != "none",
            decisions.zero,
            decisions.gather != "use",
            self.choice.sequence is not None,
            len(self.choice.tensor),
            decisions.dtypes,
            tuple(dict(decisions.mesh).items()),
            decisions.remat,
            decisions.remat_layers,
            self.group_policies,
            self.choice.tensor,
            decisions.schedule,
            decisions.virtual_stages,
            decisions.accumulation,
            decisions.offload,
            decisions.axis_order,
        )


def decisions_of(
    candidate: Candidate, experts: str, names: Sequence[str], **others: object
) -> Decisions:
    """The decisions of a candidate's plan, in the form of plans."""
    decisions = candidate.decisions
    return replace(
        decisions,
        sequence_parallel=candidate.choice.sequence is not None,
        remat_classes=tuple(
            (name, *policy) for name, policy in zip(names, candidate.group_policies, strict=False)
        ),
        context=decisions.context if "context" in decisions.mesh else "none",
        experts=experts if candidate.routes else "none",
        **others,
    )


def microbatches_text(micro: int, groups: int) -> str:
    """The number of microbatches as text."""
    return f"{micro} microbatches" + (f" in {groups} groups" if groups > 1 else "")


def _joined(names: Sequence[str]) -> str:
    """Names joined as "mlp", "mlp and vocab", "heads, mlp and vocab"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def dtypes_text(dtypes: Dtypes) -> str:
    """Dtypes other than the model's as text."""
    return ", ".join(f"{key} {dtype}" for key, dtype in dtypes)


def _offload_text(offload: tuple[str, ...]) -> str:
    offloaded = " and ".join(part for part in offload if part != "disk")
    return ", ".join(
        [
            *([f"{offloaded} in host memory"] if offloaded else []),
            *(["optimizer state on disk"] if "disk" in offload else []),
        ]
    )


# --------------------------------------------------------------------------------------------------
# Trials: the best plans, compiled by the real compiler.
#
# `shardlib.plan(..., refine=K)` compiles the K best plans and ranks them again by the compiler's
# figures. A `Refined` is the record: one `Trial` per compiled plan, and the time and memory of the
# chosen one with the compiler's figures in place of predictions. The plan's `estimate` stays the
# prediction.

#: JSON form of a mesh.
MESH = Form(plain=Mapping[str, int], build=MeshShape)

#: Verdicts on the chosen plan, and on plans that compile and fit but are slower.
CHOSEN, SLOWER = "chosen", "slower"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One plan that was compiled.

    Attributes:
        summary: its decisions other than the mesh, in a few words.
        predicted_seconds: step time by the cost model.
        predicted_bytes: bytes per device by the cost model.
        compiled_seconds: step time with the compiler's figures (`shardlib.cost.pricing`); 0 where
            nothing was compiled.
        compiled_bytes: peak bytes per device by the compiler; 0 where it does not report them.
        verdict: "chosen", "slower", or why the plan was discarded: "out-of-memory",
            "compile-error", "compiler-abort", "compile-timeout", "compiler-memory", "not-lowered".
        message: the compiler's message about a discarded plan.
        compile_seconds: wall time of compiling.
        run_seconds: step time of the program when run on attached devices; 0 where it was not.
    """

    mesh: MeshShape
    summary: str
    predicted_seconds: float
    predicted_bytes: int
    compiled_seconds: float = 0.0
    compiled_bytes: int = 0
    verdict: str
    message: str = ""
    compile_seconds: float = 0.0
    run_seconds: float = 0.0

    @property
    def survived(self) -> bool:
        """True if the compiler produced a program that fits."""
        return self.verdict in (CHOSEN, SLOWER)

    def to_json(self) -> JsonObject:
        """The trial as plain data."""
        return plain_fields(self)


@dataclass(frozen=True, kw_only=True)
class Refined:
    """The compiler's figures for a plan, and for those from which it was chosen.

    Attributes:
        wanted: number of plans to compile successfully.
        seconds: step time of the chosen plan with the compiler's figures (`shardlib.cost.pricing`).
        device_bytes: (part, bytes) per device of the chosen plan: "arguments", "outputs",
            "aliased", "temporaries", "peak".
        collectives: those of the chosen program, with seconds from the cost model.
        kernels: source of the compute seconds: "compiler" (its cycles) or "model".
        trials: every plan that was compiled, by predicted time.
        passed_over: number of plans that were skipped because similar plans ran out of memory.
        bounded: True if the search stopped at the largest number of compilations.
        versions: (package, version) of the compiler.
    """

    wanted: int
    seconds: Seconds
    device_bytes: tuple[tuple[str, int], ...]
    collectives: tuple[Collective, ...] = ()
    kernels: str
    trials: tuple[Trial, ...]
    passed_over: int = 0
    bounded: bool = False
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def step_seconds(self) -> float:
        """Seconds of one step of the chosen plan."""
        return self.seconds.total

    @property
    def peak_bytes(self) -> int:
        """Bytes per device of the chosen plan."""
        return dict(self.device_bytes)["peak"]

    def to_json(self) -> JsonObject:
        """The record as plain data, with totals."""
        return {
            "wanted": self.wanted,
            "step_seconds": self.step_seconds,
            "seconds": {**asdict(self.seconds), "total": self.seconds.total},
            "device_bytes": dict(self.device_bytes),
            "collectives": [c.to_json() for c in self.collectives],
            "kernels": self.kernels,
            "trials": [trial.to_json() for trial in self.trials],
            "passed_over": self.passed_over,
            "bounded": self.bounded,
            "versions": dict(self.versions),
        }

    @classmethod
    def from_json(cls, data: JsonMapping) -> Refined:
        """Reads the output of `to_json`; totals are recomputed."""
        return construct(
            cls,
            data,
            "the record of compiled plans",
            PlanError,
            forms={MeshShape: MESH},
            least=0.0,
            most=MAX_PLAN_NUMBER,
        )


def dtype_combinations(pinned: Dtypes, allowed: Allowed) -> list[Dtypes]:
    """Every combination of dtypes, those nearest to the traced model first, so that ties go to the
    plan that changes the least.

    Args:
        pinned: (key, dtype) pairs that are fixed.
        allowed: (key, dtypes) that may be chosen.
    """
    fixed, others = dict(pinned), dict(allowed)
    options = [
        [(key, fixed[key])]
        if key in fixed
        else [(key, ""), *((key, dtype) for dtype in others.get(key, ()))]
        for key in DTYPES
    ]
    candidates = [
        tuple((key, dtype) for key, dtype in choice if dtype)
        for choice in itertools.product(*options)
    ]
    return sorted(candidates, key=len)


def dtype_changes(
    dtypes: Dtypes, problem: Problem, profile: FrameworkProfile, pinned: Dtypes = ()
) -> Dtypes:
    """Dtypes without those that the problem and the profile have already.

    Pinned dtypes of gradients stay. In communication, most gradients of a model that computes in 16
    bits are in 16 bits, and those of lookup tables in the dtype of the parameters; programs
    accumulate gradients in float32 by default.
    """
    stored = {parameter.dtype for parameter in problem.parameters if parameter.trained}
    present = {
        "param_dtype": stored,
        "matmul_dtype": {profile.matmul_dtype or problem.compute_dtype},
        "reduction_dtype": {profile.reduction_dtype or problem.compute_dtype},
        "gradient_dtype": (
            {profile.gradient_dtype}
            if profile.gradient_dtype
            else {dict(dtypes).get("param_dtype", "")}
            if "param_dtype" in dict(dtypes)
            else stored
        ),
    }
    moments_unchanged = (
        all(_with_moment_dtype(parameter, dtype) == parameter for parameter in problem.parameters)
        if (dtype := dict(dtypes).get("moment_dtype", ""))
        else False
    )
    pinned_dtypes = {
        (key, dtype) for key, dtype in pinned if key in ("reduction_dtype", "gradient_dtype")
    }
    return tuple(
        (key, dtype)
        for key, dtype in dtypes
        if (key, dtype) in pinned_dtypes
        or (not moments_unchanged if key == "moment_dtype" else present[key] != {dtype})
    )


def with_dtypes(
    dtypes: Dtypes, problem: Problem, profile: FrameworkProfile
) -> tuple[Problem, FrameworkProfile]:
    """The problem and the framework profile with other dtypes."""
    wanted = dict(dtypes)
    if "moment_dtype" in wanted:
        if profile.state_bytes is not None:
            raise PinError(
                f"moment_dtype={wanted['moment_dtype']!r} changes the bytes of optimizer state, and"
                f" the profile {profile.name!r} fixes them (state_bytes={profile.state_bytes})\n"
                "Try: no pin of moment_dtype, or another framework profile"
            )
        problem = replace(
            problem,
            parameters=tuple(
                _with_moment_dtype(parameter, wanted["moment_dtype"])
                for parameter in problem.parameters
            ),
        )
    if "param_dtype" in wanted:
        dtype = wanted["param_dtype"]
        problem = replace(
            problem,
            parameters=tuple(
                replace(parameter, dtype=dtype) if parameter.trained else parameter
                for parameter in problem.parameters
            ),
            steps={
                policy: _with_param_dtype(step, dtype) for policy, step in problem.steps.items()
            },
        )
    changes = {key: dtype for key, dtype in dtypes if key not in ("moment_dtype", "param_dtype")}
    if "param_dtype" in wanted and not profile.gradient_dtype:
        # gradients accumulate in float32 even if parameters are stored in 16 bits
        changes.setdefault("gradient_dtype", "float32")
    return problem, replace(profile, **changes) if changes else profile


def _with_moment_dtype(parameter: Parameter, dtype: str) -> Parameter:
    """A parameter whose optimizer state is in another dtype; where the number of its arrays is
    unknown, the present bytes are taken as float32.
    """
    if not parameter.trained:
        return parameter
    arrays = parameter.state_arrays or parameter.state_bytes_per_element / ITEMSIZE["float32"]
    return replace(parameter, state_bytes_per_element=arrays * ITEMSIZE[dtype])


def _with_param_dtype(step: StepGraph, dtype: str) -> StepGraph:
    """A step whose trained parameters, and the gradients that it returns, are in another dtype.

    Copies and slices of them change too; casts of them remain.
    """
    graph = step.graph
    trained = set(graph.inputs_of("parameter"))
    weights = {value: source for value, source in step.weights().items() if source in trained}
    gradients = step.gradient_like()
    stored = {graph.values[value].dtype for value in trained}
    values = tuple(
        replace(value, dtype=dtype)
        if (number in weights and value.dtype == graph.values[weights[number]].dtype)
        or (number in gradients and value.dtype in stored)
        else value
        for number, value in enumerate(graph.values)
    )
    changed = replace(graph, values=values)
    check(changed)
    return replace(step, graph=changed)


# --------------------------------------------------------------------------------------------------
# A plan that a search priced, as one point of the landscape of plans: time against memory.

#: Decisions that a point describes in another form, or not at all.
_SHOWN_DIFFERENTLY = frozenset(
    {"mesh", "rules", "sequence_parallel", "experts", "remat_classes", "exchange"}
)
_DEFAULTS = {key: str(entry.default) for key, entry in TABLE.items()}


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan that was priced exactly.

    Attributes:
        decided: (key, value) of its other decisions that are not the default, as text.
        step_seconds: predicted step time, six digits.
        peak_bytes: predicted bytes per device.
        fits: True if it fits into the memory that plans may fill.
    """

    mesh: MeshShape
    decided: tuple[tuple[str, str], ...] = ()
    step_seconds: float
    peak_bytes: int
    fits: bool = True

    @classmethod
    def of(
        cls, candidate: Candidate, seconds: float, peak_bytes: float, *, fits: bool
    ) -> PricedPlan:
        """A candidate with its price."""
        return cls(
            mesh=candidate.mesh,
            decided=_decided(candidate),
            step_seconds=float(f"{seconds:.6g}"),
            peak_bytes=math.ceil(peak_bytes),
            fits=fits,
        )

    def to_json(self) -> JsonObject:
        """The point as plain data."""
        return {**plain_fields(self), "decided": dict(self.decided)}


def _decided(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    decisions, choice = candidate.decisions, candidate.choice
    pairs = [
        (field.name, _text(getattr(decisions, field.name)))
        for field in fields(decisions)
        if field.name not in _SHOWN_DIFFERENTLY
    ]
    pairs = [(key, text) for key, text in pairs if text and text != _DEFAULTS.get(key)]
    if choice.tensor:
        pairs.append(("tensor shards", ", ".join(choice.tensor)))
    if choice.sequence:
        pairs.append(("sequence_parallel", "True"))
    if candidate.routes:
        pairs.append(("experts", "routed"))
    return tuple(pairs)


def _text(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    parts = cast("tuple[object, ...]", value)
    return ", ".join(
        " ".join(map(str, cast("tuple[object, ...]", part)))
        if isinstance(part, tuple)
        else str(part)
        for part in parts
    )


# --------------------------------------------------------------------------------------------------
# Pinned rules in the colours of a model.


def rules_in_colours(rules: Rules, colouring: Colouring) -> Rules:
    """Translates pinned rules to colours."""
    failures: list[str] = []
    entries: list[tuple[str, tuple[str, ...]]] = []
    names = sorted(
        {
            *colouring.colours,
            *(alias for colour in colouring.colours.values() for alias in colour.aliases),
        }
    )
    for logical, axes in rules.entries:
        name = colouring.canonical(logical)
        if name is None:
            near = difflib.get_close_matches(logical, names, n=1)
            failures.append(
                f"no dim is named {logical!r}{f'; did you mean {near[0]!r}?' if near else ''}"
                f" (names are {', '.join(names)})"
            )
        else:
            entries.append((name, axes))
    if failures:
        raise_all(PinError, "pinned rules do not fit the model", failures)
    # of the dims of an array that an axis may shard, the sequence comes last, in prices too
    entries.sort(key=lambda entry: entry[0] == colouring.sequence_colour)
    return Rules(tuple(entries))


def choice_of_rules(rules: Rules, colouring: Colouring, pins: Pins) -> Choice:
    """The choice that pinned rules stand for."""
    batch, sequence = colouring.batch_colour, colouring.sequence_colour
    tensor = pins.mesh["tensor"] if pins.mesh is not None else dict(pins.axes).get("tensor", 1)
    # MaxText's fallbacks are a second rule for the same name
    with_fallback = {name for name, axes in rules.entries if "tensor" not in axes}
    sharded = tuple(
        name
        for name, axes in rules.entries
        if "tensor" in axes
        and not (
            name in with_fallback and name != sequence and colouring.colours[name].divisor % tensor
        )
    )
    used = set(pins.mesh or ()) | {axis for axis, size in pins.axes if size > 1}
    missing = [
        axis for axis in ("data", "fsdp") if axis in used and axis not in rules.axes_of(batch or "")
    ]
    if missing:
        raise PinError(
            f"the pinned rules shard {batch!r} over {rules.axes_of(batch or '') or 'nothing'}, and"
            f" the pinned mesh also has {', '.join(missing)}\nTry: the rule ({batch!r}, ('data',"
            " 'fsdp'))"
        )
    return Choice(
        tensor=tuple(dict.fromkeys(name for name in sharded if name != sequence)),
        batch=batch,
        sequence=sequence if sequence in sharded else None,
    )
