"""Values that live at the peak of memory: their names, lines and shardings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import shardlib
from shardlib.diagnosis.diagnose import why_text
from shardlib.diagnosis.rows import spec_text
from tests.diagnosis import lookup_model as model

pytestmark = pytest.mark.long


def layer(x, w):
    hidden = jnp.tanh(x @ w)
    return hidden * hidden, None


def loss(ws, x):
    return jnp.mean(jax.lax.scan(layer, x, ws)[0])


@pytest.mark.parametrize(
    "topology", ["cpu:8", pytest.param("v5e:4x2", marks=pytest.mark.compiler("tpu"))]
)
def test_what_a_loop_stacks_has_the_line_that_makes_it(topology: str) -> None:
    ws, x = model.array((8, 1024, 1024)), model.array((65536, 1024), "data")
    diagnosis = shardlib.why(jax.grad(loss), ws, x, topology=topology, cures=0)
    live = {value.name: value for value in diagnosis.communication.live}
    hidden, line = live["hidden"], layer.__code__.co_firstlineno + 1
    assert hidden.bytes / hidden.count == 8 * 65536 * 1024 * 4 / 4
    assert hidden.spec is not None and spec_text(hidden.spec) == "[data, -]"
    assert hidden.source.user is not None and hidden.source.user.line == line
    large = [value for value in live.values() if value.bytes > 1 << 20]
    assert all(value.name and (value.source.user or value.name == "x") for value in large)
    (row,) = diagnosis.rows
    assert row.inherent and row.reason.startswith("the gradient of `ws` is summed over the batch")
    arguments = next(line for line in str(diagnosis).splitlines() if line.endswith("arguments"))
    assert arguments.split()[0] == "96.0"


COPIES = """\
HloModule f, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[16,8]) -> f32[16,8] {
  %x = f32[16,8]{1,0} parameter(0), metadata={op_name="args[0]"}
  %start = (f32[16,8]{1,0:S(1)}, f32[16,8]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %done = f32[16,8]{1,0:S(1)} copy-done(%start)
  ROOT %out = f32[16,8]{1,0} negate(%done)
}
"""


def test_a_copy_to_nearer_memory_takes_none_of_the_devices() -> None:
    communication = why_text(COPIES).communication
    assert communication.live_bytes == 2 * 16 * 8 * 4  # the argument and the result
    assert "args[0]" in [value.name for value in communication.live]
