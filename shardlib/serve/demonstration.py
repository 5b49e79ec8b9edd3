"""The run that is served where no model is named: the demonstration, trained for a minute once, and
for another where that was stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import platformdirs

from shardlib.errors import RunError
from shardlib.training.run import RunFolder

#: Seconds that it is trained for, and in which it must have a checkpoint.
SECONDS, LONGEST = 60, 600
#: Steps between checkpoints.
SAVE_EVERY = 20
#: File in its folder that says that its minute is over.
DONE = "demonstration.txt"


def demonstration(say: Callable[[str], None], *, folder: Path | None = None) -> Path:
    """The folder of a run of `shardlib train`; it is made where it is not there.

    Args:
        folder: where; by default in the user's cache (environment variable SHARDLIB_CACHE_DIR).
    """
    place = folder or _cache() / "demonstration"
    run = RunFolder(place)
    if (saved := run.saved()) and (place / DONE).exists():
        return place
    begins = f"it stopped at step {saved[-1]}" if saved else "nothing is there to be served"
    say(f"{begins}: a demonstration is trained for a minute, in {place}")
    words = ["train", "--run", str(place), "--sample-bytes", "0", "--quiet", "--json"]
    begun = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "shardlib", *words, "--save-every", str(SAVE_EVERY)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        while child.poll() is None and time.monotonic() - begun < LONGEST:
            time.sleep(0.5)
            if time.monotonic() - begun > SECONDS and run.saved() != saved:
                child.send_signal(signal.SIGTERM)  # it saves, and ends
                child.wait(timeout=LONGEST)
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    saved = run.saved()
    if saved:
        (place / DONE).write_text(f"trained up to step {saved[-1]}\n")
        say(f"trained up to step {saved[-1]}; shardlib train --run {place} goes on")
    else:
        raise RunError(
            f"the demonstration in {place} was not trained (exit code {child.returncode})\nTry:"
            f" shardlib {' '.join(words[:3])}, which says why"
        )
    return place


def _cache() -> Path:
    return Path(
        os.environ.get("SHARDLIB_CACHE_DIR")
        or platformdirs.user_cache_dir("shardlib", appauthor=False)
    )
