"""In which dtypes may a step compute, reduce and keep things?

Dtypes change the numbers that a program computes, so a plan has those of the traced model unless
the user pins others or allows them: then each is a decision like any other. A combination of dtypes
is another problem under another profile, and everything that prices plans works as it does on any:
stored parameters are the graph's, products of layers' weights, communicated gradients and gradients
that are kept are facts of the profile (`shardlib.cost.terms.framework`), moments are bytes of
optimizer state.

>>> combinations((("moment_dtype", "bfloat16"),), (("reduction_dtype", ("bfloat16",)),))
[(('moment_dtype', 'bfloat16'),), (('reduction_dtype', 'bfloat16'), ('moment_dtype', 'bfloat16'))]
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from shardlib.cost.step.layers import gradient_like, weights_of
from shardlib.cost.terms.framework import FrameworkProfile
from shardlib.decisions.dtypes import DTYPES, Allowed, Dtypes
from shardlib.errors import PinError
from shardlib.graph.check import check
from shardlib.graph.graph import ITEMSIZE
from shardlib.graph.problem import Parameter, Problem, StepGraph


def combinations(pinned: Dtypes, allowed: Allowed) -> list[Dtypes]:
    """Every combination of dtypes, those nearest to the traced model first: of equally fast plans
    the one that changes the least is found first.

    Args:
        pinned: (word, dtype) pairs that are fixed.
        allowed: (word, dtypes) that may be chosen.
    """
    fixed, others = dict(pinned), dict(allowed)
    options = [
        (
            [(word, fixed[word])]
            if word in fixed
            else [(word, ""), *((word, dtype) for dtype in others.get(word, ()))]
        )
        for word in DTYPES
    ]
    found = [
        tuple((word, dtype) for word, dtype in one if dtype) for one in itertools.product(*options)
    ]
    return sorted(found, key=len)


def effective(
    dtypes: Dtypes, problem: Problem, profile: FrameworkProfile, pinned: Dtypes = ()
) -> Dtypes:
    """Dtypes without those that problem and profile have already.

    Pinned dtypes of gradients stay: in communication most gradients of a model that computes in 16
    bits are in these, and those of tables in that of the parameters; programs add gradients up in
    float32 where nothing else is said.

    Args:
        dtypes: (word, dtype) pairs.
    """
    own = {parameter.dtype for parameter in problem.parameters if parameter.trained}
    has = {
        "param_dtype": own,
        "matmul_dtype": {profile.matmul_dtype or problem.compute_dtype},
        "reduction_dtype": {profile.reduction_dtype or problem.compute_dtype},
        "gradient_dtype": (
            {profile.gradient_dtype}
            if profile.gradient_dtype
            else {dict(dtypes).get("param_dtype", "")}
            if "param_dtype" in dict(dtypes)
            else own
        ),
    }
    same = (
        all(_moments(parameter, dtype) == parameter for parameter in problem.parameters)
        if (dtype := dict(dtypes).get("moment_dtype", ""))
        else False
    )
    kept = {
        (word, dtype) for word, dtype in pinned if word in ("reduction_dtype", "gradient_dtype")
    }
    return tuple(
        (word, dtype)
        for word, dtype in dtypes
        if (word, dtype) in kept or (not same if word == "moment_dtype" else has[word] != {dtype})
    )


def under(
    dtypes: Dtypes, problem: Problem, profile: FrameworkProfile
) -> tuple[Problem, FrameworkProfile]:
    """The problem and the framework profile with other dtypes.

    Args:
        dtypes: (word, dtype) pairs.
    """
    words = dict(dtypes)
    if "moment_dtype" in words:
        if profile.state_bytes is not None:
            raise PinError(
                f"moment_dtype={words['moment_dtype']!r} changes the bytes of optimizer state, and"
                f" the stack {profile.name!r} says them itself (state_bytes={profile.state_bytes})"
            )
        problem = replace(
            problem,
            parameters=tuple(
                _moments(parameter, words["moment_dtype"]) for parameter in problem.parameters
            ),
        )
    if "param_dtype" in words:
        dtype = words["param_dtype"]
        problem = replace(
            problem,
            parameters=tuple(
                replace(parameter, dtype=dtype) if parameter.trained else parameter
                for parameter in problem.parameters
            ),
            steps={policy: _resting(step, dtype) for policy, step in problem.steps.items()},
        )
    facts = {word: dtype for word, dtype in dtypes if word not in ("moment_dtype", "param_dtype")}
    if "param_dtype" in words and not profile.gradient_dtype:
        facts.setdefault(
            "gradient_dtype", "float32"
        )  # stored parameters in 16 bits do not narrow what gradients are added up in
    return problem, replace(profile, **facts) if facts else profile


def _moments(parameter: Parameter, dtype: str) -> Parameter:
    """A parameter whose optimizer state is in another dtype; where nobody says of how many arrays
    it is, they are float32.
    """
    if not parameter.trained:
        return parameter
    arrays = parameter.state_arrays or parameter.state_bytes_per_element / ITEMSIZE["float32"]
    return replace(parameter, state_bytes_per_element=arrays * ITEMSIZE[dtype])


def _resting(step: StepGraph, dtype: str) -> StepGraph:
    """A step whose trained parameters, and the gradients that it returns, are in another dtype:
    with them whatever is a copy or a slice of them; casts of them remain.
    """
    graph = step.graph
    trained = set(graph.inputs_of("parameter"))
    weights, gradients = (
        {value: source for value, source in weights_of(step).items() if source in trained},
        gradient_like(step),
    )
    own = {graph.values[value].dtype for value in trained}
    values = tuple(
        (
            replace(value, dtype=dtype)
            if (number in weights and value.dtype == graph.values[weights[number]].dtype)
            or (number in gradients and value.dtype in own)
            else value
        )
        for number, value in enumerate(graph.values)
    )
    changed = replace(graph, values=values)
    check(changed)
    return replace(step, graph=changed)
