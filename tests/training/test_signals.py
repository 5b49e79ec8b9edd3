"""A request to stop ends a run in order, wherever it is."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from shardlib.errors import StoppedError
from shardlib.processes.place import ends_at_once, stop_requests


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
def test_outside_of_the_loop_it_ends_at_once_and_inside_the_loop_decides(number):
    before = signal.getsignal(number)
    with (
        pytest.raises(StoppedError, match=f"{number.name} came outside of the training loop"),
        ends_at_once(),
    ):
        with stop_requests() as stop:
            os.kill(os.getpid(), number)
            assert stop.reason == number.name
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_nohup_is_heard():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_at_once(), stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_what_a_library_swallowed_before_the_loop_is_asked_again(number):
    with ends_at_once():
        with contextlib.suppress(KeyboardInterrupt, StoppedError):
            signal.raise_signal(number)
        with stop_requests() as stop:
            assert stop.reason == number.name
