"""One peer in a process of its own, in an environment of its own.

    python benchmarks/peers/worker.py PEER --text FILE [--tpu v5e:2x4]

It compiles the step, on eight simulated devices or for a TPU that is not here, writes the text of
the program to FILE and says `READY {...}`. Without --tpu it then runs a step for each line on its
input, and prints its seconds. Only the peers of this library import it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_NUM_CPU_DEVICES="8",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)
#: The first word of a peer's name -> the module that has its step.
MODULES = {
    "shardlib": "shardlib_step",
    "flax": "flax_step",
    "parallax": "flax_step",
    "maxtext": "maxtext_step",
    "levanter": "levanter_step",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer")
    parser.add_argument("--tpu")
    parser.add_argument("--text", type=Path, required=True)
    options = parser.parse_args()
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries of peers write to standard output, too
    library = options.peer.split("-")[0]
    if library == "shardlib":
        sys.path.insert(1, str(ROOT))
    made = importlib.import_module(MODULES[library]).compiled(options.peer, options.tpu)
    options.text.write_text(made.text)
    facts, run = dict(made.facts), made.run
    if run is None:
        print("READY " + json.dumps(facts), file=said, flush=True)
        return
    facts["losses"] = [run() for _ in range(3)]
    print("READY " + json.dumps(facts), file=said, flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        run()
        print(time.perf_counter() - started, file=said, flush=True)


if __name__ == "__main__":
    main()
