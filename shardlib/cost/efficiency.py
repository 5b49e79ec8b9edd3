"""How much of a chip's peak does a kernel reach?

One set of constants per vendor, each with its physical meaning. They are deliberately few; measurements can replace them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What separates a kernel's time from the roofline.

    Attributes:
        matmul: share of peak FLOP/s that a large, well-shaped matmul sustains.
        vector: share of peak FLOP/s of ops that do not run on the matrix unit.
        transcendental: additions or multiplications that take as long as an exponential.
        memory: share of HBM bandwidth that streaming kernels sustain.
        tile: matmul dims are padded to multiples of this, elements.
        overlap: share of compute time under which gathers and reductions of parameters can hide.
        step_s: fixed seconds per step for dispatch.
    """

    matmul: float
    vector: float
    transcendental: float
    memory: float
    tile: int
    overlap: float
    step_s: float


#: matmul: sustained share of cuBLAS on H100 SXM and A100 as in "How to Scale Your Model" (GPU chapter: 80-85% of peak) and of the
#: MXU at large sizes (same source, TPU chapter: about 95% with 128-aligned shapes, less inside real layers).
#: memory: STREAM-like kernels reach 85-92% of the data-sheet bandwidth on HBM2e/HBM3 (same chapters).
#: vector: FLOP/s of the vector units over those of the matrix unit, from the data sheets (H100: 67 of 989 TFLOP/s; v5p: about 2-3%).
#: transcendental: a GPU has 16 units for special functions beside 128 for multiplications in every multiprocessor (CUDA C++ programming guide,
#: throughput of arithmetic instructions, compute capability 9.0). A TPU: the compiler's estimated cycles of a softmax's kernels over
#: f32[4,32,2048,2048] on v5e, 6.75 ms, less the other operations in them. A CPU: XLA's polynomial of about that many terms.
#: overlap: XLA's latency-hiding scheduler runs collectives of parameters beside the matmuls of the layer; the last tenth is start-up.
#: The CPU backend of XLA executes collectives one after another with compute, so nothing is hidden there.
_TABLE: dict[str, Efficiency] = {
    "nvidia": Efficiency(matmul=0.80, vector=0.06, transcendental=8, memory=0.88, tile=64, overlap=0.9, step_s=1e-3),
    "google": Efficiency(matmul=0.90, vector=0.03, transcendental=64, memory=0.90, tile=128, overlap=0.9, step_s=5e-4),
    "cpu": Efficiency(matmul=0.9, vector=0.25, transcendental=16, memory=0.9, tile=1, overlap=0.0, step_s=2e-3),
}


def efficiency(vendor: str) -> Efficiency:
    """The constants of a vendor's chips ("nvidia", "google" or "cpu")."""
    return _TABLE[vendor]
