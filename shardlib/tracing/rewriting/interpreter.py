"""How is a traced program run again with a hand on every value?

The lowering re-evaluates the user's loss to place sharding constraints and to choose what is
rematerialised. The walk is that of `program.py`, so a value reaches `place` under the path that its
op has in the `Graph`. Calls of jit are inlined; loops, branches and remat are rebuilt around their
re-evaluated bodies; custom derivatives are kept whole, so that gradients are the user's own. Only
their results reach `place`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from shardlib._jax_compat import scan_counts
from shardlib.errors import TracingError
from shardlib.tracing.program import (
    CUSTOM,
    REMAT,
    Call,
    Equation,
    Program,
    callee,
    flatten,
    has_matmul,
    result_path,
)
from shardlib.tracing.rewriting.derivatives import by_mesh
from shardlib.tracing.rewriting.partly import Part, in_parts, keeping
from shardlib.tracing.rewriting.recomputing import recomputed
from shardlib.tracing.rewriting.repeats import find_repeats

#: (path of an op of the graph, index of its result, value) -> the value to go on with.
Place = Callable[[str, int, Any], Any]

#: (equation, its operands) -> its results, or None to run it as it is.
Run = Callable[[Equation, Sequence[Any]], "list[Any] | None"]

#: Name of results of matmuls that are made in several pieces.
IN_PIECES = "shardlib: a result of matmuls in pieces"
_MATMULS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
_NAMED = jax.checkpoint_policies.save_only_these_names(IN_PIECES)


def results_of_matmuls(primitive: Any, *avals: Any, **params: Any) -> Any:
    """A policy of `jax.checkpoint` that saves results of matmuls, and where those are made in
    pieces (in a region that is manual over tensor) the whole alone.
    """
    return _NAMED(primitive, *avals, **params) or (
        _MATMULS(primitive, *avals, **params) and not any(map(_manual_over_tensor, avals))
    )


def _manual_over_tensor(aval: Any) -> bool:
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and any(
        name.partition("_")[0] == "tensor" and kind == AxisType.Manual
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )


#: Name of what a layer under a scan starts from.
LAYER_INPUT = "layer_input"
#: What the backward pass finds saved, per remat policy; "none" leaves the program as written.
POLICIES: Mapping[str, Callable[..., Any] | None] = {
    "full": None,
    "dots": _MATMULS,
}


@dataclass(frozen=True, kw_only=True)
class Together:
    """Equations that run as one, where the first of them stands; what they read may not depend on
    any of them.

    Attributes:
        paths: where they stand, in order.
        run: the operands of each -> the one result of each.
    """

    paths: tuple[str, ...]
    run: Callable[[Sequence[Sequence[Any]]], Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What is done to the values on the way.

    Attributes:
        place: called on every value that an op of the graph makes; None leaves all values alone.
        run: asked first to run an equation that is no loop, branch or remat; None runs all as they
            are.
        calls: what runs in place of calls of marked functions, by path: operands -> results.
        together: equations that run as one, by the path of each.
        beside: by path, (operands, array) -> result of an equation that takes an array beside its
            operands.
        arrays: those arrays, by path, with a leading dim for every scan around the equation, the
            outermost first.
        remat: policy for repeated layers; "none" leaves the program as written.
        apart: by path of a scan, or of the first equation of layers that are written out: the
            policy and how many of the layers follow it, the first ones; the others keep all.
        hosted: whether what the backward pass finds saved of layers under a scan waits for it in
            host memory.
        inside: whether the walk is inside a rematerialised layer, where the program's own remat is
            dropped.
    """

    place: Place | None = None
    run: Run | None = None
    calls: Mapping[str, Callable[..., Sequence[Any]]] = field(default_factory=dict)
    together: Mapping[str, Together] = field(default_factory=dict)
    beside: Mapping[str, Callable[[Sequence[Any], Any], Any]] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)
    remat: str = "none"
    apart: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    hosted: bool = False
    inside: bool = False

    def policy(self, path: str, layers: int) -> tuple[str, int]:
        """The policy of the repeated layers at a path, and how many of them follow it."""
        policy, count = self.apart.get(path, (self.remat, layers))
        return (policy, count) if count else ("none", layers)

    def put(self, path: str, index: int, value: Any) -> Any:
        """The value after `place`."""
        return value if self.place is None else self.place(path, index, value)

    def layer(self) -> Walk:
        """The walk inside a layer that is rematerialised as a whole."""
        return replace(self, remat="none", apart={}, inside=True)

    def as_written(self) -> Walk:
        """The walk inside something that is repeated within a layer."""
        return replace(self, remat="none", apart={}, inside=False)


