"""What a program of marked losses is asked, and does: proofs, checkpoints, runs, donated states."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import shardlib
from shardlib.training.callbacks import Moment
from shardlib.training.fit import fit
from shardlib.training.measures import Policy
from shardlib.training.settings import Settings
from shardlib.training.validation import Validation
from tests.frontend import examples
from tests.frontend.equality import compiled, plain, reference, require_near
from tests.frontend.examples import lm, mlp, nll
from tests.frontend.marked import MARKED

ONE: dict[str, Any] = {"mesh": {"fsdp": 4}, "zero": 3, "microbatches": 2}
OTHER: dict[str, Any] = {"mesh": {"data": 2, "tensor": 2}, "microbatches": 4}
#: What stands for the loss of each.
METRIC = {"gan": "d", "dpo": "loss"}


@cache
def program(name: str) -> Any:
    return compiled(MARKED[name](), ONE)


def batch_of(name: str, number: int) -> Any:
    return {key: np.roll(leaf, number, 0) for key, leaf in MARKED[name]().batch.items()}


def held(name: str, state: Any, batch: Any) -> jax.Array:
    """A loss for validation: of the judge, or of the adapted model."""
    if name == "gan":
        return jax.nn.softplus(-mlp(state["d"], batch["real"])[:, 0]).mean()
    adapted = {**state["base"], "up": state["base"]["up"] + state["lora"]["a"] @ state["lora"]["b"]}
    return nll(lm(adapted, batch["chosen"]), batch["chosen"]).mean()


def with_layouts(batch):
    """The batch with layouts of a mesh that is not the plan's, which are left out."""
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, jax.P("rows")), batch)


def run(name: str, folder: Path | None, **settings: Any) -> Any:
    return fit(
        program(name),
        lambda number: batch_of(name, number),
        steps=6,
        settings=Settings(
            run=folder,
            save_every=2,
            loggers=(),
            policy=Policy(metric=METRIC[name]),
            validation=Validation(
                data={key: leaf[:11] for key, leaf in batch_of(name, 0).items()},
                every=3,
                loss=lambda state, batch: held(name, state, with_layouts(batch)),
            ),
            **settings,
        ),
    )


@pytest.mark.long
@pytest.mark.parametrize("name", METRIC)
def test_a_run_goes_on_where_it_was_and_validates(name: str, tmp_path: Path):
    whole = run(name, None)
    example = MARKED[name](jax.value_and_grad)
    state, step = jax.jit(example.init)(jax.random.key(0)), jax.jit(example.step)
    losses = []
    for number in range(6):
        state, metrics = step(state, batch_of(name, number))
        losses.append(float(metrics[METRIC[name]]))
    np.testing.assert_allclose(whole.losses, losses, rtol=1e-5)
    require_near(whole.state, plain(state))
    few = {key: leaf[:11] for key, leaf in batch_of(name, 0).items()}
    assert whole.validations[6]["validation/loss"] == pytest.approx(
        float(held(name, state, few)), rel=1e-5
    )

    def interrupted(moment: Moment) -> None:
        if moment.event == "step" and moment.step == 3:
            moment.stop("for now")

    first = run(name, tmp_path, callbacks=(interrupted,))
    again = run(name, tmp_path)
    assert (first.steps, again.resumed, again.losses) == (3, 3, whole.losses)
    for mine, theirs in zip(plain(again.state), plain(whole.state), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.long
@pytest.mark.parametrize("name", METRIC)
def test_a_state_goes_to_another_mesh_and_more_microbatches(name: str, tmp_path: Path):
    one, other = program(name), compiled(MARKED[name](), OTHER)
    batch = MARKED[name]().batch
    state = one.step(one.init(3), batch)[0]
    one.save(tmp_path / "saved", state)
    found = other.restore(tmp_path / "saved")
    for mine, theirs in zip(plain(found), plain(state), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    require_near(other.step(found, batch), reference(MARKED[name])[1])
    kept = sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(one.state)
    )
    assert one.memory()["aliased"] >= 0.99 * kept


@pytest.mark.parametrize("name", METRIC)
def test_its_plan_answers(name: str):
    plan = program(name).plan
    text = plan.explain()
    assert "microbatches" in text and "fsdp=4" in text
    assert "x" in plan.why_not(microbatches=1)
    assert "x" in plan.why_not(zero=2)
    example = MARKED[name]()
    free = shardlib.compile_step(
        example.init, example.step, example.batch, topology="h100:8", abstract=True
    )
    others = free.plan.alternatives()
    assert others and all(one.ratio >= 1 and one.differs for one in others)


def dots(one: Any) -> list[str]:
    """Shapes of what the matmuls of a compiled step give."""
    return re.findall(r"= f32\[(\d+,\d+)\]\S* dot\(", one.compiled().as_text())


def test_rows_side_by_side_stay_rows_of_a_device(monkeypatch: pytest.MonkeyPatch):
    """The judge gets real and made rows in one array: 2 x 24 of them, a fourth on each device."""
    monkeypatch.setattr(examples, "ROWS", 24)
    found = dots(compiled(MARKED["gan"](), {"mesh": {"fsdp": 4}, "zero": 2}))
    assert any(shape.startswith("12,") for shape in found)
    assert not any(shape.startswith("48,") for shape in found)
