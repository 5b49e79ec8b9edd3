"""Programs that serve large models, as compilers make them.

    python -m benchmarks serving_compiled

Programs for the next tokens of 16 requests a group of devices, and for 64 tokens of prompts beside
them, each over pages of 4,096 tokens, compiled ahead of time for machines that are not here
(`shardlib.verify_serving`); weights and cache in bfloat16, or in eight bits where a case says so.
Stored are predicted and compiled bytes of a device, collectives and findings, for each version of
JAX.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"


import shardlib
from benchmarks.environment import command_line, table, write
from shardlib import models, serve
from shardlib.models.config import TransformerConfig

#: (model, machine, groups of devices, devices of a group, pages of 64 tokens a group, weights,
#: cache)
CASES = table("serving_compiled")


def case(
    name: str, machine: str, data: int, tensor: int, pages: int, weights: str, cache: str
) -> list[dict[str, Any]]:
    """Both programs of one case."""
    config = models.load(name)
    assert isinstance(config, TransformerConfig)
    found = shardlib.verify_serving(
        models.build(replace(config, param_dtype="bfloat16"))[0],
        lambda model, tokens: model(tokens),
        topology=machine,
        tensor=tensor,
        data=data,
        capacity=serve.Capacity(
            longest=4096,
            slots=16,
            page=64,
            pages=pages,
            budget=64,
            storage=serve.Storage(weights=weights, cache=cache),
        ),
    )
    for one in found:
        print(one, flush=True)
    stored = {"stored_weights": weights, "stored_cache": cache}
    return [{"model": name, **stored, **one.to_json()} for one in found]


def _case(row: dict[str, Any]) -> str:
    names = ("model", "topology", "data", "tensor", "stored_weights", "stored_cache")
    return json.dumps([row.get(name, "model") for name in names])


def main() -> None:
    parser = command_line(__doc__, "serving_compiled_jax-*.json")
    parser.add_argument(
        "--only", default="", help="cases in whose JSON this text stands; others are kept"
    )
    args = parser.parse_args()
    rows = [row for one in CASES if args.only in json.dumps(one) for row in case(*one)]
    if args.only and args.out.exists():
        done = {_case(row) for row in rows}
        before = json.loads(args.out.read_text())["programs"]
        rows = [row for row in before if _case(row) not in done] + rows
    write(args.out, {"benchmark": "serving_compiled", "programs": rows})