def check_policy(remat: str | None) -> str:
    """The name of a remat policy.

    Raises:
        TracingError: there is none of that name.
    """
    if remat is None or remat == "none" or remat in POLICIES:
        return remat or "none"
    raise TracingError(
        f"{remat!r} is no remat policy\nTry: one of {', '.join(['none', *POLICIES])}"
    )


def evaluate(
    closed_jaxpr: Any,
    args: Sequence[Any],
    *,
    place: Place | None = None,
    run: Run | None = None,
    remat: str | None = None,
) -> list[Any]:
    """Runs a closed jaxpr again.

    Args:
        closed_jaxpr: from `jax.make_jaxpr`.
        args: one array or tracer per input.
        place: called as `place(path, index, value)` on result `index` of the graph's op at `path`,
            boundary ops of loops included ("3/carry/0" is carry 0 at the start of the body of the
            scan at "3"); returns the value to go on with.
        run: called as `run(equation, operands)`; returns the results, or None for the equation to
            be run as it is.
        remat: "none" (as written), "full" (nothing is saved inside a repeated layer) or "dots"
            (results of matmuls with no batch dims are saved). Repeated layers are the bodies of
            scans that contain a matmul, and runs of equal blocks; the program's own remat inside
            them gives way to the policy.

    Raises:
        TracingError: an unknown policy, or a primitive that cannot be evaluated again.
    """
    return evaluate_program(
        flatten(closed_jaxpr), args, Walk(place=place, run=run, remat=check_policy(remat))
    )


def evaluate_program(program: Program, args: Sequence[Any], walk: Walk) -> list[Any]:
    """Runs a program again; see `evaluate`."""
    env: dict[int, Any] = dict(program.constants)
    env.update(zip(program.inputs, args, strict=True))
    runs = find_repeats(program) if walk.remat != "none" or walk.apart else ()
    last = last_reads(program) if runs else {}
    at = 0
    for run in runs:
        policy, count = walk.policy(program.equations[run.start].path, run.count)
        evaluate_equations(program.equations[at : run.start], env, walk)
        for repetition in range(run.count):
            _block(
                program,
                run.start + repetition * run.period,
                run.period,
                last,
                env,
                replace(walk, remat=policy if repetition < count else "none"),
            )
        at = run.stop
    evaluate_equations(program.equations[at:], env, walk)
    return [env[number] for number in program.outputs]


def as_array(program: Program, number: int, value: Any) -> Any:
    """A value of a program as an array: what is written in it, such as a metric 3.0, is a number of
    Python.
    """
    return (
        value
        if isinstance(value, jax.Array) or number not in program.constants
        else jnp.asarray(value, program.avals[number].dtype)
    )


def last_reads(program: Program) -> dict[int, int]:
    """For every value that is read, the position of its last reader; results of the program are
    read at the end.
    """
    last = {
        number: at for at, equation in enumerate(program.equations) for number in equation.inputs
    }
    return {**last, **dict.fromkeys(program.outputs, len(program.equations))}


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
    made = {number for equation in equations for number in equation.outputs}
    read = sorted(
        {n for equation in equations for n in equation.inputs} - made - program.constants.keys()
    )
    left = sorted(number for number in made if last.get(number, -1) >= first + length)

    def block(*values: Any) -> list[Any]:
        inner = {**program.constants, **dict(zip(read, values, strict=True))}
        evaluate_equations(equations, inner, walk.layer())
        return [inner[number] for number in left]

    outputs = rematerialised(block, walk.remat, prevent_cse=True, in_pieces=bool(walk.together))(
        *(env[number] for number in read)
    )
    env.update(zip(left, outputs, strict=True))


def rematerialised(
    function: Callable[..., Any],
    remat: str,
    *,
    prevent_cse: bool,
    in_pieces: bool = False,
    hosted: bool = False,
) -> Callable[..., Any]:
    """The function under a remat policy; itself for "none".

    Args:
        function: arrays -> arrays.
        remat: name of the policy.
        prevent_cse: see `jax.checkpoint`.
        in_pieces: whether some of its matmuls are made in pieces (`Walk.together`).
        hosted: whether what is saved waits in host memory, the values called `LAYER_INPUT` among
            it.
    """
    if remat == "none":
        return function
    policy = POLICIES.get(remat)
    saved = (
        _offloading(remat)
        if hosted
        else results_of_matmuls
        if in_pieces and policy is _MATMULS
        else policy
    )
    return jax.checkpoint(recomputed(function), policy=saved, prevent_cse=prevent_cse)


def _offloading(remat: str) -> Callable[..., Any]:
    """A policy of `jax.checkpoint` that puts in host memory what the policy of that name saves, and
    what a layer starts from.
    """
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
    matmuls = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        return (matmuls if remat == "dots" and primitive.name == "dot_general" else named)(
            primitive, *avals, **params
        )

    return policy


