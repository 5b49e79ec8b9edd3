"""Rules of thumb: what an experienced colleague would say about a plan.

Each has its source, and is held against a finished plan. The planner minimises the time of a step
within its cost model; these rules speak of what the model does not see (does such a batch still
converge? is a simpler plan as good?) or of what it sees and does not say (why is the utilisation
low?). They change nothing: every rule is a function from a `Situation` to at most one
`Finding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from shardlib.axes import MeshShape
from shardlib.planning.assembly.situation import Situation
from shardlib.planning.units.quantity import bytes_text, count_text, percent_text, ratio_text
from shardlib.report import Finding, diagnostic
from shardlib.schedules.table import named

#: Plain data parallelism that is at most this much slower is worth its simplicity; the threshold is
#: ours.
SIMPLER = 1.05
#: Microbatches per stage from which on the bubble of a pipeline is negligible: GPipe (Huang et al.,
#: arXiv:1811.06965, section 2.3) finds "M >= 4 x K".
PER_STAGE = 4
#: A share of memory that predictions are not exact enough to plan with: their median error against
#: compiled programs is about 5% (docs/verification.md).
TIGHT = 0.05
#: Extents from which on a dim should be made of whole tiles; the padding of smaller ones is the
#: model's own affair.
LARGE_EXTENT = 512
#: Multiples of a dim, (at least, better), by vendor: NVIDIA's "Matrix multiplication background"
#: asks for multiples of 16 bytes for tensor cores and of 128 bytes on A100 and later, 8 and 64
#: numbers of 16 bits; a TPU's matrix unit and lanes are 128 wide (jax-ml/scaling-book, tpus.md).
MULTIPLES: Mapping[str, tuple[int, int]] = {"nvidia": (8, 64), "google": (128, 128), "cpu": (1, 1)}
#: Kaplan et al., arXiv:2001.08361: L(N) = (N_C/N)^ALPHA_N (equation 1.1) and B_crit(L) = B_STAR /
#: L^(1/ALPHA_B) tokens (equation 1.4).
N_C, ALPHA_N, B_STAR, ALPHA_B = 8.8e13, 0.076, 2e8, 0.21


@diagnostic
def advise(situation: Situation) -> tuple[Finding, ...]:
    """What the rules have to say about a plan."""
    found = (rule(situation) for rule in RULES)
    return tuple(finding for finding in found if finding is not None)


def plain_data_parallel(at: Situation) -> Finding | None:
    """Small models should be plain data parallel (jax-ml/scaling-book, training.md: it needs no
    gathers, and communicates only gradients).
    """
    plan = at.plan
    plain = MeshShape(data=plan.mesh.devices)
    if plan.mesh.devices == 1 or plan.mesh == plain:
        return None
    other = next(
        (one for one in plan.search.rejected if one.mesh == plain and one.reason == "slower"), None
    )
    if other is None or other.step_seconds > SIMPLER * plan.estimate.step_seconds:
        return None
    return Finding(
        code="plain-data-parallel",
        severity="info",
        where=str(plan.mesh),
        message=(
            f"plain data parallelism over {plain} fits, too, and takes"
            f" {ratio_text(other.step_seconds / plan.estimate.step_seconds)} the time; it is"
            " simpler"
        ),
        hint=f"pin the mesh to {{'data': {plan.mesh.devices}}} (jax-ml/scaling-book, training.md)",
    )


def tensor_leaves_fast_domain(at: Situation) -> Finding | None:
    """Tensor parallelism belongs inside a node (Narayanan et al., arXiv:2104.04473, takeaway 1: up
    to degree g on servers of g GPUs).
    """
    links = dict(at.plan.placement).get("tensor", ())
    slow = [link for link in links if link.kind == "network"]
    if not slow:
        return None
    return Finding(
        code="tensor-leaves-fast-domain",
        severity="warning",
        where=f"tensor={at.plan.mesh['tensor']}",
        message=(
            f"the tensor axis runs over the slow network ({slow[0].ways} ways of it); its"
            " collectives are in the way of every layer"
        ),
        hint=(
            "a tensor axis inside the fast domain, with stages or fsdp across the network"
            " (arXiv:2104.04473, takeaway 1)"
        ),
    )


def few_microbatches(at: Situation) -> Finding | None:
    """A pipeline wants at least as many microbatches as stages, better four times as many (GPipe,
    arXiv:1811.06965, section 2.3).
    """
    stages, micro = at.plan.mesh["stage"], at.plan.microbatches // at.plan.accumulation
    if (
        stages == 1
        or micro >= PER_STAGE * stages
        or (named(at.plan.schedule).backward_in_two and micro >= stages)
    ):
        return None
    bubble = at.plan.estimate.seconds.bubble / (at.plan.estimate.step_seconds or 1.0)
    return Finding(
        code="few-microbatches",
        severity="warning" if micro < stages else "info",
        where=f"stage={stages}",
        message=(
            f"{micro} microbatches{' at a time' if at.plan.accumulation > 1 else ''} for {stages}"
            f" stages leave the stages idle for {percent_text(bubble)} of a step"
        ),
        hint=(
            f"at least {PER_STAGE * stages} microbatches: a larger batch, or fewer data ways"
            " (arXiv:1811.06965, section 2.3)"
        ),
    )


def critical_batch_tokens(weights: int) -> float:
    """The batch beyond which a language model of so many weights, trained to convergence, gains
    little from more, tokens.

    Kaplan et al., arXiv:2001.08361, equations 1.1 and 1.4, measured on dense models of up to 1.5
    billion weights.
    """
    loss = (N_C / weights) ** ALPHA_N
    return B_STAR / loss ** (1 / ALPHA_B)


def batch_beyond_critical(at: Situation) -> Finding | None:
    """A batch above the critical size B_crit needs 1 + B / B_crit times the least number of tokens
    (McCandlish et al., arXiv:1812.06162, equation 2.11).
    """
    tokens = at.plan.estimate.tokens
    if not at.language or at.weights < 1:
        return None
    critical = critical_batch_tokens(at.weights)
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


def below_ridge(at: Situation) -> Finding | None:
    """A device needs enough tokens to make its matmuls limited by compute (jax-ml/scaling-book,
    roofline.md: 240 on a TPU v5e, 295 on an H100, in bfloat16).
    """
    chip = at.topology.chip
    ridge = chip.peak(at.compute_dtype) / chip.hbm_bytes_per_s * at.itemsize / 2
    if at.device_tokens >= ridge:
        return None
    return Finding(
        code="below-ridge",
        severity="info",
        where=f"{count_text(math.ceil(at.device_tokens))} tokens a device",
        message=(
            f"a device works on {count_text(math.ceil(at.device_tokens))} tokens at once, and a"
            f" matmul with weights is limited by memory below {count_text(math.ceil(ridge))} on"
            f" {chip.name}"
        ),
        hint=(
            "a larger batch, fewer microbatches or fewer devices (jax-ml/scaling-book, roofline.md)"
        ),
    )


def fsdp_over_slow_network(at: Situation) -> Finding | None:
    """Gathering parameters hides behind compute where B/X > C/W, B/X tokens a device
    (jax-ml/scaling-book, training.md and gpus.md).
    """
    plan, links = at.plan, dict(at.plan.placement).get("fsdp", ())
    if plan.zero < 3 or not any(link.kind == "network" for link in links):
        return None
    rates = [tier.bytes_per_s for tier in at.topology.tiers if tier.kind == "network"]
    if not rates:
        return None
    inside = math.prod(
        link.ways for link in links if link.kind != "network"
    )  # neighbours gather different parts over their own ports, and share them
    least = at.topology.chip.peak(at.compute_dtype) / (min(rates) * inside) * at.itemsize / 2
    if at.device_tokens >= least:
        return None
    return Finding(
        code="fsdp-over-slow-network",
        severity="info",
        where=f"fsdp={plan.mesh['fsdp']}",
        message=(
            "parameters are gathered over the slow network with"
            f" {count_text(math.ceil(at.device_tokens))} tokens a device; below"
            f" {count_text(math.ceil(least))} the gathers cannot hide behind compute"
        ),
        hint=(
            "fsdp inside the fast domain and data across it, fewer microbatches, or a larger batch"
            " (jax-ml/scaling-book, training.md, gpus.md)"
        ),
    )


def memory_tight(at: Situation) -> Finding | None:
    """A plan that fills memory to the last twentieth may not fit where no margin is held back:
    predictions are not that exact (docs/verification.md).
    """
    usable, peak = at.topology.chip.usable_bytes, at.plan.estimate.device_bytes.peak
    if at.plan.estimate.margin > 1 or peak <= (1 - TIGHT) * usable:
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


def pipeline_on_gpus(at: Situation) -> Finding | None:
    """XLA for GPUs copies the stacks of saved activations between the loops of a pipeline in one
    program where it wants them in another order of dims, in some programs more of them than are
    priced (docs/verification.md).
    """
    one_program = at.plan.mesh["stage"] > 1 and at.plan.pipeline == "lockstep"
    own = at.plan.framework is None  # others make no such program
    if at.topology.chip.vendor != "nvidia" or not one_program or not own:
        return None
    return Finding(
        code="pipeline-on-gpus",
        severity="warning",
        where=f"stage={at.plan.mesh['stage']}",
        message=(
            "XLA for GPUs may copy what a pipeline in one program saves of its layers; programs"
            " may need a fifth more memory than predicted"
        ),
        hint="`shardlib verify`, or --refine, which ask the real compiler; or pipeline=programs",
    )


def odd_sizes(at: Situation) -> Finding | None:
    """Large dims should be multiples of what the matrix units are made for (NVIDIA, Matrix
    multiplication background; jax-ml/scaling-book, tpus.md).
    """
    least, better = MULTIPLES[at.topology.chip.vendor]
    odd: dict[str, int] = {}
    for parameter in at.plan.parameters:
        if len(parameter.shape) < 2:
            continue
        parts = parameter.compute.parts(at.plan.mesh)
        for extent, ways, name in zip(parameter.shape, parts, parameter.colours, strict=True):
            if extent >= LARGE_EXTENT and extent // ways % better:
                odd[name or str(extent)] = extent // ways
    if not odd:
        return None
    listed = ", ".join(f"{name} ({size:,})" for name, size in sorted(odd.items()))
    return Finding(
        code="odd-sizes",
        severity="warning" if any(size % least for size in odd.values()) else "info",
        where=", ".join(sorted(odd)),
        message=(
            f"dims whose part on a device is no multiple of {better}: {listed}; matrix units"
            " compute with padding"
        ),
        hint=f"pad them to a multiple of {better} in the model, as vocabularies commonly are",
    )


#: All rules, in the order in which they speak.
RULES: tuple[Callable[[Situation], Finding | None], ...] = (
    plain_data_parallel,
    tensor_leaves_fast_domain,
    few_microbatches,
    batch_beyond_critical,
    below_ridge,
    fsdp_over_slow_network,
    memory_tight,
    pipeline_on_gpus,
    odd_sizes,
)
