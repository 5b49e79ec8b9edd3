"""Is a run that still trains served with its newest checkpoint, without a dropped request?

    python benchmarks/serving_while_training.py

One process trains the demonstration with a checkpoint every 20 steps, another serves its folder and
looks for newer ones every second, and six clients ask without a pause for answers of 10 to 100
tokens, half of them streamed. Greedy answers to one prompt must be one and the same as long as one
checkpoint is served.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx2

from benchmarks.environment import RESULTS, command_line, write

ROOT = Path(__file__).resolve().parents[1]
CLIENTS, STEPS, EVERY = 6, 200, 20


def ask(url: str, number: int, end: threading.Event, seen: list[tuple[str, str, str]]) -> None:
    """Asks until the end; writes down checkpoint, text of a greedy answer, and what went wrong."""
    with httpx2.Client(timeout=120) as client:
        turn = 0
        while not end.is_set():
            turn += 1
            greedy = turn % 2 == 0
            body: dict[str, Any] = {
                "prompt": "def main",
                "max_tokens": 40 if greedy else 10 + 15 * number,
            }
            body |= {"temperature": 0} if greedy else {"stream": True, "seed": turn}
            try:
                found = client.post(f"{url}/completions", json=body)
                if found.status_code != 200:
                    seen.append(("", "", found.text))
                elif greedy:
                    data = found.json()
                    seen.append((data["system_fingerprint"], data["choices"][0]["text"], ""))
                else:
                    lines = [line[6:] for line in found.text.splitlines() if line]
                    marks = {json.loads(line)["system_fingerprint"] for line in lines[:-1]}
                    whole = lines[-1] == "[DONE]" and len(marks) == 1
                    seen.append((next(iter(marks)), "", "" if whole else f"{marks} {lines[-1]}"))
            except (httpx2.HTTPError, KeyError) as error:
                seen.append(("", "", repr(error)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="shardlib-served-"))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "shardlib"]
    words = [
        "train",
        "--run",
        str(home / "run"),
        "--steps",
        f"{options.steps}",
        "--save-every",
        f"{EVERY}",
    ]
    training = subprocess.Popen(
        [*command, *words, "--sample-bytes", "0", "--quiet", "--json"],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    serving: subprocess.Popen[str] | None = None
    try:
        while not (home / "run" / "checkpoints" / f"{EVERY}").exists():
            assert training.poll() is None, "the run has ended"
            time.sleep(0.2)
        serving = subprocess.Popen(
            [*command, "serve", str(home / "run"), "--port", "0", "--refresh", "1s", "--json"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert serving.stdout is not None
        url = json.loads(serving.stdout.readline())["url"]
        end, seen = threading.Event(), list[tuple[str, str, str]]()
        clients = [
            threading.Thread(target=ask, args=(url, number, end, seen)) for number in range(CLIENTS)
        ]
        for one in clients:
            one.start()
        code = training.wait(900)
        last = f"step {options.steps}"
        until = time.monotonic() + 60
        while time.monotonic() < until and not any(mark == last for mark, *_ in seen[-20:]):
            time.sleep(0.5)
        end.set()
        for one in clients:
            one.join()
        serving.terminate()
        ended = serving.wait(90)
    finally:
        for process in (training, serving):
            if process is not None:
                process.kill()
    answers: dict[str, set[str]] = defaultdict(set)
    for mark, text, wrong in seen:
        if text and not wrong:
            answers[mark].add(text)
    result = {
        "command": "python benchmarks/serving_while_training.py",
        "steps": options.steps,
        "save_every": EVERY,
        "clients": CLIENTS,
        "answers": len(seen),
        "dropped": [wrong for *_, wrong in seen if wrong][:5],
        "by_checkpoint": dict(Counter(mark for mark, *_ in seen)),
        "greedy_texts_by_checkpoint": {mark: len(texts) for mark, texts in answers.items()},
        "newest_served": last in {mark for mark, *_ in seen},
        "exit_codes": {"train": code, "serve": ended},
    }
    print(json.dumps({name: result[name] for name in ("answers", "dropped", "by_checkpoint")}))
    import jax

    write(options.out or RESULTS / f"serving_while_training_jax-{jax.__version__}.json", result)


if __name__ == "__main__":
    main()
