"""What can train: a program of a loss, of islands, or of a step of the user's own."""

from __future__ import annotations

from typing import TypeAlias

from shardlib.frontend.steps.step_program import StepProgram
from shardlib.lowering.islands.program import IslandsProgram
from shardlib.lowering.program.program import Program

AnyProgram: TypeAlias = Program | IslandsProgram | StepProgram
