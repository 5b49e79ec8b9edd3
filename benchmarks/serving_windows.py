"""Memory of a cache where layers with a window keep the window alone.

    python -m benchmarks serving_windows [--compile v6e:2x4] [--out FILE]

Gemma 3 27B (its published config.json: 62 layers, of which every sixth sees all tokens and the
others 1,024; 16 key heads of 128; bfloat16), for 16 requests of up to 32,768 tokens, pages of 16
tokens and steps of 2,064. Bytes are those of the arrays that an engine makes; only shapes are made.
"before" is one cache group that keeps all tokens of every layer. With `--compile` the compiler of
the machine makes the programs, which has to find as many bytes of arguments, to write all pages in
place and to gather no weights.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax

from benchmarks.environment import command_line, table, write
from shardlib import models
from shardlib.annotation.model import read
from shardlib.models import huggingface
from shardlib.models.config import TransformerConfig
from shardlib.serve.checks import verify_serving
from shardlib.serve.program import TracedForward, traced_forward
from shardlib.serve.requests import Capacity

#: huggingface.co/google/gemma-3-27b-it, text_config.
GEMMA = table("serving_windows")
LONGEST, SLOTS, CHUNK = 32768, 16, 2048
SIZES = Capacity(
    longest=LONGEST,
    slots=SLOTS,
    page=16,
    pages=SLOTS * LONGEST // 16,
    budget=SLOTS + CHUNK,
    chunk=256,
)


def forward(model: Any, tokens: jax.Array) -> jax.Array:
    """The forward pass."""
    return model(tokens)


def cache_bytes(traced: TracedForward, sizes: Capacity) -> int:
    """Bytes of all pages."""
    leaves = jax.tree.leaves(traced.new_pages(sizes.groups, sizes.page))
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in leaves)


def main() -> None:
    parser = command_line(__doc__, "serving_windows_jax-*.json")
    parser.add_argument("--compile", metavar="TOPOLOGY", help="with all its devices a layer")
    asked = parser.parse_args()
    config = huggingface.read(GEMMA, "gemma-3-27b")
    assert isinstance(config, TransformerConfig)
    config = replace(config, param_dtype="bfloat16")
    init = models.build(config)[0]
    traced = traced_forward(read(init), forward, longest=LONGEST)
    sizes = SIZES.within(traced.windows)
    before, after = cache_bytes(traced, SIZES), cache_bytes(traced, sizes)
    found: dict[str, Any] = {
        "model": "gemma-3-27b",
        "requests": SLOTS,
        "tokens_of_a_request": LONGEST,
        "tokens_of_a_step": sizes.most_tokens,
        "groups": [{"window": one.window, "pages": one.pages} for one in sizes.groups],
        "cache_bytes_before": before,
        "cache_bytes": after,
        "part": after / before,
    }
    print(f"{before / 2**30:.1f} GiB before, {after / 2**30:.1f} GiB now: {after / before:.3f}")
    if asked.compile:
        programs = verify_serving(init, forward, topology=asked.compile, tensor=8, capacity=sizes)
        found["compiled"] = [one.to_json() for one in programs]
        for one in programs:
            print(one)
    write(asked.out, found)
