"""Steps of a plan in a profile that JAX has recorded.

Every program that shardlib makes of a plan is named after it, "shardlib_step_e4b19c16919f", so that
a profile says which plan it is of. On every platform the profiler says when which device ran which
instruction of it. Where it numbers the executions of a program, a step is one of them; where it
does not, a step begins with the first of the instructions that run once in each.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from shardlib import _jax_compat
from shardlib.errors import MissingFileError, VerificationError
from shardlib.report.timelines import MeasuredStep, Operation

#: What the compiled modules of steps are called.
_STEP = re.compile(r"jit_shardlib_step_(\w+?)(?:\(\d+\))?$")
#: Share of the operations of the longest step that a step has which was recorded from its start to
#: its end; profilers lose some.
_WHOLE = 0.9
#: Folders of a run's profiles, "step-6".
_FIRST = re.compile(r"step-(\d+)$")


def newest_profile(run: Path) -> Path:
    """The newest profile of a run."""
    if run.is_file():
        return run
    paths = sorted(run.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise MissingFileError(
            f"{run} has no profile (*.xplane.pb)\nTry: --profile 100:3 at training; or `touch"
            f" {run / 'profiles' / 'profile'}` while the run goes on"
        )
    return paths[-1]


def recorded_steps(profile: Path, digest: str) -> tuple[MeasuredStep, ...]:
    """The steps of a plan in a profile, in order of time."""
    executed, others = _executions(profile, digest)
    longest = max((len(step) for step in executed), default=0)
    complete = [step for step in executed if len(step) > _WHOLE * longest]
    if not complete:
        seen = ", ".join(sorted(others)) or "none"
        raise VerificationError(
            f"{profile} shows no step of plan {digest}; plans whose steps it shows: {seen}\nTry:"
            " the plan.json of the run's own folder"
        )
    first = next((int(m[1]) for part in profile.parts if (m := _FIRST.fullmatch(part))), 1)
    return tuple(
        MeasuredStep(
            name=f"step {first + number}",
            start=min(operation.start for operation in step),
            seconds=max(operation.start + operation.seconds for operation in step)
            - min(operation.start for operation in step),
            operations=tuple(step),
        )
        for number, step in enumerate(complete)
    )


def _executions(profile: Path, digest: str) -> tuple[list[list[Operation]], set[str]]:
    """The operations of every step of a plan, and the plans whose steps are in a profile."""
    runs: dict[object, list[Operation]] = defaultdict(list)
    seen = set[str]()
    try:
        events = _jax_compat.profile_events(profile.read_bytes())
    except OSError as error:
        raise MissingFileError(f"{profile} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise VerificationError(f"{profile} is not a profile of JAX: {error}") from error
    modules = [
        (plane, begin, begin + duration, event)
        for plane, line, event, begin, duration, _ in events
        if line == "XLA Modules"
    ]
    for plane, line, event, begin, duration, stats in events:
        match = re.fullmatch(r"/device:[A-Z]+:(\d+)", plane)
        name = str(stats.get("hlo_op") or (event if match and line == "XLA Ops" else ""))
        device = int(match[1]) if match else stats.get("device_ordinal")
        if not name or device is None:
            continue
        module = stats.get("hlo_module") or next(
            (
                module_name
                for module_plane, first, last, module_name in modules
                if module_plane == plane and first <= begin < last
            ),
            "",
        )
        plan = _STEP.match(str(module))
        if plan is None:
            continue
        seen.add(plan[1])
        if plan[1] == digest:
            runs[stats.get("run_id")].append(
                Operation(
                    device=int(device),
                    name=re.split(r"[ =]", name.lstrip("%"))[0],
                    start=begin * 1e-9,
                    seconds=duration * 1e-9,
                )
            )
    steps = [step for key, run in runs.items() for step in ([run] if key else _parted(run))]
    return sorted(steps, key=lambda step: min(operation.start for operation in step)), seen


def _parted(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Operations of several executions whose numbers are not known. On every device one begins with
    the first of the instructions that run the least often.
    """
    steps: dict[int, list[Operation]] = defaultdict(list)
    for device in {operation.device for operation in operations}:
        on_device = sorted(
            (o for o in operations if o.device == device), key=lambda operation: operation.start
        )
        starts: dict[str, list[float]] = defaultdict(list)
        for operation in on_device:
            starts[operation.name].append(operation.start)
        fewest = min(len(times) for times in starts.values())
        rare = [times for times in starts.values() if len(times) == fewest]
        begins = [min(each) for each in zip(*rare, strict=True)]
        for operation in on_device:
            steps[max(0, bisect_right(begins, operation.start) - 1)].append(operation)
    return [steps[number] for number in sorted(steps)]
