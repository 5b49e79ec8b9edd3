"""Are the models of the zoo sound before anything is sharded?"""

from __future__ import annotations

import numpy as np
import pytest

from tests.zoo import BATCH, CASES, Case

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@by_name
def test_loss_and_gradients_are_finite_and_alive(case: Case) -> None:
    loss, gradients = case.reference(0)
    assert np.isfinite(loss) and loss > 0
    assert all(
        np.isfinite(gradient).all() and gradient.dtype == np.float32
        for gradient in gradients.values()
    )
    dead = [path for path, gradient in gradients.items() if np.abs(gradient).max() < 1e-6]
    # A bias on the keys shifts every score of a query alike, so the softmax does not see it.
    assert all(path.endswith("key.bias") for path in dead), dead


@by_name
def test_examples_of_a_batch_do_not_see_their_order(case: Case) -> None:
    if case.random:
        pytest.skip("random numbers belong to positions of the batch")
    order = np.roll(np.arange(BATCH), 3)
    plain, shuffled = case.outputs(
        0, case.batch, {name: array[order] for name, array in case.batch.items()}
    )
    np.testing.assert_allclose(shuffled, plain[order], rtol=1e-4, atol=1e-5)
    assert np.abs(plain[order] - plain).max() > 1e-3


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.causal], ids=lambda case: case.name
)
def test_a_causal_model_does_not_see_the_future(case: Case) -> None:
    changed = {name: array.copy() for name, array in case.batch.items()}
    ids, time = changed[case.causal], changed[case.causal].shape[1] // 2
    ids[:, time] = (ids[:, time] + 1) % ids.max()
    before, after = case.outputs(0, case.batch, changed)
    np.testing.assert_allclose(after[:, :time], before[:, :time], rtol=1e-4, atol=1e-5)
    assert np.abs(after[:, time] - before[:, time]).max() > 1e-3
