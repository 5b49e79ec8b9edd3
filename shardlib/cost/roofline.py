"""Seconds of kernels by the roofline: efficiencies of chips and links, the load of experts, and
learned corrections.

Learned corrections: a correction is one factor on one quantity of a prediction for a chip and its
compiler, learned from programs that the real compiler made, and stored with its evidence
(`learned/*.json`, written by `benchmarks/learn_corrections.py`). A topology file can override it:

    [corrections]
    temporaries = 1.15
    compute = 1.0          # no correction, whatever was learned

The version of XLA on the planning machine is ignored: the newest learned version counts, and a
verification reports a different compiler.

The *margin* is a factor of another kind: how much more memory than predicted a program may need. A
plan fits if its predicted peak times the margin does. It is the largest learned for the chip with
any compiler, else for chips of its vendor, else `UNKNOWN_MARGIN`. Simulated devices have none: how
much memory they share is not known that exactly.

>>> from shardlib.machines.topology import topology
>>> [(each.quantity, each.factor) for each in applied(topology("h100:8"), corrections=())]
[('margin', 1.1)]
>>> applied(topology("cpu:8"), corrections=())
()
>>> entry = Correction(
...     chip="h100", versions=(("jaxlib", "0.10.2"),), quantity="temporaries", factor=1.2, n=24,
...     median_error_before=0.2, median_error_after=0.05, held_out_error=0.07,
... )
>>> both = applied(topology("h100:8"), corrections=(entry,))
>>> [(each.quantity, each.factor, each.n) for each in both]
[('margin', 1.1, 0), ('temporaries', 1.2, 24)]

Efficiencies are the fractions of data-sheet rates that a chip reaches. The vendor's figures are the
default. *Curves* override them for a chip (`curves/CHIP.json`), or for a chip or a vendor under a
framework profile (`curves/CHIP.xla.json`; those under other profiles belong to
`shardlib.frameworks`), with sources or with the measurements that they were fitted to. A user's own
measurements override both.

>>> vendor_efficiency("nvidia").matmul, efficiency_of("h100", "nvidia", "xla").matmul
(0.8, 0.54)
>>> efficiency_of("h100", "nvidia", "xla", {"matmul": 0.7}).matmul
0.7
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlib.cost.attention import BACKWARD, FORWARD
from shardlib.cost.experts import GROUPED
from shardlib.cost.terms import Amount, AttentionCore, Compute, RoutedRows
from shardlib.errors import PinError, raise_all
from shardlib.formats import FORMATS, bytes_of
from shardlib.machines.catalog import CATALOG
from shardlib.machines.chips import Chip
from shardlib.machines.topology import CORRECTABLE, Topology
from shardlib.untrusted.data import JsonMapping, JsonObject, bounded, construct, shown
from shardlib.wings import wing_module

#: The margin if nothing was learned for the chip or its vendor.
UNKNOWN_MARGIN = 1.1


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One compiled program.

    Attributes:
        case: model, topology and pins in a few words.
        family: the model; a correction learned from one family must improve the others.
        predicted: peak bytes per device, or seconds of kernels, without any correction.
        compiled: the same according to the compiler.
    """

    case: str
    family: str
    predicted: float
    compiled: float


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A factor on one quantity, with its evidence.

    Attributes:
        chip: name in the catalogue.
        versions: (package, version) of the compiler that it was learned from.
        quantity: one of `shardlib.machines.topology.CORRECTABLE`.
        factor: multiplier of the predicted figure.
        n: number of compiled programs behind it.
        median_error_before: median of |predicted - compiled| / compiled without the factor.
        median_error_after: the same with the factor.
        held_out_error: the same, each model family corrected by the factor fitted to the others.
    """

    chip: str
    versions: tuple[tuple[str, str], ...]
    quantity: str
    factor: float
    n: int
    median_error_before: float
    median_error_after: float
    held_out_error: float
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        assert self.quantity in CORRECTABLE, self.quantity
        assert 0 < self.factor < math.inf, self.factor

    def to_json(self) -> JsonObject:
        return {
            **self.__dict__,
            "versions": dict(self.versions),
            "evidence": [item.__dict__ for item in self.evidence],
        }

    @classmethod
    def from_json(cls, data: JsonMapping) -> Correction:
        """Reads what `to_json` wrote."""
        return construct(cls, data, "the correction", PinError)


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A factor that was applied to an estimate.

    Attributes:
        quantity: one of `CORRECTABLE`.
        n: number of compiled programs behind it; 0 if the topology brings the factor.
        versions: (package, version) of their compiler.
        unknown: True if nothing was learned for the compiler (`UNKNOWN_MARGIN`).
    """

    quantity: str
    factor: float
    n: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    unknown: bool = False

    def to_json(self) -> JsonObject:
        return {**self.__dict__, "versions": dict(self.versions)}

    @classmethod
    def from_json(cls, data: JsonMapping) -> Applied:
        """Reads what `to_json` wrote."""
        return construct(cls, data, "the correction", PinError)

    def __str__(self) -> str:
        compiler = " ".join(f"{name} {version}" for name, version in self.versions)
        return f"{self.quantity} x {self.factor:.3g}, " + (
            f"learned from {self.n} programs compiled with {compiler}"
            if self.n
            else "nothing was learned of this compiler"
            if self.unknown
            else "from the topology file"
        )


