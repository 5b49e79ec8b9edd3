"""Does a training step on a million tokens compile for a TPU slice, and fit?

    python benchmarks/long_context.py [--model llama3-8b] [--topology v5p:8x8x8] [--seq 1048576] [--batch 8] [--pin WORD=VALUE ...] [--out FILE]

The plan is searched for and the step compiled by the real compiler, which needs no TPU (`pip
install 'shardlib[tpu]'`); predicted and compiled memory and collectives are stored.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import optax

import shardlib
from benchmarks.environment import RESULTS, command_line, write
from shardlib import models


def value(text: str) -> Any:
    """A pinned value: JSON, or a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main() -> None:
    """Plans, compiles and stores."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--topology", default="v5p:8x8x8")
    parser.add_argument("--seq", type=int, default=1 << 20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pin", action="append", default=[], metavar="WORD=VALUE")
    parser.add_argument("--plan-only", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "long_context.json")
    args = parser.parse_args()
    config = models.load(args.model)
    assert isinstance(config, models.TransformerConfig)
    config = replace(config, max_seq=max(args.seq, config.max_seq))
    init, loss = models.build(config)
    batch = models.example_batch(config, args.batch, args.seq)
    pins = {word: value(text) for word, _, text in (one.partition("=") for one in args.pin)}
    start = time.perf_counter()
    plan = shardlib.plan(init, loss, optax.adamw(1e-4), batch, topology=args.topology, pin=pins)
    seconds = time.perf_counter() - start
    print(plan.explain())
    if args.plan_only:
        return
    report = shardlib.verify(
        init, loss, optax.adamw(1e-4), batch, topology=args.topology, plan=plan
    )
    print(report)
    write(
        args.out,
        {
            "model": args.model,
            "topology": args.topology,
            "batch": args.batch,
            "seq": args.seq,
            "pins": pins,
            "plan_seconds": seconds,
            "verify": report.to_json(),
        },
    )


if __name__ == "__main__":
    main()
