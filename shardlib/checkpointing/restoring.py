"""A checkpoint read back, and what follows where one is damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from shardlib.checkpointing import reading
from shardlib.checkpointing.elastic.other_number import read_other_number
from shardlib.checkpointing.elastic.source import Source
from shardlib.checkpointing.folder import Folder
from shardlib.checkpointing.islands.form import AnyProgram, State, is_alike
from shardlib.checkpointing.snapshot import Camera
from shardlib.errors import CheckpointError
from shardlib.lowering.runtime.state import TrainState
from shardlib.planning.plan import Plan
from shardlib.processes import together as processes
from shardlib.report import Finding
from shardlib.untrusted.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint gave back.

    Attributes:
        step: the step that it was saved at.
        state: the training state, laid out as the target says; of islands their state.
        extra: as it was saved.
        metrics: as they were saved.
        plan: the plan that it was trained under; None where none was saved, or where this version
            does not read it.
        findings: damaged checkpoints that were passed over, dtypes that were cast.
    """

    step: int
    state: TrainState
    extra: JsonObject
    metrics: dict[str, float]
    plan: Plan | None
    findings: tuple[Finding, ...] = ()


def read_checkpoint(
    folder: Folder,
    step: int,
    target: State | AnyProgram,
    camera: Camera,
    *,
    parameters_only: bool,
) -> Restored:
    """One checkpoint, straight to where its arrays are to live."""
    wanted = target.state if isinstance(target, AnyProgram) else target
    path = folder.checkpoint(step)
    about = reading.read_about(path, step)
    program = target if isinstance(target, AnyProgram) else None
    if is_alike(about.arrays, wanted):
        state, findings = reading.read_state(
            path, about, wanted, camera, program, new_optimizer=parameters_only
        )
    else:
        source = Source(path=path, about=about, camera=camera)
        state, findings = read_other_number(source, wanted, program, new_optimizer=parameters_only)
    plan, more = about.read_plan()
    return Restored(
        step=step,
        state=cast("TrainState", state),
        extra=dict(about.extra),
        metrics=dict(about.metrics),
        plan=plan,
        findings=(*findings, *more),
    )


def set_aside(
    folder: Folder, damaged: Mapping[int, str], *, read_only: bool
) -> tuple[Finding, ...]:
    """Renames damaged checkpoints and says what is wrong with them; to be called when a good
    one is restored.
    """
    findings: list[Finding] = []
    for step, text in damaged.items():
        name = folder.set_aside(step) if processes.is_first() and not read_only else str(step)
        findings.append(
            Finding(
                code="checkpoint-damaged",
                severity="warning",
                where=str(folder.path / name),
                hint="look at the disk; the checkpoint before it was used",
                message=f"The checkpoint of step {step} is damaged: {text}.",
            )
        )
    return tuple(findings)


def missing(folder: Folder, step: int | None, candidates: Sequence[int]) -> CheckpointError:
    """The error where there is no checkpoint, or none of a step.

    Args:
        step: that was asked for; None for the newest.
    """
    return CheckpointError(
        f"there is no checkpoint{'' if step is None else f' of step {step}'} in"
        f" {folder.path}\nTry: {f'one of {list(candidates)}' if candidates else 'another folder'}"
    )


def none_good(
    folder: Folder, damaged: Mapping[int, str], candidates: Sequence[int]
) -> CheckpointError:
    """The error where all checkpoints that were read are damaged."""
    lines = "".join(f"\n  - step {number}: {text}" for number, text in damaged.items())
    others = [other for other in candidates if other not in damaged]
    return CheckpointError(
        f"no checkpoint in {folder.path} is good:{lines}\nTry:"
        f" {f'one of {others}' if others else 'a copy of them'}; nothing was changed"
    )