@lru_cache(maxsize=1)
def learned_corrections() -> tuple[Correction, ...]:
    """The corrections shipped with shardlib."""
    folder = resources.files("shardlib.cost") / "learned"
    files = (
        sorted(
            (file for file in folder.iterdir() if file.name.endswith(".json")),
            key=lambda file: file.name,
        )
        if folder.is_dir()
        else []
    )
    return tuple(
        Correction.from_json(entry)
        for file in files
        for entry in json.loads(file.read_text(encoding="utf-8"))
    )


def applied(
    topology: Topology, corrections: Iterable[Correction] | None = None
) -> tuple[Applied, ...]:
    """The factors applied to predictions for a topology, sorted by quantity, without those that are
    1.
    """
    corrections = tuple(learned_corrections() if corrections is None else corrections)
    of_chip = (
        entry
        for entry in corrections
        if entry.chip == topology.chip.name and entry.quantity != "margin"
    )
    newest = {entry.quantity: entry for entry in sorted(of_chip, key=_age)}
    factors = {
        quantity: Applied(
            quantity=quantity, factor=entry.factor, n=entry.n, versions=entry.versions
        )
        for quantity, entry in newest.items()
    }
    if topology.chip.vendor != "cpu":
        factors["margin"] = _learned_margin(corrections, topology.chip)
    factors |= {
        quantity: Applied(quantity=quantity, factor=factor)
        for quantity, factor in topology.corrections
    }
    return tuple(factors[quantity] for quantity in sorted(factors) if factors[quantity].factor != 1)


def margin(topology: Topology) -> float:
    """The memory that a program may need over the predicted memory, at least 1."""
    return next(
        (correction.factor for correction in applied(topology) if correction.quantity == "margin"),
        1.0,
    )


def fitting_bytes(topology: Topology) -> float:
    """The largest predicted peak, in bytes per device, with which a plan fits."""
    return topology.chip.usable_bytes / margin(topology)


def without_margin(topology: Topology) -> Topology:
    """The topology with a margin of 1."""
    others = (correction for correction in topology.corrections if correction[0] != "margin")
    return replace(topology, corrections=(*others, ("margin", 1.0)))


def _learned_margin(corrections: Iterable[Correction], chip: Chip) -> Applied:
    """The learned margin of a chip: the largest of all compilers for it, else for chips of its
    vendor.
    """
    margins = [entry for entry in corrections if entry.quantity == "margin"]
    of_chip = [entry for entry in margins if entry.chip == chip.name]
    related = [
        entry
        for entry in margins
        if entry.chip in CATALOG and CATALOG[entry.chip].chip.vendor == chip.vendor
    ]
    if not (of_chip or related):
        return Applied(quantity="margin", factor=UNKNOWN_MARGIN, unknown=True)
    largest = max(of_chip or related, key=lambda entry: (entry.factor, _age(entry)))
    return Applied(quantity="margin", factor=largest.factor, n=largest.n, versions=largest.versions)


