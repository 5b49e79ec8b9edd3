"""The distinct kernels of a step as arrays: seconds of their parts at full peak and bandwidth, and
which figures of `shardlib.cost.roofline.Efficiency` scale each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardlib.cost.attention import BACKWARD, FORWARD
from shardlib.cost.experts import GROUPED
from shardlib.cost.roofline import FUSIBLE, kernel_parts
from shardlib.cost.tables import KernelSeconds, Pricer
from shardlib.cost.terms import Compute, Degrees, local

Array = np.ndarray
#: Figures that divide the seconds of matrix work, all 1 where a table is made.
UNIT: Mapping[str, float] = dict.fromkeys(
    ("matmul", "eight_bit", "attention", "attention_backward", "grouped", "misaligned"), 1.0
)
#: Figures that settings may differ in.
FITTED: tuple[str, ...] = (
    *UNIT,
    "memory",
    "unfused",
    "dispatch_s",
    "gap_s",
    "microbatch_s",
    "fast",
    "slow",
)
#: Figures by name, one column a setting.
Columns = dict[str, Array]
#: Dtypes of the peak that `eight_bit` is a share of.
EIGHT: tuple[str, ...] = ("float8", "int8", "uint8")


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The distinct kernels of a step, arrays [kernels] but for `times`.

    Attributes:
        matrix, vector, traffic: seconds of each at full peak and bandwidth, traffic with perfectly
            fused chains.
        kind: figure that divides `matrix`: "matmul", "eight_bit", "attention",
            "attention_backward", or "" where none does.
        grouped, misaligned: whether `matrix` is divided by that figure, too.
        chain, outside, indexed: whether the kernel is a chain of ops, is outside of all layers, and
            gathers or scatters.
        times: executions by row of the tally, array [rows, kernels].
    """

    matrix: Array
    vector: Array
    traffic: Array
    kind: Array
    grouped: Array
    misaligned: Array
    chain: Array
    outside: Array
    indexed: Array
    times: Array

    def seconds(self, of: Columns, launch_s: float, unfused_loss: float) -> Array:
        """Seconds of an execution of each kernel, array [kernels, settings]; `unfused_loss` is the
        least that `unfused` is outside of all layers.
        """
        share = np.ones((len(self.matrix), len(of["matmul"])))
        for name in ("matmul", "eight_bit", "attention", "attention_backward"):
            share[self.kind == name] = of[name]
        share[self.grouped] *= of["grouped"]
        share[self.misaligned] *= of["misaligned"]
        passes = np.ones_like(share)
        passes[self.chain] = of["unfused"]
        passes[self.chain & self.outside] = np.maximum(of["unfused"], unfused_loss)
        rate = np.ones_like(share) * of["memory"]
        rate[self.indexed] = of["gather"]
        alone = np.maximum(self.matrix[:, None] / share, self.traffic[:, None] * passes / rate)
        return np.maximum(self.vector[:, None], alone) + np.maximum(launch_s, of["gap_s"])


def kernels_of(
    found: Mapping[KernelSeconds, list[tuple[int, float]]],
    shapes: Degrees,
    pricer: Pricer,
    rows: int,
) -> Kernels:
    plain = replace(pricer.efficiency, memory=1.0, unfused=1.0, gather=None)
    slowed = replace(plain, misaligned=0.5)
    chip, terms = pricer.topology.chip, [one.term for one in found]
    parts = np.array(
        [
            [float(part[0]) for part in kernel_parts(term, lambda a: local(a, shapes), chip, plain)]
            for term in terms
        ]
    )
    slow = np.array(
        [float(kernel_parts(t, lambda a: local(a, shapes), chip, slowed)[1][0]) for t in terms]
    )
    times = np.zeros((rows, len(terms)))
    for number, listed in enumerate(found.values()):
        for row, amount in listed:
            times[row, number] += amount
    return Kernels(
        matrix=parts[:, 1],
        vector=parts[:, 0],
        traffic=parts[:, 2],
        kind=np.array([_kind(term) for term in terms]),
        grouped=np.array([term.kind in GROUPED for term in terms]),
        misaligned=slow > 1.5 * parts[:, 1],
        chain=np.array([term.category in FUSIBLE for term in terms]),
        outside=np.array([one.outside for one in found]),
        indexed=np.array([term.category in ("gather", "scatter") for term in terms]),
        times=times,
    )


def _kind(term: Compute) -> str:
    """The figure that divides the matrix work of a kernel; "" where it has none."""
    if term.kind in (FORWARD, BACKWARD):
        return "attention" if term.kind == FORWARD else "attention_backward"
    matrix = term.kind in GROUPED or term.category == "convolution" or term.matmul is not None
    return "" if not matrix else "eight_bit" if term.dtype.startswith(EIGHT) else "matmul"
