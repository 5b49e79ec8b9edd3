"""One of several processes that train a small model. Arguments: what to do, the folder of the run.

train       six steps, and a sample of a parameter
differ      process 1 means another number of steps
raise       process 1 fails in the second step
agree       compares things that are equal, differ, and do not come
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import shardlib
from shardlib.errors import LaunchError


def trained(what: str, folder: str, process: int) -> None:
    from shardlib.training.fit import fit
    from shardlib.training.settings import Settings
    from tests.training.small import batch_of, compiled

    def batches(step: int) -> object:
        if what == "raise" and process == 1 and step == 1:
            raise ValueError("there is no more data")
        return batch_of(step)

    found = fit(
        compiled({"fsdp": 4}),
        batches,
        steps=7 if what == "differ" and process == 1 else 6,
        settings=Settings(run=folder, save_every=4, loggers=()),
    )
    print(process, found.steps, flush=True)


def agreed(process: int) -> None:
    from shardlib.processes.values import agree, of_first

    agree("colour", {"sky": "blue"}, seconds=20)
    for name, mine in (
        ("colour", {"sky": "blue" if process == 0 else "grey", "code of extra": "x"}),
        ("colour", {"code of one": str(process)} if process == 0 else {"code of other": "1"}),
    ):
        try:
            agree(name, mine, seconds=20)
            print(process, "agrees", flush=True)
        except LaunchError as error:
            print(process, str(error).replace("\n", " | "), flush=True)
    print(process, of_first("number", lambda: f"made by {process}"), flush=True)
    begin = time.monotonic()
    if process == 1:
        time.sleep(3)
        return
    try:
        agree("late", {}, seconds=1)
    except LaunchError as error:
        print(
            process,
            str(error).partition("\n")[0],
            error.again,
            time.monotonic() - begin < 30,
            flush=True,
        )


if __name__ == "__main__":
    what, folder = sys.argv[1:]
    joined = shardlib.join()
    assert joined is not None and shardlib.join() is joined
    try:
        if what == "agree":
            agreed(joined.process)
        else:
            trained(what, folder, joined.process)
    finally:
        Path(folder, f"ended-{joined.process}").touch()