def _age(entry: Correction) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Sort key of versions: packages by name, versions by number."""
    return tuple(
        (name, tuple(map(int, re.findall(r"\d+", version))))
        for name, version in sorted(entry.versions)
    )


#: A block of the result that one unit computes at a time: rows, columns, and the share of
#: `Efficiency.matmul` that such blocks reach.
Tile = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Figures that separate the time of a kernel from the roofline. Shares are from 0 to 1.

    Attributes:
        matmul: share of peak FLOP/s that a large, well-shaped matmul sustains.
        vector: share of peak FLOP/s of ops that do not run on the matrix unit.
        transcendental: additions or multiplications that take as long as one exponential.
        memory: share of HBM bandwidth that streaming kernels sustain.
        tile: matmul dims are padded to multiples of this, elements; used without `tiles`.
        overlap: share of compute time under which gathers and reductions of parameters can hide.
        hidden: largest share of gathers and reductions of parameters that hides, however long
            compute takes; the remainder is exposed.
        step_s: fixed seconds per step for dispatch.
        units: multiprocessors or matrix units that compute blocks of a matmul in parallel.
        tiles: possible blocks of a matmul; it takes the fastest. Empty: dims are padded to `tile`.
        depth: depth of a matmul, elements, that takes as long as filling and draining the pipeline
            of a block.
        eight_bit: `matmul` for 8-bit formats; None: the same.
        grouped: share of `matmul` that the grouped matmuls of experts reach.
        convolution: share of `matmul` that convolutions reach.
        attention: share of peak FLOP/s of the forward pass of fused attention.
        attention_backward: the same for the backward pass.
        scores, scores_backward: bytes that attention moves per score, forward and backward; 0 for
            kernels that do not write scores.
        width: columns and depth of the matrix unit, to which fused attention pads head sizes, so
            that half of a wide unit idles with heads of half its width (scaling-book, tpus.md); 1
            if the shares of attention already include the padding of the measured heads.
        equal_widths: True if fused attention pads the heads of queries and of values to one width.
        gather: share of HBM bandwidth of gathers and scatters of rows; None: as `memory`.
        sort: number of times that a sort reads and writes its operands.
        optimizer: share of HBM bandwidth of the optimizer update; None: as `memory`.
        misaligned: share of its speed that a matmul keeps if its columns or depth are not a
            multiple of 16 bytes (NVIDIA, "Matrix Multiplication Background User's Guide", section
            3.1).
        skew: coefficient of variation of the popularity of experts, which sets the load of the
            busiest device (`load_factor`); typical values are `BALANCED_SKEW` and `FORCED_SKEW`.
            None: every expert gets equally many tokens.
        unfused: bytes that element-wise ops, views and reductions move over those of perfectly
            fused chains; 1 if the compiler fuses them, more if every op is a kernel of its own.
        fast, slow: share of `Tier.efficiency` that the collectives of this software reach inside
            and between fast domains.
        ring_step_s: seconds of a step of a ring between nodes, of which gathers and scatters take
            n - 1; 0: the tier's latency, in a logarithm of steps.
        ring_sums: True if all-reduces between nodes take the steps of a ring, too.
        microbatch_s: fixed seconds per microbatch and stage: launches that the device waits for.
        dispatch_s: host seconds to launch one kernel; the device waits if they add up to more than
            the kernels take. 0 if one launch starts a whole program (XLA, CUDA graphs).
        gap_s: seconds between two kernels that are launched one by one; at least `Chip.launch_s`.
        at_once: True if the matmul, the vector work and the memory traffic of a kernel overlap; a
            CPU core does one after another.
        transposed: extra bytes that a weight-gradient matmul moves per byte of the gradient: copies
            of arrays in another layout.
        cores: speed-up over one core of a kernel that is large enough for all cores of a device; 1
            for a device with one core of its own.
        batched_cores: the same for a kernel of many matmuls (`dot_general` with batch dims).
        fresh: time of a byte of memory that the operating system maps and clears on first touch in
            a step, over that of a moved byte; 0 if programs keep their memory from step to step.
    """

    matmul: float
    vector: float
    transcendental: float
    memory: float
    tile: int
    overlap: float
    step_s: float
    hidden: float = 1.0
    units: int = 1
    tiles: tuple[Tile, ...] = ()
    depth: float = 0.0
    eight_bit: float | None = None
    grouped: float = 1.0
    convolution: float = 1.0
    attention: float = 0.5
    attention_backward: float = 0.4
    scores: float = 0.0
    scores_backward: float = 0.0
    width: int = 1
    equal_widths: bool = False
    gather: float | None = None
    sort: float = 1.0
    optimizer: float | None = None
    misaligned: float = 1.0
    skew: float | None = None
    unfused: float = 1.0
    fast: float = 1.0
    slow: float = 1.0
    ring_step_s: float = 0.0
    ring_sums: bool = False
    microbatch_s: float = 0.0
    dispatch_s: float = 0.0
    gap_s: float = 0.0
    at_once: bool = True
    transposed: float = 0.0
    cores: float = 1.0
    batched_cores: float = 1.0
    fresh: float = 0.0

    def __post_init__(self) -> None:
        tiles: list[Tile] = [
            (float(rows), float(columns), float(share)) for rows, columns, share in self.tiles
        ]
        object.__setattr__(self, "tiles", tuple(tiles))
        shares = (
            "matmul",
            "vector",
            "memory",
            "eight_bit",
            "grouped",
            "convolution",
            "attention",
            "attention_backward",
            "gather",
            "optimizer",
            "misaligned",
            "hidden",
        )
        failures = [
            f"{name} is {value}; it is above 0 and at most 1"
            for name in shares
            if (value := getattr(self, name)) is not None and not 0 < value <= 1
        ]
        failures += [
            f"tile {tile} has no positive size or no share from 0 to 1"
            for tile in tiles
            if min(tile) <= 0 or tile[2] > 1
        ]
        failures += [
            f"{name} is {getattr(self, name)}; it must not be negative"
            for name in (
                "depth",
                "step_s",
                "ring_step_s",
                "microbatch_s",
                "dispatch_s",
                "gap_s",
                "transposed",
                "fresh",
                "overlap",
                "transcendental",
            )
            if getattr(self, name) < 0
        ]
        failures += (
            [f"skew is {self.skew}; it must not be negative"] if (self.skew or 0) < 0 else []
        )
        failures += [
            f"{name} is {getattr(self, name)}; it must be positive"
            for name in ("fast", "slow")
            if getattr(self, name) <= 0
        ]
        failures += [
            f"{name} is {getattr(self, name)}; it is at least 1"
            for name in ("units", "tile", "width", "sort", "unfused", "cores", "batched_cores")
            if getattr(self, name) < 1
        ]
        if failures:
            raise_all(PinError, "efficiency is not usable", failures)

    def peak_share(self, dtype: str) -> float:
        """Share of peak FLOP/s of a large matmul in a dtype."""
        return (
            self.eight_bit
            if self.eight_bit is not None and dtype in FORMATS and FORMATS[dtype].scaled
            else self.matmul
        )

    def bandwidth_share(self, category: str) -> float:
        """Share of HBM bandwidth of kernels of a category."""
        return (
            self.gather
            if self.gather is not None and category in ("gather", "scatter")
            else self.memory
        )

    @property
    def update_share(self) -> float:
        """Share of HBM bandwidth of the optimizer's update."""
        return self.memory if self.optimizer is None else self.optimizer

    def with_values(self, values: JsonMapping) -> Efficiency:
        """These figures with some replaced, by name."""
        names = {field.name for field in fields(self)}
        unknown = [f"{shown(name)} is not a figure" for name in values if name not in names]
        if unknown:
            raise_all(
                PinError,
                "efficiency is not usable",
                bounded(unknown),
                hint=f"figures are {', '.join(sorted(names))}",
            )
        return (
            construct(type(self), {**self.__dict__, **values}, "efficiency", PinError)
            if values
            else self
        )

    def to_json(self) -> JsonObject:
        return {**self.__dict__, "tiles": [list(tile) for tile in self.tiles]}

    @classmethod
    def from_json(cls, data: JsonMapping) -> Efficiency:
        """Reads what `to_json` wrote."""
        return construct(cls, data, "efficiency", PinError)


