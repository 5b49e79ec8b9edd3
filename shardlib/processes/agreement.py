"""Whether all processes of a job mean the same.

Processes that run different programs do not fail: they hang in a collective, or compute nonsense.
So they compare what they are about to do before they do it, through the store of keys and values of
JAX's coordination service. Nothing of this touches a device, every wait is bounded, and whoever is
missing is named.

`agree` compares values: process 0 reads those of all, and writes down what is different. `of_first`
gives all processes what process 0 has found: a measurement, which every one would make a little
differently.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from shardlib import _jax_compat
from shardlib.errors import LaunchError, raise_all

#: Seconds that processes wait for each other: one of them may have to measure, to read an index or
#: to plan on a slow host.
AGREE_SECONDS = 600.0
#: Seconds between two looks at the store.
LOOK_EVERY = 0.05
#: Keys of values that a process may leave out: nobody loads modules that it does not need.
OPTIONAL = "code of "

_rounds: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
_known: dict[str, str] = {}


def agree(name: str, values: Mapping[str, str], *, seconds: float = AGREE_SECONDS) -> None:
    """Compares values with those of all other processes; to be called by all, in the same order.
    Alone it does nothing.

    Args:
        seconds: how long to wait for the others.
    """
    coordination = _jax_compat.coordination()
    if coordination is None or coordination[2] == 1:
        return
    client, process, processes = coordination
    folder = f"shardlib/agree/{name}/{next(_rounds[name])}"
    client.key_value_set(f"{folder}/said/{process}", json.dumps(dict(values)))
    if process == 0:
        answers = _said(client, f"{folder}/said", processes, seconds)
        absent = [number for number in range(processes) if number not in answers]
        client.key_value_set(
            f"{folder}/verdict", json.dumps({"absent": absent, "different": differences(answers)})
        )
    verdict = json.loads(_waited(client, f"{folder}/verdict", seconds + 10, f"compare its {name}"))
    if verdict["absent"]:
        raise LaunchError(
            f"{processes_text(verdict['absent'])} of {processes} did not come to compare"
            f" {'its' if len(verdict['absent']) == 1 else 'their'} {name} within {seconds:g}"
            " s\nTry: look at what they wrote last, and start all of them again",
            again=True,
        )
    if verdict["different"]:
        raise_all(
            LaunchError,
            f"the processes do not fit each other: their {name} differs",
            verdict["different"],
            hint="start all of them with the same words, code and packages",
        )


def of_first(name: str, make: Callable[[], str], *, seconds: float = AGREE_SECONDS) -> str:
    """What process 0 makes, in all processes; made once for each name. Alone, what this process
    makes.

    Args:
        seconds: how long the others wait.
    """
    coordination = _jax_compat.coordination()
    if coordination is None or coordination[2] == 1:
        return make()
    client, process, _ = coordination
    if name not in _known:
        key = f"shardlib/first/{name}"
        if process == 0:
            client.key_value_set(key, make())
        _known[name] = _waited(client, key, seconds, f"say its {name}")
    return _known[name]


def differences(answers: Mapping[int, Mapping[str, str]]) -> list[str]:
    """What the processes say differently, a line a key.

    >>> differences({0: {"plan": "a1"}, 1: {"plan": "b2"}, 2: {"plan": "a1"}})
    ['plan: a1 (processes 0 and 2), b2 (process 1)']
    """
    lines: list[str] = []
    for key in dict.fromkeys(key for values in answers.values() for key in values):
        by_value: defaultdict[str, list[int]] = defaultdict(list)
        for process, values in sorted(answers.items()):
            if key in values or not key.startswith(OPTIONAL):
                by_value[values.get(key, "nothing")].append(process)
        if len(by_value) > 1:
            lines.append(
                f"{key}: "
                + ", ".join(f"{value} ({processes_text(who)})" for value, who in by_value.items())
            )
    return lines


def processes_text(numbers: Sequence[int]) -> str:
    """Processes in words.

    >>> processes_text([3]), processes_text([0, 2]), processes_text([0, 1, 2, 3, 7])
    ('process 3', 'processes 0 and 2', 'processes 0 to 3 and 7')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [
        part
        for run in runs
        for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    ]
    text = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"process {text}" if len(numbers) == 1 else f"processes {text}"


def _said(client: Any, folder: str, processes: int, seconds: float) -> dict[int, dict[str, str]]:
    """What all processes have said, or those that did in time."""
    end = time.monotonic() + seconds
    while True:
        answers = {
            int(key.rpartition("/")[2]): json.loads(value)
            for key, value in client.key_value_dir_get(folder)
        }
        if len(answers) == processes or time.monotonic() > end:
            return answers
        time.sleep(LOOK_EVERY)


def _waited(client: Any, key: str, seconds: float, what: str) -> str:
    try:
        return client.blocking_key_value_get(key, int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise LaunchError(
            f"process 0 did not {what} within {seconds:g} s"
            f" ({str(error).partition(chr(10))[0]})\nTry: look at what it wrote last, and start all"
            " of them again",
            again=True,
        ) from error


def all_say(name: str, text: str, *, seconds: float = AGREE_SECONDS) -> dict[int, str]:
    """What every process says, by its number, in all processes; to be called by all, in the same
    order. Alone, what this one says.

    Args:
        seconds: how long to wait for the others.
    """
    coordination = _jax_compat.coordination()
    if coordination is None or coordination[2] == 1:
        return {0: text}
    client, process, processes = coordination
    folder = f"shardlib/say/{name}/{next(_rounds[name])}"
    client.key_value_set(f"{folder}/{process}", json.dumps({"said": text}))
    answers = _said(client, folder, processes, seconds)
    absent = [number for number in range(processes) if number not in answers]
    if absent:
        raise LaunchError(
            f"{processes_text(absent)} of {processes} did not say"
            f" {'its' if len(absent) == 1 else 'their'} {name} within {seconds:g} s\nTry: look at"
            " what they wrote last, and start all of them again",
            again=True,
        )
    return {number: answer["said"] for number, answer in answers.items()}


def meet(name: str, *, seconds: float = AGREE_SECONDS) -> None:
    """Waits until all processes are at this point; to be called by all, in the same order. Alone it
    does nothing.

    Args:
        seconds: how long to wait for the others.
    """
    coordination = _jax_compat.coordination()
    if coordination is None or coordination[2] == 1:
        return
    try:
        coordination[0].wait_at_barrier(
            f"shardlib/meet/{name}/{next(_rounds[name])}", int(seconds * 1000)
        )
    except jax.errors.JaxRuntimeError as error:
        raise LaunchError(
            f"not all processes came to {name!r} within {seconds:g} s"
            f" ({str(error).partition(chr(10))[0]})\nTry: look at what they wrote last, and start"
            " all of them again",
            again=True,
        ) from error
