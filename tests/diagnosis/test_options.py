"""Options of the compiler as cures: collectives that GPUs wait for, combined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib
from shardlib.diagnosis import diagnose
from shardlib.diagnosis.cures import compiler_options
from shardlib.diagnosis.program import Call
from shardlib.diagnosis.report import report_text
from shardlib.diagnosis.rows import Row
from shardlib.diagnosis.source import NOWHERE
from shardlib.planner.compiler_flags import LARGEST
from shardlib.verification.isolation import Compiled, Limits

MESH = AbstractMesh((64,), ("data",), axis_types=(AxisType.Auto,))
THRESHOLD = {"xla_gpu_all_gather_combine_threshold_bytes": LARGEST}


def array(shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(MESH, P(*spec)))


def layers(x: jax.Array, weights: Sequence[tuple[jax.Array, jax.Array]]) -> jax.Array:
    def layer(x, blocks):
        return x + sum(jnp.tanh(x @ up) @ down for up, down in blocks), None

    return jax.lax.scan(layer, x, weights)[0]


@pytest.mark.long
@pytest.mark.compiler("gpu")
def test_gathers_of_a_layer_that_are_not_combined() -> None:
    """Twelve blocks of 8 MiB are gathered in a turn of the loop; XLA combines up to 30 MiB."""
    blocks = [
        (array((4, 2048, 1024), None, "data"), array((4, 1024, 2048), None, "data"))
        for _ in range(12)
    ]
    arguments = array((131072, 2048), "data"), blocks
    call = Call(function=layers, arguments=arguments, keywords={})
    work = diagnose._Work(
        call=call,
        mesh=MESH,
        platform="cuda",
        topology=shardlib.topology("8*h100:8"),
        limits=Limits(),
        options={},
        say=lambda _: None,
    )
    function = work.trace()
    machine = diagnose.target_of(function, work.topology)
    (shardings,) = diagnose.propagate([function], machine, work.limits)
    outcome = diagnose.compile_function(function, machine, work.limits, {})
    assert isinstance(outcome, Compiled)
    before = work.read(function, machine, outcome, shardings)
    state = diagnose.Trial(edits=(), function=function, shardings=shardings, seconds=0.0)
    ((cure, _),), tried = work.with_options(state, machine, before, 2)
    assert (cure.edits, cure.options, tried) == ((), THRESHOLD, 1)
    written = shardlib.why(layers, *arguments, topology="8*h100:8", cures=0, options=THRESHOLD)
    c = written.communication
    assert (c.wire_bytes, c.step_seconds, c.memory["peak"]) == (
        cure.bytes[1],
        cure.seconds[1],
        cure.memory[1],
    )
    assert cure.seconds[1] < 0.99 * cure.seconds[0] and cure.bytes[1] == cure.bytes[0]
    diagnosis = replace(written, cures=(cure,))
    assert f"compiler_options={THRESHOLD}" in report_text(diagnosis)


def row(kind: str, exposed: float, *instructions: str, count: int = 0) -> Row:
    return Row(
        kind=kind,
        axes=("data",),
        bytes=1.0,
        count=count or len(instructions),
        seconds=exposed,
        exposed=exposed,
        overlap="",
        source=NOWHERE,
        meeting=None,
        dtypes=("f32",),
        instructions=instructions,
    )


def test_options_follow_from_what_nothing_hides() -> None:
    gathers = row("all-gather", 0.3, "a", "b"), row("all-gather", 0.1, "c", count=8)
    sums = row("all-reduce", 0.2, "d", "e")
    assert compiler_options((sums, *gathers), "nvidia", 1.0) == [
        THRESHOLD,
        {"xla_gpu_enable_pipelined_all_gather": True},
    ]
    assert compiler_options((sums,), "nvidia", 1.0) == [
        {"xla_gpu_all_reduce_combine_threshold_bytes": LARGEST}
    ]
    (asynchronous,) = compiler_options((sums, *gathers), "google", 1.0)
    assert asynchronous["xla_enable_async_all_reduce"] is True
    # hidden, one alone, or on a CPU
    assert compiler_options((sums, *gathers), "nvidia", 100.0) == []
    assert compiler_options((row("all-gather", 0.5, "a"),), "nvidia", 1.0) == []
    assert compiler_options((sums, *gathers), "cpu", 1.0) == []
