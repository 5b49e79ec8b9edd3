"""A training step on a million tokens, compiled for a TPU slice.

    python -m benchmarks long_context [--model llama3-8b] [--topology v5p:8x8x8] [--seq 1048576] [--batch 8] [--pin WORD=VALUE ...] [--out FILE]

The plan is searched for and the step compiled by the real compiler, which needs no TPU (`pip
install 'shardlib[tpu]'`); predicted and compiled memory and collectives are stored.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import shardlib
from benchmarks.compiling import inputs
from benchmarks.environment import command_line, write
from shardlib import models


def value(text: str) -> Any:
    """A pinned value: JSON, or a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main() -> None:
    parser = command_line(__doc__, "long_context.json")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--topology", default="v5p:8x8x8")
    parser.add_argument("--seq", type=int, default=1 << 20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pin", action="append", default=[], metavar="WORD=VALUE")
    parser.add_argument("--plan-only", action="store_true", help="compile nothing")
    args = parser.parse_args()
    config = models.load(args.model)
    assert isinstance(config, models.TransformerConfig)
    config = replace(config, max_seq=max(args.seq, config.max_seq))
    given = inputs(config, args.batch, args.seq)
    pins = {word: value(text) for word, _, text in (one.partition("=") for one in args.pin)}
    start = time.perf_counter()
    plan = shardlib.plan(**given, topology=args.topology, pin=pins)
    seconds = time.perf_counter() - start
    print(plan.explain())
    if args.plan_only:
        return
    report = shardlib.verify(**given, topology=args.topology, plan=plan)
    print(report)
    asked = {name: getattr(args, name) for name in ("model", "topology", "batch", "seq")}
    result = {**asked, "pins": pins, "plan_seconds": seconds, "verify": report.to_json()}
    write(args.out, result)
