"""A state that a step took over is refused, whatever it is given to, before a program reads what is no longer there."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from shardlib.errors import StateError
from shardlib.lowering.donated import require_present
from tests.lowering import small
from tests.lowering.test_disk import built
from tests.processes import ROOT

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


def test_a_state_that_is_used_again_does_not_kill_the_process():
    done = subprocess.run([sys.executable, "-c", TWICE], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *told, loss = done.stdout.strip().split("\n")
    assert sum("params.down was deleted" in line for line in told) == 4 and float(loss) > 0
    assert sum(line == "Try: use the state that step returned: state, metrics = program.step(state, batch)" for line in told) == 4


def zeros(program):
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), program.state)


@pytest.mark.parametrize("decisions", [{"pipeline": "programs", "schedule": "1f1b", "microbatches": 4, "mesh": {"stage": 2, "data": 4}}, {"offload": ("disk",), "mesh": {"data": 8}}], ids=["a program a stage", "state on disk"])
def test_every_way_to_run_a_step_looks_first(decisions):
    program = built(**decisions)
    state = zeros(program)
    state.params["up"].delete()
    with pytest.raises(StateError) as error:
        program.step(state, small.batch())
    assert str(error.value) == ("the state given to step is no longer there: a step takes over the buffers of the state that it is given: params.up was deleted\n"
                                "Try: use the state that step returned: state, metrics = program.step(state, batch)")
    del state.params["up"]
    state.params["down"].delete()
    with pytest.raises(StateError, match=r"evaluate is no longer there.*: params\.down was deleted"):
        program.evaluate(state, small.batch())


def test_what_is_no_array_of_devices_is_not_looked_at():
    require_present("step", {"host": np.zeros(2), "number": 1.0, "device": jax.numpy.zeros(2)})
    jax.make_jaxpr(lambda x: require_present("step", [x]))(1.0)
    gone = [jax.numpy.zeros(2) for _ in range(6)]
    for leaf in gone:
        leaf.delete()
    with pytest.raises(StateError, match="and 3 more"):
        require_present("step", [np.zeros(2), *gone])


def test_optimizers_of_no_state_are_no_matter():
    program = built({"data": 8}, optax.sgd(0.01))
    state = zeros(program)
    jax.tree.map(lambda leaf: leaf.delete(), state.params)
    with pytest.raises(StateError, match=r"params\.down was deleted"):
        program.module(state)
