"""Efficiencies: how much of the data sheet a chip reaches.

`Efficiency` holds the figures that turn FLOPs and bytes into seconds. The vendor's are the default,
and nearly all that the framework profile "xla" uses. Beside them there are *curves*: for a chip,
and for a chip under a framework profile, files `framework_profiles/curves/CHIP.json` and
`CHIP.FRAMEWORK.json` say what differs, with sources or with the measurements that they were fitted
to. A user's own measurements come last.

>>> from shardlib.cost.machine.efficiency_curves import efficiency_of
>>> efficiency("nvidia").matmul, efficiency_of("h100", "nvidia", "xla") == efficiency("nvidia")
(0.8, True)
>>> efficiency_of("h100", "nvidia", "megatron-core", {"matmul": 0.7}).matmul
0.7
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from shardlib.errors import PinError, raise_all
from shardlib.untrusted import construct, shown
from shardlib.untrusted.json_types import JsonMapping, JsonObject
from shardlib.untrusted.shown import bounded

#: A block of the result that one unit computes at a time: rows, columns, and the share of
#: `Efficiency.matmul` that such blocks reach.
Tile = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """A table of figures that separate a kernel's time from the roofline. Shares are from 0 to 1.

    Attributes:
        matmul: share of peak FLOP/s that a large, well-shaped matmul sustains.
        vector: share of peak FLOP/s of ops that do not run on the matrix unit.
        transcendental: additions or multiplications that take as long as an exponential.
        memory: share of HBM bandwidth that streaming kernels sustain.
        tile: matmul dims are padded to multiples of this, elements; used where there are no
            `tiles`.
        overlap: share of compute time under which gathers and reductions of parameters can hide.
        step_s: fixed seconds per step for dispatch.
        units: multiprocessors or matrix units that compute blocks of a matmul side by side.
        tiles: blocks that a matmul may be made of; it takes the fastest. None: dims are padded to
            `tile`.
        depth: depth of a matmul, elements, that takes as long as filling and draining the pipeline
            of a block.
        eight_bit: the same as `matmul` for 8-bit formats; None: as `matmul`.
        grouped: share of `matmul` that the grouped matmuls of experts reach.
        convolution: share of `matmul` that convolutions reach.
        attention: share of peak FLOP/s of fused attention forward.
        attention_backward: the same backward.
        scores, scores_backward: bytes that attention moves for every score that it computes,
            forward and backward; 0 for kernels that write none.
        width: columns and depth of the matrix unit to which fused attention pads the elements of a
            head, so that half of a wide unit idles with heads of half its width (scaling-book,
            tpus.md); 1 where the shares of attention are those of the heads that were measured.
        equal_widths: whether fused attention has one width for heads of queries and of values, to
            which the narrower are padded.
        gather: share of HBM bandwidth of gathers and scatters of rows; None: as `memory`.
        sort: times that a sort reads and writes its operands.
        optimizer: share of HBM bandwidth of the optimizer's update; None: as `memory`.
        misaligned: share of its speed that a matmul keeps whose columns or depth are no multiple of
            16 bytes (NVIDIA, "Matrix Multiplication Background User's Guide", section 3.1).
        skew: coefficient of variation of the popularity of experts, for which all wait for the
            busiest device (`shardlib.cost.machine.expert_load`, which has typical values); None:
            every expert gets as many tokens as any other.
        unfused: bytes that element-wise ops, views and reductions move over those of perfectly
            fused chains; 1 where a compiler fuses them, more where every op is a kernel of its own.
        fast, slow: share of `Tier.efficiency` that collectives of this stack reach on the links
            inside and between fast domains.
        microbatch_s: fixed seconds of every microbatch on a stage: launches that the device waits
            for.
        dispatch_s: seconds that the host takes for every kernel that it launches; the device waits
            where they add up to more than the kernels take. 0 where one launch starts a whole
            program (XLA, CUDA graphs).
        gap_s: seconds between two kernels that are launched one by one; `Chip.launch_s` at least.
        at_once: whether the matmul, the vector work and the memory traffic of a kernel run at the
            same time; a core of a CPU does one after another.
        transposed: bytes that are moved beside the operands and the result of a matmul that makes
            the gradient of a weight, for every byte of it: copies of what lies in another order.
        cores: times as fast as one core a device computes a kernel that is large enough for all of
            its cores; 1 where a device has no more than one core of its own.
        batched_cores: the same of a kernel of many matmuls (`dot_general` with batch dims).
        fresh: time of a byte of memory that the system maps and clears when a step touches it, over
            that of a byte that moves; 0 where programs keep their memory from step to step.
    """

    matmul: float
    vector: float
    transcendental: float
    memory: float
    tile: int
    overlap: float
    step_s: float
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
            if self.eight_bit is not None and dtype.startswith(("float8", "int8", "uint8"))
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
        """These figures with some of them replaced, by name."""
        names = {field.name for field in fields(self)}
        unknown = [f"{shown(name)} is no figure" for name in values if name not in names]
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
        """The figures as plain data."""
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
#: transcendental: a GPU has 16 units for special functions beside 128 for multiplications in every
#: multiprocessor (CUDA C++ programming guide, throughput of arithmetic instructions, compute
#: capability 9.0). A TPU: the compiler's estimated cycles of a softmax's kernels over
#: f32[4,32,2048,2048] on v5e, 6.75 ms, less the other operations in them. A CPU: XLA's polynomial
#: of about that many terms. overlap: XLA's latency-hiding scheduler runs collectives of parameters
#: beside the matmuls of the layer; the last tenth is start-up. The CPU backend of XLA executes
#: collectives one after another with compute, so nothing is hidden there.
_TABLE: dict[str, Efficiency] = {
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


def efficiency(vendor: str) -> Efficiency:
    """The constants of a vendor's chips ("nvidia", "google" or "cpu")."""
    return _TABLE[vendor]
