"""How fast does our engine answer beside `transformers`, on one CPU and the same checkpoint?

    python benchmarks/serving_peers.py [--pairs N]

A Llama of 27.8 M parameters, float32, written as a folder of Hugging Face, continues eight prompts
of 32 tokens by 64, greedily. `transformers` generates the batch of eight; our engine serves eight
requests, its weights sharded over as many devices of the CPU as there are cores. Both run in turn in
one process with as many threads; compilation and a first run are not timed. The ratio is the median of the ratios of neighbours in time. It needs torch and transformers
beside shardlib.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={os.cpu_count() or 1}"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from benchmarks.continuous_batching import LLAMA
from benchmarks.environment import RESULTS, write
from shardlib import models, serving
from shardlib.annotation.read import read
from shardlib.checkpointing.huggingface import save_weights
from shardlib.models.described import described
from shardlib.serving.folders.writing import byte_tokenizer

ROWS, PROMPT, MOST = 8, 32, 64
THREADS = os.cpu_count() or 1
#: Devices that share every layer: as many as there are cores, where they divide the key heads.
WAYS = math.gcd(THREADS, LLAMA.kv_heads)


def folder(place: Path) -> None:
    """The checkpoint."""
    model = read(models.build(LLAMA)[0])
    save_weights(jax.jit(model.init)(0), place, described(LLAMA))
    (place / "tokenizer.json").write_text(byte_tokenizer())


def main() -> None:
    """Runs both in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    random = np.random.default_rng(0)
    prompts = random.integers(0, LLAMA.vocab_size, (ROWS, PROMPT))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "llama"
        folder(place)
        peer = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        pages = ROWS * -(-(PROMPT + MOST) // 16)  # the peer has room for all of its rows, too
        capacity = serving.Capacity(
            longest=PROMPT + MOST, slots=ROWS, budget=ROWS * PROMPT, pages=pages
        )
        engine = serving.read_folder(place, dtype="float32").engine(capacity, tensor=WAYS)
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

    seconds: dict[str, list[float]] = {"transformers": [], "shardlib": []}
    equal = theirs() == ours()
    for _ in range(asked.pairs):
        for which, run in (("transformers", theirs), ("shardlib", ours)):
            start = time.perf_counter()
            run()
            seconds[which].append(time.perf_counter() - start)
        print({which: round(times[-1], 3) for which, times in seconds.items()}, flush=True)
    ratios = [a / b for a, b in zip(seconds["transformers"], seconds["shardlib"], strict=True)]
    tokens = ROWS * MOST
    result = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": THREADS,
        "tensor": WAYS,
        "parameters": LLAMA.parameter_count(),
        "rows": ROWS,
        "tokens_equal": equal,
        "tokens_per_s": {
            which: tokens / statistics.median(times) for which, times in seconds.items()
        },
        "seconds": seconds,
        "throughput_over_transformers": statistics.median(ratios),
    }
    write(asked.out or RESULTS / "serving_peers.json", result)
    print(
        f"{result['throughput_over_transformers']:.2f} of the throughput of transformers, tokens"
        f" equal: {equal}"
    )


if __name__ == "__main__":
    main()