def evaluate_equations(equations: Sequence[Equation], env: dict[int, Any], walk: Walk) -> None:
    """Runs equations in order; `env` holds the values by number and gains the results."""
    done: Call | None = None
    ready: set[str] = set()
    for at, equation in enumerate(equations):
        if equation.path in ready:
            continue
        if equation.path in walk.together:
            ready |= _together(walk.together[equation.path], equations[at:], env, walk)
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
        with _scope(call):
            results = _equation(equation, arguments, walk)
        env.update(zip(equation.outputs, results, strict=True))


def _scope(call: Call | None) -> AbstractContextManager[Any]:
    """The name scope of a marked function whose form has one; other scopes are not kept."""
    name = getattr(call.form, "scope", "") if call is not None else ""
    return jax.named_scope(name) if name else nullcontext()


def _together(
    group: Together, equations: Sequence[Equation], env: dict[int, Any], walk: Walk
) -> set[str]:
    """Runs equations as one, and before them what else they read; returns the paths of all that
    have run.
    """
    members = [equation for equation in equations if equation.path in group.paths]
    if len(members) < len(group.paths):
        raise TracingError(
            f"equations {', '.join(group.paths)} run as one and do not stand in one program"
        )
    makers = {number: equation for equation in equations for number in equation.outputs}
    early: dict[str, Equation] = {}
    waiting = [number for member in members for number in member.inputs]
    while waiting:
        number = waiting.pop()
        if number not in env and makers[number].path not in early:
            early[makers[number].path] = makers[number]
            waiting += makers[number].inputs
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
    if walk.place is None:
        return results
    paths = [
        result_path(equation, index) if equation.name in CUSTOM else (equation.path, index)
        for index in range(len(results))
    ]
    return [
        value if path is None else walk.put(*path, value)
        for path, value in zip(paths, results, strict=True)
    ]


def bind(equation: Equation, arguments: Sequence[Any], **changed: Any) -> list[Any]:
    """Runs one equation as it is, or with some of its parameters changed.

    Raises:
        TracingError: JAX refuses to bind the primitive again.
    """
    primitive = equation.eqn.primitive
    try:
        results = primitive.bind(
            *arguments, **primitive.get_bind_params({**by_mesh(equation.params), **changed})
        )
    except Exception as error:
        where = f" in {equation.scope}" if equation.scope else ""
        raise TracingError(
            f"primitive {equation.name!r} at equation {equation.path}{where} cannot be evaluated"
            f" again: {error}\nTry: write the computation with other jax.lax operations, or keep it"
            " out of the loss"
        ) from error
    return list(results) if primitive.multiple_results else [results]


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
    policy, count = walk.policy(path, params["length"]) if has_matmul(equation.eqn) else ("none", 0)
    layer = policy != "none"
    inner = walk.layer() if layer else walk.as_written()
    arrays = {at: array for at, array in walk.arrays.items() if at.startswith(f"{path}/body/")}

    def items(kind: str, values: Sequence[Any]) -> list[Any]:
        return [walk.put(f"{path}/{kind}/{k}", 0, value) for k, value in enumerate(values)]

    def body(
        carry: tuple[Any, ...], sliced: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        carry = (
            tuple(checkpoint_name(value, LAYER_INPUT) for value in carry)
            if layer and walk.hosted
            else carry
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

    def recomputing(function: Callable[..., Any]) -> Callable[..., Any]:
        return rematerialised(
            function, policy, prevent_cse=False, in_pieces=bool(walk.together), hosted=walk.hosted
        )

    init = tuple(
        strong(value, number)
        for value, number in zip(
            arguments[constants : constants + carried], _avals(program, constants), strict=False
        )
    )
    sliced = tuple(arguments[constants + carried :]), arrays
    if layer and count < params["length"]:
        parts = [
            Part(first=0, count=count, kept=recomputing),
            Part(first=count, count=params["length"] - count, kept=keeping),
        ]
        final, stacked = in_parts(
            parts[::-1] if params["reverse"] else parts, body, init, sliced, looped
        )
    else:
        final, stacked = looped(recomputing(body), init, sliced, params["length"])
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
            arguments[tests + constants :], _avals(program, constants), strict=True
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


def _avals(program: Program, first: int) -> list[Any]:
    return [program.avals[number] for number in program.inputs[first:]]


def strong(value: Any, aval: Any) -> Any:
    """An initial carry as an array of the carry's dtype; literals are Python numbers or NumPy
    scalars.
    """
    return (
        value
        if hasattr(value, "aval") or isinstance(value, jax.Array)
        else jnp.asarray(value, dtype=aval.dtype)
    )
