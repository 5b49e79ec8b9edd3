"""A state that a step took over is refused, whatever it is given to, before a program reads what is
no longer there.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from shardlib.errors import BatchError, StateError
from shardlib.lowering.runtime import GuardState, require_not_donated
from tests.lowering import small
from tests.lowering.small import built
from tests.processes import python

TWICE = """
import tests.conftest, optax
from shardlib.errors import StateError
from tests.lowering import small

program = small.program(optax.adam(0.01), {"mesh": {"fsdp": 4}})
first = program.init(0)
after, _ = program.step(first, small.batch())
for ask in (program.step, program.evaluate, lambda state, batch: program.module(state), lambda state, batch: program.anew(state)):
    try:
        ask(first, small.batch())
    except StateError as error:
        print(error)
after, metrics = program.step(after, small.batch())
print(float(metrics["loss"]))
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_state_that_is_used_again_does_not_kill_the_process():
    done = python("-c", TWICE)
    *told, loss = done.stdout.strip().split("\n")
    assert sum("params.down was deleted" in line for line in told) == 4 and float(loss) > 0
    assert (
        sum(
            line
            == "Try: use the state that step returned: state, metrics = program.step(state, batch)"
            for line in told
        )
        == 4
    )


def zeros(program):
    return jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), program.state
    )


def test_what_is_no_array_of_devices_is_not_looked_at():
    require_not_donated("step", {"host": np.zeros(2), "number": 1.0, "device": jax.numpy.zeros(2)})
    jax.make_jaxpr(lambda x: require_not_donated("step", [x]))(1.0)
    gone = [jax.numpy.zeros(2) for _ in range(6)]
    for leaf in gone:
        leaf.delete()
    with pytest.raises(StateError, match="and 3 more"):
        require_not_donated("step", [np.zeros(2), *gone])


OWN = (
    "Try: a state of this program, from program.init, program.step, or"
    " Checkpoints.restore(program), which adapts it to another plan or mesh"
)
MOVE = (
    "Try: state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, program.state)),"
    " which lays it out as this program does"
)


def refused(ask, *given):
    with pytest.raises(StateError) as error:
        ask(*given)
    return str(error.value)


@pytest.fixture(scope="module")
def program():
    return small.program(optax.sgd(0.01), {"mesh": {"data": 4}})


def test_what_is_no_state_is_refused(program):
    state = zeros(program)
    for given, what in (
        (None, "None"),
        (state.params, "a value of type dict"),
        ((state, {}), "a value of type tuple"),
    ):
        for name, ask in {
            "step": program.step,
            "evaluate": program.evaluate,
            "module": lambda state, _: program.module(state),
            "anew": lambda state, _: program.anew(state),
        }.items():
            assert (
                refused(ask, given, small.batch())
                == f"{name} was given {what}, which is not a training state\nTry: state ="
                " program.init(seed=0), and then state, metrics = program.step(state, batch)"
            )


def test_a_state_of_another_mesh_says_where_it_lies_and_can_be_moved():
    one, other = (
        small.program(optax.sgd(0.01), {"mesh": {"fsdp": 2}, "zero": 3}),
        small.program(optax.sgd(0.01), {"mesh": {"tensor": 2}}),
    )
    state = one.init(0)
    for name, ask, hint in (("step", other.step, MOVE), ("evaluate", other.evaluate, OWN)):
        assert (
            refused(ask, state, small.batch())
            == f"the state given to {name} does not belong to this program:\n  - params.down is P(None,"
            " 'fsdp', None) over fsdp=2, the program has P(None, None, None) over tensor=2\n  -"
            " params.parts is P('fsdp', None) over fsdp=2, the program has P(None, None) over"
            " tensor=2\n  - params.up is P(None, 'fsdp', None) over fsdp=2, the program has"
            f" P(None, None, None) over tensor=2\n{hint}"
        )
    moved = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, other.state))
    (_, metrics), (_, wanted) = (
        other.step(moved, small.batch()),
        one.step(one.init(0), small.batch()),
    )
    assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)


@pytest.mark.parametrize(
    "decisions",
    [
        {"mesh": {"data": 8}},
        {
            "pipeline": "programs",
            "schedule": "1f1b",
            "microbatches": 4,
            "mesh": {"stage": 2, "data": 4},
        },
        {"offload": ("disk",), "mesh": {"data": 8}},
    ],
    ids=["one program", "a program a stage", "state on disk"],
)
def test_every_way_to_run_a_step_looks_first(decisions):
    program = built(**decisions)
    adam = zeros(program)
    momentum = replace(adam, opt_state=optax.sgd(0.1, momentum=0.9).init(adam.params))
    none = "does not belong to this program:"
    assert refused(program.step, momentum, small.batch()) == (
        f"the state given to step {none}\n  - opt_state.0.count is not in it\n  -"
        " opt_state.0.mu.down is not in it\n  - opt_state.0.mu.parts is not in it\n  - and 13"
        f" more\n{OWN}"
    )
    longer = replace(adam, params={**adam.params, "down": jax.numpy.zeros((4, 16, 16))})
    for name, ask in {"step": program.step, "evaluate": program.evaluate}.items():
        assert refused(ask, longer, small.batch()) == (
            f"the state given to {name} {none} params.down is float32[4, 16, 16], the program has"
            f" float32[4, 32, 16]\n{OWN}"
        )
    assert refused(program.module, longer) == (
        f"the state given to module {none} params.down is [4, 16, 16], the program has [4, 32, 16]"
        f"\n{OWN}"
    )
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((adam, momentum)))
    adam.params["up"].delete()
    for name, ask in {"step": program.step, "evaluate": program.evaluate}.items():
        assert refused(ask, adam, small.batch()) == (
            f"the state given to {name} is no longer there: a step donates the buffers of its"
            " input state: params.up was deleted\nTry: use the state that step"
            " returned: state, metrics = program.step(state, batch)"
        )


def test_a_state_with_guards_is_none_of_a_program_without(program):
    guarded = replace(zeros(program), guard=GuardState())
    assert (
        refused(program.step, guarded, small.batch())
        == "the state given to step does not belong to this program: GuardState in the place of NoneType"
        "\n" + OWN
    )


def test_other_errors_stay_what_they_are(program, monkeypatch):
    def fail(*_):
        raise ValueError("something else")

    monkeypatch.setattr(type(program), "_run_step", property(lambda _: fail))
    with pytest.raises(ValueError, match=r"^something else$"):
        program.step(zeros(program), small.batch())
    monkeypatch.undo()
    with pytest.raises(BatchError):
        program.step(zeros(program), small.batch(rows=8))
    state = program.init(0)
    program.step(state, small.batch())
    with pytest.raises(StateError, match="no longer there"):
        program.evaluation(small.loss, batch_axes=small.BATCH_AXES).evaluate(state, small.batch())
