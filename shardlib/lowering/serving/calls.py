"""Which calls of attention does a forward pass make, and what does each keep of a token?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import jax

from shardlib._jax_compat import scan_counts
from shardlib.errors import ModelError, raise_all
from shardlib.functions.attention import Attention, Operands
from shardlib.lowering.serving.cache_groups import CacheGroup, Constants, Layers
from shardlib.lowering.serving.cache_groups.constants import kept_windows
from shardlib.lowering.serving.latent import Latent, latent
from shardlib.tracing.program import REMAT, Call, Equation, Program, callee, flatten


@dataclass(frozen=True, kw_only=True)
class CachedCall:
    """A call of attention in a forward pass of one token.

    Attributes:
        path: where it stands.
        form: what it computes.
        windows: tokens that each of its layers keeps, iterations of the loops around it in the
            order in which they run; 0 for all.
        kept: of a token, for each of the arrays of keys and then the values: shape and dtype. With
            a latent the values are those of the key that is linear in it.
        heads: of queries.
        width: elements of a query and of a value, of one head, as they are multiplied.
        latent: what keys and values are made of, where a cache keeps that.
    """

    path: str
    form: Attention
    windows: tuple[int, ...]
    kept: tuple[jax.ShapeDtypeStruct, ...]
    heads: int
    width: int
    latent: Latent | None = None

    @property
    def key_heads(self) -> int:
        """Heads of what is kept."""
        return max(array.shape[0] for array in self.kept if len(array.shape) > 1)

    @property
    def layers(self) -> int:
        """How often it runs."""
        return len(self.windows)

    def pages(
        self, groups: Sequence[CacheGroup], size: int, devices: int = 1
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What its pages are: [layers, pages, tokens, ...] for each array that is kept."""
        layers, count = Layers.of(self.windows, groups).leading
        return tuple(
            jax.ShapeDtypeStruct((layers, devices * count, size, *array.shape), array.dtype)
            for array in self.kept
        )


def cached_calls(program: Program, there: int = 0) -> tuple[CachedCall, ...]:
    """The calls of attention of a forward pass, in order."""
    beside = beside_calls(program)
    calls = [
        call for call in _calls(program, [Constants(program=program)]) if call.path not in beside
    ]
    failures = [
        f"the call of shardlib.attention at equation {call.path} {why}"
        for call in calls
        for why, wrong in (
            ("is not causal: its keys are not those of tokens before", not call.form.causal),
            ("has segments: a request is one document", call.form.packed),
        )
        if wrong
    ]
    if not calls and not there:
        failures = ["the forward pass calls shardlib.attention nowhere, or inside of jax.vmap"]
    if failures:
        raise_all(
            ModelError,
            "the model cannot be served with a cache",
            failures,
            hint="shardlib.attention(query, key, value) in place of the model's own attention",
        )
    return tuple(calls)


def beside_calls(program: Program) -> frozenset[str]:
    """Paths of calls of attention that need no cache: not causal, and what they look at depends on
    no token, such as what an encoder made of a source.
    """
    return frozenset(_moved(program, {program.inputs[-1]})[0])


def _moved(program: Program, moving: set[int]) -> tuple[set[str], set[int]]:
    """Paths of calls whose keys and values do not depend on some values, and all values that do."""
    paths_unmoved, moving = set[str](), set(moving)
    for equation in program.equations:
        call = equation.call
        if call is not None and isinstance(call.form, Attention) and not call.form.causal:
            operands = Operands.of(call.form, list(call.inputs))
            biased = call.form.bias is not None  # of a query that has no position here
            looked = [*operands.keys, operands.value, *(operands.queries if biased else ())]
            if not any(number in moving for number in looked):
                paths_unmoved.add(call.path)
        inner = next(bodies(equation), None) if call is None else None
        if inner is None:
            if moving & {*equation.inputs}:
                moving.update(equation.outputs)
            continue
        body = inner[0]
        enters = {
            inner_input
            for inner_input, outer in zip(body.inputs, equation.inputs, strict=True)
            if outer in moving
        }
        while True:
            paths, after = _moved(body, enters)
            before = len(enters)
            if equation.name == "scan":
                constants, carried = scan_counts(equation.params)
                again = zip(body.inputs[constants:], body.outputs[:carried], strict=False)
                enters |= {inner_input for inner_input, out in again if out in after}
            if len(enters) == before:
                break
        paths_unmoved |= paths
        moving.update(
            outer for outer, out in zip(equation.outputs, body.outputs, strict=True) if out in after
        )
    return paths_unmoved, moving


def bodies(equation: Equation) -> Iterator[tuple[Program, int]]:
    """The programs inside of an equation that is walked into, and how often each runs."""
    if equation.name == "scan":
        yield (
            flatten(equation.params["jaxpr"], f"{equation.path}/body/", equation.scope),
            equation.params["length"],
        )
    elif equation.name in REMAT:
        yield flatten(callee(equation.eqn), f"{equation.path}/", equation.scope), 1


def _calls(program: Program, layers: Sequence[Constants]) -> Iterator[CachedCall]:
    """Calls of attention of a program that runs once for each layer."""
    done: Call | None = None
    for equation in program.equations:
        call = equation.call
        if call is not None and isinstance(call.form, Attention):
            if call is not done:
                yield _cached(program, call, layers)
            done = call
            continue
        for body, _ in bodies(equation):
            inner = [
                turn
                for layer in layers
                for turn in (
                    layer.iterations(equation, body)
                    if equation.name == "scan"
                    else [layer.inside(equation, body)]
                )
            ]
            yield from _calls(body, inner)


def _cached(program: Program, call: Call, layers: Sequence[Constants]) -> CachedCall:
    chosen = Operands.of(call.form, call.inputs).global_layer  # its number
    windows = (
        (call.form.window,) * len(layers)
        if chosen is None
        else kept_windows(call.form.window, [layer.of(cast(int, chosen)) for layer in layers])
    )
    operands = Operands.of(call.form, [program.avals[number] for number in call.inputs])
    latent_parts = latent(program, call)
    arrays = [
        jax.ShapeDtypeStruct(operand.shape[2:], operand.dtype)
        for operand in (*operands.keys, operands.value)
    ]
    width = sum(operand.shape[-1] for operand in (*operands.queries, operands.value))
    if latent_parts is not None:
        source = program.avals[latent_parts.source]
        across = source.shape[-1] - operands.queries[latent_parts.part].shape[-1]
        width += across + source.shape[-1] - operands.value.shape[-1]
        arrays = arrays[:-1]
        arrays[latent_parts.part] = jax.ShapeDtypeStruct((1, source.shape[-1]), source.dtype)
    return CachedCall(
        path=call.path,
        form=call.form,
        windows=windows,
        kept=tuple(arrays),
        heads=operands.queries[0].shape[2],
        width=width,
        latent=latent_parts,
    )
