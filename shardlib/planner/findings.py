"""Rules of thumb: what an experienced colleague would note about a finished plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from shardlib.cost import experts as experts
from shardlib.cost.roofline import BALANCED_SKEW, dropped_share
from shardlib.cost.tables import Pricer
from shardlib.decisions.pins import Pins
from shardlib.findings import Finding, diagnostic
from shardlib.graph import ITEMSIZE, Rows
from shardlib.layout import MeshShape
from shardlib.machines.topology import Topology
from shardlib.planner.layouts import AdviceInputs
from shardlib.planner.plan import ParameterLayout, Plan
from shardlib.planner.space import FIXED_ROWS_HINT, MIXED_ROWS_HINT
from shardlib.planner.workload import Workload
from shardlib.report.elements import bytes_text, count_text, percent_text, ratio_text, seconds_text
from shardlib.schedules import ONE_F_ONE_B, named

# --------------------------------------------------------------------------------------------------
# The rules.
#
# Each cites its source and is checked against a finished plan. The planner minimises step time
# within its cost model; the rules cover what the model does not see (does such a batch still
# converge? is a simpler plan as good?) or does not report (why is the utilisation low?). They do
# not change the plan: every rule is a function from `AdviceInputs` to at most one `Finding`.

#: Slowdown up to which plain data parallelism is worth its simplicity; the threshold is ours.
SIMPLER_SLOWDOWN = 1.05
#: Microbatches per stage from which on the bubble of a pipeline is negligible: GPipe (Huang et al.,
#: arXiv:1811.06965, section 2.3) finds "M >= 4 x K".
PER_STAGE = 4
#: Share of memory below which a margin is within the prediction error: the median error against
#: compiled programs is about 5% (docs/verification.md).
MIN_MEMORY_MARGIN = 0.05
#: Extent from which on a dim should be a multiple of the tile size; smaller ones are not reported.
MIN_TILED_EXTENT = 512
#: Multiples of a dim, (at least, better), by vendor: NVIDIA's "Matrix multiplication background"
#: asks for multiples of 16 bytes for tensor cores and of 128 bytes on A100 and later, 8 and 64
#: numbers of 16 bits; a TPU's matrix unit and lanes are 128 wide (jax-ml/scaling-book, tpus.md).
MULTIPLES: Mapping[str, tuple[int, int]] = {"nvidia": (8, 64), "google": (128, 128), "cpu": (1, 1)}
#: Kaplan et al., arXiv:2001.08361: L(N) = (N_C/N)^ALPHA_N (equation 1.1) and B_crit(L) = B_STAR /
#: L^(1/ALPHA_B) tokens (equation 1.4).
N_C, ALPHA_N, B_STAR, ALPHA_B = 8.8e13, 0.076, 2e8, 0.21


@diagnostic
def advise(inputs: AdviceInputs) -> tuple[Finding, ...]:
    """Applies the rules of thumb to a plan."""
    findings = (check(inputs) for check in RULES)
    return tuple(finding for finding in findings if finding is not None)


def plain_data_parallel(inputs: AdviceInputs) -> Finding | None:
    """Small models should be plain data parallel (jax-ml/scaling-book, training.md: it needs no
    all-gathers, and communicates only gradients).
    """
    plan = inputs.plan
    plain = MeshShape(data=plan.mesh.devices)
    if plan.mesh.devices == 1 or plan.mesh == plain:
        return None
    rejected = next(
        (
            candidate
            for candidate in plan.search.rejected
            if candidate.mesh == plain and candidate.reason == "slower"
        ),
        None,
    )
    if rejected is None or rejected.step_seconds > SIMPLER_SLOWDOWN * plan.estimate.step_seconds:
        return None
    return Finding(
        code="plain-data-parallel",
        severity="info",
        where=str(plan.mesh),
        message=(
            f"plain data parallelism over {plain} fits, too, and takes"
            f" {ratio_text(rejected.step_seconds / plan.estimate.step_seconds)} the time; it is"
            " simpler"
        ),
        hint=f"pin the mesh to {{'data': {plan.mesh.devices}}} (jax-ml/scaling-book, training.md)",
    )


def tensor_leaves_fast_domain(inputs: AdviceInputs) -> Finding | None:
    """Tensor parallelism belongs inside a node (Narayanan et al., arXiv:2104.04473, takeaway 1: up
    to degree g on servers of g GPUs).
    """
    links = dict(inputs.plan.placement).get("tensor", ())
    slow = [link for link in links if link.kind == "network"]
    if not slow:
        return None
    return Finding(
        code="tensor-leaves-fast-domain",
        severity="warning",
        where=f"tensor={inputs.plan.mesh['tensor']}",
        message=(
            f"the tensor axis runs over the slow network ({slow[0].ways} ways of it); its"
            " collectives delay every layer"
        ),
        hint=(
            "a tensor axis inside the fast domain, with stages or fsdp across the network"
            " (arXiv:2104.04473, takeaway 1)"
        ),
    )


def few_microbatches(inputs: AdviceInputs) -> Finding | None:
    """A pipeline needs at least as many microbatches as stages, better four times as many (GPipe,
    arXiv:1811.06965, section 2.3).
    """
    stages = inputs.plan.mesh["stage"]
    micro = inputs.plan.microbatches // inputs.plan.accumulation
    if (
        stages == 1
        or micro >= PER_STAGE * stages
        or (named(inputs.plan.schedule).splits_backward and micro >= stages)
    ):
        return None
    bubble = inputs.plan.estimate.seconds.bubble / (inputs.plan.estimate.step_seconds or 1.0)
    return Finding(
        code="few-microbatches",
        severity="warning" if micro < stages else "info",
        where=f"stage={stages}",
        message=(
            f"{micro} microbatches{' at a time' if inputs.plan.accumulation > 1 else ''} for"
            f" {stages} stages leave the stages idle for {percent_text(bubble)} of a step"
        ),
        hint=(
            f"at least {PER_STAGE * stages} microbatches: a larger batch, or fewer data ways"
            " (arXiv:1811.06965, section 2.3)"
        ),
    )


def critical_batch_tokens(weights: int) -> float:
    """The critical batch size, in tokens, of a language model with this many weights: beyond it, a
    larger batch gains little in training to convergence.

    Kaplan et al., arXiv:2001.08361, equations 1.1 and 1.4, measured on dense models of up to 1.5
    billion weights.
    """
    loss = (N_C / weights) ** ALPHA_N
    return B_STAR / loss ** (1 / ALPHA_B)


def batch_beyond_critical(inputs: AdviceInputs) -> Finding | None:
    """A batch above the critical size B_crit needs 1 + B / B_crit times the least number of tokens
    (McCandlish et al., arXiv:1812.06162, equation 2.11).
    """
    tokens = inputs.plan.estimate.tokens
    if not inputs.has_sequence or inputs.weights < 1:
        return None
    critical = critical_batch_tokens(inputs.weights)
    if tokens <= critical:
        return None
    return Finding(
        code="batch-beyond-critical",
        severity="info",
        where=f"{count_text(tokens)} tokens",
        message=(
            f"the batch of {count_text(tokens)} tokens is beyond the {count_text(critical)} that"
            " are known to help a dense model of this size; by that measure the run needs"
            f" {ratio_text(1 + tokens / critical)} the tokens of a small batch"
        ),
        hint=(
            "a smaller batch, or a measurement of the gradient noise (arXiv:1812.06162, equation"
            " 2.11; arXiv:2001.08361, equation 1.4; arXiv:2410.21676 finds that more training data"
            " allow larger batches)"
        ),
    )


def below_ridge(inputs: AdviceInputs) -> Finding | None:
    """A device needs enough tokens for its matmuls to be compute-bound (jax-ml/scaling-book,
    roofline.md: 240 on a TPU v5e, 295 on an H100, in bfloat16).
    """
    chip = inputs.topology.chip
    ridge = chip.peak(inputs.compute_dtype) / chip.hbm_bytes_per_s * inputs.itemsize / 2
    if inputs.device_rows >= ridge:
        return None
    rows = count_text(math.ceil(inputs.device_rows))
    unit = "tokens" if inputs.has_sequence else "rows of its matmuls"
    return Finding(
        code="below-ridge",
        severity="info",
        where=f"{rows} {unit} per device",
        message=(
            f"a device has {rows} {unit} per microbatch, and a matmul with weights is memory-bound"
            f" below {count_text(math.ceil(ridge))} on {inputs.topology.chip.name}"
        ),
        hint=(
            "a larger batch, fewer microbatches or fewer devices (jax-ml/scaling-book, roofline.md)"
        ),
    )


def fsdp_over_slow_network(inputs: AdviceInputs) -> Finding | None:
    """All-gathers of parameters hide behind compute where B/X > C/W, with B/X tokens per device
    (jax-ml/scaling-book, training.md and gpus.md).
    """
    plan, links = inputs.plan, dict(inputs.plan.placement).get("fsdp", ())
    if plan.zero < 3 or not any(link.kind == "network" for link in links):
        return None
    rates = [tier.bytes_per_s for tier in inputs.topology.tiers if tier.kind == "network"]
    if not rates:
        return None
    # neighbours gather different parts over their own ports, and exchange them
    inside = math.prod(link.ways for link in links if link.kind != "network")
    tokens = (
        inputs.topology.chip.peak(inputs.compute_dtype)
        / (min(rates) * inside)
        * inputs.itemsize
        / 2
    )
    if inputs.device_tokens >= tokens:
        return None
    return Finding(
        code="fsdp-over-slow-network",
        severity="info",
        where=f"fsdp={plan.mesh['fsdp']}",
        message=(
            "parameters are gathered over the slow network with"
            f" {count_text(math.ceil(inputs.device_tokens))} tokens per device; below"
            f" {count_text(math.ceil(tokens))} the gathers cannot hide behind compute"
        ),
        hint=(
            "fsdp inside the fast domain and data across it, fewer microbatches, or a larger batch"
            " (jax-ml/scaling-book, training.md, gpus.md)"
        ),
    )


def memory_tight(inputs: AdviceInputs) -> Finding | None:
    """A plan that fills more than 95% of memory may not fit where no margin is reserved:
    predictions are not that exact (docs/verification.md).
    """
    usable, peak = inputs.topology.chip.usable_bytes, inputs.plan.estimate.device_bytes.peak
    if inputs.plan.estimate.margin > 1 or peak <= (1 - MIN_MEMORY_MARGIN) * usable:
        return None
    return Finding(
        code="memory-tight",
        severity="warning",
        where=bytes_text(peak),
        message=(
            f"the plan needs {bytes_text(peak)} of the {bytes_text(usable)} that a device has,"
            f" {percent_text(1 - peak / usable)} spare; predictions of memory are not that exact"
        ),
        hint="`shardlib verify`, or --refine, which ask the real compiler",
    )


def odd_sizes(inputs: AdviceInputs) -> Finding | None:
    """Large dims should be multiples of the tile size of the matrix units (NVIDIA, Matrix
    multiplication background; jax-ml/scaling-book, tpus.md).
    """
    required, better = MULTIPLES[inputs.topology.chip.vendor]
    odd: dict[str, int] = {}
    for parameter in inputs.plan.parameters:
        if len(parameter.shape) < 2:
            continue
        parts = parameter.compute.parts(inputs.plan.mesh)
        for extent, shards, name in zip(parameter.shape, parts, parameter.colours, strict=True):
            if extent >= MIN_TILED_EXTENT and extent // shards % better:
                odd[name or str(extent)] = extent // shards
    if not odd:
        return None
    listed = ", ".join(f"{name} ({size:,})" for name, size in sorted(odd.items()))
    return Finding(
        code="odd-sizes",
        severity="warning" if any(size % required for size in odd.values()) else "info",
        where=", ".join(sorted(odd)),
        message=(
            f"dims whose shard on a device is not a multiple of {better}: {listed}; matrix units"
            " compute with padding"
        ),
        hint=f"pad them to a multiple of {better} in the model, as vocabularies commonly are",
    )


#: All rules, in the order of their findings.
RULES: tuple[Callable[[AdviceInputs], Finding | None], ...] = (
    plain_data_parallel,
    tensor_leaves_fast_domain,
    few_microbatches,
    batch_beyond_critical,
    below_ridge,
    fsdp_over_slow_network,
    memory_tight,
    odd_sizes,
)


#: Share of a step below which there is no warning.
MIN_REPORTED_SHARE = 0.01


#: Bytes from which on an unsharded parameter is reported.
LARGE_BYTES = 64 * 2**20


@diagnostic
def layout_findings(
    layouts: tuple[ParameterLayout, ...], mesh: MeshShape, zero: int, itemsize: Mapping[str, int]
) -> tuple[Finding, ...]:
    """Findings about large parameters that no axis shards."""
    findings: list[Finding] = []
    for p in layouts:
        size = itemsize.get(p.dtype, 4) * math.prod(p.shape)
        if (
            size >= LARGE_BYTES
            and mesh.devices > mesh["data"]
            and not p.state.axes
            and zero >= (1 if p.trained else 3)
        ):
            findings.append(
                Finding(
                    code="replicated-parameter",
                    severity="warning",
                    where=p.path,
                    message=(
                        f"{p.path} {p.shape} is replicated on every device: no dim divides over"
                        f" {mesh}"
                    ),
                    hint="pad the dim to a multiple of the fsdp axis",
                )
            )
    return tuple(findings)


def advice_inputs(workload: Workload, topology: Topology, plan: Plan) -> AdviceInputs:
    """The inputs of the rules for a plan."""
    vocabulary = workload.colouring.canonical("vocab")
    weights = sum(
        math.prod(p.shape)
        for p in plan.parameters
        if vocabulary is None or vocabulary not in p.colours
    )
    dtype = workload.problem.compute_dtype
    return AdviceInputs(
        plan=plan,
        topology=topology,
        compute_dtype=dtype,
        itemsize=ITEMSIZE.get(dtype, 4),
        weights=weights,
        has_sequence=workload.colouring.named_sequence is not None,
    )


@diagnostic
def notes(
    workload: Workload,
    topology: Topology,
    plan: Plan,
    left_out: tuple[str, ...],
    devices: int,
    pinned: bool,
) -> tuple[Finding, ...]:
    """Findings about a finished plan."""
    findings = [
        *workload.problem.forward.findings,
        *workload.colouring.findings,
        *layout_findings(plan.parameters, plan.mesh, plan.zero, ITEMSIZE),
    ]
    findings += _idle_devices(plan, topology, devices, pinned)
    findings += _repeated_colours(workload, plan)
    findings += _coupled_rows(workload.problem.rows, plan.microbatches)
    findings += _zero_bubble_memory(workload, plan) + _dropped_tokens(workload, topology, plan)
    findings += advise(advice_inputs(workload, topology, plan))
    findings += [
        Finding(
            code="corrected",
            severity="info",
            where=correction.quantity,
            message=f"the prediction is corrected: {correction}",
        )
        for correction in plan.estimate.corrections
        if correction.quantity != "margin"
    ]
    findings += [
        Finding(
            code="unknown-compiler",
            severity="info",
            where=topology.chip.name,
            message=(
                "nothing was learned of the compiler for this chip: plans leave"
                f" {percent_text(1 - 1 / correction.factor)} of its memory to what a program may"
                " need beyond the prediction"
            ),
            hint="[corrections] margin in a topology file, or `shardlib verify`",
        )
        for correction in plan.estimate.corrections
        if correction.unknown
    ]
    findings += _left_out(workload, plan, left_out)
    return tuple(findings)


#: Results that every microbatch computes for itself: note -> (message, hint).
_PER_MICROBATCH = {
    "balance": (
        "the loss that balances the load of experts is a product of two means over tokens:"
        " every microbatch has its own, and their mean takes the place of that of the whole"
        " batch",
        "pin microbatches to 1, or balance the experts of every sequence by itself, which is a"
        " mean over rows",
    )
}


@diagnostic
def _coupled_rows(rows: Rows, microbatches: int) -> list[Finding]:
    """Findings about a loss that mixes rows of the batch."""
    if not rows.splits:
        combined = "its rows are combined other than by a final sum or mean"
        why = "it cannot be split" if rows.loss.fixed else combined
        return [
            Finding(
                code="rows-coupled",
                severity="info",
                where="the batch",
                message=(
                    f"the batch is processed as a whole, because {why}: {'; '.join(rows.reasons)}"
                ),
                hint=FIXED_ROWS_HINT if rows.loss.fixed else MIXED_ROWS_HINT.partition(", or ")[2],
            )
        ]
    if microbatches == 1:
        return []
    return [
        Finding(
            code=f"{note}-per-microbatch",
            severity="warning",
            where=f"microbatches={microbatches}",
            message=_PER_MICROBATCH[note][0],
            hint=_PER_MICROBATCH[note][1],
        )
        for note in rows.notes
    ]


@diagnostic
def _left_out(workload: Workload, plan: Plan, left_out: tuple[str, ...]) -> list[Finding]:
    """A finding about dimensions that were not tried in all sets with others and that the plan does
    not shard, with an upper bound on the time that this costs.
    """
    tensor, colours = plan.mesh["tensor"], workload.colouring.colours
    sharded = {name for name, axes in plan.rules.entries if tensor > 1 and "tensor" in axes}
    names = [
        name for name in left_out if name not in sharded and colours[name].divisor % tensor == 0
    ]
    if not names:
        return []
    more = [f"{len(names) - 6} more"] if len(names) > 6 else []
    listed = ", ".join([*names[:6], *more])
    total = plan.estimate.step_seconds
    lost = plan.estimate.seconds.compute * _replicated_share(workload, plan, sharded, names)
    if tensor == 1:
        cost = "this plan shards nothing over tensor"
    elif lost < MIN_REPORTED_SHARE * total:
        cost = "almost nothing is replicated because of it"
    else:
        cost = (
            f"their matmuls are replicated over the {tensor} devices of tensor, which costs at"
            f" most {seconds_text(lost)} of a step of {seconds_text(total)}"
        )
    return [
        Finding(
            code="dimensions-left-out",
            severity="warning" if tensor > 1 and lost >= MIN_REPORTED_SHARE * total else "info",
            message=(
                f"of {len(workload.colouring.shardable)} dimensions, {listed}"
                f" {'was' if len(names) == 1 else 'were'} added only to the fastest plans, one"
                " after the other, not tried in every combination, and"
                f" {'is' if len(names) == 1 else 'are'} not sharded: {cost}"
            ),
            hint="the same logical axis for dims that may be sharded alike, which then count as one"
            " dimension",
        )
    ]


def _replicated_share(
    workload: Workload, plan: Plan, sharded: set[str], names: Sequence[str]
) -> float:
    """Share of a device's FLOPs that would be saved if the named colours were sharded over tensor
    too.
    """
    policy = plan.remat if plan.remat in workload.problem.steps else "none"
    graph, colours = workload.problem.steps[policy].graph, workload.colouring.steps[policy]
    ways, replicated, total = plan.mesh["tensor"], 0.0, 0.0
    for op in graph.ops:
        if op.category in ("matmul", "convolution"):
            used = {name for value in (*op.operands, *op.results) for name in colours[value]}
            flops = op.flops * graph.trips(op.region)
            total += flops / ways if used & sharded else flops
            replicated += 0.0 if used & sharded or used.isdisjoint(names) else flops
    return replicated / total * (1 - 1 / ways) if total else 0.0


@diagnostic
def _idle_devices(plan: Plan, topology: Topology, max_devices: int, pinned: bool) -> list[Finding]:
    """Devices that the plan leaves idle: because the mesh is pinned, because no mesh could use
    them, or because that is faster.
    """
    used = plan.mesh.devices
    if used >= topology.devices:
        return []
    larger = [r for r in plan.search.rejected if r.mesh.devices > used and r.reason == "slower"]
    severity, hint = "info", "a larger batch, or a smaller machine"
    if pinned:
        why = f"the mesh is pinned to {plan.mesh}"
        hint = "pins of single axes (mesh.tensor=2), which leave the others to the planner"
    elif larger:
        best = min(larger, key=lambda r: r.step_seconds)
        ratio = best.step_seconds / plan.estimate.step_seconds
        why = f"with {best.mesh.devices} ({best.mesh}) a step would take {ratio:.2f} times as long"
    elif max_devices > used:
        why = "no plan on more that fits is faster"
    else:
        severity, why = "warning", "no mesh of more devices divides the batch and the model"
        hint = "a batch that is a multiple of the number of devices"
    message = f"the plan uses {used} of {topology.devices} devices: {why}"
    return [Finding(code="idle-devices", severity=severity, message=message, hint=hint)]


@diagnostic
def _zero_bubble_memory(workload: Workload, plan: Plan) -> list[Finding]:
    """A warning about zero-bubble stages in lockstep with rematerialisation: the inputs of weight
    gradients stay live whatever is rematerialised, and the estimate does not include them.
    """
    if (
        not named(plan.schedule).splits_backward
        or plan.remat == "none"
        or workload.profile.pipeline != "lockstep"
    ):
        return []
    return [
        Finding(
            code="zero-bubble-keeps",
            severity="warning",
            where=f"remat={plan.remat}",
            message=(
                f"a {plan.schedule} pipeline keeps the inputs of weight gradients of"
                f" {plan.mesh['stage']} microbatches, regardless of the remat policy, and the"
                " predicted memory does not include them: compiled programs of Llama 2 7B needed"
                " twice the predicted memory"
            ),
            hint=f"shardlib.verify before such a plan is run, or schedule={ONE_F_ONE_B.name!r}",
        )
    ]


@diagnostic
def unused_collective_matmuls(plan: Plan, replaced: int) -> tuple[Finding, ...]:
    """A finding where collective matmuls are pinned and replace no collective of the plan."""
    if plan.collective_matmul != "loop" or replaced:
        return ()
    why = (
        "the stages of a pipeline have none"
        if plan.mesh["stage"] > 1
        else (
            "nothing is sharded over tensor"
            if plan.mesh["tensor"] == 1
            else (
                "the residual stream is not sharded along the sequence"
                if not plan.sequence_parallel
                else "no matmul of a weight gathers or scatters the sequence"
            )
        )
    )
    return (
        Finding(
            code="collective-matmul-unused",
            severity="warning",
            where=str(plan.mesh),
            message=f"collective_matmul='loop' changes nothing: {why}",
            hint="a mesh with tensor and without stages, and sequence_parallel=True",
        ),
    )


@diagnostic
def _dropped_tokens(workload: Workload, topology: Topology, plan: Plan) -> list[Finding]:
    """The share of tokens that experts with a capacity are expected to drop; the price does not
    depend on it.
    """
    fitted = Pricer(topology, workload.profile).efficiency.skew
    skew = BALANCED_SKEW if fitted is None else fitted

    def dropped(layer: experts.CapacityLayer) -> float:
        assignments = layer.assignments / plan.microbatches
        return dropped_share(assignments, layer.experts, layer.factor, skew)

    return [
        Finding(
            code="drops-tokens",
            severity="info",
            where=f"{layer.experts} experts",
            message=(
                f"an expert takes at most {layer.factor:.3g} times the mean load; about"
                f" {dropped(layer):.2g} of the assignments are expected to be dropped, where the"
                f" popularity of experts varies by {skew:.2g} of its mean"
            ),
            hint='a step counts them as "dropped"; a larger capacity drops less',
        )
        for layer in dict.fromkeys(experts.capacity_layers(workload.problem.forward).values())
    ]


@diagnostic
def without_effect(pins: Pins, plan: Plan) -> tuple[Finding, ...]:
    """A finding about pins that have no effect on a plan."""
    if not pins.axis_order or set(pins.axis_order) & set(plan.mesh):
        return ()
    names = ", ".join(pins.axis_order)
    return (
        Finding(
            code="pin-without-effect",
            severity="warning",
            where="axis_order",
            message=(
                f"axis_order names {names}, of which the mesh {plan.mesh} has none: the pin has no"
                " effect."
            ),
            hint=f"pin the axis, too, e.g. mesh.{pins.axis_order[0]}=2, or leave the pin out",
        ),
    )


@diagnostic
def unpriced(plan: Plan, topology: Topology) -> tuple[Finding, ...]:
    """A finding where a plan puts state on disks whose rate is not known."""
    if "disk" not in plan.offload or topology.chip.disk_bytes_per_s:
        return ()
    return (
        Finding(
            code="disk-rate",
            severity="warning",
            where="offload=disk",
            message=(
                "optimizer state is read from disk and written back in every step, and"
                f" {topology.name} does not give the rate: the step will take longer than predicted"
            ),
            hint="disk_bytes_per_s in the chip of a topology file",
        ),
    )


@diagnostic
def _repeated_colours(workload: Workload, plan: Plan) -> list[Finding]:
    """Colours that the plan shards and that occur twice in some value, such as the sequence in
    attention scores.
    """
    colouring, forward = workload.colouring, workload.problem.forward
    sharded = {name for name, axes in plan.rules.entries if any(axis in plan.mesh for axis in axes)}
    twice: dict[str, int] = {}
    for value, name in colouring.conflicts(colouring.forward):
        twice.setdefault(name, value)
    return [
        Finding(
            code="colour-twice",
            severity="info",
            where=f"value of shape {forward.values[twice[name]].shape}",
            message=(
                f"{name!r} occurs twice in one value"
                f" ({', '.join(axis or '-' for axis in colouring.forward[twice[name]])}); the first"
                " of the two is sharded there"
            ),
        )
        for name in sorted(twice)
        if name in sharded
    ]
