"""Asynchronous collectives: what a start produces, and which part of a chain counts."""

from __future__ import annotations

from shardlib.verification.hlo.hlo import Computation, Instruction
from shardlib.verification.hlo.shapes import HloError, elements


def result_shape(instruction: Instruction) -> str:
    """The type of what a collective produces; a start holds its operands beside it."""
    parts = elements(instruction.shape)
    kind = instruction.opcode.removesuffix("-start")
    if kind == instruction.opcode or not instruction.shape.startswith("("):
        return instruction.shape
    if parts and parts[0].startswith("(") and len(parts) > 1:
        return parts[1]
    if kind == "all-reduce":
        return instruction.shape
    if len(parts) < 2:
        raise HloError(
            f"the type of {instruction.opcode} holds no result: {instruction.shape[:80]}"
        )
    return parts[1]


def continued(instruction: Instruction, body: Computation) -> bool:
    """Whether this is a later piece of a collective that TPU fusions carry along: only the piece
    that starts it counts.

    The pieces share a `chain_id`; the first feeds a custom call AsyncCollectiveStart, the last one
    AsyncCollectiveDone.
    """
    if "chain_id=" not in instruction.attribute("frontend_attributes"):
        return False
    return not any(
        i.opcode == "custom-call"
        and instruction.name in i.operands
        and i.attribute("custom_call_target") == '"AsyncCollectiveStart"'
        for i in body.instructions
    )
