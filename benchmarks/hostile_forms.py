"""Latency of plain requests, while others send forms that are meant to keep a server busy.

    python -m benchmarks hostile_forms

A process of `shardlib serve` has a small decoder. Clients ask it for plain answers, one after the
other, while others send forms: chains of definitions and rules that overflow their compiler,
expressions and grammars that never end, texts of half a megabyte; no two forms are the same.

A form that compiles is answered, and takes a slot of the engine as any request does, which is no
harm. So a window with hostile forms is followed by a quiet one of the same length in which, for
each form that was answered, a plain request for as many tokens is sent at the same second of the
window. Windows take turns in one run until all forms were sent. The ratio of the 99th percentiles
of the plain requests of both is to be at most 1.5, and the server answers at the end.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np

from benchmarks.environment import ROOT, command_line, serving, write

CARD = ROOT / "benchmarks" / "models" / "small-server.toml"
FORMS, CLIENTS, ATTACKERS = 1000, 3, 4
#: Tokens of an answer that has a form, or of a plain one in its place.
TOKENS = 8
JSON = {"content-type": "application/json"}
#: Seconds of a window; those at its begin in which what came before it ends.
WINDOW, SETTLE = 15.0, 3.0


def _definitions(k: int) -> dict[str, Any]:
    n = 900 + k % 200
    inner = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}}
        for i in range(n)
    }
    return {"json": {"$defs": {**inner, f"a{n}": {"const": k}}, "$ref": "#/$defs/a0"}}


def _rules(k: int) -> dict[str, Any]:
    rules = "\n".join(f'r{i}: r{i + 1} | "{k}"' for i in range(5000))
    return {"grammar": f'start: r0\n{rules}\nr5000: "y"'}


def _deep(k: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"const": k}
    for _ in range(900):
        schema = {"type": "array", "items": schema}
    return {"json": schema}


def _long_texts(k: int) -> dict[str, Any]:
    return {"choice": ["a" * 300_000 + str(k), "a" * 300_000 + "b"]}


def _alternatives(k: int) -> dict[str, Any]:
    return {"regex": "|".join(f"w{k}x{i}" for i in range(40_000))}


#: Each with its share of a hundred forms; those in front end their process within milliseconds.
HOSTILE: Sequence[tuple[int, Callable[[int], dict[str, Any]]]] = (
    (18, _definitions),
    (18, _rules),
    (12, _deep),
    (12, lambda k: {"regex": "(" * 1000 + f"a{k}" + ")*" * 1000}),
    (8, lambda k: {"regex": "(((a{1,100}){1,100}){1,100}){1,10" + str(k) + "}"}),
    (8, lambda k: {"regex": f"{k}.*a.{{200}}b.*c.{{300}}d.*"}),
    (6, lambda k: {"grammar": f'start: e\ne: e e e e e | "{k}" | ""'}),
    (6, lambda k: {"grammar": f"start: A & B\nA: /.*a.{{30}}{k}/\nB: /.*b.{{31}}/"}),
    (4, lambda k: {"json": {"type": "string", "minLength": 10**9 + k}}),
    (4, lambda k: {"json": {"enum": [f"w{k}-{i}" for i in range(30_000)]}}),
    (2, _long_texts),
    (2, _alternatives),
)


def forms(count: int, seed: int) -> list[dict[str, Any]]:
    """Forms in a drawn order."""
    kinds = [make for share, make in HOSTILE for _ in range(share)]
    order = np.random.default_rng(seed).permutation(count)
    return [kinds[k % len(kinds)](k) for k in order.tolist()]


def _body(form: dict[str, Any]) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": TOKENS, "structured_outputs": form}).encode()


def run(
    url: str,
    count: int,
    window: float,
    *,
    settle: float = SETTLE,
    most_seconds: float = math.inf,
    head: Mapping[str, str] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Sends forms and plain requests in windows of so many seconds, of which the first (`settle`)
    do not count; returns figures.
    """
    end = time.monotonic() + most_seconds
    left = [_body(form) for form in forms(count, seed)]  # made before anything is measured
    lock = threading.Lock()
    attacking, ended = threading.Event(), threading.Event()
    seconds: dict[str, list[float]] = {"quiet": [], "hostile": []}
    said: Counter[str] = Counter()
    since = [time.monotonic()]
    accepted: list[float] = []  # seconds into the hostile window at which forms were answered
    answers = 0

    def attack() -> None:
        with httpx2.Client(base_url=url, timeout=120, headers=head) as client:
            while not ended.is_set():
                if not attacking.wait(0.2):
                    continue
                with lock:
                    if not left or time.monotonic() > end:
                        return
                    body = left.pop()
                status = client.post("/v1/completions", content=body, headers=JSON).status_code
                with lock:
                    said[str(status)] += 1
                    if status == 200:
                        accepted.append(time.monotonic() - since[0])

    def instead(at: float) -> None:
        time.sleep(max(since[0] + at - time.monotonic(), 0))
        body = {"prompt": "x", "max_tokens": TOKENS}
        found = httpx2.post(f"{url}/v1/completions", json=body, timeout=120, headers=head)
        assert found.status_code == 200, found.text

    def ask(number: int) -> None:
        with httpx2.Client(base_url=url, timeout=120, headers=head) as client:
            while not ended.is_set():
                begun, hostile = time.monotonic(), attacking.is_set()
                body = {"prompt": f"request {number}", "max_tokens": 16, "temperature": 0}
                found = client.post("/v1/completions", json=body)
                assert found.status_code == 200, found.text
                now = time.monotonic()
                inside = since[0] + settle < begun and now < since[0] + window
                if inside and hostile == attacking.is_set():
                    seconds["hostile" if hostile else "quiet"].append(now - begun)

    threads = [threading.Thread(target=attack) for _ in range(ATTACKERS)]
    threads += [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for one in threads:
        one.start()
    while sum(said.values()) < count and time.monotonic() < end:
        accepted.clear()
        since[0] = time.monotonic()
        attacking.set()
        while (lasted := time.monotonic() - since[0]) < window:
            if sum(said.values()) == count and lasted > window / 2:
                break
            time.sleep(0.1)
        attacking.clear()
        time.sleep(settle)  # the last forms end
        with lock:
            replayed = list(accepted)
        with ThreadPoolExecutor(max(len(replayed), 1)) as pool:
            since[0] = time.monotonic()
            answers += len(replayed)
            for _ in pool.map(instead, replayed):
                pass
            time.sleep(max(since[0] + window - time.monotonic(), 0))
    ended.set()
    for one in threads:
        one.join()
    health = httpx2.get(f"{url}/health").json()
    p50 = {name: float(np.percentile(all_of, 50)) for name, all_of in seconds.items()}
    p99 = {name: float(np.percentile(all_of, 99)) for name, all_of in seconds.items()}
    return {
        "forms": sum(said.values()),
        "statuses": dict(said),
        "plain_in_place_of_accepted": answers,
        "health": health["status"],
        "requests": {name: len(all_of) for name, all_of in seconds.items()},
        "p50_seconds": p50,
        "p99_seconds": p99,
        "slowest_seconds": {name: max(all_of) for name, all_of in seconds.items()},
        "ratio_p50": p50["hostile"] / p50["quiet"],
        "ratio_p99": p99["hostile"] / p99["quiet"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "hostile_forms.json")
    parser.add_argument("--forms", type=int, default=FORMS)
    parser.add_argument("--window", type=float, default=WINDOW, help="seconds")
    parser.add_argument("--seconds", type=float, default=math.inf, help="in which forms are sent")
    options = parser.parse_args(arguments)
    with serving(str(CARD), "--slots", "8", "--longest", "256") as (url, process):
        result = run(url, options.forms, options.window, most_seconds=options.seconds)
    result["exit_code"] = process.returncode
    write(options.out, result, quiet=True)
    print(json.dumps(result, indent=1))
