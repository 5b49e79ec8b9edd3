"""How much sooner are long prompts answered since attention reads what a step needs?

    git worktree add /tmp/before 51163104
    python benchmarks/serving_attention.py --before /tmp/before

A Llama of 27.8 M parameters, float32, answers 4 prompts of 300 tokens with 16 tokens each, where a
request may have 1,024: by this code, and by that of another folder, in which every token of a
prompt read all pages of the longest request, and logits were computed for all tokens. Each runs in
a process of its own with its programs compiled; they answer in turn. The figure is the median of
the ratios of neighbours in time; answers are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
PROMPTS, LENGTH, MOST, LONGEST = 4, 300, 16, 1024


def worker() -> None:
    """Answers all prompts each time that a line comes in."""
    import jax
    import numpy as np

    from benchmarks.continuous_batching import LLAMA as config
    from shardlib import models, serve

    def forward(model: Any, tokens: jax.Array) -> jax.Array:
        return model(tokens)

    draw = np.random.default_rng(0)
    prompts = draw.integers(0, 4096, (PROMPTS, LENGTH)).tolist()
    engine = serve.Engine(
        models.build(config)[0],
        forward,
        capacity=serve.Capacity(longest=LONGEST, slots=8, prefixes=False),
        check=False,
    )
    engine.warm_up()
    print("ready", flush=True)
    for _ in sys.stdin:
        steps, start = engine.steps, time.perf_counter()
        answers = engine.generate(prompts, MOST)
        found = {"seconds": time.perf_counter() - start, "steps": engine.steps - steps}
        print(json.dumps({**found, "answers": answers}), flush=True)


def started(folder: Path) -> subprocess.Popen[str]:
    """A worker with the code of a folder."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker"],
        env={**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline().strip() == "ready"
    return process


def asked(process: subprocess.Popen[str]) -> dict[str, Any]:
    """One run of a worker."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main() -> None:
    """Runs both in turn and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a folder with the other code")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.worker:
        worker()
        return
    sys.path.insert(0, str(HERE))
    import jax

    from benchmarks.environment import RESULTS, write

    processes = {"before": started(args.before), "now": started(HERE)}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
    for _ in range(args.pairs):
        for name, process in processes.items():
            rows[name].append(asked(process))
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    assert rows["before"][0]["answers"] == rows["now"][0]["answers"]
    ratio = statistics.median(
        before["seconds"] / now["seconds"]
        for before, now in zip(rows["before"], rows["now"], strict=True)
    )
    print(f"before takes {ratio:.2f} times as long")
    write(
        args.out or RESULTS / f"serving_attention_jax-{jax.__version__}.json",
        {
            "benchmark": "serving_attention",
            "ratio": ratio,
            "load": os.getloadavg()[0],
            "ways": {
                name: {
                    "steps": found[0]["steps"],
                    "seconds": [one["seconds"] for one in found],
                }
                for name, found in rows.items()
            },
        },
    )


if __name__ == "__main__":
    main()
