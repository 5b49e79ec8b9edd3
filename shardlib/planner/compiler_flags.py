"""Compiler flags as a part of a plan: options of XLA that follow from what the plan communicates.

Only what lowers the exposed seconds of compiled programs at no cost in memory is among them
(`benchmarks/compiler_flags.py`, `docs/flags.md`): one threshold for GPUs. Programs for TPUs and
CPUs are compiled as their compilers do by themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from shardlib.cost.pricing import collective_seconds
from shardlib.errors import ArgumentError, MissingFileError, TopologyError
from shardlib.layout import Collective
from shardlib.machines.topology import topology as find_topology
from shardlib.report.elements import bytes_text, seconds_text

if TYPE_CHECKING:
    from shardlib.machines.topology import Topology
    from shardlib.planner.plan import Plan

OptionValue: TypeAlias = str | bool | int
#: Bytes up to which XLA's GPU compiler combines all-gathers by itself
#: (`xla/debug_options_flags.cc`, kDefaultThreshold: 30 MiB).
COMBINED = 30 << 20
#: Bytes up to which it combines them with the flag (`docs/flags.md` has what others do).
LARGEST = 128 << 20
#: Share of a step that combining must save: where it saves less, other collectives wait for longer.
LEAST = 0.01


@dataclass(frozen=True, kw_only=True)
class CompilerFlag:
    """An option of the compiler.

    Attributes:
        name: as XLA has it, without dashes.
        value: what it is set to.
        reason: why.
    """

    name: str
    value: OptionValue
    reason: str


def compiler_flags(plan: Plan) -> tuple[CompilerFlag, ...]:
    """The options that the programs of a plan are compiled with."""
    try:
        machine = find_topology(plan.topology)
    except (TopologyError, MissingFileError):
        return ()
    if machine.chip.vendor != "nvidia" or plan.framework is not None:
        return ()
    layers: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for collective in plan.estimate.collectives:
        if collective.kind == "all-gather" and collective.count > 1 and not collective.every:
            layers[collective.axes].append(collective)
    savings = {axes: _saved(plan, machine, axes, found) for axes, found in layers.items()}
    axes = max(savings, key=lambda axes: savings[axes], default=())
    if not savings or savings[axes] < LEAST * plan.estimate.step_seconds:
        return ()
    return (
        CompilerFlag(
            name="xla_gpu_all_gather_combine_threshold_bytes",
            value=LARGEST,
            reason=(
                f"a layer gathers {bytes_text(sum(c.bytes for c in layers[axes]))} in"
                f" {len(layers[axes])} arrays over {'·'.join(axes)}; combined up to"
                f" {bytes_text(LARGEST)}, {seconds_text(savings[axes])} of latency go"
            ),
        ),
    )


def _saved(
    plan: Plan, machine: Topology, axes: tuple[str, ...], gathers: Sequence[Collective]
) -> float:
    """Seconds of a step that combining up to `LARGEST` saves over `COMBINED`."""

    def seconds(limit: int) -> float:
        ways, order = plan.mesh.ways(axes), plan.axis_order
        return sum(
            count * collective_seconds("all-gather", axes, ways, size, plan.mesh, machine, order)
            for count in {c.count for c in gathers}
            for size in combined(sorted(c.bytes for c in gathers if c.count == count), limit)
        )

    return seconds(COMBINED) - seconds(LARGEST)


def combined(sizes: Sequence[int], limit: int) -> list[int]:
    """Sizes of collectives after those that fit are combined, one after the other.

    >>> combined([2, 2, 3, 9], limit=5)
    [4, 3, 9]
    """
    sums: list[int] = []
    for size in sizes:
        if sums and sums[-1] + size <= limit:
            sums[-1] += size
        else:
            sums.append(size)
    return sums


#: Option that names a profile of a run, from which XLA's GPU compiler takes the latencies of
#: kernels and collectives. It logs a file that it cannot read, and compiles without.
PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"


def require_profile(options: Mapping[str, OptionValue]) -> None:
    """Refuses options with a profile that is not one.

    Raises:
        ArgumentError: the file or folder is not there, or a file has no costs.
    """
    path = Path(str(options.get(PROFILE, ".")))
    data = path.read_bytes() if path.is_file() else b"\n" if path.exists() else b""
    if b"costs {" not in data and not data.startswith(b"\n"):
        raise ArgumentError(
            f"{PROFILE}: {path} is not a profile of instructions (ProfiledInstructionsProto)\nTry:"
            " jax.experimental.profiler.get_profiled_instructions_proto(folder) of a run under"
            " jax.profiler.trace(folder)"
        )
