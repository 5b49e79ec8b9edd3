"""What a plan puts in host memory rests there, and the numbers stay those of a program that keeps
it on the device.
"""

from __future__ import annotations

import jax
import pytest

from shardlib import _jax_compat
from shardlib.errors import PinError
from shardlib.lowering import step
from shardlib.verification.verify import export_step
from tests.lowering import small
from tests.lowering.small import built
from tests.lowering.test_traps import mlp_program


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def stepped(program, steps=2):
    state = program.init(0)
    for _ in range(steps):
        state, metrics = program.step(state, small.batch())
    return state, float(metrics["loss"])


@pytest.fixture(scope="module")
def plain():
    return stepped(built({"fsdp": 4, "tensor": 2}, zero=3, remat="full"))


@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_state_and_activations_in_host_memory_change_no_number(plain, remat):
    program = built(
        {"fsdp": 4, "tensor": 2}, zero=3, remat=remat, offload=("optimizer", "activations")
    )
    assert kinds(program.init(0).opt_state) == {"pinned_host"}
    state, loss = stepped(program)
    assert kinds(state.opt_state) == {"pinned_host"} and kinds(state.params) == {"device"}
    assert loss == pytest.approx(plain[1], rel=1e-6)
    assert (
        small.farthest((state.params, state.opt_state), (plain[0].params, plain[0].opt_state))
        < 1e-5
    )
    with _jax_compat.in_mesh(program.mesh):
        step = str(jax.make_jaxpr(program.step_function())(program.state, program.batch))
    assert "<host>[4,16,4,16]" in step  # what the layers start from


def test_devices_without_host_memory_keep_the_state_and_say_so(monkeypatch):
    monkeypatch.setattr(step, "has_host_memory", lambda mesh: False)
    program = built({"data": 8}, offload=("optimizer",))
    assert kinds(program.state.opt_state) == {"device"} and "no-host-memory" in [
        finding.code for finding in program.findings
    ]


def test_memories_travel_with_an_exported_step():
    step = export_step(
        built({"fsdp": 8}, None, {"abstract": True}, zero=3, remat="full", offload=("optimizer",)),
        "tpu",
    )
    names = dict(zip(step.arguments, step.in_kinds, strict=True))
    assert {name.split(".")[0] for name, kind in names.items() if kind == "pinned_host"} == {
        "opt_state"
    }
    assert step.out_kinds == step.in_kinds[: len(step.out_kinds)] and sum(
        kind == "pinned_host" for kind in step.out_kinds
    ) == 2 * len(small.AXES)
    assert b"pinned_host" in step.program


def test_activations_need_layers_under_a_scan():
    with pytest.raises(PinError, match="under a scan"):
        mlp_program({"data": 8}, remat="full", offload=("activations",))
