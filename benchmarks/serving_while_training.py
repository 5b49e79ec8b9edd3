"""Answers from the newest checkpoint of a run that still trains.

    python -m benchmarks serving_while_training

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

import httpx2

from benchmarks.environment import ROOT, command_line, serving, write

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
    parser = command_line(__doc__, "serving_while_training_jax-*.json")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="shardlib-served-"))
    words = f"train --steps {options.steps} --save-every {EVERY} --sample-bytes 0 --quiet --json"
    training = subprocess.Popen(
        [sys.executable, "-m", "shardlib", *words.split(), "--run", str(home / "run")],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        while not (home / "run" / "checkpoints" / f"{EVERY}").exists():
            assert training.poll() is None, "the run has ended"
            time.sleep(0.2)
        with serving(str(home / "run"), "--refresh", "1s") as (url, server):
            end, seen = threading.Event(), list[tuple[str, str, str]]()
            clients = [
                threading.Thread(target=ask, args=(f"{url}/v1", number, end, seen))
                for number in range(CLIENTS)
            ]
            for client in clients:
                client.start()
            code = training.wait(900)
            last = f"step {options.steps}"
            until = time.monotonic() + 60
            while time.monotonic() < until and not any(mark == last for mark, *_ in seen[-20:]):
                time.sleep(0.5)
            end.set()
            for client in clients:
                client.join()
    finally:
        training.kill()
    answers: dict[str, set[str]] = defaultdict(set)
    for mark, text, wrong in seen:
        if text and not wrong:
            answers[mark].add(text)
    result = {
        "command": "python -m benchmarks serving_while_training",
        "steps": options.steps,
        "save_every": EVERY,
        "clients": CLIENTS,
        "answers": len(seen),
        "dropped": [wrong for *_, wrong in seen if wrong][:5],
        "by_checkpoint": dict(Counter(mark for mark, *_ in seen)),
        "greedy_texts_by_checkpoint": {mark: len(texts) for mark, texts in answers.items()},
        "newest_served": last in {mark for mark, *_ in seen},
        "exit_codes": {"train": code, "serve": server.returncode},
    }
    print(json.dumps({name: result[name] for name in ("answers", "dropped", "by_checkpoint")}))

    write(options.out, result)