#: matmul: sustained share of cuBLAS on H100 SXM and A100 as in "How to Scale Your Model" (GPU
#: chapter: 80-85% of peak) and of the MXU at large sizes (same source, TPU chapter: about 95% with
#: 128-aligned shapes, less inside real layers). memory: STREAM-like kernels reach 85-92% of the
#: data-sheet bandwidth on HBM2e/HBM3 (same chapters). vector: FLOP/s of the vector units over those
#: of the matrix unit, from the data sheets (H100: 67 of 989 TFLOP/s; v5p: about 2-3%).
#: transcendental: a GPU multiprocessor has 16 units for special functions and 128 for
#: multiplications (CUDA C++ programming guide, throughput of arithmetic instructions, compute
#: capability 9.0). A TPU: the compiler's estimated cycles of the kernels of a softmax over
#: f32[4,32,2048,2048] on v5e, 6.75 ms, less its other operations. A CPU: XLA's polynomial of about
#: that many terms. overlap: XLA's latency-hiding scheduler overlaps collectives of parameters with
#: the matmuls of the layer; the last tenth is start-up. XLA's CPU backend executes collectives and
#: compute one after another, so nothing is hidden there.
_VENDOR_FIGURES: dict[str, Efficiency] = {
    "nvidia": Efficiency(
        matmul=0.80, vector=0.06, transcendental=8, memory=0.88, tile=64, overlap=0.9, step_s=1e-3
    ),
    "google": Efficiency(
        matmul=0.90, vector=0.03, transcendental=64, memory=0.90, tile=128, overlap=0.9, step_s=5e-4
    ),
    "cpu": Efficiency(
        matmul=0.9, vector=0.25, transcendental=16, memory=0.9, tile=1, overlap=0.0, step_s=2e-3
    ),
}


