"""Lines of models that say how parameters are sharded, as they should be."""

from __future__ import annotations

import ast
from pathlib import Path

import flax
import jax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding

import shardlib
from shardlib.diagnosis.edits import annotated
from shardlib.diagnosis.source import Frame
from tests.diagnosis import annotated_models as models
from tests.diagnosis.causes import MESH, array

FILE = models.__file__
RULES = [("embed", "data"), ("heads", "model"), ("mlp", "model"), ("batch", "data"), ("kv", None)]
NONE, DATA, MODEL = (), ("data",), ("model",)


def frame_of(text: str) -> Frame:
    """The place of the first expression with a text."""
    tree = ast.parse(Path(FILE).read_text())
    node = next(n for n in ast.walk(tree) if isinstance(n, ast.expr) and ast.unparse(n) == text)
    return Frame(FILE, node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)


DENSE = "nn.Dense(8, kernel_init=nn.with_partitioning(ONES, ('data', 'model')))(x)"


@pytest.mark.parametrize(
    ("argument", "stored", "spec", "use", "expected"),
    [
        ("params['kernel']", (DATA, NONE), (NONE, DATA), "x * kernel.T", '(None, "data")'),
        ("params['kernel'].value", (DATA, MODEL), (MODEL, NONE), "x @ kernel", '("heads", None)'),
        ("p['up']['kernel']", (NONE, MODEL), (DATA, NONE), "self.up(x)", '("data", None)'),
        # stacked by a loop over layers
        (
            "p['up']['kernel']",
            (NONE, NONE, MODEL),
            (NONE, DATA, NONE),
            "self.up(x)",
            '("data", None)',
        ),
        ("p['down']['bias']", (MODEL,), (NONE,), "self.down(nn.relu(self.up(x)))", "(None,)"),
        ("p['Dense_0']['kernel']", (DATA, MODEL), (MODEL, DATA), DENSE, '("model", "data")'),
        (
            "state['table'].value",
            (DATA, NONE),
            (NONE, DATA),
            "x @ self.table",
            'jax.P(None, "data")',
        ),
        (
            "model.up.kernel.value",
            (NONE, MODEL),
            (NONE, NONE),
            "self.up(x @ self.table)",
            "(None, None)",
        ),
    ],
)
def test_the_line_with_other_axes(argument, stored, spec, use, expected) -> None:
    found = annotated(argument, stored, spec, [frame_of(use)], ("data", "model"), RULES)
    assert found is not None
    frame, text = found
    assert expected in text
    # the line parses where it stood, and nothing else is other than it was
    lines = Path(FILE).read_text().splitlines()
    indent = len(lines[frame.line - 1]) - len(lines[frame.line - 1].lstrip())
    lines[frame.line - 1] = " " * indent + text
    ast.parse("\n".join(lines))


@pytest.mark.parametrize(
    ("argument", "stored", "use"),
    [
        ("params['kernel']", (NONE, DATA), "x * kernel.T"),  # what the line says is another's
        ("params['scale']", (DATA, NONE), "x * kernel.T"),
        ("p['up']['bias']", (MODEL,), "self.up(x)"),  # which no line annotates
    ],
)
def test_other_lines_are_not_taken_for_it(argument, stored, use) -> None:
    spec = (NONE,) * len(stored)
    assert annotated(argument, stored, spec, [frame_of(use)], ("data", "model"), RULES) is None


def test_logical_axes_without_a_rule_are_not_written() -> None:
    frame = frame_of("x @ kernel")
    spec = (("data", "model"), NONE)
    assert annotated("p['kernel']", (DATA, MODEL), spec, [frame], ("data", "model"), RULES) is None


@pytest.mark.long
def test_the_annotation_in_the_source_has_the_bytes_that_were_measured() -> None:
    x = array((256, 64), "data")

    def diagnosed(model: nn.Module, cures: int):
        state = jax.eval_shape(model.init, jax.random.key(0), x)
        specs = nn.get_partition_spec(state)
        params = jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(MESH, spec)
            ),
            flax.core.meta.unbox(state),
            specs,
        )
        return shardlib.why(
            model.apply, params, x, topology="cpu:8", out_shardings=x.sharding, cures=cures
        )

    (cure,) = diagnosed(models.Scaled(), 4).cures
    (change,) = cure.changes
    line, comment = change.text.split("  # ")
    assert line in Path(FILE).read_text()  # in the model as it should be
    assert "kernel" in comment and comment.endswith(": jax.P(None, 'data')")
    assert change.place.startswith("tests/diagnosis/annotated_models.py:")
    written = diagnosed(models.ScaledAsItShouldBe(), 0).communication
    assert (written.wire_bytes, written.memory["peak"]) == (cure.bytes[1], cure.memory[1])
    assert cure.bytes[1] < cure.bytes[0]
