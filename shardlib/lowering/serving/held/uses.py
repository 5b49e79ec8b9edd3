"""Which inputs of a forward pass are only multiplied with, and over which of their dims?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardlib._jax_compat import scan_counts
from shardlib.lowering.serving.calls import bodies
from shardlib.lowering.serving.latent import Latent
from shardlib.tracing.program import Equation, Program

#: Dims that a product sums over; None for any other use.
Use = tuple[int, ...] | None
#: Stands before the dims of a row.
ROW = -1


def summed_dims(
    program: Program, loops: Iterable[str], latents: Mapping[str, Latent]
) -> Mapping[int, tuple[int, ...]]:
    """Of each input that is only a factor of products, all over the same dims and without batch
    dims: these dims, ascending. Of what a loop takes rows of: `ROW` and those of a row.
    """
    uses_by_number = _uses(program, frozenset(loops), latents)
    return {
        number: use
        for number in program.inputs
        if len(uses := uses_by_number.get(number, set())) == 1
        and (use := next(iter(uses))) is not None
    }


def _uses(
    program: Program, loops: frozenset[str], latents: Mapping[str, Latent]
) -> dict[int, set[Use]]:
    uses_by_number: dict[int, set[Use]] = {number: {None} for number in program.outputs}
    for equation in reversed(program.equations):
        latent = equation.call and latents.get(equation.call.path)
        if latent:
            uses_by_number[latent.key] = uses_by_number[latent.value] = {None}
        uses = _of(equation, uses_by_number, loops, latents)
        for number, input_uses in zip(equation.inputs, uses, strict=True):
            uses_by_number[number] = uses_by_number.get(number, set[Use]()) | input_uses
    return uses_by_number


def _of(
    equation: Equation,
    uses_by_number: Mapping[int, set[Use]],
    loops: frozenset[str],
    latents: Mapping[str, Latent],
) -> list[set[Use]]:
    """How an equation uses each of its inputs."""
    unknown: list[set[Use]] = [{None} for _ in equation.inputs]
    if equation.call is not None:
        return unknown
    if equation.name == "convert_element_type":
        uses = uses_by_number.get(equation.outputs[0], set[Use]())
        return [{use if use and use[0] != ROW else None for use in uses}]
    if equation.name == "dot_general":
        summed, batch = equation.params["dimension_numbers"]
        return unknown if batch[0] else [{tuple(sorted(dims))} for dims in summed]
    body = next((program for program, _ in bodies(equation)), None)
    if body is None or (equation.name == "scan" and equation.path not in loops):
        return unknown
    inner = _uses(body, loops, latents)
    uses = [inner.get(number, set[Use]()) for number in body.inputs]
    if equation.name == "scan":
        constants, carried = scan_counts(equation.params)
        uses[constants : constants + carried] = unknown[constants : constants + carried]
        first = constants + carried
        uses[first:] = [{use and (ROW, *use) for use in row_uses} for row_uses in uses[first:]]
    return uses
