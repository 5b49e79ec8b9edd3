"""A traced program is run again with a hand on every value.

The lowering re-evaluates the user's loss to place sharding constraints and to choose what is
rematerialised. The walk is that of `program.py`, so a value reaches `place` under the path that its
op has in the `Graph`. Calls of jit are inlined; loops, branches and remat are rebuilt around their
re-evaluated bodies; custom derivatives are kept whole, so that gradients are the user's own. Only
their results reach `place`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardlib._jax_compat import scan_counts
from shardlib.jax_types import Jaxpr, Value
from shardlib.tracing.program import (
    REMAT,
    Call,
    Equation,
    Program,
    callee,
    flatten,
    has_matmul,
)
from shardlib.tracing.rewriting.binding import bind, carried_avals, last_reads, scope_of, strong
from shardlib.tracing.rewriting.partly import Part, in_parts, keeping
from shardlib.tracing.rewriting.recomputing import recomputed
from shardlib.tracing.rewriting.remat_policies import LAYER_INPUT, check_policy, rematerialised
from shardlib.tracing.rewriting.repeats import find_repeats
from shardlib.tracing.rewriting.walk import Place, Run, Together, Walk


def evaluate(
    closed_jaxpr: Jaxpr,
    args: Sequence[Value],
    *,
    place: Place | None = None,
    run: Run | None = None,
    remat: str | None = None,
) -> list[Value]:
    """Runs a closed jaxpr again.

    Args:
        run: called as `run(equation, operands)`; returns the results, or None for the equation to
            be run as it is.
    """
    return evaluate_program(
        flatten(closed_jaxpr), args, Walk(place=place, run=run, remat=check_policy(remat))
    )


def evaluate_program(program: Program, args: Sequence[Value], walk: Walk) -> list[Value]:
    """Runs a program again; see `evaluate`."""
    env: dict[int, Any] = dict(program.constants)
    env.update(zip(program.inputs, args, strict=True))
    runs = find_repeats(program) if walk.remat != "none" or walk.apart else ()
    last = last_reads(program) if runs else {}
    start = 0
    for run in runs:
        policy, count = walk.policy(program.equations[run.start].path, run.count)
        evaluate_equations(program.equations[start : run.start], env, walk)
        for repetition in range(run.count):
            _block(
                program,
                run.start + repetition * run.period,
                run.period,
                last,
                env,
                replace(walk, remat=policy if repetition < count else "none"),
            )
        start = run.stop
    evaluate_equations(program.equations[start:], env, walk)
    return [env[number] for number in program.outputs]


def _block(
    program: Program,
    first: int,
    length: int,
    last: Mapping[int, int],
    env: dict[int, Any],
    walk: Walk,
) -> None:
    """Runs one repetition of an unrolled layer under the remat policy."""
    equations = program.equations[first : first + length]
    if walk.remat == "none":
        evaluate_equations(equations, env, replace(walk, apart={}))
        return
    produced = {number for equation in equations for number in equation.outputs}
    read = sorted(
        {n for equation in equations for n in equation.inputs} - produced - program.constants.keys()
    )
    left = sorted(number for number in produced if last.get(number, -1) >= first + length)

    def block(*values: Any) -> list[Any]:
        inner = {**program.constants, **dict(zip(read, values, strict=True))}
        evaluate_equations(equations, inner, walk.layer())
        return [inner[number] for number in left]

    outputs = rematerialised(block, walk.remat, prevent_cse=True, in_pieces=bool(walk.together))(
        *(env[number] for number in read)
    )
    env.update(zip(left, outputs, strict=True))


def evaluate_equations(equations: Sequence[Equation], env: dict[int, Value], walk: Walk) -> None:
    """Runs equations in order; `env` holds the values by number and gains the results."""
    done: Call | None = None
    ready: set[str] = set()
    for position, equation in enumerate(equations):
        if equation.path in ready:
            continue
        if equation.path in walk.together:
            ready |= _together(walk.together[equation.path], equations[position:], env, walk)
            continue
        call = equation.call
        if call is not None and call.path in walk.calls:
            if call is not done:
                env.update(
                    zip(
                        call.outputs,
                        walk.calls[call.path](*(env[number] for number in call.inputs)),
                        strict=True,
                    )
                )
            done = call
            continue
        arguments = [env[number] for number in equation.inputs]
        with scope_of(call):
            results = _equation(equation, arguments, walk)
        env.update(zip(equation.outputs, results, strict=True))


def _together(
    group: Together, equations: Sequence[Equation], env: dict[int, Any], walk: Walk
) -> set[str]:
    """Runs equations as one, and before them what else they read; returns the paths of all that
    have run.
    """
    members, early = group.members(equations, env)
    evaluate_equations([equation for equation in equations if equation.path in early], env, walk)
    results = group.run([[env[number] for number in member.inputs] for member in members])
    env.update(
        {
            member.outputs[0]: walk.put(member.path, 0, value)
            for member, value in zip(members, results, strict=True)
        }
    )
    return {*group.paths, *early}


def _equation(equation: Equation, arguments: list[Any], walk: Walk) -> Sequence[Any]:
    if equation.name == "scan":
        return _scan(equation, arguments, walk)
    if equation.name == "while":
        return _while(equation, arguments, walk)
    if equation.name == "cond":
        return _cond(equation, arguments, walk)
    if equation.name in REMAT:
        return _remat(equation, arguments, walk)
    if equation.path in walk.arrays:
        results = [walk.beside[equation.path](arguments, walk.arrays[equation.path])]
    else:
        results = walk.run(equation, arguments) if walk.run is not None else None
    if results is None:
        results = bind(equation, arguments)
    return walk.placed(equation, results)


def _remat(equation: Equation, arguments: list[Any], walk: Walk) -> Sequence[Any]:
    program = flatten(callee(equation.eqn), f"{equation.path}/", equation.scope)
    if walk.inside:
        return evaluate_program(program, arguments, walk)
    body = walk.as_written()
    return jax.checkpoint(
        recomputed(lambda *values: evaluate_program(program, values, body)),
        policy=equation.params["policy"],
        prevent_cse=equation.params["prevent_cse"],
    )(*arguments)


def _scan(equation: Equation, arguments: list[Any], walk: Walk) -> Sequence[Any]:
    params, path = equation.params, equation.path
    constants, carried = scan_counts(params)
    program = flatten(params["jaxpr"], f"{path}/body/", equation.scope)
    repeated = has_matmul(equation.eqn)
    policy, count = walk.policy(path, params["length"]) if repeated else ("none", 0)
    layer, offloaded = policy != "none", walk.offloaded and repeated
    inner = walk.layer() if layer else walk.as_written()
    arrays = {
        array_path: array
        for array_path, array in walk.arrays.items()
        if array_path.startswith(f"{path}/body/")
    }

    def items(kind: str, values: Sequence[Any]) -> list[Any]:
        return [walk.put(f"{path}/{kind}/{k}", 0, value) for k, value in enumerate(values)]

    def body(
        carry: tuple[Any, ...], sliced: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        carry = (
            tuple(checkpoint_name(value, LAYER_INPUT) for value in carry) if offloaded else carry
        )
        values = [*arguments[:constants], *items("carry", carry), *items("enter", sliced[0])]
        outputs = evaluate_program(program, values, replace(inner, arrays=sliced[1]))
        return tuple(outputs[:carried]), tuple(outputs[carried:])

    def looped(
        function: Callable[..., Any], carry: tuple[Any, ...], sliced: Any, length: int
    ) -> Any:
        return jax.lax.scan(
            function,
            carry,
            sliced,
            length=length,
            reverse=params["reverse"],
            unroll=params["unroll"],
        )

    options = {"in_pieces": bool(walk.together), "offloaded": offloaded}
    wrap = partial(rematerialised, remat=policy, prevent_cse=False, **options)

    init = tuple(
        strong(value, number)
        for value, number in zip(
            arguments[constants : constants + carried],
            carried_avals(program, constants),
            strict=False,
        )
    )
    sliced = tuple(arguments[constants + carried :]), arrays
    if layer and count < params["length"]:
        wrap_others = partial(wrap, remat="none") if offloaded else keeping
        parts = [
            Part(first=0, count=count, kept=wrap),
            Part(first=count, count=params["length"] - count, kept=wrap_others),
        ]
        final, stacked = in_parts(
            parts[::-1] if params["reverse"] else parts, body, init, sliced, looped
        )
    else:
        final, stacked = looped(wrap(body), init, sliced, params["length"])
    return [*items("final", final), *items("exit", stacked)]


def _while(equation: Equation, arguments: list[Any], walk: Walk) -> Sequence[Any]:
    params, path = equation.params, equation.path
    tests, constants = params["cond_nconsts"], params["body_nconsts"]
    test = flatten(params["cond_jaxpr"], f"{path}/cond/", equation.scope)
    program = flatten(params["body_jaxpr"], f"{path}/body/", equation.scope)
    inner = walk.as_written()
    condition = replace(inner, place=None, run=None)

    def going(state: tuple[Any, ...]) -> Any:
        return evaluate_program(test, [*arguments[:tests], *state], condition)[0]

    def body(state: tuple[Any, ...]) -> tuple[Any, ...]:
        placed = [walk.put(f"{path}/carry/{k}", 0, value) for k, value in enumerate(state)]
        return tuple(
            evaluate_program(program, [*arguments[tests : tests + constants], *placed], inner)
        )

    init = tuple(
        strong(value, aval)
        for value, aval in zip(
            arguments[tests + constants :], carried_avals(program, constants), strict=True
        )
    )
    final = jax.lax.while_loop(going, body, init)
    return [walk.put(f"{path}/final/{k}", 0, value) for k, value in enumerate(final)]


def _cond(equation: Equation, arguments: list[Any], walk: Walk) -> Sequence[Any]:
    index, *operands = arguments
    inner = walk.as_written()
    programs = [
        flatten(branch, f"{equation.path}/branch{k}/", equation.scope)
        for k, branch in enumerate(equation.params["branches"])
    ]
    branches = [
        lambda *values, program=program: tuple(evaluate_program(program, values, inner))
        for program in programs
    ]
    results = jax.lax.switch(index, branches, *operands)
    return [walk.put(f"{equation.path}/join/{k}", 0, value) for k, value in enumerate(results)]
