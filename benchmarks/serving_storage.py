"""Perplexity of a trained model with weights and caches of eight bits.

    shardlib train --run demo --sample-bytes 0
    python -m benchmarks serving_storage demo

The demonstration of `shardlib serve`, which has learned Python's library byte by byte, scores
passages that it has not seen, of another language and of English: engines that store weights, keys
and values in several ways give the logarithm of each byte. Stored are the perplexity of a byte, how
far its logarithm moves from float32, and in how many places the likeliest byte is the same.
`float32` is also held to the forward pass without a cache.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import command_line, table, write
from shardlib import models, serve
from shardlib.annotation.model import read
from shardlib.serve.loading import TrainedRun, trained_run

LENGTH, PASSAGES = 120, 12
#: Texts of Debian that the run has not seen: English, and Perl.
TEXTS = ("/usr/share/common-licenses/Apache-2.0", "/usr/share/perl/5.36/CPAN.pm")
#: What matrices are multiplied in, and how weights and the cache are stored.
WAYS = table("serving_storage")


def passages(path: str) -> list[list[int]]:
    """Some passages of a file, as bytes."""
    data = Path(path).read_bytes()
    starts = np.linspace(0, len(data) - LENGTH, PASSAGES).astype(int)
    return [list(data[at : at + LENGTH]) for at in starts]


def scored(
    run: TrainedRun, texts: list[list[int]], dtype: str, weights: str, cache: str
) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of bytes, and the likeliest bytes, as an engine that stores so has them."""
    engine = serve.Engine(
        models.build(replace(run.model, compute_dtype=dtype))[0],
        lambda model, tokens: model(tokens),
        weights=run.weights,
        capacity=serve.Capacity(
            longest=128, slots=4, storage=serve.Storage(weights=weights, cache=cache)
        ),
    )
    asked = [
        serve.GenerationRequest(prompt=tuple(one), most=0, scored=True, top=1) for one in texts
    ]
    requests = [engine.add(one) for one in asked]
    engine.run()
    told = [one for request in requests for one in request.scores]
    likeliest = [one.likeliest[0][0] for one in told]
    return np.asarray([one.logprob for one in told]), np.asarray(likeliest)


def plainly(run: TrainedRun, texts: list[list[int]]) -> np.ndarray:
    """Logarithms of bytes by the forward pass without a cache, in float32."""
    model = read(models.build(replace(run.model, compute_dtype="float32"))[0])
    rows = jnp.asarray(texts)
    odds = jax.nn.log_softmax(model.rebuild(*run.weights)(rows)[:, :-1].astype(jnp.float32))
    return np.asarray(jnp.take_along_axis(odds, rows[:, 1:, None], -1)).ravel()


def main() -> None:
    parser = command_line(__doc__, "serving_storage.json")
    parser.add_argument("run", type=Path, help="folder of a run of `shardlib train`")
    args = parser.parse_args()
    run = trained_run(args.run)
    rows = list[dict[str, Any]]()
    for text in TEXTS:
        texts, exact = passages(text), None
        right = plainly(run, texts)
        for dtype, weights, cache in WAYS:
            logarithms, likeliest = scored(run, texts, dtype, weights, cache)
            exact = exact or (logarithms, likeliest)
            off = np.abs(logarithms - exact[0])
            rows.append(
                {
                    "text": text,
                    "dtype": dtype,
                    "weights": weights,
                    "cache": cache,
                    "bytes": len(logarithms),
                    "perplexity": float(np.exp(-logarithms.mean())),
                    "median_off": float(np.median(off)),
                    "p99_off": float(np.quantile(off, 0.99)),
                    "same_likeliest": float(np.mean(likeliest == exact[1])),
                    "off_forward_pass": float(np.abs(logarithms - right).max()),
                }
            )
            print(rows[-1], flush=True)
    write(args.out, {"benchmark": "serving_storage", "step": run.step, "ways": rows})