def vendor_efficiency(vendor: str) -> Efficiency:
    """The figures of a vendor's chips ("nvidia", "google" or "cpu")."""
    return _VENDOR_FIGURES[vendor]


# --------------------------------------------------------------------------------------------------
# Curves of chips under framework profiles, and links at the rates that collectives reach.


def with_reached_rates(topology: Topology, efficiency: Efficiency) -> Topology:
    """The topology with link rates as the collectives of this software reach them; the same object
    if they are unchanged.
    """
    if efficiency.fast == efficiency.slow == 1 and not efficiency.ring_step_s:
        return topology
    tiers = (
        replace(
            tier,
            **(
                {
                    "latency_s": efficiency.ring_step_s,
                    "ring": True,
                    "ring_sums": efficiency.ring_sums,
                }
                if efficiency.ring_step_s and tier.kind == "network"
                else {}
            ),
            efficiency=min(
                1.0,
                tier.efficiency * (efficiency.slow if tier.kind == "network" else efficiency.fast),
            ),
        )
        for tier in topology.tiers
    )
    return replace(topology, tiers=tuple(tiers))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Figures of a chip, or of a chip under a framework profile, that override its vendor's.

    Attributes:
        chip: name of the chip, or a vendor for all of its chips.
        profile: name of the framework profile; "" for all but "xla".
        values: (figure, value) pairs that replace those of `Efficiency`.
        sources: per figure a source, or a physical meaning with the word "assumed".
        evidence: measurements that values were fitted to, as plain data.
    """

    chip: str
    profile: str = ""
    values: tuple[tuple[str, Any], ...]
    sources: tuple[str, ...]
    evidence: str = ""

    @property
    def fitted(self) -> tuple[str, ...]:
        """Names of the figures that were fitted to published runs."""
        return tuple(
            name
            for name, _ in self.values
            if any(source.startswith(f"{name}: fitted") for source in self.sources)
        )

    @classmethod
    def from_json(cls, data: JsonMapping) -> Curve:
        """Reads a file of a folder `curves`."""
        return construct(
            cls,
            {**data, "evidence": json.dumps(data.get("evidence", {}), sort_keys=True)},
            "the curve",
            PinError,
        )


def read_curves(folder: Traversable) -> Mapping[tuple[str, str], Curve]:
    """The curves that are files of a folder, by chip and framework profile."""
    loaded = [
        Curve.from_json(json.loads(file.read_text(encoding="utf-8")))
        for file in folder.iterdir()
        if file.name.endswith(".json")
    ]
    return {
        (curve.chip, curve.profile): curve
        for curve in sorted(loaded, key=lambda curve: (curve.chip, curve.profile))
    }


@lru_cache(maxsize=1)
def curves() -> Mapping[tuple[str, str], Curve]:
    """The curves of chips, and of chips under the framework profile "xla"."""
    return read_curves(resources.files("shardlib.cost") / "curves")


def efficiency_of(
    chip: str, vendor: str, profile: str, measured: JsonMapping | None = None
) -> Efficiency:
    """The figures of a chip under a framework profile: the vendor's, overridden by the vendor's
    under the profile, by the chip's, by those of both, and by the user's own.
    """
    figures, all_curves = vendor_efficiency(vendor), curves()
    if profile != "xla" and (frameworks := wing_module("shardlib.frameworks")) is not None:
        all_curves = {**all_curves, **frameworks.curves()}
    for key in [(vendor, profile)] + ([] if profile == "xla" else [(chip, "")]) + [(chip, profile)]:
        if key in all_curves:
            figures = figures.with_values(dict(all_curves[key].values))
    return figures.with_values(measured or {})


Array = NDArray[np.float64]

#: Coefficient of variation of expert load in training with a balancing loss: assumed, after
#: arXiv:2408.15664 (Wang et al., 2024), where the busiest of 64 experts takes 0.5 to 0.7 more than
#: the mean with an auxiliary loss, which is 2.4 standard deviations, and 0.04 with their biases.
BALANCED_SKEW = 0.25
#: The same if routing is forced to be uniform, as in benchmarks.
FORCED_SKEW = 0.0


def load_factor(
    assignments: Array, devices: NDArray[np.int64], experts: float, skew: float = BALANCED_SKEW
) -> Array:
    """Load of the busiest device of an expert-parallel group over the mean, by candidate.

    Without a capacity, every expert takes all tokens that are routed to it, and every device waits
    for the busiest. Its load over the mean load is

        1 + v z(n),   v^2 = (1 - 1/n) / m + s^2 / e

    with n devices, on average m assignments (tokens x experts per token) per device, and e experts
    per device. The first part of v^2 is chance: m of n m throws hit a device (multinomial). The
    second is skew: in a batch some experts are more popular than others, with a coefficient of
    variation s, and e of them share a device. z(n) is the expected largest of n standard normal
    variables, Blom's approximation (Statistical Estimates and Transformed Beta-Variables, 1958):
    the normal quantile of (n - 3/8) / (n + 1/4). The normal approximation holds if m is not small;
    the load of a device is capped at the total.

    >>> many = load_factor(np.array([1e5]), np.array([8]), 1, skew=0.0)
    >>> round(float(many[0]), 4), float(load_factor(np.array([100.0]), np.array([1]), 8)[0])
    (1.0042, 1.0)
    """
    n = np.asarray(devices, dtype=np.float64)
    chance = (1 - 1 / n) / np.maximum(assignments, 1.0)
    popularity = np.where(n > 1, skew**2 * n / experts * (1 - 1 / n), 0.0)
    largest = np.array([_largest(int(count)) for count in np.ravel(devices)]).reshape(
        np.shape(devices)
    )
    return np.minimum(1 + np.sqrt(chance + popularity) * largest, n)


def dropped_share(
    assignments: float, experts: int, factor: float, skew: float = BALANCED_SKEW
) -> float:
    """Expected share of the assignments that experts with a capacity drop.

    The load of an expert over the mean is taken as normal around 1, with v^2 = (1 - 1/e) (1/m +
    s^2) for m assignments to each of e experts on average: the formula of `load_factor` with one
    expert per device. The load above the factor c is dropped: v phi(z) - (c - 1) (1 - Phi(z)) with
    z = (c - 1) / v, the normal loss function (Zipkin, Foundations of Inventory Management, 2000).

    Args:
        assignments: tokens that are routed together times experts per token.
        experts: number of experts.
        factor: capacity of an expert over the mean load.
        skew: coefficient of variation of the popularity of experts.

    >>> round(dropped_share(1e6, 64, 1.25), 4), round(dropped_share(1e6, 64, 1.25, skew=0.0), 4)
    (0.0204, 0.0)
    """
    spread = math.sqrt((1 - 1 / experts) * (experts / max(assignments, 1.0) + skew**2))
    if spread == 0:
        return max(0.0, 1 - factor)
    z, law = (factor - 1) / spread, NormalDist()
    return max(0.0, spread * law.pdf(z) - (factor - 1) * (1 - law.cdf(z)))


@lru_cache(maxsize=1024)
def _largest(count: int) -> float:
    """Expected largest of `count` standard normal variables (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


# --------------------------------------------------------------------------------------------------
# Seconds of one kernel.
#
# The roofline (Williams, Waterman, Patterson, CACM 52(4), 2009): a kernel takes as long as the
# slowest of its matmul, its vector work and its memory traffic, which overlap, plus a launch.
#
#     seconds = max(matmul, vector operations / (peak x share), bytes / (bandwidth x share))
#               + launch
#
# On a CPU core, which does one after another, the sum replaces the maximum; a device with several
# cores uses only as many as the kernel is large enough for (`busy_cores`).
#
# A matmul consists of blocks of its result, which the units of a chip compute in parallel, a *wave*
# at a time; the last wave may leave units idle (NVIDIA, "Matrix Multiplication Background User's
# Guide", sections 3.2 to 3.4). Of several block shapes it takes the fastest:
#
#     matmul = min over tiles: waves x units x 2 rows columns (depth + start) / (peak x share)
#              waves = ceil(blocks / units)
#
# or, if no blocks are known, FLOPs x padding / (peak x share). More rows, columns, depth or matmuls
# are never faster, since every term and so the minimum is monotone (with a penalty for misaligned
# dims: only among aligned ones), and no matmul is faster than FLOPs / (peak x share).
#
# Every amount is per device and execution. This file does not know the mesh: the caller gives the
# local part of an `Amount`.

#: The local part of an amount, by candidate.
Local = Callable[[Amount], Array]

#: Categories of ops that compilers fuse with each other; `Efficiency.unfused` applies to them.
FUSIBLE: frozenset[str] = frozenset({"elementwise", "reduction", "movement"})
#: FLOPs of a matmul, and bytes that another kernel reads and writes, per additional CPU core.
#: Measured on two cores, JAX 0.10.2 and 0.12: matmuls of up to 2^23 FLOPs and chains with results
#: of up to 2^17 bytes use one, those of twice as much use two (XLA assigns 2^18 bytes of a result
#: to a core: openxla/xla `xla/service/cpu/parallel_task_assignment.cc`).
CORE_FLOPS, CORE_BYTES = float(1 << 23), float(3 << 17)


def kernel_seconds(term: Compute, local: Local, chip: Chip, efficiency: Efficiency) -> Array:
    """Seconds of one execution of a kernel per device, array [candidates]; arguments as in
    `kernel_parts`.
    """
    vector, matrix, traffic = kernel_parts(term, local, chip, efficiency)
    if efficiency.cores > 1:
        vector, matrix, traffic = (
            part * efficiency.cores / busy_cores(term, local, efficiency)
            for part in (vector, matrix, traffic)
        )
    busy = (
        np.maximum(np.maximum(vector, matrix), traffic)
        if efficiency.at_once
        else vector + matrix + traffic
    )
    return busy + max(chip.launch_s, efficiency.gap_s)


def busy_cores(term: Compute, local: Local, efficiency: Efficiency) -> Array:
    """The number of a device's cores that a kernel uses, by candidate: from 1 to `Efficiency.cores`
    (`Efficiency.batched_cores` for many matmuls in one kernel), with at least `CORE_FLOPS` or
    `CORE_BYTES` per core.
    """
    flops = local(term.flops)
    if term.category not in ("matmul", "convolution"):
        moved = sum((local(amount) for amount in term.traffic), np.zeros_like(flops))
        return np.clip(moved / CORE_BYTES, 1.0, efficiency.cores)
    limit = np.full_like(flops, efficiency.cores)
    if term.matmul is not None and term.matmul.batches is not None:
        many = np.rint(local(term.matmul.batches)) > 1
        limit = np.where(many, min(efficiency.batched_cores, efficiency.cores), limit)
    return np.clip(flops / CORE_FLOPS, 1.0, limit)


def kernel_parts(
    term: Compute, local: Local, chip: Chip, efficiency: Efficiency
) -> tuple[Array, Array, Array]:
    """Seconds of a kernel's vector work, of its main work (`_compute_seconds`), and of its memory
    traffic, each as if it ran alone, by candidate.
    """
    flops = local(term.flops)
    zeros = np.zeros_like(flops)
    vector = sum((local(amount) for amount in term.elements.simple), zeros)
    vector = vector + efficiency.transcendental * sum(
        (local(amount) for amount in term.elements.transcendental), zeros
    )
    traffic_ratio = (
        efficiency.sort
        if term.category == "sort"
        else efficiency.unfused
        if term.category in FUSIBLE
        else 1.0
    )
    traffic = traffic_ratio * sum((local(amount) for amount in term.traffic), zeros)
    if term.is_weight_gradient and term.matmul is not None and efficiency.transposed:
        elements = local(term.matmul.rows) * local(term.matmul.columns)
        if term.matmul.batches is not None:
            elements = elements * local(term.matmul.batches)
        traffic = traffic + efficiency.transposed * elements * bytes_of(term.dtype)
    return (
        vector / (chip.peak("bfloat16") * efficiency.vector),
        _compute_seconds(term, flops, local, chip, efficiency),
        traffic / (chip.hbm_bytes_per_s * efficiency.bandwidth_share(term.category)),
    )


def _compute_seconds(
    term: Compute, flops: Array, local: Local, chip: Chip, efficiency: Efficiency
) -> Array:
    """Seconds of a kernel's main work: that of the matrix unit, if it uses it."""
    peak = chip.peak(term.dtype)
    share = efficiency.peak_share(term.dtype)
    if term.kind in (FORWARD, BACKWARD):
        padding_ratio = _padding(term.core, term.kind, efficiency)
        matrix = (
            flops
            * padding_ratio
            / (
                peak
                * (efficiency.attention if term.kind == FORWARD else efficiency.attention_backward)
            )
        )
        score_bytes = efficiency.scores if term.kind == FORWARD else efficiency.scores_backward
        scores = term.core.scores_per_flop if term.core is not None else 0.0
        return np.maximum(matrix, score_bytes * scores * flops / chip.hbm_bytes_per_s)
    if term.kind in GROUPED:
        return flops * busiest(term.routed, local, efficiency) / (peak * share * efficiency.grouped)
    if term.category == "convolution":
        return flops / (peak * share * efficiency.convolution)
    if term.matmul is None:
        return flops / (peak * efficiency.vector)
    rows, columns, depth = (np.maximum(local(amount), 1.0) for amount in term.matmul.dims)
    if efficiency.misaligned < 1:
        lanes = 2 ** round(math.log2(16 / bytes_of(term.dtype)))
        share = share * np.where(
            (np.rint(columns) % lanes == 0) & (np.rint(depth) % lanes == 0),
            1.0,
            efficiency.misaligned,
        )
    if efficiency.tiles:
        batches = (
            np.maximum(local(term.matmul.batches), 1.0)
            if term.matmul.batches is not None
            else np.ones_like(flops)
        )
        return matmul_seconds(rows, columns, depth, batches, peak * share, efficiency)
    padding = np.ones_like(flops)
    for size, amount in zip((rows, columns, depth), term.matmul.dims, strict=True):
        padding *= (
            np.ceil(size / efficiency.tile) * efficiency.tile / size
            if amount.total >= efficiency.tile
            else 1.0
        )
    return flops * padding / (peak * share)


def _padding(core: AttentionCore | None, kind: str, efficiency: Efficiency) -> float:
    """FLOPs of an attention kernel with padded heads, over those without.

    Forward, one matmul contracts heads of queries and one makes heads of values; backward there are
    3 and 2 (arXiv:2307.08691, section 3.1).
    """
    if core is None or not core.query_width:
        return 1.0
    widths = core.query_width, core.value_width or core.query_width
    padded = [math.ceil(width / efficiency.width) * efficiency.width for width in widths]
    if efficiency.equal_widths:
        padded = [max(padded)] * 2
    matmuls = (1, 1) if kind == FORWARD else (3, 2)
    done, needed = (
        sum(n * width for n, width in zip(matmuls, each, strict=True)) for each in (padded, widths)
    )
    return done / needed


def busiest(routed: RoutedRows | None, local: Local, efficiency: Efficiency) -> Array | float:
    """Load of the busiest device over the mean, for a kernel or an all-to-all of routed rows; 1
    without `routed`, or if the chip's figures assume even loads.
    """
    if routed is None or efficiency.skew is None:
        return 1.0
    devices = np.rint(routed.experts.total / local(routed.experts)).astype(np.int64)
    load = load_factor(local(routed.assignments), devices, routed.experts.total, efficiency.skew)
    return (
        load
        if routed.capacity_factor is None
        else np.minimum(load, max(1.0, routed.capacity_factor))
    )


def matmul_seconds(
    rows: Array,
    columns: Array,
    depth: Array,
    batches: Array,
    flops_per_s: float | Array,
    efficiency: Efficiency,
) -> Array:
    """Seconds of `batches` matmuls [rows, depth] x [depth, columns] with the fastest tile."""

    def seconds(tile: Tile) -> Array:
        high, wide, share = tile
        waves = np.ceil(np.ceil(rows / high) * np.ceil(columns / wide) * batches / efficiency.units)
        return (
            waves
            * efficiency.units
            * 2
            * high
            * wide
            * (depth + efficiency.depth)
            / (flops_per_s * share)
        )

    return np.min(np.stack([seconds(tile) for tile in efficiency.tiles]), axis=0)
