"""What compilers make of a step is what was planned."""

from __future__ import annotations

import pytest

import shardlib
from tests.frontend import examples
from tests.frontend.examples import Example
from tests.frontend.marked import MARKED
from tests.frontend.test_unmarked import JAX, MARK, adversaries, moved, planned


@pytest.mark.parametrize(
    ("machine", "parts"),
    [
        ("cpu:8", 0),
        pytest.param("h100:8", 0, marks=pytest.mark.compiler("gpu")),
        pytest.param("h100:8", 2, marks=pytest.mark.compiler("gpu")),
        pytest.param("v5e:2x4", 0, marks=pytest.mark.compiler("tpu")),
    ],
)
def test_the_compiler_moves_what_was_planned(
    machine: str, parts: int, monkeypatch: pytest.MonkeyPatch
):
    """`parts`: microbatches of a marked loss; 0 for a step that marks none."""
    for name, value in {"WIDE": 512, "VOCAB": 1024, "ROWS": 32, "SEQ": 64}.items():
        monkeypatch.setattr(examples, name, value)
    example: Example = MARKED["language_model"]() if parts else examples.language_model()
    program = shardlib.compile_step(
        example.init,
        example.step,
        example.batch,
        topology=machine,
        pin={
            "mesh": {"fsdp": 8},
            "zero": 1 if machine == "cpu:8" else 3,
            **({"microbatches": parts} if parts else {}),
        },
        abstract=True,
    )
    found = program.verify()
    assert found.ok and found.compiled is not None, str(found)
    assert not [one for one in found.findings if one.severity == "error"]
    planned, compiled = (
        {
            kind: sum(one.count * one.bytes for one in items if one.kind == kind)
            for kind in {one.kind for one in items}
        }
        for items in (program.plan.estimate.collectives, found.compiled.collectives)
    )
    assert sum(compiled.values()) <= 1.02 * sum(planned.values())
    if machine == "h100:8":  # others gather once what is used twice, or add where they scatter
        assert planned == pytest.approx(compiled, rel=0.01)


@pytest.mark.compiler("gpu")
@pytest.mark.long
def test_gradients_outside_of_marked_losses_move_what_they_do_without_marks(
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in {"WIDE": 512, "ROWS": 64}.items():
        monkeypatch.setattr(examples, name, value)
    mixed, without = planned(adversaries(MARK, JAX), 2), planned(adversaries(JAX, JAX), 2)
    made: list[dict[str, float]] = []
    for program in (mixed, without):
        found = program.verify()
        assert found.ok and found.compiled is not None, str(found)
        made.append(moved(found.compiled.collectives))
    assert made[0] == pytest.approx(made[1], rel=0.01)
    plan = moved(mixed.plan.estimate.collectives)
    assert plan["all-gather"] == pytest.approx(made[0]["all-gather"], rel=0.01)
    # XLA adds the gradients of both uses of a weight before it reduces them.
    assert made[0]["reduce-scatter"] <= plan["reduce-scatter"]
    assert made[0]["all-reduce"] <= 1.01 * plan["all-reduce"]


@pytest.mark.compiler("gpu")
@pytest.mark.long
@pytest.mark.parametrize("name", ["gan", "dpo"])
def test_several_models_in_microbatches_move_what_was_planned(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    for one, value in {"WIDE": 512, "ROWS": 64}.items():
        monkeypatch.setattr(examples, one, value)
    program = planned(MARKED[name](), zero=2, microbatches=2)
    found = program.verify()
    assert found.ok and found.compiled is not None, str(found)
    plan, made = moved(program.plan.estimate.collectives), moved(found.compiled.collectives)
    for kind in ("reduce-scatter", "all-gather"):
        assert made.get(kind, 0) == pytest.approx(plan.get(kind, 0), rel=0.01)
    assert made["all-reduce"] <= 1.01 * plan["all-reduce"]
