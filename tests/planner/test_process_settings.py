"""What is set in the process while a plan is searched for."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from shardlib.planner.search import THRESHOLDS, rare_garbage_collection, single_threaded_blas


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_thresholds_are_raised_inside_and_restored_after_an_error():
    with pytest.raises(ValueError, match="inside"), rare_garbage_collection():
        assert gc.get_threshold() == THRESHOLDS
        raise ValueError("inside")
    assert gc.get_threshold() == (700, 10, 10)


def test_the_last_of_several_threads_restores_them():
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with rare_garbage_collection():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with rare_garbage_collection():
        thread.start()
        assert inside.wait(60)
    assert gc.get_threshold() == THRESHOLDS
    leave.set()
    thread.join(60)
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_without_thresholds_stays_off_and_larger_ones_stay():
    for mine in ((0, 10, 10), (500_000, 50, 200)):
        gc.set_threshold(*mine)
        with rare_garbage_collection():
            assert gc.get_threshold() == mine
        assert gc.get_threshold() == mine


def test_products_run_on_one_thread_inside_and_on_as_many_as_before_after():
    _ = np.ones((2, 2)) @ np.ones((2, 2))

    def threads() -> list[int]:
        return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]

    before = threads()
    with single_threaded_blas(), single_threaded_blas():
        assert before and set(threads()) == {1}
    assert threads() == before
